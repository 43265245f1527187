"""Order in which an array is copied out of its chunks.

Chunks are read and decoded whole. Reading an array in C order keeps a band of chunks in memory. If
the band is too large, the array is copied chunk by chunk instead: no chunk is decoded twice, and
the output is written in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from asyncckpt.planning.chunk_shape import divisors
from asyncckpt.planning.overlap import runs
from asyncckpt.spec import Box, ChunkGrid

Part = tuple[tuple[int, ...], ChunkGrid]
"""One stored array of a leaf: its offset in the leaf, and its grid."""

LARGEST_TILE = 4
"""A chunk shape for a leaf in pieces may exceed the target size by this factor."""


def band_nbytes(parts: Sequence[Part], itemsize: int) -> int:
    """Return the bytes of decoded chunks needed at once to read a leaf in C order."""
    bands = [_band_nbytes(grid, itemsize) for _, grid in parts]
    stacked = all(not any(offset[1:]) for offset, _ in parts)
    return max(bands) if stacked else sum(bands)


def _band_nbytes(grid: ChunkGrid, itemsize: int) -> int:
    # C order returns to the same chunks along the axes after the first one with long chunks.
    first = next((i for i, c in enumerate(grid.chunk_shape) if c > 1), len(grid.shape))
    return grid.chunk_size * itemsize * math.prod(max(1, n) for n in grid.counts[first + 1 :])


def tiles(parts: Sequence[Part], itemsize: int, target_nbytes: int) -> Iterator[Box]:
    """Yield boxes that tile a leaf chunk by chunk, each at most about the target size.

    A tile has several small chunks, or a run of rows of a large one.
    """
    for offset, grid in parts:
        cell = tile_shape(grid, itemsize, target_nbytes)
        coarse = ChunkGrid(grid.shape, cell)
        for index in coarse.cells():
            tile = coarse.box(index)
            for box in runs(tile.shape, itemsize, target_nbytes):
                origin = zip(box.offset, tile.offset, offset, strict=True)
                yield Box(tuple(map(sum, origin)), box.shape)


def tile_shape(grid: ChunkGrid, itemsize: int, target_nbytes: int) -> tuple[int, ...]:
    """Return a multiple of the chunk shape, at most the target size and without extra padding."""
    shape = list(grid.chunk_shape)
    room = max(1, target_nbytes // (grid.chunk_size * itemsize))
    for axis in reversed(range(len(shape))):
        factor = max(d for d in divisors(max(1, grid.counts[axis])) if d <= room)
        shape[axis] *= factor
        room //= factor
    return tuple(shape)


def chunk_shape_for(
    shape: tuple[int, ...],
    parts: Sequence[Part],
    itemsize: int,
    *,
    target_nbytes: int,
    limit_nbytes: int,
) -> tuple[int, ...] | None:
    """Return a chunk shape for the leaf such that each tile needs few chunks.

    None means that the default grid is as good. Chunks beyond the limit are cut evenly.
    """
    if len(parts) == 1:
        return _within(tile_shape(parts[0][1], itemsize, target_nbytes), itemsize, limit_nbytes)
    widest = [max(lengths) for lengths in zip(*(g.chunk_shape for _, g in parts), strict=True)]
    # Evenly, so that padding is less than one element per chunk.
    even = tuple(-(-n // -(-n // min(c, n))) for n, c in zip(shape, widest, strict=True))
    if math.prod(even) * itemsize > LARGEST_TILE * target_nbytes:
        return None
    return _within(even, itemsize, limit_nbytes)


def _within(chunk: tuple[int, ...], itemsize: int, limit_nbytes: int) -> tuple[int, ...]:
    """Cut the chunk exactly along its leading axes, down to the limit."""
    shape = list(chunk)
    for axis, length in enumerate(chunk):
        rest = math.prod(shape) // length * itemsize
        shape[axis] = max([1, *(d for d in divisors(length) if d * rest <= limit_nbytes)])
        if shape[axis] * rest <= limit_nbytes:
            break
    return tuple(shape)
