"""Files of an export while they are written: multipart uploads, or memory.

Every window is sent as a part of one upload; the object appears when that is completed. Where the
client knows no multipart uploads, or the windows are not parts that it takes, the whole file is
held, up to `COLLECTED_MAX_NBYTES`.
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
        key: of the object.
        nbytes: its length.
        window_nbytes: length of its parts; None: it is held whole.
        new: nothing may be replaced.
    """

    def __init__(
        self,
        sending: Sending,
        path: str,
        key: str,
        nbytes: int,
        window_nbytes: int | None,
        *,
        new: bool,
    ) -> None:
        super().__init__(sending, path)
        self._requests = sending.context.requests
        self._key = key
        self._nbytes = nbytes
        self._window_nbytes = window_nbytes
        self._new = new
        self._missing = nbytes
        self._buffer = bytearray()
        self._upload: str | None = None
        self._doubled = False
        self._tags: dict[int, str] = {}
        self._begin = asyncio.Lock()
        self._turn = asyncio.Condition()

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        if self._window_nbytes is not None:
            return await self._send_part(offset, data, self._window_nbytes)
        nbytes = min(len(data), self._nbytes - offset)
        if nbytes <= 0:
            raise self._refused(f"{len(data)} bytes at offset {offset} are past the end")
        run = self._context.workers.run
        async with self._begin:
            if not self._buffer:
                self._buffer = await run(bytearray, self._nbytes)
        target = np.frombuffer(self._buffer, np.uint8)[offset : offset + nbytes]
        await run(np.copyto, target, np.frombuffer(data, np.uint8)[:nbytes])
        self._missing -= nbytes
        return True

    async def _send_part(self, offset: int, data: Bytes | bytearray, window_nbytes: int) -> bool:
        number, inside = divmod(offset, window_nbytes)
        expected = min(window_nbytes, self._nbytes - offset)
        if inside or expected <= 0 or len(data) < expected:
            raise self._refused(
                f"expected windows of {window_nbytes} bytes in a file of {self._nbytes}, "
                f"found {len(data)} bytes at offset {offset}"
            )
        requests = self._requests
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

    async def _seal(self, nbytes: int) -> None:
        if nbytes != self._nbytes or self._missing:
            raise self._refused(
                f"{self._nbytes} bytes were announced, {self._missing} were not written, and "
                f"{nbytes} are sealed"
            )

    async def publish(self) -> None:
        """Make the object appear.

        Raises:
            CheckpointExistsError: it must be new, and another object was created meanwhile.
            StoreError: it could not be written.
        """
        try:
            await self._publish()
        except RequestError as error:
            if self._new and error.kind == "exists":
                location = self._requests.location(self._key)
                raise CheckpointExistsError(
                    f"{location}: an object was created here meanwhile; pass overwrite=True to "
                    "replace it",
                    location=location,
                ) from error
            raise self._sending.failed(f"writing {self._nbytes} bytes", self._key, error) from error

    async def _publish(self) -> None:
        requests, key = self._requests, self._key
        if self._upload is not None:
            tags = [self._tags[number] for number in sorted(self._tags)]
            await requests.complete_parts(key, self._upload, tags, create=self._new)
            self._upload = None
            if self._doubled:
                await abort_pending(requests, [key])
            return
        body: bytes | bytearray = self._buffer
        self._buffer = bytearray()
        if not self._new:
            await requests.replace(key, body)
        elif not await requests.create(key, body):
            # Perhaps created by an earlier try of ours, whose response was lost.
            if await requests.read(key, max_nbytes=len(body)) != body:
                raise RequestError("exists", "another object was created first", status=412)

    async def abort(self) -> None:
        """Abort the upload, if one was begun. Raises `RequestError`."""
        if self._upload is not None:
            await self._requests.abort_parts(self._key, self._upload)


def open_export_file(
    sending: Sending, path: str, key: str, nbytes: int, window_nbytes: int, *, new: bool
) -> ExportFile:
    """Open a file that is sent in parts if the client can do that, else whole; no request is made.

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
        return ExportFile(sending, path, key, nbytes, window_nbytes, new=new)
    most = min(COLLECTED_MAX_NBYTES, traits.put_max_nbytes)
    if nbytes <= most:
        return ExportFile(sending, path, key, nbytes, None, new=new)
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
