"""Coalescing of byte ranges into reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def coalesce(
    offsets: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    *,
    gap_nbytes: int,
    limit_nbytes: int,
    starts: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.int64]:
    """Return the index of the first extent of each group that is read as one range.

    A group grows while the gap to its next extent is at most `gap_nbytes` and the whole range at
    most `limit_nbytes`; a longer extent is a group of its own. Greedy from the left, which is
    also the least number of groups.

    Args:
        offsets: offsets of extents, sorted (within one file).
        nbytes: their lengths.
        gap_nbytes: longest run of unwanted bytes to read along.
        limit_nbytes: longest range.
        starts: extents that begin a group in any case, such as the first of another file.
    """
    if not len(offsets):
        return np.zeros(0, np.int64)
    ends = offsets + nbytes
    breaks = np.ones(len(offsets), bool)
    breaks[1:] = offsets[1:] - ends[:-1] > gap_nbytes
    if starts is not None:
        breaks |= starts
    firsts = np.flatnonzero(breaks)
    lasts = np.append(firsts[1:], len(offsets))
    # The ends of a run only grow when no extent lies within another; foreign files may have such.
    long = np.flatnonzero(np.maximum.reduceat(ends, firsts) - offsets[firsts] > limit_nbytes)
    more: list[int] = []
    for run in long.tolist():
        first, last = int(firsts[run]), int(lasts[run])
        reach = np.maximum.accumulate(ends[first:last])
        at = 0
        while True:
            limit = offsets[first + at] + limit_nbytes
            at = max(at + 1, int(np.searchsorted(reach, limit, side="right")))
            if first + at >= last:
                break
            more.append(first + at)
    return np.sort(np.concatenate([firsts, np.array(more, np.int64)]))
