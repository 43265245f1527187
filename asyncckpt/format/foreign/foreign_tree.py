"""Tree of a foreign checkpoint, built leaf by leaf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.scalars import JsonValue, encode_scalar
from asyncckpt.tree import MAX_DEPTH, Key, Kind, Node, Structure


@dataclass(slots=True, eq=False)
class Branch:
    """Container under construction; children that are not a `Branch` are leaves.

    Keys of lists and tuples are indices.
    """

    kind: Kind
    children: dict[Key, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ForeignLeaf:
    """Leaf of a foreign checkpoint.

    Attributes:
        kind: scalar kind, or `numpy`, `jax`, `torch` for arrays.
        value: JSON of a scalar.
        extra: facts beside the value.
        array: its array in the reader's representation; None for scalars.
    """

    kind: str
    value: JsonValue = None
    extra: Mapping[str, JsonValue] | None = None
    array: Any = None


def add(root: Branch, path: Sequence[tuple[Key, Kind]], value: Any) -> None:
    """Add `value`, a leaf or empty branch, at `path`, and the containers on the way.

    The path has keys, and the kind of the container that has each; `root` has the first.

    Raises:
        ValueError: something else is at the path, or a container has another kind.
    """
    if len(path) >= MAX_DEPTH:
        raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
    at = root
    for number, (key, kind) in enumerate(path):
        if at.kind != kind:
            raise ValueError(f"key {key!r} is of a {kind}, but the container is a {at.kind}")
        last = number == len(path) - 1
        if key not in at.children:
            at.children[key] = value if last else Branch(path[number + 1][1])
        elif last or not isinstance(at.children[key], Branch):
            raise ValueError(f"{key!r} is there twice, or is both a leaf and a container")
        at = at.children[key]


def structure_of(root: Any) -> tuple[Structure, list[Any]]:
    """Return the structure of a tree, and its leaves in order; `root` may be a leaf itself.

    Raises:
        ValueError: a list lacks one of its indices, or the tree is too deep.
    """
    if not isinstance(root, Branch):
        return Structure((), 1), [root]
    nodes: dict[int, Node] = {}
    leaves: list[Any] = []

    def grow(branch: Branch, depth: int) -> int:
        in_order = branch.kind in ("list", "tuple")
        if in_order and branch.children.keys() != set(range(len(branch.children))):
            raise ValueError(
                f"a {branch.kind} has the indices {list(branch.children)[:8]} of "
                f"{len(branch.children)}, which are not all from 0"
            )
        if depth >= MAX_DEPTH:
            raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
        number = len(nodes)
        nodes[number] = Node(branch.kind)  # parents come first
        below: list[int] = []
        for key in sorted(branch.children) if in_order else branch.children:
            child = branch.children[key]
            if isinstance(child, Branch):
                below.append(-grow(child, depth + 1))
            else:
                below.append(len(leaves))
                leaves.append(child)
        keys = () if in_order else tuple(branch.children)
        nodes[number] = Node(branch.kind, keys, tuple(below))
        return number

    grow(root, 0)
    return Structure(tuple(nodes.values()), len(leaves)), leaves


def tree_of_json(value: Any, depth: int = 1) -> Any:
    """Return a JSON value as a tree of scalars; the value itself is at `depth`.

    Raises:
        ValueError: it is too deep, or has a string that is not valid Unicode.
    """
    if value is None:
        return Branch("none")
    if isinstance(value, dict | list):
        if depth >= MAX_DEPTH:
            raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        kind: Kind = "dict" if isinstance(value, dict) else "list"
        return Branch(kind, {key: tree_of_json(item, depth + 1) for key, item in items})
    scalar, encoded = encode_scalar(value)
    return ForeignLeaf(scalar, encoded)
