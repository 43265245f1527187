"""Rebuilding of a tree from structure and leaves."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from asyncckpt.errors import UsageError
from asyncckpt.tree.flatten import Flat
from asyncckpt.tree.names import Key, where
from asyncckpt.tree.structure import KEYED, Node, Structure
from asyncckpt.tree.types import NodeAdapter, Types, is_frozen, signature


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Return the tree with these leaves and plain containers.

    Namedtuples, dataclasses and registered nodes become dicts of their fields, stateful objects
    their state dicts.
    """
    return _built(structure, leaves, lambda _, node, children: _plain(node, children))


def unflatten_like(flat: Flat, leaves: Sequence[Any], nodes: Sequence[NodeAdapter] = ()) -> Any:
    """Return a tree with these leaves and new containers of the same types as the flattened ones.

    A stateful object becomes its state dict. A dataclass is made by its `__init__` if that takes
    exactly its fields, which are set again afterwards, else copied without running code of the
    class. An object that occurs several times is made once; all its occurrences must have the same
    leaves (`shared_leaves`).

    Raises:
        UsageError: a container cannot be made with its new children; names its path.
    """
    types = Types(nodes)
    made: dict[int, Any] = {}  # new objects by the id of the old ones

    def like(index: int, node: Node, children: list[Any]) -> Any:
        old = flat.objects[index]
        is_object = _has_identity(node, old)
        if is_object and id(old) in made:
            return made[id(old)]
        try:
            new = _like(node, old, children, types)
        except Exception as error:
            path = flat.structure.node_paths()[index]
            raise UsageError(
                f"{where(path)}: making a {type(old).__name__} with the restored children failed: "
                f"{type(error).__name__}: {error}; restore without like=, or pass a dict of its "
                "fields",
                path=path,
            ) from error
        if is_object:
            made[id(old)] = new
        return new

    return _built(flat.structure, leaves, like)


def shared_leaves(flat: Flat) -> dict[int, int]:
    """Return, for every leaf in a repeated occurrence of an object, its leaf in the first one.

    Both are ordinals. Values such as tuples are not objects (`_has_identity`).
    """
    nodes = flat.structure.nodes
    first: dict[int, int] = {}
    shared: dict[int, int] = {}
    for index, (node, value) in enumerate(zip(nodes, flat.objects, strict=True)):
        if not _has_identity(node, value):
            continue
        original = first.setdefault(id(value), index)
        pairs = [] if original == index else [(index, original)]
        while pairs:
            one, two = pairs.pop()
            for child, other in zip(nodes[one].children, nodes[two].children, strict=True):
                if child >= 0:
                    shared[child] = shared.get(other, other)
                else:
                    pairs.append((-child, -other))
    return shared


def _has_identity(node: Node, value: Any) -> bool:
    """Return whether a container is an object, such as a layer.

    Mappings and frozen dataclasses are values, like plain dicts and tuples: one of them may
    describe several parts of a target.
    """
    is_object = node.kind in ("registered", "dataclass") and not issubclass(type(value), Mapping)
    return is_object and not is_frozen(value)


def _built(
    structure: Structure, leaves: Sequence[Any], make: Callable[[int, Node, list[Any]], Any]
) -> Any:
    """Return the tree; `make` returns each container, given its index, node and children."""
    if len(leaves) != structure.leaf_count:
        raise ValueError(f"{len(leaves)} leaves for a tree of {structure.leaf_count}")
    if not structure.nodes:
        return leaves[0]
    built: list[Any] = [None] * len(structure.nodes)
    for index in range(len(built) - 1, -1, -1):
        node = structure.nodes[index]
        children = [leaves[c] if c >= 0 else built[-c] for c in node.children]
        built[index] = make(index, node, children)
    return built[0]


def _plain(node: Node, children: list[Any]) -> Any:
    if node.kind in KEYED:
        return dict(zip(node.keys, children, strict=True))
    if node.kind == "list":
        return children
    if node.kind == "tuple":
        return tuple(children)
    return children[0] if node.kind == "stateful" else None


def _like(node: Node, old: Any, children: list[Any], types: Types) -> Any:
    cls = type(old)
    if cls in (dict, list, tuple) or node.kind in ("stateful", "none"):
        return _plain(node, children)
    if node.kind == "dict":
        new = copy.copy(old)  # keeps default factories, and `_metadata` of torch's state dicts
        for key, child in zip(node.keys, children, strict=True):
            new[key] = child
        return new
    if node.kind == "list":
        new = copy.copy(old)
        new[:] = children
        return new
    if node.kind == "tuple":
        return cls(children)
    if node.kind == "namedtuple":
        return cls._make(children)
    if node.kind == "dataclass":
        return _dataclass_like(old, dict(zip(node.keys, children, strict=True)), types)
    registered = types.registered(old)
    if registered is None:
        raise TypeError("the type is no longer registered")
    return registered[0].unflatten(old, children)


def _dataclass_like(old: Any, values: Mapping[Key, Any], types: Types) -> Any:
    registered = types.registered(old)
    if registered is not None and set(registered[1]) == values.keys():
        return registered[0].unflatten(old, [values[key] for key in registered[1]])
    state = cast(dict[str, Any], values)
    by_init = {field.name for field in dataclasses.fields(old) if field.init}
    if _init_takes(type(old), by_init):
        new = dataclasses.replace(old, **{k: v for k, v in state.items() if k in by_init})
        names = [field.name for field in dataclasses.fields(old) if hasattr(old, field.name)]
        # All of them, because `__post_init__` may have changed those that `__init__` got.
        late = {name: getattr(old, name) for name in names} | state
    else:
        new, late = copy.copy(old), state
        for cls in type(old).__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, functools.cached_property) and name in vars(new):
                    del vars(new)[name]
    for name, value in late.items():
        object.__setattr__(new, name, value)
    return new


def _init_takes(cls: type, names: set[str]) -> bool:
    """Return whether `cls(**fields)` works: the class has no other `__init__` and no `InitVar`."""
    try:
        parameters = signature(cls).parameters.values()
    except (TypeError, ValueError):
        return False
    return {p.name for p in parameters} == names and all(
        p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters
    )
