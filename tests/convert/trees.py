"""Trees for tests of conversions, and variants in which something is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncckpt import blocking
from asyncckpt.spec import DTYPES


class Moments(NamedTuple):
    """A namedtuple, as optax has many."""

    mu: Any
    nu: Any


@dataclass
class Counters:
    """A dataclass."""

    step: int
    seen: Any


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Values that differ from place to place and that every dtype holds."""
    count = math.prod(shape)
    small = DTYPES[dtype].itemsize <= 2
    values = np.arange(count) % 13 if small else np.arange(count)
    if dtype == "float8_e8m0fnu":
        return (2.0**values).reshape(shape).astype(DTYPES[dtype])
    few = {"int2": 2, "int4": 5, "float4_e2m1fn": 5}.get(dtype, count + 1)
    return (values % few).reshape(shape).astype(DTYPES[dtype])


def everything() -> dict[str, Any]:
    """Leaves and containers of every kind."""
    shared = numbers(50, 300)
    return {
        "params": {"w": shared, "b": numbers(7, dtype="bfloat16"), "tied": shared},
        "large": numbers(600, 2000, dtype="float64"),
        "empty": np.zeros((0, 3), np.int8),
        "one": np.float16(1.5),
        "opt": Moments(mu=[numbers(3), None], nu=(numbers(4, 4, dtype="uint8"), {})),
        "counters": Counters(step=7, seen=numbers(2, 2, dtype="int64")),
        "scalars": [3, -1.5, math.nan, True, 2 - 3j, "täxt", b"\0\xff", 10**30],
        "blob": bytes(range(256)) * 20,
        "a/b": numbers(5, dtype="complex64"),
        9: {"9": numbers(2)},
    }


def dtypes() -> dict[str, Any]:
    """One array of every dtype."""
    return {name: numbers(3, 5, dtype=name) for name in DTYPES}


def same(a: Any, b: Any) -> bool:
    """Whether two restored trees have the same containers, types and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or (a != a and b != b)


def listed(directory: Path) -> list[str]:
    """Every name below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def saved(path: Path, tree: Any, **arguments: Any) -> Path:
    """The path at which the tree was saved."""
    blocking.save(path, tree, **arguments)
    return path
