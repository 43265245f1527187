"""Orbax's metadata files, from which Orbax restores an asyncckpt checkpoint if it can."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from asyncckpt.format.orbax import Kind, OrbaxArrays, OrbaxLeaf, OrbaxPath, conflicts, encode_files
from asyncckpt.planning.save import SavePlan
from asyncckpt.save.snapshot import Snapshot
from asyncckpt.tree import Node
from asyncckpt.tree.per_process import TYPE_NAME as PER_PROCESS

_EMPTY: Mapping[str, Kind] = {
    "none": "None",
    "list": "List",
    "tuple": "Tuple",
    "namedtuple": "NamedTuple",
}

_NUMBERS = frozenset(("int", "float", "bool"))
"""Scalars that are numbers to Orbax."""

_INT_KEYED = frozenset((PER_PROCESS, "flax.nnx.statelib.State"))
"""Registered types whose int keys are mapping keys: the state of an nnx.List has some."""


def orbax_files(
    snapshot: Snapshot, plan: SavePlan, mirrors: Sequence[int]
) -> tuple[Mapping[str, bytes] | None, tuple[str, ...]]:
    """Return Orbax's files by their path in the database, or None and a note with the reason.

    `mirrors` are leaves whose scalars are also stored as arrays, after those of `snapshot`.
    """
    if plan.arrays.pieces:
        first, *others = plan.arrays.pieces
        more = f" (and {len(others)} more)" if others else ""
        return None, (
            f"{snapshot.paths[snapshot.array_leaf[first]]}: this leaf{more} is stored in pieces, "
            "because its shards lie on no common grid, which Orbax cannot express; asyncckpt "
            'restores it, export --orbax converts it, and layout="regular" avoids pieces',
        )
    name_of: list[str | None] = [None] * len(snapshot.paths)
    for leaf, name in zip([*snapshot.array_leaf, *mirrors], plan.arrays.names, strict=True):
        name_of[leaf] = name
    for path, kind, stored_as in zip(snapshot.paths, snapshot.kinds, name_of, strict=True):
        if stored_as is None and kind != "str":
            return None, (
                f"{path}: Orbax cannot hold this {kind}, so it cannot restore this checkpoint; "
                "asyncckpt can",
            )
    leaves = _Walk(snapshot, plan, name_of).leaves()
    if bad := conflicts(leaves):
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return None, (
            f"Orbax would not find or read {bad[0]!r}{more}, or confuse it with another leaf, so "
            "it cannot restore this checkpoint; asyncckpt can",
        )
    return encode_files(leaves), ()


def key_devices(snapshot: Snapshot) -> dict[int, str]:
    """Return, by leaf, a device to which Orbax restores its typed PRNG keys.

    Leaves out keys that only other processes have: Orbax's files are not written for such
    trees.
    """
    devices: dict[int, str] = {}
    for leaf, facts in snapshot.extra.items():
        if "prng_impl" in facts:
            source = snapshot.sources[bisect.bisect_left(snapshot.array_leaf, leaf)]
            if source.leaf is not None:
                devices[leaf] = min(map(str, source.leaf.devices()))
    return devices


def _is_sequence(node: Node) -> bool:
    """Return whether the keys of the children are indices to Orbax.

    They also are for types registered with `jax.tree_util` without keys.
    """
    if node.kind == "registered" and node.type_name not in _INT_KEYED:
        return node.keys == tuple(range(len(node.keys)))
    return node.kind in ("list", "tuple")


class _Walk:
    """Orbax's view of a tree; `name_of` has the name of each leaf's array."""

    def __init__(self, snapshot: Snapshot, plan: SavePlan, name_of: Sequence[str | None]) -> None:
        self._snapshot = snapshot
        self._plan = plan
        self._name_of = name_of
        self._devices = key_devices(snapshot)
        # JAX arrays are plain arrays too, so that Orbax needs no device of the saving machine, and
        # so are complex numbers, which its StandardCheckpointer does not know as scalars.
        self._kind_of: list[Kind] = [
            "scalar" if kind in _NUMBERS else "np.ndarray" for kind in snapshot.kinds
        ]
        # Another library's checkpoint may hold a Python number as an array.
        for leaf, facts in snapshot.extra.items():
            if facts.get("python") in _NUMBERS:
                self._kind_of[leaf] = "scalar"

    def leaves(self) -> list[OrbaxLeaf | OrbaxArrays]:
        """Return leaves and empty containers; most leaves are grouped by container."""
        nodes = self._snapshot.structure.nodes
        if not nodes:
            return [self._leaf((), 0)]
        found: list[OrbaxLeaf | OrbaxArrays] = []
        at_node: list[tuple[tuple[str, bool], ...]] = [()] * len(nodes)
        for base, node in zip(at_node, nodes, strict=True):
            if not node.children:
                found.append(OrbaxLeaf(base, _EMPTY.get(node.kind, "Dict")))
                continue
            if node.kind == "stateful":
                (child,) = node.children
                if child < 0:
                    at_node[-child] = base
                else:
                    found.append(self._leaf(base, child))
                continue
            sequence = _is_sequence(node)
            keys = list(map(str, node.keys or range(len(node.children))))
            own: Sequence[int] = node.children
            if min(own) < 0:
                for key, child in zip(keys, own, strict=True):
                    if child < 0:
                        at_node[-child] = (*base, (key, sequence))
                keys = [key for key, child in zip(keys, own, strict=True) if child >= 0]
                own = [child for child in own if child >= 0]
            group = self._group(base, sequence, keys, own) if own else None
            if group is None:
                pairs = zip(keys, own, strict=True)
                found += [self._leaf((*base, (key, sequence)), child) for key, child in pairs]
            else:
                found.append(group)
        return found

    def _group(
        self, base: OrbaxPath, sequence: bool, keys: Sequence[str], leaves: Sequence[int]
    ) -> OrbaxArrays | None:
        """Return the leaves of a container if all are arrays with the names Orbax computes."""
        prefix = "".join([f"{key}." for key, _ in base])
        names = [prefix + key for key in keys]
        if names != [self._name_of[leaf] for leaf in leaves]:
            return None
        if not self._devices.keys().isdisjoint(leaves):
            return None
        return OrbaxArrays(base, sequence, keys, [self._kind_of[leaf] for leaf in leaves], names)

    def _leaf(self, path: tuple[tuple[str, bool], ...], leaf: int) -> OrbaxLeaf:
        snapshot, name = self._snapshot, self._name_of[leaf]
        if snapshot.kinds[leaf] == "str":
            return OrbaxLeaf(path, "string", text=snapshot.scalars[leaf])
        if leaf not in self._devices:
            return OrbaxLeaf(path, self._kind_of[leaf], name)
        part = self._plan.arrays.of(bisect.bisect_left(snapshot.array_leaf, leaf))
        return OrbaxLeaf(
            path,
            "jax.Array",
            name,
            shape=part.spec.shape,
            chunk_shape=part.grid.chunk_shape,
            device=self._devices[leaf],
            key_impl=snapshot.extra[leaf]["prng_impl"],
        )
