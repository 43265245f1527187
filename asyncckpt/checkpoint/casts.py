"""Casts from one dtype to another: they may lose precision, but not values.

Lost are fractions and other values that an integer dtype or bool cannot hold, integers beyond the
largest float of a dtype, and imaginary parts. A float too large for a narrower float dtype becomes
an infinity, which a save allows and a restore refuses; in dtypes without infinities it is lost.
`float4_e2m1fn` has no NaN, `float8_e8m0fnu` no zero and no negative values.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from asyncckpt.errors import DtypeMismatchError
from asyncckpt.spec import DTYPES, numeric_class, saturation

BLOCK_SIZE = 4096
"""Elements rounded at once, to check whether they are integers without a copy of the array."""

_INTEGERS = ("bool", "int")


def castable(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Return the values in a dtype that NumPy casts to `dtype`: their own, or else float32.

    ml_dtypes lacks casts between some of its dtypes; float32 holds all values of these.
    """
    if np.can_cast(values.dtype, DTYPES[dtype], "unsafe"):
        return values
    return values.astype(np.float32)


@lru_cache(maxsize=512)
def may_lose(source: str, stored: str) -> bool:
    """Return whether a cast from `source` to `stored` may lose values, not only precision."""
    before, after = numeric_class(source), numeric_class(stored)
    if source == stored or after == "complex":
        return False
    if before in _INTEGERS:
        bounds = np.array(_int_range(source), DTYPES[source])
        return any(not _holds(stored, bound) for bound in bounds)
    return before == "complex" or after in _INTEGERS or not _has_infinity(stored)


def check_values_fit(path: str, values: npt.NDArray[Any], source: str, stored: str) -> None:
    """Check that a cast from `source` to `stored` loses no value; needed if `may_lose`.

    Blocking: reads the values up to three times and copies no more than a block of them.

    Raises:
        DtypeMismatchError: a value would be lost; names the path and one such value.
    """
    lost = lost_value(values, source, stored)
    if lost is None:
        return
    shown = "a value with an imaginary part" if isinstance(lost, complex) else repr(lost)
    raise DtypeMismatchError(
        f"{path}: {shown} does not fit into {stored}, in which this leaf is to be stored; store it "
        f"as {source}, or in a dtype that holds its values",
        path=path,
        stage="stage",
        expected=stored,
        found=source,
    )


def lost_value(values: npt.NDArray[Any], source: str, stored: str) -> Any:
    """Return one value, as a Python number, that a cast loses, or None; needed if `may_lose`.

    Blocking: reads the values up to three times and copies no more than a block of them.
    """
    if not values.size:
        return None
    with np.errstate(invalid="ignore"):
        if numeric_class(source) == "complex":
            if values.imag.any():
                return values[values.imag != 0][0].item()
            values = values.real
        if numeric_class(stored) in _INTEGERS and numeric_class(source) not in _INTEGERS:
            for block in np.nditer(values, ["external_loop", "buffered"], buffersize=BLOCK_SIZE):
                fractions = block[np.rint(block) != block]  # and NaNs
                if fractions.size:
                    return fractions[0].item()
        # Casts keep the order of values, so checking the least and the greatest is enough. A NaN
        # counts as both, unless the stored dtype has NaNs.
        if numeric_class(stored) == "float" and saturation(stored) is None:
            bounds = np.fmin.reduce(values, axis=None), np.fmax.reduce(values, axis=None)
        else:
            bounds = values.min(), values.max()
        for bound in bounds:
            if not _holds(stored, bound):
                return bound.item()
    return None


def _holds(stored: str, value: np.generic) -> bool:
    kind = numeric_class(stored)
    if kind in _INTEGERS:
        low, high = _int_range(stored)
        number = value.item()  # a Python number, which compares exactly
        return bool(low <= number <= high if isinstance(number, int) else low <= number < high + 1)
    largest = saturation(stored)
    if largest is not None:
        return bool(abs(value.item()) <= largest)  # False for a NaN
    with np.errstate(over="ignore", invalid="ignore"):
        cast = castable(np.asarray(value), stored).astype(DTYPES[stored])
        if isinstance(value.item(), float):
            return bool(np.isnan(value) or _has_infinity(stored) or not np.isnan(cast))
        return bool(np.isfinite(cast.astype(np.float64)))


@lru_cache(maxsize=64)
def _has_infinity(stored: str) -> bool:
    return numeric_class(stored) != "float" or bool(
        np.isinf(np.float32("inf").astype(DTYPES[stored]))
    )


def _int_range(dtype: str) -> tuple[int, int]:
    """Return the least and the greatest value of an integer dtype, or of bool."""
    if dtype == "bool":
        return 0, 1
    info: Any = ml_dtypes.iinfo(DTYPES[dtype])  # type: ignore[no-untyped-call]
    return int(info.min), int(info.max)
