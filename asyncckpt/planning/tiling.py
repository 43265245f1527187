"""Check that boxes tile an array, and explain where they do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.spec import Box

MOST_CUT = 8
"""Most cut axes of an array whose boxes are compared by their corners, of which each has 2^8."""

FREE_AXES = 4
"""Axes along which metadata may cut an array into any number of boxes; meshes cut along fewer."""

MAX_CORNERS = 1 << 18
"""Most corners of all boxes of an array that metadata cut along more axes."""

MOST_EXPLAINED = 2048
"""Most boxes in metadata of which two that overlap are named: finding them can take 0.2 s."""


def tiling_fault(whole: Box, boxes: Sequence[Box]) -> str | None:
    """Return why the boxes do not tile `whole`, or None; boxes are distinct and not empty."""
    if not whole.size or _tile(whole, boxes):
        return None
    outside = next((box for box in boxes if box.intersect(whole) != box), None)
    if outside is not None:
        return f"{box_text(outside)} reaches past it"
    pair = first_overlap(boxes)
    if pair is not None:
        return f"{box_text(pair[0])} and {box_text(pair[1])} overlap"
    if sum(box.size for box in boxes) == whole.size:
        return None
    # The boxes lie inside and apart: cut at their edges, and keep a part that they do not fill.
    part = whole
    while boxes:
        for side in _cut(part, boxes[len(boxes) // 2]):
            inside = [common for box in boxes if (common := box.intersect(side)) is not None]
            if sum(box.size for box in inside) < side.size:
                part, boxes = side, inside
                break
    return f"nothing holds {box_text(part)}"


def claimed_tiling_fault(whole: Box, boxes: Sequence[Box]) -> str | None:
    """Return why boxes that metadata claim do not tile `whole`, or None; none of them is empty.

    As `tiling_fault`, but in bounded time and memory for any boxes, so it explains less.
    """
    held = sum(box.size for box in boxes)
    if held < whole.size:
        return f"they hold {held} of its {whole.size} elements"
    # The check needs a row per corner; each axis that is cut doubles the number of corners.
    cut = sum(any(b.offset[i] or b.shape[i] != n for b in boxes) for i, n in enumerate(whole.shape))
    if cut > FREE_AXES and len(boxes) << cut > MAX_CORNERS:
        return f"{len(boxes)} of them are too irregular to be checked"
    if len(boxes) <= MOST_EXPLAINED:
        return tiling_fault(whole, boxes)
    # So many boxes cut fewer than `MOST_CUT` axes here, so `_tile` is exact.
    return "some reach past it or overlap" if whole.size and not _tile(whole, boxes) else None


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share elements, or None."""
    index = BoxIndex(boxes)
    for number, box in enumerate(boxes):
        for other in index.meeting(box).tolist():
            if other != number:
                return box, boxes[other]
    return None


def grid_boxes(runs: Sequence[Sequence[tuple[int, int]]]) -> list[Box]:
    """Return the boxes of the product of the runs along each axis, in C order."""
    return [
        Box(tuple(start for start, _ in sides), tuple(stop - start for start, stop in sides))
        for sides in itertools.product(*runs)
    ]


def box_text(box: Box) -> str:
    """Return the box as an index expression: `[0:4, 8:10]`."""
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(box.offset, box.shape, strict=True))}]"


def _tile(whole: Box, boxes: Sequence[Box]) -> bool:
    """Return whether the boxes hold each element of `whole` exactly once, and no other element.

    Boxes tile a box if and only if their corners, with alternating signs, add up to its corners.
    This is fast for many boxes, but a box has 2^n corners: returns False if more than `MOST_CUT`
    axes are cut.
    """
    if not boxes:
        return False
    starts = np.array([whole.offset, *(box.offset for box in boxes)], np.int64)
    shapes = np.array([whole.shape, *(box.shape for box in boxes)], np.int64)
    cut = np.flatnonzero(((starts != starts[0]) | (shapes != shapes[0])).any(axis=0))
    if len(cut) > MOST_CUT:
        return False
    starts, shapes = starts[:, cut], shapes[:, cut]
    # One row per box and choice of start or end along every axis that is cut.
    k = len(cut)
    ends = np.array([*itertools.product((0, 1), repeat=k)], np.int64).reshape(1 << k, k)
    corners = (starts[:, None] + ends * shapes[:, None]).reshape(len(starts) << k, k)
    signs = np.ones((len(starts), len(ends)), np.int64) * (-1) ** ends.sum(axis=1)
    signs[0] *= -1
    order = np.lexsort(corners.T) if k else np.arange(len(corners))
    corners, sums = corners[order], signs.reshape(-1)[order]
    fresh = np.ones(len(corners), bool)
    fresh[1:] = (corners[1:] != corners[:-1]).any(axis=1)
    return not np.add.reduceat(sums, np.flatnonzero(fresh)).any()


def _cut(part: Box, box: Box) -> tuple[Box, Box]:
    """Cut a part in two at the first edge of the box that is inside."""
    axis, at = next(
        (axis, edge)
        for axis, edges in enumerate(zip(box.offset, box.stop, strict=True))
        for edge in edges
        if part.offset[axis] < edge < part.stop[axis]
    )
    offset, low, high = list(part.offset), list(part.shape), list(part.shape)
    low[axis], high[axis] = at - offset[axis], part.stop[axis] - at
    offset[axis] = at
    return Box(part.offset, tuple(low)), Box(tuple(offset), tuple(high))
