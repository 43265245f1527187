"""Fetch: ranges of data files to host memory, straight into the target where its layout allows."""

# Rule 1: what goes straight into a target needs no budget; everything else holds slots, taken in
#   one acquire before its task exists.
# Rule 2: an uncompressed chunk larger than a slot passes through one slot, piece by piece, so that
#   chunks of any size restore within any budget.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.limiter import Limiter, Permit
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.restore import ReadBatch, RestorePlan
from asyncckpt.ports import Bytes
from asyncckpt.stages.decode import Decode, Destination, ReadTables, is_direct
from asyncckpt.stages.opened import missing
from asyncckpt.stages.runs import Read, far, near, span

READ_AHEAD_NBYTES = 256 << 20
"""What one read of a store far away has in flight at most, however large its chunk is, and counts
in the budget; with less, it has less in flight."""


class Fetch:
    """The fetch stage of one restore, which hands what it has read to the decode stage.

    Args:
        concurrency: how many reads to have in flight; asked again before every read, because a
            store finds out what its link rewards while it is read from.
    """

    def __init__(
        self,
        tables: ReadTables,
        plan: RestorePlan,
        destinations: Sequence[Destination],
        pool: SlotPool,
        compute: Workers,
        *,
        concurrency: Callable[[], int],
        own_memory: bool,
        arrived: Callable[[Sequence[int]], None],
        progress: Callable[[int], None],
    ) -> None:
        self._opened = tables.opened
        self._capabilities = tables.opened.files.capabilities
        self._plan = plan
        self._decode = Decode(tables, plan, destinations)
        self._destinations = destinations
        self._pool = pool
        self._compute = compute
        self._concurrency = concurrency
        self._streams = Limiter(concurrency())
        self._own_memory = own_memory
        self._arrived = arrived
        self._progress = progress
        self._left = list(plan.counts)
        self.read_nbytes = 0

    async def run(self) -> None:
        """Every destination holds its values, checked.

        Cancellation: waits until nobody writes to the destinations any more.

        Raises:
            CorruptCheckpointError: names leaf, file and offset.
            StoreError: reading failed.
        """
        self._arrived([number for number, left in enumerate(self._left) if left == 0])
        if len(self._plan.inline):
            await self._compute.run(self._decode.without_extent)
            self._count(self._plan.inline.column(1))
        async with asyncio.TaskGroup() as group:
            for read in self._reads():
                self._streams.ceiling = self._concurrency()
                stream = await self._streams.acquire()
                try:
                    slots, units = await self._lease(read)
                except BaseException:
                    stream.release()
                    raise
                task = group.create_task(self._read(read, slots, units, stream))
                # A task that is cancelled before its first step never runs its `finally`.
                task.add_done_callback(partial(self._free, stream, slots, units))

    def _reads(self) -> Iterable[Read]:
        """What is read, in the order of the calls."""
        gap_nbytes = self._capabilities.read_gap_nbytes
        if self._capabilities.read_copies:
            return far(self._plan.batches, self._begins, gap_nbytes, self._streams.ceiling)
        return near(self._plan.batches, self._begins, gap_nbytes)

    def _begins(self, batch: ReadBatch) -> bool:
        """Whether a run of batches may begin with this one."""
        if is_direct(batch):
            return True
        if not self._capabilities.read_copies or batch.nbytes > self._pool.slot_nbytes:
            return False
        return not self._decode.encoded_parts(batch)

    def _free(
        self, stream: Permit, slots: list[Slot], units: int, task: asyncio.Task[None]
    ) -> None:
        stream.release()
        self._pool.give(slots, None if task.cancelled() else task.exception())
        if units:
            self._pool.budget.release(units)

    async def _lease(self, read: Read) -> tuple[list[Slot], int]:
        batches = read.batches
        slot_nbytes, budget = self._pool.slot_nbytes, self._pool.budget
        nbytes = span(batches)
        copied = min(nbytes, READ_AHEAD_NBYTES) * self._capabilities.read_copies
        copies = min(-(-copied // slot_nbytes), budget.capacity)
        if read.together:
            if copies:
                aside = sum(b.nbytes for b in batches if not is_direct(b))
                copies = min(copies - (-aside // slot_nbytes), budget.capacity)
                await self._pool.acquire(copies)
            return [], copies
        (batch,) = batches
        encoded = self._decode.encoded_parts(batch)
        largest = max((self._decode.payload_nbytes(p) for p in encoded), default=0)
        count = 1 if not encoded else max(1, -(-batch.nbytes // slot_nbytes))
        capacity = budget.capacity
        units = -(-largest // slot_nbytes) + copies
        units = min(units, capacity - min(count, capacity))
        return await self._pool.take(count, grow=False, extra=units), units

    async def _read(self, read: Read, slots: list[Slot], units: int, stream: Permit) -> None:
        batches = read.batches
        path = self._opened.stored_files[batches[0].file].path
        copies = self._capabilities.read_copies
        ahead = units * self._pool.slot_nbytes // copies if copies else None
        try:
            if read.together:
                await self._direct(batches, path, ahead, stream)
            else:
                (batch,) = batches
                await self._through_slots(batch, path, slots, ahead, stream)
        except CheckpointNotFoundError as error:
            raise missing(self._opened.location, path) from error
        except CorruptCheckpointError as error:
            if error.path is None:
                # The store knows the file only, not whose bytes stand there.
                at = error.offset or batches[0].offset
                nearest = next((b for b in batches if b.offset + b.nbytes > at), batches[-1])
                leaf = self._destinations[nearest.parts[0].request].path
                error.path = leaf
                error.add_note(f"while reading leaf {leaf}")
            raise
        nbytes = sum(b.nbytes for b in batches)
        self.read_nbytes += nbytes
        self._progress(nbytes)
        for done in batches:
            self._count(done.parts.column(1))

    async def _through_slots(
        self,
        batch: ReadBatch,
        path: str,
        slots: list[Slot],
        ahead_nbytes: int | None,
        stream: Permit,
    ) -> None:
        if batch.nbytes <= self._pool.slot_nbytes:
            data = slots[0].buffer[: batch.nbytes]
            await self._opened.files.read_into(
                path, batch.offset, [data], direct=True, received=stream.release
            )
            await self._compute.run(self._decode.small, batch, data)
        elif self._decode.encoded_parts(batch):
            await self._large_encoded(batch, path, slots, ahead_nbytes)
        else:
            await self._large(batch, path, slots[0])

    def _count(self, requests: Sequence[int]) -> None:
        left = self._left
        ended: list[int] = []
        for request in requests:
            left[request] -= 1
            if left[request] == 0:
                ended.append(request)
        if ended:
            self._arrived(ended)

    async def _direct(
        self, batches: Sequence[ReadBatch], path: str, ahead_nbytes: int | None, stream: Permit
    ) -> None:
        buffers: list[Bytes] = []
        ends = [b.offset for b in batches[1:]] + [batches[-1].offset + batches[-1].nbytes]
        for batch, end in zip(batches, ends, strict=True):
            part = batch.parts[0]
            if not is_direct(batch):
                buffers.append(np.empty(batch.nbytes, np.uint8))
                buffers.append(np.empty(end - batch.offset - batch.nbytes, np.uint8))
                continue
            flat = self._destinations[part.request].flat
            assert flat is not None
            buffers.append(flat[part.direct : part.direct + part.nbytes])
            # Padding, trailer, and what lies before the next chunk of the run.
            buffers.append(np.empty(end - batch.offset - part.nbytes, np.uint8))
        await self._opened.files.read_into(
            path,
            batches[0].offset,
            buffers,
            direct=self._own_memory,
            received=stream.release,
            ahead_nbytes=ahead_nbytes,
        )
        await self._compute.run(self._decode.direct, batches, buffers)

    async def _large(self, batch: ReadBatch, path: str, slot: Slot) -> None:
        # Pieces are whole elements: the slot's size is a multiple of every element size.
        row = batch.parts[0].row
        codec = self._decode.codec(batch.parts[0])
        payload = batch.nbytes - codec.trailer_nbytes
        self._decode.check_length(batch, batch.parts[0], payload)
        start, crc = 0, 0
        trailer = np.empty(codec.trailer_nbytes, np.uint8)
        while start < payload:
            stop = min(payload, start + slot.buffer.nbytes)
            data = slot.buffer[: stop - start]
            buffers = [data]
            if stop == payload:
                buffers.append(trailer)
            await self._opened.files.read_into(path, batch.offset + start, buffers, direct=True)
            crc = await self._compute.run(self._decode.piece, batch, data, start, crc)
            start = stop
        self._decode.expect(batch, row, crc, trailer)

    async def _large_encoded(
        self, batch: ReadBatch, path: str, slots: list[Slot], ahead_nbytes: int | None
    ) -> None:
        parts: list[Bytes] = []
        left = batch.nbytes
        for slot in slots:
            parts.append(slot.buffer[: min(left, slot.buffer.nbytes)])
            left -= parts[-1].nbytes
        if left:
            # Beyond the whole budget: restored alone, in memory of its own.
            parts = [np.empty(batch.nbytes, np.uint8)]
        await self._opened.files.read_into(
            path, batch.offset, parts, direct=True, ahead_nbytes=ahead_nbytes
        )
        await self._compute.run(self._decode.encoded, batch, parts)
