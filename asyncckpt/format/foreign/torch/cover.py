"""Check that the shards of a tensor tile it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from asyncckpt.spec import Box

_FREE_WORK = 1 << 20
_WORK_PER_BOX = 64
"""Comparisons per box that a check may take. Meshes need one per axis; inputs that need far more
are hostile."""


def tiling_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return why not every element of an array is in exactly one box, or None.

    Args:
        shape: of the array.
        boxes: boxes of its rank that hold elements.
    """
    for box in boxes:
        if any(stop > n for stop, n in zip(box.stop, shape, strict=True)):
            return f"{box_text(box)} reaches past it"
    held, size = sum(box.size for box in boxes), math.prod(shape)
    if held < size:
        return f"they hold {held} of its {size} elements"
    return _overlap(boxes, len(shape))


def box_text(box: Box) -> str:
    """Return the box as an index expression: `[0:4, 8:10]`."""
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(box.offset, box.shape, strict=True))}]"


def _overlap(boxes: Sequence[Box], rank: int) -> str | None:
    """Return which boxes overlap, or None.

    The boxes are split into separate groups, again and again along any axis; only boxes that no
    split separates are compared with each other.
    """
    work = _FREE_WORK + _WORK_PER_BOX * len(boxes)
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        if len(group) == 1:
            continue
        for axis in range(rank):
            work -= len(group)
            parts = _apart(group, axis)
            if len(parts) > 1:
                groups += parts
                break
        else:
            work -= len(group) ** 2
            if work >= 0:
                for a, b in itertools.combinations(group, 2):
                    if a.intersect(b) is not None:
                        return f"{box_text(a)} and {box_text(b)} overlap"
        if work < 0:
            return f"{len(group)} of them are too irregular to be checked"
    return None


def _apart(group: list[Box], axis: int) -> list[list[Box]]:
    """Split the group along an axis wherever no box crosses."""
    group = sorted(group, key=lambda box: box.offset[axis])
    parts: list[list[Box]] = []
    reach = -1
    for box in group:
        start = box.offset[axis]
        if start >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, start + box.shape[axis])
    return parts
