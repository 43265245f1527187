"""Capture: structure and scalars of a tree as they are at the call, and its arrays opened for staging.

Runs in the caller's thread, before the first await of a save: what it returns does not change when
the caller rebinds dict entries or counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncckpt.errors import UnsupportedLeafError, UsageError
from asyncckpt.format.record import encode_scalar
from asyncckpt.ports import ArrayAdapter, NodeAdapter, Source
from asyncckpt.spec import ArraySpec
from asyncckpt.tree import Structure, flatten, where

BYTES_INLINE_NBYTES = 1 << 10
"""`bytes` leaves above this are stored as arrays: the record stays small and is read whole."""

SCALAR_TYPES = (int, float, bool, complex, str, bytes)

_SCALARS = frozenset(SCALAR_TYPES)


@dataclass(slots=True, eq=False)
class Capture:
    """A tree taken apart.

    Attributes:
        structure: its containers.
        paths: path of every leaf.
        kinds: per leaf the scalar kind, or the framework of an array.
        values: per leaf the JSON of a scalar, None for arrays.
        scalars: the scalar values themselves, by leaf index.
        sources: the arrays, in leaf order.
        adapters: the adapter of each array.
        array_leaf: leaf index of each array.
        tied: arrays that share all bytes with an earlier one, by array index.
        extra: facts kept beside the bytes, by leaf index.
    """

    structure: Structure
    paths: list[str]
    kinds: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    scalars: dict[int, Any] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    adapters: list[ArrayAdapter] = field(default_factory=list)
    array_leaf: list[int] = field(default_factory=list)
    tied: dict[int, int] = field(default_factory=dict)
    extra: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def array_paths(self) -> list[str]:
        """The path of every array."""
        return [self.paths[leaf] for leaf in self.array_leaf]


def capture(
    tree: Any,
    resolve: Callable[[type], ArrayAdapter | None],
    nodes: Sequence[NodeAdapter],
    numpy_adapter: ArrayAdapter,
) -> Capture:
    """The tree's structure and scalars, and its arrays opened for staging.

    Args:
        tree: nested containers of leaves.
        resolve: the adapter for a type of leaf, None when there is none.
        nodes: what knows containers that frameworks have registered.
        numpy_adapter: the adapter for arrays that are made here (long `bytes`).

    Raises:
        UnsupportedLeafError: names the path of a leaf that cannot be saved, and what can.
        UsageError: the tree holds itself or is too deep.
    """
    flat = flatten(tree, nodes)
    result = Capture(flat.structure, flat.paths)
    kinds, values = result.kinds, result.values
    sources, adapters, array_leaf = result.sources, result.adapters, result.array_leaf
    resolved: dict[type, ArrayAdapter | None] = {}
    seen: dict[Any, int] = {}
    for leaf, value in enumerate(flat.leaves):
        kind = type(value)
        path = flat.paths[leaf]
        if kind in _SCALARS:
            if kind is bytes and len(value) > BYTES_INLINE_NBYTES:
                adapter: ArrayAdapter | None = numpy_adapter
                source = numpy_adapter.source(path, np.frombuffer(value, np.uint8))
                source.extra = {"python": "bytes"}
            else:
                try:
                    name, encoded = encode_scalar(value)
                except UnsupportedLeafError as error:
                    raise UnsupportedLeafError(f"{where(path)}: {error}", path=path) from None
                kinds.append(name)
                values.append(encoded)
                result.scalars[leaf] = value
                continue
        else:
            try:
                adapter = resolved[kind]
            except KeyError:
                adapter = resolved[kind] = resolve(kind)
            if adapter is None:
                raise _unsupported(path, value)
            source = adapter.source(path, value)
        assert adapter is not None
        number = len(sources)
        if source.identity is not None:
            first = seen.setdefault(source.identity, number)
            if first != number:
                result.tied[number] = first
        if source.extra:
            result.extra[leaf] = source.extra
        sources.append(source)
        adapters.append(adapter)
        array_leaf.append(leaf)
        kinds.append(source.framework)
        values.append(None)
    return result


def scalar_array(value: Any) -> tuple[ArraySpec, bytes] | None:
    """A scalar as a rank-0 array for Orbax, or None where no dtype holds its value."""
    kind = type(value)
    if kind is bool:
        return ArraySpec((), "bool"), np.bool_(value).tobytes()
    if kind is int:
        if not -(1 << 63) <= value < 1 << 63:
            return None
        return ArraySpec((), "int64"), value.to_bytes(8, "little", signed=True)
    if kind is float:
        return ArraySpec((), "float64"), np.float64(value).astype("<f8").tobytes()
    if kind is complex:
        return ArraySpec((), "complex128"), np.complex128(value).astype("<c16").tobytes()
    return None


def _unsupported(path: str, value: object) -> UsageError:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, SCALAR_TYPES):
        base = next(t for t in SCALAR_TYPES if isinstance(value, t))
        advice = f"convert it with {base.__name__}(...)"
    elif isinstance(value, (set, frozenset)):
        advice = "pass a sorted list"
    else:
        advice = (
            "pass arrays, numbers, strings, bytes, dicts, lists, tuples, dataclasses or objects "
            "with state_dict() and load_state_dict()"
        )
    return UnsupportedLeafError(
        f"{where(path)}: a leaf of type {name} cannot be saved; {advice}",
        path=path,
        expected="an array or scalar",
        found=name,
    )
