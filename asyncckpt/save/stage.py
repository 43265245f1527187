"""Stage: device or caller's memory to host buffers that the save owns.

Once all windows and chunks are staged, or `offload` or `hold_immutable` has returned True, the
caller may mutate, donate or free every leaf.
"""

# Rule 1: windows leave in plan order: checksums of files and of chunks that span windows are
#   folded from left to right. (Windows are copied and sealed in any order.)
# Rule 2: a window's slot is taken before its copy is scheduled, so that the budget bounds work as
#   well as memory; a cancelled task that never ran has nothing to release.
# Rule 3: a slot is in `held` from before its copy until its release. If this stage or a later one
#   fails in between, `release_all` releases exactly the slots still held.
# Rule 4: a leaf is copied once it is `computed`: a thread that waited for it inside its framework
#   could not be cancelled. (tests/cancellation/test_computing.py)

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.payload import ArrayReader, flat_bytes, gather
from asyncckpt.errors import AsyncCheckpointError, StagingError
from asyncckpt.flow.arena import Arena
from asyncckpt.flow.buffers import Slot, SlotPool, spans
from asyncckpt.flow.recorder import Recorder
from asyncckpt.flow.shield import together
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.format.crc import crc32c
from asyncckpt.options import CACHED_NBYTES, MIB, PAGE_NBYTES
from asyncckpt.planning.held import HeldBox
from asyncckpt.planning.pack import TRAILER_NBYTES, Window
from asyncckpt.planning.save import SavePlan
from asyncckpt.ports import Bytes, Run, Source
from asyncckpt.save.serialize import Filling, WindowSums
from asyncckpt.save.snapshot import Snapshot, held_nbytes
from asyncckpt.spec import DTYPES, Box

T = TypeVar("T")
P = ParamSpec("P")

Seal = Callable[[Window, Bytes, Filling], WindowSums]
"""Checksums a window while it is copied into a buffer, and writes its trailers."""

GROUP_NBYTES = 64 * MIB
"""Bytes that one worker call copies while the caller waits: a hop between threads costs about
0.1 ms, copying 8 MiB 0.4 ms."""

DEVICE_THREADS = 2
"""Threads that copy from devices. A copy is many short calls, which other threads make two to ten
times slower by taking the interpreter lock in between: one thread queues while one waits."""

DEVICE_GROUP_NBYTES = 256 * MIB
"""Bytes that one of them copies: the device goes on while it queues, and not between two calls."""

OFFLOAD_CALLS = 4
"""Concurrent calls that move leaves to host memory of their framework, which takes longer to begin
the copies of small leaves than to make them."""

CALLS_PER_THREAD = 4
"""Minimum number of calls per thread that copies host memory, if there are enough windows."""

GROUPED_NBYTES = 1 * MIB
"""Largest group of small chunks that are compressed together: alone, each would hop between threads
four times, for half a millisecond, and hold two slots."""

GROUPED_ALIGNMENT = 64
"""Alignment of grouped chunks in bytes: aligned elements are copied fastest."""

ZEROS = np.zeros(PAGE_NBYTES, np.uint8)
"""Room for trailers, and padding between chunks."""

POLL_S, POLL_GROWTH, POLL_MAX_S = 0.0005, 1.2, 0.02
"""First pause between two looks whether a leaf is computed, growth, longest pause: a pause is about
a sixth of the wait so far, which it hardly prolongs, and the looks take little of a core."""

INLINE_ARRAYS = 1024
"""Small arrays copied by one call, which holds the interpreter lock for about 0.3 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedWindow:
    """A planned window whose payloads are in `slot`; `sums` is None until they are computed."""

    window: Window
    slot: Slot
    sums: WindowSums | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StagedChunks:
    """Whole chunks to compress: one large chunk in consecutive slots, or small ones in one slot.

    Attributes:
        rows: rows of the chunks, in plan order.
        starts: offset of each chunk from the start of the first slot, in bytes.
        nbytes: length of each chunk.
        slots: the slots with the chunks.
        extra_nbytes: bytes of the budget held for the compressor's output, besides the slots.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    nbytes: Sequence[int]
    slots: list[Slot]
    extra_nbytes: int


@dataclass(eq=False, repr=False)
class Staging:
    """Staging of one save: copies its leaves into slots.

    Attributes:
        pool: slots for chunks to compress.
        window_pool: slots for windows.
        grow: allocate up to the whole budget, because the caller waits for the copies.
        held: slots that are not released yet.
        extra_nbytes: bytes of the budget held besides slots.
        referenced_nbytes: bytes of leaves that are held instead of copied.
    """

    plan: SavePlan
    snapshot: Snapshot
    pool: SlotPool
    window_pool: SlotPool
    compute: Workers
    _: KW_ONLY
    grow: bool
    recorder: Recorder

    def __post_init__(self) -> None:
        self.sources = self.snapshot.sources
        self._leaf_of: list[int] = self.plan.arrays.leaf.tolist()
        self._pending = {n: one.pending for n, one in self.sources.opened.items() if one.pending}
        self._readers: dict[int, ArrayReader] = {}
        self._find_runs()
        self.held: set[Slot] = set()
        self.extra_nbytes = 0
        self.referenced_nbytes = 0
        self._copies_nbytes = 0

    def _find_runs(self) -> None:
        """Find out how much is copied from devices."""
        opened = self.sources.opened.values()
        runs = [source.spec.nbytes for source in opened if source.begin_runs is not None]
        self._has_runs, self._on_device, self._threads = bool(runs), False, self.compute.count
        if runs and 2 * sum(runs) > sum([spec.nbytes for spec in self.sources.specs]):
            self._on_device, self._threads = True, min(DEVICE_THREADS, self.compute.count)

    async def computed(self, arrays: Iterable[int]) -> None:
        """Wait until the leaves of these arrays are computed; a cancellation ends it at once."""
        pause_s = POLL_S
        for array in arrays if self._pending else ():
            leaf = self._leaf_of[array]
            while (pending := self._pending.get(leaf)) and pending(self.sources[leaf]):
                await asyncio.sleep(pause_s)
                pause_s = min(POLL_GROWTH * pause_s, POLL_MAX_S)
            self._pending.pop(leaf, None)

    async def windows(self, emit: Callable[[StagedWindow], None], seal: Seal | None = None) -> None:
        """Stage every window, and hand them to `emit` in plan order.

        With `seal`, one worker call copies and checksums each window. Without it, windows are only
        copied, and kept back until all are copied or the pool runs out of slots, so that nothing
        else takes processor time or memory bandwidth from copying.

        Cancellation: waits for running copies; `release_all` releases the slots still held.

        Raises:
            StagingError: names the leaf.
        """
        windows, pool = self.plan.windows, self.window_pool
        # A single stuck thread must not hold the whole budget.
        group_nbytes = DEVICE_GROUP_NBYTES if self._on_device else GROUP_NBYTES
        most = max(1, min(group_nbytes // pool.slot_nbytes, pool.capacity // 4))
        if not self._on_device:
            # Each thread makes several calls, so that all end at about the same time.
            most = min(most, -(-len(windows) // (CALLS_PER_THREAD * self._threads)))
        if seal is not None:
            most = 1  # so that the first write begins after the first call
        # Copies run ahead of `emit` while there are slots, and end in any order.
        running: deque[asyncio.Task[list[StagedWindow]]] = deque()
        kept: deque[StagedWindow] = deque()
        receive = kept.append if seal is None else emit

        async def copy(part: Sequence[Window], slots: list[Slot]) -> list[StagedWindow]:
            await self.computed(piece.array for window in part for piece in window.pieces)
            return await self.use(slots, self._copy_windows, part, slots, seal)

        async with asyncio.TaskGroup() as group:
            if self.grow and windows:
                group.create_task(pool.prepare(len(windows)))
            done = 0
            while done < len(windows):
                slots = pool.take_ready(min(most, len(windows) - done))
                if not slots and running:
                    # The consumer may need the windows of a running copy before it can free a
                    # slot: waiting for a slot first could deadlock.
                    for item in await running.popleft():
                        receive(item)
                    continue
                if not slots:
                    while kept:
                        emit(kept.popleft())
                    slots = await pool.take(1, grow=self.grow)
                self.held.update(slots)
                part = windows[done : done + len(slots)]
                done += len(part)
                running.append(group.create_task(copy(part, slots)))
                if len(running) > self._threads:
                    for item in await running.popleft():
                        receive(item)
            while running:
                for item in await running.popleft():
                    receive(item)
        while kept:
            emit(kept.popleft())

    async def chunks(self, emit: Callable[[StagedChunks], None]) -> None:
        """Stage every chunk that will be compressed, and hand them to `emit` in plan order.

        Each group takes slots for its payloads and as many bytes again for the compressor's output
        at once, so that compression never waits for memory while it holds some.
        Cancellation, errors: as `windows`.
        """
        budget = self.pool.budget
        for rows, starts, nbytes in self._groups():
            await self.computed(map(self.plan.row_array.item, rows))
            count = max(1, -(-(starts[-1] + nbytes[-1]) // self.pool.slot_nbytes))
            # Fewer extra bytes if both together exceed the part of the budget that is not kept.
            held = count * self.pool.slot_nbytes
            extra = max(0, min(held, budget.capacity - budget.kept - held))
            slots = await self.pool.take(count, grow=self.grow, extra=extra)
            self.held.update(slots)
            self.extra_nbytes += extra
            chunks = StagedChunks(rows, starts, nbytes, slots, extra)
            await self.use(slots, self._copy_chunks, chunks)
            emit(chunks)

    def _groups(self) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Yield the rows, starts and lengths of the chunks that are compressed together."""
        plan = self.plan
        most = min(GROUPED_NBYTES, self.pool.slot_nbytes)
        rows: list[int] = []
        starts: list[int] = []
        sizes: list[int] = []
        end = 0
        payloads = plan.row_payload[list(plan.compressed)].tolist()
        for row, nbytes in zip(plan.compressed, payloads, strict=True):
            start = -(-end // GROUPED_ALIGNMENT) * GROUPED_ALIGNMENT
            if rows and start + nbytes > most:
                yield rows, starts, sizes
                rows, starts, sizes, start = [], [], [], 0
            rows.append(row)
            starts.append(start)
            sizes.append(nbytes)
            end = start + nbytes
        if rows:
            yield rows, starts, sizes

    async def checksums(self, rows: Sequence[int]) -> dict[int, int]:
        """Return the payload CRC-32C of each row, including rows that other processes write.

        Cancellation, errors: as `windows`.
        """
        await self.computed(map(self.plan.row_array.item, rows))
        # More slots than the budget has would never become free.
        count = min(self.compute.count, len(rows), max(1, self.pool.capacity // 4))
        slots = await self.pool.take(count, grow=self.grow) if count else []
        self.held.update(slots)
        calls = [
            self.use([slot], self._checksum, slot, rows[first::count])
            for first, slot in enumerate(slots)
        ]
        found: dict[int, int] = {}
        for crcs in await together(calls):
            found |= crcs
        self.release(slots)
        return found

    async def offload(self) -> bool:
        """Copy all leaves off their devices at once, and the others too; return whether that paid.

        On True, the caller may mutate all leaves, and staging continues from the copies, which
        count in the budget until `forget`. False, with nothing copied, if no framework offers it,
        there is no room (`_keep`), or much else would be copied: host memory in one thread, or
        parts of leaves that other processes write.
        Errors: as `windows`.
        """
        opened, plan = self.sources.opened, self.plan
        if all([source.offload is None for source in opened.values()]):
            return False
        rows = plan.row_writer == self.recorder.process
        leaves = sorted({self._leaf_of[array] for array in plan.row_array.tolist()})
        nbytes_of = {leaf: held_nbytes(self.sources[leaf]) for leaf in leaves}
        far = [leaf for leaf in leaves if self.sources[leaf].offload is not None]
        near = [leaf for leaf in leaves if self.sources[leaf].offload is None]
        near_nbytes = sum(map(nbytes_of.__getitem__, near))
        nbytes = sum(nbytes_of.values())
        unwritten = nbytes - int(plan.row_payload[rows].sum())
        if max(near_nbytes, unwritten) > GROUP_NBYTES or not await self._keep(nbytes):
            return False
        await self.computed(plan.row_array.tolist())
        run = self.compute.run
        parts = [part for n in range(OFFLOAD_CALLS) if (part := far[n::OFFLOAD_CALLS])]
        calls = [run(self._offload, part) for part in parts]
        if near:
            calls.append(run(self._copy_mutable, near, near_nbytes))
        await together(calls)
        for source in opened.values():  # tied ones, too
            if source.offload is not None:
                source.leaf = source.captured = source.begin_runs = None
        self._readers.clear()
        self.grow = False
        self._find_runs()
        return True

    async def hold_immutable(self) -> bool:
        """Hold immutable leaves by reference and copy the others; return whether there was room.

        On True, the caller may mutate all mutable leaves, and staging continues from the references
        and copies. False, with nothing copied, if the copies do not fit (`_keep`).
        """
        plan = self.plan
        # Inline values, parts, and checksums of what others write have been taken by now.
        written = plan.row_array[plan.row_writer == self.recorder.process]
        held = set(written.tolist()) - set(plan.arrays.inline.tolist())
        owned = set(map(self._leaf_of.__getitem__, held))
        nbytes_of = {leaf: held_nbytes(self.sources[leaf]) for leaf in sorted(owned)}
        # A reference to a `jax.Array` is as good as a copy until the array is donated.
        mutable = [leaf for leaf in nbytes_of if self.sources[leaf].framework != "jax"]
        nbytes = sum(nbytes_of[leaf] for leaf in mutable)
        if not await self._keep(nbytes):
            return False
        if nbytes:
            await self.compute.run(self._copy_mutable, mutable, nbytes)
            self._readers.clear()
            self._find_runs()
        self.referenced_nbytes = sum(nbytes_of.values()) - nbytes
        self.grow = False
        return True

    async def _keep(self, nbytes: int) -> bool:
        """Take bytes of the budget for copies of leaves, until `forget`; return whether they fit.

        They do not if they are more than half of it or leave too little for the largest window or
        chunk.
        """
        budget = self.pool.budget
        # Slots for packing compressed chunks are kept just as long.
        packing = self.window_pool.held_nbytes if self.plan.compressed else 0
        room = budget.capacity - budget.kept - self.most_nbytes - packing
        if nbytes > max(0, min(budget.capacity // 2, room)):
            return False
        if nbytes:
            await self.pool.acquire(nbytes)
            budget.keep(nbytes)
            self.extra_nbytes += nbytes
            self._copies_nbytes = nbytes
        return True

    @property
    def most_nbytes(self) -> int:
        """Budget bytes of the largest window, or of the largest chunk and its compressed form."""
        plan, slot_nbytes = self.plan, self.pool.slot_nbytes
        most = self.window_pool.held_nbytes if plan.windows else 0
        if plan.compressed:
            largest = int(plan.row_payload[list(plan.compressed)].max())
            most = max(most, 2 * -(-largest // slot_nbytes) * slot_nbytes)
        return most

    def forget(self) -> None:
        """Drop all references to leaves, so that the caller can free them."""
        self._release_copies()
        self._readers.clear()
        self.sources.forget()

    async def use(
        self, slots: Sequence[Slot], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a function that reads or writes these slots in a worker thread.

        Cancellation: waits for the thread; if it is abandoned, the slots are quarantined.
        """
        try:
            return await self.compute.run(function, *args, **kwargs)
        except ThreadAbandonedError as error:
            self.release(slots, error=error)
            raise

    def release_all(self) -> None:
        """Release everything that is still held."""
        self._release_copies()
        self.release([*self.held], self.extra_nbytes)
        self._readers.clear()

    def release(
        self, slots: Sequence[Slot], extra_nbytes: int = 0, *, error: BaseException | None = None
    ) -> None:
        """Release slots and extra bytes; `error` is the error of their last use."""
        self.held.difference_update(slots)
        for slot in slots:
            slot.pool.release([slot], error)
        if extra_nbytes:
            self.extra_nbytes -= extra_nbytes
            self.pool.budget.release(extra_nbytes)

    def written(self, slot: Slot, error: BaseException | None, reusable: bool) -> None:
        """Release a slot that was written; discard it if a client may still be sending it."""
        self.held.discard(slot)
        if reusable:
            slot.pool.release([slot], error)
        else:
            slot.pool.discard([slot])

    def _release_copies(self) -> None:
        self.pool.budget.keep(-self._copies_nbytes)
        self.release((), self._copies_nbytes)
        self._copies_nbytes = 0

    # -- in worker threads

    def _offload(self, leaves: Sequence[int]) -> None:
        sources = [self.sources[leaf] for leaf in leaves]
        with self.recorder.span("stage", sum(map(held_nbytes, sources))), self._naming(leaves[0]):
            for offload in {source.offload: None for source in sources}:
                assert offload is not None
                offload([source for source in sources if source.offload == offload])

    def _copy_mutable(self, leaves: Sequence[int], nbytes: int) -> None:
        since = time.perf_counter()
        arena = Arena(nbytes)
        leaf = leaves[0]
        try:  # around the loop: a block for each small leaf costs a quarter of its copy
            for leaf in leaves:
                source = self.sources[leaf]
                if source.shards is None:
                    source.view = _copied(arena, source, 0)
                else:
                    source.views = tuple(
                        [_copied(arena, source, shard) for shard in range(len(source.shards))]
                    )
                source.begin_runs = None  # the caller may mutate what is on the device
        except AsyncCheckpointError:
            raise
        except Exception as error:
            raise self._failed(leaf, error) from error
        self.recorder.add("stage", since, nbytes)

    def _copy_windows(
        self, windows: Sequence[Window], slots: Sequence[Slot], seal: Seal | None
    ) -> list[StagedWindow]:
        since = time.perf_counter()
        staged: list[StagedWindow] = []
        runs, fetched = self._runs(windows, slots)
        arrive = self._begin(runs)
        try:
            if seal is not None:
                arrive()
            for window, slot, done in zip(windows, slots, fetched, strict=True):
                step_nbytes = CACHED_NBYTES if seal else window.nbytes
                filling, sums = self._fill(window, slot.buffer, step_nbytes, done), None
                if seal is not None:
                    sums = seal(window, slot.buffer, filling)
                else:
                    deque(filling, maxlen=0)
                staged.append(StagedWindow(window, slot, sums))
        finally:
            arrive()
        self.recorder.add("stage", since, sum(window.nbytes for window in windows))
        return staged

    def _fill(
        self, window: Window, buffer: Bytes, step_nbytes: int, fetched: Collection[int]
    ) -> Filling:
        """Copy the pieces of a window, with room for their trailers, and zeros between them.

        Yields the position that is reached about every `step_nbytes`. The pieces with the numbers
        `fetched` are there already.
        """
        group = _Group(buffer)
        for number, piece in enumerate(window.pieces):
            group.pad(piece.position)
            payload = buffer[piece.position : piece.position + piece.stop - piece.start]
            stop = piece.position + payload.size + TRAILER_NBYTES * piece.last
            data = None if number in fetched else self._bytes_of(piece.array, piece.row)
            if data is None:  # gathered, or fetched from a device, as a whole
                if group.parts:
                    yield group.copy()
                if number not in fetched:
                    self._copy(piece.array, piece.row, piece.start, piece.stop, payload)
                group.begin = group.end = stop
                yield stop
                continue
            data = data[piece.start : piece.stop]
            for start in range(0, data.size, step_nbytes):
                part = data[start : start + step_nbytes]
                if group.parts and group.end + part.size - group.begin > step_nbytes:
                    yield group.copy()
                group.add(part)
            group.pad(stop)
        group.pad(-(-window.nbytes // PAGE_NBYTES) * PAGE_NBYTES)
        if group.parts:
            yield group.copy()

    def _runs(
        self, windows: Sequence[Window], slots: Sequence[Slot]
    ) -> tuple[list[Run], list[set[int]]]:
        """Return the runs of device memory in windows, and the numbers of their pieces in each."""
        runs: list[Run] = []
        fetched: list[set[int]] = [set() for _ in windows]
        for window, slot, done in zip(windows, slots, fetched, strict=True):
            for number, piece in enumerate(window.pieces if self._has_runs else ()):
                out = slot.buffer[piece.position : piece.position + piece.stop - piece.start]
                if self._add_run(runs, piece.array, piece.row, piece.start, out):
                    done.add(number)
        return runs, fetched

    def _add_run(self, runs: list[Run], array: int, row: int, start: int, out: Bytes) -> bool:
        """Add the device memory of the bytes of a chunk from `start` on, if it is one run.

        Its padding is written to `out`.
        """
        plan, source = self.plan, self.sources[self._leaf_of[array]]
        first = plan.row_source.item(row)
        cast = plan.arrays.of(array).spec.dtype != source.spec.dtype
        if source.begin_runs is None or first < 0 or cast:
            return False
        inside = max(0, min(out.size, plan.row_data.item(row) - start))
        out[inside:] = 0
        runs.append(Run(source, plan.row_shard.item(row), first + start, out[:inside]))
        return True

    def _begin(self, runs: Sequence[Run]) -> Callable[[], None]:
        """Begin to copy runs of device memory; return a call that waits for them.

        It must be made before the memory is used, or reused after an error.
        """
        with contextlib.ExitStack() as begun:
            for begin in {run.source.begin_runs: None for run in runs}:
                assert begin is not None
                some = [run for run in runs if run.source.begin_runs == begin]
                begun.enter_context(self._naming(some[0].source))
                begun.callback(begin(some))
            return begun.pop_all().close

    def _copy_chunks(self, chunks: StagedChunks) -> None:
        runs: list[Run] = []
        with self.recorder.span("stage", sum(chunks.nbytes)):
            for row, at, nbytes in zip(chunks.rows, chunks.starts, chunks.nbytes, strict=True):
                array = int(self.plan.row_array[row])
                start = 0
                for out in spans(chunks.slots, at, nbytes):
                    if not (self._has_runs and self._add_run(runs, array, row, start, out)):
                        self._copy(array, row, start, start + len(out), out)
                    start += len(out)
            self._begin(runs)()

    def _checksum(self, slot: Slot, rows: Sequence[int]) -> dict[int, int]:
        crcs: dict[int, int] = {}
        size = slot.buffer.size
        for row in rows:
            array, nbytes = int(self.plan.row_array[row]), int(self.plan.row_payload[row])
            crc = 0
            for start in range(0, nbytes, size):
                out = slot.buffer[: min(size, nbytes - start)]
                self._copy(array, row, start, start + out.size, out)
                crc = crc32c(memoryview(out), crc)
            crcs[row] = crc
        return crcs

    def _bytes_of(self, array: int, row: int) -> Bytes | None:
        """Return the bytes of a chunk without padding, if they are one run in host memory."""
        start = self.plan.row_source.item(row)
        if start < 0:
            return None
        leaf, spec = self._leaf_of[array], self.plan.arrays.of(array).spec
        view, flat = self.sources.view(leaf), None
        # An array that is stored as it is needs no reader. Its specs are nearly always one object.
        if view is not None and spec is self.sources.specs[leaf]:
            flat = flat_bytes(view)
        else:
            flat = self._reader(array).flats[self.plan.row_shard.item(row)]
        return None if flat is None else flat[start : start + self.plan.row_data.item(row)]

    def _copy(self, array: int, row: int, start: int, stop: int, out: Bytes) -> None:
        plan, data = self.plan, self._bytes_of(array, row)
        if data is not None:
            inside = data[start:stop]
            np.copyto(out[: inside.size], inside)
            out[inside.size :] = 0
            return
        read, part = self._reader(array).read, plan.arrays.of(array)
        index = int(plan.row_chunk[row]) - int(plan.arrays.first_chunk[array])
        cell = tuple(map(int, np.unravel_index(index, part.grid.counts)))
        try:  # a context manager takes longer than a small chunk
            gather(read, part.spec, part.grid, cell, start, stop, out, offset=part.offset)
        except AsyncCheckpointError:
            raise
        except Exception as error:
            raise self._failed(self._leaf_of[array], error) from error

    def inline(self) -> bytearray:
        """Copy the chunks of `plan.inline` in order, each followed by room for its trailer.

        Errors: as `windows`.
        """
        arrays, inline = self.plan.arrays, self.plan.inline
        owners = self.plan.row_array[list(inline)]
        leaves = arrays.leaf[owners].tolist()
        # Specs stored unchanged as one chunk; other leaves are padded or cast.
        stored = [p.spec if p.grid.chunk_shape == p.spec.shape else None for p in arrays.parts]
        wanted = list(map(stored.__getitem__, arrays.part[owners].tolist()))
        plain, specs, gap = self.sources.plain, self.sources.specs, bytes(TRAILER_NBYTES)
        nbytes = self.plan.row_payload
        since = time.perf_counter()
        data = bytearray()
        for start in range(0, len(inline), INLINE_ARRAYS):
            group = slice(start, start + INLINE_ARRAYS)
            runs: list[Run] = []
            payloads: list[Any] = list(map(plain.__getitem__, leaves[group]))
            found = map(specs.__getitem__, leaves[group])
            for place, (values, spec, same) in enumerate(
                zip(payloads, found, wanted[group], strict=True), start
            ):
                # Equal specs are nearly always the same object.
                if values is None or spec is not same:
                    leaf, row = leaves[place], inline[place]
                    view = self.sources[leaf].view if spec == same else None
                    if view is None:
                        array, view = int(owners[place]), np.empty(int(nbytes[row]), np.uint8)
                        if not self._add_run(runs, array, row, 0, view):
                            self._copy(array, row, 0, view.nbytes, view)
                    payloads[place - start] = view
            self._begin(runs)()
            try:
                data += gap.join(payloads)
            except TypeError:  # not all of them are contiguous
                data += gap.join(map(np.ndarray.tobytes, payloads))
            data += gap
        self.recorder.add("stage", since, len(data))
        return data

    def parts(self) -> list[tuple[HeldBox, bytes]]:
        """Copy the boxes of `plan.parts`. Errors: as `windows`."""
        copies: list[tuple[HeldBox, bytes]] = []
        for part in self.plan.parts:
            out = np.empty(part.box.shape, DTYPES[self.plan.arrays.of(part.array).spec.dtype])
            with self._naming(self._leaf_of[part.array]):
                self._reader(part.array).read(part.box, out)
            copies.append((part, out.tobytes()))
        return copies

    def _reader(self, array: int) -> ArrayReader:
        leaf = self._leaf_of[array]
        reader = self._readers.get(leaf)
        if reader is None:
            dtype = self.plan.arrays.of(array).spec.dtype
            with self._naming(leaf):
                reader = ArrayReader(self.sources[leaf], dtype, path=self.path(leaf))
            self._readers[leaf] = reader
        return reader

    @contextlib.contextmanager
    def _naming(self, leaf: int | Source) -> Iterator[None]:
        """Name the leaf in errors of the block, given the number of its array, or its source."""
        try:
            yield
        except AsyncCheckpointError:  # may be of another leaf, whose copies began later
            raise
        except Exception as error:
            number = leaf if isinstance(leaf, int) else self.sources.index(leaf)
            raise self._failed(number, error) from error

    def _failed(self, leaf: int, error: Exception) -> AsyncCheckpointError:
        path = self.path(leaf)
        return StagingError(
            f"{path}: copying {self.sources[leaf].spec} to host memory failed: "
            f"{type(error).__name__}: {error}; the save was aborted, earlier checkpoints are "
            "intact",
            path=path,
            stage="stage",
        )

    def path(self, leaf: int) -> str:
        """Return the path of the leaf that an array of the plan belongs to."""
        return self.snapshot.paths[self.snapshot.array_leaf[leaf]]


class _Group:
    """Arrays that one call copies to bytes `begin` to `end` of a buffer, one behind the other.

    Between two calls, another thread may take the GIL, and getting it back takes longer than
    copying 100 KB.
    """

    __slots__ = ("begin", "buffer", "end", "parts")

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self.parts: list[Bytes] = []
        self.begin = self.end = 0

    def add(self, part: Bytes) -> None:
        self.parts.append(part)
        self.end += part.size

    def pad(self, stop: int) -> None:
        """Add zeros up to a position."""
        gap = stop - self.end
        if gap > 0:
            self.add(ZEROS[:gap] if gap <= ZEROS.size else np.zeros(gap, np.uint8))

    def copy(self) -> int:
        """Copy the arrays, and return the position behind them, where the next group begins."""
        np.concatenate(self.parts, out=self.buffer[self.begin : self.end])
        self.parts.clear()
        self.begin = self.end
        return self.end


def _copied(arena: Arena, source: Source, shard: int) -> npt.NDArray[Any]:
    """Copy the values of a shard, from its view if it has one."""
    shape, view = source.spec.shape, source.view
    if source.shards is not None:
        shape, view = source.shards[shard].box.shape, source.views[shard]
    box, dtype = Box.whole(shape), DTYPES[source.spec.dtype]
    copy = arena.take(box.size * dtype.itemsize).view(dtype).reshape(shape)
    if view is not None:
        np.copyto(copy, view, casting="no")
    else:
        assert source.adapter is not None
        source.adapter.fetch(source, shard, box, copy)
    return copy
