"""Stage: device or caller's memory to host buffers that the save owns.

When `Staging.everything` has returned, the caller may mutate, donate or free every leaf.
"""

# Rule 1: windows leave in plan order. Rule 2: a window's slot is taken before its copy is
#   scheduled, so that the budget bounds work as well as memory.
# Rule 3: bytes of a window that belong to no payload are zeroed: slots are used again, and what
#   another checkpoint held must not travel into this one.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import AsyncCheckpointError, StagingError
from asyncckpt.flow.arena import Arena
from asyncckpt.flow.buffers import Slot, SlotPool, spans
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import MIB, PAGE_NBYTES
from asyncckpt.planning.save import SavePlan, Window
from asyncckpt.ports import ArrayAdapter, Bytes, Source
from asyncckpt.spec import DTYPES, Box
from asyncckpt.stages.payload import ArrayReader, gather

T = TypeVar("T")
P = ParamSpec("P")

GROUP_NBYTES = 64 * MIB
"""Windows copied by one call of a worker: a hop between threads costs about 0.1 ms, the copy of
8 MiB 0.4 ms."""

SMALL_GROUP_NBYTES = 16 * MIB
"""The same where nobody waits for the copies: the first write begins after the first group."""

IMMUTABLE_FRAMEWORKS = frozenset(("jax",))
"""Whose arrays never change: a reference is as good as a copy, as long as nobody donates them."""

GROUPED_NBYTES = 1 * MIB
"""Small chunks are compressed together up to this size: a chunk by itself hops between threads four
times, for half a millisecond, and keeps two slots."""

GROUPED_ALIGNMENT = 64
"""Where they begin, in bytes: copies of elements are fastest at multiples of their size."""

INLINE_ARRAYS = 1024
"""Small arrays copied by one call of a worker, about a millisecond of work."""


@dataclass(slots=True, eq=False)
class StagedWindow:
    """A window whose payloads are in `slot`; checksums are not there yet."""

    window: Window
    slot: Slot


@dataclass(slots=True, eq=False)
class StagedChunks:
    """Whole chunks, to be compressed: a large one in consecutive slots, or small ones in one.

    Attributes:
        rows: of the chunks, in plan order.
        starts: where each begins, in bytes from the begin of the first slot.
        nbytes: length of each.
        slots: where they are.
        units: of the budget, held beside the slots for what the compressor makes.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    nbytes: Sequence[int]
    slots: list[Slot]
    units: int


class Staging:
    """The stage stage of one save."""

    def __init__(
        self,
        plan: SavePlan,
        sources: Sequence[Source],
        adapters: Sequence[ArrayAdapter],
        paths: Sequence[str],
        pool: SlotPool,
        window_pool: SlotPool,
        compute: Workers,
        *,
        grow: bool,
    ) -> None:
        self._plan = plan
        self._sources = sources
        self._adapters = adapters
        self._paths = paths
        self._pool = pool
        self._window_pool = window_pool
        self._compute = compute
        self._grow = grow
        self._leaf_of: list[int] = plan.arrays.leaf.tolist()
        self._readers: dict[int, ArrayReader] = {}
        self.held: set[Slot] = set()
        self.held_units = 0
        self.referenced_nbytes = 0
        self._copy_units = 0

    async def inline(self) -> list[bytes]:
        """The bytes of every array that stands in the B+tree, in the order of `plan.inline`.

        Cancellation: waits for a copy that is running.

        Raises:
            StagingError: names the leaf.
        """
        values: list[bytes] = []
        arrays = self._plan.inline
        for start in range(0, len(arrays), INLINE_ARRAYS):
            values += await self._compute.run(
                self._copy_inline, arrays[start : start + INLINE_ARRAYS]
            )
        return values

    async def windows(
        self, emit: Callable[[StagedWindow], None], flush: Callable[[], None]
    ) -> None:
        """Every window is staged and was handed to `emit`, in plan order.

        Copies run ahead of `emit`, as far as slots are there; `flush` is called before waiting for
        a slot that only the consumer can free. Cancellation: waits for copies that are running;
        slots not yet given back go back through `release`.

        Raises:
            StagingError: names the leaf.
        """
        running: deque[tuple[list[StagedWindow], asyncio.Task[None]]] = deque()

        async def emit_oldest() -> None:
            part, task = running[0]
            await asyncio.wait((task,))
            running.popleft()
            if not task.cancelled() and task.exception() is None:
                for item in part:
                    emit(item)

        async with asyncio.TaskGroup() as group:
            windows = self._plan.windows
            pool = self._window_pool
            # One thread, if it gets stuck, must not take the whole budget with it.
            nbytes = GROUP_NBYTES if self._grow else SMALL_GROUP_NBYTES
            most = max(1, min(nbytes // pool.slot_nbytes, pool.capacity // 4))
            if self._grow:
                group.create_task(pool.prepare(len(windows)))
            done = 0
            while done < len(windows):
                slots = pool.take_ready(min(most, len(windows) - done))
                if not slots and running:
                    await emit_oldest()
                    continue
                if not slots:
                    flush()
                    slots = await pool.take(1, grow=self._grow)
                self.held.update(slots)
                part = [
                    StagedWindow(window, slot)
                    for window, slot in zip(windows[done : done + len(slots)], slots, strict=True)
                ]
                done += len(part)
                copy = self.use(slots, self._copy_windows, part)
                running.append((part, group.create_task(copy)))
                if len(running) > self._compute.count:
                    await emit_oldest()
            while running:
                await emit_oldest()

    async def chunks(self, emit: Callable[[StagedChunks], None]) -> None:
        """Every chunk that will be compressed is staged and was handed to `emit`, in plan order.

        What is handed over holds slots for its payloads and as many units again for what the
        compressor makes, taken at once, so that compression never waits for memory. Cancellation,
        errors: as `windows`.
        """
        budget = self._pool.budget
        for rows, starts, nbytes in self._groups():
            count = max(1, -(-(starts[-1] + nbytes[-1]) // self._pool.slot_nbytes))
            # Fewer where both together exceed what is not kept by somebody.
            units = max(0, min(count, budget.capacity - budget.standing - count))
            slots = await self._pool.take(count, grow=self._grow, extra=units)
            self.held.update(slots)
            self.held_units += units
            chunks = StagedChunks(rows, starts, nbytes, slots, units)
            await self.use(slots, self._copy_chunks, chunks)
            emit(chunks)

    def _groups(self) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Rows of chunks that are compressed together, where they begin, and their lengths."""
        plan = self._plan
        most = min(GROUPED_NBYTES, self._pool.slot_nbytes)
        rows: list[int] = []
        starts: list[int] = []
        sizes: list[int] = []
        end = 0
        for array in plan.compressed:
            first = int(plan.first_row[array])
            count = plan.arrays.of(array).grid.chunk_count
            payloads = plan.row_payload[first : first + count].tolist()
            for row, nbytes in enumerate(payloads, first):
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

    async def hold_immutable(self) -> bool:
        """Immutable leaves are held, all others were copied; False if those are too many.

        Afterwards the caller may mutate everything that can be mutated, and staging goes on from
        what is held. The copies count in the budget until `forget`; where they would take more
        than half of it, or leave too little for the largest of what is staged, nothing is done.
        """
        plan = self._plan
        leaf_of, inline = self._leaf_of, set(plan.inline)
        owned = {
            leaf_of[array]
            for array in range(len(leaf_of))
            if array not in inline and array not in plan.arrays.tied
        }
        mutable = []
        held_nbytes = 0
        for leaf, source in enumerate(self._sources):
            if leaf not in owned:
                continue
            if source.framework in IMMUTABLE_FRAMEWORKS:
                held_nbytes += source.spec.nbytes
            else:
                mutable.append(leaf)
        nbytes = sum(self._sources[leaf].spec.nbytes for leaf in mutable)
        units = -(-nbytes // self._pool.slot_nbytes)
        budget = self._pool.budget
        # What compressed chunks are packed into is kept all the while, too.
        packing = self._window_pool.units if plan.compressed else 0
        room = budget.capacity - budget.standing - self.most_units - packing
        if units > max(0, min(budget.capacity // 2, room)):
            return False
        if units:
            await self._pool.acquire(units)
            budget.stand(units)
            self.held_units += units
            self._copy_units = units
            await self._compute.run(self._copy_mutable, mutable, nbytes)
            self._readers.clear()
        self.referenced_nbytes = held_nbytes
        self._grow = False
        return True

    @property
    def most_units(self) -> int:
        """Units of the budget that a window or chunk takes at once, the largest of them."""
        plan = self._plan
        most = self._window_pool.units if plan.windows else 0
        if plan.compressed:
            rows = plan.first_row[list(plan.compressed)]
            largest = int(plan.row_payload[rows].max())
            most = max(most, -(-largest // self._pool.slot_nbytes))
        return most

    def forget(self) -> None:
        """No leaf is held any more: what the caller drops is freed at once."""
        self._give_copies()
        self._readers.clear()
        for source in self._sources:
            source.leaf = source.view = source.stream = None
            source.views = ()
            source.identity = None

    async def use(
        self, slots: Sequence[Slot], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of the call, made in a worker thread, that reads or writes these slots.

        Cancellation: waits for the thread; if it is abandoned, the slots are quarantined.
        """
        try:
            return await self._compute.run(function, *args, **kwargs)
        except ThreadAbandonedError as error:
            self.give(slots, error=error)
            raise

    def release(self) -> None:
        """Slots and units that nobody gave back go back; for the end of a failed save."""
        for slot in self.held:
            slot.pool.give([slot])
        self.held.clear()
        self._give_copies()
        if self.held_units:
            self._pool.budget.release(self.held_units)
            self.held_units = 0
        self._readers.clear()

    def give(
        self, slots: Sequence[Slot], units: int = 0, *, error: BaseException | None = None
    ) -> None:
        """These slots and units are free again; `error` is how their last use ended."""
        self.held.difference_update(slots)
        for slot in slots:
            slot.pool.give([slot], error)
        if units:
            self.held_units -= units
            self._pool.budget.release(units)

    def _give_copies(self) -> None:
        if self._copy_units:
            self._pool.budget.stand(-self._copy_units)
            self.give((), self._copy_units)
            self._copy_units = 0

    def discard(self, slot: Slot) -> None:
        """The slot is not used again: a client may still be sending what is in it."""
        self.held.discard(slot)
        slot.pool.discard([slot])

    # -- in worker threads

    def _copy_mutable(self, leaves: Sequence[int], nbytes: int) -> None:
        arena = Arena(nbytes)
        for leaf in leaves:
            source, adapter = self._sources[leaf], self._adapters[leaf]
            try:
                if source.shards is None:
                    whole = Box.whole(source.spec.shape)
                    source.view = _copied(arena, source, adapter, whole, source.view)
                    continue
                # Equal shards are copied once.
                copies: dict[Box, npt.NDArray[Any]] = {}
                for shard, view in zip(source.shards, source.views, strict=True):
                    if shard.box not in copies:
                        copies[shard.box] = _copied(arena, source, adapter, shard.box, view)
                source.views = tuple([copies[shard.box] for shard in source.shards])
            except Exception as error:
                raise self._failed(leaf, error) from error

    def _copy_windows(self, part: Sequence[StagedWindow]) -> None:
        for item in part:
            buffer = item.slot.buffer
            end = 0
            for piece in item.window.pieces:
                if piece.position > end:
                    buffer[end : piece.position] = 0
                end = piece.position + piece.stop - piece.start
                self._copy(
                    piece.array, piece.row, piece.start, piece.stop, buffer[piece.position : end]
                )
            buffer[end : -(-item.window.nbytes // PAGE_NBYTES) * PAGE_NBYTES] = 0

    def _copy_chunks(self, chunks: StagedChunks) -> None:
        for row, at, nbytes in zip(chunks.rows, chunks.starts, chunks.nbytes, strict=True):
            array = int(self._plan.row_array[row])
            start = 0
            for out in spans(chunks.slots, at, nbytes):
                self._copy(array, row, start, start + len(out), out)
                start += len(out)

    def _copy(self, array: int, row: int, start: int, stop: int, out: Bytes) -> None:
        plan = self._plan
        try:
            reader = self._reader(array)
            source = int(plan.row_source[row])
            flat = reader.flats[plan.row_shard[row]] if source >= 0 else None
            if flat is not None:
                data = min(stop, int(plan.row_data[row])) - start
                if data > 0:
                    np.copyto(out[:data], flat[source + start : source + start + data])
                if data < stop - start:
                    out[max(data, 0) :] = 0
                return
            self._gather(reader, array, row, start, stop, out)
        except Exception as error:
            raise self._failed(self._leaf_of[array], error) from error

    def _gather(
        self, reader: ArrayReader, array: int, row: int, start: int, stop: int, out: Bytes
    ) -> None:
        plan = self._plan
        part = plan.arrays.of(array)
        grid = part.grid
        index = row - int(plan.first_row[array])
        cell = tuple(int(i) for i in np.unravel_index(index, grid.counts)) if grid.shape else ()
        gather(reader.read, part.spec, grid, cell, start, stop, out, offset=part.offset)

    def _copy_inline(self, arrays: Sequence[int]) -> list[bytes]:
        plan = self._plan
        values: list[bytes] = []
        for array in arrays:
            source = self._sources[self._leaf_of[array]]
            try:
                part = plan.arrays.of(array)
                # A leaf without shards is one array, which its chunk may exceed.
                if (
                    source.view is not None
                    and part.spec.dtype == source.spec.dtype
                    and part.grid.chunk_shape == part.spec.shape
                ):
                    values.append(source.view.tobytes())
                    continue
                row = int(plan.first_row[array])
                payload = np.empty(int(plan.row_payload[row]), np.uint8)
                self._gather(self._reader(array), array, row, 0, payload.nbytes, payload)
                values.append(payload.tobytes())
            except Exception as error:
                raise self._failed(self._leaf_of[array], error) from error
        return values

    def _reader(self, array: int) -> ArrayReader:
        leaf = self._leaf_of[array]
        reader = self._readers.get(leaf)
        if reader is None:
            reader = ArrayReader(
                self._sources[leaf],
                self._adapters[leaf],
                self._plan.arrays.of(array).spec.dtype,
                path=self._paths[leaf],
            )
            self._readers[leaf] = reader
        return reader

    def _failed(self, leaf: int, error: Exception) -> AsyncCheckpointError:
        if isinstance(error, AsyncCheckpointError):
            return error
        return StagingError(
            f"{self._paths[leaf]}: copying {self._sources[leaf].spec} to host memory failed: "
            f"{type(error).__name__}: {error}; the save was aborted, earlier ones are intact",
            path=self._paths[leaf],
            stage="stage",
        )


def _copied(
    arena: Arena,
    source: Source,
    adapter: ArrayAdapter,
    box: Box,
    view: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    """A copy of the values of `box`, which `view` holds, if it is there."""
    dtype = DTYPES[source.spec.dtype]
    copy = arena.take(box.size * dtype.itemsize).view(dtype).reshape(box.shape)
    if view is not None:
        np.copyto(copy, view, casting="no")
    else:
        adapter.fetch(source, box, copy)
    return copy
