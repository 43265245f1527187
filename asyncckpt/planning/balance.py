"""Sets of processes that hold chunks, and the balanced choice of the writer of each chunk."""

# Rule 1: all holders of a chunk compute the same result, although each knows only its own chunks.
#   Chunks are assigned per set of holders, larger sets first: the loads that a set balances come
#   only from sets that include it, which all of its members know.
# Rule 2: large chunks go one by one to the process with the least to write; small ones follow in
#   contiguous runs that even out the difference.

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from asyncckpt.planning.table import Column

Processes = tuple[int, ...]


class Holders:
    """The sets of processes that hold the leaves and shards of one process's plan.

    A set may have thousands of members. The same object is hashed and compared only once, so that
    a leaf costs the same in small and large jobs.

    Attributes:
        sets: the distinct sets by number, each sorted.
        includes_own: whether each set includes this process.
    """

    def __init__(self, process: int = 0, process_count: int = 1) -> None:
        self.process = process
        self.process_count = process_count
        self.sets: list[Processes] = []
        self.includes_own: list[bool] = []
        self._numbers: dict[Processes, int] = {}
        # Keeps the objects alive, because another object could get the same id.
        self._seen: dict[int, tuple[Processes | None, int]] = {}

    def number(self, processes: Processes | None) -> int:
        """Return the number of a set; None means all processes."""
        seen = self._seen.get(id(processes))
        if seen is not None:
            return seen[1]
        every = range(self.process_count)
        members = tuple(sorted(set(every if processes is None else processes)))
        number = self._numbers.setdefault(members, len(self.sets))
        if number == len(self.sets):
            self.sets.append(members)
            self.includes_own.append(self.process in members)
        self._seen[id(processes)] = processes, number
        return number

    def common(self, numbers: Iterable[int]) -> int:
        """Return the number of the intersection of these sets."""
        distinct = sorted(set(numbers))
        if len(distinct) == 1:
            return distinct[0]
        shared = set.intersection(*(set(self.sets[number]) for number in distinct))
        return self.number(tuple(shared))


LARGE_SHARE = 64
"""Chunks of at least 1/64 of an equal share are large: runs of smaller ones balance to 2 %."""

LARGE_MAX = 1 << 14
"""Maximum number of chunks that are assigned one by one, in about 10 ms."""


def assign_writers(nbytes: Column, kind: Column, holders: Sequence[Processes]) -> Column:
    """Return the process that writes each chunk, one of its holders.

    A process writes at most one chunk more than an equal share of the chunks of a class.

    Args:
        nbytes: size of each chunk in bytes.
        kind: index of each chunk into `holders`.
        holders: per class, the processes that hold its chunks; distinct, as `Holders.sets`.
    """
    writers = np.empty(len(nbytes), np.int64)
    if not len(nbytes):
        return writers
    # Stable, so that runs are contiguous within a class.
    order = np.argsort(kind, kind="stable")
    used, firsts = np.unique(kind[order], return_index=True)
    rows_of = dict(zip(used.tolist(), np.split(order, firsts[1:]), strict=True))
    done: list[tuple[Column, Column]] = []
    for number in sorted(rows_of, key=lambda number: (-len(holders[number]), holders[number])):
        rows, processes = rows_of[number], holders[number]
        members = np.array(processes, np.int64)
        loads = np.zeros(len(members), np.int64)
        for others, written in done:
            at = np.searchsorted(others, members).clip(max=len(others) - 1)
            if len(others) > len(members) and (others[at] == members).all():
                loads += written[at]
        turns = _assign(nbytes[rows], loads)
        writers[rows] = members[turns]
        done.append((members, _sums(turns, nbytes[rows], len(members))))
    return writers


def _assign(nbytes: Column, loads: Column) -> Column:
    """Return the index of the writer of each chunk; `loads` are the bytes already assigned."""
    count = len(loads)
    turns = np.zeros(len(nbytes), np.int64)
    if count == 1:
        return turns
    sizes = np.argsort(-nbytes, kind="stable")
    large = sizes[: int(np.count_nonzero(nbytes * (LARGE_SHARE * count) >= nbytes.sum()))]
    large = large[:LARGE_MAX]
    # Other processes get no large chunk. A sorted list is a heap.
    first = np.argsort(loads, kind="stable")[: len(large)]
    least = list(zip(loads[first].tolist(), first.tolist(), strict=True))
    turns[large] = least_loaded(nbytes[large], least)
    small = np.ones(len(nbytes), bool)
    small[large] = False
    rest = np.flatnonzero(small)
    if not len(rest):
        return turns
    loads = loads + _sums(turns[large], nbytes[large], count)
    ends = np.cumsum(nbytes[rest])
    # A chunk goes where its middle falls, counted in half bytes.
    limits = np.cumsum(2 * _room(loads, int(ends[-1])))
    found = np.searchsorted(limits, 2 * ends - nbytes[rest], side="right")
    last = int(np.searchsorted(limits, limits[-1]))
    turns[rest] = np.minimum(found, last)
    return turns


def least_loaded(sizes: Column, loads: list[tuple[int, int]]) -> list[int]:
    """Assign each size, in order, to the number with the least load; return these numbers.

    `loads` is a heap of (load, number), and is updated.
    """
    chosen: list[int] = []
    for size in sizes.tolist():
        load, number = loads[0]
        chosen.append(number)
        heapq.heapreplace(loads, (load + size, number))
    return chosen


def _sums(turns: Column, nbytes: Column, count: int) -> Column:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, turns, nbytes)  # exact, unlike bincount with weights
    return sums


def _room(loads: Column, nbytes: int) -> Column:
    """Return how many of `nbytes` each process gets to equalise the loads."""
    order = np.sort(loads)
    # The first k processes whose common level does not exceed the next one's load.
    levels = (nbytes + np.cumsum(order)) // np.arange(1, len(loads) + 1)
    reached = np.flatnonzero(np.append(levels[:-1] <= order[1:], True))
    room: Column = np.maximum(levels[reached[0]] - loads, 0)
    return room
