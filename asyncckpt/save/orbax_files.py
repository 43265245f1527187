"""Orbax's metadata files: what Orbax needs to restore a checkpoint of ours, where it can."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from asyncckpt.format.orbax import OrbaxLeaf, conflicts, encode_files
from asyncckpt.format.record import SCALAR_KINDS
from asyncckpt.planning.save import SavePlan
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.tree import Structure

_EMPTY = {"none": "None", "list": "List", "tuple": "Tuple", "namedtuple": "NamedTuple"}


def orbax_files(
    snapshot: Snapshot, plan: SavePlan, mirrors: Sequence[int]
) -> tuple[Mapping[str, bytes] | None, tuple[str, ...]]:
    """Return Orbax's files by their path in the database, or None and a note that says why not.

    Args:
        snapshot: the tree.
        plan: the arrays that store it.
        mirrors: leaves whose scalars are stored as arrays too, after those of `snapshot`.
    """
    if plan.arrays.pieces:
        first, *others = plan.arrays.pieces
        more = f" (and {len(others)} more)" if others else ""
        return None, (
            f"{snapshot.paths[snapshot.array_leaf[first]]}: this leaf{more} is stored in pieces, "
            "because its shards lie on no common grid, which Orbax cannot express; asyncckpt "
            'restores it, export --orbax converts it, and layout="regular" avoids pieces',
        )
    names = plan.arrays.names
    devices = key_devices(snapshot)
    array_leaves = [*snapshot.array_leaf, *mirrors]
    array_of = dict(zip(array_leaves, range(len(array_leaves)), strict=True))
    leaves: list[OrbaxLeaf] = []
    for path, child in _paths(snapshot.structure):
        if isinstance(child, str):
            leaves.append(OrbaxLeaf(path, child))  # type: ignore[arg-type]
            continue
        kind = snapshot.kinds[child]
        array = array_of.get(child)
        if kind == "str":
            leaves.append(OrbaxLeaf(path, "string", text=snapshot.scalars[child]))
        elif array is None:
            return None, (
                f"{snapshot.paths[child]}: Orbax cannot hold this {kind}, so it cannot restore "
                "this checkpoint; asyncckpt can",
            )
        elif kind in SCALAR_KINDS:
            leaves.append(OrbaxLeaf(path, "scalar", names[array]))
        elif child in devices:
            leaves.append(
                OrbaxLeaf(
                    path,
                    "jax",
                    names[array],
                    shape=plan.arrays.of(array).spec.shape,
                    chunk_shape=plan.arrays.of(array).grid.chunk_shape,
                    device=devices[child],
                    key_impl=snapshot.extra[child]["prng_impl"],
                )
            )
        else:
            # Also for jax.Array: Orbax then needs no device of the machine that saved.
            leaves.append(OrbaxLeaf(path, "array", names[array]))
    bad = conflicts(leaves)
    if bad:
        shown = ".".join(key for key, _ in leaves[bad[0]].path)
        return None, (
            f"Orbax would not find {shown!r} under its name (and {len(bad) - 1} more), so it "
            "cannot restore this checkpoint; asyncckpt can",
        )
    return encode_files(leaves), ()


def key_devices(snapshot: Snapshot) -> dict[int, str]:
    """Return by leaf a device that holds typed PRNG keys: Orbax restores such keys to it."""
    devices: dict[int, str] = {}
    for leaf, facts in snapshot.extra.items():
        if "prng_impl" in facts:
            source = snapshot.sources[bisect.bisect_left(snapshot.array_leaf, leaf)]
            devices[leaf] = min(map(str, source.leaf.devices()))
    return devices


def _paths(
    structure: Structure,
) -> list[tuple[tuple[tuple[str, bool], ...], int | str]]:
    """Return Orbax's path of every leaf (its ordinal) and of every empty container (its kind)."""
    found: list[tuple[tuple[tuple[str, bool], ...], int | str]] = []
    if not structure.nodes:
        return [((), 0)]
    at_node: list[tuple[tuple[str, bool], ...]] = [()] * len(structure.nodes)
    for index, node in enumerate(structure.nodes):
        base = at_node[index]
        if not node.children:
            found.append((base, _EMPTY.get(node.kind, "Dict")))
            continue
        sequence = node.kind in ("list", "tuple")
        keys = node.keys if node.keys else range(len(node.children))
        for key, child in zip(keys, node.children, strict=True):
            path = base if node.kind == "stateful" else (*base, (str(key), sequence))
            if child >= 0:
                found.append((path, child))
            else:
                at_node[-child] = path
    return found
