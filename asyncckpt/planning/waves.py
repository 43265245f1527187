"""Size of data files with which all uploads of a save end at about the same time.

Files go to so many streams in order, each to the one that is free first. Where every stream sends
only a few, one last file that is as large as the others keeps the save waiting for it alone, up to
a third of the time; somewhat smaller files fill that gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from asyncckpt.planning.pack import pack

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
