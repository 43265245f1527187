"""Arrays that store the leaves: one each, or pieces if the shards have no common grid."""

from __future__ import annotations

import itertools
from collections import Counter
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
"""Separator between a leaf's name and the number of its piece. Elsewhere in names, `%` precedes two
hexadecimal digits, or `~` and a hash of 32 digits, or is a whole part."""


class LeafLayout(NamedTuple):
    """One array leaf and its storage options.

    Attributes:
        name: name of the array in the database.
        spec: shape and dtype.
        chunk_nbytes: target size of a chunk in bytes.
        chunk_shape: exact chunk shape; overrides `chunk_nbytes`.
        zstd_level: compression level; None for no compression.
        tied_to: index of an earlier leaf of the same spec whose bytes and layout this one shares.
        shards: all shards of the leaf on all processes; None for one that covers it.
        partition: how all processes divide the leaf; `shards` are then only this process's own,
            possibly none.
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
    """One array of a layout, shared by all leaves with that layout.

    Attributes:
        spec: shape and dtype of the array.
        grid: its chunk grid.
        offset: its offset in the leaf.
        layout: the first leaf with that layout.
    """

    spec: ArraySpec
    grid: ChunkGrid
    offset: tuple[int, ...]
    layout: LeafLayout


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """The arrays of a save, in leaf order, the pieces of a leaf by offset.

    All processes that save together have equal arrays, except for the shards in `parts`. Chunks
    are numbered over all arrays in order, within each array in C order.

    Attributes:
        names: per array, the name of its leaf, followed by a number for pieces.
        parts: the distinct arrays, regardless of names.
        part: per array, its index into `parts`.
        leaf: per array, its leaf.
        pieces: the arrays of each leaf that is stored in pieces.
        tied: the earlier array with the same bytes, by tied array.
        first_chunk: per array, the number of its first chunk; tied arrays share it.
        inline: arrays whose only chunk is inline in the B+tree, without tied ones.
        part_chunks: per part, its number of chunks.
        part_payload: per part, the payload bytes of a chunk before compression.
        part_is_compressed: per part, whether its chunks are compressed.
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
        """Return the part of an array."""
        return self.parts[int(self.part[array])]


def plan_arrays(
    leaves: Sequence[LeafLayout],
    names: Sequence[str],
    *,
    regular: bool,
    inline_nbytes: int,
    holders: Holders,
) -> Arrays:
    """Return the arrays that store these leaves; arguments and errors as for `plan_save`."""
    tied_leaves: dict[int, int] = {}
    divisions: dict[Hashable, int] = {}
    parts_of: list[list[Part]] = []  # by layout
    kinds: list[int] = []  # layout of every leaf
    # By `id`, because leaves and their fields live as long as `leaves`.
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
            division = _division(leaf, holders, divisions)
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
        name = next(name for name, count in Counter(names).items() if count > 1)
        raise UsageError(
            f"two leaves would be stored as the array {name!r}; rename one of them", path=name
        )
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


def _division(leaf: LeafLayout, holders: Holders, numbers: dict[Hashable, int]) -> int:
    """Return a number for the way in which processes divide or hold a leaf.

    `numbers` has the known ways; the fields of their leaves must stay alive.
    """
    shards, partition = leaf.shards, leaf.partition
    # By `id` first, because hashing a partition would dominate the cost of a leaf.
    objects = id(shards), id(partition), id(leaf.holders)
    number = numbers.get(objects)
    if number is None:
        if shards is None and partition is None:
            key: Hashable = holders.number(leaf.holders)
        else:
            held = [(s.box.offset, s.box.shape, holders.number(s.holders)) for s in shards or ()]
            key = tuple(held), partition
        number = numbers[objects] = numbers.setdefault(key, len(numbers))
    return number


def _parts(leaf: LeafLayout, regular: bool, *, several: bool) -> list[Part]:
    """Return the arrays that store one leaf; `several` processes save it together."""
    division = leaf.shards if leaf.partition is None else leaf.partition
    if several and travels_in_parts(leaf.spec, division):
        # Process 0 assembles it from all processes' parts as one uncompressed chunk.
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
    dtype = leaf.spec.dtype
    return [Part(array_spec(grid.shape, dtype), grid, offset, leaf) for offset, grid in arrays]
