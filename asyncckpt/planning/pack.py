"""Packing of chunks into data files, and of data files into windows of one slot each."""

# Rule 1: a chunk lies in one data file. A chunk that would end past the target size of a data file
#     begins the next one, unless the file is still empty; so a file is longer than the target only
#     if it holds a single chunk.
# Rule 2: chunks of `aligned_chunk_nbytes` or more start at a page, smaller ones at 8 bytes.
# Rule 3: the CRC trailer lies in the same window as the last byte of its payload. If not, the
#     payload ends 0 to 3 bytes before a window's end, one of four neighbouring positions modulo the
#     slot; moving the chunk by its alignment (8 bytes or more, at most half a slot) leaves these
#     four and cannot come round to them, so that one move is always enough.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncckpt.planning.grid import contiguous_runs, runs_within
from asyncckpt.planning.leaves import Part
from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.planning.restore import cells_overlapping
from asyncckpt.planning.table import Column, Table
from asyncckpt.spec import Box, ChunkGrid, Shard

TRAILER_NBYTES = 4
"""The CRC-32C that zarr's crc32c codec puts behind a chunk."""


class Piece(NamedTuple):
    """Part of one chunk's payload, at a place in a window.

    Attributes:
        array: index of the leaf that owns the chunk.
        row: the chunk.
        start: first byte of the part in the chunk's payload (C order, padding included).
        stop: one past its last byte.
        position: where byte `start` goes, relative to the window.
        last: the chunk ends here: its trailer follows at `position + stop - start`.
    """

    array: int
    row: int
    start: int
    stop: int
    position: int
    last: bool


@dataclass(frozen=True, slots=True)
class Window:
    """One slot's worth of one data file.

    Attributes:
        file: number of the data file.
        offset: offset in it, a multiple of the slot.
        nbytes: a whole slot, or less in the last window of a file.
        pieces: what goes in, by position; bytes between them are zero.
    """

    file: int
    offset: int
    nbytes: int
    pieces: Sequence[Piece]


def pack(
    payloads: Sequence[int], alignments: Sequence[int], data_file_nbytes: int, slot_nbytes: int
) -> tuple[list[int], list[int], list[int]]:
    """Return the offset of each chunk, the length of each file, and its first chunk."""
    offsets: list[int] = []
    file_nbytes: list[int] = []
    turns = [0] if payloads else []
    tight = slot_nbytes - TRAILER_NBYTES
    end = 0
    for payload, alignment in zip(payloads, alignments, strict=True):
        offset = end + -end % alignment
        rest = (offset + payload) % slot_nbytes
        if not rest or rest > tight:
            offset += alignment
        if end and offset + payload + TRAILER_NBYTES > data_file_nbytes:
            file_nbytes.append(end)
            turns.append(len(offsets))
            rest = payload % slot_nbytes
            offset = alignment if not rest or rest > tight else 0
        offsets.append(offset)
        end = offset + payload + TRAILER_NBYTES
    if end:
        file_nbytes.append(end)
    return offsets, file_nbytes, turns


def cut_windows(
    planned: Column,
    row_array: Column,
    row_file: Column,
    row_offset: Column,
    row_payload: Column,
    file_nbytes: Sequence[int],
    slot_nbytes: int,
) -> tuple[Window, ...]:
    lengths = np.array(file_nbytes, np.int64)
    window_counts = -(-lengths // slot_nbytes)
    first_window = np.cumsum(window_counts) - window_counts

    offset, payload = row_offset[planned], row_payload[planned]
    first, last = offset // slot_nbytes, (offset + payload - 1) // slot_nbytes
    counts = last - first + 1
    which = np.repeat(np.arange(len(planned)), counts)
    slot = first[which] + np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
    begin = slot * slot_nbytes - offset[which]
    start = np.maximum(begin, 0)
    stop = np.minimum(begin + slot_nbytes, payload[which])
    row = planned[which]
    columns = (row_array[row], row, start, stop, start - begin, slot == last[which])
    window_file = np.repeat(np.arange(len(lengths)), window_counts)
    number = np.arange(len(window_file))
    window_offset = (number - first_window[window_file]) * slot_nbytes
    window_nbytes = np.minimum(slot_nbytes, lengths[window_file] - window_offset)
    at_window = np.arange(len(window_file) + 1)
    edges = np.searchsorted(first_window[row_file[row]] + slot, at_window).tolist()
    windows: list[Window] = []
    places = (window_file.tolist(), window_offset.tolist(), window_nbytes.tolist())
    for file, at, nbytes, i, j in zip(*places, edges[:-1], edges[1:], strict=True):
        windows.append(Window(file, at, nbytes, Table(Piece, columns, i, j)))
    return tuple(windows)


TABLE_CELLS_PER_SHARD = 64
"""Largest table of which cell of a common grid is in which shard; beyond, shards are asked one by
one. Those of a mesh have about as many cells as there are shards."""


class ChunkSources(NamedTuple):
    """The sources of an array's chunks, in C order of its grid.

    Attributes:
        start: byte offset of the chunk in the C-order memory of its shard, if it is one run of
            bytes there and the beginning of its payload, else -1.
        shard: that shard; 0 where there is none, or no such run.
        nbytes: bytes of the chunk inside the array.
    """

    start: Column
    shard: Column
    nbytes: Column


def chunk_sources(parts: Sequence[Part]) -> list[ChunkSources]:
    """Return the sources of each array; of equal shards the first counts."""
    found: list[ChunkSources] = []
    shards: tuple[Shard, ...] | None = None
    for part in parts:
        if part.shards is None:
            whole = Box.whole(part.grid.shape)
            rows = np.arange(part.grid.chunk_count)
            start, nbytes = contiguous_runs(part.grid, part.spec.itemsize, rows, whole)
            found.append(ChunkSources(start, np.zeros(len(rows), np.int64), nbytes))
            continue
        if part.shards is not shards:  # pieces of one leaf are neighbours
            shards = part.shards
            held = _Shards(shards)
        found.append(held.sources(part.grid, part.spec.itemsize, part.offset))
    return found


class _Shards:
    """Index of the shards of one leaf, by which the sources of its arrays are found."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        boxes = [shard.box for shard in shards]
        rank = len(boxes[0].shape) if boxes else 0
        self._index = BoxIndex(boxes)
        self._starts = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), rank)
        self._shapes = np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), rank)

    def sources(self, grid: ChunkGrid, itemsize: int, offset: tuple[int, ...]) -> ChunkSources:
        """Return the sources of an array that begins at `offset` of the leaf."""
        rows = np.arange(grid.chunk_count)
        _, nbytes = contiguous_runs(grid, itemsize, rows, Box.whole(grid.shape))
        near = np.sort(self._index.meeting(Box(offset, grid.shape)))
        # A shard may hold parts of several arrays, and in memory reach past this one.
        starts, shapes = self._starts[near] - np.array(offset, np.int64), self._shapes[near]
        holder = _holders(grid, rows, starts, starts + shapes)
        inside = np.flatnonzero(holder >= 0)
        holder = holder[inside]
        runs, _ = runs_within(
            grid, itemsize, rows[inside], list(starts[holder].T), list(shapes[holder].T)
        )
        start, shard = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
        start[inside] = runs
        shard[inside] = np.where(runs >= 0, near[holder], 0)
        return ChunkSources(start, shard, nbytes)


def _holders(
    grid: ChunkGrid,
    rows: Column,
    starts: npt.NDArray[np.int64],
    stops: npt.NDArray[np.int64],
) -> Column:
    """Return, per chunk, the first shard that holds its first element, or -1.

    Chunks that no shard holds whole may get any shard.
    """
    if not len(rows) or not len(starts):
        return np.full(len(rows), -1, np.int64)
    if not grid.shape:
        return np.zeros(len(rows), np.int64)
    cells = np.unravel_index(rows, grid.counts)
    corners = [cell.astype(np.int64) * c for cell, c in zip(cells, grid.chunk_shape, strict=True)]
    edges = [np.unique([starts[:, i], stops[:, i]]) for i in range(len(corners))]
    counts = tuple(len(cuts) - 1 for cuts in edges)
    if math.prod(counts) > TABLE_CELLS_PER_SHARD * len(starts):
        found = np.full(len(rows), -1, np.int64)
        for number in reversed(range(len(starts))):
            first = np.maximum(starts[number], 0)
            last = np.minimum(stops[number], grid.shape)
            # A chunk that several shards hold in parts is a run of none of them.
            part = Box(tuple(first.tolist()), tuple((last - first).tolist()))
            found[cells_overlapping(grid, part)] = number
        return found
    low = [np.searchsorted(cuts, starts[:, i]) for i, cuts in enumerate(edges)]
    high = [np.searchsorted(cuts, stops[:, i]) for i, cuts in enumerate(edges)]
    table = np.full(counts, -1, np.int64)
    single = np.all([b - a == 1 for a, b in zip(low, high, strict=True)], axis=0)
    one = np.flatnonzero(single)[::-1]  # of equal shards the first is written last
    table[tuple(column[one] for column in low)] = one
    for number in np.flatnonzero(~single)[::-1].tolist():
        where = tuple(slice(a[number], b[number]) for a, b in zip(low, high, strict=True))
        table[where] = number
    at_cell = [
        np.searchsorted(cuts, corner, side="right") - 1
        for cuts, corner in zip(edges, corners, strict=True)
    ]
    known = np.all([(at >= 0) & (at < n) for at, n in zip(at_cell, counts, strict=True)], axis=0)
    index = tuple(np.where(known, at, 0) for at in at_cell)
    return np.where(known, table[index], -1)
