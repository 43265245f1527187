"""Merging of the schemas of all processes into the one from which all of them plan."""

# Rule 1: every process merges the same schemas to the same result or error.
# Rule 2: leaves are compared per distinct schema, not per process: most processes share one.

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from asyncckpt.errors import DtypeMismatchError, MismatchError, ShapeMismatchError
from asyncckpt.planning.balance import Processes
from asyncckpt.planning.schema import Schema, SchemaLeaf, schema_digest
from asyncckpt.planning.tiling import tiling_fault
from asyncckpt.spec import ArraySpec, Box, Partition, Shard
from asyncckpt.tree import Structure, merge_trees, process_values, where


@dataclass(frozen=True, slots=True)
class MergedLeaf:
    """One leaf of the state of all processes.

    Attributes:
        path: its path in the merged tree.
        kind: kind of a scalar, or the framework on the lowest process that has the leaf.
        spec: shape and dtype of an array; None for a scalar.
        extra: facts stored with the bytes, as JSON; empty for none.
        processes: processes that have the leaf, ascending; equal sets are one object.
        tied_to: ordinal of the earlier leaf whose bytes it shares in every process that has it.
        partition: how these processes divide the array; None if each has all of it.
        shards: all shards of an array that no partition describes.
        copies: the processes of each mesh, if several meshes divide the array in the same way;
            processes at equal positions hold equal parts.
    """

    path: str
    kind: str
    spec: ArraySpec | None
    extra: str
    processes: Processes
    tied_to: int | None = None
    partition: Partition | None = None
    shards: tuple[Shard, ...] | None = None
    copies: tuple[Processes, ...] = ()


class OwnPart(NamedTuple):
    """A process's part of a leaf, in the fields of its `LeafLayout`."""

    shards: tuple[Shard, ...] | None
    partition: Partition | None
    holders: Processes | None


def own_part(
    leaf: MergedLeaf,
    process: int,
    process_count: int,
    *,
    shards: tuple[Shard, ...] | None = None,
    partition: Partition | None = None,
) -> OwnPart:
    """Return a process's part of an array leaf.

    `shards` (None for the whole array) and `partition` are as reported by the process's adapter.
    """
    if leaf.partition is not None:
        if process not in leaf.processes:
            return OwnPart((), leaf.partition, None)
        if partition is not None:
            if leaf.copies:
                shards = tuple(
                    [Shard(s.box, _in_copies(leaf.copies, s.holders)) for s in shards or ()]
                )
            return OwnPart(shards or (), leaf.partition, None)
        # This process holds the whole array.
        assert leaf.spec is not None
        boxes = (Box.whole(leaf.spec.shape),) if shards is None else [s.box for s in shards]
        return OwnPart(tuple([Shard(box, (process,)) for box in boxes]), leaf.partition, None)
    if leaf.shards is not None:
        return OwnPart(leaf.shards, None, None)
    return OwnPart(None, None, None if len(leaf.processes) == process_count else leaf.processes)


@lru_cache(maxsize=4096)
def _in_copies(copies: tuple[Processes, ...], holders: Processes) -> Processes:
    """Return the processes that hold, in every copy, the part that `holders` have in theirs."""
    own = next(copy for copy in copies if holders[0] in copy)
    places = [own.index(holder) for holder in holders]
    return tuple(sorted(copy[place] for copy in copies for place in places))


@dataclass(frozen=True, slots=True)
class Merged:
    """Merged schema of all processes.

    Attributes:
        structure: the containers of the merged tree.
        leaves: its leaves, in the order of the structure.
        ordinals: per process, the merged ordinals of its own leaves; equal ones are one object.
        digest: SHA-256 (hex) of all schemas.
        keys_differ: some dict other than `PerProcess` has different keys on different processes.
    """

    structure: Structure
    leaves: tuple[MergedLeaf, ...]
    ordinals: Mapping[int, Sequence[int]]
    digest: str
    keys_differ: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    """A leaf of one schema.

    Attributes:
        processes: the processes with the schema.
        ordinals: merged ordinals of the schema's leaves.
    """

    leaf: SchemaLeaf
    processes: Processes
    ordinals: Sequence[int]


Sets = dict[tuple[int, ...], Processes]
"""Sets of processes, by the lowest process of each of their schemas; equal sets are one object."""


def merge_schemas(schemas: Mapping[int, Schema], tree: Literal["union", "same"]) -> Merged:
    """Merge the schemas of all processes.

    With `tree="same"`, dicts must have the same keys on all processes.

    Raises:
        MismatchError: a leaf, the tree or an option differs; names path and processes.
    """
    grouped: dict[str, list[int]] = {}
    digests: dict[int, str] = {}
    for process in sorted(schemas):
        schema = schemas[process]
        # Equal schemas are often one object.
        digest = digests.get(id(schema))
        if digest is None:
            digest = digests[id(schema)] = schema_digest(schema)
        grouped.setdefault(digest, []).append(process)
    groups = [(schemas[found[0]], tuple(found)) for found in grouped.values()]
    _check_options(groups)
    trees: dict[Structure, int] = {}
    tree_of = [trees.setdefault(schema.structure, len(trees)) for schema, _ in groups]
    named = [
        [p for (_, group), t in zip(groups, tree_of, strict=True) if t == number for p in group]
        for number in range(len(trees))
    ]
    merged = merge_trees(list(trees), named, same=tree == "same")
    paths = merged.structure.paths()
    seen: list[list[_Seen]] = [[] for _ in paths]
    ordinals: dict[int, Sequence[int]] = {}
    for (schema, processes), number in zip(groups, tree_of, strict=True):
        own = merged.leaves[number]
        ordinals.update(dict.fromkeys(processes, own))
        for leaf, ordinal in zip(schema.leaves, own, strict=True):
            seen[ordinal].append(_Seen(leaf, processes, own))
    _check_per_process(merged.structure, paths, seen)
    sets: Sets = {}
    leaves = [_merge(n, path, seen[n], sets) for n, path in enumerate(paths)]
    total = hashlib.sha256()
    for digest, found in grouped.items():
        total.update(f"{digest}:{','.join(map(str, found))};".encode())
    digest = total.hexdigest()
    return Merged(merged.structure, tuple(leaves), ordinals, digest, merged.keys_differ)


def _check_options(groups: Sequence[tuple[Schema, Processes]]) -> None:
    first, (lead, *_) = groups[0]
    for schema, processes in groups[1:]:
        for name in sorted({*first.options, *schema.options}):
            one, other = first.options.get(name), schema.options.get(name)
            if one != other:
                raise MismatchError(
                    f"{name}={one!r} on process {lead}, {name}={other!r} on process "
                    f"{processes[0]}: pass the same options on all processes",
                    stage="plan",
                    expected=one,
                    found=other,
                )


def _check_per_process(
    structure: Structure, paths: Sequence[str], seen: Sequence[Sequence[_Seen]]
) -> None:
    """Refuse arrays below a `PerProcess` that several processes hold in parts."""
    below = tuple([f"{path}/" if path else "" for path in process_values(structure)])
    for path, (one, *_) in zip(paths, seen, strict=True) if below else ():
        partition = one.leaf.partition
        if path.startswith(below) and (
            one.leaf.partial or (partition is not None and len(partition.processes) > 1)
        ):
            raise MismatchError(
                f"{where(path)}: process {one.processes[0]} holds only a part of this array, and "
                "a sharded array cannot be below a PerProcess. Save it under a path that only the "
                "processes of its mesh have, such as a key per pipeline stage: "
                "{'opt': {stage: optimizer}}",
                path=path,
                stage="plan",
                expected="an array of one process",
                found=partition.processes if partition is not None else "a part of it",
            )


def _merge(ordinal: int, path: str, seen: Sequence[_Seen], sets: Sets) -> MergedLeaf:
    first = seen[0]
    for other in seen[1:]:
        _compare(path, first, other)
    having = _processes(seen, sets)
    partition, shards = None, None
    copies: tuple[Processes, ...] = ()
    if any(one.leaf.partition is not None for one in seen):
        partition, copies = _partition(path, seen, having)
    elif any(one.leaf.boxes is not None for one in seen):
        shards = _shards(path, seen, having, sets)
    leaf = first.leaf
    ties = {None if one.leaf.tied_to is None else one.ordinals[one.leaf.tied_to] for one in seen}
    tie = ties.pop()
    if ties or tie is None or tie >= ordinal:
        tie = None  # if processes tie it differently, the bytes are stored twice
    return MergedLeaf(
        path, leaf.kind, leaf.spec, leaf.extra, having, tie, partition, shards, copies
    )


def _processes(seen: Sequence[_Seen], sets: Sets) -> Processes:
    """Return the processes that have a leaf; equal sets are one object."""
    if len(seen) == 1:
        return seen[0].processes
    key = tuple([one.processes[0] for one in seen])  # a process has one schema
    found = sets.get(key)
    if found is None:
        found = sets[key] = tuple(sorted(p for one in seen for p in one.processes))
    return found


def _shards(path: str, seen: Sequence[_Seen], having: Processes, sets: Sets) -> tuple[Shard, ...]:
    """Return the shards of all processes; equal boxes are replicas."""
    spec = seen[0].leaf.spec
    assert spec is not None
    if not any(one.leaf.partial for one in seen):
        for other in seen[1:]:
            if other.leaf.boxes != seen[0].leaf.boxes:
                texts = [f"in {len(one.leaf.boxes or (1,))} parts" for one in (seen[0], other)]
                raise _differ(MismatchError, path, seen[0], texts[0], other, f"{texts[1]} (others)")
    whole = Box.whole(spec.shape)
    holders: dict[Box, list[_Seen]] = {}
    for one in seen:
        for box in dict.fromkeys((whole,) if one.leaf.boxes is None else one.leaf.boxes):
            if box.size:
                holders.setdefault(box, []).append(one)
    boxes = sorted(holders, key=lambda box: (box.offset, box.shape))
    fault = tiling_fault(whole, boxes)
    if fault is not None:
        shown = ", ".join(map(str, having[:8]))
        raise MismatchError(
            f"{where(path)}: the parts of {spec} on processes {shown} do not tile it: {fault}",
            path=path,
            stage="plan",
            expected=spec.shape,
            found=fault,
        )
    return tuple([Shard(box, _processes(holders[box], sets)) for box in boxes])


def _compare(path: str, one: _Seen, other: _Seen) -> None:
    """Raise if two leaves with one path differ."""
    a, b = one.leaf, other.leaf
    if a.spec is None or b.spec is None:
        if a.kind != b.kind:
            raise _differ(DtypeMismatchError, path, one, a.kind, other, b.kind)
    elif a.spec.shape != b.spec.shape:
        raise _differ(ShapeMismatchError, path, one, a.spec.shape, other, b.spec.shape)
    elif a.spec.dtype != b.spec.dtype:
        raise _differ(DtypeMismatchError, path, one, a.spec.dtype, other, b.spec.dtype)
    if a.options != b.options:
        texts = f"leaf_options={a.options}", f"leaf_options={b.options}"
        raise _differ(MismatchError, path, one, texts[0], other, texts[1])
    if a.extra != b.extra:
        raise _differ(MismatchError, path, one, a.extra or "no facts", other, b.extra or "no facts")


def _differ(
    kind: type[MismatchError], path: str, one: _Seen, found: object, other: _Seen, instead: object
) -> MismatchError:
    return kind(
        f"{where(path)}: {found} on process {one.processes[0]}, {instead} on process "
        f"{other.processes[0]}; leaves of one path are parts or copies of one value: save others "
        "under other paths, or wrap values that differ by process in PerProcess",
        path=path,
        stage="plan",
        expected=found,
        found=instead,
    )


def _partition(
    path: str, seen: Sequence[_Seen], having: Processes
) -> tuple[Partition, tuple[Processes, ...]]:
    """Return the partition of the array, and the processes of each mesh if there are several.

    Several meshes, such as replicas in data parallelism, must divide the array in the same way.
    """
    divided = [one for one in seen if one.leaf.partition is not None]
    first = divided[0]
    partition = first.leaf.partition
    assert partition is not None
    copies = {partition.holders: partition}
    taken = set(partition.processes)
    for other in divided[1:]:
        mine = other.leaf.partition
        assert mine is not None
        if mine == copies.get(mine.holders):
            continue
        same = (mine.cuts, mine.pattern) == (partition.cuts, partition.pattern)
        if not (mine.pattern and same and taken.isdisjoint(mine.processes)):
            raise _divided_otherwise(path, first, partition, other, mine)
        copies[mine.holders] = mine
        taken.update(mine.processes)
    processes: tuple[Processes, ...] = ()
    if len(copies) > 1:
        partition, processes = _joint_partition(tuple(copies.values()))
    lacking = sorted(set(partition.processes) - set(having))
    if lacking:
        raise MismatchError(
            f"{where(path)}: the mesh on process {first.processes[0]} includes process "
            f"{lacking[0]}, whose tree has no such leaf; save it from every process of its mesh",
            path=path,
            stage="plan",
            expected=partition.processes,
            found=having,
        )
    for one in seen:
        # A process whose devices hold all of the array sees no partition.
        alone = one.leaf.partition is None and one.processes != partition.processes
        if alone and partition.processes:
            text = f"divided over processes {list(partition.processes)[:8]}"
            raise _differ(MismatchError, path, first, text, one, "whole")
    return partition, processes


def _divided_otherwise(
    path: str, one: _Seen, first: Partition, other: _Seen, second: Partition
) -> MismatchError:
    """Return the error for two meshes that divide one array in different ways."""
    texts: list[str] = []
    placed = ", placed differently," if first.cuts == second.cuts else ""
    for seen, partition, how in ((one, first, ""), (other, second, placed)):
        even = all(isinstance(cut, int) for cut in partition.cuts)
        shards = f"shards of {partition.cuts}" if even else f"shards cut at {partition.cuts}"
        processes = (partition.processes or seen.processes)[:8]
        texts.append(f"{shards}{how} on processes {', '.join(map(str, processes))}")
    return MismatchError(
        f"{where(path)}: {'; '.join(texts)}: all meshes of one path must divide the array in the "
        "same way; save different arrays under different paths, such as a key per pipeline stage",
        path=path,
        stage="plan",
        expected=texts[0],
        found=texts[1],
    )


@lru_cache(maxsize=1024)
def _joint_partition(copies: tuple[Partition, ...]) -> tuple[Partition, tuple[Processes, ...]]:
    """Return the joint partition of all meshes, and the processes of each mesh."""
    every = tuple(sorted(process for copy in copies for process in copy.processes))
    texts = " and ".join(copy.holders for copy in copies)
    return Partition(copies[0].cuts, texts, every), tuple(copy.processes for copy in copies)
