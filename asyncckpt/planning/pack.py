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

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncckpt.planning.table import Column, Table

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


# Files go to so many streams in order, each to the one that is free first. Where every stream sends
# only a few, one last file that is as large as the others keeps the save waiting for it alone, up
# to a third of the time; somewhat smaller files fill that gap.

WAVES = 6
"""With more files per stream than this, the last ones hardly matter."""

STEPS = 16
"""Sizes are tried in steps of this share of the largest, down to half of it."""

NEAR = 1.02
"""The largest size within this factor of the shortest time is chosen: fewer objects."""

REQUEST_NBYTES = 4 << 20
"""What a stream would carry in the time that a request takes beside its transfer: 50 ms at
85 MB/s. A constant, so that plans do not change with every measurement."""

CHUNKS_MAX = 1 << 16
"""Trees with more chunks are skipped: packing them so often would take a second."""


def even_data_files(
    payloads: Sequence[int],
    alignments: Sequence[int],
    data_file_nbytes: int,
    slot_nbytes: int,
    streams: int,
) -> int:
    """Return the largest size of data files that keeps all streams busy to the end.

    Args:
        payloads: bytes of every chunk, in order.
        alignments: of every chunk.
        data_file_nbytes: the largest size; nothing below half of it is taken.
        slot_nbytes: size of a window.
        streams: uploads in flight.
    """
    if len(payloads) > CHUNKS_MAX:
        return data_file_nbytes
    seconds: list[tuple[int, float]] = []
    for part in range(STEPS, STEPS // 2 - 1, -1):
        size = data_file_nbytes * part // STEPS
        _, files, _ = pack(payloads, alignments, size, slot_nbytes)
        if part == STEPS and not 1 < len(files) <= WAVES * streams:
            return data_file_nbytes
        seconds.append((size, _end(files, streams)))
    shortest = min(end for _, end in seconds)
    return next(size for size, end in seconds if end <= NEAR * shortest)


def _end(files: Sequence[int], streams: int) -> float:
    """Return when the last file has been sent, in bytes of one stream."""
    free = [0.0] * streams
    for nbytes in files:
        heapq.heapreplace(free, free[0] + REQUEST_NBYTES + nbytes)
    return max(free)
