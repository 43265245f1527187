"""Plan of a save: arrays, chunks, data files, and the windows in which they are written.

`plan_save` makes every leaf one array, or several where its shards lie on no common grid, packs
the chunks of all arrays, in their order, into data files, and cuts the files into windows of one
slot each: the unit of staging, checksumming and writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from asyncckpt.planning.digest import plan_digest
from asyncckpt.planning.leaves import Arrays, LeafLayout, plan_arrays
from asyncckpt.planning.pack import (
    TRAILER_NBYTES,
    ChunkSources,
    Piece,
    Window,
    chunk_sources,
    cut_windows,
    pack,
)
from asyncckpt.planning.table import Column
from asyncckpt.planning.waves import even_data_files

__all__ = ["PLANNER_VERSION", "LeafLayout", "Piece", "SavePlan", "Window", "plan_save"]

PLANNER_VERSION = 2
"""Part of the digest: to be raised by every change that gives another plan for the same input."""

SMALL_ALIGNMENT_NBYTES = 8
"""Alignment of small chunks: copies between aligned words, for 4 bytes per chunk on average."""


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """Every array and every chunk of a save, and its place.

    A row is a chunk; rows are in the order of arrays, then C order.

    Attributes:
        arrays: the arrays.
        first_row: first row per array; a tied array has the rows of the one it shares.
        row_array: array that owns the row; `row - first_row` counts the cells of its grid.
        row_payload: bytes of the stored payload, padding included, without trailer; for compressed
            rows the size before compression.
        row_source: byte offset of the chunk in the C-order memory of a shard if it is one run of
            bytes there and the beginning of its payload, else -1.
        row_shard: that shard of the leaf; 0 for leaves without.
        row_data: bytes of the chunk inside the array: the length of that run.
        row_file: planned data file; -1 for inline and compressed rows.
        row_offset: offset of the payload in it; -1 likewise.
        inline: arrays whose only chunk stands in the B+tree.
        compressed: arrays whose chunks are appended when their size is known, in this order.
        file_nbytes: lengths of the planned data files.
        windows: the planned files, cut into slots, by file and offset.
        digest: SHA-256 (hex) of everything the plan depends on.
    """

    arrays: Arrays
    first_row: Column
    row_array: Column
    row_payload: Column
    row_source: Column
    row_shard: Column
    row_data: Column
    row_file: Column
    row_offset: Column
    inline: tuple[int, ...]
    compressed: tuple[int, ...]
    file_nbytes: tuple[int, ...]
    windows: tuple[Window, ...]
    digest: str


def plan_save(
    leaves: Sequence[LeafLayout],
    *,
    data_file_nbytes: int,
    slot_nbytes: int,
    page_nbytes: int,
    aligned_chunk_nbytes: int,
    inline_nbytes: int,
    regular: bool = False,
    even_streams: int | None = None,
) -> SavePlan:
    """Plan a save; equal arguments give equal plans in every process.

    Args:
        leaves: the array leaves in tree order.
        data_file_nbytes: target size of a data file.
        slot_nbytes: size of a window; a multiple of `page_nbytes`, at least two.
        page_nbytes: alignment of large chunks; a multiple of 8.
        aligned_chunk_nbytes: payload from which on a chunk is large.
        inline_nbytes: largest payload with trailer that stands in the B+tree.
        regular: every leaf is one array.
        even_streams: data files may be smaller, so that so many uploads end at the same time.

    Raises:
        UsageError: two arrays have one name, a chunk shape does not fit its leaf, or the shards of
            a leaf would take too many pieces, or with `regular` too many chunks; names the leaf.
        ValueError: sizes or `tied_to` are inconsistent.
    """
    if page_nbytes % SMALL_ALIGNMENT_NBYTES or page_nbytes < 1:
        raise ValueError(f"page_nbytes={page_nbytes} is not a positive multiple of 8")
    if slot_nbytes % page_nbytes or slot_nbytes < 2 * page_nbytes:
        raise ValueError(f"slot_nbytes={slot_nbytes} is not two pages of {page_nbytes} or more")
    arrays = plan_arrays(leaves, regular=regular)
    part, parts, tied = arrays.part, arrays.parts, arrays.tied
    sources_of = chunk_sources(parts)
    facts: list[tuple[int, int, bool]] = []
    for p in parts:
        payload_nbytes = p.grid.chunk_size * p.spec.itemsize
        facts.append((payload_nbytes, p.grid.chunk_count, p.zstd_level is not None))
    payload_of, count_of, zstd_of = np.array(facts, np.int64).reshape(-1, 3).T
    base_of = np.cumsum(count_of) - count_of
    owner = np.ones(len(part), bool)
    owner[list(tied)] = False

    counts = np.where(owner, count_of[part], 0)
    first_row = np.cumsum(counts) - counts
    row_array = np.repeat(np.arange(len(part)), counts)
    row_part = part[row_array]
    row_run = base_of[row_part] + np.arange(len(row_array)) - first_row[row_array]
    row_payload = payload_of[row_part]
    first_row[list(tied)] = first_row[list(tied.values())]
    none = ChunkSources(*np.zeros((3, 0), np.int64))
    row_source, row_shard, row_data = np.hstack([none, *sources_of])[:, row_run]

    compressed = (zstd_of[part] > 0) & (counts > 0)
    inline = (counts == 1) & ~compressed & (payload_of[part] + TRAILER_NBYTES <= inline_nbytes)
    planned = np.flatnonzero(~(inline | compressed)[row_array])
    payloads = row_payload[planned]
    large = payloads >= aligned_chunk_nbytes
    sizes = payloads.tolist()
    alignments = np.where(large, page_nbytes, SMALL_ALIGNMENT_NBYTES).tolist()
    if even_streams is not None:
        data_file_nbytes = even_data_files(
            sizes, alignments, data_file_nbytes, slot_nbytes, even_streams
        )
    offsets, file_nbytes, turns = pack(sizes, alignments, data_file_nbytes, slot_nbytes)
    row_file = np.full(len(row_array), -1, np.int64)
    row_offset = row_file.copy()
    row_file[planned] = np.repeat(np.arange(len(file_nbytes)), np.diff([*turns, len(planned)]))
    row_offset[planned] = offsets
    options = [data_file_nbytes, slot_nbytes, page_nbytes, aligned_chunk_nbytes, inline_nbytes]
    return SavePlan(
        arrays=arrays,
        first_row=first_row,
        row_array=row_array,
        row_payload=row_payload,
        row_source=row_source,
        row_shard=row_shard,
        row_data=row_data,
        row_file=row_file,
        row_offset=row_offset,
        inline=tuple(np.flatnonzero(inline).tolist()),
        compressed=tuple(np.flatnonzero(compressed).tolist()),
        file_nbytes=tuple(file_nbytes),
        windows=cut_windows(
            planned, row_array, row_file, row_offset, row_payload, file_nbytes, slot_nbytes
        ),
        digest=plan_digest(
            PLANNER_VERSION,
            [*options, int(regular)],
            list(map(attrgetter("name"), leaves)),
            arrays.kind,
            arrays.tied_leaves,
            arrays.layouts,
        ),
    )
