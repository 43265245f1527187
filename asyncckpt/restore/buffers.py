"""Destination buffers: the host memory that a restore reads into, and which arrays fill it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import host_place, may_share_memory, overlapping
from asyncckpt.checkpoint.metadata import LeafIndex, OpenCheckpoint
from asyncckpt.errors import UsageError
from asyncckpt.flow.arena import SMALL_NBYTES, Arena, Recycled
from asyncckpt.flow.buffers import allocating
from asyncckpt.ports import Bytes, Target
from asyncckpt.restore.match import NO_FACTS, LeafRestore
from asyncckpt.restore.plan import Destinations, flat_target
from asyncckpt.spec import DTYPES, Box

Memory = npt.NDArray[Any]

_TIED_FRAMEWORKS = frozenset(("numpy", "torch"))
"""Frameworks whose tied arrays stay tied: writing to one changes the other. JAX's are immutable."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The memory of one restore.

    Attributes:
        parts: per leaf its memory in the stored dtype, one array, or one for each box that its
            target wants.
        nbytes: bytes of all of it.
        destinations: the overlaps of parts and stored arrays, which are fetched.
        owners: per destination the number of the leaf that waits for it.
        sharers: by destination the numbers of further leaves that wait for it (tied arrays).
    """

    parts: list[Sequence[Memory]]
    nbytes: int
    destinations: Destinations
    owners: Sequence[int]
    sharers: Mapping[int, Sequence[int]]

    def chunks_of_leaves(self, counts: Sequence[int]) -> list[int]:
        """Return the number of chunks that each leaf waits for, from those of each destination."""
        chunks = [0] * len(self.parts)
        for leaf, count in zip(self.owners, counts, strict=True):
            chunks[leaf] += count
        for number, leaves in self.sharers.items():
            for leaf in leaves:
                chunks[leaf] += counts[number]
        return chunks


def allocate(
    opened: OpenCheckpoint,
    leaves: Sequence[LeafRestore],
    *,
    framework: str,
    in_place: bool,
    recycled: Recycled | None = None,
) -> Buffers:
    """Return memory for every leaf that is an array, and what fills it. Blocking.

    Leaves without a target become arrays of `framework`. New memory comes from `recycled`, and
    returns there when the arrays are dropped. With `in_place`, the buffers of targets are used
    where they have the stored dtype.
    """
    # This loop decides what a small leaf costs: the common case makes no call that it can avoid.
    parts, flats, nbytes = _memory(opened, leaves, framework, recycled, in_place=in_place)
    tied = opened.arrays.tied
    tied_arrays = {*tied, *tied.values()}
    # The chunks of tied arrays are read once into memory that their targets share.
    shared: dict[Hashable, int] = {}
    destinations = Destinations()
    owners: list[int] = []
    sharers: dict[int, list[int]] = {}
    for number, leaf in enumerate(leaves):
        boxes = None if leaf.target is None else leaf.target.boxes
        if boxes is None and not leaf.pieces and leaf.array not in tied_arrays:
            values, flat = parts[number][0], flats[number]
            # Others are extension dtypes, which memoryviews do not know.
            if flat is None and (values.nbytes >= SMALL_NBYTES or values.dtype.kind == "V"):
                flat = flat_target(values)
            destinations.add(leaf.path, leaf.array, None, values, flat)
            owners.append(number)
            continue
        assert leaf.spec is not None
        index = LeafIndex(opened, opened.pieces(leaf.saved, leaf.array))
        wanted = [Box.whole(leaf.spec.shape)] if boxes is None else boxes
        for wanted_box, memory in zip(wanted, parts[number], strict=True):
            for array, part, values in index.overlaps(wanted_box, memory):
                box = None if part.shape == opened.storage(array).spec.shape else part
                if array in tied_arrays:
                    address = values.__array_interface__["data"][0]
                    key = (opened.first_rows[array], box, address, values.shape, values.strides)
                    first = shared.setdefault(key, len(destinations))
                    if first < len(destinations):
                        sharers.setdefault(first, []).append(number)
                        continue
                destinations.add(leaf.path, array, box, values, flat_target(values))
                owners.append(number)
    return Buffers(parts, nbytes, destinations, owners, sharers)


def _memory(
    opened: OpenCheckpoint,
    leaves: Sequence[LeafRestore],
    framework: str,
    recycled: Recycled | None,
    *,
    in_place: bool,
) -> tuple[list[Sequence[Memory]], list[Bytes | None], int]:
    """Return per leaf the buffers of its target, or new memory.

    Also returns the new memory of each leaf as one run of bytes, where it is one, and the number of
    all bytes.
    """
    parts: list[Sequence[Memory]] = []
    flats: list[Bytes | None] = [None] * len(leaves)
    own: list[tuple[int, int]] = []
    total_nbytes = 0
    nbytes_of = [storage.spec.nbytes for storage in opened.storages]
    storage_of, has_ties = opened.arrays.spec, bool(opened.arrays.tied)
    for number, leaf in enumerate(leaves):
        spec, target = leaf.spec, leaf.target
        assert spec is not None
        held: Sequence[Memory] = ()
        nbytes = spec.nbytes if leaf.pieces else nbytes_of[storage_of[leaf.array]]
        if target is not None:
            if in_place and target.spec.dtype == spec.dtype:
                held = target.buffers if target.buffer is None else (target.buffer,)
            if target.boxes is not None:
                nbytes = sum([box.size for box in target.boxes]) * spec.itemsize
        total_nbytes += nbytes
        parts.append(held)
        if not held:
            own.append((number, nbytes))
    own_nbytes = sum(map(itemgetter(1), own))
    arena = Arena(own_nbytes, recycled)
    made: dict[Hashable, Sequence[Memory]] = {}
    with allocating(own_nbytes):
        for number, nbytes in own:
            leaf = leaves[number]
            spec, target = leaf.spec, leaf.target
            assert spec is not None
            dtype = DTYPES[spec.dtype]
            if target is not None and target.boxes is not None:
                boxes = [(box.shape, box.size * dtype.itemsize) for box in target.boxes]
                parts[number] = [arena.take(size).view(dtype).reshape(n) for n, size in boxes]
                continue
            key = tied_key(opened, leaf, framework) if has_ties else None
            if key is not None and key in made:
                parts[number] = made[key]
                continue
            if nbytes < SMALL_NBYTES:
                parts[number] = (np.empty(spec.shape, dtype),)
            else:
                flats[number] = flat = arena.take(nbytes)
                parts[number] = (flat.view(dtype).reshape(spec.shape),)
            if key is not None:
                made[key] = parts[number]
    return parts, flats, total_nbytes


def tied_key(opened: OpenCheckpoint, leaf: LeafRestore, framework: str) -> Hashable | None:
    """Return a key that leaves share if they come back as one array; None for all others.

    They were one mutable array, or become one immutable array. Others that share chunks (`bytes`
    and the array that they were made of, or one JAX array in two places) get memory of their own,
    so that writing to one does not change the other.
    """
    tied = opened.arrays.tied
    if leaf.want is not None or "python" in opened.leaves.extra.get(leaf.saved, NO_FACTS):
        return None
    if framework != "jax" and opened.leaves.kind[leaf.saved] not in _TIED_FRAMEWORKS:
        return None
    return tuple([tied.get(array, array) for array in leaf.arrays()])


_Place = tuple[LeafRestore, tuple[int, int], Hashable | None, Any]
"""A leaf, and byte span, identity and array of memory that a restore fills for it."""


def check_overlaps(leaves: Sequence[LeafRestore], first_rows: Sequence[int]) -> None:
    """Check that no two targets share memory, unless they are one array of the checkpoint.

    `first_rows` has the first chunk row of every array.

    Raises:
        UsageError: names both leaves.
    """
    targets = [(leaf, leaf.target) for leaf in leaves if leaf.target is not None]
    owners = [t.buffer for _, t in targets if t.span is None and t.buffer is not None]
    if len(set(map(id, owners))) == len(owners) and not any(
        t.span or t.buffers for _, t in targets
    ):
        return  # each has memory of its own
    places: list[_Place] = [(leaf, *place) for leaf, t in targets for place in _places(t)]
    spans = [span for _, span, _, _ in places]
    # The byte spans of most targets are disjoint: one vectorised comparison settles it.
    bounds = np.array(spans, np.int64).reshape(-1, 2)
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    if not np.any(bounds[1:, 0] < np.maximum.accumulate(bounds[:-1, 1])):
        return
    for number, other_number in overlapping(spans):
        leaf, _, identity, memory = places[number]
        other, _, other_identity, other_memory = places[other_number]
        if leaf.target is other.target:
            continue
        if identity is not None and identity == other_identity and _tied(leaf, other, first_rows):
            continue
        if may_share_memory(memory, other_memory):
            raise UsageError(
                f"{leaf.path} and {other.path}: these targets overlap in memory but are different "
                "arrays in the checkpoint; restore one of them elsewhere",
                path=other.path,
            )


def _tied(one: LeafRestore, other: LeafRestore, first_rows: Sequence[int]) -> bool:
    """Return whether two leaves share their chunks; scalars of the record have none."""
    if one.spec is None or other.spec is None:
        return False
    return [first_rows[a] for a in one.arrays()] == [first_rows[a] for a in other.arrays()]


def _places(target: Target) -> list[tuple[tuple[int, int], Hashable | None, Any]]:
    """Return byte span, identity and memory of every part of a target that is filled."""
    name = target.spec.dtype
    if target.buffers:
        return [(host_place(b, name)[0], target.identity, b) for b in target.buffers]
    if target.span is not None:
        memory = target.leaf if target.buffer is None else target.buffer
        return [(target.span, target.identity, memory)]
    if target.buffer is None:
        return []
    return [(*host_place(target.buffer, name), target.buffer)]
