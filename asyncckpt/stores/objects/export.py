"""Files for other programs, as objects under their final names: one file, or a set.

An object appears completely or not at all, so a single file is atomic. The files of a set appear
one after the other once all are uploaded, and last the index, without which readers ignore the set.

Every window of a file is sent as a part of one upload; the object appears when that is completed. A
file of one window, or of a client without multipart uploads, is buffered in memory until then.
"""

# Rule 1: nothing is visible before `publish_files`: files are sent as parts of open uploads, or
#   buffered in memory if they are short or the client has no multipart uploads, up to
#   `COLLECTED_MAX_NBYTES` in all.
# Rule 2: an object is replaced only with `overwrite`, and only by one of its kind. Without it, each
#   object (also by completing an upload) is created conditionally, if the store supports that.
# Rule 3: an abort ends uploads and deletes nothing: other programs use these names too.
# Rule 4: an upload that may have begun is completed or aborted, even if its id was lost with the
#   response: then all uploads to its key are. Otherwise those of other exports are left alone.

from __future__ import annotations

import asyncio
import posixpath

import numpy as np

from asyncckpt.errors import CheckpointExistsError, UsageError
from asyncckpt.flow.shield import cleaned_up, to_completion, together
from asyncckpt.log import logger
from asyncckpt.options import MIB
from asyncckpt.ports import RECORD_NAME, Bytes
from asyncckpt.stores.local.export import IRREPLACEABLE, REPLACEABLE_SUFFIXES
from asyncckpt.stores.objects.clients.client import Body, RequestError
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.datafile import ABORT_S, ObjectDataFile, Sending, cut
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.paths import check_file

COLLECTED_MAX_NBYTES = 512 * MIB
"""Maximum size of all buffered files together, which no byte budget covers."""

ENTRIES_MAX = 100_000
"""Maximum number of entries in a directory that a set may replace."""


class ExportFile(ObjectDataFile):
    """An open file of an export, which appears when the export is published.

    With `in_parts` it is sent in windows, else whole; `content` is what it contains if that is
    known. With `new`, the object must not exist. Construction makes no request.
    """

    def __init__(
        self,
        sending: Sending,
        path: str,
        key: str,
        nbytes: int,
        window_nbytes: int,
        *,
        new: bool,
        in_parts: bool = False,
        content: bytes = b"",
    ) -> None:
        super().__init__(sending, path)
        self._requests = sending.context.requests
        self._key = key
        self._nbytes = nbytes
        self._window_nbytes = window_nbytes
        self._in_parts = in_parts
        self._new = new
        self._missing = nbytes
        self._buffer: bytes | bytearray = content
        self._upload: str | None = None
        self._id_lost = False
        self._tags: dict[int, str] = {}
        self._turn = asyncio.Condition()

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        if self._in_parts:
            return await self._send_part(offset, data)
        nbytes = min(len(data), self._nbytes - offset)
        if nbytes <= 0:
            raise self._refused(f"{len(data)} bytes at offset {offset} are past the end")
        run = self._context.workers.run
        async with self._turn:
            if not self._buffer:
                self._buffer = await run(bytearray, self._nbytes)
        target = np.frombuffer(self._buffer, np.uint8)[offset : offset + nbytes]
        await run(np.copyto, target, np.frombuffer(data, np.uint8)[:nbytes])
        self._missing -= nbytes
        return True

    async def _send_part(self, offset: int, data: Bytes | bytearray) -> bool:
        number, inside = divmod(offset, self._window_nbytes)
        expected = min(self._window_nbytes, self._nbytes - offset)
        if inside or expected <= 0 or len(data) < expected:
            raise self._refused(
                f"expected windows of {self._window_nbytes} bytes in a file of {self._nbytes}, "
                f"found {len(data)} bytes at offset {offset}"
            )
        requests, body = self._requests, cut(data, expected)
        try:
            async with self._turn:
                if self._upload is None:
                    self._sending.check()
                    try:
                        self._upload, doubled = await requests.begin_parts(
                            self._key, create=self._new
                        )
                        self._id_lost |= doubled
                    except BaseException:
                        self._id_lost = True
                        raise
                if not requests.traits.parallel_parts:
                    # Windows are written in plan order, so an earlier part always finishes.
                    await self._turn.wait_for(lambda: len(self._tags) == number)
            tag, reusable = await requests.put_part(self._key, self._upload, number, offset, body)
            async with self._turn:
                self._tags[number] = tag
                self._turn.notify_all()
        except RequestError as error:
            raise self._sending.failed(
                f"writing {len(body)} bytes at offset {offset}", self._key, error
            ) from error
        self._missing -= expected
        return reusable

    async def _seal(self, nbytes: int) -> None:
        if nbytes != self._nbytes or self._missing:
            raise self._refused(
                f"{self._nbytes} bytes were announced, {self._missing} were not written, and "
                f"{nbytes} are sealed"
            )

    async def publish(self) -> None:
        """Make the object appear.

        Raises:
            CheckpointExistsError: it must be new, but another object was created meanwhile.
            StoreError: it could not be written.
        """
        requests, key = self._requests, self._key
        body, self._buffer = self._buffer, b""
        try:
            if self._upload is not None:
                tags = [self._tags[number] for number in sorted(self._tags)]
                await requests.complete_parts(key, self._upload, tags, create=self._new)
                self._upload = None
            elif not self._new:
                await requests.replace(key, body)
            elif not await requests.create(key, body):
                # An earlier try, whose response was lost, may have created it.
                if await requests.read(key, max_nbytes=len(body)) != body:
                    raise RequestError("exists", "another object was created first", status=412)
        except RequestError as error:
            if error.kind == "exists":
                location = requests.location(key)
                raise CheckpointExistsError(
                    f"{location}: an object was created here meanwhile; pass overwrite=True to "
                    "replace it",
                    location=location,
                ) from error
            raise self._sending.failed(f"writing {self._nbytes} bytes", key, error) from error
        try:
            await self.abort()
        except RequestError as error:  # which fails no export whose object has appeared
            logger.warning(
                "%s: the object is complete, but another upload of it may be open, and could not "
                "be aborted: %s; the bucket's lifecycle rule removes it",
                requests.location(key),
                error,
            )

    async def abort(self) -> None:
        """Abort the uploads that were begun and not completed. Raises `RequestError`."""
        requests, key = self._requests, self._key
        if self._upload is not None:
            await requests.abort_parts(key, self._upload)
            self._upload = None
        if self._id_lost:
            for pending in await requests.pending_parts(posixpath.dirname(key)) or ():
                if pending.key == key:
                    await requests.abort_parts(key, pending.upload)


class ObjectExport:
    """An attempt that ends in plain objects. Made by `ObjectStore.begin_export`.

    Args:
        name: the object to publish, or the prefix of a set.
        overwrite: replace an object or a set of the same kind.
        conditional: the store creates objects conditionally.
    """

    def __init__(self, context: Context, name: str, *, overwrite: bool, conditional: bool) -> None:
        self.location = context.requests.location(name)
        self._context = context
        self._requests = context.requests
        self._name = name
        self._overwrite = overwrite
        self._new = conditional and not overwrite
        self._sending = Sending(context, name)
        self._files: list[ExportFile] = []
        self._collected_nbytes = 0
        self._index: dict[str, ExportFile] = {}

    def __repr__(self) -> str:
        return f"ObjectExport({self.location!r})"

    async def create(self, path: str, *, nbytes: int, window_nbytes: int) -> ExportFile:
        """Open a new file for writing, in windows.

        A file whose path is the export's name becomes that object itself, the only one.

        Raises:
            UsageError: the path is refused, or the file is too long.
        """
        self._sending.check()
        check_file(path, self.location)
        in_parts = self._in_parts(path, nbytes, window_nbytes)
        key = self._name if path == self._name else join(self._name, path)
        file = ExportFile(
            self._sending, path, key, nbytes, window_nbytes, new=self._new, in_parts=in_parts
        )
        self._files.append(file)
        return file

    def _in_parts(self, path: str, nbytes: int, window_nbytes: int) -> bool:
        """Return whether to send a new file in parts, else count it as collected."""
        traits = self._requests.traits
        collected = self._collected_nbytes + nbytes
        if traits.multipart and (nbytes > window_nbytes or collected > COLLECTED_MAX_NBYTES):
            if nbytes > (limit := traits.part_max_count * window_nbytes):
                why = (
                    f"{traits.name} sends files of at most {limit} bytes, and this one has "
                    f"{nbytes}; export smaller ones (max_file_nbytes)"
                )
                raise self._too_long(path, why, limit, nbytes)
            return True
        if collected > COLLECTED_MAX_NBYTES:
            scheme = self.location.partition("://")[0]
            advice = {"s3": "use s3fs, or ", "gs": "use gcsfs, or "}.get(scheme, "")
            why = (
                f"{traits.name} cannot send files in parts, so all of an export are collected in "
                f"memory, at most {COLLECTED_MAX_NBYTES} bytes, and with this one they have "
                f"{collected}; {advice}export to a directory and copy it"
            )
            raise self._too_long(path, why, COLLECTED_MAX_NBYTES, collected)
        self._collected_nbytes = collected
        return False

    def _too_long(self, path: str, why: str, limit: int, found: int) -> UsageError:
        location = self.location if path == self._name else f"{self.location}/{path}"
        return UsageError(f"{location}: {why}", location=location, expected=limit, found=found)

    async def put(self, path: str, *blocks: Body, in_record: bool = False) -> None:
        """Keep a small file until it is published, after all others."""
        self._sending.check()
        check_file(path, self.location)
        content = await self._context.owned(*blocks)
        nbytes, key = len(content), join(self._name, path)
        self._index[path] = ExportFile(
            self._sending, path, key, nbytes, nbytes, new=self._new, content=content
        )

    async def publish_files(self, path: str = "") -> None:
        """Publish the file `path`, or with ``""`` all files, under their names, durably.

        Leaves nothing if it fails before the first object has appeared.

        Cancellation: shielded; the outcome is returned or raised instead.

        Raises:
            CheckpointExistsError: an existing object or directory may not be replaced.
            StoreError: names the object.
        """
        single = path == self._name
        if [file.path for file in self._files if (file.path == self._name) != single]:
            raise UsageError(
                f"{self.location}: create and publish a single file under the export's name, and "
                "the files of a set under other names",
                location=self.location,
                found=path,
            )
        await to_completion(self._conclude(single))

    async def _conclude(self, single: bool) -> None:
        try:
            self._sending.check_sealed(self._files)
            stale = await self._replaced(single)
            await together(file.publish() for file in self._files)
            for index in self._index.values():
                await index.publish()
            with reported("removing replaced files", self.location, stage="commit"):
                await self._requests.delete(stale)
        except BaseException as error:
            await cleaned_up(self.abort(), error)
            raise
        self._sending.ended = True

    async def _replaced(self, single: bool) -> list[str]:
        """Return the keys of the replaced set, to be deleted."""
        with reported("looking at what exists there", self.location, stage="commit"):
            below = await self._requests.list(self._name, recursive=False, limit=ENTRIES_MAX)
            is_object = await self._requests.exists(self._name)
        if single:
            if below:
                raise self._exists("a directory exists here")
            if is_object and not self._overwrite:
                raise self._exists("an object exists here already; pass overwrite=True")
            return []
        if is_object:
            raise self._exists(IRREPLACEABLE)
        if not below:
            return []
        if not self._overwrite:
            raise self._exists("a directory exists here already; pass overwrite=True to replace it")
        tensors = [
            entry.key
            for entry in below
            if not entry.is_prefix and entry.key.endswith(REPLACEABLE_SUFFIXES)
        ]
        if not tensors or any(entry.key == join(self._name, RECORD_NAME) for entry in below):
            raise self._exists(IRREPLACEABLE)
        new = {join(self._name, name) for name in (*(f.path for f in self._files), *self._index)}
        return [key for key in tensors if key not in new]

    def _exists(self, what: str) -> CheckpointExistsError:
        advice = "" if "overwrite" in what else "; remove it or choose another name"
        return CheckpointExistsError(f"{self.location}: {what}{advice}", location=self.location)

    async def abort(self) -> None:
        """Abort every open upload, unless the export has ended. Raises `StoreError`.

        Cancellation: finishes, then raises.
        """
        await self._sending.end(
            self._abort, "aborting uploads", "the bucket's lifecycle rule removes them"
        )

    async def _abort(self) -> None:
        refused: list[ExportFile] = []
        async with self._requests.cleaning_up(ABORT_S):
            for file in self._files:
                try:
                    await file.abort()
                except RequestError:
                    refused.append(file)  # abort the other uploads first
            for file in refused:
                await file.abort()
