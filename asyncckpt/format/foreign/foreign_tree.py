"""Trees of foreign checkpoints: dicts, lists, tuples and None, with leaves of all other types."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.scalars import JsonValue
from asyncckpt.tree import MAX_DEPTH, Key, Kind, Node, Structure

EMPTY_NAMEDTUPLE = namedtuple("EmptyNamedtuple", ())()

_KINDS: Mapping[type, Kind] = {
    dict: "dict",
    list: "list",
    tuple: "tuple",
    type(EMPTY_NAMEDTUPLE): "namedtuple",
    type(None): "none",
}


class _Container(dict[Key, Any]):
    """Container under construction, unlike a plain dict, which is a value."""


@dataclass(frozen=True, slots=True, eq=False)
class ForeignLeaf:
    """Array of a foreign checkpoint.

    Attributes:
        kind: `numpy`, `jax` or `torch`.
        array: the array in the reader's representation.
    """

    kind: str
    array: Any
    extra: Mapping[str, JsonValue] | None = None


def nest(paths: Sequence[Sequence[Key]], values: Sequence[Any], *, strict: bool = False) -> Any:
    """Return the tree with these values at these paths; a value may be a leaf or a subtree.

    A container whose keys count from 0 becomes a list. With `strict`, integer keys in any other
    container are an error. Without, it remains a dict, like the root: torch leaves out empty
    containers and so their indices. A single value with an empty path is the tree.

    Raises:
        ValueError: two values have one path, one is inside another, or too deep; names the path.
    """
    if list(map(len, paths)) == [0]:
        return values[0]
    root = _Container()
    for path, value in zip(paths, values, strict=True):
        try:
            _add(root, path, value)
        except ValueError as error:
            raise ValueError(f"the path {list(path)!r:.200}: {error}") from None
    return _grown(root, (), strict)


def _add(at: _Container, path: Sequence[Key], value: Any) -> None:
    if not path:
        raise ValueError("it is empty, but there are other leaves")
    if len(path) >= MAX_DEPTH:
        raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
    for key in path[:-1]:
        at = at.setdefault(key, _Container())
        if type(at) is not _Container:
            raise ValueError(f"{key!r} is both a leaf and a container")
    if path[-1] in at:
        raise ValueError(f"{path[-1]!r} is there twice, or is both a leaf and a container")
    at[path[-1]] = value


def _grown(container: _Container, path: tuple[Key, ...], strict: bool) -> Any:
    items = {
        key: _grown(value, (*path, key), strict) if type(value) is _Container else value
        for key, value in container.items()
    }
    if items and items.keys() == set(range(len(items))) and (path or strict):
        return [items[index] for index in range(len(items))]
    if strict and int in map(type, items):
        raise ValueError(
            f"the path {list(path)!r:.200}: a list has the indices {list(items)[:8]} of "
            f"{len(items)}, which are not all from 0"
        )
    return items


def structure_of(root: Any) -> tuple[Structure, list[Any]]:
    """Return the structure of a tree, and its leaves in order; `root` may be a leaf.

    Raises:
        ValueError: the tree is too deep.
    """
    nodes: list[Node] = []
    leaves: list[Any] = []

    def grow(value: Any, depth: int) -> int:
        kind = _KINDS.get(type(value))
        if kind is None:
            leaves.append(value)
            return len(leaves) - 1
        if depth >= MAX_DEPTH:
            raise ValueError(f"it is more than {MAX_DEPTH} containers deep")
        number = len(nodes)
        nodes.append(Node(kind))  # parents come first
        keys = tuple(value) if kind == "dict" else ()
        children = value.values() if kind == "dict" else value or ()
        below = tuple([grow(child, depth + 1) for child in children])
        nodes[number] = Node(kind, keys, below)
        return -number

    grow(root, 0)
    return Structure(tuple(nodes), len(leaves)), leaves
