"""Capture: structure and scalars of a tree as they are at the call, and its arrays opened.

Runs in the caller's thread, before the first await of a save: what it returns does not change when
the caller rebinds dict entries or counts on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.adapters import AdapterSet
from asyncckpt.adapters.scalars import bytes_as_array, unsupported
from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.record import MAX_RANK, encode_scalar
from asyncckpt.ports import ArrayAdapter, Source
from asyncckpt.tree import Structure, flatten, where

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


def capture(tree: Any, adapters: AdapterSet) -> Capture:
    """The tree's structure and scalars, and its arrays opened for staging.

    Args:
        tree: nested containers of leaves.
        adapters: whose arrays they are; the first one is NumPy's.

    Raises:
        UnsupportedLeafError: names the path of a leaf that cannot be saved, and what can.
        UsageError: the tree holds itself or is too deep.
    """
    flat = flatten(tree, adapters.nodes)
    result = Capture(flat.structure, flat.paths)
    kinds, values = result.kinds, result.values
    sources, owners, array_leaf = result.sources, result.adapters, result.array_leaf
    resolve = adapters.resolve
    seen: dict[Any, int] = {}
    for leaf, value in enumerate(flat.leaves):
        kind = type(value)
        path = flat.paths[leaf]
        if kind in _SCALARS:
            data = bytes_as_array(value) if kind is bytes else None
            if data is not None:
                adapter = adapters.adapters[0]
                source = adapter.source(path, data)
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
            found = resolve(kind)
            if found is None or isinstance(found, str):
                raise unsupported(path, value)
            adapter = found
            source = adapter.source(path, value)
        if len(source.spec.shape) > MAX_RANK:
            raise _of_high_rank(path, source)
        number = len(sources)
        if source.identity is not None:
            first = seen.setdefault(source.identity, number)
            if first != number:
                result.tied[number] = first
        if source.extra:
            result.extra[leaf] = source.extra
        sources.append(source)
        owners.append(adapter)
        array_leaf.append(leaf)
        kinds.append(source.framework)
        values.append(None)
    return result


def _of_high_rank(path: str, source: Source) -> UnsupportedLeafError:
    rank = len(source.spec.shape)
    return UnsupportedLeafError(
        f"{where(path)}: this array has {rank} dimensions, a checkpoint's have at most {MAX_RANK}; "
        "reshape it before saving",
        path=path,
        expected=MAX_RANK,
        found=rank,
    )
