"""Where the bytes of a chunk are before they are stored: in which shard's memory, and where."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncckpt.planning.grid import contiguous_runs
from asyncckpt.planning.restore import cells_overlapping
from asyncckpt.planning.table import Column
from asyncckpt.spec import Box, ChunkGrid, Shard


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


def chunk_sources(
    grid: ChunkGrid, itemsize: int, offset: tuple[int, ...], shards: tuple[Shard, ...] | None
) -> ChunkSources:
    """The sources of an array that begins at `offset` of a leaf held in these shards.

    Of equal shards the first counts. None stands for one shard that is the array.
    """
    rows = np.arange(grid.chunk_count)
    start, nbytes = contiguous_runs(grid, itemsize, rows, Box.whole(grid.shape))
    shard = np.zeros(len(rows), np.int64)
    if shards is None:
        return ChunkSources(start, shard, nbytes)
    start = np.full(len(rows), -1, np.int64)
    array = Box(offset, grid.shape)
    # A shard may hold parts of several arrays, and in memory reach past this one.
    for number in reversed(range(len(shards))):
        box = shards[number].box
        common = box.intersect(array)
        if common is None:
            continue
        rows = cells_overlapping(grid, common.relative_to(offset))
        runs, _ = contiguous_runs(grid, itemsize, rows, box.relative_to(offset))
        found = rows[runs >= 0]
        start[found] = runs[runs >= 0]
        shard[found] = number
    return ChunkSources(start, shard, nbytes)
