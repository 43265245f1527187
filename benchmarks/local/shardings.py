"""Shardings of the state of W7, its targets, and the comparison after a restore."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncckpt import ShardedArray
from benchmarks.workloads import Tree, difference, leaves, map_leaves

AXIS = "d"
ROWS_8, ROWS_2, COLUMNS_8 = "rows over 8", "rows over 2", "columns over 8"
REPLICATED = "replicated over 8"
HALF_ROWS, HALF_COLUMNS = "half of the rows", "half of the columns"

_DIVIDED = {ROWS_8: (0, 8), ROWS_2: (0, 2), COLUMNS_8: (-1, 8), REPLICATED: (0, 8)}
"""The dimension that is divided, and over how many devices."""

_HALVED = {HALF_ROWS: 0, HALF_COLUMNS: -1}


def sharding(layout: str, shape: tuple[int, ...]) -> Any:
    """Return the sharding of an array; an array that does not divide evenly is replicated."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    axis, count = _DIVIDED[layout]
    mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,))
    if layout == REPLICATED or shape[axis] % count:
        return NamedSharding(mesh, PartitionSpec())
    spec: list[str | None] = [None] * len(shape)
    spec[axis] = AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


def shard(layout: str, tree: Tree) -> Tree:
    """Return the tree as JAX arrays."""
    import jax

    return map_leaves(lambda array: jax.device_put(array, sharding(layout, array.shape)), tree)


def target(layout: str, tree: Tree) -> Tree:
    """Return targets for the tree: abstract JAX arrays, or one half of each array in NumPy."""
    if layout in _HALVED:
        return map_leaves(lambda array: _half(array, _HALVED[layout]), tree)
    import jax

    return map_leaves(
        lambda array: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=sharding(layout, array.shape)
        ),
        tree,
    )


def _half(array: np.ndarray, axis: int) -> ShardedArray:
    shape = list(array.shape)
    shape[axis] -= shape[axis] // 2
    return ShardedArray(
        array.shape, array.dtype, [((0,) * array.ndim, np.full(shape, 1, array.dtype))]
    )


def wanted_nbytes(tree: Tree) -> int:
    """Bytes that a target wants, each element once however many devices hold it."""
    return sum(
        sum(part.nbytes for _, part in leaf.shards)
        if isinstance(leaf, ShardedArray)
        else math.prod(leaf.shape) * leaf.dtype.itemsize
        for _, leaf in leaves(tree)
    )


def check(expected: Tree, restored: Tree) -> None:
    """Every shard of every restored leaf holds what the array has there.

    Raises:
        AssertionError: names the first leaf that does not.
    """
    found = dict(leaves(restored))
    for path, array in leaves(expected):
        for index, part in _parts(found[path]):
            wrong = difference({path: array[index]}, {path: part})
            if wrong:
                raise AssertionError(f"restored something else: {wrong} in {index}")


def _parts(leaf: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Where the shards lie in their array, and what they hold; replicas in one memory once."""
    if isinstance(leaf, ShardedArray):
        for offset, part in leaf.shards:
            ends = zip(offset, part.shape, strict=True)
            yield tuple(slice(o, o + n) for o, n in ends), part
        return
    seen = set()
    for held in leaf.addressable_shards:
        memory = held.data.unsafe_buffer_pointer()
        if memory not in seen:
            seen.add(memory)
            yield held.index, np.asarray(held.data)
