"""Where the bytes of a chunk are before they are stored: in which shard's memory, and where."""

# The cost is that of shards and chunks, never of their pairs.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncckpt.planning.arrays import Part
from asyncckpt.planning.grid import contiguous_runs, runs_within
from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.planning.restore import cells_overlapping
from asyncckpt.planning.table import Column
from asyncckpt.spec import Box, ChunkGrid, Shard

TABLE_CELLS_PER_SHARD = 64
"""Largest table of which cell of a common grid is in which shard; beyond, shards are asked one by
one. Those of a mesh have about as many cells as there are shards."""


class ChunkSources(NamedTuple):
    """The sources of an array's chunks, in C order of its grid.

    Attributes:
        start: byte offset of the chunk in the C-order memory of its shard, if it is one run of
            bytes there and the beginning of its payload, else -1.
        shard: that shard; 0 where there is none, or no such run.
        nbytes: bytes of the chunk inside the array.
    """

    start: Column
    shard: Column
    nbytes: Column


def chunk_sources(parts: Sequence[Part]) -> list[ChunkSources]:
    """The sources of each array; of equal shards the first counts."""
    found: list[ChunkSources] = []
    shards: tuple[Shard, ...] | None = None
    for part in parts:
        if part.shards is None:
            whole = Box.whole(part.grid.shape)
            rows = np.arange(part.grid.chunk_count)
            start, nbytes = contiguous_runs(part.grid, part.spec.itemsize, rows, whole)
            found.append(ChunkSources(start, np.zeros(len(rows), np.int64), nbytes))
            continue
        if part.shards is not shards:  # pieces of one leaf stand together
            shards = part.shards
            held = _Shards(shards)
        found.append(held.sources(part.grid, part.spec.itemsize, part.offset))
    return found


class _Shards:
    """The shards of one leaf, to be asked for the sources of its arrays."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        boxes = [shard.box for shard in shards]
        rank = len(boxes[0].shape) if boxes else 0
        self._index = BoxIndex(boxes)
        self._starts = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), rank)
        self._shapes = np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), rank)

    def sources(self, grid: ChunkGrid, itemsize: int, offset: tuple[int, ...]) -> ChunkSources:
        """The sources of an array that begins at `offset` of the leaf."""
        rows = np.arange(grid.chunk_count)
        _, nbytes = contiguous_runs(grid, itemsize, rows, Box.whole(grid.shape))
        near = np.sort(self._index.meeting(Box(offset, grid.shape)))
        # A shard may hold parts of several arrays, and in memory reach past this one.
        starts, shapes = self._starts[near] - np.array(offset, np.int64), self._shapes[near]
        holder = _holders(grid, rows, starts, starts + shapes)
        inside = np.flatnonzero(holder >= 0)
        holder = holder[inside]
        runs, _ = runs_within(
            grid, itemsize, rows[inside], list(starts[holder].T), list(shapes[holder].T)
        )
        start, shard = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
        start[inside] = runs
        shard[inside] = np.where(runs >= 0, near[holder], 0)
        return ChunkSources(start, shard, nbytes)


def _holders(
    grid: ChunkGrid,
    rows: Column,
    starts: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
) -> Column:
    """Per chunk the first shard that holds its first element, or -1.

    Chunks that no shard holds whole may get any shard.
    """
    if not len(rows) or not len(starts):
        return np.full(len(rows), -1, np.int64)
    if not grid.shape:
        return np.zeros(len(rows), np.int64)
    cells = np.unravel_index(rows, grid.counts)
    corners = [cell.astype(np.int64) * c for cell, c in zip(cells, grid.chunk_shape, strict=True)]
    edges = [np.unique([starts[:, i], stops[:, i]]) for i in range(len(corners))]
    counts = tuple(len(cuts) - 1 for cuts in edges)
    if math.prod(counts) > TABLE_CELLS_PER_SHARD * len(starts):
        found = np.full(len(rows), -1, np.int64)
        for number in reversed(range(len(starts))):
            first = np.maximum(starts[number], 0)
            last = np.minimum(stops[number], grid.shape)
            # A chunk that several shards hold in parts is a run of none of them.
            part = Box(tuple(first.tolist()), tuple((last - first).tolist()))
            found[cells_overlapping(grid, part)] = number
        return found
    low = [np.searchsorted(cuts, starts[:, i]) for i, cuts in enumerate(edges)]
    high = [np.searchsorted(cuts, stops[:, i]) for i, cuts in enumerate(edges)]
    table = np.full(counts, -1, np.int64)
    single = np.all([b - a == 1 for a, b in zip(low, high, strict=True)], axis=0)
    one = np.flatnonzero(single)[::-1]  # of equal shards the first is written last
    table[tuple(column[one] for column in low)] = one
    for number in np.flatnonzero(~single)[::-1].tolist():
        where = tuple(slice(a[number], b[number]) for a, b in zip(low, high, strict=True))
        table[where] = number
    at_cell = [
        np.searchsorted(cuts, corner, side="right") - 1
        for cuts, corner in zip(edges, corners, strict=True)
    ]
    known = np.all([(at >= 0) & (at < n) for at, n in zip(at_cell, counts, strict=True)], axis=0)
    index = tuple(np.where(known, at, 0) for at in at_cell)
    return np.where(known, table[index], -1)
