"""Which chunk grid an array is stored on.

`choose_grid` keeps two limits, whatever the shape: at most 2 % padding where an array exceeds
1 MiB, and at most 4 × (bytes / target + distinct shards) chunks. Both are about stored bytes:
zarr stores the cells on the far edge full size, and every chunk costs an index entry and a read.
"""

# Rule 1: a chunk is a contiguous run of its array, or of its shard, wherever the limits allow.
# Rule 2: the limits win over the target size; a chunk may exceed it when no other cut is left.
# Rule 3: no chunk crosses a shard's edge once the leaf is too large to travel whole.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB
from asyncckpt.planning.cut import PADDED_NBYTES, Limits, cut_freely
from asyncckpt.planning.shards import distinct_boxes, follow_shards
from asyncckpt.planning.table import Column
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard

WHOLE_NBYTES = 64 * KIB
"""Sharded leaves up to this size are one chunk: their shards travel in the entries."""


def choose_grid(
    spec: ArraySpec,
    shards: tuple[Shard, ...] | None,
    *,
    chunk_nbytes: int,
    chunk_shape: tuple[int, ...] | None = None,
    regular: bool = False,
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """The arrays that store one leaf, as (offset in the leaf, grid); nearly always just one.

    Args:
        spec: the leaf.
        shards: all shards of the leaf, over all processes; equal and empty boxes are ignored,
            the others tile it. None stands for one that covers the leaf.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape in elements; wins over `chunk_nbytes`.
        regular: one array, or an error.

    Raises:
        UsageError: `chunk_shape` has another rank, an entry that is not positive, or cuts chunks
            that no process holds whole; `chunk_nbytes` is not positive; or `regular`, and the
            finest grid that follows the shards has too many chunks.
        ValueError: the shards do not tile the leaf.
    """
    boxes = distinct_boxes(spec, shards)
    origin = (0,) * len(spec.shape)
    if chunk_shape is not None:
        _check_chunk_shape(spec, chunk_shape, boxes, shards)
        return ((origin, ChunkGrid(spec.shape, chunk_shape)),)
    if chunk_nbytes < 1:
        raise UsageError(
            f"chunk_nbytes={chunk_nbytes}: pass a positive number of bytes", found=chunk_nbytes
        )
    filled = tuple(max(1, n) for n in spec.shape)
    strict = spec.nbytes > PADDED_NBYTES
    if len(boxes) > 1 and spec.nbytes <= WHOLE_NBYTES:
        return ((origin, ChunkGrid(spec.shape, filled)),)
    if len(boxes) <= 1:
        if math.prod(filled) * spec.itemsize <= chunk_nbytes:
            return ((origin, ChunkGrid(spec.shape, filled)),)
        limits = Limits(filled, spec.itemsize, chunk_nbytes, 1, strict)
        return ((origin, ChunkGrid(spec.shape, cut_freely(limits))),)
    return follow_shards(spec, boxes, chunk_nbytes, strict, regular=regular)


def contiguous_runs(
    grid: ChunkGrid, itemsize: int, rows: Column, box: Box
) -> tuple[Column, Column]:
    """Per chunk: where it stands in the C-order memory of `box`, and how many bytes it holds.

    The first is the byte offset in `box` of a chunk that lies in it as a whole, as one run of
    bytes that is also the beginning of the chunk's payload (so that padding trails); -1 for all
    others. The second is the size in bytes of the chunk clipped to the array.

    Args:
        grid: grid of the array.
        itemsize: bytes per element.
        rows: chunk numbers in the array, in C order.
        box: a part of the array, or of what the array is a part of: it may reach past it.
    """
    if len(rows) == 1 and grid.chunk_shape == grid.shape == box.shape and not any(box.offset):
        return np.zeros(1, np.int64), np.array([math.prod(grid.shape) * itemsize], np.int64)
    return runs_within(grid, itemsize, rows, box.offset, box.shape)


def runs_within(
    grid: ChunkGrid,
    itemsize: int,
    rows: Column,
    offsets: Sequence[int | Column],
    shapes: Sequence[int | Column],
) -> tuple[Column, Column]:
    """As `contiguous_runs`; offset and shape of the box may differ by row, one column per axis."""
    if not len(rows) or not grid.shape:
        return np.zeros(len(rows), np.int64), np.full(len(rows), itemsize, np.int64)
    cells = np.unravel_index(rows, grid.counts)
    inside = np.ones(len(rows), bool)
    in_box, box_full, in_chunk, chunk_full = (np.ones(len(rows), bool) for _ in range(4))
    offset = np.zeros(len(rows), np.int64)
    nbytes = np.full(len(rows), itemsize, np.int64)
    stride: int | Column = itemsize
    for cell, n, c, first, length in zip(
        cells[::-1],
        grid.shape[::-1],
        grid.chunk_shape[::-1],
        offsets[::-1],
        shapes[::-1],
        strict=True,
    ):
        start = cell.astype(np.int64) * c - first
        held = np.minimum(c, n - first - start)
        inside &= (start >= 0) & (start + held <= length)
        # A part is one run of what encloses it when, after ones, at most one axis is not full.
        in_box = ((held == 1) & in_box) | box_full
        in_chunk = ((held == 1) & in_chunk) | chunk_full
        box_full &= held == length
        chunk_full &= held == c
        offset += start * stride
        nbytes *= held
        stride = stride * length
    return np.where(inside & in_box & in_chunk, offset, -1), nbytes


def _check_chunk_shape(
    spec: ArraySpec,
    chunk_shape: tuple[int, ...],
    boxes: Sequence[Box],
    shards: tuple[Shard, ...] | None,
) -> None:
    if len(chunk_shape) != len(spec.shape):
        raise UsageError(
            f"chunk_shape={chunk_shape} has rank {len(chunk_shape)}, but {spec} has rank "
            f"{len(spec.shape)}; pass one length per dimension",
            expected=len(spec.shape),
            found=len(chunk_shape),
        )
    if any(c < 1 for c in chunk_shape):
        raise UsageError(
            f"chunk_shape={chunk_shape} for {spec}: every length must be at least 1",
            expected="positive lengths",
            found=chunk_shape,
        )
    if shards is None or len(boxes) < 2 or spec.nbytes <= WHOLE_NBYTES:
        return
    if set.intersection(*(set(s.holders) for s in shards if s.box.size)):
        return
    for axis, (n, c) in enumerate(zip(spec.shape, chunk_shape, strict=True)):
        edges = {b.offset[axis] for b in boxes} | {b.stop[axis] for b in boxes} - {n}
        if any(edge % c for edge in edges):
            raise UsageError(
                f"chunk_shape={chunk_shape} for {spec}: along axis {axis} the shards end at "
                f"{sorted(edges - {0})}, so chunks of {c} would be held in parts by two processes; "
                "pass a length that divides these, or leave chunk_shape out",
                expected=sorted(edges - {0}),
                found=c,
            )
