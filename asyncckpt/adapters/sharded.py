"""`ShardedArray` as a leaf: read and filled shard by shard."""

# Rule 1: the array is never assembled.
# Rule 2: padding is neither read nor written.

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import (
    Place,
    check_fillable,
    host_place,
    may_share_memory,
    overlapping,
    selection,
)
from asyncckpt.adapters.sharded_array import ShardedArray, inside, spec_of
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.ports import Source, Target
from asyncckpt.spec import DTYPE_NAMES, Box

Memory = npt.NDArray[Any]


class ShardedAdapter:
    """`ShardedArray`; other processes hold the boxes that are missing from one with gaps."""

    def owns(self, kind: type) -> bool:
        return issubclass(kind, ShardedArray)

    def source(self, path: str, leaf: Any) -> Source:
        array: ShardedArray = leaf
        spec, division = spec_of(array), array._division
        views = tuple([inside(array, number) for number in division.first])
        partial = division.gap is not None
        if not partial and len(views) == 1:
            return Source(spec, leaf, views[0], _identity(array))
        if not partial and not views:
            return Source(spec, leaf, np.empty(spec.shape, array.dtype))
        identity, shards = _identity(array), division.shards
        return Source(spec, leaf, None, identity, shards=shards, views=views, partial=partial)

    def fetch(self, source: Source, shard: int, box: Box, out: Memory) -> None:
        array: ShardedArray = source.leaf
        held = inside(array, array._division.first[shard])
        np.copyto(out, held[selection(box)], casting="no")

    def target(self, path: str, leaf: Any, *, in_place: bool) -> Target:
        array: ShardedArray = leaf
        division = array._division
        boxes = tuple([shard.box for shard in division.shards])
        target = Target(spec_of(array), leaf, boxes=boxes, path=path, fill=not boxes)
        if in_place:
            _check_memory(path, array)
            target.buffers = tuple([inside(array, number) for number in division.first])
            target.identity = _identity(array)
        return target

    def place(self, target: Target, parts: Sequence[Memory]) -> Any:
        array: ShardedArray = target.leaf
        division = array._division
        if target.buffers:
            for number, box in enumerate(division.number):
                if box >= 0 and number != division.first[box]:
                    np.copyto(inside(array, number), target.buffers[box])
            return array
        made: list[tuple[tuple[int, ...], Memory]] = []
        for number, ((offset, held), box) in enumerate(
            zip(array.shards, division.number, strict=True)
        ):
            if box >= 0 and number == division.first[box] and held.shape == parts[box].shape:
                values = parts[box]
            else:
                values = np.zeros(held.shape, held.dtype)
                if box >= 0:
                    values[selection(Box.whole(parts[box].shape))] = parts[box]
            made.append((offset, values))
        return ShardedArray(array.shape, array.dtype, made, padded=True)


def _identity(array: ShardedArray) -> Hashable | None:
    """Return a value that is equal for arrays of the same boxes and memory."""
    division, name = array._division, DTYPE_NAMES[array.dtype]
    places = [host_place(inside(array, number), name)[1] for number in division.first]
    return ("sharded", array.shape, name, division.shards, tuple(places))


def _check_memory(path: str, array: ShardedArray) -> None:
    """Raise if a shard is read-only, or overlaps itself or another shard in memory."""
    boxes = array._division.number
    numbers = [number for number, box in enumerate(boxes) if box >= 0]
    parts = [inside(array, number) for number in numbers]
    for number, part in zip(numbers, parts, strict=True):
        check_fillable(path, f"shard {number}", part)
    places = [Place.of(part) for part in parts]
    for a, b in overlapping(places):
        one, two = numbers[a], numbers[b]
        is_replica = boxes[one] == boxes[two] and places[a] == places[b]
        if not is_replica and may_share_memory(parts[a], parts[b]):
            raise UnsupportedLeafError(
                f"{path}: shards {one} and {two} share memory, so they cannot be filled; give "
                "each its own",
                path=path,
                found=(one, two),
            )
