"""Chunk grid of an array, within limits on padding and number of chunks.

`choose_grid` keeps two limits, whatever the shape: at most 2 % padding where an array exceeds
1 MiB, and at most 4 × (bytes / target + distinct shards) chunks. Both are about stored bytes:
zarr stores the cells on the far edge full size, and every chunk costs an index entry and a read.
"""

# Rule 1: a chunk is a contiguous run of its array, or of its shard, wherever the limits allow.
# Rule 2: the limits win over the target size; a chunk may exceed it when no other cut is left.
# Rule 3: no chunk crosses a shard's edge once the leaf is too large to travel whole.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.table import Column
from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Partition, Shard

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


@dataclass(frozen=True, slots=True)
class _Cuts:
    """How the shards cut a leaf.

    Attributes:
        starts: per axis where the cells of their finest common grid begin; a range where the
            cells are equal but for a shorter last one.
        count: number of distinct shards.
        boxes: the shards, made on demand: there may be very many.
    """

    starts: tuple[Sequence[int], ...]
    count: int
    boxes: Callable[[], Sequence[Box]]


_UNCUT = _Cuts((), 1, list)


def choose_grid(
    spec: ArraySpec,
    division: tuple[Shard, ...] | Partition | None,
    *,
    chunk_nbytes: int,
    chunk_shape: tuple[int, ...] | None = None,
    regular: bool = False,
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """Return the arrays that store one leaf, as (offset in the leaf, grid); usually just one.

    A partition and the list of all its cells give the same arrays; the partition does so at the
    cost of its cuts, however many cells these make.

    Args:
        spec: the leaf.
        division: all shards of the leaf, over all processes; equal and empty boxes are ignored,
            the others tile it. Or the partition that they make, or None for one that covers the
            leaf.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape in elements; wins over `chunk_nbytes`.
        regular: one array, or an error.

    Raises:
        UsageError: `chunk_shape` has another rank, an entry that is not positive, or cuts chunks
            that no process holds whole; `chunk_nbytes` is not positive; or `regular`, and the
            finest grid that follows the shards has too many chunks.
        ValueError: the shards do not tile the leaf, or the partition does not fit it.
    """
    cuts = _cuts_of(spec, division)
    origin = (0,) * len(spec.shape)
    if chunk_shape is not None:
        _check_chunk_shape(spec, chunk_shape)
        if cuts.count > 1 and spec.nbytes > WHOLE_NBYTES and not _held_whole(division):
            _check_cuts(spec, chunk_shape, cuts)
        return ((origin, ChunkGrid(spec.shape, chunk_shape)),)
    if chunk_nbytes < 1:
        raise UsageError(
            f"chunk_nbytes={chunk_nbytes}: pass a positive number of bytes", found=chunk_nbytes
        )
    filled = tuple([n or 1 for n in spec.shape]) if 0 in spec.shape else spec.shape
    strict = spec.nbytes > PADDED_NBYTES
    if cuts.count > 1 and spec.nbytes <= WHOLE_NBYTES:
        return ((origin, ChunkGrid(spec.shape, filled)),)
    if cuts.count <= 1:
        if math.prod(filled) * spec.itemsize <= chunk_nbytes:
            return ((origin, ChunkGrid(spec.shape, filled)),)
        limits = Limits(filled, spec.itemsize, chunk_nbytes, 1, strict)
        return ((origin, ChunkGrid(spec.shape, cut_freely(limits))),)
    return _follow_cuts(spec, cuts, chunk_nbytes, strict, regular=regular)


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


def cell_starts(shape: tuple[int, ...], partition: Partition) -> tuple[Sequence[int], ...]:
    """Return per axis where the cells of a partition begin; a range where the cells are equal.

    Raises:
        ValueError: the partition does not fit the shape.
    """
    if len(partition.cuts) != len(shape):
        raise ValueError(f"the cuts {partition.cuts} do not fit shape {shape}")
    starts: list[Sequence[int]] = []
    for n, cut in zip(shape, partition.cuts, strict=True):
        if isinstance(cut, int):
            if cut < 1 < n:
                raise ValueError(f"cells of length {cut} in shape {shape}")
            starts.append(range(0, n, max(1, cut)))
            continue
        if any(b <= a for a, b in itertools.pairwise((0, *cut, n))):
            raise ValueError(f"the cuts {cut} are not positions between 0 and {n}, in order")
        starts.append((0, *cut))
    return tuple(starts)


def _cuts_of(spec: ArraySpec, division: tuple[Shard, ...] | Partition | None) -> _Cuts:
    if division is None:
        return _UNCUT
    if isinstance(division, Partition):
        cells = cell_starts(spec.shape, division)
        return _Cuts(cells, math.prod(map(len, cells)), lambda: _cells(spec.shape, cells))
    boxes = distinct_boxes(spec, division)
    starts = [
        sorted({0, *(b.offset[i] for b in boxes), *(b.stop[i] for b in boxes)} - {n})
        for i, n in enumerate(spec.shape)
    ]
    return _Cuts(tuple(starts), len(boxes), lambda: boxes)


def _cells(shape: tuple[int, ...], starts: Sequence[Sequence[int]]) -> list[Box]:
    axes = [
        [(a, b - a) for a, b in itertools.pairwise((*at, n))]
        for at, n in zip(starts, shape, strict=True)
    ]
    return [
        Box(tuple([o for o, _ in cell]), tuple([n for _, n in cell]))
        for cell in itertools.product(*axes)
    ]


def _check_chunk_shape(spec: ArraySpec, chunk_shape: tuple[int, ...]) -> None:
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


def _held_whole(division: tuple[Shard, ...] | Partition | None) -> bool:
    """Return whether a process is known to hold all shards."""
    # Of a partition each process knows its own cells only, and all must come to one answer.
    return isinstance(division, tuple) and bool(
        set.intersection(*(set(s.holders) for s in division if s.box.size))
    )


def _check_cuts(spec: ArraySpec, chunk_shape: tuple[int, ...], cuts: _Cuts) -> None:
    for axis, (starts, c) in enumerate(zip(cuts.starts, chunk_shape, strict=True)):
        if any(start % c for start in starts[1 : 2 if isinstance(starts, range) else None]):
            raise UsageError(
                f"chunk_shape={chunk_shape} for {spec}: along axis {axis} the shards end at "
                f"{list(starts[1:])}, so chunks of {c} would be held in parts by two processes; "
                "pass a length that divides these, or leave chunk_shape out",
                expected=list(starts[1:]),
                found=c,
            )


def distinct_boxes(spec: ArraySpec, shards: tuple[Shard, ...]) -> list[Box]:
    """Return the boxes that hold elements, each once, in order of their offsets."""
    boxes = sorted({s.box for s in shards if s.box.size}, key=lambda b: (b.offset, b.shape))
    fault = tiling_fault(Box.whole(spec.shape), boxes)
    if fault is not None:
        raise ValueError(f"the shards of {spec} do not tile it: {fault}")
    return boxes


def _follow_cuts(
    spec: ArraySpec, cuts: _Cuts, target: int, strict: bool, *, regular: bool = False
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """Choose grids without a chunk across the edge of a shard: one if possible, else pieces.

    Raises:
        UsageError: `regular`, and one grid does not keep the limits.
    """
    axes = list(zip(cuts.starts, spec.shape, strict=True))
    whole = [[(0, n, _common_cell(starts, n))] for starts, n in axes]
    attempts = [whole]
    if not regular and math.prod(map(len, cuts.starts)) <= CHUNKS_PER_TARGET * cuts.count:
        attempts.append([_segments(starts, n, short=True) for starts, n in axes])
        attempts.append([_segments(starts, n, short=False) for starts, n in axes])
    total = Limits(spec.shape, spec.itemsize, target, cuts.count, strict)
    for segments in attempts:
        pieces = _cut_cells(total, segments)
        if pieces is not None:
            return pieces
    if regular:
        cells = math.prod(-(-n // cell) for ((_, n, cell),) in whole)
        raise UsageError(
            f"the finest chunk grid that follows the {cuts.count} shards of {spec} has {cells} "
            f'chunks, and layout="regular" allows {CHUNKS_PER_TARGET} per shard and 2 % of '
            'padding; shard it evenly, or use layout="auto", which stores it in pieces',
            expected=CHUNKS_PER_TARGET * cuts.count,
            found=cells,
        )
    return tuple(
        (
            box.offset,
            ChunkGrid(box.shape, cut_freely(Limits(box.shape, spec.itemsize, target, 1, strict))),
        )
        for box in cuts.boxes()
    )


def _common_cell(starts: Sequence[int], n: int) -> int:
    """Return the longest cell of a regular grid with an edge at every start."""
    if isinstance(starts, range):
        return min(starts.step, n)
    return math.gcd(*starts[1:]) or n


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


def _segments(starts: Sequence[int], n: int, *, short: bool) -> list[tuple[int, int, int]]:
    """Return maximal runs (offset, length, cell) of equal intervals.

    With `short`, a shorter interval may end a run.

    Args:
        starts: where the intervals begin.
        n: where the last one ends.
        short: see above.
    """
    if isinstance(starts, range):
        cell = min(starts.step, n)
        even = n - n % cell
        return (
            [(0, n, cell)] if short or even == n else [(0, even, cell), (even, n % cell, n % cell)]
        )
    edges = (*starts, n)
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
