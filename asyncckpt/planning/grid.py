"""Chunk grid of an array, within limits on padding and number of chunks.

`choose_grid` keeps two limits for every shape: at most 2 % padding in arrays above 1 MiB, because
zarr stores cells on the far edge at full size, and at most 4 × (bytes / target + distinct shards)
chunks, because every chunk costs an index entry and a read.
"""

# Rule 1: no chunk crosses a shard's edge unless the leaf is small enough to be sent to process 0.
# Rule 2: a grid depends only on what all processes know about a leaf: not on other leaves,
#   measurements, or the process that plans it.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.options import KIB, MIB
from asyncckpt.planning.chunk_shape import (
    CHUNKS_PER_TARGET,
    Limits,
    cut_exactly,
    cut_freely,
    dense_cell,
)
from asyncckpt.planning.tiling import grid_boxes, tiling_fault
from asyncckpt.reports.texts import few
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Partition, Shard

Division = tuple[Shard, ...] | Partition | None
"""All shards of a leaf, the partition that they form, or None for a single shard."""

Grids = tuple[tuple[tuple[int, ...], ChunkGrid], ...]
"""The arrays that store one leaf, as (offset in the leaf, grid); usually just one."""

PADDED_NBYTES = 1 * MIB
"""Arrays up to this size may have any padding; larger ones at most 1/50 of their elements."""

WHOLE_NBYTES = 64 * KIB
"""Sharded leaves up to this size are one chunk; processes send their shards in the entries."""


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Cuts of a leaf by its shards.

    Attributes:
        starts: per axis, the starts of the cells of the finest common grid; a range if all cells
            but a shorter last one have equal length.
        count: number of distinct shards.
        boxes: returns the shards; a function, because there may be very many.
    """

    starts: tuple[Sequence[int], ...]
    count: int
    boxes: Callable[[], Sequence[Box]]


_UNCUT = _Cuts((), 1, list)


def choose_grid(
    spec: ArraySpec,
    division: Division,
    *,
    chunk_nbytes: int,
    chunk_shape: tuple[int, ...] | None = None,
    regular: bool = False,
) -> Grids:
    """Return the arrays that store one leaf.

    A partition gives the same arrays as the list of all its cells, at a cost that depends only on
    the number of cuts.

    Args:
        spec: the leaf.
        division: shards on all processes, whose distinct non-empty boxes tile the leaf.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape in elements; overrides `chunk_nbytes`.
        regular: return one array or raise.

    Raises:
        UsageError: `chunk_shape` has another rank or makes chunks that no process holds whole; or
            with `regular`, the finest grid that follows the shards has too many chunks.
        ValueError: the shards do not tile the leaf, or the partition does not fit it.
    """
    cuts = _cuts_of(spec, division)
    origin = (0,) * len(spec.shape)
    if chunk_shape is not None:
        if len(chunk_shape) != len(spec.shape):
            raise UsageError(
                f"chunk_shape={chunk_shape} has rank {len(chunk_shape)}, but {spec} has rank "
                f"{len(spec.shape)}; pass one length per dimension",
                expected=len(spec.shape),
                found=len(chunk_shape),
            )
        if cuts.count > 1 and spec.nbytes > WHOLE_NBYTES and not _held_whole(division):
            _check_cuts(spec, chunk_shape, cuts)
        return ((origin, ChunkGrid(spec.shape, chunk_shape)),)
    filled = tuple([n or 1 for n in spec.shape]) if 0 in spec.shape else spec.shape
    strict = spec.nbytes > PADDED_NBYTES
    if math.prod(filled) * spec.itemsize <= (chunk_nbytes if cuts.count <= 1 else WHOLE_NBYTES):
        return ((origin, ChunkGrid(spec.shape, filled)),)
    if cuts.count <= 1:
        limits = Limits(filled, spec.itemsize, chunk_nbytes, 1, strict)
        return ((origin, ChunkGrid(spec.shape, cut_freely(limits))),)
    return _follow_cuts(spec, cuts, chunk_nbytes, strict, regular=regular)


def travels_in_parts(spec: ArraySpec, division: Division) -> bool:
    """Return whether the leaf is small enough for process 0 to assemble its shards to one chunk."""
    return 0 < spec.nbytes <= WHOLE_NBYTES and _cuts_of(spec, division).count > 1


def cell_starts(shape: tuple[int, ...], partition: Partition) -> tuple[Sequence[int], ...]:
    """Return the starts of a partition's cells per axis; a range if they have equal length.

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


def _cuts_of(spec: ArraySpec, division: Division) -> _Cuts:
    if division is None:
        return _UNCUT
    if isinstance(division, Partition):
        cells = cell_starts(spec.shape, division)
        return _Cuts(cells, math.prod(map(len, cells)), lambda: _cells(spec.shape, cells))
    boxes = _distinct_boxes(spec, division)
    starts = [
        sorted({0, *(b.offset[i] for b in boxes), *(b.stop[i] for b in boxes)} - {n})
        for i, n in enumerate(spec.shape)
    ]
    return _Cuts(tuple(starts), len(boxes), lambda: boxes)


def _cells(shape: tuple[int, ...], starts: Sequence[Sequence[int]]) -> list[Box]:
    axes = zip(starts, shape, strict=True)
    return grid_boxes([list(itertools.pairwise((*at, n))) for at, n in axes])


def _held_whole(division: Division) -> bool:
    """Return whether some process is known to hold all shards."""
    # Of a partition, each process knows only its own cells, so processes could disagree.
    return isinstance(division, tuple) and bool(
        set.intersection(*(set(s.holders) for s in division if s.box.size))
    )


def _check_cuts(spec: ArraySpec, chunk_shape: tuple[int, ...], cuts: _Cuts) -> None:
    for axis, (starts, c) in enumerate(zip(cuts.starts, chunk_shape, strict=True)):
        if any(start % c for start in starts[1 : 2 if isinstance(starts, range) else None]):
            raise UsageError(
                f"chunk_shape={chunk_shape} for {spec}: along axis {axis} the shards end at "
                f"{few([*map(str, starts[1:])])}, so chunks of {c} would be split between two "
                "processes; pass a length that divides these, or leave chunk_shape out",
                expected=list(starts[1:]),
                found=c,
            )


def _distinct_boxes(spec: ArraySpec, shards: tuple[Shard, ...]) -> list[Box]:
    """Return the distinct non-empty boxes, ordered by offset."""
    boxes = sorted({s.box for s in shards if s.box.size}, key=lambda b: (b.offset, b.shape))
    fault = tiling_fault(Box.whole(spec.shape), boxes)
    if fault is not None:
        raise ValueError(f"the shards of {spec} do not tile it: {fault}")
    return boxes


def _follow_cuts(
    spec: ArraySpec, cuts: _Cuts, target: int, strict: bool, *, regular: bool
) -> Grids:
    """Choose grids without chunks across shard edges: one if possible, else pieces."""
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
    alone = replace(total, shards=1)
    return tuple(
        (box.offset, ChunkGrid(box.shape, cut_freely(replace(alone, shape=box.shape))))
        for box in cuts.boxes()
    )


def _common_cell(starts: Sequence[int], n: int) -> int:
    """Return the longest cell of a regular grid with an edge at every start."""
    if isinstance(starts, range):
        return min(starts.step, n)
    return math.gcd(*starts[1:]) or n


def _cut_cells(total: Limits, axes: Sequence[Sequence[tuple[int, int, int]]]) -> Grids | None:
    """Cut the product of all axes' segments by exact divisors of their cells."""
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
        limits = replace(total, shape=shape, shards=cells)
        chunk = cut_exactly(limits, cell) or cut_exactly(limits, dense_cell(shape, cell))
        if chunk is None:
            return None
        grid = ChunkGrid(shape, chunk)
        pieces.append((offset, grid))
        count += grid.chunk_count
    return tuple(pieces) if total.allow(count) else None


def _segments(starts: Sequence[int], n: int, *, short: bool) -> list[tuple[int, int, int]]:
    """Return maximal runs (offset, length, cell) of equal intervals up to `n`.

    With `short`, a shorter interval may end a run.
    """
    if isinstance(starts, range):
        cell = min(starts.step, n)
        rest = n % cell
        if short or not rest:
            return [(0, n, cell)]
        return [(0, n - rest, cell), (n - rest, rest, rest)]
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
