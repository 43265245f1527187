"""Data files of an attempt on an object store: one request, or a multipart upload.

======================  =========================================================================
what is created         what is sent
======================  =========================================================================
one window              `write` sends the object, under another name for every try; it is stored
                        when `write` returns
several windows         a multipart upload that begins with the first `write`; window k is part k,
                        in any order and at the same time; `seal` completes it
no windows              writes in order are collected; up to one part, `seal` sends one object;
                        beyond, every full part is sent by the `write` that follows it
======================  =========================================================================

A file of windows sends what the caller holds and copies nothing. A file without windows holds one
part (16 MiB, or more where the object would have too many) whatever its size. Where the client
knows no multipart uploads, or the windows are no parts that it takes, the whole file is collected,
up to `COLLECTED_MAX_NBYTES`; `ObjectStore.sizes` never makes such files.
"""

# Rule: a body that was handed to a request which then was given up may still be on its way: `write`
#   says so, and nothing here ever sends from memory that it fills again.

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from asyncckpt.errors import CheckpointExistsError, UsageError
from asyncckpt.options import MIB
from asyncckpt.ports import Bytes
from asyncckpt.stores.objects.client import Body, RequestError
from asyncckpt.stores.objects.context import INLINE_NBYTES, sendable
from asyncckpt.stores.objects.uploads import Sending, Upload

PART_NBYTES = 16 * MIB
"""Parts of files that are written in order: the size from which a stream is 80 % busy."""

COLLECTED_MAX_NBYTES = 512 * MIB
"""Longest file that is collected whole, for clients that cannot send parts."""


class ObjectDataFile:
    """An open data file. Made by `ObjectAttempt.create`, of one of the three kinds below.

    Attributes:
        path: its path; final once it is sealed.
        sealed: whether it is whole and durable.
    """

    def __init__(self, sending: Sending, path: str) -> None:
        self.path = path
        self.sealed = False
        self._sending = sending
        self._context = sending.context
        self._key = sending.key(path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._context.requests.location(self._key)!r})"

    async def write(self, offset: int, data: Bytes | bytearray) -> bool:
        """All of `data` is written at `offset`; whether nobody reads it any more.

        Cancellation: ends the request and raises; `data` must not be used again as long as
        anybody holds it.

        Raises:
            UsageError: the place does not fit how the file was created.
            StoreError: names the object and offset; the attempt cannot be continued.
        """
        self._check()
        if not len(data):
            return True
        return await self._write(offset, data)

    async def seal(self, nbytes: int) -> None:
        """The file is exactly `nbytes` long and durable, under the name that `path` says.

        Cancellation: ends the request and raises.

        Raises:
            UsageError: not everything was written, or it was sealed before.
            StoreError: names the object; the attempt cannot be continued.
        """
        self._check()
        await self._seal(nbytes)
        self.sealed = True

    def _check(self) -> None:
        self._sending.check()
        if self.sealed:
            raise self._refused("the data file is sealed")

    def _refused(self, why: str) -> UsageError:
        location = self._context.requests.location(self._key)
        return UsageError(f"{location}: {why}", location=location)

    async def _send_whole(self, body: Body) -> bool:
        key, reusable = await self._sending.send(self._key, body)
        self.path = self._sending.relative(key)
        return reusable

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        raise NotImplementedError

    async def _seal(self, nbytes: int) -> None:
        raise NotImplementedError


class WindowFile(ObjectDataFile):
    """A file of one window: one object, stored when `write` returns."""

    def __init__(self, sending: Sending, path: str, nbytes: int) -> None:
        super().__init__(sending, path)
        self._nbytes = nbytes
        self._written = False

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        if offset or self._written or len(data) < self._nbytes:
            raise self._refused(
                f"a file of one window of {self._nbytes} bytes is written once, found "
                f"{len(data)} bytes at offset {offset}"
            )
        self._written = True
        body, copied = await sendable(self._context, _cut(data, self._nbytes))
        return await self._send_whole(body) or copied

    async def _seal(self, nbytes: int) -> None:
        if nbytes == 0 and not self._written:
            await self._send_whole(b"")
        elif nbytes != self._nbytes or not self._written:
            raise self._refused(f"{self._nbytes} bytes were announced, and {nbytes} are sealed")


class PartsFile(ObjectDataFile):
    """A file of several windows, each of which is a part of one multipart upload."""

    def __init__(self, sending: Sending, path: str, nbytes: int, window_nbytes: int) -> None:
        super().__init__(sending, path)
        self._nbytes = nbytes
        self._window_nbytes = window_nbytes
        self._upload = Upload(sending, self._key)

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        number, inside = divmod(offset, self._window_nbytes)
        expected = min(self._window_nbytes, self._nbytes - offset)
        if inside or expected <= 0 or len(data) < expected:
            raise self._refused(
                f"expected windows of {self._window_nbytes} bytes in a file of {self._nbytes}, "
                f"found {len(data)} bytes at offset {offset}"
            )
        body, copied = await sendable(self._context, _cut(data, expected))
        return await self._upload.send(number, offset, body) or copied

    async def _seal(self, nbytes: int) -> None:
        self.check_complete(nbytes)
        await self.complete()

    def check_complete(self, nbytes: int) -> None:
        """All windows were written. Raises `UsageError`."""
        count = -(-self._nbytes // self._window_nbytes)
        if nbytes != self._nbytes or self._upload.parts != count:
            raise self._refused(
                f"{count} windows of {self._nbytes} bytes in all were announced, "
                f"{self._upload.parts} were written, and {nbytes} bytes are sealed"
            )

    async def complete(self) -> None:
        """The object is there. Raises `StoreError`."""
        if self._nbytes:
            await self._upload.complete(self._nbytes)


class CollectedFile(ObjectDataFile):
    """Several windows in any order, for a client that cannot send them as parts."""

    def __init__(self, sending: Sending, path: str, nbytes: int) -> None:
        super().__init__(sending, path)
        self._nbytes = nbytes
        self._left = nbytes
        self._buffer: bytearray | None = None
        self._lock = asyncio.Lock()

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        nbytes = min(len(data), self._nbytes - offset)
        if nbytes <= 0:
            raise self._refused(f"{len(data)} bytes at offset {offset} are past the end")
        async with self._lock:
            if self._buffer is None:
                self._buffer = await self._context.workers.run(bytearray, self._nbytes)
        source = np.frombuffer(data, np.uint8)[:nbytes]
        await self._context.workers.run(_place, self._buffer, offset, source)
        self._left -= nbytes
        return True

    async def _seal(self, nbytes: int) -> None:
        self.check_complete(nbytes)
        body, self._buffer = self._buffer, None
        await self._send_whole(body or b"")

    def check_complete(self, nbytes: int) -> None:
        """All of it was written. Raises `UsageError`."""
        if nbytes != self._nbytes or self._left:
            raise self._refused(
                f"{self._nbytes} bytes were announced, {self._left} were not written, and "
                f"{nbytes} are sealed"
            )

    async def create(self, *, new: bool) -> None:
        """The object stands under its own name, whatever was there before unless it must be new.

        Raises:
            CheckpointExistsError: it must be new, and something else was faster.
            StoreError: names the object.
        """
        body, requests = bytes(self._buffer or b""), self._context.requests
        try:
            if not new or not requests.traits.conditional_create:
                await requests.replace(self._key, body)
            elif not await requests.create(self._key, body):
                # Perhaps an earlier try of ours, whose answer was lost.
                found = await requests.read(self._key, max_nbytes=len(body))
                if found != body:
                    location = requests.location(self._key)
                    raise CheckpointExistsError(
                        f"{location}: something stands here already, which came meanwhile; pass "
                        "overwrite=True to replace it",
                        location=location,
                    )
        except RequestError as error:
            raise self._sending.failed(f"writing {len(body)} bytes", self._key, error) from error
        self._buffer = None


class SerialFile(ObjectDataFile):
    """A file that is written from its beginning to its end; holds one part."""

    def __init__(self, sending: Sending, path: str, nbytes: int) -> None:
        super().__init__(sending, path)
        traits = sending.context.requests.traits
        self._part_nbytes = traits.put_max_nbytes
        if traits.multipart:
            # A last write may be longer than was announced, hence the half.
            fitting = -(-nbytes // max(1, traits.part_max_count // 2))
            wanted = min(max(PART_NBYTES, traits.part_min_nbytes, fitting), traits.part_max_nbytes)
            unit = traits.part_multiple_nbytes
            self._part_nbytes = max(wanted // unit, 1) * unit
        self._multipart = traits.multipart
        self._buffer = bytearray()
        self._sent = 0
        self._upload: Upload | None = None

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        if offset != self._sent + len(self._buffer):
            raise self._refused(
                f"without windows, writes come in order: expected offset "
                f"{self._sent + len(self._buffer)}, found {offset}"
            )
        view = memoryview(data).cast("B")
        while view:
            room = self._part_nbytes - len(self._buffer)
            if room == 0:
                await self._send_part()
                continue
            head, view = view[:room], view[room:]
            if len(head) <= INLINE_NBYTES:
                self._buffer += head
            else:
                await self._context.workers.run(partial(_append, self._buffer, head))
        return True

    async def _send_part(self) -> None:
        if not self._multipart:
            raise self._refused(
                f"this client sends objects of at most {self._part_nbytes} bytes, and not in "
                "parts; lower target_data_file_nbytes"
            )
        if self._upload is None:
            self._upload = Upload(self._sending, self._key)
        body, self._buffer = self._buffer, bytearray()
        offset, self._sent = self._sent, self._sent + len(body)
        await self._upload.send(self._upload.parts, offset, body)

    async def _seal(self, nbytes: int) -> None:
        surplus = self._sent + len(self._buffer) - nbytes
        if not 0 <= surplus <= len(self._buffer):
            raise self._refused(
                f"{self._sent + len(self._buffer)} bytes were written, {self._sent} of them are "
                f"sent, and {nbytes} are sealed"
            )
        if surplus:
            del self._buffer[len(self._buffer) - surplus :]
        if self._upload is None:
            # Under its own name: the index refers to itself by it.
            body, self._buffer = self._buffer, bytearray()
            await self._sending.send_named(self._key, body)
            return
        if self._buffer:
            await self._send_part()
        await self._upload.complete(nbytes)


def open_file(
    sending: Sending, path: str, nbytes: int, window_nbytes: int | None
) -> ObjectDataFile:
    """A data file of the kind that suits; no request is made.

    Raises:
        UsageError: the client can neither send its windows as parts, nor all of it at once.
    """
    traits = sending.context.requests.traits
    if window_nbytes is None:
        return SerialFile(sending, path, nbytes)
    if nbytes <= window_nbytes and nbytes <= traits.put_max_nbytes:
        return WindowFile(sending, path, nbytes)
    fits = (
        traits.multipart
        and traits.part_min_nbytes <= window_nbytes <= traits.part_max_nbytes
        and window_nbytes % traits.part_multiple_nbytes == 0
        and -(-nbytes // window_nbytes) <= traits.part_max_count
    )
    if fits:
        return PartsFile(sending, path, nbytes, window_nbytes)
    if nbytes <= min(COLLECTED_MAX_NBYTES, traits.put_max_nbytes):
        return CollectedFile(sending, path, nbytes)
    location = f"{sending.location}/{path}"
    raise UsageError(
        f"{location}: {traits.name} cannot send {nbytes} bytes in parts of {window_nbytes}; lower "
        f"target_data_file_nbytes to {min(COLLECTED_MAX_NBYTES, traits.put_max_nbytes)} or less",
        location=location,
        expected=min(COLLECTED_MAX_NBYTES, traits.put_max_nbytes),
        found=nbytes,
    )


def _cut(data: Bytes | bytearray, nbytes: int) -> Bytes | bytearray:
    """Without the padding behind the last byte; a slice of a `bytearray` is a copy."""
    return data if len(data) == nbytes else data[:nbytes]


def _place(buffer: bytearray, offset: int, data: Bytes) -> None:
    np.copyto(np.frombuffer(buffer, np.uint8)[offset : offset + data.size], data)


def _append(buffer: bytearray, data: memoryview) -> None:
    buffer += data
