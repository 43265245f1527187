"""`ShardedArray`: a global array held in boxes of NumPy arrays, read and filled shard by shard."""

# Rule 1: only `to_numpy` assembles the array.
# Rule 2: padding is neither read nor written.

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.adapters.arrays import (
    Place,
    check_fillable,
    is_masked,
    may_share_memory,
    overlapping,
    selection,
)
from asyncckpt.adapters.numpy import memory_identity
from asyncckpt.errors import UnsupportedLeafError, UsageError
from asyncckpt.planning.tiling import box_text, first_overlap, tiling_fault
from asyncckpt.ports import Source, Target
from asyncckpt.spec import DTYPE_NAMES, DTYPES, ArraySpec, Box, Shard, array_spec

Memory = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The boxes of an array that its shards hold.

    Attributes:
        shards: the distinct boxes that hold elements, in order of their offsets.
        first: index of the shard from which each distinct box is read.
        number: index of each shard's box, -1 for a shard that is empty or all padding.
        overlap: two different boxes that share elements, or None.
        gap: why the boxes do not tile the array, or None.
    """

    shards: tuple[Shard, ...]
    first: tuple[int, ...]
    number: tuple[int, ...]
    overlap: tuple[Box, Box] | None
    gap: str | None


@lru_cache(maxsize=1024)
def divide(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Division:
    """Return the division of an array by shards with these boxes."""
    first: dict[Box, int] = {}
    for number, box in enumerate(boxes):
        if box.size:
            first.setdefault(box, number)
    distinct = sorted(first, key=lambda box: (box.offset, box.shape))
    place = {box: number for number, box in enumerate(distinct)}
    gap = tiling_fault(Box.whole(shape), distinct)
    return Division(
        shards=tuple(map(Shard, distinct)),
        first=tuple(first[box] for box in distinct),
        number=tuple(place.get(box, -1) for box in boxes),
        overlap=None if gap is None else first_overlap(distinct),
        gap=gap,
    )


class ShardedArray:
    """A global array that is held in boxes of NumPy arrays.

    A save stores it shard by shard, without assembling it. The boxes must tile the array, together
    with those of the other processes if several save it. `restore(like=…)` returns a new
    `ShardedArray` with the boxes of the target, whatever boxes were saved; `restore_into` fills its
    arrays. A target may leave gaps. Without a target, it is restored as a plain array.

    Args:
        shape: shape of the global array.
        dtype: its dtype, as NumPy or zarr v3 names it.
        shards: pairs of an offset in the global array and the array whose first element is there.
            Two shards share no element unless they are replicas of one box; the first replica is
            saved, and all are filled.
        padded: allow shards to reach past the global array; the outside is padding, which is
            neither saved nor touched by a restore.

    Raises:
        UsageError: names the shard that does not fit, and why.
    """

    __slots__ = ("_boxes", "_division", "_dtype", "_shape", "_shards")

    def __init__(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        shards: Sequence[tuple[Sequence[int], Memory]],
        *,
        padded: bool = False,
    ) -> None:
        self._shape = _lengths("shape", shape)
        self._dtype = _dtype(dtype)
        if not isinstance(shards, Iterable):
            raise UsageError(
                f"ShardedArray: shards is a {type(shards).__name__}; pass pairs of an offset and "
                "an array",
                found=type(shards).__name__,
            )
        self._shards = tuple(
            [self._checked(number, shard, padded) for number, shard in enumerate(shards)]
        )
        whole, nothing = Box.whole(self._shape), (0,) * len(self._shape)
        self._boxes = tuple(
            Box(offset, array.shape).intersect(whole) or Box(offset, nothing)
            for offset, array in self._shards
        )
        self._division = divide(self._shape, self._boxes)
        if self._division.overlap is not None:
            one, other = self._division.overlap
            raise UsageError(
                f"ShardedArray: two shards hold {box_text(one)} and {box_text(other)}, which "
                "overlap; shards share no element, unless they are replicas of one box",
                expected="boxes that do not overlap",
                found=(one, other),
            )

    @classmethod
    def tiles(
        cls,
        values: Memory | Sequence[int],
        mesh_shape: Sequence[int],
        *,
        dtype: npt.DTypeLike | None = None,
        replicas: int = 1,
    ) -> ShardedArray:
        """Return an array in tiles of ceil(n / m) per axis, as on an emulated mesh.

        Tiles at the far edge are padded with zeros, and tiles beyond it are all padding, as in
        PyTorch/XLA's SPMD. Every tile has its own memory.

        Args:
            values: the NumPy array to cut, or a shape, whose tiles are zeros.
            mesh_shape: number of tiles per axis.
            dtype: dtype of the zeros; only with a shape.
            replicas: how many shards hold each tile.

        Raises:
            UsageError: an argument is invalid.
        """
        if is_masked(values):
            raise UsageError(
                "ShardedArray.tiles: masked arrays cannot be stored; pass x.data and x.mask, one "
                "array each",
                expected="numpy.ndarray",
                found=type(values).__name__,
            )
        whole: Memory | None = None
        if isinstance(values, np.ndarray):
            whole, shape = values, values.shape
        else:
            shape = _lengths("shape", values)
        if (whole is None) != (dtype is not None):
            raise UsageError(
                "ShardedArray.tiles: pass a NumPy array, or a shape and dtype=", found=dtype
            )
        kind = _dtype(dtype if whole is None else whole.dtype)
        mesh = _lengths("mesh_shape", mesh_shape)
        if len(mesh) != len(shape) or 0 in mesh:
            raise UsageError(
                f"ShardedArray: mesh_shape={mesh} for shape {shape}: pass one positive number of "
                "tiles per axis",
                expected=len(shape),
                found=mesh,
            )
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise UsageError(
                f"ShardedArray: replicas={replicas!r}: pass the number of shards that hold each "
                "tile, at least 1",
                found=replicas,
            )
        tile = tuple(-(-n // m) for n, m in zip(shape, mesh, strict=True))
        shards: list[tuple[tuple[int, ...], Memory]] = []
        for cell in np.ndindex(*mesh):
            offset = tuple(i * n for i, n in zip(cell, tile, strict=True))
            for _ in range(replicas):
                held = np.zeros(tile, kind)
                if whole is not None:
                    part = whole[selection(Box(offset, tile))]
                    held[selection(Box.whole(part.shape))] = part
                shards.append((offset, held))
        return cls(shape, kind, shards, padded=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global array."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its NumPy dtype."""
        return self._dtype

    @property
    def shards(self) -> tuple[tuple[tuple[int, ...], Memory], ...]:
        """Offset and array of every shard."""
        return self._shards

    def to_numpy(self) -> Memory:
        """Return the global array, assembled in new memory.

        Raises:
            UsageError: the shards leave gaps.
        """
        if self._division.gap is not None:
            raise UsageError(
                f"ShardedArray: the shards of {spec_of(self)} leave gaps: {self._division.gap}",
                expected=self._shape,
                found=self._division.gap,
            )
        values = np.empty(self._shape, self._dtype)
        for shard, number in zip(self._division.shards, self._division.first, strict=True):
            values[selection(shard.box)] = inside(self, number)
        return values

    def __repr__(self) -> str:
        division = self._division
        gap = f"; {division.gap}" if division.gap is not None else ""
        return (
            f"ShardedArray({spec_of(self)}, shards: {len(self._shards)}, distinct boxes: "
            f"{len(division.shards)}{gap})"
        )

    def _checked(
        self, number: int, shard: tuple[Sequence[int], Memory], padded: bool
    ) -> tuple[tuple[int, ...], Memory]:
        if not isinstance(shard, (tuple, list)) or len(shard) != 2:
            raise UsageError(
                f"ShardedArray: shards[{number}] is not a pair of an offset and an array",
                expected="(offset, array)",
                found=type(shard).__name__,
            )
        given, array = shard
        offset = _lengths(f"the offset of shards[{number}]", given)
        if not isinstance(array, np.ndarray) or is_masked(array):
            raise UsageError(
                f"ShardedArray: shards[{number}] is a {type(array).__name__}; pass a NumPy array "
                "(x.numpy() is one that shares the memory of a CPU tensor)",
                expected="numpy.ndarray",
                found=type(array).__name__,
            )
        array = array if type(array) is np.ndarray else array.view(np.ndarray)
        if array.dtype != self._dtype:
            raise UsageError(
                f"ShardedArray: shards[{number}] has dtype {array.dtype}, the array has "
                f"{self._dtype}; convert it with x.astype(...)",
                expected=str(self._dtype),
                found=str(array.dtype),
            )
        if not len(offset) == array.ndim == len(self._shape):
            raise UsageError(
                f"ShardedArray: shards[{number}] has shape {array.shape} at offset {offset}, the "
                f"array has shape {self._shape}; pass offsets and arrays of its rank",
                expected=len(self._shape),
                found=(offset, array.shape),
            )
        ends = zip(offset, array.shape, self._shape, strict=True)
        if not padded and any(o + length > n for o, length, n in ends):
            raise UsageError(
                f"ShardedArray: shards[{number}] holds {box_text(Box(offset, array.shape))}, which "
                f"reaches past shape {self._shape}; pass padded=True if the rest is padding",
                expected=self._shape,
                found=(offset, array.shape),
            )
        return offset, array


def _lengths(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(-1 if isinstance(n, bool) else operator.index(n) for n in values)
    except TypeError:
        lengths = (-1,)
    if any(not 0 <= n < 1 << 63 for n in lengths):
        raise UsageError(
            f"ShardedArray: {name} is {values!r:.80}; pass a sequence of non-negative ints of at "
            "most 63 bits",
            found=values,
        )
    return lengths


def _dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any]:
    found = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if found is None and dtype is not None:  # NumPy would take None as float64
        try:
            found = np.dtype(dtype)
        except (TypeError, ValueError, SyntaxError):  # by NumPy's parser, for some texts
            found = None
    if found is None or found not in DTYPE_NAMES:
        raise UsageError(
            f"ShardedArray: dtype {found or dtype!r} cannot be stored; use one of "
            f"{', '.join(DTYPES)}",
            expected=tuple(DTYPES),
            found=str(dtype),
        )
    return found


def spec_of(array: ShardedArray) -> ArraySpec:
    """Return the global shape and zarr dtype."""
    return array_spec(array._shape, DTYPE_NAMES[array._dtype])


def inside(array: ShardedArray, number: int) -> Memory:
    """Return a view of a shard without its padding."""
    held, box = array._shards[number][1], array._boxes[number]
    if held.shape == box.shape:
        return held
    view: Memory = held[selection(Box.whole(box.shape))]
    return view


class ShardedAdapter:
    """`ShardedArray`; other processes hold the boxes that are missing from one with gaps."""

    def owns(self, kind: type) -> bool:
        return issubclass(kind, ShardedArray)

    def source(self, path: str, leaf: ShardedArray) -> Source:
        array, spec, division = leaf, spec_of(leaf), leaf._division
        views = tuple([inside(array, number) for number in division.first])
        partial = division.gap is not None
        if not partial and len(views) == 1:
            return Source(spec, leaf, views[0], _identity(array))
        if not partial and not views:
            return Source(spec, leaf, np.empty(spec.shape, array.dtype))
        identity, shards = _identity(array), division.shards
        return Source(spec, leaf, None, identity, shards=shards, views=views, partial=partial)

    def fetch(self, source: Source, shard: int, box: Box, out: Memory) -> None:
        array: ShardedArray = source.leaf
        held = inside(array, array._division.first[shard])
        np.copyto(out, held[selection(box)], casting="no")

    def target(self, path: str, leaf: ShardedArray, *, in_place: bool) -> Target:
        boxes = tuple([shard.box for shard in leaf._division.shards])
        target = Target(spec_of(leaf), leaf, boxes=boxes, path=path, fill=not boxes)
        if in_place:
            _check_memory(path, leaf)
            target.buffers = tuple([inside(leaf, number) for number in leaf._division.first])
        return target

    def place(self, target: Target, parts: Sequence[Memory]) -> Any:
        array: ShardedArray = target.leaf
        division = array._division
        if target.buffers:
            for number, box in enumerate(division.number):
                if box >= 0 and number != division.first[box]:
                    np.copyto(inside(array, number), target.buffers[box])
            return array
        made: list[tuple[tuple[int, ...], Memory]] = []
        for number, ((offset, held), box) in enumerate(
            zip(array.shards, division.number, strict=True)
        ):
            if box >= 0 and number == division.first[box] and held.shape == parts[box].shape:
                values = parts[box]
            else:
                values = np.zeros(held.shape, held.dtype)
                if box >= 0:
                    values[selection(Box.whole(parts[box].shape))] = parts[box]
            made.append((offset, values))
        return ShardedArray(array.shape, array.dtype, made, padded=True)


def _identity(array: ShardedArray) -> Hashable | None:
    """Return a value that is equal for arrays of the same boxes and memory."""
    division, name = array._division, DTYPE_NAMES[array.dtype]
    places = [memory_identity(inside(array, number)) for number in division.first]
    return ("sharded", array.shape, name, division.shards, tuple(places))


def _check_memory(path: str, array: ShardedArray) -> None:
    """Raise if a shard is read-only, or overlaps itself or another shard in memory."""
    boxes = array._division.number
    numbers = [number for number, box in enumerate(boxes) if box >= 0]
    parts = [inside(array, number) for number in numbers]
    for number, part in zip(numbers, parts, strict=True):
        check_fillable(path, f"shard {number}", part)
    places = [Place.of(part) for part in parts]
    for a, b in overlapping(places):
        one, two = numbers[a], numbers[b]
        is_replica = boxes[one] == boxes[two] and places[a] == places[b]
        if not is_replica and may_share_memory(parts[a], parts[b]):
            raise UnsupportedLeafError(
                f"{path}: shards {one} and {two} share memory, so they cannot be filled; give "
                "each its own",
                path=path,
                found=(one, two),
            )
