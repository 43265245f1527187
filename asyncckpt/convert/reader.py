"""Reading any box of any leaf of an open checkpoint, from threads, within bounded memory."""

# Rule 1: chunks are read, checked and decoded whole, by the runtime of the reader; its callers'
#   threads wait, and must belong to another one, or a pool would wait for itself.
# Rule 2: leaves are read in about the order that is given: what stands behind a small chunk in
#   that order is read along with it.

from __future__ import annotations

import math
import threading
from collections.abc import Container, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpointer.blocks import Blocks
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.flow.arena import Arena
from asyncckpt.flow.shield import leading_error
from asyncckpt.format.record import Piece
from asyncckpt.options import ALIGNED_CHUNK_NBYTES, MIB
from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.planning.restore import Request, cells_overlapping, intersection, plan_restore
from asyncckpt.planning.table import Column
from asyncckpt.planning.tiles import Part
from asyncckpt.spec import DTYPES, ArraySpec, Box, ChunkGrid
from asyncckpt.stages.decode import Destination, ReadTables, flat_target
from asyncckpt.stages.fetch import Fetch
from asyncckpt.stages.opened import Extents, OpenCheckpoint

Values = npt.NDArray[Any]

AHEAD_NBYTES = 8 * MIB
"""Small chunks are read together up to this size: a read of a hundred bytes costs a round trip
through two threads, and so does one of 8 MiB."""

ALONE_NBYTES = 4 * MIB
"""Chunks from this size on are read by themselves."""

AHEAD_ROWS = 8192
"""Chunks read together, however small."""


class LeafReader:
    """Reads boxes of the leaves of one checkpoint. Used by many threads at a time.

    Args:
        runtime: whose engine and slots read; not that of the threads that call `read`.
        opened: the checkpoint.
        extents: where its chunks stand.
        cache_nbytes: bytes of decoded chunks that are held; a larger chunk is held alone.
    """

    def __init__(
        self, runtime: Runtime, opened: OpenCheckpoint, extents: Extents, *, cache_nbytes: int
    ) -> None:
        self.opened = opened
        self._runtime = runtime
        self.extents = extents
        self._tables = ReadTables.of(opened, extents)
        self.cache_nbytes = cache_nbytes
        self.pieces = opened.leaf_pieces()
        self.paths = opened.structure().paths()
        self._specs = [opened.leaf_spec(own) if own else None for own in self.pieces]
        self._grids = [storage.grid for storage in opened.storages]
        self._counts = [grid.chunk_count for grid in self._grids]
        self._dtypes = [DTYPES[storage.spec.dtype] for storage in opened.storages]
        self._leaf_of = {p.array: leaf for leaf, own in enumerate(self.pieces) for p in own}
        self._stored = opened.stored()
        self._owners, self._owner_rows = self._rows()
        self._row_nbytes = self._decoded_nbytes()
        self._turn = np.zeros(opened.row_count, np.int64)
        self.in_order(range(len(self.pieces)))
        self._indices: dict[int, BoxIndex] = {}
        # The row of each leaf that is one chunk as a whole, which nearly all small ones are.
        self._single = [self._single_row(own) for own in self.pieces]
        self._blocks = Blocks(cache_nbytes, self._group, self._load)
        self._lock = threading.Lock()
        self.read_nbytes = 0

    def in_order(self, leaves: Sequence[int]) -> None:
        """The leaves will be read in about this order; to be called before any `read`."""
        rows = [
            np.arange(first, first + self._counts[self.opened.arrays.spec[piece.array]])
            for leaf in leaves
            for piece in self.pieces[leaf]
            for first in (self.opened.first_rows[piece.array],)
        ]
        order = np.concatenate([np.zeros(0, np.int64), *rows])
        # Tied arrays share rows: the first turn counts.
        _, firsts = np.unique(order, return_index=True)
        self._sequence = order[np.sort(firsts)]
        self._turn[self._sequence] = np.arange(len(self._sequence))

    def read(self, leaf: int, box: Box, out: Values) -> None:
        """`out` (of the box's shape, in the stored dtype) holds the values of `box`. Blocking.

        Raises:
            CorruptCheckpointError: names leaf, file and offset.
            StoreError: reading failed.
        """
        single = self._single[leaf]
        if single >= 0 and box.shape == self._shape(leaf):
            self._copy(single, (), out)
            return
        for array, part, memory in self._overlaps(leaf, box, out):
            grid = self._grid(array)
            first = self.opened.first_rows[array]
            for cell in cells_overlapping(grid, part).tolist():
                within, target = intersection(grid, cell, part)
                self._copy(first + cell, within, _part(memory, target))

    def _copy(self, row: int, within: tuple[slice, ...], out: Values) -> None:
        """`out` holds a part of a chunk; nothing keeps the chunk when this returns."""
        block = self._blocks.take(row)
        try:
            assert block.values is not None
            np.copyto(out, _part(block.values[row], within), casting="no")
        finally:
            self._blocks.give(block, out.size)

    def spec(self, leaf: int) -> ArraySpec | None:
        """Shape and dtype of a leaf; None for scalars."""
        return self._specs[leaf]

    @property
    def nbytes(self) -> int:
        """Bytes of all array leaves."""
        return sum(spec.nbytes for spec in self._specs if spec is not None)

    def parts(self, leaf: int) -> list[Part]:
        """The arrays of a leaf: where each begins, and its grid."""
        return [(piece.offset, self._grid(piece.array)) for piece in self.pieces[leaf]]

    def unverified(self, leaf: int) -> bool:
        """Whether nothing tells if the bytes of a leaf are as they were written."""
        return self.extents.crc32c is None and not all(
            self.opened.storage(piece.array).codec.crc32c for piece in self.pieces[leaf]
        )

    # -- where things are

    def _grid(self, array: int) -> ChunkGrid:
        return self._grids[self.opened.arrays.spec[array]]

    def _single_row(self, pieces: Sequence[Piece]) -> int:
        if len(pieces) != 1:
            return -1
        array = pieces[0].array
        one = self._counts[self.opened.arrays.spec[array]] == 1
        return self.opened.first_rows[array] if one else -1

    def _shape(self, leaf: int) -> tuple[int, ...]:
        return self._grid(self.pieces[leaf][0].array).shape

    def _rows(self) -> tuple[Column, Column]:
        """Arrays that have rows of their own, and the first row of each, ascending."""
        arrays = [
            array
            for array in range(len(self.opened.arrays.spec))
            if array not in self.opened.arrays.tied and self._counts[self.opened.arrays.spec[array]]
        ]
        return np.array(arrays, np.int64), self._stored.first_row[arrays]

    def _decoded_nbytes(self) -> Column:
        sizes = np.array([storage.chunk_nbytes for storage in self.opened.storages], np.int64)
        counts = np.diff(self._owner_rows, append=self.opened.row_count)
        return np.repeat(sizes[self._stored.kind[self._owners]], counts)

    def _overlaps(self, leaf: int, box: Box, out: Values) -> Iterator[tuple[int, Box, Values]]:
        """Array, part of it, and memory for that part, of all arrays that share elements."""
        pieces = self.pieces[leaf]
        if len(pieces) == 1:
            yield pieces[0].array, box, out
            return
        for number in self._index(leaf, pieces).meeting(box).tolist():
            offset, array = pieces[number].offset, pieces[number].array
            common = Box(offset, self._grid(array).shape).intersect(box)
            assert common is not None
            memory = _part(out, common.relative_to(box.offset).slices())
            yield array, common.relative_to(offset), memory

    def _index(self, leaf: int, pieces: Sequence[Piece]) -> BoxIndex:
        index = self._indices.get(leaf)
        if index is None:
            index = BoxIndex([Box(p.offset, self._grid(p.array).shape) for p in pieces])
            self._indices[leaf] = index
        return index

    # -- loading

    def _group(self, row: int, present: Container[int]) -> tuple[list[int], int]:
        """The row and small ones that will be wanted soon after it."""
        total = int(self._row_nbytes[row])
        rows = [row]
        if total >= ALONE_NBYTES:
            return rows, total
        turn = int(self._turn[row]) + 1
        ahead = self._sequence[turn : turn + AHEAD_ROWS]
        sizes = self._row_nbytes[ahead]
        # Not far past large chunks: what waits for them would be dropped before its turn.
        near = int(np.searchsorted(np.cumsum(sizes), 2 * AHEAD_NBYTES, side="right"))
        room = min(AHEAD_NBYTES, self.cache_nbytes // 4)
        for other, nbytes in zip(ahead[:near].tolist(), sizes[:near].tolist(), strict=True):
            if nbytes < ALONE_NBYTES and other not in present:
                total += nbytes
                if total > room:
                    total -= nbytes
                    break
                rows.append(other)
        return rows, total

    def _load(self, rows: Sequence[int]) -> list[Values]:
        destinations, values = self._destinations(rows)
        extents, pool = self.extents, self._runtime.pool
        plan = plan_restore(
            self._stored,
            [Request(d.array, d.box, d.flat is not None) for d in destinations],
            row_file=extents.file,
            row_offset=extents.offset,
            row_nbytes=extents.nbytes,
            slot_nbytes=pool.slot_nbytes,
            gap_nbytes=self.opened.files.capabilities.read_gap_nbytes,
            aligned_chunk_nbytes=ALIGNED_CHUNK_NBYTES,
        )

        async def read() -> int:
            fetch = Fetch(
                self._tables,
                plan,
                destinations,
                pool,
                self._runtime.engine.compute,
                concurrency=partial(self.opened.files.reads, None),
                own_memory=True,
                arrived=lambda _: None,
                progress=lambda _: None,
            )
            try:
                await fetch.run()
            except BaseExceptionGroup as group:
                raise leading_error(group) from None
            return fetch.read_nbytes

        read_nbytes = self._runtime.engine.submit(read).future.result()
        with self._lock:
            self.read_nbytes += read_nbytes
        return values

    def _destinations(self, rows: Sequence[int]) -> tuple[list[Destination], list[Values]]:
        numbers = np.array(rows, np.int64)
        arena = Arena(int(self._row_nbytes[numbers].sum()))
        owners = np.searchsorted(self._owner_rows, numbers, side="right") - 1
        arrays = self._owners[owners].tolist()
        cells = (numbers - self._owner_rows[owners]).tolist()
        destinations, memories = [], []
        for array, cell in zip(arrays, cells, strict=True):
            kind = self.opened.arrays.spec[array]
            grid, dtype = self._grids[kind], self._dtypes[kind]
            box = None
            shape = grid.shape
            if self._counts[kind] > 1:
                box = grid.box(tuple(int(i) for i in np.unravel_index(cell, grid.counts)))
                shape = box.shape
            memory = arena.take(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
            path = self.paths[self._leaf_of[array]]
            destinations.append(Destination(path, array, box, memory, flat_target(memory)))
            memories.append(memory)
        return destinations, memories


def _part(values: Values, where: tuple[slice, ...]) -> Values:
    """A view, also of rank 0."""
    index: Any = (*where, ...)
    part: Values = values[index]
    return part
