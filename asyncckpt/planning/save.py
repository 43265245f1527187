"""Plan of a save: arrays, chunks, data files, and the windows in which they are written.

`plan_save` stores every leaf as one array, or as several if its shards have no common grid. It
packs the chunks of all arrays in order into data files, and cuts the files into windows of one slot
each, the unit of staging, checksumming and writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncckpt.planning.balance import Holders, assign_writers
from asyncckpt.planning.held import HeldBox, held_chunks
from asyncckpt.planning.leaves import Arrays, LeafLayout, plan_arrays
from asyncckpt.planning.pack import Window, cut_windows, even_order, pack
from asyncckpt.planning.table import Column

SMALL_ALIGNMENT_NBYTES = 8
"""Alignment of small chunks, for word-aligned copies; costs 4 bytes per chunk on average."""


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """The arrays of a save, and the chunks of them that one process holds.

    A row is a chunk that the process holds; rows are in the order of arrays, then C order. Rows
    that another holder writes are only compared. If a process saves alone, rows and chunks have
    equal numbers.

    Attributes:
        arrays: the arrays, equal on all processes.
        row_array: array of the chunk.
        row_chunk: number of the chunk over all arrays and processes; `row_chunk -
            arrays.first_chunk` is its cell in the array's grid.
        row_writer: process that writes the chunk.
        row_shared: whether other processes also hold the chunk.
        row_payload: bytes of the payload, padding included, without trailer, before compression.
        row_source: byte offset of the chunk in the C-order memory of a shard if it is one run of
            bytes there and the beginning of its payload, else -1.
        row_shard: number of that shard among the process's own; 0 for leaves without shards.
        row_data: bytes of the chunk inside the array, the length of that run.
        row_file: planned data file; -1 for inline and compressed rows and those of other writers.
        row_offset: offset of the payload in it; -1 likewise.
        inline: rows of arrays whose only chunk is inline in the B+tree.
        compressed: rows that are packed once their size is known, in this order.
        parts: boxes of small sharded leaves that the process does not hold whole; the writer of
            each sends it to process 0, which makes the chunk unless some process holds it whole.
        file_nbytes: lengths of the planned data files.
        windows: the planned files, cut into slots, by file and offset.
    """

    arrays: Arrays
    row_array: Column
    row_chunk: Column
    row_writer: Column
    row_shared: npt.NDArray[np.bool_]
    row_payload: Column
    row_source: Column
    row_shard: Column
    row_data: Column
    row_file: Column
    row_offset: Column
    inline: tuple[int, ...]
    compressed: tuple[int, ...]
    parts: tuple[HeldBox, ...]
    file_nbytes: tuple[int, ...]
    windows: tuple[Window, ...]


def plan_save(
    leaves: Sequence[LeafLayout],
    names: Sequence[str] | None = None,
    *,
    data_file_nbytes: int,
    slot_nbytes: int,
    page_nbytes: int,
    aligned_chunk_nbytes: int,
    inline_nbytes: int,
    regular: bool = False,
    even_streams: int | None = None,
    process: int = 0,
    process_count: int = 1,
) -> SavePlan:
    """Plan one process's part in a save.

    Equal arguments give equal plans. The processes of one save pass equal leaves, except for the
    shards of leaves with a partition; their plans have equal arrays, and one writer per chunk.

    Args:
        leaves: the array leaves of all processes in tree order; leaves that differ only in their
            names may be one object.
        names: names of the leaves; None to use `LeafLayout.name`.
        data_file_nbytes: target size of a data file.
        slot_nbytes: size of a window: a multiple of `page_nbytes`, two pages or more.
        page_nbytes: alignment of large chunks, which start in the middle of a page; a multiple
            of 16.
        aligned_chunk_nbytes: minimum payload of a large chunk.
        inline_nbytes: largest payload with trailer that is inline in the B+tree.
        regular: store every leaf as one array.
        even_streams: number of uploads that should end at the same time, for which data files may
            be smaller.
        process: number of the process to plan for.
        process_count: number of processes that save together. A single one holds every shard.

    Raises:
        UsageError: two arrays have the same name, a chunk shape does not fit its leaf, or the
            shards of a leaf need too many pieces, or with `regular` too many chunks; its `path` is
            the name of the array.
        ValueError: sizes are inconsistent, or the shards of a leaf do not tile it.
    """
    if slot_nbytes % page_nbytes or slot_nbytes < 2 * page_nbytes:
        raise ValueError(f"slot_nbytes={slot_nbytes} is not two pages of {page_nbytes} or more")
    holders = Holders(process, process_count)
    names = [leaf.name for leaf in leaves] if names is None else names
    arrays = plan_arrays(
        leaves, names, regular=regular, inline_nbytes=inline_nbytes, holders=holders
    )
    row_array, held, parts = held_chunks(arrays, holders)
    row_part = arrays.part[row_array]
    payload = arrays.part_payload[row_part]
    writer, shared = np.zeros(len(row_array), np.int64), np.zeros(len(row_array), bool)
    mine = np.ones(len(row_array), bool)
    if process_count > 1:
        shared = np.array([len(members) > 1 for members in holders.sets], bool)[held.holders]
        writer = assign_writers(payload, held.holders, holders.sets)
        mine = writer == process
    compressed = arrays.part_is_compressed[row_part] & mine
    is_inline = np.zeros(len(arrays.part), bool)
    is_inline[arrays.inline] = True
    inline = is_inline[row_array] & mine
    planned = np.flatnonzero(mine & ~(inline | compressed))
    limit_nbytes, firsts = data_file_nbytes, list[int]()
    if even_streams is not None:
        even = even_order(payload[planned], data_file_nbytes, even_streams)
        if even is not None:
            planned, firsts, limit_nbytes = planned[even[0]], even[1], slot_nbytes
    payloads = payload[planned]
    large = payloads >= aligned_chunk_nbytes
    sizes = payloads.tolist()
    alignments = np.where(large, page_nbytes, SMALL_ALIGNMENT_NBYTES).tolist()
    offsets, file_nbytes, turns = pack(
        sizes, alignments, limit_nbytes, slot_nbytes, firsts, phase_nbytes=page_nbytes // 2
    )
    row_file = np.full(len(row_array), -1, np.int64)
    row_offset = row_file.copy()
    row_file[planned] = np.repeat(np.arange(len(file_nbytes)), np.diff([*turns, len(planned)]))
    row_offset[planned] = offsets
    return SavePlan(
        arrays=arrays,
        row_array=row_array,
        row_chunk=arrays.first_chunk[row_array] + held.cell,
        row_writer=writer,
        row_shared=shared,
        row_payload=payload,
        row_source=held.start,
        row_shard=held.shard,
        row_data=held.nbytes,
        row_file=row_file,
        row_offset=row_offset,
        inline=tuple(np.flatnonzero(inline).tolist()),
        compressed=tuple(np.flatnonzero(compressed).tolist()),
        parts=parts,
        file_nbytes=tuple(file_nbytes),
        windows=cut_windows(
            planned, row_array, row_file, row_offset, payload, file_nbytes, slot_nbytes
        ),
    )
