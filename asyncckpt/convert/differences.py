"""Differences of two checkpoints: values of arrays, kinds, shapes, dtypes and containers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import bits
from asyncckpt.adapters.python import NUMBERS
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.convert.reader import LeafReader
from asyncckpt.errors import DtypeMismatchError
from asyncckpt.format.scalars import decode_scalar
from asyncckpt.reports import LeafDifference
from asyncckpt.restore.place import array_from_scalar
from asyncckpt.spec import ArraySpec, Box, numeric_class

NOTED = 5
"""Most containers that a note lists."""

BLOCK_SIZE = 1 << 16
"""Elements compared at once: differing ones take up to about 100 bytes each."""

Values = npt.NDArray[Any]


@dataclass(slots=True)
class Difference:
    """Differences of the elements compared so far; see `LeafDifference`.

    `largest` is negative if no pair of differing elements is free of NaNs.
    """

    count: int = 0
    nan_count: int = 0
    largest: float = -1.0
    largest_relative: float = 0.0
    index: tuple[int, ...] = ()

    def add(self, box: Box, first: Values, second: Values, *, bitwise: bool) -> None:
        """Add the differences of one box, whose values may have different dtypes.

        NaN equals NaN and 0.0 equals -0.0, unless `bitwise`.
        """
        first, second = first.reshape(-1), second.reshape(-1)
        for start in range(0, box.size, BLOCK_SIZE):
            a, b = (values[start : start + BLOCK_SIZE] for values in (first, second))
            if a.dtype == b.dtype and np.array_equal(bits(a), bits(b)):
                continue
            with np.errstate(all="ignore"):
                where = np.flatnonzero(_unequal(a, b, bitwise=bitwise))
                if not len(where):
                    continue
                distance, relative, nan = _distances(a[where], b[where])
            distance = np.where(nan, -1.0, distance)
            at = int(np.argmax(distance))
            index = np.unravel_index(start + where[at], box.shape) if box.shape else ()
            self.merge(
                Difference(
                    len(where),
                    int(np.count_nonzero(nan)),
                    float(distance[at]),
                    float(relative[~nan].max(initial=0.0)),
                    tuple(int(i) + o for i, o in zip(index, box.offset, strict=True)),
                )
            )

    def merge(self, other: Difference) -> None:
        """Add the differences of `other`, in any order."""
        if not other.count:
            return
        best = min((-found.largest, found.index) for found in (self, other) if found.count)
        self.largest, self.index = -best[0], best[1]
        self.count += other.count
        self.nan_count += other.nan_count
        self.largest_relative = max(self.largest_relative, other.largest_relative)


def _unequal(first: Values, second: Values, *, bitwise: bool) -> npt.NDArray[np.bool_]:
    differs: npt.NDArray[np.bool_]
    if bitwise and first.dtype == second.dtype:
        differs = (bits(first) != bits(second)).reshape(first.size, -1)
    else:
        a, b = _wide(first).reshape(-1, 1), _wide(second).reshape(-1, 1)
        if a.dtype.kind == "c" or b.dtype.kind == "c":
            a, b = np.hstack((a.real, a.imag)), np.hstack((b.real, b.imag))
        differs = (a != b) & ~((a != a) & (b != b))
        if "f" in a.dtype.kind + b.dtype.kind and a.dtype.kind != b.dtype.kind:
            differs |= _distance(a, b) != 0  # `!=` rounds 64-bit integers to floats
    return np.asarray(differs.any(axis=1))


def _wide(values: Values) -> Values:
    """Return the values in a native dtype of NumPy that holds each of them."""
    kind = values.dtype.kind
    if kind in "biufc":
        return values
    is_int = numeric_class(values.dtype.name) == "int"  # a dtype of ml_dtypes
    return values.astype(np.int8 if is_int else np.float32)


def _distances(a: Values, b: Values) -> tuple[Values, Values, npt.NDArray[np.bool_]]:
    """Return absolute and relative difference, and where one of two values is NaN."""
    a, b = _wide(a), _wide(b)
    distance = _distance(a.real, b.real)
    if "c" in a.dtype.kind + b.dtype.kind:
        distance = np.hypot(distance, _distance(a.imag, b.imag))
    nan = np.isnan(a) | np.isnan(b)
    # Two infinities differ by infinity, not by NaN.
    distance[np.isnan(distance) & ~nan] = math.inf
    scale = np.maximum(np.abs(a.astype(np.complex128)), np.abs(b.astype(np.complex128)))
    relative = np.where(distance > 0, distance / np.where(scale > 0, scale, 1.0), 0.0)
    relative[np.isnan(relative) & ~nan] = math.inf
    return distance, relative, nan


def _distance(a: Values, b: Values) -> Values:
    """Return the absolute difference of real numbers, exact up to the rounding of the result."""
    (high, low), (other_high, other_low) = _halves(a), _halves(b)
    return np.asarray(np.abs((high - other_high) + (low - other_low)))


def _halves(values: Values) -> tuple[Values, Values | float]:
    """Return two parts of each number, both of which float64 holds exactly, even beyond 2**53."""
    if values.dtype.itemsize < 8 or values.dtype.kind == "f":
        return values.astype(np.float64), 0.0
    # With the sign of the number, so that small ones have no high part.
    low = np.fmod(values, 1 << 32)
    return (values - low).astype(np.float64), low.astype(np.float64)


# ---------------------------------------------------------------------------- leaves, containers


def _kind(reader: LeafReader, leaf: int) -> str:
    """Return the kind of a leaf, without shape and dtype."""
    kind = reader.opened.leaves.kind[leaf]
    if reader.specs[leaf] is None:
        return kind
    facts = reader.opened.leaves.extra.get(leaf, {})
    if "python" in facts:
        return str(facts["python"])
    return f"PRNG keys of {facts['prng_impl']}" if "prng_impl" in facts else "array"


def described(
    a: LeafReader, leaf: int, b: LeafReader, other: int, *, bitwise: bool
) -> LeafDifference | None:
    """Return how two leaves of one path differ, apart from the values of arrays."""
    path = a.paths[leaf]
    kinds = _kind(a, leaf), _kind(b, other)
    if kinds[0] != kinds[1]:
        return LeafDifference(path, "kind", _text(a, leaf), _text(b, other))
    first, second = a.specs[leaf], b.specs[other]
    if first is None or second is None:
        # A long `bytes` value may be stored as an array, and a shorter one not.
        values = a.opened.leaves.value[leaf], b.opened.leaves.value[other]
        if first is second and _same_scalar(kinds[0], *values, bitwise=bitwise):
            return None
        return LeafDifference(path, "value", _text(a, leaf), _text(b, other))
    if first.shape != second.shape:
        return LeafDifference(path, "shape", str(first), str(second))
    if first.dtype != second.dtype:
        return LeafDifference(path, "dtype", first.dtype, second.dtype)
    return None


def stored_number(
    a: LeafReader, leaf: int, b: LeafReader, other: int
) -> tuple[ArraySpec, Values] | None:
    """Return spec and value, as an array, of a number that only one checkpoint stores as an array.

    Other libraries store all numbers as arrays. None for other leaves, and if the dtype of the
    array cannot hold the other's value exactly.
    """
    if a.specs[leaf] is None:
        a, leaf, b, other = b, other, a, leaf
    spec = a.specs[leaf]
    if spec is None or b.specs[other] is not None or spec.shape:
        return None
    kind = _kind(a, leaf)
    if kind not in NUMBERS or kind != _kind(b, other):
        return None
    try:
        number = decode_scalar(kind, b.opened.leaves.value[other])
        values = array_from_scalar(b.paths[other], number, spec.dtype)
    except DtypeMismatchError:
        return None
    exact = values.item() == number or number != number  # NaNs are compared as values
    return (spec, values) if exact else None


def _same_scalar(kind: str, first: Any, second: Any, *, bitwise: bool) -> bool:
    if first == second or bitwise or kind not in ("float", "complex"):
        return bool(first == second)
    a, b = (np.array([decode_scalar(kind, value)]) for value in (first, second))
    return not _unequal(a, b, bitwise=False).any()


def _text(reader: LeafReader, leaf: int) -> str:
    kind, spec = _kind(reader, leaf), reader.specs[leaf]
    if spec is not None:
        return f"{kind} {spec}"
    return f"{kind} {decode_scalar(kind, reader.opened.leaves.value[leaf])!r:.80}"


def notes(first: OpenCheckpoint, second: OpenCheckpoint) -> Iterator[str]:
    """Yield notes about differences other than leaves."""
    formats = first.format, second.format
    if formats[0] != formats[1]:
        yield f"the first is a checkpoint of format {formats[0]}, the second of {formats[1]}"
    containers = [_containers(opened) for opened in (first, second)]
    differing = [
        path
        for path in {**containers[0], **containers[1]}
        if containers[0].get(path) != containers[1].get(path)
    ]
    if differing:
        shown = ", ".join(
            f"{path or 'the tree itself'} ({containers[0].get(path, 'nothing')} and "
            f"{containers[1].get(path, 'nothing')})"
            for path in differing[:NOTED]
        )
        more = f", and {len(differing) - NOTED} more" if len(differing) > NOTED else ""
        yield f"containers differ: {shown}{more}"


def _containers(opened: OpenCheckpoint) -> dict[str, str]:
    structure = opened.structure()
    kinds: dict[str, str] = {}
    for path, node in zip(structure.node_paths(), structure.nodes, strict=True):
        # Paths do not tell the key 1 from the key "1".
        has_ints = node.kind == "dict" and any(isinstance(key, int) for key in node.keys)
        # A stateful object and its state dict share a path: the outer kind counts.
        kinds.setdefault(path, f"{node.kind} with int keys" if has_ints else node.kind)
    return kinds
