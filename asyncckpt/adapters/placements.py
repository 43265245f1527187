"""Meshes of processes, and the boxes of an array that their processes hold, by arithmetic."""

# Rule 1: never list all shards. The cost of `hold` depends on the given coordinates only; cuts are
#   enumerated only for unevenly cut axes, once per length.
# Rule 2: values that are compared per leaf are interned: equal layouts have the same `Partition`
#   object, and equal holders the same tuple.

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from asyncckpt.planning.tiling import grid_boxes
from asyncckpt.spec import Box, Partition, Shard

Coordinate = tuple[int, ...]
"""Position in a mesh: one index per mesh axis."""

_TEXT_LENGTH = 200
"""Longer texts are replaced by their SHA-256, because a schema has one text per leaf."""


class Mesh:
    """An array of processes, in which a process may occur several times. Compared by identity.

    Attributes:
        processes: the process at each coordinate.
        members: the distinct processes, ascending.
        text: shape and processes as a short text, equal for equal meshes.
        pattern: like `text`, with indices into `members` instead of processes.
    """

    __slots__ = ("members", "pattern", "processes", "text")

    def __init__(self, processes: npt.ArrayLike) -> None:
        self.processes = np.asarray(processes, np.int64)
        self.members = interned(tuple(np.unique(self.processes).tolist()))
        shape = "x".join(map(str, self.processes.shape))
        numbers = self.processes.ravel()
        places = np.searchsorted(self.members, numbers)
        self.text, self.pattern = (
            shortened(f"{shape}[{','.join(map(str, each.tolist()))}]") for each in (numbers, places)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each mesh axis."""
        return self.processes.shape


@lru_cache(maxsize=4096)
def coordinates_of(mesh: Mesh, process: int) -> tuple[Coordinate, ...]:
    """Return the coordinates of a process, in C order."""
    return tuple(map(tuple, np.argwhere(mesh.processes == process).tolist()))


@lru_cache(maxsize=4096)
def holders_at(mesh: Mesh, fixed: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Return the processes at all coordinates with these (mesh axis, index) pairs."""
    index: list[int | slice] = [slice(None)] * len(mesh.shape)
    for axis, place in fixed:
        index[axis] = place
    return interned(tuple(np.unique(mesh.processes[tuple(index)]).tolist()))


@lru_cache(maxsize=1 << 16)
def interned(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same object for equal tuples, which are compared and hashed for every leaf."""
    return holders


def shortened(text: str) -> str:
    """Return the text, or its digest if it is long."""
    if len(text) <= _TEXT_LENGTH:
        return text
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()


Run = tuple[int, int]
"""First and one-past-last index along one axis of an array."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A division of an array axis along a mesh axis.

    It divides the indices that remain after earlier cuts into parts of ceil(n / size), the last of
    which may be short or empty.

    Attributes:
        axis: the mesh axis; a coordinate along it selects the part.
        stride: if above 1, the indices are first divided into this many pieces, and each piece into
            parts; a coordinate gets its part of every piece.
    """

    axis: int
    stride: int = 1


Layout = tuple[tuple[Cut, ...], ...]
"""The cuts of each array axis, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """The boxes of an array that some coordinates of a mesh hold.

    Attributes:
        shards: their distinct non-empty boxes, in order of their offsets, with all holders.
        numbers: indices into `shards` of each coordinate's boxes, in order of their offsets.
        partition: how the whole mesh divides the array.
    """

    shards: tuple[Shard, ...]
    numbers: tuple[tuple[int, ...], ...]
    partition: Partition


def hold(
    mesh: Mesh, layout: Layout, shape: tuple[int, ...], coordinates: Sequence[Coordinate]
) -> Holding:
    """Return the boxes of an array that these coordinates hold."""
    used = sorted({cut.axis for cuts in layout for cut in cuts})
    holders: dict[Box, tuple[int, ...]] = {}
    held: list[list[Box]] = []
    for coordinate in coordinates:
        boxes = grid_boxes(runs_of(mesh.shape, layout, shape, coordinate))
        held.append(boxes)
        fixed = tuple((axis, coordinate[axis]) for axis in used)
        for box in boxes:
            if box not in holders:
                holders[box] = holders_at(mesh, fixed)
    return _holding(held, holders, partition(mesh, layout, shape))


def _holding(
    held: Sequence[Sequence[Box]], holders: Mapping[Box, tuple[int, ...]], partition: Partition
) -> Holding:
    """Return the holding of coordinates that have these boxes each."""
    distinct = sorted(set(itertools.chain.from_iterable(held)), key=lambda box: box.offset)
    number = {box: n for n, box in enumerate(distinct)}
    return Holding(
        shards=tuple(Shard(box, holders[box]) for box in distinct),
        numbers=tuple(tuple(number[box] for box in boxes) for boxes in held),
        partition=partition,
    )


def runs_of(
    mesh_shape: tuple[int, ...], layout: Layout, shape: tuple[int, ...], coordinate: Coordinate
) -> list[list[Run]]:
    """Return the runs of indices along each array axis that one coordinate holds, in order."""
    return [
        runs_at(length, mesh_shape, cuts, coordinate)
        for length, cuts in zip(shape, layout, strict=True)
    ]


def without_gaps(runs: Sequence[Run]) -> list[Run]:
    """Return runs of the same lengths, starting at 0 without gaps between them."""
    ends = list(itertools.accumulate((stop - start for start, stop in runs), initial=0))
    return list(itertools.pairwise(ends))


def runs_at(
    length: int, mesh_shape: tuple[int, ...], cuts: Sequence[Cut], coordinate: Coordinate
) -> list[Run]:
    """Return the runs of indices along one array axis that one coordinate holds, in order."""
    runs = [(0, length)] if length else []
    for cut in cuts:
        size, index = mesh_shape[cut.axis], coordinate[cut.axis]
        runs = [
            run
            for piece in range(cut.stride)
            for run in _part(_part(runs, cut.stride, piece), size, index)
        ]
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def strided_cuts(factors: Mapping[int, int], mesh_shape: Sequence[int]) -> tuple[Cut, ...]:
    """Return the cuts of one array axis by PyTorch's `Shard` (factor 1) and `_StridedShard`.

    If a split factor is the product of the lengths of later mesh axes that divide the array axis,
    these cut first: `fully_shard` divides the shards of tensor parallelism. For uneven shards, the
    order matters.

    Args:
        factors: split factor of each mesh axis that divides the array axis, ascending by axis.
        mesh_shape: length of each mesh axis.
    """
    order: list[int] = []
    for mesh_axis in sorted(factors, reverse=True):
        pieces, place = 1, 0
        while pieces != factors[mesh_axis] and place < len(order):
            pieces *= mesh_shape[order[place]]
            place += 1
        if pieces != factors[mesh_axis]:  # the pieces are not shards of this mesh
            return tuple(Cut(axis, stride) for axis, stride in factors.items())
        order.insert(place, mesh_axis)
    return tuple(map(Cut, order))


@lru_cache(maxsize=4096)
def partition(mesh: Mesh, layout: Layout, shape: tuple[int, ...]) -> Partition:
    """Return how the whole mesh divides an array."""
    cuts = tuple(
        axis_cuts(length, tuple([(mesh.shape[cut.axis], cut.stride) for cut in axis]))
        for length, axis in zip(shape, layout, strict=True)
    )
    text, pattern = _layout_texts(mesh, layout)
    return Partition(cuts, text, mesh.members, pattern)


@lru_cache(maxsize=4096)
def axis_cuts(length: int, steps: tuple[tuple[int, int], ...]) -> int | tuple[int, ...]:
    """Return the cuts of an axis as in `Partition`; each step is a (part count, stride) pair."""
    cell = length
    for number, (size, stride) in enumerate(steps):
        last = all(rest == (1, 1) for rest in steps[number + 1 :])
        if stride > 1 or (cell % size and not (cell == length and last)):
            break
        cell = -(-cell // size)
    else:
        return cell
    if all(stride == 1 for _, stride in steps):
        return _regular(length, _nested_starts(length, [size for size, _ in steps]))
    # Treat each step as a separate mesh axis.
    mesh_shape = tuple(size for size, _ in steps)
    axis = [Cut(number, stride) for number, (_, stride) in enumerate(steps)]
    starts = {
        start
        for coordinate in itertools.product(*map(range, mesh_shape))
        for start, _ in runs_at(length, mesh_shape, axis, coordinate)
    }
    return _regular(length, sorted(starts))


def enumerated(
    shape: tuple[int, ...], processes: Mapping[Box, Iterable[int]], own: Iterable[Box]
) -> Holding:
    """Return the holding for an explicitly listed grid of boxes.

    Args:
        shape: shape of the array.
        processes: the holders of every distinct box.
        own: the box of each coordinate of interest.
    """
    holders = {box: interned(tuple(sorted(set(held)))) for box, held in processes.items()}
    boxes = sorted((box for box in holders if box.size), key=lambda box: box.offset)
    cuts = tuple(
        _regular(length, sorted({box.offset[axis] for box in boxes}))
        for axis, length in enumerate(shape)
    )
    text = "boxes " + ";".join(",".join(map(str, holders[box])) for box in boxes)
    members = interned(tuple(sorted(set().union(*holders.values()))))
    held = [[box] if box.size else [] for box in own]
    return _holding(held, holders, Partition(cuts, shortened(text), members))


def _part(runs: list[Run], count: int, index: int) -> list[Run]:
    """Return the runs of part `index` of `count` parts of ceil(n / count) indices."""
    if count == 1:
        return runs
    cell = -(-sum(stop - start for start, stop in runs) // count)
    first, end = index * cell, (index + 1) * cell
    found, at = [], 0
    for start, stop in runs:
        low, high = max(first, at), min(end, at + stop - start)
        if low < high:
            found.append((start + low - at, start + high - at))
        at += stop - start
    return found


def _nested_starts(length: int, sizes: Sequence[int]) -> list[int]:
    """Return the starts of the non-empty cells of nested divisions."""
    starts, lengths = np.zeros(1, np.int64), np.full(1, length, np.int64)
    for size in sizes:
        cells = -(-lengths // size)
        offsets = np.minimum(np.outer(cells, np.arange(size + 1)).T, lengths).T
        starts = (starts[:, None] + offsets[:, :-1]).ravel()
        lengths = np.diff(offsets).ravel()
    found: list[int] = starts[lengths > 0].tolist()
    return found


def _regular(length: int, starts: list[int]) -> int | tuple[int, ...]:
    """Return the cuts between cells at `starts`: their length if regular, else the starts."""
    if len(starts) < 2:
        return length
    cell = starts[1]
    if starts == list(range(0, length, cell)):
        return cell
    return tuple(starts[1:])


@lru_cache(maxsize=1024)
def _layout_texts(mesh: Mesh, layout: Layout) -> tuple[str, str]:
    """Return texts that are equal if every process, or member index, gets the same boxes."""
    axes = [
        "*".join(
            f"{cut.axis}" if cut.stride == 1 else f"{cut.axis}:{cut.stride}"
            for cut in cuts
            if mesh.shape[cut.axis] > 1
        )
        for cuts in layout
    ]
    layout_text = ",".join(axes)
    return f"{mesh.text} {layout_text}", f"{mesh.pattern} {layout_text}"
