"""Packing of chunks into data files, and of data files into windows of one slot each."""

# Rule 1: a chunk lies in one data file. A chunk that would exceed the target size of a non-empty
#   file begins the next one, so only a file with a single chunk is longer than the target.
# Rule 2: chunks of `aligned_chunk_nbytes` or more start in the middle of a page, smaller ones at 8
#   bytes. AMD processors of several generations copy at a third of their speed (`rep movsb`, which
#   kernels and C libraries use) if the destination begins 1 to 31 bytes after the source, modulo
#   4 KiB. Large arrays begin 16 or 64 bytes into a page, so chunks must not begin at one.
# Rule 3: the CRC trailer lies in the same window as the last byte of its payload. Otherwise the
#   payload would end 0 to 3 bytes before a window's end, at one of four adjacent positions modulo
#   the slot; moving the chunk once by its alignment (8 bytes to half a slot) avoids all four.

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncckpt.planning.balance import least_loaded
from asyncckpt.planning.table import Column, Table, expanded

TRAILER_NBYTES = 4
"""The CRC-32C that zarr's crc32c codec appends to a chunk."""


class Piece(NamedTuple):
    """Part of one chunk's payload, at a position in a window.

    Attributes:
        array: the array that owns the chunk.
        row: the chunk.
        start: first byte of the part in the chunk's payload (C order, padding included).
        stop: one past its last byte.
        position: position of byte `start` in the window.
        last: the chunk ends here, and its trailer follows at `position + stop - start`.
    """

    array: int
    row: int
    start: int
    stop: int
    position: int
    last: bool


@dataclass(frozen=True, slots=True)
class Window:
    """Range of a data file that is staged in one slot.

    Attributes:
        file: number of the data file.
        offset: offset in the file, a multiple of the slot.
        nbytes: a whole slot, or less in the last window of a file.
        pieces: its contents by position; bytes between them are zero.
    """

    file: int
    offset: int
    nbytes: int
    pieces: Table[Piece]


def pack(
    payloads: Sequence[int],
    alignments: Sequence[int],
    data_file_nbytes: int,
    slot_nbytes: int,
    firsts: Collection[int] = (),
    *,
    phase_nbytes: int = 0,
) -> tuple[list[int], list[int], list[int]]:
    """Return the offset of each chunk, the length of each file, and its first chunk.

    Chunks in `firsts` always begin a file. Offsets are `phase_nbytes` modulo the alignment.
    """
    begins = frozenset(firsts)
    offsets: list[int] = []
    file_nbytes: list[int] = []
    turns = [0] if payloads else []
    tight = slot_nbytes - TRAILER_NBYTES
    end = 0
    for number, (payload, alignment) in enumerate(zip(payloads, alignments, strict=True)):
        for start in (end, 0):
            offset = start + (phase_nbytes - start) % alignment
            rest = (offset + payload) % slot_nbytes
            if not rest or rest > tight:
                offset += alignment
            stop = offset + payload + TRAILER_NBYTES
            if not start or (stop <= data_file_nbytes and number not in begins):
                break
            file_nbytes.append(start)
            turns.append(number)
        offsets.append(offset)
        end = stop
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
    """Return the windows of the planned data files, by file and offset."""
    lengths = np.array(file_nbytes, np.int64)
    window_counts = -(-lengths // slot_nbytes)
    first_window = np.cumsum(window_counts) - window_counts

    offset, payload = row_offset[planned], row_payload[planned]
    first, last = offset // slot_nbytes, (offset + payload - 1) // slot_nbytes
    which, place = expanded(last - first + 1)
    slot = first[which] + place
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


# Every stream sends whole files. If each sends only a few, the save could wait for a single extra
# or longer file. So there are equally many files per stream, of nearly equal length, and the
# longest is sent first.

WAVES = 6
"""Files per stream above which uneven last files hardly matter."""

SPARE = 1 / 32
"""Share of a file reserved for differences between files, trailers and alignment."""

REQUEST_NBYTES = 4 << 20
"""Bytes that a stream sends in 50 ms at 85 MB/s: latency dominates in shorter files."""

RUNS_PER_FILE = 16
"""Runs of consecutive small chunks per file: a restore of some leaves reads few ranges, and files
differ by less than one run."""


def even_count(nbytes: int, data_file_nbytes: int, streams: int) -> int:
    """Return how many files of at most about `data_file_nbytes` hold `nbytes`.

    If streams send few files each, all send equally many, unless files would be shorter than
    `REQUEST_NBYTES`.
    """
    full = max(1, -(-nbytes // data_file_nbytes))
    if full > WAVES * streams:
        return full
    least = max(1, math.ceil(nbytes / (data_file_nbytes * (1 - SPARE))))
    return min(-(-least // streams) * streams, max(least, nbytes // REQUEST_NBYTES))


def even_order(
    payloads: Column, data_file_nbytes: int, streams: int
) -> tuple[Column, list[int]] | None:
    """Return an order of the chunks that keeps all streams busy, and where each file begins in it.

    None if filling files one by one does so too: for a single file, or very many. A file has at
    most about `data_file_nbytes`; `streams` is the number of concurrent uploads.
    """
    nbytes = int(payloads.sum())
    files = even_count(nbytes, data_file_nbytes, streams)
    if files == 1 or files > WAVES * streams:
        return None
    run_nbytes = nbytes // files // RUNS_PER_FILE + 1
    run = np.unique(np.cumsum(payloads) // run_nbytes, return_inverse=True)[1]
    lengths = np.bincount(run, payloads).astype(np.int64)
    # Longest first, each into the shortest file so far.
    longest = np.argsort(-lengths, kind="stable")
    shortest = [(0, file) for file in range(min(files, len(lengths)))]
    file_of_run = np.zeros(len(lengths), np.int64)
    file_of_run[longest] = least_loaded(lengths[longest], shortest)
    shortest.sort(reverse=True)
    place = np.argsort([file for _, file in shortest])
    file_of = place[file_of_run[run]]
    order = np.argsort(file_of, kind="stable")
    return order, np.searchsorted(file_of[order], np.arange(len(shortest))).tolist()
