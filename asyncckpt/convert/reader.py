"""Reading any box of any leaf of an open checkpoint, from threads, within bounded memory."""

# Rule 1: the reader's runtime reads, checks and decodes whole chunks; callers wait in threads of
#   another runtime, or a pool would wait for itself.
# Rule 2: callers read leaves roughly in the announced order: a read includes the small chunks that
#   follow in that order.
# Rule 3: a thread that waits for room in the cache holds no block, so that others can release
#   theirs (test_many_threads_within_a_small_bound_read_everything).

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.metadata import Extents, LeafIndex, OpenCheckpoint
from asyncckpt.convert.tiles import Part, band_nbytes
from asyncckpt.flow.arena import Arena
from asyncckpt.options import MIB
from asyncckpt.planning.restore import cells_overlapping, intersection
from asyncckpt.restore.fetch import Fetch
from asyncckpt.restore.plan import Destinations, plan_reads
from asyncckpt.runtime import Runtime
from asyncckpt.spec import DTYPES, Box

Values = npt.NDArray[Any]

AHEAD_NBYTES = 8 * MIB
"""Most bytes of small chunks read together: a read of 100 bytes takes the same round trip through
two threads as one of 8 MiB."""

ALONE_NBYTES = 4 * MIB
"""Chunks of this size or more are read separately."""

AHEAD_ROWS = 8192
"""Most chunks read together."""

WHOLE_NBYTES = 8 * MIB
"""Leaves up to this size fit into any cache: the order of their chunks does not matter."""


@dataclass(slots=True, eq=False)
class Block:
    """Chunks that are loaded and evicted together.

    Attributes:
        nbytes: decoded bytes.
        loaded: decoded values by row.
        users: readers that have not released the block.
        unread: elements that no reader has read yet.
    """

    rows: Sequence[int]
    nbytes: int
    loaded: Future[dict[int, Values]] = field(default_factory=Future)
    users: int = 0
    unread: int = 0


class Blocks:
    """Cache of decoded chunks for readers that need every element about once.

    A block is evicted once all its elements were read, or when another needs its room and it is the
    least recently used. A block larger than the capacity is loaded when the cache is empty. All
    methods block and may be called from any thread.

    Args:
        capacity_nbytes: upper limit for all blocks together.
        group: returns the rows to load for a row (itself, then others that the given container
            lacks), and their bytes.
        load: returns the decoded values of rows.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        group: Callable[[int, Container[int]], tuple[Sequence[int], int]],
        load: Callable[[Sequence[int]], Sequence[Values]],
    ) -> None:
        self._capacity = capacity_nbytes
        self._group = group
        self._load = load
        self._changed = threading.Condition()
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self._of_row: dict[int, Block] = {}
        self._used = 0
        self.peak_nbytes = 0

    def take(self, row: int) -> Block:
        """Return the loaded block with this row; it stays in the cache until `release`.

        Raises:
            AsyncCheckpointError: loading it failed, in this thread or another one.
        """
        with self._changed:
            while (block := self._of_row.get(row)) is None:
                rows, nbytes = self._group(row, self._of_row)
                if self._make_room(nbytes):
                    block = Block(rows, nbytes)
                    self._of_row.update(dict.fromkeys(rows, block))
                    self._used += nbytes
                    self.peak_nbytes = max(self.peak_nbytes, self._used)
                    break
                self._changed.wait()
            block.users += 1
            self._blocks[block] = None
            self._blocks.move_to_end(block)
            is_first = block.users == 1 and not block.loaded.done()
        if not is_first:
            block.loaded.result()
            return block
        try:
            values = self._load(block.rows)
        except BaseException as error:
            with self._changed:
                self._evict(block)
            block.loaded.set_exception(error)
            raise
        block.unread = sum(part.size for part in values)
        block.loaded.set_result(dict(zip(block.rows, values, strict=True)))
        return block

    def release(self, block: Block, elements: int) -> None:
        """Release a block after reading this many of its elements."""
        with self._changed:
            block.users -= 1
            block.unread -= elements
            if block.users:
                return
            if block.unread <= 0:
                self._evict(block)
            self._changed.notify_all()

    def _make_room(self, nbytes: int) -> bool:
        """Evict unused blocks until there is room; return whether there is."""
        for block in [block for block in self._blocks if not block.users]:
            if self._used + nbytes <= self._capacity:
                break
            self._evict(block)
        return self._used + nbytes <= self._capacity or not self._blocks

    def _evict(self, block: Block) -> None:
        del self._blocks[block]
        self._used -= block.nbytes
        for row in block.rows:
            del self._of_row[row]
        self._changed.notify_all()


class LeafReader:
    """Reader of boxes of the leaves of one checkpoint, for many concurrent threads.

    The threads that call `read` belong to another runtime. `cache_nbytes` limits the decoded chunks
    in memory; a larger chunk is held alone.

    Attributes:
        pieces: arrays of each leaf; none for scalars.
        specs: shape and dtype of each leaf; None for scalars.
        read_nbytes: bytes read so far.
    """

    def __init__(
        self, runtime: Runtime, opened: OpenCheckpoint, extents: Extents, *, cache_nbytes: int
    ) -> None:
        self.opened = opened
        self._runtime = runtime
        self.extents = extents
        self.cache_nbytes = cache_nbytes
        self.pieces = opened.leaf_pieces()
        self.paths = opened.structure().paths()
        self.specs = [opened.leaf_spec(own) if own else None for own in self.pieces]
        self._counts = [storage.grid.chunk_count for storage in opened.storages]
        self._leaf_of = {p.array: leaf for leaf, own in enumerate(self.pieces) for p in own}
        # By row: its array (of tied arrays, the one that owns the chunks) and decoded bytes.
        own, kind = opened.arrays.own(), opened.stored.kind
        self._row_array = np.repeat(own, np.array(self._counts, np.int64)[kind[own]])
        sizes = np.array([storage.chunk_nbytes for storage in opened.storages], np.int64)
        self._row_nbytes = sizes[kind[self._row_array]]
        self._turn = np.zeros(opened.row_count, np.int64)
        self.in_order(range(len(self.pieces)))
        self._indices: dict[int, LeafIndex] = {}
        self._blocks = Blocks(cache_nbytes, self._group, self._load)
        self.read_nbytes = 0

    def in_order(self, leaves: Sequence[int]) -> None:
        """Announce the order in which leaves will be read; call it before any `read`."""
        arrays = [piece.array for leaf in leaves for piece in self.pieces[leaf]]
        specs, firsts = self.opened.arrays.spec, self.opened.first_rows
        rows = [np.arange(firsts[a], firsts[a] + self._counts[specs[a]]) for a in arrays]
        order = np.concatenate([np.zeros(0, np.int64), *rows])
        # Tied arrays share rows: the first occurrence counts.
        _, occurrences = np.unique(order, return_index=True)
        self._sequence = order[np.sort(occurrences)]
        self._turn[self._sequence] = np.arange(len(self._sequence))

    def read(self, leaf: int, box: Box, out: Values) -> None:
        """Read the values of `box` into `out`, of the box's shape and the stored dtype. Blocking.

        Raises:
            CorruptCheckpointError: names leaf, file and offset.
            StoreError: reading failed.
        """
        pieces, spec = self.pieces[leaf], self.specs[leaf]
        if len(pieces) == 1 and spec is not None and box.shape == spec.shape:
            array = pieces[0].array
            if self._counts[self.opened.arrays.spec[array]] == 1:
                # One chunk, like nearly all small leaves.
                self._copy(self.opened.first_rows[array], (), out)
                return
        index = self._indices.get(leaf)
        if index is None:
            index = self._indices[leaf] = LeafIndex(self.opened, pieces)
        for array, part, memory in index.overlaps(box, out):
            grid = self.opened.storage(array).grid
            first = self.opened.first_rows[array]
            for cell in cells_overlapping(grid, part).tolist():
                within, target = intersection(grid, cell, part)
                self._copy(first + cell, within, _part(memory, target))

    def _copy(self, row: int, within: tuple[slice, ...], out: Values) -> None:
        """Copy a part of a chunk into `out` and release the chunk."""
        block = self._blocks.take(row)
        try:
            np.copyto(out, _part(block.loaded.result()[row], within), casting="no")
        finally:
            self._blocks.release(block, out.size)

    def parts(self, leaf: int) -> list[Part]:
        """Return offset and grid of each array of a leaf."""
        return [(p.offset, self.opened.storage(p.array).grid) for p in self.pieces[leaf]]

    def is_banded(self, leaf: int) -> bool:
        """Return whether reading the leaf in C order would need more chunks than the cache holds.

        The leaf is an array.
        """
        spec = self.specs[leaf]
        assert spec is not None
        if spec.nbytes <= WHOLE_NBYTES:
            return False
        parts = self.parts(leaf)
        # A single chunk of any size is read once in either order.
        largest = max(grid.chunk_size for _, grid in parts) * spec.itemsize
        return band_nbytes(parts, spec.itemsize) > max(largest, self.cache_nbytes // 2)

    # -- loading

    def _group(self, row: int, present: Container[int]) -> tuple[list[int], int]:
        """Return the row, small ones that callers will soon need too, and the bytes of all."""
        total = int(self._row_nbytes[row])
        rows = [row]
        if total >= ALONE_NBYTES:
            return rows, total
        turn = int(self._turn[row]) + 1
        ahead = self._sequence[turn : turn + AHEAD_ROWS]
        sizes = self._row_nbytes[ahead]
        # Small chunks far behind large ones would be evicted before their use.
        near = int(np.searchsorted(np.cumsum(sizes), 2 * AHEAD_NBYTES, side="right"))
        room = min(AHEAD_NBYTES, self.cache_nbytes // 4)
        for other, nbytes in zip(ahead[:near].tolist(), sizes[:near].tolist(), strict=True):
            if nbytes < ALONE_NBYTES and other not in present:
                if total + nbytes > room:
                    break
                total += nbytes
                rows.append(other)
        return rows, total

    def _load(self, rows: Sequence[int]) -> list[Values]:
        numbers = np.array(rows, np.int64)
        arena = Arena(int(self._row_nbytes[numbers].sum()))
        arrays = self._row_array[numbers]
        cells = numbers - self.opened.stored.first_row[arrays]
        destinations, values = Destinations(), list[Values]()
        for array, cell in zip(arrays.tolist(), cells.tolist(), strict=True):
            storage = self.opened.storage(array)
            grid, dtype = storage.grid, DTYPES[storage.spec.dtype]
            box = None
            shape = grid.shape
            if grid.chunk_shape != shape:
                box = grid.box(tuple(int(i) for i in np.unravel_index(cell, grid.counts)))
                shape = box.shape
            memory = arena.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
            path = self.paths[self._leaf_of[array]]
            destinations.add(path, array, box, memory)
            values.append(memory)
        pool, compute = self._runtime.pool, self._runtime.engine.compute
        reads = plan_reads(self.opened, self.extents, destinations, slot_nbytes=pool.slot_nbytes)

        async def read() -> None:
            fetch = Fetch(reads, pool, compute)
            await fetch.run()
            self.read_nbytes += fetch.read_nbytes

        self._runtime.engine.submit(read).future.result()
        return values


def _part(values: Values, where: tuple[slice, ...]) -> Values:
    """Return a view, even of a single element."""
    index: Any = (*where, ...)
    part: Values = values[index]
    return part
