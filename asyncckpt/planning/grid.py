"""Chunk grid of an array, within limits on padding and number of chunks.

`choose_grid` keeps two limits, whatever the shape: at most 2 % padding where an array exceeds
1 MiB, and at most 4 × (bytes / target + distinct shards) chunks. Both are about stored bytes:
zarr stores the cells on the far edge full size, and every chunk costs an index entry and a read.
"""

# Rule 1: a chunk is a contiguous run of its array, or of its shard, wherever the limits allow.
# Rule 2: the limits win over the target size; a chunk may exceed it when no other cut is left.
# Rule 3: no chunk crosses a shard's edge once the leaf is too large to travel whole.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.table import Column
from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard

PADDED_NBYTES = 1 * MIB
"""Arrays up to this size may be padded at will; larger ones by 1/50 of their elements."""

PADDING_DIVISOR = 50
"""Padding stays within 1/50 = 2 % of the array."""

CHUNKS_PER_TARGET = 4
"""Limit of chunks per (bytes / target + distinct shards)."""

Lengths = Callable[[int, int], Iterator[int]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the chunk shape of one array."""

    shape: tuple[int, ...]
    itemsize: int
    target: int
    shards: int
    strict: bool

    def few(self, chunk: tuple[int, ...]) -> bool:
        count = math.prod(-(-n // c) for n, c in zip(self.shape, chunk, strict=True))
        nbytes = self.itemsize * math.prod(self.shape)
        return count * self.target <= CHUNKS_PER_TARGET * (nbytes + self.shards * self.target)

    def tight(self, chunk: tuple[int, ...]) -> bool:
        if not self.strict:
            return True
        padded = math.prod(-(-n // c) * c for n, c in zip(self.shape, chunk, strict=True))
        return (padded - math.prod(self.shape)) * PADDING_DIVISOR <= math.prod(self.shape)


def cut_freely(limits: Limits) -> tuple[int, ...]:
    """Return a chunk shape for an array that may be cut anywhere."""
    chunk = _first_allowed(limits, limits.shape, _even_lengths, _even_excess)
    # The last candidate is all rows along the axis: no padding, fewer chunks than bytes / target.
    assert chunk is not None
    return chunk


def cut_exactly(limits: Limits, cell: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a chunk shape of exact divisors of the cell; None if none keeps the limits."""
    return _first_allowed(limits, cell, _exact_lengths, _exact_excess)


def _first_allowed(
    limits: Limits, cell: tuple[int, ...], lengths: Lengths, excess: Lengths
) -> tuple[int, ...] | None:
    """Return the best chunk shape within the limits that subdivides `cell`."""
    if not cell:
        return cell
    fits = limits.itemsize * math.prod(cell) <= limits.target
    if fits and limits.tight(cell) and limits.few(cell):
        return cell
    axis, rows = _cut_axis(cell, limits.itemsize, limits.target, 0)
    lead, tail = (1,) * axis, cell[axis + 1 :]
    for length in lengths(cell[axis], rows):
        chunk = (*lead, length, *tail)
        if not limits.few(chunk):
            break
        if limits.tight(chunk):
            return chunk
    # Few large rows that do not divide: a band of all of them, cut along a later axis.
    if tail:
        later, rows_later = _cut_axis(cell, limits.itemsize * cell[axis], limits.target, axis + 1)
        for length in lengths(cell[later], rows_later):
            chunk = (
                *lead,
                cell[axis],
                *((1,) * (later - axis - 1)),
                length,
                *cell[later + 1 :],
            )
            if not limits.few(chunk):
                break
            if limits.tight(chunk):
                return chunk
    for length in excess(cell[axis], rows):
        chunk = (*lead, length, *tail)
        if limits.tight(chunk) and limits.few(chunk):
            return chunk
    return None


def _cut_axis(cell: tuple[int, ...], unit: int, target: int, first: int) -> tuple[int, int]:
    """Return the first axis from `first` on whose rows fit `target` bytes, and how many fit."""
    for axis in range(first, len(cell)):
        row = unit * math.prod(cell[axis + 1 :])
        if row <= target:
            return axis, target // row
    return len(cell) - 1, 1


def _even_lengths(n: int, most: int) -> Iterator[int]:
    """Yield lengths up to `most` that cut `n` evenly, the longest first."""
    parts = -(-n // most)
    while True:
        length = -(-n // parts)
        yield length
        if length == 1:
            return
        parts = -(-n // (length - 1))


def _even_excess(n: int, most: int) -> Iterator[int]:
    """Yield lengths above `most` that cut `n` evenly, the shortest first."""
    for parts in range(-(-n // most) - 1, 0, -1):
        yield -(-n // parts)


def divisors(n: int) -> list[int]:
    low = np.arange(1, math.isqrt(n) + 1, dtype=np.int64)
    low = low[n % low == 0]
    return sorted({*low.tolist(), *(n // low).tolist()})


def _exact_lengths(n: int, most: int) -> Iterator[int]:
    return (length for length in reversed(divisors(n)) if length <= most)


def _exact_excess(n: int, most: int) -> Iterator[int]:
    return (length for length in divisors(n) if length > most)


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
    """Return the arrays that store one leaf, as (offset in the leaf, grid); usually just one.

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
    boxes = [] if shards is None else distinct_boxes(spec, shards)
    origin = (0,) * len(spec.shape)
    if chunk_shape is not None:
        _check_chunk_shape(spec, chunk_shape, boxes, shards)
        return ((origin, ChunkGrid(spec.shape, chunk_shape)),)
    if chunk_nbytes < 1:
        raise UsageError(
            f"chunk_nbytes={chunk_nbytes}: pass a positive number of bytes", found=chunk_nbytes
        )
    filled = tuple([n or 1 for n in spec.shape]) if 0 in spec.shape else spec.shape
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
    """Return, per chunk, its position in the C-order memory of `box`, and its bytes.

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
    """Do as `contiguous_runs`, with a box per row: one column of offsets and lengths per axis."""
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


def distinct_boxes(spec: ArraySpec, shards: tuple[Shard, ...]) -> list[Box]:
    """Return the boxes that hold elements, each once, in order of their offsets."""
    boxes = sorted({s.box for s in shards if s.box.size}, key=lambda b: (b.offset, b.shape))
    fault = tiling_fault(Box.whole(spec.shape), boxes)
    if fault is not None:
        raise ValueError(f"the shards of {spec} do not tile it: {fault}")
    return boxes


def follow_shards(
    spec: ArraySpec, boxes: Sequence[Box], target: int, strict: bool, *, regular: bool = False
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """Choose grids without a chunk across the edge of a box: one if possible, else pieces.

    Raises:
        UsageError: `regular`, and one grid does not keep the limits.
    """
    cuts = [
        sorted({0, n, *(b.offset[i] for b in boxes), *(b.stop[i] for b in boxes)})
        for i, n in enumerate(spec.shape)
    ]
    whole = [
        [(0, n, math.gcd(*edges[1:-1]) or n)] for n, edges in zip(spec.shape, cuts, strict=True)
    ]
    attempts = [whole]
    if not regular and math.prod(len(edges) - 1 for edges in cuts) <= CHUNKS_PER_TARGET * len(
        boxes
    ):
        attempts.append([_segments(edges, short=True) for edges in cuts])
        attempts.append([_segments(edges, short=False) for edges in cuts])
    total = Limits(spec.shape, spec.itemsize, target, len(boxes), strict)
    for axes in attempts:
        pieces = _cut_cells(total, axes)
        if pieces is not None:
            return pieces
    if regular:
        cells = math.prod(-(-n // cell) for ((_, n, cell),) in whole)
        raise UsageError(
            f"the finest chunk grid that follows the {len(boxes)} shards of {spec} has {cells} "
            f'chunks, and layout="regular" allows {CHUNKS_PER_TARGET} per shard and 2 % of '
            'padding; shard it evenly, or use layout="auto", which stores it in pieces',
            expected=CHUNKS_PER_TARGET * len(boxes),
            found=cells,
        )
    return tuple(
        (
            box.offset,
            ChunkGrid(box.shape, cut_freely(Limits(box.shape, spec.itemsize, target, 1, strict))),
        )
        for box in boxes
    )


def _cut_cells(
    total: Limits, axes: Sequence[Sequence[tuple[int, int, int]]]
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...] | None:
    """Cut the product of the segments of all axes by exact divisors of their cells."""
    pieces = []
    count = 0
    for where in np.ndindex(*(len(segments) for segments in axes)):
        chosen = [segments[i] for segments, i in zip(axes, where, strict=True)]
        offset = tuple(o for o, _, _ in chosen)
        shape = tuple(n for _, n, _ in chosen)
        cell = tuple(c for _, _, c in chosen)
        cells = math.prod(-(-n // c) for n, c in zip(shape, cell, strict=True))
        if cells > CHUNKS_PER_TARGET * total.shards:
            return None
        limits = Limits(shape, total.itemsize, total.target, cells, total.strict)
        chunk = cut_exactly(limits, cell) or cut_exactly(limits, _dense_cell(shape, cell))
        if chunk is None:
            return None
        grid = ChunkGrid(shape, chunk)
        pieces.append((offset, grid))
        count += grid.chunk_count
    nbytes = total.itemsize * math.prod(total.shape)
    if count * total.target > CHUNKS_PER_TARGET * (nbytes + total.shards * total.target):
        return None
    return tuple(pieces)


def _dense_cell(shape: tuple[int, ...], cell: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest exact part of the cell with little edge padding along every axis."""
    uneven = sum(n % c != 0 for n, c in zip(shape, cell, strict=True))
    # (1 + 1/(51 u))^u < 1.02 for every u: the axes together stay within the limit.
    share = (PADDING_DIVISOR + 1) * max(1, uneven)
    return tuple(
        next(d for d in reversed(divisors(c)) if (-n % d) * share <= n)
        for n, c in zip(shape, cell, strict=True)
    )


def _segments(edges: Sequence[int], *, short: bool) -> list[tuple[int, int, int]]:
    """Return maximal runs (offset, length, cell) of equal intervals.

    With `short`, a shorter interval may end a run.
    """
    segments = []
    i = 0
    while i + 1 < len(edges):
        start, cell = edges[i], edges[i + 1] - edges[i]
        i += 1
        while i + 1 < len(edges) and edges[i + 1] - edges[i] == cell:
            i += 1
        if short and i + 1 < len(edges) and edges[i + 1] - edges[i] < cell:
            i += 1
        segments.append((start, edges[i] - start, cell))
    return segments
