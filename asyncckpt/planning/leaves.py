"""Arrays that store the leaves: one each, or pieces where the shards share no common grid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.options import MAX_PIECES
from asyncckpt.planning.grid import choose_grid
from asyncckpt.planning.table import Column
from asyncckpt.spec import ArraySpec, ChunkGrid, Shard

PIECE_MARK = "%~"
"""Between the name of a leaf and the number of its piece. Names have `%` only before two
hexadecimal digits, as a whole part, or before `~` and a hash of 32 digits."""


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """One array leaf and its storage options.

    Attributes:
        name: name of the array in the database.
        spec: shape and dtype.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape; wins over `chunk_nbytes`.
        zstd_level: compression level; None stores the chunks as they are.
        tied_to: index of an earlier leaf with the same spec whose bytes this one shares; that
            leaf's layout holds for both.
        shards: all shards of the leaf; None for one that covers it.
    """

    name: str
    spec: ArraySpec
    chunk_nbytes: int
    chunk_shape: tuple[int, ...] | None = None
    zstd_level: int | None = None
    tied_to: int | None = None
    shards: tuple[Shard, ...] | None = None


Key = tuple[tuple[int, ...], str, int, tuple[int, ...] | None, int | None, tuple[Shard, ...] | None]
"""Shape, dtype, target size of a chunk, chunk shape, zstd level and shards of a leaf."""


@dataclass(frozen=True, slots=True)
class Part:
    """One array of one layout, shared by all leaves of that layout.

    Attributes:
        spec: shape and dtype of the array.
        grid: its chunk grid.
        offset: where it begins in its leaf.
        zstd_level: compression level, or None.
        shards: all shards of the leaf; None for one that covers it.
    """

    spec: ArraySpec
    grid: ChunkGrid
    offset: tuple[int, ...]
    zstd_level: int | None
    shards: tuple[Shard, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The arrays of a save, in leaf order, the pieces of a leaf by their offsets.

    Attributes:
        names: name per array: that of its leaf, with a number behind it for pieces.
        parts: the distinct arrays, whatever their names.
        part: index into `parts` per array.
        leaf: leaf per array.
        pieces: the arrays of each leaf that is stored as several.
        tied: per array that shares all bytes with an earlier one, that array.
        tied_leaves: the same per leaf.
        layouts: the distinct layouts of leaves.
        kind: index into `layouts` per leaf.
    """

    names: tuple[str, ...]
    parts: Sequence[Part]
    part: Column
    leaf: Column
    pieces: Mapping[int, range]
    tied: Mapping[int, int]
    tied_leaves: Mapping[int, int]
    layouts: Sequence[Key]
    kind: Column

    def of(self, array: int) -> Part:
        """Return shape, grid and offset of an array."""
        return self.parts[int(self.part[array])]


def plan_arrays(leaves: Sequence[LeafLayout], *, regular: bool) -> Arrays:
    """Return the arrays that store these leaves.

    Args:
        leaves: the array leaves in tree order.
        regular: every leaf is one array.

    Raises:
        UsageError: as `plan_save`.
        ValueError: `tied_to` is inconsistent.
    """
    tied_leaves: dict[int, int] = {}
    layouts: dict[Key, int] = {}
    parts_of: list[list[Part]] = []  # one computation per layout, however many leaves have it
    kinds = [0] * len(leaves)
    names = list(map(attrgetter("name"), leaves))
    for number, leaf in enumerate(leaves):
        if leaf.tied_to is not None:
            _check_tie(leaves, number, leaf.tied_to)
            tied_leaves[number] = tied_leaves.get(leaf.tied_to, leaf.tied_to)
            kinds[number] = kinds[tied_leaves[number]]
            continue
        spec, sizes = leaf.spec, (leaf.chunk_nbytes, leaf.chunk_shape, leaf.zstd_level)
        key: Key = (spec.shape, spec.dtype, *sizes, leaf.shards)
        kind = layouts.get(key)
        if kind is None:
            kind = layouts[key] = len(parts_of)
            parts_of.append(_parts(leaf, regular))
        kinds[number] = kind
    kind_of = np.array(kinds, np.int64)
    count_of = np.array(list(map(len, parts_of)), np.int64)
    base_of = np.cumsum(count_of) - count_of
    counts = count_of[kind_of]
    first = np.cumsum(counts) - counts
    owner = np.repeat(np.arange(len(leaves)), counts)
    pieces: dict[int, range] = {}
    if len(owner) > len(leaves):
        names = [names[i] for i in owner.tolist()]
        for i in np.flatnonzero(counts > 1).tolist():
            pieces[i] = range(first[i], first[i] + counts[i])
            for number, array in enumerate(pieces[i]):
                names[array] += f"{PIECE_MARK}{number}"
    if len(set(names)) < len(names):
        _refuse_repeated(names)
    tied: dict[int, int] = {}
    for i, other in tied_leaves.items():
        for number in range(counts[i]):
            tied[int(first[i]) + number] = int(first[other]) + number
    return Arrays(
        names=tuple(names),
        parts=list(itertools.chain.from_iterable(parts_of)),
        part=base_of[kind_of][owner] + np.arange(len(owner)) - first[owner],
        leaf=owner,
        pieces=pieces,
        tied=tied,
        tied_leaves=tied_leaves,
        layouts=list(layouts),
        kind=kind_of,
    )


def _check_tie(leaves: Sequence[LeafLayout], number: int, other: int) -> None:
    if not 0 <= other < number:
        raise ValueError(f"leaf {number} is tied to {other}, which is no earlier leaf")
    one, two = leaves[number], leaves[other]
    if one.spec != two.spec:
        raise ValueError(f"{one.name} is {one.spec} and tied to {two.name}, which is {two.spec}")


def _refuse_repeated(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(
                f"two leaves would be stored as the array {name!r}; rename one of them", path=name
            )
        seen.add(name)


def _parts(leaf: LeafLayout, regular: bool) -> list[Part]:
    """Return the arrays that store one leaf."""
    try:
        arrays = choose_grid(
            leaf.spec,
            leaf.shards,
            chunk_nbytes=leaf.chunk_nbytes,
            chunk_shape=leaf.chunk_shape,
            regular=regular,
        )
        if len(arrays) > MAX_PIECES:
            raise UsageError(
                f"the shards of {leaf.spec} lie on no common grid and would take {len(arrays)} "
                f"arrays, {MAX_PIECES} are allowed; shard it evenly, or pass a chunk_shape that "
                "divides all shards",
                expected=MAX_PIECES,
                found=len(arrays),
            )
    except UsageError as error:
        raise UsageError(
            f"{leaf.name}: {error}",
            path=leaf.name,
            stage="plan",
            expected=error.expected,
            found=error.found,
        ) from None
    parts: list[Part] = []
    for offset, grid in arrays:
        spec = ArraySpec(grid.shape, leaf.spec.dtype)
        parts.append(Part(spec, grid, offset, leaf.zstd_level, leaf.shards))
    return parts
