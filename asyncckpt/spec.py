"""Vocabulary of the planner: boxes, dtypes, chunk grids, shards and extents.

Everything here is an immutable value without I/O. Shapes, offsets and lengths count elements
unless their name ends in `nbytes`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from asyncckpt.pickled import PickledByName

# zarr v3 data type name -> NumPy dtype that holds it in memory, little endian.
# These are what TensorStore's zarr3 driver stores; one element takes `itemsize` bytes in a chunk,
# also for int2, int4 and float4, which TensorStore does not pack. The adapters refuse other dtypes
# (uint4, float6, float8_e4m3, …) with a suggested cast.
DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(getattr(ml_dtypes, name, name)).newbyteorder("<")
    for name in (
        "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
        "float4_e2m1fn float8_e3m4 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz float8_e5m2 "
        "float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 complex64 complex128"
    ).split()
}

DTYPE_NAMES: dict[np.dtype[np.generic], str] = {dtype: name for name, dtype in DTYPES.items()}

ITEMSIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of an array: `offset[i] <= index[i] < offset[i] + shape[i]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers all of an array of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, per dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index expression that selects this box from an array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of both boxes, None if they share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return None if any(n <= 0 for n in shape) else Box(offset, shape)

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Return the same box in coordinates relative to `origin`."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)


@dataclass(frozen=True, slots=True)
class ArraySpec(PickledByName):
    """Shape and zarr v3 dtype name of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@functools.lru_cache(maxsize=4096)
def array_spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
    """Return the spec of an array; equal specs are one object, so comparisons are cheap."""
    return ArraySpec(shape, dtype)


def nonempty_size(shape: Iterable[int]) -> int:
    """Return the product of the lengths without zeros, which NumPy limits for empty arrays too."""
    return math.prod(filter(None, shape))


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A regular zarr chunk grid. Cells on the far edge may reach past the array.

    `chunk_shape` has the rank of `shape` and positive entries, even where `shape` has zeros.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of chunks per dimension; zero where the array is empty."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def chunk_count(self) -> int:
        """Total number of chunks; one for rank 0."""
        return math.prod(self.counts)

    @property
    def chunk_size(self) -> int:
        """Elements in one stored chunk."""
        return math.prod(self.chunk_shape)

    def cells(self) -> Iterator[tuple[int, ...]]:
        """Yield the grid coordinates of every chunk in C order."""
        return np.ndindex(*self.counts)

    def box(self, cell: tuple[int, ...]) -> Box:
        """Return the part of the array that chunk `cell` holds, clipped to the array."""
        offset = tuple(i * c for i, c in zip(cell, self.chunk_shape, strict=True))
        return Box(
            offset,
            tuple(
                min(c, n - o) for o, c, n in zip(offset, self.chunk_shape, self.shape, strict=True)
            ),
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of a leaf and the processes that hold a replica of it."""

    box: Box
    holders: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Partition:
    """How several processes divide an array: into cells, each held by one or more of them.

    It is equal in all processes, and computed from the mesh without a list of shards.

    Attributes:
        cuts: per axis, the length of every cell except the last (the axis length if it is not
            cut), or, if cells are uneven, the positions of the cuts between them.
        holders: the process that holds each cell, as a canonical text that is equal in all
            processes: the mesh, its processes, and the axes that it divides.
        processes: the processes that hold a cell, in order; empty if unknown. Not compared, because
            `holders` determines whether two partitions are equal.
        pattern: the same text with positions in `processes` instead of process numbers; empty if
            unknown. If cuts and pattern are equal, processes at equal positions hold equal cells.
    """

    cuts: tuple[int | tuple[int, ...], ...]
    holders: str
    processes: tuple[int, ...] = field(default=(), compare=False)
    pattern: str = field(default="", compare=False)


@functools.lru_cache(maxsize=64)
def saturation(dtype: str) -> float | None:
    """Return the largest value of a dtype without NaN, to which casts clip; None for all others."""
    kind = DTYPES[dtype]
    if numeric_class(dtype) != "float" or np.isnan(np.float32("nan").astype(kind)):
        return None
    return float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=64)
def numeric_class(dtype: str) -> str:
    """Return `bool`, `int`, `float` or `complex` for a dtype or Python type, else its name."""
    found = re.match(r"(bool)|u?(int)|b?(float)|(complex)", dtype)
    return dtype if found is None else found[found.lastindex or 0]
