"""How the values of two arrays differ. Pure NumPy; blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.spec import Box

Values = npt.NDArray[Any]

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(slots=True)
class Difference:
    """Differences of the elements seen so far; see `LeafDifference`."""

    count: int = 0
    nan_count: int = 0
    largest: float = -1.0
    largest_relative: float = 0.0
    index: tuple[int, ...] = ()

    def add(self, box: Box, first: Values, second: Values, *, bitwise: bool) -> None:
        """The values of one box, which may be of different dtypes, count too.

        NaN equals NaN and 0.0 equals -0.0, unless `bitwise`.
        """
        if first.dtype == second.dtype and np.array_equal(_bits(first), _bits(second)):
            return
        with np.errstate(all="ignore"):
            unequal = _unequal(first, second, bitwise=bitwise)
            where = np.flatnonzero(unequal)
            if len(where):
                self._count(box, where, first.reshape(-1)[where], second.reshape(-1)[where])

    def _count(self, box: Box, where: npt.NDArray[np.intp], a: Values, b: Values) -> None:
        distance, relative, nan = _distances(a, b)
        self.count += len(where)
        self.nan_count += int(np.count_nonzero(nan))
        distance = np.where(nan, -1.0, distance)
        at = int(np.argmax(distance))
        if not self.index or distance[at] > self.largest:
            self.largest = max(self.largest, float(distance[at]))
            index = np.unravel_index(where[at], box.shape) if box.shape else ()
            self.index = tuple(int(i) + o for i, o in zip(index, box.offset, strict=True))
        if not nan.all():
            self.largest_relative = max(self.largest_relative, float(relative[~nan].max()))

    def merge(self, other: Difference) -> None:
        """What `other` has seen counts too; the result does not depend on the order."""
        if not other.count:
            return
        first = (-self.largest, self.index) if self.count else (math.inf, ())
        self.largest, self.index = (
            (other.largest, other.index)
            if (-other.largest, other.index) < first
            else (self.largest, self.index)
        )
        self.count += other.count
        self.nan_count += other.nan_count
        self.largest_relative = max(self.largest_relative, other.largest_relative)

    @property
    def largest_absolute(self) -> float:
        """The largest absolute difference; zero where none of the elements are numbers in both."""
        return max(0.0, self.largest)


def _bits(values: Values) -> Values:
    values = np.ascontiguousarray(values)
    size = values.dtype.itemsize
    if size in _BITS:
        return values.view(_BITS[size])
    return values.reshape(-1).view(np.uint64).reshape(values.size, size // 8)


def _unequal(first: Values, second: Values, *, bitwise: bool) -> npt.NDArray[np.bool_]:
    differs: npt.NDArray[np.bool_]
    if bitwise and first.dtype == second.dtype:
        differs = (_bits(first) != _bits(second)).reshape(first.size, -1)
    else:
        a, b = _wide(first).reshape(-1, 1), _wide(second).reshape(-1, 1)
        if a.dtype.kind == "c" or b.dtype.kind == "c":
            a, b = _parts(a), _parts(b)
        differs = (a != b) & ~((a != a) & (b != b))
    return np.asarray(differs.any(axis=1))


def _parts(values: Values) -> Values:
    whole = values.astype(np.complex128)
    return whole.view(np.float64).reshape(-1, 2)


def _wide(values: Values) -> Values:
    """The values in a dtype that NumPy itself knows and that holds each of them."""
    kind = values.dtype.kind
    if kind in "biufc":
        return values
    # int4, bfloat16 and the float8 kinds of ml_dtypes.
    return values.astype(np.int8 if values.dtype.name == "int4" else np.float32)


def _distances(a: Values, b: Values) -> tuple[Values, Values, npt.NDArray[np.bool_]]:
    """Absolute and relative difference, and where one of two values is NaN."""
    a, b = _wide(a), _wide(b)
    if a.dtype.kind in "iub" and b.dtype.kind in "iub":
        distance, nan = _integer_distance(a, b), np.zeros(len(a), bool)
    else:
        kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        a, b = a.astype(kind), b.astype(kind)
        nan = np.isnan(a) | np.isnan(b)
        distance = np.abs(a - b)
        # The same infinity of different bits, or two infinities: no difference, or no number.
        distance[np.isnan(distance) & ~nan] = math.inf
    scale = np.maximum(np.abs(a.astype(np.complex128)), np.abs(b.astype(np.complex128)))
    relative = np.where(distance > 0, distance / np.where(scale > 0, scale, 1.0), 0.0)
    relative[np.isnan(relative) & ~nan] = math.inf
    return distance, relative, nan


def _integer_distance(a: Values, b: Values) -> Values:
    """Exact up to the rounding of the result, also beyond 2**53."""
    if a.dtype == b.dtype == np.uint64:
        return np.where(a > b, a - b, b - a).astype(np.float64)
    if np.uint64 in (a.dtype, b.dtype):
        return np.abs(a.astype(np.float64) - b.astype(np.float64))
    a, b = a.astype(np.int64), b.astype(np.int64)
    # The difference of two int64 fits uint64, in which subtraction wraps around to it.
    high, low = np.maximum(a, b).view(np.uint64), np.minimum(a, b).view(np.uint64)
    return (high - low).astype(np.float64)
