"""Where every byte of a save goes: chunks, data files, and the slots in which they are written.

`plan_save` packs the chunks of all leaves, in leaf order, into data files, and cuts the files
into windows of one slot each: the unit of staging, checksumming and writing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import UsageError
from asyncckpt.planning.grid import choose_grid, contiguous_runs
from asyncckpt.planning.pack import TRAILER_NBYTES, Piece, Window, cut_windows, pack
from asyncckpt.planning.table import Column
from asyncckpt.spec import ArraySpec, Box, ChunkGrid, Shard

__all__ = ["PLANNER_VERSION", "LeafLayout", "Piece", "SavePlan", "Window", "plan_save"]

PLANNER_VERSION = 1
"""Part of the digest: to be raised by every change that gives another plan for the same input."""

SMALL_ALIGNMENT_NBYTES = 8
"""Alignment of small chunks: copies between aligned words, for 4 bytes per chunk on average."""


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """One array leaf and how it is to be stored.

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


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Every chunk of a save and its place. A row is a chunk; rows are in leaf order, then C order.

    Attributes:
        leaves: the input.
        grids: chunk grid per leaf.
        first_row: first row per leaf; a tied leaf has the rows of the leaf it shares.
        row_array: leaf that owns the row; `row - first_row` counts the cells of its grid.
        row_payload: bytes of the stored payload, padding included, without trailer; for compressed
            rows the size before compression.
        row_source: byte offset of the chunk in the C-order array if it is one run of bytes there
            and the beginning of its payload, else -1.
        row_data: bytes of the chunk inside the array: the length of that run.
        row_file: planned data file; -1 for inline and compressed rows.
        row_offset: offset of the payload in it; -1 likewise.
        inline: leaves whose only chunk stands in the B+tree.
        compressed: leaves whose chunks are appended when their size is known, in this order.
        file_nbytes: lengths of the planned data files.
        windows: the planned files, cut into slots, by file and offset.
        nbytes: bytes of all arrays, tied ones counted once.
        digest: SHA-256 (hex) of everything the plan depends on.
    """

    leaves: tuple[LeafLayout, ...]
    grids: tuple[ChunkGrid, ...]
    first_row: Column
    row_array: Column
    row_payload: Column
    row_source: Column
    row_data: Column
    row_file: Column
    row_offset: Column
    inline: tuple[int, ...]
    compressed: tuple[int, ...]
    file_nbytes: tuple[int, ...]
    windows: tuple[Window, ...]
    nbytes: int
    digest: str


def plan_save(
    leaves: Sequence[LeafLayout],
    *,
    data_file_nbytes: int,
    slot_nbytes: int,
    page_nbytes: int,
    aligned_chunk_nbytes: int,
    inline_nbytes: int,
) -> SavePlan:
    """The plan of a save; equal arguments give equal plans in every process.

    Args:
        leaves: the array leaves in tree order.
        data_file_nbytes: target size of a data file.
        slot_nbytes: size of a window; a multiple of `page_nbytes`, at least two.
        page_nbytes: alignment of large chunks; a multiple of 8.
        aligned_chunk_nbytes: payload from which on a chunk is large.
        inline_nbytes: largest payload with trailer that stands in the B+tree.

    Raises:
        UsageError: two leaves have one name, a chunk shape does not fit its array, or the shards
            of a leaf cannot be stored as one regular array; names the leaf.
        ValueError: sizes or `tied_to` are inconsistent.
    """
    if page_nbytes % SMALL_ALIGNMENT_NBYTES or page_nbytes < 1:
        raise ValueError(f"page_nbytes={page_nbytes} is not a positive multiple of 8")
    if slot_nbytes % page_nbytes or slot_nbytes < 2 * page_nbytes:
        raise ValueError(f"slot_nbytes={slot_nbytes} is not two pages of {page_nbytes} or more")
    leaves = tuple(leaves)
    layouts: dict[_Key, int] = {}
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
        for leaf in leaves
    ]
    names = [leaf.name for leaf in leaves]
    tied = _ties(leaves)
    _check_names(names)
    kind = np.array(kinds, np.int64)
    digest = _digest(
        names,
        kind,
        tied,
        layouts,
        [data_file_nbytes, slot_nbytes, page_nbytes, aligned_chunk_nbytes, inline_nbytes],
    )
    owner = np.ones(len(leaves), bool)
    owner[list(tied)] = False

    # One entry per layout, however many leaves have it.
    firsts = dict(zip(reversed(kinds), reversed(range(len(leaves))), strict=True))
    grid_of = [_grid(leaves[firsts[i]]) for i in range(len(layouts))]
    itemsize_of = [leaves[firsts[i]].spec.itemsize for i in range(len(layouts))]
    runs_of = [
        contiguous_runs(grid, itemsize, np.arange(grid.chunk_count), Box.whole(grid.shape))
        for grid, itemsize in zip(grid_of, itemsize_of, strict=True)
    ]
    payload_of = np.array(
        [g.chunk_size * i for g, i in zip(grid_of, itemsize_of, strict=True)], np.int64
    )
    count_of = np.array([grid.chunk_count for grid in grid_of], np.int64)
    zstd_of = np.array([key[4] is not None for key in layouts], bool)
    base_of = np.cumsum(count_of) - count_of

    counts = np.where(owner, count_of[kind], 0)
    first_row = np.cumsum(counts) - counts
    row_array = np.repeat(np.arange(len(leaves)), counts)
    row_kind = kind[row_array]
    row_run = base_of[row_kind] + np.arange(len(row_array)) - first_row[row_array]
    row_payload = payload_of[row_kind]
    grids = [grid_of[i] for i in kinds]
    for leaf, other in tied.items():
        first_row[leaf] = first_row[other]
        grids[leaf] = grids[other]

    compressed = zstd_of[kind] & (counts > 0)
    inline = (counts == 1) & ~compressed & (payload_of[kind] + TRAILER_NBYTES <= inline_nbytes)
    planned = np.flatnonzero(~(inline | compressed)[row_array])
    payloads = row_payload[planned]
    large = payloads >= aligned_chunk_nbytes
    offsets, file_nbytes, turns = pack(
        payloads.tolist(),
        np.where(large, page_nbytes, SMALL_ALIGNMENT_NBYTES).tolist(),
        data_file_nbytes,
        slot_nbytes,
    )
    row_file = np.full(len(row_array), -1, np.int64)
    row_offset = row_file.copy()
    row_file[planned] = np.repeat(np.arange(len(file_nbytes)), np.diff([*turns, len(planned)]))
    row_offset[planned] = offsets
    return SavePlan(
        leaves=leaves,
        grids=tuple(grids),
        first_row=first_row,
        row_array=row_array,
        row_payload=row_payload,
        row_source=np.concatenate([start for start, _ in runs_of] or [first_row])[row_run],
        row_data=np.concatenate([nbytes for _, nbytes in runs_of] or [first_row])[row_run],
        row_file=row_file,
        row_offset=row_offset,
        inline=tuple(np.flatnonzero(inline).tolist()),
        compressed=tuple(np.flatnonzero(compressed).tolist()),
        file_nbytes=tuple(file_nbytes),
        windows=cut_windows(
            planned, row_array, row_file, row_offset, row_payload, file_nbytes, slot_nbytes
        ),
        nbytes=sum(
            leaves[firsts[i]].spec.nbytes * n
            for i, n in enumerate(np.bincount(kind[owner], minlength=len(layouts)).tolist())
        ),
        digest=digest,
    )


_Key = tuple[
    tuple[int, ...], str, int, tuple[int, ...] | None, int | None, tuple[Shard, ...] | None
]


def _ties(leaves: Sequence[LeafLayout]) -> dict[int, int]:
    """Per tied leaf the leaf it shares, which comes first in the order of leaves."""
    shared = [leaf.tied_to for leaf in leaves]
    tied = {i: other for i, other in enumerate(shared) if other is not None}
    for i, other in tied.items():
        if not 0 <= other < i:
            raise ValueError(f"leaf {i} is tied to {other}, which is no earlier leaf")
        if leaves[i].spec != leaves[other].spec:
            raise ValueError(
                f"{leaves[i].name} is {leaves[i].spec} and tied to {leaves[other].name}, "
                f"which is {leaves[other].spec}"
            )
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


def _grid(leaf: LeafLayout) -> ChunkGrid:
    try:
        pieces = choose_grid(
            leaf.spec, leaf.shards, chunk_nbytes=leaf.chunk_nbytes, chunk_shape=leaf.chunk_shape
        )
    except UsageError as error:
        raise UsageError(
            f"{leaf.name}: {error}",
            path=leaf.name,
            stage="plan",
            expected=error.expected,
            found=error.found,
        ) from None
    if len(pieces) > 1:
        count = sum(grid.chunk_count for _, grid in pieces)
        raise UsageError(
            f"{leaf.name}: the shards of {leaf.spec} lie on no regular grid; they would take "
            f'{len(pieces)} arrays with {count} chunks, and with layout="regular" a leaf is one '
            "array; shard it evenly, or pass a chunk_shape that divides all shards",
            path=leaf.name,
            stage="plan",
            expected=1,
            found=len(pieces),
        )
    return pieces[0][1]


def _digest(
    names: Sequence[str],
    kind: Column,
    tied: dict[int, int],
    layouts: dict[_Key, int],
    options: Sequence[int],
) -> str:
    """SHA-256 over an encoding that has one reading: lengths first, then what they measure."""
    header = json.dumps(
        {
            "version": PLANNER_VERSION,
            "options": options,
            "leaves": len(names),
            "tied": sorted(tied.items()),
            "layouts": [
                [
                    *key[:-1],
                    key[-1]
                    and [[s.box.offset, s.box.shape, sorted(set(s.holders))] for s in key[-1]],
                ]
                for key in layouts
            ],
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    text = "".join(names).encode("utf-8", "surrogatepass")
    lengths = np.fromiter(map(len, names), "<i8", len(names))
    parts = [len(header).to_bytes(8, "little"), header, lengths.tobytes()]
    return hashlib.sha256(b"".join([*parts, kind.astype("<i8").tobytes(), text])).hexdigest()
