"""Values with random bits, trees whose insertion order is another in each process, comparisons."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.processes.worker import Worker

Array = np.ndarray[Any, Any]

FLOATS = ("float32", "bfloat16", "float64")


def array(name: str, shape: Sequence[int], dtype: Any = "float32", *, seed: int = 0) -> Array:
    """The array of this name, the same in every process; `seed` is another one of all bits."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    rng = np.random.default_rng(list(digest))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if kind.name in FLOATS:
        return rng.standard_normal(shape).astype(kind)
    return rng.integers(0, 100, shape).astype(kind)


def shuffled(worker: Worker, tree: Any) -> Any:
    """The same tree, its dicts in an insertion order of this process's own."""
    if not isinstance(tree, dict):
        return tree
    items = [(key, shuffled(worker, value)) for key, value in tree.items()]
    random.Random(worker.index).shuffle(items)
    return dict(items)


def same(one: Any, other: Any) -> bool:
    """Whether two NumPy arrays or scalars have the same type and bits."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return type(one) is type(other) and bool(one == other)


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Paths at which two trees of dicts differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        paths = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            paths += differing(one[key], other[key], f"{path}/{key}")
        return paths
    return [] if same(one, other) else [path]
