"""Chunks that a process holds: where their bytes are, and which other processes hold them."""

# Rule 1: all holders of a chunk agree on the set of holders, although each knows only its own
#   shards. The holders of a shard hold the chunks inside it; the processes that hold the whole leaf
#   hold the chunks that span several shards.
# Rule 2: the chunk of a small sharded leaf belongs to the processes that hold the whole leaf; if
#   there are none, process 0 receives the shards and makes the chunk.
# Rule 3: the cost depends only on the process's own shards and chunks.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncckpt.planning.balance import Holders
from asyncckpt.planning.grid import WHOLE_NBYTES
from asyncckpt.planning.leaves import Arrays, LeafLayout, Part
from asyncckpt.planning.overlap import BoxIndex, cells_between, runs_within
from asyncckpt.planning.table import Column, expanded
from asyncckpt.spec import Box, ChunkGrid, Shard


class HeldChunks(NamedTuple):
    """The chunks that a process holds of one or several arrays, array by array in C order.

    Attributes:
        cell: number of the chunk in the array.
        start: byte offset of the chunk in the C-order memory of its shard, if it is one run of
            bytes there and the beginning of its payload, else -1.
        shard: number of that shard among the process's own; 0 if there is no run.
        nbytes: bytes of the chunk inside the array.
        holders: number of the set of processes that hold it.
    """

    cell: Column
    start: Column
    shard: Column
    nbytes: Column
    holders: Column


NOTHING = HeldChunks(*np.zeros((5, 0), np.int64))


class HeldBox(NamedTuple):
    """A shard of a small leaf whose only chunk no process holds whole.

    Attributes:
        array: number of the array.
        box: the shard's part of the array.
        writer: lowest holder of the box, which sends its values; the others send a checksum.
    """

    array: int
    box: Box
    writer: int


def held_chunks(arrays: Arrays, holders: Holders) -> tuple[Column, HeldChunks, tuple[HeldBox, ...]]:
    """Return the array of each chunk that a process holds, the chunks, and the process's boxes.

    Chunks are in the order of arrays; tied arrays have none of their own. Boxes are the process's
    parts of small arrays that it does not hold whole.
    """
    found: list[HeldChunks] = []
    in_parts: dict[int, HeldShards] = {}
    layout: LeafLayout | None = None
    for number, (part, count) in enumerate(
        zip(arrays.parts, arrays.part_chunks.tolist(), strict=True)
    ):
        if part.layout.shards is None and part.layout.partition is None:
            found.append(_whole(part, count, holders))
            continue
        if part.layout is not layout:  # pieces of one leaf are consecutive
            layout = part.layout
            held = HeldShards(layout, holders)
        if held.in_parts:
            found.append(NOTHING)
            in_parts[number] = held
        else:
            found.append(held.chunks(part.grid, part.spec.itemsize, part.offset))
    # A part may belong to several arrays.
    count_of = np.array([len(chunks.cell) for chunks in found], np.int64)
    counts = count_of[arrays.part]
    counts[list(arrays.tied)] = 0
    array, place = expanded(counts)
    at = (np.cumsum(count_of) - count_of)[arrays.part][array] + place
    rows = HeldChunks(*np.hstack([NOTHING, *found])[:, at])
    boxes: list[HeldBox] = []
    for number in np.flatnonzero(np.isin(arrays.part, list(in_parts))).tolist():
        if number not in arrays.tied:
            boxes += in_parts[int(arrays.part[number])].boxes(number)
    return array, rows, tuple(boxes)


def _whole(part: Part, count: int, holders: Holders) -> HeldChunks:
    kind = holders.number(part.layout.holders)
    if not holders.includes_own[kind]:
        return NOTHING
    cells, zeros = np.arange(count), np.zeros(count, np.int64)
    grid, spec = part.grid, part.spec
    start, nbytes = zeros, zeros + spec.nbytes
    if grid.chunk_shape != grid.shape:  # most arrays are one chunk
        start, nbytes = runs_within(grid, spec.itemsize, cells, (0,) * len(grid.shape), grid.shape)
    return HeldChunks(cells, start, zeros, nbytes, zeros + kind if kind else zeros)


class HeldShards:
    """The shards of one leaf that a process holds.

    Attributes:
        in_parts: the leaf is small and the process holds only a part of it.
    """

    def __init__(self, layout: LeafLayout, holders: Holders) -> None:
        shards: Sequence[Shard] = layout.shards or ()
        kinds = np.zeros(len(shards), np.int64)
        if holders.process_count > 1:
            kinds[:] = [holders.number(shard.holders) for shard in shards]
            own = [
                number for number, kind in enumerate(kinds.tolist()) if holders.includes_own[kind]
            ]
            shards, kinds = [shards[number] for number in own], kinds[own]
        boxes = [shard.box for shard in shards]
        rank = len(layout.spec.shape)
        self._boxes = boxes
        self._kinds = kinds
        self._sets = holders
        self._index = BoxIndex(boxes)
        self._starts = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), rank)
        self._shapes = np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), rank)
        size = layout.spec.size
        self._everything = holders.process_count == 1 or (
            int(self._shapes.prod(axis=1).sum()) >= size  # replicas included
            and sum(box.size for box in set(boxes)) == size
        )
        small = layout.spec.nbytes <= WHOLE_NBYTES
        self.in_parts = small and not self._everything
        if small and self._everything and len(shards):
            self._kinds = np.full(len(shards), holders.common(kinds.tolist()))

    def chunks(self, grid: ChunkGrid, itemsize: int, offset: tuple[int, ...]) -> HeldChunks:
        """Return the held chunks of an array that begins at `offset` of the leaf."""
        near = np.sort(self._index.meeting(Box(offset, grid.shape)))
        # A shard may cover parts of several arrays, and so extend beyond this one.
        starts, shapes = self._starts[near] - np.array(offset, np.int64), self._shapes[near]
        inside, holder = _cells_inside(grid, starts, starts + shapes)
        runs, _ = runs_within(
            grid, itemsize, inside, list(starts[holder].T), list(shapes[holder].T)
        )
        cells, at = inside, np.arange(len(inside))
        if self._everything:
            cells, at = np.arange(grid.chunk_count), inside
        start, shard = np.full(len(cells), -1, np.int64), np.zeros(len(cells), np.int64)
        start[at] = runs
        shard[at] = np.where(runs >= 0, near[holder], 0)
        kinds = np.zeros(len(cells), np.int64)
        if len(at) < len(cells) and len(self._kinds):
            kinds[:] = self._sets.common(self._kinds.tolist())
        kinds[at] = self._kinds[near[holder]]
        _, nbytes = runs_within(grid, itemsize, cells, (0,) * len(grid.shape), grid.shape)
        return HeldChunks(cells, start, shard, nbytes, kinds)

    def boxes(self, array: int) -> list[HeldBox]:
        """Return the distinct boxes as parts of this array."""
        writers: dict[Box, int] = {}
        for box, kind in zip(self._boxes, self._kinds.tolist(), strict=True):
            if box.size:
                writers.setdefault(box, self._sets.sets[kind][0])
        return [HeldBox(array, box, writer) for box, writer in writers.items()]


def _cells_inside(grid: ChunkGrid, starts: Column, stops: Column) -> tuple[Column, Column]:
    """Return the chunks that lie whole in a shard, sorted, and the first such shard of each.

    `starts` and `stops` delimit each shard; they may lie outside the array.
    """
    chunk, shape = np.array(grid.chunk_shape, np.int64), np.array(grid.shape, np.int64)
    low = -(-np.maximum(starts, 0) // chunk)
    high = np.where(stops >= shape, np.array(grid.counts, np.int64), stops // chunk)
    which, cells = cells_between(grid, low, np.maximum(high - low, 0))
    cells, first = np.unique(cells, return_index=True)
    return cells, which[first]
