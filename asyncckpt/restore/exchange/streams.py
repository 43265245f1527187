"""Streams of exchanged bytes, which a restore reads like files."""

# Rule 1: a batch stays until all its bytes have been read, each exactly once.
# Rule 2: the fetch stage starts reads in stream order; otherwise the batch at the head could never
#   be released.

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from asyncckpt.flow.threads import Workers
from asyncckpt.ports import ORDINARY, Bytes, Reading, StoreCapabilities

READS = 4
"""Reads in flight: each copies only a few megabytes, or the rest of a batch."""


class Incoming:
    """A stream that this process receives, batch after batch."""

    def __init__(self) -> None:
        self._data = np.empty(0, np.uint8)
        self._begin = 0
        self._left = 0
        self._changed = asyncio.Event()

    async def deliver(self, data: Bytes) -> None:
        """Offer the next bytes of the stream to readers; return once all are read."""
        self._begin += len(self._data)
        self._data, self._left = data, len(data)
        self._notify()
        while self._left:
            await self._changed.wait()

    async def read_into(self, offset: int, buffers: Sequence[Bytes], workers: Workers) -> None:
        """Fill the buffers with the bytes from `offset` on, as they arrive."""
        wanted = [buffer for buffer in buffers if len(buffer)]
        while wanted:
            while offset >= self._begin + len(self._data):
                await self._changed.wait()
            here = self._data[offset - self._begin :]
            nbytes = min(len(here), sum(map(len, wanted)))
            wanted = await workers.run(_copy, here, wanted)
            offset += nbytes
            self._left -= nbytes
            if not self._left:
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()


def _copy(data: Bytes, buffers: Sequence[Bytes]) -> list[Bytes]:
    """Copy the data to the buffers; return the buffers still to be filled."""
    for number, buffer in enumerate(buffers):
        taken = min(len(buffer), len(data))
        np.copyto(buffer[:taken], data[:taken])
        data = data[taken:]
        if taken < len(buffer):
            return [buffer[taken:], *buffers[number + 1 :]]
    return []


class StreamFiles:
    """The streams of a restore as files, by their paths."""

    capabilities = StoreCapabilities(read_gap_nbytes=0)

    def __init__(self, streams: Mapping[str, Incoming], workers: Workers) -> None:
        self._streams = streams
        self._workers = workers

    def reads(self, wanted: int | None) -> int:
        """Return the number of reads in flight, as `CheckpointFiles.reads`."""
        return READS

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill the buffers from a stream, as `CheckpointFiles.read_into`."""
        await self._streams[path].read_into(offset, buffers, self._workers)
