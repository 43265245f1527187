"""Files for other programs, as objects under their final names: one file, or a set.

An object appears completely or not at all, so a single file is atomic. The files of a set appear
one after the other once all are uploaded, and last the index, without which readers ignore the set.
"""

# Rule 1: nothing is visible before `publish_files`: files are sent as parts of open uploads, or
#   buffered in memory if they are short or the client has no multipart uploads, up to
#   `COLLECTED_MAX_NBYTES` in all.
# Rule 2: an object is replaced only with `overwrite`, and only by one of its kind. Without it, each
#   object (also by completing an upload) is created conditionally, if the store supports that.
# Rule 3: an abort ends uploads and deletes nothing: other programs use these names too.

from __future__ import annotations

from asyncckpt.errors import CheckpointExistsError, UsageError
from asyncckpt.flow.shield import cleaned_up, to_completion, together
from asyncckpt.options import MIB
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.local.export import IRREPLACEABLE, REPLACEABLE_SUFFIXES
from asyncckpt.stores.objects.clients.client import Body, RequestError, unless_missing
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.datafile import ABORT_S, Sending
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.objects.uploads import ExportFile, creating, put_whole
from asyncckpt.stores.paths import check_file

COLLECTED_MAX_NBYTES = 512 * MIB
"""Maximum size of all buffered files together, which no byte budget covers."""

ENTRIES_MAX = 100_000
"""Maximum number of entries in a directory that a set may replace."""


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
        self._index: dict[str, bytes] = {}

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
        key = self._name if path == self._name else join(self._name, path)
        in_parts = self._in_parts(path, nbytes, window_nbytes)
        file = ExportFile(
            self._sending, path, key, nbytes, window_nbytes, in_parts=in_parts, new=self._new
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
        self._index[path] = await self._context.owned(*blocks)

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
            with reported("writing the index", self.location, stage="commit"):
                for path, data in self._index.items():
                    key = join(self._name, path)
                    with creating(self._requests.location(key)):
                        await put_whole(self._requests, key, data, new=self._new)
                await self._requests.delete(stale)
        except BaseException as error:
            await cleaned_up(self.abort(), error)
            raise
        self._sending.ended = True

    async def _replaced(self, single: bool) -> list[str]:
        """Return the keys of the replaced set, to be deleted."""
        with reported("looking at what exists there", self.location, stage="commit"):
            below = await self._requests.list(self._name, recursive=False, limit=ENTRIES_MAX)
            is_object = False
            with unless_missing():
                await self._requests.size(self._name)
                is_object = True
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
