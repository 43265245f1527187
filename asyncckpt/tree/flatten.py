"""Flattening of a tree to structure, paths and leaves."""

# Rule 1: no recursion, so that MAX_DEPTH bounds the depth, not the caller's stack.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from asyncckpt.errors import UnsupportedLeafError, UsageError
from asyncckpt.options import MAX_DEPTH
from asyncckpt.tree.names import Key, escape_keys, where
from asyncckpt.tree.structure import MAX_KEY_BITS, Kind, Node, Structure
from asyncckpt.tree.types import LEAF, NodeAdapter, Types, type_name

_NONE = Node("none")
_KEY_TYPES = frozenset((str, int))


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A flattened tree.

    Attributes:
        paths: path of every leaf.
        objects: the original containers, one per node of `structure`.
        stateful: path, object and state dict of every outermost object that is saved as the latter.
    """

    structure: Structure
    paths: list[str]
    leaves: list[Any]
    objects: list[Any]
    stateful: list[tuple[str, Any, Any]]


def flatten(tree: Any, nodes: Sequence[NodeAdapter] = ()) -> Flat:
    """Flatten a tree; `nodes` handle the containers that frameworks have registered.

    Raises:
        UnsupportedLeafError: a dict key is neither exactly str nor exactly int, or not valid
            Unicode; names path and key.
        UsageError: a container contains itself, or more than `MAX_DEPTH` are nested.
    """
    return _Flattener(nodes).run(tree)


@dataclass(slots=True, eq=False)
class _Frame:
    index: int
    kind: Kind
    keys: tuple[Key, ...]
    prefix: str
    pending: Iterator[tuple[str, Any]]
    value: Any
    children: list[int]


class _Flattener:
    def __init__(self, nodes: Sequence[NodeAdapter]) -> None:
        self._types = Types(nodes)
        self._paths: list[str] = []
        self._leaves: list[Any] = []
        self._objects: list[Any] = []
        self._nodes: list[Node | None] = []
        self._stateful: list[tuple[str, Any, Any]] = []
        self._stack: list[_Frame] = []
        self._open: set[int] = set()
        self._parts: dict[tuple[Key, ...], list[str]] = {}  # of dicts with these keys, all str

    def run(self, tree: Any) -> Flat:
        kind = self._types.kind(tree)
        if kind == LEAF:
            return Flat(Structure((), 1), [""], [tree], [], [])
        if kind == "none":
            return Flat(Structure((_NONE,), 0), [], [], [None], [])
        self._enter(tree, kind, "")
        stack, paths, leaves, kinds = self._stack, self._paths, self._leaves, self._types.kinds
        while stack:
            frame = stack[-1]
            prefix, children = frame.prefix, frame.children
            for part, child in frame.pending:
                kind = kinds.get(type(child)) or self._types.kind(child)
                if kind == LEAF:
                    children.append(len(leaves))
                    leaves.append(child)
                    paths.append(prefix + part)
                elif kind == "none":
                    children.append(-len(self._objects))
                    self._objects.append(None)
                    self._nodes.append(_NONE)
                else:
                    children.append(-len(self._objects))
                    if self._enter(child, kind, prefix + part):
                        break
            else:
                node = Node(frame.kind, frame.keys, tuple(children), type_name(frame.value))
                self._nodes[frame.index] = node
                self._open.discard(id(frame.value))
                stack.pop()
        structure = Structure(cast(tuple[Node, ...], tuple(self._nodes)), len(leaves))
        return Flat(structure, paths, leaves, self._objects, self._stateful)

    def _enter(self, value: Any, kind: str, path: str) -> bool:
        """Add a node; return whether its children must still be visited."""
        index = len(self._objects)
        if id(value) in self._open:
            raise UsageError(
                f"{where(path)}: this {type(value).__name__} contains itself; a checkpoint holds "
                "trees, so take the reference back to the container out",
                path=path,
            )
        if len(self._stack) >= MAX_DEPTH:
            raise UsageError(
                f"{path[:200]}…: more than {MAX_DEPTH} containers inside each other; flatten the "
                "state, for example into a dict of paths",
                path=path,
                expected=MAX_DEPTH,
            )
        fields = self._types.fields(value) if kind == "dataclass" else ()
        if fields is None:
            kind = "registered"
        keys, parts, values = self._expand(value, kind, path, fields)
        if len(parts) != len(values):
            raise UnsupportedLeafError(
                f"{where(path)}: this {type(value).__name__} has {len(parts)} keys or fields, and "
                f"{len(values)} values; convert it to a dict or list",
                path=path,
            )
        self._objects.append(value)
        name = type_name(value)
        prefix = path + "/" if path else ""
        if kind == "stateful":
            prefix = path
            if not any(frame.kind == "stateful" for frame in self._stack):
                self._stateful.append((path, value, *values))
        elif self._types.all_leaves(values):
            first = len(self._leaves)
            self._leaves += values
            self._paths += [prefix + part for part in parts] if prefix else parts
            children = tuple(range(first, first + len(values)))
            self._nodes.append(Node(cast(Kind, kind), keys, children, name))
            return False
        self._nodes.append(None)
        self._open.add(id(value))
        pending = zip(parts, values, strict=True)
        self._stack.append(_Frame(index, cast(Kind, kind), keys, prefix, pending, value, []))
        return True

    def _expand(
        self, value: Any, kind: str, path: str, fields: Sequence[str] | None
    ) -> tuple[tuple[Key, ...], Sequence[str], Sequence[Any]]:
        """Return keys, path parts and values of the children."""
        keys: Sequence[Any]
        if kind == "dict":
            if type(value) is dict:
                keys, values = tuple(value), list(value.values())
            else:  # a subclass may iterate in another order than its values
                pairs = list(value.items())
                keys, values = tuple([key for key, _ in pairs]), [item for _, item in pairs]
            if set(map(type, keys)) == {str}:  # keys of other types may be equal to these
                parts = self._parts.get(keys)
                if parts is None:
                    parts = self._parts[keys] = _parts(keys, value, path)
                return keys, parts, values
        elif kind in ("list", "tuple"):
            return (), list(map(str, range(len(value)))), list(value)
        elif kind == "stateful":
            try:
                return (), ("",), (value.state_dict(),)
            except Exception as error:
                raise UsageError(
                    f"{where(path)}: state_dict() of {type(value).__name__} raised "
                    f"{type(error).__name__}: {error}",
                    path=path,
                ) from error
        elif kind == "namedtuple":
            keys, values = value._fields, list(value)
        elif kind == "dataclass":
            keys = fields or ()
            try:
                values = [getattr(value, key) for key in keys]
            except Exception as error:
                raise UnsupportedLeafError(
                    f"{where(path)}: a field of {type(value).__name__} has no value ({error!r}); "
                    "set it, or mark it with metadata={'static': True}",
                    path=path,
                ) from error
        else:
            registered = self._types.registered(value)
            assert registered is not None
            keys, values = registered[1], list(registered[2])
            if len(set(keys)) != len(keys):
                raise UnsupportedLeafError(
                    f"{where(path)}: two children of this {type(value).__name__} have the same "
                    "key; register the type with different keys",
                    path=path,
                )
        return tuple(keys), _parts(keys, value, path), values


def _parts(keys: Sequence[Any], node: Any, path: str) -> list[str]:
    """Return the path parts of the keys of a node."""
    kinds = set(map(type, keys))
    if not kinds <= _KEY_TYPES:
        key = next(key for key in keys if type(key) not in _KEY_TYPES)
        raise UnsupportedLeafError(
            f"{where(path)}: key {key!r:.80} of this {type(node).__name__} is a "
            f"{type(key).__name__}; keys are str or int: convert it, for example with str(key)",
            path=path,
            expected="str or int",
            found=key,
        )
    if int in kinds and any(type(k) is int and k.bit_length() > MAX_KEY_BITS for k in keys):
        raise UnsupportedLeafError(
            f"{where(path)}: an int key of this {type(node).__name__} has more than {MAX_KEY_BITS} "
            "bits; use a str",
            path=path,
        )
    try:
        "".join(keys if kinds == {str} else map(str, keys)).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        key = next(key for key in keys if type(key) is str and surrogate in key)
        raise UnsupportedLeafError(
            f"{where(path)}: key {key!a:.80} of this {type(node).__name__} is not valid Unicode "
            f"({error.reason}); use another str",
            path=path,
            expected="a str that UTF-8 can hold",
            found=key,
        ) from None
    return escape_keys(keys, kinds)
