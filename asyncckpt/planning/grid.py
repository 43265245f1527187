"""Which chunk grid an array is stored on.

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
import numpy.typing as npt

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard

PADDED_NBYTES = 1 * MIB
"""Arrays up to this size may be padded at will; larger ones by 1/50 of their elements."""

PADDING_DIVISOR = 50
"""Padding stays within 1/50 = 2 % of the array."""

CHUNKS_PER_TARGET = 4
"""Limit of chunks per (bytes / target + distinct shards)."""

WHOLE_NBYTES = 64 * KIB
"""Sharded leaves up to this size are one chunk: their shards travel in the entries."""

Lengths = Callable[[int, int], Iterator[int]]


def choose_grid(
    spec: ArraySpec,
    shards: tuple[Shard, ...] | None,
    *,
    chunk_nbytes: int,
    chunk_shape: tuple[int, ...] | None = None,
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """The arrays that store one leaf, as (offset in the leaf, grid); nearly always just one.

    Args:
        spec: the leaf.
        shards: all shards of the leaf, over all processes; equal and empty boxes are ignored,
            the others tile it. None stands for one that covers the leaf.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape in elements; wins over `chunk_nbytes`.

    Raises:
        UsageError: `chunk_shape` has another rank, an entry that is not positive, or cuts chunks
            that no process holds whole; or `chunk_nbytes` is not positive.
        ValueError: the shards do not tile the leaf.
    """
    boxes = _distinct_boxes(spec, shards)
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
        limits = _Limits(filled, spec.itemsize, chunk_nbytes, 1, strict)
        return ((origin, ChunkGrid(spec.shape, _cut_freely(limits))),)
    return _follow_shards(spec, boxes, chunk_nbytes, strict)


def contiguous_runs(
    grid: ChunkGrid, itemsize: int, rows: npt.NDArray[np.int64], box: Box
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Per chunk: where it stands in the C-order memory of `box`, and how many bytes it holds.

    The first is the byte offset in `box` of a chunk that lies in it as a whole, as one run of
    bytes that is also the beginning of the chunk's payload (so that padding trails); -1 for all
    others. The second is the size in bytes of the chunk clipped to the array.

    Args:
        grid: grid of the array.
        itemsize: bytes per element.
        rows: chunk numbers in the array, in C order.
        box: a part of the array.
    """
    if len(rows) == 1 and grid.chunk_shape == grid.shape == box.shape:
        return np.zeros(1, np.int64), np.array([math.prod(grid.shape) * itemsize], np.int64)
    if not len(rows) or not grid.shape:
        return np.zeros(len(rows), np.int64), np.full(len(rows), itemsize, np.int64)
    cells = np.unravel_index(rows, grid.counts)
    inside = np.ones(len(rows), bool)
    in_box, box_full, in_chunk, chunk_full = (np.ones(len(rows), bool) for _ in range(4))
    offset = np.zeros(len(rows), np.int64)
    nbytes = np.full(len(rows), itemsize, np.int64)
    stride = itemsize
    for cell, n, c, first, length in zip(
        cells[::-1],
        grid.shape[::-1],
        grid.chunk_shape[::-1],
        box.offset[::-1],
        box.shape[::-1],
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
        stride *= length
    return np.where(inside & in_box & in_chunk, offset, -1), nbytes


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a chunk shape for one array must keep to."""

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


def _cut_freely(limits: _Limits) -> tuple[int, ...]:
    """A chunk shape for an array that may be cut anywhere."""
    chunk = _first_allowed(limits, limits.shape, _even_lengths, _even_excess)
    # The last candidate is all rows along the axis: no padding, fewer chunks than bytes / target.
    assert chunk is not None
    return chunk


def _first_allowed(
    limits: _Limits, cell: tuple[int, ...], lengths: Lengths, excess: Lengths
) -> tuple[int, ...] | None:
    """The best chunk shape within the limits that subdivides `cell`."""
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
    """The first axis from `first` on of which `target` bytes hold a row, and how many rows."""
    for axis in range(first, len(cell)):
        row = unit * math.prod(cell[axis + 1 :])
        if row <= target:
            return axis, target // row
    return len(cell) - 1, 1


def _even_lengths(n: int, most: int) -> Iterator[int]:
    """Lengths up to `most` that cut `n` evenly, the longest first."""
    parts = -(-n // most)
    while True:
        length = -(-n // parts)
        yield length
        if length == 1:
            return
        parts = -(-n // (length - 1))


def _even_excess(n: int, most: int) -> Iterator[int]:
    """Lengths above `most` that cut `n` evenly, the shortest first."""
    for parts in range(-(-n // most) - 1, 0, -1):
        yield -(-n // parts)


def _divisors(n: int) -> list[int]:
    low = np.arange(1, math.isqrt(n) + 1, dtype=np.int64)
    low = low[n % low == 0]
    return sorted({*low.tolist(), *(n // low).tolist()})


def _exact_lengths(n: int, most: int) -> Iterator[int]:
    return (length for length in reversed(_divisors(n)) if length <= most)


def _exact_excess(n: int, most: int) -> Iterator[int]:
    return (length for length in _divisors(n) if length > most)


# ------------------------------------------------------------------------------- sharded leaves


def _follow_shards(
    spec: ArraySpec, boxes: Sequence[Box], target: int, strict: bool
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """Grids without a chunk across the edge of a box: one if the limits allow, else pieces."""
    cuts = [
        sorted({0, n, *(b.offset[i] for b in boxes), *(b.stop[i] for b in boxes)})
        for i, n in enumerate(spec.shape)
    ]
    whole = [
        [(0, n, math.gcd(*edges[1:-1]) or n)] for n, edges in zip(spec.shape, cuts, strict=True)
    ]
    attempts = [whole]
    if math.prod(len(edges) - 1 for edges in cuts) <= CHUNKS_PER_TARGET * len(boxes):
        attempts.append([_segments(edges, short=True) for edges in cuts])
        attempts.append([_segments(edges, short=False) for edges in cuts])
    total = _Limits(spec.shape, spec.itemsize, target, len(boxes), strict)
    for axes in attempts:
        pieces = _cut_cells(total, axes)
        if pieces is not None:
            return pieces
    return tuple(
        (
            box.offset,
            ChunkGrid(box.shape, _cut_freely(_Limits(box.shape, spec.itemsize, target, 1, strict))),
        )
        for box in boxes
    )


def _cut_cells(
    total: _Limits, axes: Sequence[Sequence[tuple[int, int, int]]]
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...] | None:
    """The product of the segments of all axes, each cut by exact divisors of its cell."""
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
        limits = _Limits(shape, total.itemsize, total.target, cells, total.strict)
        chunk = _first_allowed(limits, cell, _exact_lengths, _exact_excess) or _first_allowed(
            limits, _dense_cell(shape, cell), _exact_lengths, _exact_excess
        )
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
    """The largest exact part of the cell whose edge padding is small along every axis."""
    uneven = sum(n % c != 0 for n, c in zip(shape, cell, strict=True))
    # (1 + 1/(51 u))^u < 1.02 for every u: the axes together stay within the limit.
    share = (PADDING_DIVISOR + 1) * max(1, uneven)
    return tuple(
        next(d for d in reversed(_divisors(c)) if (-n % d) * share <= n)
        for n, c in zip(shape, cell, strict=True)
    )


def _segments(edges: Sequence[int], *, short: bool) -> list[tuple[int, int, int]]:
    """Maximal runs (offset, length, cell) of equal intervals; with `short`, one less may end it."""
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


def _distinct_boxes(spec: ArraySpec, shards: tuple[Shard, ...] | None) -> list[Box]:
    """The boxes that hold elements, each once, in order of their offsets."""
    if shards is None:
        return []
    boxes = sorted({s.box for s in shards if s.box.size}, key=lambda b: (b.offset, b.shape))
    if spec.size and not _tile(boxes, Box.whole(spec.shape)):
        raise ValueError(f"the shards of {spec} do not tile it: {boxes}")
    return boxes


def _tile(boxes: Sequence[Box], whole: Box) -> bool:
    """Whether each element of `whole` is in exactly one box, and no other element is in any.

    Boxes tile a box if and only if their corners, with alternating signs, add up to its corners.
    """
    cut = [
        axis
        for axis, (o, n) in enumerate(zip(whole.offset, whole.shape, strict=True))
        if any(b.offset[axis] != o or b.shape[axis] != n for b in boxes)
    ]
    corners: dict[tuple[int, ...], int] = {}
    for box, sign in [*((b, 1) for b in boxes), (whole, -1)]:
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(
                box.offset[i] + end * box.shape[i] for i, end in zip(cut, ends, strict=True)
            )
            corners[corner] = corners.get(corner, 0) + sign * (-1) ** sum(ends)
    return not any(corners.values())


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
