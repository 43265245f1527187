"""Balanced assignment of chunks to the processes that write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def assign_writers(
    row_nbytes: npt.ArrayLike,
    row_class: npt.ArrayLike,
    holders: Sequence[Sequence[int]],
) -> npt.NDArray[np.int64]:
    """Return the process that writes each chunk, one of its holders.

    The chunks of one holder class, in their order, are split into one contiguous run per holder,
    so that the bytes of each holder differ from an equal share by less than one chunk of the class.

    Args:
        row_nbytes: size of each chunk in bytes.
        row_class: index into `holders` of each chunk.
        holders: per class, the processes that hold its chunks. Their order does not matter; a
            process named twice holds two replicas and counts once; equal sets are one class.

    Raises:
        ValueError: a chunk has no holder.
    """
    nbytes = np.asarray(row_nbytes, np.int64)
    named = np.asarray(row_class, np.int64)
    classes: dict[tuple[int, ...], int] = {}
    merged = np.array(
        [classes.setdefault(tuple(sorted(set(h))), len(classes)) for h in holders], np.int64
    )
    writers = np.empty(len(nbytes), np.int64)
    if not len(nbytes):
        return writers
    if named.min() < 0 or named.max() >= len(holders):
        raise ValueError(f"row_class must index the {len(holders)} holder classes")
    kind = merged[named]
    # Stable: within a class the chunks keep their order, and runs are contiguous in it.
    order = np.argsort(kind, kind="stable")
    edges = np.searchsorted(kind[order], np.arange(len(classes) + 1))
    for processes, first, stop in zip(classes, edges, edges[1:], strict=False):
        rows = order[first:stop]
        if not len(rows):
            continue
        if not processes:
            raise ValueError(f"chunk {rows[0]} has no holder")
        # Twice the middle of each chunk in the prefix sum: a chunk goes where its middle falls.
        ends = np.cumsum(nbytes[rows])
        middles = 2 * ends - nbytes[rows]
        total = int(ends[-1])
        count = len(processes)
        shares = [-(-2 * total * i // count) for i in range(1, count)]
        turns = np.searchsorted(np.array(shares, np.int64), middles, side="right")
        writers[rows] = np.array(processes, np.int64)[turns]
    return writers
