"""Open files of an export: multipart uploads, or buffers in memory.

Every window is sent as a part of one upload; the object appears when that is completed. A file of
one window, or of a client without multipart uploads, is buffered in memory until then.
"""

# Rule: an upload that may have begun is completed or aborted, even if its id was lost with the
#   response: then all uploads to its key are. Otherwise those of other exports are left alone.

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Iterator

import numpy as np

from asyncckpt.errors import CheckpointExistsError
from asyncckpt.log import logger
from asyncckpt.ports import Bytes
from asyncckpt.stores.objects.clients.client import Body, RequestError
from asyncckpt.stores.objects.datafile import ObjectDataFile, Sending, cut
from asyncckpt.stores.objects.requests.requests import Requests


class ExportFile(ObjectDataFile):
    """An open file of an export, which appears when the export is published.

    With `in_parts` it is sent in windows, else whole. With `new`, the object must not exist.
    Construction makes no request.
    """

    def __init__(
        self,
        sending: Sending,
        path: str,
        key: str,
        nbytes: int,
        window_nbytes: int,
        *,
        in_parts: bool,
        new: bool,
    ) -> None:
        super().__init__(sending, path)
        self._requests = sending.context.requests
        self._key = key
        self._nbytes = nbytes
        self._window_nbytes = window_nbytes
        self._in_parts = in_parts
        self._new = new
        self._missing = nbytes
        self._buffer = bytearray()
        self._upload: str | None = None
        self._id_lost = False
        self._tags: dict[int, str] = {}
        self._begin = asyncio.Lock()
        self._turn = asyncio.Condition()

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        if self._in_parts:
            return await self._send_part(offset, data)
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

    async def _send_part(self, offset: int, data: Bytes | bytearray) -> bool:
        number, inside = divmod(offset, self._window_nbytes)
        expected = min(self._window_nbytes, self._nbytes - offset)
        if inside or expected <= 0 or len(data) < expected:
            raise self._refused(
                f"expected windows of {self._window_nbytes} bytes in a file of {self._nbytes}, "
                f"found {len(data)} bytes at offset {offset}"
            )
        requests = self._requests
        body = cut(data, expected)
        try:
            async with self._begin:
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
            async with self._turn:
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
        body: bytes | bytearray = self._buffer
        self._buffer = bytearray()
        try:
            with creating(requests.location(key)):
                if self._upload is None:
                    await put_whole(requests, key, body, new=self._new)
                else:
                    tags = [self._tags[number] for number in sorted(self._tags)]
                    await requests.complete_parts(key, self._upload, tags, create=self._new)
                    self._upload = None
        except RequestError as error:
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


async def put_whole(requests: Requests, key: str, body: Body, *, new: bool) -> None:
    """Store an object by one request; with `new`, only if there is none. Raises `RequestError`."""
    if not new:
        await requests.replace(key, body)
    elif not await requests.create(key, body):
        # An earlier try, whose response was lost, may have created it.
        if await requests.read(key, max_nbytes=len(body)) != body:
            raise RequestError("exists", "another object was created first", status=412)


@contextlib.contextmanager
def creating(location: str) -> Iterator[None]:
    """Convert the error of a creation in the block that found another object."""
    try:
        yield
    except RequestError as error:
        if error.kind != "exists":
            raise
        raise CheckpointExistsError(
            f"{location}: an object was created here meanwhile; pass overwrite=True to replace it",
            location=location,
        ) from error
