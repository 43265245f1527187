"""Arrays that store the leaves: one each, or pieces where the shards share no common grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        nbytes: bytes of all leaves, tied ones counted once.
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
    nbytes: int

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
    tied_leaves = _ties(leaves)
    owners = leaves
    if tied_leaves:
        owners = [leaves[tied_leaves.get(i, i)] for i in range(len(leaves))]
    layouts: dict[Key, int] = {}
    kinds = [
        layouts.setdefault(
            (
                (spec := leaf.spec).shape,
                spec.dtype,
                leaf.chunk_nbytes,
                leaf.chunk_shape,
                leaf.zstd_level,
                leaf.shards,
            ),
            len(layouts),
        )
        for leaf in owners
    ]
    kind = np.array(kinds, np.int64)
    # One computation per layout, however many leaves have it.
    firsts = dict(zip(reversed(kinds), reversed(range(len(leaves))), strict=True))
    models = [owners[firsts[i]] for i in range(len(layouts))]
    parts_of = [_parts(model, regular) for model in models]

    count_of = np.array([len(parts) for parts in parts_of], np.int64)
    base_of = np.cumsum(count_of) - count_of
    counts = count_of[kind]
    first = np.cumsum(counts) - counts
    leaf = np.repeat(np.arange(len(leaves)), counts)
    names = [leaf.name for leaf in leaves]
    pieces = {i: range(first[i], first[i] + counts[i]) for i in np.flatnonzero(counts > 1).tolist()}
    if pieces:
        names = [names[i] for i in leaf.tolist()]
        for arrays in pieces.values():
            for number, array in enumerate(arrays):
                names[array] += f"{PIECE_MARK}{number}"
    _check_names(names)
    untied = np.ones(len(leaves), bool)
    untied[list(tied_leaves)] = False
    uses = np.bincount(kind[untied], minlength=len(models)).tolist()
    return Arrays(
        names=tuple(names),
        parts=[part for parts in parts_of for part in parts],
        part=base_of[kind][leaf] + np.arange(len(leaf)) - first[leaf],
        leaf=leaf,
        pieces=pieces,
        tied={
            int(first[i]) + number: int(first[other]) + number
            for i, other in tied_leaves.items()
            for number in range(counts[i])
        },
        tied_leaves=tied_leaves,
        layouts=list(layouts),
        kind=kind,
        nbytes=sum(model.spec.nbytes * n for model, n in zip(models, uses, strict=True)),
    )


def _ties(leaves: Sequence[LeafLayout]) -> dict[int, int]:
    """Return, per tied leaf, the leaf that owns the bytes."""
    tied: dict[int, int] = {}
    shared = [leaf.tied_to for leaf in leaves]
    for i, other in [(i, other) for i, other in enumerate(shared) if other is not None]:
        if not 0 <= other < i:
            raise ValueError(f"leaf {i} is tied to {other}, which is no earlier leaf")
        if leaves[i].spec != leaves[other].spec:
            raise ValueError(
                f"{leaves[i].name} is {leaves[i].spec} and tied to {leaves[other].name}, "
                f"which is {leaves[other].spec}"
            )
        tied[i] = tied.get(other, other)
    return tied


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) == len(names):
        return
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
    dtype = leaf.spec.dtype
    return [
        Part(ArraySpec(grid.shape, dtype), grid, offset, leaf.zstd_level, leaf.shards)
        for offset, grid in arrays
    ]
