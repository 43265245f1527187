"""Tree of a foreign checkpoint, built leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.scalars import JsonValue, encode_scalar
from asyncckpt.tree import MAX_DEPTH, Key, Kind, Node, Structure


@dataclass(slots=True, eq=False)
class Branch:
    """Container under construction; children that are not a `Branch` are leaves.

    The keys of lists and tuples are their indices.
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
        array: its array, as the reader represents it; None for scalars.
    """

    kind: str
    value: JsonValue = None
    extra: Mapping[str, JsonValue] | None = None
    array: Any = None


def add(root: Branch, path: Sequence[tuple[Key, Kind]], value: Any) -> None:
    """Add `value` at `path`; make the containers on the way.

    Args:
        root: container in which the path begins.
        path: keys, and the kind of the container of each.
        value: a leaf, or an empty branch.

    Raises:
        ValueError: the path is taken, or a container has another kind.
    """
    if len(path) >= MAX_DEPTH:
        raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
    at = root
    for number, (key, kind) in enumerate(path):
        if at.kind != kind:
            raise ValueError(f"key {key!r} is of a {kind}, but the container is a {at.kind}")
        last = number == len(path) - 1
        child = at.children.get(key)
        if child is None:
            child = at.children[key] = value if last else Branch(path[number + 1][1])
        elif last or not isinstance(child, Branch):
            raise ValueError(f"{key!r} is there twice, or is both a leaf and a container")
        at = child


def structure_of(root: Any) -> tuple[Structure, list[Any]]:
    """Return the structure of a tree, and its leaves in order; `root` may be a leaf itself.

    Raises:
        ValueError: a list lacks one of its indices, or the tree is too deep.
    """
    if not isinstance(root, Branch):
        return Structure((), 1), [root]
    kinds: list[tuple[Kind, tuple[Key, ...]]] = []
    children: list[list[int]] = []
    leaves: list[Any] = []
    stack: list[tuple[int, Iterator[Any]]] = []

    def open_branch(branch: Branch) -> int:
        in_order = branch.kind in ("list", "tuple")
        if in_order and branch.children.keys() != set(range(len(branch.children))):
            raise ValueError(
                f"a {branch.kind} has the indices {list(branch.children)[:8]} of "
                f"{len(branch.children)}, which are not all from 0"
            )
        if len(stack) >= MAX_DEPTH:
            raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
        keys = sorted(branch.children) if in_order else branch.children
        kinds.append((branch.kind, () if in_order else tuple(branch.children)))
        children.append([])
        stack.append((len(kinds) - 1, iter([branch.children[key] for key in keys])))
        return len(kinds) - 1

    open_branch(root)
    while stack:
        node, below = stack[-1]
        for child in below:
            if isinstance(child, Branch):
                children[node].append(-open_branch(child))
                break
            children[node].append(len(leaves))
            leaves.append(child)
        else:
            stack.pop()
    nodes = tuple(
        Node(kind, keys, tuple(below)) for (kind, keys), below in zip(kinds, children, strict=True)
    )
    return Structure(nodes, len(leaves)), leaves


def tree_of_json(value: Any) -> Any:
    """Return a JSON value as a tree of scalars.

    Raises:
        ValueError: it is too deep, or has a string that is not valid Unicode.
    """
    if value is None:
        return Branch("none")
    if isinstance(value, dict | list):
        root = Branch("dict" if isinstance(value, dict) else "list")
        todo = [(root, value, 1)]
        while todo:
            branch, container, depth = todo.pop()
            if depth >= MAX_DEPTH:
                raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, item in items:
                if isinstance(item, dict | list):
                    inner = Branch("dict" if isinstance(item, dict) else "list")
                    todo.append((inner, item, depth + 1))
                    branch.children[key] = inner
                else:
                    branch.children[key] = tree_of_json(item)
        return root
    kind, encoded = encode_scalar(value)
    return ForeignLeaf(kind, encoded)
