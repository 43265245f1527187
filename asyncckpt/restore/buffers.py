"""Destination buffers: the host memory that a restore reads into, and the arrays that fill it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import Place, host_span, may_share_memory, overlapping
from asyncckpt.checkpoint.metadata import LeafIndex, OpenCheckpoint
from asyncckpt.errors import UsageError
from asyncckpt.flow.arena import SMALL_NBYTES, Arena, Recycled
from asyncckpt.flow.buffers import allocating
from asyncckpt.ports import Target
from asyncckpt.restore.matched import NO_FACTS, LeafRestore, MatchedArrays, Matching
from asyncckpt.restore.plan import Destinations
from asyncckpt.restore.request import RestoreRequest, enclosing
from asyncckpt.spec import DTYPES, Box

Memory = npt.NDArray[Any]

_TIED_FRAMEWORKS = frozenset(("numpy", "torch"))
"""Frameworks with mutable arrays: writing to one of two tied arrays changes the other."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The memory of one restore.

    Attributes:
        values: the memory of each leaf in the stored dtype; None if it is in `boxes`.
        boxes: by leaf, an array for each box that its target wants.
        nbytes: bytes of all of this memory.
        destinations: the overlaps of wanted boxes and stored arrays, to be fetched.
        owners: for each destination, the number of the leaf that waits for it.
        sharers: by destination, the numbers of other leaves that wait for it (tied arrays).
        ties: by leaf, a key that leaves share if they become one object; empty without tied arrays.
    """

    values: list[Memory | None]
    boxes: dict[int, Sequence[Memory]]
    nbytes: int
    destinations: Destinations
    owners: Sequence[int]
    sharers: Mapping[int, Sequence[int]]
    ties: Mapping[int, Hashable]

    def chunks_of_leaves(self, counts: Sequence[int]) -> list[int]:
        """Return the number of chunks of each leaf, given those of each destination."""
        chunks = [0] * len(self.values)
        for leaf, count in zip(self.owners, counts, strict=True):
            chunks[leaf] += count
        for number, leaves in self.sharers.items():
            for leaf in leaves:
                chunks[leaf] += counts[number]
        return chunks

    def take(self, leaf: int) -> Sequence[Memory]:
        """Hand over the memory of a leaf: one array, or one for each box."""
        values, self.values[leaf] = self.values[leaf], None
        return self.boxes.pop(leaf) if values is None else (values,)


def allocate(
    opened: OpenCheckpoint,
    arrays: MatchedArrays,
    *,
    framework: str,
    in_place: bool,
    recycled: Recycled | None = None,
    twins: Collection[int] = (),
) -> Buffers:
    """Return memory for every array, and the stored arrays that fill it. Blocking.

    Leaves without a target become arrays of `framework`. New memory comes from `recycled`, and
    returns there when the arrays are dropped. With `in_place`, the buffers of targets with the
    stored dtype are used, except those of `twins`.
    """
    memory = _memory(opened, arrays, framework, recycled, twins, in_place=in_place)
    values_of, boxes_of, nbytes, ties = memory
    tied = opened.arrays.tied
    tied_arrays = {*tied, *tied.values()}
    # Chunks of tied arrays are read once into memory that their targets share.
    shared: dict[Hashable, int] = {}
    # Ordinary arrays by column, because this determines the cost of a small leaf.
    owners = arrays.ordinary()
    destinations = Destinations()
    destinations.path += map(arrays.paths().__getitem__, owners)
    destinations.array += map(arrays.arrays().__getitem__, owners)
    destinations.box += [None] * len(owners)
    destinations.values += map(values_of.__getitem__, owners)
    sharers: dict[int, list[int]] = {}
    for number, leaf in arrays.described.items():
        boxes = None if leaf.target is None else leaf.target.boxes
        if boxes is None and not leaf.pieces and leaf.array not in tied_arrays:
            destinations.add(leaf.path, leaf.array, None, values_of[number])
            owners.append(number)
            continue
        assert leaf.spec is not None
        index = LeafIndex(opened, opened.pieces(leaf.saved, leaf.array))
        wanted = [Box.whole(leaf.spec.shape)] if boxes is None else boxes
        for wanted_box, held in zip(
            wanted, boxes_of.get(number, (values_of[number],)), strict=True
        ):
            assert held is not None
            for array, part, values in index.overlaps(wanted_box, held):
                box = None if part.shape == opened.storage(array).spec.shape else part
                if array in tied_arrays:
                    address = values.__array_interface__["data"][0]
                    key = (opened.first_rows[array], box, address, values.shape, values.strides)
                    first = shared.setdefault(key, len(destinations))
                    if first < len(destinations):
                        sharers.setdefault(first, []).append(number)
                        continue
                destinations.add(leaf.path, array, box, values)
                owners.append(number)
    return Buffers(values_of, boxes_of, nbytes, destinations, owners, sharers, ties)


def _memory(
    opened: OpenCheckpoint,
    arrays: MatchedArrays,
    framework: str,
    recycled: Recycled | None,
    twins: Collection[int],
    *,
    in_place: bool,
) -> tuple[list[Memory | None], dict[int, Sequence[Memory]], int, dict[int, Hashable]]:
    """Return `Buffers.values`, `boxes`, `nbytes` and `ties`: buffers of targets, or new memory."""
    specs = [storage.spec for storage in opened.storages]
    kinds = list(map(opened.arrays.spec.__getitem__, arrays.arrays()))
    nbytes_of = list(map([spec.nbytes for spec in specs].__getitem__, kinds))
    values: list[Memory | None] = [None] * len(arrays)
    boxes: dict[int, Sequence[Memory]] = {}
    own = arrays.ordinary()
    if in_place and arrays.targets is not None:
        for number in own:
            values[number] = arrays.targets.leaves[arrays.number[number]]
        own = [number for number in own if number in twins]
    for number, leaf in arrays.described.items():
        spec, target = leaf.spec, leaf.target
        assert spec is not None
        nbytes_of[number] = spec.nbytes
        if target is not None and target.boxes is not None:
            nbytes_of[number] = sum([box.size for box in target.boxes]) * spec.itemsize
        used = in_place and number not in twins
        if not used or target is None or not target.buffers or target.spec.dtype != spec.dtype:
            own.append(number)
        elif target.boxes is None:
            (values[number],) = target.buffers
        else:
            boxes[number] = target.buffers
    own_nbytes = sum(map(nbytes_of.__getitem__, own))
    arena = Arena(own_nbytes, recycled)
    made: dict[Hashable, int] = {}
    ties: dict[int, Hashable] = {}
    with allocating(own_nbytes):
        for number in own:
            spec, key = specs[kinds[number]], None
            if number in arrays.described:
                leaf = arrays.described[number]
                spec, target = leaf.spec or spec, leaf.target
                key = _tied_key(opened, leaf, framework)
                if key is not None:
                    # Leaves that share memory become one object, unless their facts differ.
                    extra = str(opened.leaves.extra.get(leaf.saved))
                    ties[number] = key, opened.leaves.kind[leaf.saved], extra
                if target is not None and target.boxes is not None:
                    dtype = DTYPES[spec.dtype]
                    sizes = [(box.shape, box.size * dtype.itemsize) for box in target.boxes]
                    boxes[number] = [arena.take(size).view(dtype).reshape(n) for n, size in sizes]
                    continue
            first = number if key is None else made.setdefault(key, number)
            if first != number:
                values[number] = values[first]
            elif nbytes_of[number] < SMALL_NBYTES:
                values[number] = np.empty(spec.shape, DTYPES[spec.dtype])
            else:
                flat = arena.take(nbytes_of[number])
                values[number] = flat.view(DTYPES[spec.dtype]).reshape(spec.shape)
    arena.close()
    return values, boxes, sum(nbytes_of), ties


def _tied_key(opened: OpenCheckpoint, leaf: LeafRestore, framework: str) -> Hashable | None:
    """Return a key that leaves share if they are restored as one array; None for most leaves.

    Such leaves were one mutable array, or become one immutable array. Others that share chunks
    (`bytes` and the array that they were made of, or one JAX array in two places) get memory of
    their own, so that writing to one does not change the other.
    """
    tied = opened.arrays.tied
    if (
        not tied
        or not (leaf.want is None or leaf.want.is_template)
        or "python" in opened.leaves.extra.get(leaf.saved, NO_FACTS)
    ):
        return None
    if framework != "jax" and opened.leaves.kind[leaf.saved] not in _TIED_FRAMEWORKS:
        return None
    like = None if leaf.want is None else leaf.want.leaf
    kind = None if like is None else (type(like), getattr(like, "device", None))
    return (kind, *[tied.get(array, array) for array in leaf.arrays()])


def find_twins(matching: Matching, first_rows: Sequence[int]) -> dict[int, int]:
    """Return the arrays whose target is the memory of an earlier array, with that array.

    A model with tied weights may be restored from a checkpoint that holds them twice. Arrays that
    are tied in the checkpoint, too, are no twins. `first_rows` has the first chunk row of every
    array.

    Raises:
        UsageError: two targets overlap otherwise; names both leaves.
    """
    arrays = matching.arrays
    assert arrays.targets is not None
    described = [*arrays.described.values(), *matching.scalars]
    filled = [leaf.target for leaf in described if leaf.target is not None]
    memories = [memory for target in filled for memory in _host_memory(target)]
    views = any(memory.base is not None for memory in memories)
    memories += [arrays.targets.leaves[arrays.number[place]] for place in arrays.ordinary()]
    owners = not views and len(set(map(id, memories))) == len(memories)
    if (owners or _disjoint(memories)) and not any(target.identity for target in filled):
        return {}  # each has memory of its own
    leaves, twins = matching.leaves, dict[int, int]()
    places: list[tuple[int, tuple[int, int], Any]] = []  # leaf, byte span, array that it fills
    same: dict[Hashable, int] = {}  # first leaf by identity and span
    for number, leaf in enumerate(leaves):
        for span, identity, memory in [] if leaf.target is None else _places(leaf.target):
            key = number if identity is None else (identity, span)
            first = leaves[same.setdefault(key, number)]
            if first is leaf or not (_tied(first, leaf, first_rows) or _alike(first, leaf)):
                if memory is not None:
                    places.append((number, span, memory))
                elif first is not leaf:
                    raise _overlap(first, leaf)
            elif not _tied(first, leaf, first_rows):
                twins[number] = same[key]
    for place, other_place in overlapping([Place.of(memory) for _, _, memory in places]):
        (number, _, memory), (other_number, _, other_memory) = places[place], places[other_place]
        leaf, other = leaves[number], leaves[other_number]
        if leaf.target is not other.target and may_share_memory(memory, other_memory):
            raise _overlap(leaf, other)
    return twins


def find_shared(
    matching: Matching, first_rows: Sequence[int], request: RestoreRequest
) -> dict[int, int]:
    """Return the leaves that must equal an earlier one, because their object occurs repeatedly.

    Each with the earlier one, by number in `Matching.leaves`; without leaves that are tied in the
    checkpoint.
    """
    shared, repeated = request.shared, request.repeated
    if not shared and not repeated:
        return {}  # nearly always, so that no leaf is looked at
    found: dict[int, int] = {}
    earlier: dict[Hashable, int] = {}  # first leaf by its place in the first occurrence
    leaves = matching.leaves
    for number, leaf in enumerate(leaves):
        place: Hashable
        if repeated:
            # By path: an object may be given leaves that its present state lacks.
            root = enclosing(leaf.path, repeated)
            place = leaf.path if root is None else repeated[root] + leaf.path[len(root) :]
        elif leaf.want is not None:
            place = shared.get(leaf.number, leaf.number)
        else:
            continue  # a leaf of `PerProcess.all`
        first = earlier.setdefault(place, number)
        if first != number and not _tied(leaves[first], leaf, first_rows):
            found[number] = first
    return found


def _alike(one: LeafRestore, other: LeafRestore) -> bool:
    """Return whether two leaves are stored alike and their targets want the same."""
    a, b = one.target, other.target
    assert a is not None and b is not None
    same = (one.spec, a.spec, a.boxes) == (other.spec, b.spec, b.boxes)
    return same and one.spec is not None


def _tied(one: LeafRestore, other: LeafRestore, first_rows: Sequence[int]) -> bool:
    """Return whether two leaves share their chunks; scalars of the record have none."""
    if one.spec is None or other.spec is None:
        return False
    return [first_rows[a] for a in one.arrays()] == [first_rows[a] for a in other.arrays()]


def _overlap(one: LeafRestore, other: LeafRestore) -> UsageError:
    return UsageError(
        f"{one.path} and {other.path}: these targets overlap in memory but are different arrays in "
        "the checkpoint; pass a copy of one of them, or leave it out with include=",
        path=other.path,
    )


def _places(target: Target) -> list[tuple[tuple[int, int], Hashable | None, Any]]:
    """Return byte span, identity and memory of each filled part of a target.

    Without a span and memory (None) for arrays that are not in plain host memory: of these, only
    equal ones are found.
    """
    memory = _host_memory(target)
    if not memory:
        is_filled = target.identity is not None and target.boxes != ()
        return [((0, 0), target.identity, None)] if is_filled else []
    spans = [host_span(part) for part in memory]
    facts = [(part.shape, part.strides, part.dtype) for part in memory]
    identity = (*spans, *facts) if all(part.size for part in memory) else None
    return [(span, identity, part) for span, part in zip(spans, memory, strict=True)]


def _disjoint(memories: Sequence[Memory]) -> bool:
    """Return whether the byte spans of these arrays are disjoint, as those of most targets are."""
    bounds = np.array(list(map(host_span, memories)), np.int64).reshape(-1, 2)
    bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]
    return not np.any(bounds[1:, 0] < np.maximum.accumulate(bounds[:-1, 1]))


def _host_memory(target: Target) -> Sequence[Memory]:
    """Return the arrays in host memory that a restore fills."""
    if target.fill and isinstance(target.leaf, np.ndarray):
        return (target.leaf,)  # in another byte order
    return target.buffers
