"""Grids for leaves that are held in shards: no chunk crosses the edge of one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.planning.cut import (
    CHUNKS_PER_TARGET,
    PADDING_DIVISOR,
    Limits,
    cut_exactly,
    cut_freely,
    divisors,
)
from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard


def distinct_boxes(spec: ArraySpec, shards: tuple[Shard, ...] | None) -> list[Box]:
    """The boxes that hold elements, each once, in order of their offsets."""
    if shards is None:
        return []
    boxes = sorted({s.box for s in shards if s.box.size}, key=lambda b: (b.offset, b.shape))
    fault = tiling_fault(Box.whole(spec.shape), boxes)
    if fault is not None:
        raise ValueError(f"the shards of {spec} do not tile it: {fault}")
    return boxes


def follow_shards(
    spec: ArraySpec, boxes: Sequence[Box], target: int, strict: bool, *, regular: bool = False
) -> tuple[tuple[tuple[int, ...], ChunkGrid], ...]:
    """Grids without a chunk across the edge of a box: one if the limits allow, else pieces.

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
