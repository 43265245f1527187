"""Structure of a tree: its containers as an immutable value, and as JSON."""

# Rule 1: nodes and leaves are numbered in the order of their first visit (preorder), so that a
#   parent comes before its children, a subtree is one run of both, and no walk needs recursion.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from asyncckpt.options import MAX_DEPTH
from asyncckpt.tree.names import Key, escape_keys

Kind = Literal["dict", "list", "tuple", "namedtuple", "dataclass", "registered", "stateful", "none"]

MAX_KEY_BITS = 1024
"""Int keys are stored in decimal, and Python refuses to parse more than 4,300 digits."""

KINDS: Final = frozenset(get_args(Kind))
KEYED: Final = frozenset(("dict", "namedtuple", "dataclass", "registered"))
"""Kinds whose nodes have keys."""


class Node(NamedTuple):
    """One container.

    Attributes:
        kind: kind of container.
        keys: one per child for dicts, namedtuples, dataclasses and registered nodes; else empty.
        children: ordinal of a leaf (0 or more), or minus the index of a node in
            `Structure.nodes`. A stateful node has one child, its state dict, at its own path.
        type_name: qualified name of the type, for information; empty for builtin types.
    """

    kind: Kind
    keys: tuple[Key, ...] = ()
    children: tuple[int, ...] = ()
    type_name: str = ""


@dataclass(frozen=True, slots=True)
class Structure:
    """The containers of a tree, without its leaves.

    Attributes:
        nodes: in preorder, the root first; empty when the tree is one leaf.
    """

    nodes: tuple[Node, ...]
    leaf_count: int

    def parts(self) -> list[tuple[Key, ...]]:
        """Return keys and indices from the root to every leaf."""
        return _walk(self, escaped=False)[0]

    def paths(self) -> list[str]:
        """Return the path of every leaf."""
        return _walk(self, escaped=True)[0]

    def node_paths(self) -> list[str]:
        """Return the path of every node; a stateful node and its state dict share one."""
        return _walk(self, escaped=True)[1]

    def subtrees(self, paths: Iterable[str]) -> dict[str, tuple[Structure, range]]:
        """Return the subtree at each path, and the range of its leaves in the whole tree.

        Paths without a node or leaf have no entry. Walks the tree once for all paths.
        """
        leaf_paths, node_paths = _walk(self, escaped=True)
        leaves = {path: leaf for leaf, path in enumerate(leaf_paths)}
        # The path of a stateful node and its state dict means the node, which comes first.
        nodes = {path: len(node_paths) - 1 - n for n, path in enumerate(reversed(node_paths))}
        found: dict[str, tuple[Structure, range]] = {}
        for path in paths:
            if path in nodes:
                found[path] = self._below(nodes[path])
            elif path in leaves:
                found[path] = Structure((), 1), range(leaves[path], leaves[path] + 1)
        return found

    def _below(self, first: int) -> tuple[Structure, range]:
        """Return the subtree of a node, and the range of its leaves."""
        stop = first
        inside = {first}
        ordinals: list[int] = []
        while stop in inside:
            for child in self.nodes[stop].children:
                if child < 0:
                    inside.add(-child)
                else:
                    ordinals.append(child)
            stop += 1
        start = min(ordinals, default=0)
        nodes = tuple(
            node._replace(children=tuple(c - start if c >= 0 else c + first for c in node.children))
            for node in self.nodes[first:stop]
        )
        return Structure(nodes, len(ordinals)), range(start, start + len(ordinals))

    def to_json(self) -> dict[str, Any]:
        """Return the structure as JSON values; keys of dicts stay JSON numbers or strings."""
        nodes = []
        for node in self.nodes:
            item: dict[str, Any] = {"kind": node.kind}
            if node.type_name:
                item["type"] = node.type_name
            if node.keys:
                item["keys"] = list(node.keys)
            if node.children:
                item["children"] = list(node.children)
            nodes.append(item)
        return {"leaves": self.leaf_count, "nodes": nodes}

    @classmethod
    def from_json(cls, obj: object) -> Structure:
        """Return the structure that `to_json` described.

        Raises:
            ValueError: it is malformed or more than `MAX_DEPTH` deep; says where.
        """
        if not isinstance(obj, dict) or obj.keys() != {"leaves", "nodes"}:
            raise ValueError("tree structure: expected an object with 'leaves' and 'nodes'")
        count, items = obj["leaves"], obj["nodes"]
        if type(count) is not int or count < 0:
            raise ValueError(f"tree structure: 'leaves' is {count!r:.40}, not a count")
        if not isinstance(items, list):
            raise ValueError("tree structure: 'nodes' is not a list")
        structure = cls(tuple(map(_node, range(len(items)), items)), count)
        _check_order(structure)
        return structure


def _node(index: int, item: object) -> Node:
    where = f"tree structure: node {index}"
    if not isinstance(item, dict) or not item.keys() <= {"kind", "type", "keys", "children"}:
        raise ValueError(f"{where} is not an object of 'kind', 'type', 'keys' and 'children'")
    kind, type_name = item.get("kind"), item.get("type", "")
    keys, children = item.get("keys", []), item.get("children", [])
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{where} has the unknown kind {kind!r:.40}")
    if not isinstance(type_name, str):
        raise ValueError(f"{where} has a type name that is not a string")
    if not isinstance(keys, list) or not (types := set(map(type, keys))) <= {str, int}:
        raise ValueError(f"{where} has keys that are not strings and integers")
    if not isinstance(children, list) or not set(map(type, children)) <= {int}:
        raise ValueError(f"{where} has children that are not integers")
    if int in types and any(type(k) is int and k.bit_length() > MAX_KEY_BITS for k in keys):
        raise ValueError(f"{where} has an integer key of more than {MAX_KEY_BITS} bits")
    if len(keys) != (len(children) if kind in KEYED else 0):
        raise ValueError(f"{where} ({kind}) has {len(keys)} keys and {len(children)} children")
    if len(set(keys)) != len(keys):
        raise ValueError(f"{where} has a key twice")
    if (kind == "none" and children) or (kind == "stateful" and len(children) != 1):
        raise ValueError(f"{where} ({kind}) has {len(children)} children")
    return Node(cast(Kind, kind), tuple(keys), tuple(children), type_name)


def _check_order(structure: Structure) -> None:
    nodes, leaf_count = structure.nodes, structure.leaf_count
    if not nodes:
        if leaf_count != 1:
            raise ValueError(f"tree structure: no nodes, but {leaf_count} leaves")
        return
    next_node, next_leaf = 1, 0
    stack: list[Iterator[int]] = [iter(nodes[0].children)]
    while stack:
        for child in stack[-1]:
            if child >= 0:
                if child != next_leaf:
                    raise ValueError(f"tree structure: leaf {child} where {next_leaf} is due")
                next_leaf += 1
                continue
            if -child != next_node or next_node >= len(nodes):
                raise ValueError(f"tree structure: node {-child} where {next_node} is due")
            if len(stack) >= MAX_DEPTH and nodes[next_node].kind != "none":
                raise ValueError(f"tree structure: more than {MAX_DEPTH} containers deep")
            children = nodes[next_node].children
            next_node += 1
            if children == tuple(range(next_leaf, next_leaf + len(children))):
                next_leaf += len(children)  # only leaves, as in most containers
                continue
            stack.append(iter(children))
            break
        else:
            stack.pop()
    if next_node != len(nodes) or next_leaf != leaf_count:
        raise ValueError(
            f"tree structure: {len(nodes)} nodes and {leaf_count} leaves are declared, "
            f"{next_node} and {next_leaf} can be reached"
        )


def _walk(structure: Structure, *, escaped: bool) -> tuple[list[Any], list[Any]]:
    """Return the path of every leaf and of every node; tuples of keys if not `escaped`."""
    root: Any = "" if escaped else ()
    at_leaf = [root] * structure.leaf_count
    at_node = [root] * len(structure.nodes)
    known: dict[tuple[Key, ...], list[str]] = {}  # parts by keys
    for index, node in enumerate(structure.nodes):
        base = at_node[index]
        if node.kind == "stateful":
            (child,) = node.children
            (at_leaf if child >= 0 else at_node)[abs(child)] = base
            continue
        parts: Sequence[Any] = range(len(node.children))
        if node.kind in KEYED:
            parts = node.keys
            if escaped:
                if node.keys not in known:
                    known[node.keys] = escape_keys(node.keys, set(map(type, node.keys)))
                parts = known[node.keys]
        if escaped and node.children and min(node.children) >= 0:
            # Only leaves, as in most containers: their ordinals are consecutive.
            first, prefix = node.children[0], f"{base}/" if base else ""
            at_leaf[first : first + len(node.children)] = [f"{prefix}{part}" for part in parts]
            continue
        for part, child in zip(parts, node.children, strict=True):
            place: Any = (*base, part)
            if escaped:
                place = f"{base}/{part}" if base else str(part)
            if child >= 0:
                at_leaf[child] = place
            else:
                at_node[-child] = place
    return at_leaf, at_node
