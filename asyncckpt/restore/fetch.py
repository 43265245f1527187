"""The fetch stage: read ranges of data files into destinations or slots."""

# Rule 1: bytes read straight into a destination need no budget; all others hold slots or bytes of
#   the budget, taken in one acquire before the task of their read exists.
# Rule 2: an uncompressed chunk larger than a slot passes through one slot, piece by piece, so that
#   chunks of any size restore within any budget.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import numpy as np

from asyncckpt.checkpoint.metadata import missing
from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.flow.buffers import Slot, SlotPool, spans
from asyncckpt.flow.limiter import Limiter, Permit
from asyncckpt.flow.recorder import Recorder
from asyncckpt.flow.shield import raise_leading
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.restore import Part, ReadBatch, intersection
from asyncckpt.ports import FRESH, Bytes, Reading
from asyncckpt.reports import ReadItem, ReadRange
from asyncckpt.restore.decode import Check, Decode
from asyncckpt.restore.matched import LeafRestore
from asyncckpt.restore.plan import PlannedReads
from asyncckpt.restore.ranges import RUN_NBYTES, Read, reads_of, span

READ_AHEAD_NBYTES = 256 << 20
"""Most bytes that one read of a remote store has in flight, however large its chunk. They count in
the budget; a smaller budget lowers the limit."""


@dataclass(eq=False, repr=False)
class Fetch:
    """The fetch stage of planned reads, which passes chunks on to the decode stage.

    Attributes:
        compute: worker threads for the decode stage.
        concurrency: the user's number of reads in flight; None for the store's own, which is asked
            again before every read, because it adapts to the link.
        own_memory: this library allocated the destinations, so it may advise the system about them.
        shared: other processes may read the same ranges at the same time.
        arrived: called with the destinations of checked chunks, each once per chunk.
        progress: called with the bytes of every batch.
        calls: the calls that read, so far.
    """

    reads: PlannedReads
    pool: SlotPool
    compute: Workers
    _: KW_ONLY
    concurrency: int | None = None
    own_memory: bool = True
    shared: bool = False
    arrived: Callable[[Sequence[int]], None] = lambda _: None
    progress: Callable[[int], None] = lambda _: None
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self._files = self.reads.files
        self._reading = "fetch" if self._files is self.reads.opened.files else "exchange"
        self._capabilities = self._files.capabilities
        self._decode = Decode(self.reads)
        self._limiter = Limiter(self._files.reads(self.concurrency))
        self.calls: list[Read] = []
        self.read_nbytes = 0

    async def run(self) -> None:
        """Fill every destination with checked values.

        Cancellation: waits until no thread writes to the destinations.

        Raises:
            CorruptCheckpointError: names leaf, file and offset.
            StoreError: reading failed.
        """
        plan = self.reads.plan
        if len(plan.inline):
            await self.compute.run(self._decode.without_extent)
            self.arrived(plan.inline.column(1))
        streams = self._limiter.ceiling
        calls = reads_of(plan.batches, self._begins, self._capabilities, streams)
        try:
            async with asyncio.TaskGroup() as group:
                for read in calls:
                    self.calls.append(read)
                    self._limiter.ceiling = self._files.reads(self.concurrency)
                    stream = await self._limiter.acquire()
                    try:
                        slots, extra = await self._lease(read)
                    except BaseException:
                        stream.release()
                        raise
                    task = group.create_task(self._read(read, slots, extra, stream))
                    # A task that is cancelled before its first step never runs its `finally`.
                    task.add_done_callback(partial(self._free, stream, slots, extra))
        except BaseExceptionGroup as errors:
            raise_leading(errors)

    def explained(self, leaves: Sequence[LeafRestore], owners: Sequence[int]) -> list[ReadRange]:
        """Return the ranges read, and for which parts of leaves. Blocking: microseconds per item.

        `owners` has the number of the leaf for each destination.
        """
        stored_files = self.reads.opened.stored_files
        return [
            ReadRange(
                file=stored_files[read.batches[0].file].path,
                offset=read.batches[0].offset,
                nbytes=span(read.batches),
                items=tuple(
                    self._item(part, leaves[owners[part.request]])
                    for batch in read.batches
                    for part in batch.parts
                ),
            )
            for read in self.calls
        ]

    def _item(self, part: Part, leaf: LeafRestore) -> ReadItem:
        opened, extents = self.reads.opened, self.reads.extents
        storage, cell, box = self.reads.chunk(part.row, part.request)
        _, within = intersection(storage.grid, cell, box)
        array = self.reads.destinations.array[part.request]
        pieces = opened.pieces(leaf.saved, leaf.array)
        origin = next(piece.offset for piece in pieces if piece.array == array)
        starts = zip(origin, box.offset, within, strict=True)
        shape = tuple([s.stop - s.start for s in within])
        return ReadItem(
            path=leaf.path,
            offset=tuple([piece + start + s.start for piece, start, s in starts]),
            shape=shape,
            chunk_offset=int(extents.offset[part.row]),
            chunk_nbytes=int(extents.nbytes[part.row]),
            wanted_nbytes=math.prod(shape) * storage.spec.itemsize,
        )

    def _begins(self, batch: ReadBatch) -> bool:
        """Return whether a run of batches may begin with this one, because it needs no slot."""
        if batch.direct:
            return True
        if not self._capabilities.read_copies or batch.nbytes > self.pool.slot_nbytes:
            return False
        return not self._decode.encoded_parts(batch)

    def _free(
        self, stream: Permit, slots: list[Slot], extra: int, task: asyncio.Task[None]
    ) -> None:
        stream.release()
        self.pool.release(slots, None if task.cancelled() else task.exception())
        if extra:
            self.pool.budget.release(extra)

    async def _lease(self, read: Read) -> tuple[list[Slot], int]:
        """Acquire the slots of a read, and extra bytes of the budget; return both.

        The extra bytes are for copies that the client makes, what is between direct payloads
        (small chunks, trailers, gaps), and decoded elements of compressed chunks. They are limited
        to the capacity: a read that needs more than the budget runs alone.
        """
        slot_nbytes, capacity = self.pool.slot_nbytes, self.pool.budget.capacity
        copies = self._copied_nbytes(read)
        if read.together:
            direct = sum([sum(b.parts.column(3)) for b in read.batches if b.direct])
            extra = min(copies + span(read.batches) - direct, capacity)
            if extra:
                await self.pool.acquire(extra)
            return [], extra
        (batch,) = read.batches
        encoded = self._decode.encoded_parts(batch)
        largest = max((self._decode.storage(p).chunk_nbytes for p in encoded), default=0)
        count = 1 if not encoded else max(1, -(-batch.nbytes // slot_nbytes))
        extra = min(largest + copies, max(0, capacity - count * slot_nbytes))
        return await self.pool.take(count, grow=False, extra=extra), extra

    def _copied_nbytes(self, read: Read) -> int:
        """Return the memory that the client needs for a read, in requests of about `RUN_NBYTES`."""
        nbytes = min(span(read.batches), READ_AHEAD_NBYTES)
        requests = max(1, nbytes // RUN_NBYTES)
        return requests * self._capabilities.copied_nbytes(-(-nbytes // requests))

    async def _read(self, read: Read, slots: list[Slot], held: int, stream: Permit) -> None:
        """Read, check, and copy to the destinations the chunks that were not read into them."""
        batches, opened = read.batches, self.reads.opened
        path = opened.stored_files[batches[0].file].path
        copies = self._copied_nbytes(read)
        ahead = span(batches) * held // copies if copies else None
        try:
            if read.together:
                into, fresh = self._buffers(batches), self.own_memory
                await self._checked(batches, path, into, stream, ahead, fresh=fresh)
            elif batches[0].nbytes <= self.pool.slot_nbytes:
                memory = slots[0].buffer
                buffers = memory[: batches[0].nbytes], memory[:0]
                await self._checked(batches, path, buffers, stream, None, fresh=True)
            elif self._decode.encoded_parts(batches[0]):
                await self._large_encoded(batches[0], path, slots, ahead)
            else:
                await self._large(batches[0], path, slots[0])
        except CheckpointNotFoundError as error:
            raise self._of_leaf(missing(opened.location, path), batches) from error
        except CorruptCheckpointError as error:
            self._of_leaf(error, batches)
            raise
        self.read_nbytes += span(batches)
        self.progress(sum([batch.nbytes for batch in batches]))
        self.arrived([request for batch in batches for request in batch.parts.column(1)])

    def _of_leaf(
        self, error: CorruptCheckpointError, batches: Sequence[ReadBatch]
    ) -> CorruptCheckpointError:
        """Return the error, naming the leaf at its offset: the store knows only the file."""
        if error.path is None:
            at, extents = error.offset or batches[0].offset, self.reads.extents
            ends = extents.offset + extents.nbytes
            parts = [part for batch in batches for part in batch.parts]
            nearest = next((part for part in parts if ends[part.row] > at), parts[-1])
            error.path = self.reads.destinations.path[nearest.request]
            error.args = (f"{error.path}: {error}",)
        return error

    def _buffers(self, batches: Sequence[ReadBatch]) -> list[Bytes]:
        """Return the buffers that `Decode.checks` expects; small chunks get memory of their own."""
        buffers: list[Bytes] = []
        memory, offset_of = self.reads.destinations.values, self.reads.extents.offset
        ends = [*[batch.offset for batch in batches[1:]], batches[-1].offset + batches[-1].nbytes]
        for batch, end in zip(batches, ends, strict=True):
            if not batch.direct:
                gap = end - batch.offset - batch.nbytes
                buffers += (np.empty(batch.nbytes, np.uint8), np.empty(gap, np.uint8))
                continue
            # By column: a call may fill hundreds of short arrays.
            rows, *columns = map(batch.parts.column, range(4))
            offsets = offset_of[rows].tolist()
            ends_of = [*offsets[1:], end]
            for request, direct, nbytes, offset, then in zip(
                *columns, offsets, ends_of, strict=True
            ):
                values = memory[request]
                assert values is not None
                data = np.frombuffer(values, np.uint8, nbytes, direct)
                buffers += (data, np.empty(then - offset - nbytes, np.uint8))
        return buffers

    async def _checked(
        self,
        batches: Sequence[ReadBatch],
        path: str,
        buffers: Sequence[Bytes],
        stream: Permit,
        ahead_nbytes: int | None,
        *,
        fresh: bool,
    ) -> None:
        """Read batches into these buffers, and check them as they arrive."""
        offset, check = batches[0].offset, Check(self._decode.checks(batches, buffers))
        with self.recorder.span(self._reading, span(batches)):
            how = Reading(stream.release, ahead_nbytes, check, self.shared, fresh)
            await self._files.read_into(path, offset, buffers, how=how)
        if not check.complete:
            with self.recorder.span("decode", span(batches)):
                await self.compute.run(check, span(batches))

    async def _large(self, batch: ReadBatch, path: str, slot: Slot) -> None:
        # Pieces are whole elements: the slot's size is a multiple of every element size.
        row, storage = batch.parts[0].row, self._decode.storage(batch.parts[0])
        codec = storage.codec
        payload = batch.nbytes - codec.trailer_nbytes
        self._decode.check_length(batch, row, storage, payload)
        start, crc = 0, 0
        trailer = np.empty(codec.trailer_nbytes, np.uint8)
        while start < payload:
            stop = min(payload, start + slot.buffer.nbytes)
            data = slot.buffer[: stop - start]
            buffers = [data]
            if stop == payload:
                buffers.append(trailer)
            with self.recorder.span(self._reading, data.nbytes):
                await self._files.read_into(path, batch.offset + start, buffers, how=FRESH)
            with self.recorder.span("decode", data.nbytes):
                crc = await self.compute.run(self._decode.piece, batch, data, start, crc)
            start = stop
        self._decode.expect(batch, row, crc, trailer)

    async def _large_encoded(
        self, batch: ReadBatch, path: str, slots: list[Slot], ahead_nbytes: int | None
    ) -> None:
        parts = list(spans(slots, 0, batch.nbytes))
        if sum(map(len, parts)) < batch.nbytes:
            # Larger than the whole budget: restored alone, in memory of its own.
            parts = [np.empty(batch.nbytes, np.uint8)]
        with self.recorder.span(self._reading, batch.nbytes):
            how = Reading(ahead_nbytes=ahead_nbytes, fresh=True)
            await self._files.read_into(path, batch.offset, parts, how=how)
        with self.recorder.span("decode", batch.nbytes):
            await self.compute.run(self._decode.encoded, batch, parts)
