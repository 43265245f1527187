"""Files of an export while they are written: multipart uploads, or memory.

A `PartsFile` sends every window as a part of one upload; the object appears when that is completed.
Where the client knows no multipart uploads, or the windows are not parts that it takes, a
`CollectedFile` holds the whole file, up to `COLLECTED_MAX_NBYTES`.
"""

# Rule: from the moment that an upload may have begun until it was completed or aborted, the export
#   knows of it, also when its id was lost with the response.

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Collection, Iterable

import numpy as np

from asyncckpt.errors import CheckpointExistsError, UsageError
from asyncckpt.options import MIB
from asyncckpt.ports import Bytes
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.datafile import ObjectDataFile, Sending, cut
from asyncckpt.stores.objects.requests.requests import Requests

COLLECTED_MAX_NBYTES = 512 * MIB
"""Longest file that is held whole, for clients that cannot send parts."""


class ExportFile(ObjectDataFile):
    """An open file of an export, which appears when the export is published.

    Args:
        sending: of the export.
        path: its path.
        key: key of the object.
        nbytes: its length.
    """

    def __init__(self, sending: Sending, path: str, key: str, nbytes: int) -> None:
        super().__init__(sending, path)
        self._key = key
        self._nbytes = nbytes
        self._missing = nbytes

    async def _seal(self, nbytes: int) -> None:
        if nbytes != self._nbytes or self._missing:
            raise self._refused(
                f"{self._nbytes} bytes were announced, {self._missing} were not written, and "
                f"{nbytes} are sealed"
            )

    async def publish(self, *, new: bool) -> None:
        """Make the object appear.

        Raises:
            CheckpointExistsError: with `new`, and another object was created meanwhile.
            StoreError: it could not be written.
        """
        try:
            await self._publish(new)
        except RequestError as error:
            if new and error.kind == "exists":
                location = self._context.requests.location(self._key)
                raise CheckpointExistsError(
                    f"{location}: an object was created here meanwhile; pass overwrite=True to "
                    "replace it",
                    location=location,
                ) from error
            raise self._sending.failed(f"writing {self._nbytes} bytes", self._key, error) from error

    async def _publish(self, new: bool) -> None:
        raise NotImplementedError

    async def abort(self) -> None:
        """Abort what was begun. Raises `RequestError`."""


class PartsFile(ExportFile):
    """A file whose windows are the parts of one multipart upload."""

    def __init__(
        self, sending: Sending, path: str, key: str, nbytes: int, window_nbytes: int, *, new: bool
    ) -> None:
        super().__init__(sending, path, key, nbytes)
        self._window_nbytes = window_nbytes
        self._new = new
        self._begin = asyncio.Lock()
        self._upload: str | None = None
        self._doubled = False
        self._tags: dict[int, str] = {}
        self._turn = asyncio.Condition()

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        number, inside = divmod(offset, self._window_nbytes)
        expected = min(self._window_nbytes, self._nbytes - offset)
        if inside or expected <= 0 or len(data) < expected:
            raise self._refused(
                f"expected windows of {self._window_nbytes} bytes in a file of {self._nbytes}, "
                f"found {len(data)} bytes at offset {offset}"
            )
        requests = self._context.requests
        body = cut(data, expected)
        try:
            async with self._begin:
                if self._upload is None:
                    self._sending.check()
                    self._sending.keys.add(self._key)
                    self._upload, self._doubled = await requests.begin_parts(
                        self._key, create=self._new
                    )
            async with self._turn:
                if not requests.traits.parallel_parts:
                    # Windows are written in the order of the plan, so that the next part is
                    # always among those in flight.
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

    async def _publish(self, new: bool) -> None:
        if self._upload is None:  # an empty file
            await _put(self, b"", new)
            return
        tags = [self._tags[number] for number in sorted(self._tags)]
        await self._context.requests.complete_parts(self._key, self._upload, tags, create=new)
        self._upload = None
        if self._doubled:
            await abort_pending(self._context.requests, [self._key])

    async def abort(self) -> None:
        if self._upload is not None:
            await self._context.requests.abort_parts(self._key, self._upload)


class CollectedFile(ExportFile):
    """A file that is held whole; its windows come in any order."""

    def __init__(self, sending: Sending, path: str, key: str, nbytes: int) -> None:
        super().__init__(sending, path, key, nbytes)
        self._buffer = bytearray()
        self._lock = asyncio.Lock()

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        nbytes = min(len(data), self._nbytes - offset)
        if nbytes <= 0:
            raise self._refused(f"{len(data)} bytes at offset {offset} are past the end")
        run = self._context.workers.run
        async with self._lock:
            if not self._buffer:
                self._buffer = await run(bytearray, self._nbytes)
        await run(_place, self._buffer, offset, np.frombuffer(data, np.uint8)[:nbytes])
        self._missing -= nbytes
        return True

    async def _publish(self, new: bool) -> None:
        await _put(self, self._buffer, new)
        self._buffer = bytearray()


async def _put(file: ExportFile, body: bytearray | bytes, new: bool) -> None:
    """Store a file that is one request; raises `RequestError`, `exists` if it must be new."""
    requests, key = file._context.requests, file._key
    if not new:
        await requests.replace(key, body)
    elif not await requests.create(key, body):
        # Perhaps created by an earlier try of ours, whose response was lost.
        if await requests.read(key, max_nbytes=len(body)) != body:
            raise RequestError("exists", "another object was created first", status=412)


def open_export_file(
    sending: Sending, path: str, key: str, nbytes: int, window_nbytes: int, *, new: bool
) -> ExportFile:
    """Open a file of the kind that the client can send; no request is made.

    Raises:
        UsageError: the client can send neither its windows as parts, nor all of it at once.
    """
    traits = sending.context.requests.traits
    if nbytes > window_nbytes and (
        traits.multipart
        and window_nbytes >= traits.part_min_nbytes
        and window_nbytes % traits.part_multiple_nbytes == 0
        and -(-nbytes // window_nbytes) <= traits.part_max_count
    ):
        return PartsFile(sending, path, key, nbytes, window_nbytes, new=new)
    most = min(COLLECTED_MAX_NBYTES, traits.put_max_nbytes)
    if nbytes <= most:
        return CollectedFile(sending, path, key, nbytes)
    location = f"{sending.location}/{path}"
    raise UsageError(
        f"{location}: {traits.name} cannot send {nbytes} bytes in parts of {window_nbytes}; export "
        f"files of at most {most} (max_file_nbytes)",
        location=location,
        expected=most,
        found=nbytes,
    )


async def abort_uploads(sending: Sending, files: Iterable[ExportFile]) -> None:
    """Abort all uploads of an export; one whose abort is refused keeps no other one open.

    Raises:
        RequestError: the first that could not be aborted, though it may be gone by now.
    """
    failed: list[RequestError] = []
    try:
        for file in files:
            try:
                await file.abort()
            except RequestError as error:
                failed.append(error)
        await abort_pending(sending.context.requests, sending.keys)
        if failed:
            raise failed[0]
    finally:
        failed.clear()  # a cycle of error and frame would stay until it is collected


async def abort_pending(requests: Requests, keys: Collection[str]) -> None:
    """Abort every upload to these keys, also one whose id was lost with its response.

    Raises:
        RequestError: they could not be listed or aborted.
    """
    for prefix in sorted({posixpath.dirname(key) for key in keys}):
        for pending in await requests.pending_parts(prefix):
            if pending.key in keys:
                await requests.abort_parts(pending.key, pending.upload)


def _place(buffer: bytearray, offset: int, data: Bytes) -> None:
    np.copyto(np.frombuffer(buffer, np.uint8)[offset : offset + data.size], data)
