"""Fetch: ranges of data files to host memory, straight into the target where its layout allows."""

# Rule 1: what goes straight into a target needs no budget; everything else holds slots, taken in
#   one acquire before its task exists.
# Rule 2: an uncompressed chunk larger than a slot passes through one slot, piece by piece, so that
#   chunks of any size restore within any budget.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.limiter import Limiter, Permit
from asyncckpt.flow.threads import Workers
from asyncckpt.format.codecs import ChunkError, Codec
from asyncckpt.format.crc import crc32c
from asyncckpt.planning.restore import Part, ReadBatch, RestorePlan, intersection
from asyncckpt.ports import Bytes
from asyncckpt.spec import DTYPES, Box, ChunkGrid
from asyncckpt.stages.decode import trailer_matches
from asyncckpt.stages.opened import Extents, OpenCheckpoint, missing
from asyncckpt.stages.payload import scatter
from asyncckpt.stages.runs import Read, far, near, span
from asyncckpt.stages.serialize import TRAILER_NBYTES

TAIL_NBYTES = 1 << 20
"""Longest padding that is read along behind a payload that goes straight into its target."""

READ_AHEAD_NBYTES = 256 << 20
"""What one read of a store far away has in flight at most, however large its chunk is, and counts
in the budget; with less, it has less in flight."""

GIL_COPY_NBYTES = 64 << 10
"""Copies up to this size, a few microseconds, are made without letting go of the GIL."""


@dataclass(slots=True, eq=False)
class Destination:
    """Host memory for one wanted box of one array.

    Attributes:
        path: path of the leaf, for errors.
        array: index of the stored array.
        box: the wanted part; None for all of it.
        values: memory of the box's shape, in the stored dtype; None to read and check only.
        flat: the same memory as one run of bytes, or None.
    """

    path: str
    array: int
    box: Box | None
    values: npt.NDArray[Any] | None
    flat: Bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadTables:
    """What is looked up per chunk or kind of array; one serves all reads of an open checkpoint.

    Attributes:
        opened: the checkpoint.
        extents: where its chunks stand.
        offset: `extents.offset`, as Python ints.
        nbytes: `extents.nbytes`, likewise.
        crc: `extents.crc32c`, likewise, or None.
        grids: chunk grid per storage.
        codecs: codec per storage.
        any_encoded: whether any chunk must be decoded.
    """

    opened: OpenCheckpoint
    extents: Extents
    offset: list[int]
    nbytes: list[int]
    crc: list[int] | None
    grids: list[ChunkGrid]
    codecs: list[Codec]
    any_encoded: bool

    @classmethod
    def of(cls, opened: OpenCheckpoint, extents: Extents) -> ReadTables:
        """The tables of an open checkpoint."""
        codecs = [storage.codec for storage in opened.storages]
        return cls(
            opened=opened,
            extents=extents,
            offset=extents.offset.tolist(),
            nbytes=extents.nbytes.tolist(),
            crc=None if extents.crc32c is None else extents.crc32c.tolist(),
            grids=[storage.grid for storage in opened.storages],
            codecs=codecs,
            any_encoded=any(codec.decode is not None for codec in codecs),
        )


class Fetch:
    """The fetch and decode stages of one restore.

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
        self._extents = tables.extents
        self._plan = plan
        self._destinations = destinations
        self._pool = pool
        self._compute = compute
        self._concurrency = concurrency
        self._streams = Limiter(concurrency())
        self._own_memory = own_memory
        self._arrived = arrived
        self._progress = progress
        self._nbytes = tables.nbytes
        self._offset = tables.offset
        self._crc = tables.crc
        self._left = list(plan.counts)
        self._grids = tables.grids
        self._codecs = tables.codecs
        self._any_encoded = tables.any_encoded
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
            await self._compute.run(self._without_extent)
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
        if self._is_direct(batch):
            return True
        if not self._capabilities.read_copies or batch.nbytes > self._pool.slot_nbytes:
            return False
        return not (
            self._any_encoded and any(self._codec(part).decode is not None for part in batch.parts)
        )

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
                aside = sum(b.nbytes for b in batches if not self._is_direct(b))
                copies = min(copies - (-aside // slot_nbytes), budget.capacity)
                await self._pool.acquire(copies)
            return [], copies
        (batch,) = batches
        encoded = []
        if self._any_encoded:
            encoded = [p for p in batch.parts if self._codec(p).decode is not None]
        largest = max((self._payload_nbytes(p) for p in encoded), default=0)
        count = 1 if not encoded else max(1, -(-batch.nbytes // slot_nbytes))
        capacity = budget.capacity
        units = -(-largest // slot_nbytes) + copies
        units = min(units, capacity - min(count, capacity))
        return await self._pool.take(count, grow=False, extra=units), units

    def _is_direct(self, batch: ReadBatch) -> bool:
        part = batch.parts[0]
        if len(batch.parts) > 1 or part.direct < 0:
            return False
        return batch.nbytes - part.nbytes <= TAIL_NBYTES

    def _codec(self, part: Part) -> Codec:
        return self._codecs[self._opened.arrays.spec[self._destinations[part.request].array]]

    def _payload_nbytes(self, part: Part) -> int:
        return self._opened.storage(self._destinations[part.request].array).chunk_nbytes

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
            await self._compute.run(self._small, batch, data)
        elif self._codec(batch.parts[0]).decode is not None:
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
            if not self._is_direct(batch):
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
        await self._compute.run(self._check_direct, batches, buffers)

    async def _large(self, batch: ReadBatch, path: str, slot: Slot) -> None:
        # Pieces are whole elements: the slot's size is a multiple of every element size.
        row = batch.parts[0].row
        codec = self._codec(batch.parts[0])
        payload = batch.nbytes - codec.trailer_nbytes
        self._check_length(batch, batch.parts[0], payload)
        start, crc = 0, 0
        trailer = np.empty(codec.trailer_nbytes, np.uint8)
        while start < payload:
            stop = min(payload, start + slot.buffer.nbytes)
            data = slot.buffer[: stop - start]
            buffers = [data]
            if stop == payload:
                buffers.append(trailer)
            await self._opened.files.read_into(path, batch.offset + start, buffers, direct=True)
            crc = await self._compute.run(self._large_piece, batch, data, start, crc)
            start = stop
        self._expect(batch, row, crc, trailer)

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
        await self._compute.run(self._decode, batch, parts)

    # -- in worker threads

    def _without_extent(self) -> None:
        """Chunks that stand in the metadata, and those that were never stored."""
        values = self._extents.values
        inline = self._plan.inline
        for part in inline:
            data = values.get(part.row)
            if data is None:
                self._fill(part)
                continue
            batch = ReadBatch(-1, 0, len(data), inline)
            self._scatter(part, self._payload(batch, part, np.frombuffer(data, np.uint8)), 0)

    def _fill(self, part: Part) -> None:
        destination = self._destinations[part.request]
        if destination.values is None:
            return
        storage = self._opened.storage(destination.array)
        element = np.frombuffer(storage.fill or bytes(storage.spec.itemsize), np.uint8)
        dtype = DTYPES[storage.spec.dtype]
        _, within = intersection(
            storage.grid,
            part.row - self._opened.first_rows[destination.array],
            destination.box or Box.whole(storage.spec.shape),
        )
        destination.values[within] = element.view(dtype)[0]

    def _check_direct(self, batches: Sequence[ReadBatch], buffers: Sequence[Bytes]) -> None:
        for batch, data, rest in zip(batches, buffers[::2], buffers[1::2], strict=True):
            if not self._is_direct(batch):
                self._small(batch, data)
                continue
            part = batch.parts[0]
            tail = rest[: batch.nbytes - data.nbytes]
            trailer = tail[tail.nbytes - self._codec(part).trailer_nbytes :]
            if self._crc is None and not trailer.nbytes:
                continue
            crc = crc32c(tail[: tail.nbytes - trailer.nbytes], crc32c(data))
            self._expect(batch, part.row, crc, trailer)

    def _large_piece(self, batch: ReadBatch, data: Bytes, start: int, crc: int) -> int:
        for part in batch.parts:
            self._scatter(part, data, start)
        if self._crc is None and not self._codec(batch.parts[0]).crc32c:
            return 0
        return crc32c(data, crc)

    def _decode(self, batch: ReadBatch, stored: list[Bytes]) -> None:
        part = batch.parts[0]
        codec = self._codec(part)
        parts = list(stored)
        if len(parts[-1]) < codec.trailer_nbytes:
            parts = [np.concatenate(parts)]
        end = parts[-1].nbytes - codec.trailer_nbytes
        trailer, parts[-1] = parts[-1][end:], parts[-1][:end]
        if self._crc is not None or codec.crc32c:
            crc = 0
            for stored_part in parts:
                crc = crc32c(stored_part, crc)
            self._expect(batch, part.row, crc, trailer)
        assert codec.decode is not None
        try:
            payload = codec.decode(parts, self._payload_nbytes(part))
        except ChunkError as error:
            raise self._damaged(batch, part.row, str(error)) from None
        for each in batch.parts:
            self._scatter(each, payload, 0)

    def _small(self, batch: ReadBatch, data: Bytes) -> None:
        # The loop that decides what a small leaf costs: no object per part, few lookups.
        if self._crc is None:
            self._small_foreign(batch, data)
            return
        crcs, destinations, counts = self._crc, self._destinations, self._plan.counts
        rows, requests = batch.parts.column(0), batch.parts.column(1)
        starts, stops = self._check_trailers(batch, data, rows)
        view = memoryview(data)
        crc, start, stop = 0, 0, 0
        decoded: Bytes | None = None
        last = -1
        for number, (row, request) in enumerate(zip(rows, requests, strict=True)):
            destination = destinations[request]
            if row != last:
                last, start, stop = row, starts[number], stops[number]
                crc = crc32c(view[start:stop])
                if crc != crcs[row]:
                    self._expect(batch, row, crc, data[stop : stop + TRAILER_NBYTES])
                decoded = None
                if self._any_encoded:
                    decoded = self._decoded(batch, batch.parts[number], data[start:stop])
            # Where one chunk is all that is wanted; others may have as many bytes by chance.
            flat = destination.flat if counts[request] == 1 else None
            if flat is not None and decoded is None and len(flat) == stop - start:
                # Between memoryviews: NumPy lets go of the GIL for each of a thousand small
                # copies, and waits for it.
                if stop - start <= GIL_COPY_NBYTES:
                    memoryview(flat)[:] = view[start:stop]
                else:
                    flat[:] = data[start:stop]
            elif flat is not None and decoded is not None and len(flat) == len(decoded):
                flat[:] = decoded
            else:
                payload = data[start:stop] if decoded is None else decoded
                self._scatter(batch.parts[number], payload, 0)

    def _check_trailers(
        self, batch: ReadBatch, data: Bytes, rows: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Where the payload of each row starts and stops; what trails it is what the index says."""
        extents, numbers = self._extents, np.array(rows, np.int64)
        assert extents.crc32c is not None
        starts = extents.offset[numbers] - batch.offset
        stops = starts + extents.nbytes[numbers] - TRAILER_NBYTES
        trailers = data[stops[:, None] + np.arange(TRAILER_NBYTES)].view("<u4").reshape(-1)
        bad = np.flatnonzero(trailers != extents.crc32c[numbers])
        if len(bad):
            row, start, stop = rows[bad[0]], int(starts[bad[0]]), int(stops[bad[0]])
            crc = crc32c(data[start:stop])
            self._expect(batch, row, crc, data[stop : stop + TRAILER_NBYTES])
        return starts.tolist(), stops.tolist()

    def _decoded(self, batch: ReadBatch, part: Part, stored: Bytes) -> Bytes | None:
        """The elements of a checked chunk that is encoded; None of others."""
        decode = self._codec(part).decode
        if decode is None:
            return None
        try:
            return decode([stored], self._payload_nbytes(part))
        except ChunkError as error:
            raise self._damaged(batch, part.row, str(error)) from None

    def _small_foreign(self, batch: ReadBatch, data: Bytes) -> None:
        payload: Bytes | None = None
        last = -1
        for part in batch.parts:
            if part.row != last:
                start = self._offset[part.row] - batch.offset
                payload = self._payload(batch, part, data[start : start + self._nbytes[part.row]])
                last = part.row
            assert payload is not None
            self._scatter(part, payload, 0)

    def _payload(self, batch: ReadBatch, part: Part, stored: Bytes) -> Bytes:
        """The checked elements of a stored chunk of which no checksum is kept elsewhere."""
        codec = self._codec(part)
        end = stored.nbytes - codec.trailer_nbytes
        if end < 0:
            raise self._damaged(batch, part.row, f"{stored.nbytes} bytes hold no checksum")
        data = stored[:end]
        if codec.crc32c and not trailer_matches(stored[end:], crc32c(data)):
            raise self._damaged(batch, part.row, "the checksum behind the chunk differs")
        if codec.decode is None:
            self._check_length(batch, part, end)
            return data
        try:
            return codec.decode([data], self._payload_nbytes(part))
        except ChunkError as error:
            raise self._damaged(batch, part.row, str(error)) from None

    def _check_length(self, batch: ReadBatch, part: Part, nbytes: int) -> None:
        expected = self._payload_nbytes(part)
        if nbytes != expected:
            reason = f"it has {nbytes} bytes, the array needs {expected}"
            raise self._damaged(batch, part.row, reason)

    def _scatter(self, part: Part, payload: Bytes, start: int) -> None:
        destination = self._destinations[part.request]
        if destination.values is None:
            return
        opened = self._opened
        array = destination.array
        kind = opened.arrays.spec[array]
        grid = self._grids[kind]
        cell = np.unravel_index(part.row - opened.first_rows[array], grid.counts or (1,))
        scatter(
            payload,
            opened.storages[kind].spec,
            grid,
            tuple(int(i) for i in cell) if grid.shape else (),
            start,
            destination.values,
            destination.box or Box.whole(grid.shape),
        )

    def _expect(self, batch: ReadBatch, row: int, crc: int, trailer: Bytes) -> None:
        if self._crc is not None and crc != self._crc[row]:
            raise self._damaged(
                batch, row, f"CRC-32C is {crc:08x}, the chunk index says {self._crc[row]:08x}"
            )
        if trailer.nbytes and not trailer_matches(trailer, crc):
            raise self._damaged(batch, row, "the checksum behind the chunk differs from its bytes")

    def _damaged(self, batch: ReadBatch, row: int, reason: str) -> AsyncCheckpointError:
        opened = self._opened
        path = next(self._destinations[p.request].path for p in batch.parts if p.row == row)
        if batch.file < 0:
            return CorruptCheckpointError(
                f"{path}: {opened.location}: a chunk in the metadata is damaged: {reason}; "
                "use another checkpoint, or leave this path out with include=",
                path=path,
                stage="decode",
                location=opened.location,
            )
        file = opened.stored_files[batch.file].path
        offset = self._offset[row]
        return CorruptCheckpointError(
            f"{path}: {opened.location}: the chunk at byte {offset} of {file} is damaged: "
            f"{reason}; restore an older step, or leave this path out with include=",
            path=path,
            stage="decode",
            location=opened.location,
            file=file,
            offset=offset,
        )
