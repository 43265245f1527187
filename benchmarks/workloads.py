"""Workloads: trees of arrays with random mantissas, never zeros.

Zeros and repeated values would flatter whoever compresses or deduplicates, and a constant
exponent would flatter compression too. All numbers are finite and of ordinary size, so that a
training step may compute with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Tree = dict[str, Any]

LAYERS = 16

EXPERT_WIDTH = 0.25
"""Hidden width of an expert, by the width of the model."""

LARGE_NBYTES = 16 << 20
"""Below, floors drown in noise."""

SMALL_LEAVES, COMPRESSED = "W4-", "W4z-"
"""Prefixes of the ids of workloads that measure leaves, not bytes: as they are, and with zstd."""

COMPARE_NBYTES = 256 << 10
"""Larger arrays are compared in place and piece by piece: fresh memory is slow to get."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A tree to save: nested dicts of NumPy arrays and Python scalars.

    Attributes:
        id: short name; `W1`, `W4-10k`.
        title: what it is, for the table.
        tree: the values.
    """

    id: str
    title: str
    tree: Tree

    @property
    def leaf_count(self) -> int:
        """Leaves, scalars included."""
        return sum(1 for _ in leaves(self.tree))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(leaf, "nbytes", 0) for _, leaf in leaves(self.tree))

    @property
    def is_large(self) -> bool:
        """Whether its time goes into bytes, so that floors mean something."""
        return self.nbytes >= LARGE_NBYTES and not self.id.startswith((SMALL_LEAVES, COMPRESSED))

    @property
    def fresh_nbytes(self) -> int:
        """A copy of it, in memory or in the page cache, and a quarter to spare."""
        return self.nbytes * 5 // 4 if self.nbytes >= LARGE_NBYTES else 0


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Paths (parts joined by a dot) and leaves in tree order."""
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from leaves(value, path)
        else:
            yield path, value


def map_leaves(function: Any, tree: Tree) -> Tree:
    """Return the same tree with `function(leaf)` in place of every leaf."""
    return {
        key: map_leaves(function, value) if isinstance(value, dict) else function(value)
        for key, value in tree.items()
    }


def flat_arrays(tree: Tree) -> dict[str, np.ndarray]:
    """Path -> array for those who know no tree; scalars become arrays of rank 0."""
    return {path: np.asarray(leaf) for path, leaf in leaves(tree)}


# ---------------------------------------------------------------------------------- generators


def random_floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Finite floats with random signs and mantissas and magnitudes from 2**-15 to 2.

    The bits are drawn directly: four exponent bits are random, those above them are those of 0.5.
    The pattern serves float32 and bfloat16 alike, whose exponents have the same width.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape)
    words = rng.integers(0, 2**64, -(-size * dtype.itemsize // 8), dtype=np.uint64)
    bits = words.view(np.uint8)[: size * dtype.itemsize]
    if dtype.itemsize == 4:
        pattern = bits.view(np.uint32)
        pattern &= np.uint32(0x87FFFFFF)
        pattern |= np.uint32(0x38000000)
    elif dtype == np.dtype(ml_dtypes.bfloat16):
        pattern = bits.view(np.uint16)
        pattern &= np.uint16(0x87FF)
        pattern |= np.uint16(0x3800)
    else:
        raise ValueError(f"no generator for {dtype}; use float32 or bfloat16")
    floats: np.ndarray = pattern.view(dtype).reshape(shape)
    return floats


def llama(
    nbytes: int,
    *,
    layers: int = LAYERS,
    stacked: bool = False,
    seed: int = 1,
    name: str | None = None,
) -> Workload:
    """W1, or W2 when stacked: bf16 parameters with fp32 master copy, m and v, as Llama names them.

    Unstacked there are 4 × 147 leaves, stacked (one array for all layers) 4 × 12. The size is
    about `nbytes` with 16 layers, and less with fewer.
    """
    # Parameters grow with the square of the width; at 512 the state has about 1 GiB.
    width = max(8, round(512 * math.sqrt(nbytes / (1 << 30)) / 8) * 8)
    shapes = _llama_shapes(width, layers, stacked=stacked)
    kind = name or ("W2" if stacked else "W1")
    how = "layers stacked" if stacked else "unstacked"
    return Workload(kind, f"Llama-like, {how}: bf16 + fp32 master, m, v", _state(shapes, seed))


def _state(shapes: Tree, seed: int) -> Tree:
    """Return bf16 parameters of these shapes with fp32 master copy, m and v."""
    rng = _generator(seed)
    tree: Tree = {}
    for name, dtype in (
        ("params", ml_dtypes.bfloat16),
        ("master", np.float32),
        ("m", np.float32),
        ("v", np.float32),
    ):
        tree[name] = map_leaves(lambda shape, dtype=dtype: random_floats(rng, shape, dtype), shapes)
    return tree


def single(nbytes: int, *, odd: bool = False, seed: int = 3) -> Workload:
    """W3: one fp32 array, of 2**k rows or of a size that no page and no chunk divides."""
    size = nbytes // 4
    rng = _generator(seed)
    if odd:
        size = size - size // 1000 - 1
        size -= 1 - size % 2
        return Workload(
            "W3-odd", "one fp32 array, odd-sized", {"w": random_floats(rng, (size,), "f4")}
        )
    shape = (max(1, size // 4096), min(size, 4096))
    return Workload("W3", "one fp32 array, aligned", {"w": random_floats(rng, shape, "f4")})


def small(count: int, *, seed: int = 4) -> Workload:
    """W4: `count` leaves; nine in ten are fp32 arrays of 256 B to 1 KiB, the others scalars."""
    rng = _generator(seed)
    lengths = rng.integers(64, 257, count)
    values = random_floats(rng, (int(lengths.sum()),), "f4")
    tree: Tree = {}
    start = 0
    for index, length in enumerate(lengths.tolist()):
        group = tree.setdefault(f"block_{index // 100:05}", {})
        if index % 10 == 9:
            # In turn a Python int, a Python float and an array of rank 0.
            scalar: Any = (index, index / 7, values[start : start + 1].reshape(()).copy())
            group[f"s{index % 100:02}"] = scalar[index // 10 % 3]
        else:
            group[f"a{index % 100:02}"] = values[start : start + length].copy()
        start += length
    title = f"{count} leaves of 256 B to 1 KiB, and scalars"
    return Workload(SMALL_LEAVES + _thousands(count), title, tree)


def small_of(framework: str, count: int) -> Workload:
    """W4 as arrays of ``"jax"`` or ``"torch"``; its scalars stay."""
    if framework == "jax":
        from jax.numpy import asarray as convert
    else:
        from torch import from_numpy as convert
    made = small(count)
    tree = {
        name: {
            key: convert(leaf) if hasattr(leaf, "dtype") else leaf for key, leaf in group.items()
        }
        for name, group in made.tree.items()
    }
    return Workload(f"{made.id}-{framework}", f"{made.title}, of {framework}", tree)


def compressed(count: int, *, seed: int = 5) -> Workload:
    """W4z: `count` fp32 leaves of 4 KiB, to be compressed with zstd."""
    values = random_floats(_generator(seed), (count, 1024), "f4")
    tree: Tree = {}
    for index in range(count):
        tree.setdefault(f"block_{index // 100:05}", {})[f"a{index % 100:02}"] = values[index].copy()
    return Workload(COMPRESSED + _thousands(count), f"{count} leaves of 4 KiB, zstd", tree)


def experts(nbytes: int, *, layers: int = 24, count: int = 64, seed: int = 6) -> Workload:
    """W5: a mixture of `count` experts in each layer, unstacked; parts of the state as in W1."""
    # Squares of the width in all layers; a parameter has 14 bytes.
    squares = layers * (4 + count * 3 * EXPERT_WIDTH)
    width = max(16, round(math.sqrt(nbytes / 14 / squares) / 16) * 16)
    hidden = int(width * EXPERT_WIDTH)
    layer: Tree = {name: (width, width) for name in ("wq", "wk", "wv", "wo")}
    layer |= {"attention_norm": (width,), "ffn_norm": (width,), "router": (width, count)}
    for index in range(count):
        layer[f"expert_{index:02}"] = {
            "w1": (width, hidden),
            "w2": (hidden, width),
            "w3": (width, hidden),
        }
    shapes: Tree = {f"layer_{index:02}": dict(layer) for index in range(layers)}
    return Workload("W5", f"mixture of {count} experts × {layers} layers", _state(shapes, seed))


def _thousands(count: int) -> str:
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def _llama_shapes(width: int, count: int, *, stacked: bool) -> Tree:
    hidden = width * 11 // 4
    vocabulary = width * 125 // 2
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "wq": (width, width),
        "wk": (width, width // 4),
        "wv": (width, width // 4),
        "wo": (width, width),
        "ffn_norm": (width,),
        "w1": (width, hidden),
        "w2": (hidden, width),
        "w3": (width, hidden),
    }
    layers: Tree
    if stacked:
        layers = {name: (count, *shape) for name, shape in layer.items()}
    else:
        layers = {f"layer_{index:02}": dict(layer) for index in range(count)}
    return {
        "tok_embeddings": (vocabulary, width),
        "layers": layers,
        "norm": (width,),
        "output": (width, vocabulary),
    }


# ------------------------------------------------------------------------------------- targets


def targets_like(tree: Tree) -> Tree:
    """Arrays to restore into, every page of them touched; scalars stay as they are."""
    made = map_leaves(lambda leaf: np.empty_like(leaf) if _is_array(leaf) else leaf, tree)
    scribble(made)
    return made


def scribble(tree: Tree) -> None:
    """No array holds what it held: every byte is 0xA5."""
    for _, leaf in leaves(tree):
        if _is_array(leaf):
            _as_bytes(leaf).fill(0xA5)


def difference(expected: Tree, found: Tree, prefix: str = "") -> str | None:
    """Where two trees differ in structure, dtype, shape or bits; None when they do not."""
    if expected.keys() != found.keys():
        keys = sorted(expected.keys() ^ found.keys())[:5]
        return f"leaves differ: {[prefix + key for key in keys]}"
    for key, a in expected.items():
        b = found[key]
        if isinstance(a, dict) and isinstance(b, dict):
            wrong = difference(a, b, f"{prefix}{key}.")
            if wrong:
                return wrong
        elif not _is_array(a) and not _is_array(b):
            if type(a) is not type(b) or a != b:
                return f"{prefix}{key}: expected {a!r}, found {b!r}"
        else:
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{prefix}{key}: expected {a.dtype}{a.shape}, found {b.dtype}{b.shape}"
            if not _same_bytes(a, b):
                return f"{prefix}{key}: bytes differ"
    return None


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if a.nbytes <= COMPARE_NBYTES:
        return a.tobytes() == b.tobytes()
    left, right = _as_bytes(a), _as_bytes(b)
    words = a.nbytes // 8 * 8
    if not np.array_equal(left[words:], right[words:]):
        return False
    left, right = left[:words].view(np.uint64), right[:words].view(np.uint64)
    step = COMPARE_NBYTES // 8
    return all(
        np.array_equal(left[start : start + step], right[start : start + step])
        for start in range(0, left.size, step)
    )


def _as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray)
