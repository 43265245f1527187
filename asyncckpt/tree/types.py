"""Kinds of containers, by type."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any, Final, Protocol

from asyncckpt.tree.names import Key

LEAF: Final = "leaf"
_BUILTIN = frozenset((dict, list, tuple))

_UNRESOLVED: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    _UNRESOLVED = {"annotation_format": annotationlib.Format.FORWARDREF}


class NodeAdapter(Protocol):
    """Containers that a framework has registered (`jax.tree_util` nodes such as optax states)."""

    def flatten(self, node: Any) -> tuple[Sequence[Key], Sequence[Any]] | None:
        """Return keys and children of a registered node, or None for other types."""
        ...

    def unflatten(self, node: Any, children: Sequence[Any]) -> Any:
        """Return a node like `node` with these children."""
        ...


class Types:
    """Container kinds by type, cached for one flatten or unflatten."""

    def __init__(self, nodes: Sequence[NodeAdapter]) -> None:
        self._adapters = nodes
        self._fields: dict[type, tuple[Set[str], list[str]]] = {}  # all, and those with state
        self.kinds: dict[type, str] = dict.fromkeys((int, float, bool, complex, str, bytes), LEAF)
        self.kinds |= {dict: "dict", list: "list", tuple: "tuple", type(None): "none"}

    def all_leaves(self, values: Sequence[Any]) -> bool:
        """Return whether no value is a container."""
        found = set(map(self.kinds.get, set(map(type, values))))
        if None in found:
            found = set(map(self.kind, values))
        return found <= {LEAF}

    def kind(self, value: Any) -> str:
        """Return the container kind of a value, or `LEAF`."""
        found = self.kinds.get(type(value))
        if found is None:
            found = self.kinds[type(value)] = self._classify(value)
        return found

    def _classify(self, value: Any) -> str:
        if isinstance(value, type):
            return LEAF
        if self._has_state_dict(value):
            return "stateful"
        if isinstance(value, dict):
            return "dict"
        if isinstance(value, list):
            return "list"
        if isinstance(value, tuple):
            return "namedtuple" if isinstance(getattr(value, "_fields", 0), tuple) else "tuple"
        if dataclasses.is_dataclass(value):
            return "dataclass"
        return LEAF if self.registered(value) is None else "registered"

    def _has_state_dict(self, value: Any) -> bool:
        """Return whether a value is saved as its state dict.

        Wrappers that delegate by `__getattr__` are. A registered type must define `state_dict`
        itself: every attribute of `nnx.Rngs` is a stream of random numbers, which is callable.
        """
        if not hasattr(type(value), "state_dict") and self.registered(value) is not None:
            return False
        methods = ("state_dict", "load_state_dict")
        try:
            return all(callable(getattr(value, name, None)) for name in methods)
        except Exception:  # of a proxy of nothing, for example; it is refused by its path
            return False

    def registered(self, value: Any) -> tuple[NodeAdapter, Sequence[Key], Sequence[Any]] | None:
        """Return the adapter that knows the type, keys and children; None if there is none."""
        for adapter in self._adapters:
            found = adapter.flatten(value)
            if found is not None:
                return adapter, *found
        return None

    def fields(self, value: Any) -> Sequence[str] | None:
        """Return the names of a dataclass's fields that hold state.

        None if they do not hold all children that are registered for this instance: a dataclass may
        be an nnx module, whose other attributes are state too.
        """
        if type(value) not in self._fields:
            facts = {field.name: field.metadata for field in dataclasses.fields(value)}
            self._fields[type(value)] = (
                facts.keys(),
                [
                    name
                    for name, fact in facts.items()
                    if fact.get("pytree_node", True) and not fact.get("static")
                ],
            )
        fields, names = self._fields[type(value)]
        registered = self.registered(value)
        if registered is None:
            return names
        _, keys, children = registered
        if fields >= set(keys):
            return [name for name in names if name in keys]
        held = {id(getattr(value, name, None)) for name in fields}
        by_index = {type(key) for key in keys} == {int}
        return names if by_index and held.issuperset(map(id, children)) else None


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or class, as `inspect.signature` does.

    Names in its annotations may be undefined at run time (`if TYPE_CHECKING`), also from Python
    3.14 on, where reading annotations evaluates them.
    """
    return inspect.signature(function, **_UNRESOLVED)


def is_frozen(container: Any) -> bool:
    """Return whether a dataclass refuses assignment to its fields.

    Equinox modules do so in `__setattr__` alone: a class that defines it is tested by assigning the
    present value of a field.
    """
    cls: Any = type(container)
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or cls.__setattr__ is object.__setattr__:
        return False
    if parameters.frozen:
        return True  # the test below would raise, which takes longer
    for field in dataclasses.fields(cls):
        if hasattr(container, field.name):
            try:
                setattr(container, field.name, getattr(container, field.name))
            except Exception as error:
                return isinstance(error, AttributeError)
            return False
    return False


def type_name(value: Any) -> str:
    """Return the qualified name of a container's type; empty for the builtin ones."""
    cls = type(value)
    return "" if cls in _BUILTIN else f"{cls.__module__}.{cls.__qualname__}"
