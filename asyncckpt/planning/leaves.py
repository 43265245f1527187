"""Arrays that store the leaves: one each, or pieces if the shards have no common grid."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import UsageError
from asyncckpt.options import MAX_PIECES
from asyncckpt.planning.balance import Holders
from asyncckpt.planning.grid import choose_grid, travels_in_parts
from asyncckpt.planning.pack import TRAILER_NBYTES
from asyncckpt.planning.table import Column, expanded
from asyncckpt.spec import ArraySpec, ChunkGrid, Partition, Shard, array_spec

PIECE_MARK = "%~"
"""Separates the name of a leaf from the number of its piece. In names, `%` is followed by two
hexadecimal digits, or by `~` and a hash of 32 digits, or is a whole part."""


class LeafLayout(NamedTuple):
    """One array leaf and its storage options.

    Attributes:
        name: name of the array in the database.
        spec: shape and dtype.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape; wins over `chunk_nbytes`.
        zstd_level: compression level; None stores the chunks as they are.
        tied_to: index of an earlier leaf with the same spec whose bytes this one shares, and
            whose layout it has.
        shards: all shards of the leaf over all processes; None for one that covers it.
        partition: how all processes divide the leaf; then `shards` are only those that this
            process holds, possibly none.
        holders: the processes that hold a leaf without shards; None for all.
    """

    name: str
    spec: ArraySpec
    chunk_nbytes: int
    chunk_shape: tuple[int, ...] | None = None
    zstd_level: int | None = None
    tied_to: int | None = None
    shards: tuple[Shard, ...] | None = None
    partition: Partition | None = None
    holders: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a layout, shared by all leaves that have the layout.

    Attributes:
        spec: shape and dtype of the array.
        grid: its chunk grid.
        offset: where it begins in its leaf.
        layout: the first leaf of that layout.
    """

    spec: ArraySpec
    grid: ChunkGrid
    offset: tuple[int, ...]
    layout: LeafLayout


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The arrays of a save, in leaf order, the pieces of a leaf by their offsets.

    They are equal in all processes that save together, except for the shards in `parts`. Chunks
    are numbered over all arrays in order, each array's in C order.

    Attributes:
        names: name per array: that of its leaf, followed by a number for pieces.
        parts: the distinct arrays, regardless of names.
        part: index into `parts` per array.
        leaf: leaf per array.
        pieces: the arrays of each leaf that is stored as several.
        tied: the earlier array with the same bytes, by tied array.
        first_chunk: number of the first chunk per array; tied arrays have the same one.
        chunk_count: number of chunks in all.
        inline: arrays whose only chunk is inline in the B+tree, without tied ones.
        part_chunks: number of chunks per part.
        part_payload: payload bytes of a chunk per part, before compression.
        part_is_compressed: whether chunks are compressed, per part.
    """

    names: tuple[str, ...]
    parts: Sequence[Part]
    part: Column
    leaf: Column
    pieces: Mapping[int, range]
    tied: Mapping[int, int]
    first_chunk: Column
    chunk_count: int
    inline: Column
    part_chunks: Column
    part_payload: Column
    part_is_compressed: npt.NDArray[np.bool_]

    def of(self, array: int) -> Part:
        """Return shape, grid and offset of an array."""
        return self.parts[int(self.part[array])]


def plan_arrays(
    leaves: Sequence[LeafLayout],
    names: Sequence[str],
    *,
    regular: bool,
    inline_nbytes: int,
    holders: Holders,
) -> Arrays:
    """Return the arrays that store these leaves; arguments as for `plan_save`.

    Raises:
        UsageError, ValueError: as `plan_save`.
    """
    tied_leaves: dict[int, int] = {}
    divisions = _Divisions(holders)
    parts_of: list[list[Part]] = []  # of every distinct layout
    kinds: list[int] = []  # the layout of every leaf
    # By `id`: leaves and their fields are alive as long as `leaves` is.
    of_object: dict[int, int] = {}
    known: dict[Hashable, int] = {}
    for leaf, identity in zip(leaves, map(id, leaves), strict=True):
        kind = of_object.get(identity)
        if kind is not None:
            kinds.append(kind)
            continue
        _, spec, nbytes, shape, level, tied_to, shards, partition, processes = leaf
        if tied_to is not None:
            number = len(kinds)
            tied_leaves[number] = tied_leaves.get(tied_to, tied_to)
            kinds.append(kinds[tied_to])
            continue
        division = None
        if shards is not None or partition is not None or processes is not None:
            division = divisions.number(leaf)
        key = (spec.shape, spec.dtype, nbytes, shape, level, division)
        kind = known.get(key)
        if kind is None:
            kind = known[key] = of_object[identity] = len(parts_of)
            parts_of.append(_parts(leaf, regular, several=holders.process_count > 1))
        kinds.append(kind)
    kind_of = np.array(kinds, np.int64)
    count_of = np.array(list(map(len, parts_of)), np.int64)
    base_of = np.cumsum(count_of) - count_of
    counts = count_of[kind_of]
    first = np.cumsum(counts) - counts
    owner, place = expanded(counts)
    names = list(names)
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
    parts = list(itertools.chain.from_iterable(parts_of))
    part = base_of[kind_of][owner] + place
    facts: list[tuple[int, int, bool]] = []
    for p in parts:
        payload_nbytes = p.grid.chunk_size * p.spec.itemsize
        facts.append((p.grid.chunk_count, payload_nbytes, p.layout.zstd_level is not None))
    chunks_of, payload_of, zstd_of = np.array(facts, np.int64).reshape(-1, 3).T
    small_of = (zstd_of == 0) & (payload_of + TRAILER_NBYTES <= inline_nbytes)
    chunks = chunks_of[part]
    chunks[list(tied)] = 0
    first_chunk = np.cumsum(chunks) - chunks
    first_chunk[list(tied)] = first_chunk[list(tied.values())]
    return Arrays(
        names=tuple(names),
        parts=parts,
        part=part,
        leaf=owner,
        pieces=pieces,
        tied=tied,
        first_chunk=first_chunk,
        chunk_count=int(chunks.sum()),
        inline=np.flatnonzero((chunks == 1) & small_of[part]),
        part_chunks=chunks_of,
        part_payload=payload_of,
        part_is_compressed=zstd_of > 0,
    )


class _Divisions:
    """The distinct ways in which processes divide or hold leaves, by number."""

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._numbers: dict[Hashable, int] = {}
        # By `id`: hashing a partition costs more than all else for a leaf.
        self._of_objects: dict[tuple[int, int, int], int] = {}

    def number(self, leaf: LeafLayout) -> int:
        """Return the number of the division of a leaf, whose fields must stay alive."""
        shards, partition = leaf.shards, leaf.partition
        objects = id(shards), id(partition), id(leaf.holders)
        number = self._of_objects.get(objects)
        if number is None:
            number_of = self._holders.number
            if shards is None and partition is None:
                key: Hashable = number_of(leaf.holders)
            else:
                held = [(s.box.offset, s.box.shape, number_of(s.holders)) for s in shards or ()]
                key = tuple(held), partition
            number = self._numbers.setdefault(key, len(self._numbers))
            self._of_objects[objects] = number
        return number


def _refuse_repeated(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(
                f"two leaves would be stored as the array {name!r}; rename one of them", path=name
            )
        seen.add(name)


def _parts(leaf: LeafLayout, regular: bool, *, several: bool) -> list[Part]:
    """Return the arrays that store one leaf; `several` processes save it together."""
    division = leaf.shards if leaf.partition is None else leaf.partition
    if several and travels_in_parts(leaf.spec, division):
        # Process 0 assembles it from the others' parts: one chunk, not compressed.
        leaf = leaf._replace(chunk_shape=None, zstd_level=None)
    try:
        arrays = choose_grid(
            leaf.spec,
            division,
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
        error.path, error.stage = leaf.name, "plan"
        raise
    parts: list[Part] = []
    for offset, grid in arrays:
        spec = array_spec(grid.shape, leaf.spec.dtype)
        parts.append(Part(spec, grid, offset, leaf))
    return parts
