"""Shared parts of the adapters: unsupported dtypes, checks of restored arrays, memory overlap."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import DtypeMismatchError, ShapeMismatchError, UnsupportedLeafError
from asyncckpt.ports import Target
from asyncckpt.spec import DTYPES, ArraySpec, Box, array_spec

NUMPY_DTYPES = frozenset(n for n, dtype in DTYPES.items() if dtype.type.__module__ == "numpy")
"""Names of NumPy's own dtypes; all others come from ml_dtypes."""

OVERLAP_WORK = 10_000
"""Candidate solutions that NumPy may try before it gives up deciding whether arrays overlap."""

_FLOAT0 = np.dtype([("float0", np.void, 0)])
"""As JAX defines `jax.dtypes.float0`."""

_CASTS = {
    "int1": "int8",
    "uint1": "uint8",
    "uint2": "uint8",
    "uint4": "uint8",
    "float6_e2m3fn": "float8_e4m3fn",
    "float6_e3m2fn": "float8_e4m3fn",
    "float8_e4m3": "bfloat16",
    "bcomplex32": "complex64",
    "complex32": "complex64",
    "float128": "float64",
    "float96": "float64",
    "longdouble": "float64",
    "complex256": "complex128",
    "complex192": "complex128",
    "clongdouble": "complex128",
}
"""Dtype that TensorStore's zarr3 driver cannot store -> the smallest dtype with all its values
(long doubles are rounded)."""


def bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements as unsigned integers, for bitwise comparison."""
    values = np.ascontiguousarray(values)
    size = values.dtype.itemsize
    if size <= 8:
        return values.view(f"u{size}")
    return values.reshape(-1).view(np.uint64).reshape(values.size, size // 8)


def unsupported_dtype(path: str, framework: str, dtype: Any, cast: str | None = None) -> Exception:
    """Return the error for a dtype that cannot be stored; `cast` replaces the default advice."""
    name: str = getattr(dtype, "name", dtype)
    if dtype == _FLOAT0:
        name = "float0"
        cast = "it is the gradient of an integer and holds no data, so leave it out or store None"
    advice = cast or (
        f"cast it to {_CASTS[name]}" if name in _CASTS else "cast it to one of " + ", ".join(DTYPES)
    )
    return UnsupportedLeafError(
        f"{path}: {framework} dtype {name} cannot be stored; {advice}",
        path=path,
        expected=tuple(DTYPES),
        found=name,
    )


def check_values(path: str, spec: ArraySpec, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise `ShapeMismatchError` or `DtypeMismatchError` unless the values fit the target."""
    if tuple(shape) != spec.shape:
        raise ShapeMismatchError(
            f"{path}: the restored leaf has shape {tuple(shape)}, the target wants {spec.shape}",
            path=path,
            stage="place",
            expected=spec.shape,
            found=tuple(shape),
        )
    if dtype != DTYPES[spec.dtype]:
        raise DtypeMismatchError(
            f"{path}: the restored leaf has dtype {dtype}, the target wants {spec.dtype}",
            path=path,
            stage="place",
            expected=spec.dtype,
            found=str(dtype),
        )


def check_parts(target: Target, parts: Sequence[npt.NDArray[Any]]) -> None:
    """Check the values of each of the target's boxes; raise as `check_values`."""
    specs = [target.spec]
    if target.boxes is not None:
        specs = [array_spec(box.shape, target.spec.dtype) for box in target.boxes]
    for spec, values in zip(specs, parts, strict=True):
        check_values(target.path, spec, values.shape, values.dtype)


def selection(box: Box) -> Any:
    """Return the index that selects a box of an array as a view, even at rank 0."""
    return (*box.slices(), ...)


class Place(NamedTuple):
    """An array's location in memory: first address, shape, strides in bytes, and item size."""

    pointer: int
    shape: Sequence[int]
    strides: Sequence[int]
    itemsize: int

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> Place:
        """Return the place of an array in host memory."""
        pointer = array.__array_interface__["data"][0]
        return cls(pointer, array.shape, array.strides, array.itemsize)

    @property
    def span(self) -> tuple[int, int]:
        """First and one-past-last byte address."""
        first, last = self.pointer, self.pointer + self.itemsize
        for n, step in zip(self.shape, self.strides, strict=True):
            if n == 0:
                return self.pointer, self.pointer
            if step < 0:
                first += (n - 1) * step
            else:
                last += (n - 1) * step
        return first, last


def host_span(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the first and one-past-last byte address of an array in host memory.

    Takes about 1 µs, significant for a small leaf.
    """
    if not array.flags.c_contiguous:
        return Place.of(array).span
    pointer: int = array.__array_interface__["data"][0]
    return pointer, pointer + array.nbytes


def overlapping(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices of arrays that may share memory, the lower index first.

    A candidate pair may turn out to share nothing, but arrays with disjoint byte spans or in
    different columns of one matrix are not yielded.
    """
    spans = [place.span for place in places]
    for chain in _chains(spans):
        near = [spans[number] for number in chain]
        columns = _columns([places[number] for number in chain], near)
        extents = dict(zip(chain, near if columns is None else columns, strict=True))
        reaching: list[int] = []  # arrays whose extent contains the start of the current one
        for number in sorted(chain, key=extents.__getitem__):
            start, _ = extents[number]
            reaching = [other for other in reaching if extents[other][1] > start]
            for other in reaching:
                if spans[number][0] < spans[other][1] and spans[other][0] < spans[number][1]:
                    yield min(number, other), max(number, other)
            reaching.append(number)


_Span = tuple[int, int]


def _chains(spans: Sequence[_Span]) -> Iterator[list[int]]:
    """Yield the indices of two or more spans chained by overlaps, from low to high addresses."""
    chain: list[int] = []
    end = 0
    for number in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[number]
        if start == stop:
            continue
        if start >= end:
            if len(chain) > 1:
                yield chain
            chain = []
        end = max(end, stop)
        chain.append(number)
    if len(chain) > 1:
        yield chain


def _columns(places: Sequence[Place], spans: Sequence[_Span]) -> list[_Span] | None:
    """Return each array's byte range in the rows of their common matrix; None without one."""
    steps, widths = [], []
    for place, (start, stop) in zip(places, spans, strict=True):
        rows = [(abs(s), n) for s, n in zip(place.strides, place.shape, strict=True) if n > 1]
        step, count = max(rows, default=(0, 1))
        steps.append(step)
        widths.append(stop - start - (count - 1) * step)
    step = max(steps)
    first = min(start for start, _ in spans)
    if not step or not {0, step}.issuperset(steps):
        return None
    begins = [(start - first) % step for start, _ in spans]
    columns = [(begin, begin + width) for begin, width in zip(begins, widths, strict=True)]
    return columns if all(stop <= step for _, stop in columns) else None


def may_overlap_itself(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether two elements may share a byte, as in expanded and sliding-window arrays."""
    if 0 in shape:
        return False
    reach = itemsize
    for step, n in sorted((abs(step), n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step < reach:
            return True
        reach += (n - 1) * step
    return False


def check_fillable(path: str, what: str, array: npt.NDArray[Any]) -> None:
    """Raise `UnsupportedLeafError` if an array, `what` in the error, cannot be filled."""
    flags = array.flags
    if not flags.writeable:
        raise UnsupportedLeafError(
            f"{path}: {what} is read-only and cannot be filled; pass a writable copy, or use "
            "restore(like=...)",
            path=path,
        )
    shape, strides = array.shape, array.strides
    if not flags.c_contiguous and may_overlap_itself(shape, strides, array.itemsize):
        raise UnsupportedLeafError(
            f"{path}: elements of {what} share memory (strides {strides}), so it cannot be "
            "filled; pass a copy",
            path=path,
        )


def is_masked(array: object) -> bool:
    """Return whether this is a masked array, without importing `numpy.ma`, which is slow."""
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    # None also while another thread imports the module.
    return masked is not None and isinstance(array, masked)


def may_share_memory(one: Any, other: Any) -> bool:
    """Return whether two arrays share a byte; True if still undecided after `OVERLAP_WORK`."""
    try:
        # NumPy accepts any bound on the work, but its stubs only two constants.
        return bool(np.shares_memory(one, other, max_work=cast(Any, OVERLAP_WORK)))
    except np.exceptions.TooHardError:
        return True
