"""Place: host memory that holds checked values becomes the leaves the caller asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import DtypeMismatchError
from asyncckpt.spec import DTYPES


def cast_values(
    path: str, values: npt.NDArray[Any], dtype: str, out: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """The values in another dtype (in `out`, if given); precision may go, range may not. Blocking.

    Raises:
        DtypeMismatchError: a value does not fit into the dtype; names the path and one such value.
    """
    wanted = DTYPES[dtype]
    if out is None:
        out = np.empty(values.shape, wanted)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = values
        if numeric_class(values.dtype.name) == "complex" and numeric_class(dtype) in _REAL:
            numbers = values.real  # whose imaginary part must be zero: looked at below
        np.copyto(out, numbers.astype(wanted, copy=False), casting="no")
        fault = _out_of_range(values, out, dtype)
    if fault is not None:
        fault = fault.item() if isinstance(fault, np.generic) else fault
        raise DtypeMismatchError(
            f"{path}: {fault!r} of the checkpoint is out of range of {dtype}; restore it in the "
            f"saved dtype {values.dtype.name}",
            path=path,
            stage="place",
            expected=dtype,
            found=values.dtype.name,
        )
    return out


_REAL = ("int", "float")


def numeric_class(dtype: str) -> str:
    """`bool`, `int`, `float` or `complex`, for names of dtypes and Python types; else the name."""
    for prefix, kind in (
        ("bool", "bool"),
        ("uint", "int"),
        ("int", "int"),
        ("bfloat", "float"),
        ("float", "float"),
        ("complex", "complex"),
    ):
        if dtype.startswith(prefix):
            return kind
    return dtype


def _out_of_range(values: npt.NDArray[Any], cast: npt.NDArray[Any], dtype: str) -> Any:
    source, wanted = numeric_class(values.dtype.name), numeric_class(dtype)
    if wanted == "bool" or source == "bool":
        return None
    if source == "complex" and wanted != "complex":
        bad = values.imag != 0
        if bad.any():
            return values[bad].reshape(-1)[0]
        values = values.real
        source = "float"
    if wanted == "int":
        low, high = _int_range(dtype)
        if source == "int":
            # Compared as Python's unbounded ints: uint64 and int64 have no common NumPy dtype.
            if values.size and (int(values.min()) < low or int(values.max()) > high):
                return int(values.max()) if int(values.max()) > high else int(values.min())
            return None
        wide = values.astype(np.float64)
        bad = ~((wide >= low) & (wide < float(high) + 1))
        return wide[bad].reshape(-1)[0] if bad.any() else None
    if source == "int":
        bad = ~np.isfinite(cast.astype(np.complex128 if wanted == "complex" else np.float64))
        return values[bad].reshape(-1)[0] if bad.any() else None
    wide_source = values.astype(np.complex128 if source == "complex" else np.float64)
    wide_cast = cast.astype(np.complex128 if wanted == "complex" else np.float64)
    bad = np.isfinite(wide_source) & ~np.isfinite(wide_cast)
    return wide_source[bad].reshape(-1)[0] if bad.any() else None


def _int_range(dtype: str) -> tuple[int, int]:
    bits = 4 if dtype == "int4" else DTYPES[dtype].itemsize * 8
    return (
        (0, (1 << bits) - 1) if dtype.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)
    )


def python_value(values: npt.NDArray[Any], extra: Mapping[str, Any]) -> Any:
    """What was saved as an array but is no array in Python, or None.

    Long `bytes` are stored as arrays by us, and all numbers by other libraries.
    """
    kind = extra.get("python")
    if kind == "bytes":
        return values.tobytes()
    number = _NUMBERS.get(kind) if isinstance(kind, str) else None
    return None if number is None or values.shape else number(values[()])


_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two arrays of one shape and dtype hold the same bits, NaNs included."""
    return a.tobytes() == b.tobytes()
