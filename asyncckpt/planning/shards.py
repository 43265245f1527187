"""Grids for leaves that several processes hold in parts: no chunk crosses the edge of a shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from asyncckpt.planning.cut import (
    CHUNKS_PER_TARGET,
    PADDING_DIVISOR,
    Limits,
    cut_exactly,
    cut_freely,
    divisors,
)
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard


def distinct_boxes(spec: ArraySpec, shards: tuple[Shard, ...] | None) -> list[Box]:
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


def follow_shards(
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
    total = Limits(spec.shape, spec.itemsize, target, len(boxes), strict)
    for axes in attempts:
        pieces = _cut_cells(total, axes)
        if pieces is not None:
            return pieces
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
    """The largest exact part of the cell whose edge padding is small along every axis."""
    uneven = sum(n % c != 0 for n, c in zip(shape, cell, strict=True))
    # (1 + 1/(51 u))^u < 1.02 for every u: the axes together stay within the limit.
    share = (PADDING_DIVISOR + 1) * max(1, uneven)
    return tuple(
        next(d for d in reversed(divisors(c)) if (-n % d) * share <= n)
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
