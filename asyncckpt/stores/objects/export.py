"""Files that other programs read, as objects under their final names: one file, or a set.

An object appears whole or not at all, so that one file needs nothing else. Of a set, the files
appear one after the other when all of them are uploaded, and the index last, without which readers
do not see a set.
"""

# Rule 1: nothing is visible before `publish_files`: files are sent in parts of uploads that are not
#   completed, or are kept in memory where they are short or the client has no such uploads.
# Rule 2: what stands at a name is replaced only with `overwrite`, and only by what is of its kind.
# Rule 3: an abort ends uploads and deletes nothing: these names are not ours alone.

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from asyncckpt.errors import AsyncCheckpointError, CheckpointExistsError, StoreError, UsageError
from asyncckpt.flow.shield import leading_error, to_completion, uninterrupted
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import Bytes
from asyncckpt.stores.export import REPLACEABLE_SUFFIXES
from asyncckpt.stores.layout import path_parts
from asyncckpt.stores.objects.attempt import ABORT_S
from asyncckpt.stores.objects.client import Listed, RequestError
from asyncckpt.stores.objects.context import Context, owned
from asyncckpt.stores.objects.datafile import CollectedFile, ObjectDataFile, PartsFile, open_file
from asyncckpt.stores.objects.failures import reported, store_error
from asyncckpt.stores.objects.layout import RECORD, join
from asyncckpt.stores.objects.uploads import Sending, abort_uploads

ENTRIES_MAX = 100_000
"""Entries of a directory that a set may replace."""


class _Sending(Sending):
    def key(self, path: str) -> str:
        """The key of a path: a file that has the name of the export is the object itself."""
        return self.prefix if path == self.prefix else join(self.prefix, path)


class ExportFile:
    """An open file of an export: its windows, until the export is published.

    Attributes:
        path: its path.
        sealed: whether all of it was written.
    """

    def __init__(self, path: str, file: PartsFile | CollectedFile) -> None:
        self.path = path
        self.sealed = False
        self._file = file

    async def write(self, offset: int, data: Bytes | bytearray) -> bool:
        """As `ObjectDataFile.write`; each window of a slot once, in any order."""
        return await self._file.write(offset, data)

    async def seal(self, nbytes: int) -> None:
        """All of the file was written; it appears when the export is published."""
        self._file.check_complete(nbytes)
        self.sealed = True

    async def complete(self, *, new: bool) -> None:
        """The object is there.

        Raises:
            CheckpointExistsError: with `new`, and something else was faster.
            StoreError: it could not be written.
        """
        if isinstance(self._file, PartsFile):
            await self._file.complete()
        else:
            await self._file.create(new=new)


class ObjectExport:
    """An attempt that ends in plain objects. Made by `ObjectStore.begin_export`.

    Args:
        context: of the store.
        name: what is published: an object, or the prefix of a set.
        overwrite: replace what is of the same kind.
        conditional: the store creates objects conditionally.
    """

    def __init__(self, context: Context, name: str, *, overwrite: bool, conditional: bool) -> None:
        self.location = context.requests.location(name)
        self._context = context
        self._requests = context.requests
        self._name = name
        self._overwrite = overwrite
        self._conditional = conditional
        # What is there and as long may be what it replaces.
        self._sending = _Sending(context, name, exclusive=False)
        self._files: list[ExportFile] = []
        self._index: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"ObjectExport({self.location!r})"

    async def create(
        self, path: str, *, nbytes: int, window_nbytes: int | None = None
    ) -> ExportFile:
        """A new file is open for writing, in windows of a slot (or `window_nbytes`).

        One whose path is the export's name becomes that object itself, as the only one.

        Raises:
            UsageError: the path leaves the directory, or the client cannot send such a file.
        """
        self._sending.check()
        self._check_path(path)
        window = SLOT_NBYTES if window_nbytes is None else window_nbytes
        kept: ObjectDataFile = open_file(self._sending, path, nbytes, window)
        if not isinstance(kept, PartsFile):
            kept = CollectedFile(self._sending, path, nbytes)
        file = ExportFile(path, kept)
        self._files.append(file)
        return file

    async def put(self, path: str, data: bytes | memoryview) -> None:
        """A small file appears with this content, after all others."""
        self._sending.check()
        self._check_path(path)
        self._index[path] = await owned(self._context, data)

    def _check_path(self, path: str) -> None:
        if path_parts(path) is None or path == RECORD:
            raise UsageError(
                f"{path!r} cannot be a file of an export: pass a relative path without '..' "
                f"that is not {RECORD!r}",
                location=self.location,
                found=path,
            )

    async def publish_files(self, path: str = "") -> None:
        """The file `path`, or with ``""`` all files, stand under their names, durably.

        If it fails before the first object has appeared, nothing of the export is left.

        Cancellation: shielded; the outcome is awaited, and returned or raised instead.

        Raises:
            CheckpointExistsError: something stands there that may not be replaced.
            StoreError: names the object.
        """
        single = path == self._name
        if [file.path for file in self._files if (file.path == self._name) != single]:
            raise UsageError(
                f"{self.location}: one file is created and published under the export's name, and "
                "a set under other names",
                location=self.location,
                found=path,
            )
        await to_completion(self._conclude(single))

    async def _conclude(self, single: bool) -> None:
        try:
            self._sending.check()
            for file in self._files:
                if not file.sealed:
                    raise UsageError(f"{file.path}: the file is not sealed", location=self.location)
            stale = await self._replaced(single)
            try:
                async with asyncio.TaskGroup() as group:
                    for file in self._files:
                        group.create_task(
                            file.complete(new=self._conditional and not self._overwrite)
                        )
            except BaseExceptionGroup as errors:
                raise leading_error(errors) from None
            with reported("writing the index", self.location, stage="commit"):
                for path, data in self._index.items():
                    await self._requests.replace(join(self._name, path), data)
                await self._requests.delete(stale)
        except BaseException as error:
            try:
                await self.abort()
            except AsyncCheckpointError as failure:
                error.add_note(f"cleaning up failed too: {failure}")
            raise
        self._sending.ended = True

    async def _replaced(self, single: bool) -> list[str]:
        """Keys of a set that goes, because this one takes its place."""
        with reported("looking at what stands there", self.location, stage="commit"):
            below = await self._requests.list(self._name, recursive=False, limit=ENTRIES_MAX)
            is_object = await self._is_object()
        if single:
            if below:
                raise self._exists("a directory stands here")
            if is_object and not self._overwrite:
                raise self._exists("something stands here already; pass overwrite=True")
            return []
        if is_object:
            raise self._exists("an object that is no directory of tensors stands here")
        if not below:
            return []
        if not self._overwrite:
            raise self._exists("something stands here already; pass overwrite=True to replace it")
        tensors = list(_tensors(below))
        if not tensors or any(entry.key == join(self._name, RECORD) for entry in below):
            raise self._exists("something that is no directory of tensors stands here")
        new = {join(self._name, name) for name in (*(f.path for f in self._files), *self._index)}
        return [key for key in tensors if key not in new]

    async def _is_object(self) -> bool:
        try:
            await self._requests.size(self._name)
        except RequestError as error:
            if error.kind != "missing":
                raise
            return False
        return True

    def _exists(self, what: str) -> CheckpointExistsError:
        advice = "" if "overwrite" in what else "; remove it or choose another name"
        return CheckpointExistsError(f"{self.location}: {what}{advice}", location=self.location)

    async def abort(self) -> None:
        """No upload of the export is open; nothing happens if it has ended.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: an upload could not be aborted.
        """
        if self._sending.ended:
            return
        self._sending.ended = True
        await uninterrupted(self._abort())

    async def _abort(self) -> None:
        try:
            async with asyncio.timeout(ABORT_S):
                await abort_uploads(self._sending)
        except TimeoutError:
            raise StoreError(
                f"{self.location}: aborting its uploads did not end within {ABORT_S:.0f} s; the "
                "bucket's lifecycle rule removes them",
                location=self.location,
                retryable=True,
            ) from None
        except RequestError as error:
            raise store_error("aborting uploads", self.location, error) from error


def _tensors(below: Iterable[Listed]) -> Iterable[str]:
    return (e.key for e in below if not e.is_prefix and e.key.endswith(REPLACEABLE_SUFFIXES))
