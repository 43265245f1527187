"""Streams of bytes that several processes want, cut into batches that they exchange.

A *stream* is the stored bytes of all chunks that the same processes, its members, want. Each member
reads a piece of every batch, and receives the rest from the others.
"""

# Rule 1: a stream depends only on the chunk index and the message of process 0, so that all members
#   cut it into the same batches.
# Rule 2: batches are numbered. A process takes part in at most one batch of each number, in
#   increasing order, so that no two processes wait for each other.

from __future__ import annotations

import bisect
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.planning.table import Column, expanded

PIECE_MIN_NBYTES = 16 << 10
"""Smallest piece per process; above 4,096 members, batches become larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """Chunks that several processes want.

    Attributes:
        members: per stream, the two or more processes that want it, ascending.
        stream: per chunk, its stream; -1 if fewer than two processes want it.
    """

    members: Sequence[tuple[int, ...]]
    stream: Column

    def encoded(self) -> bytes:
        """Encode this as a message."""
        sizes = list(map(len, self.members))
        members = itertools.chain.from_iterable(self.members)
        head = np.array([len(sizes), *sizes, *members], np.int64)
        return _packed(np.concatenate([head, self.stream]))

    @classmethod
    def decoded(cls, message: bytes) -> Sharing:
        """Decode a message."""
        values = _unpacked(message)
        first = 1 + int(values[0])
        *members, stream = np.split(values[first:], np.cumsum(values[1:first]))
        return cls([tuple(each.tolist()) for each in members], stream)


def encoded_rows(rows: Column) -> bytes:
    """Encode the chunks that a process wants as a message of runs of chunk numbers."""
    wanted = np.unique(rows)
    begins = np.flatnonzero(np.diff(wanted, prepend=-2) != 1)
    counts = np.diff(begins, append=len(wanted))
    return _packed(np.stack([wanted[begins], wanted[begins] + counts], axis=1).reshape(-1))


def _decoded_rows(message: bytes) -> Column:
    starts, stops = _unpacked(message).reshape(-1, 2).T
    run, place = expanded(stops - starts)
    return starts[run] + place


def _packed(values: Column) -> bytes:
    # Differences of runs compress to almost nothing.
    return zlib.compress(np.diff(values, prepend=0).astype("<i8").tobytes(), 1)


def _unpacked(message: bytes) -> Column:
    return np.cumsum(np.frombuffer(zlib.decompress(message), "<i8"))


def share(wanted: Mapping[int, bytes], row_count: int) -> Sharing:
    """Return the chunks that several processes want, given the `encoded_rows` of each process.

    The cost depends on the number of distinct messages: replicas send equal ones.
    """
    alike: dict[bytes, list[int]] = {}
    for process in sorted(wanted):
        alike.setdefault(wanted[process], []).append(process)
    wants = list(map(_decoded_rows, alike))
    # Chunks belong to one stream if the same sets contain them. Two sums of random numbers per set
    # identify these sets: among a million chunks, they collide once in 10^26 restores.
    names = np.random.default_rng(0).integers(1 << 63, size=(len(wants), 2), dtype=np.uint64)
    sums = np.zeros((row_count, 2), np.uint64)
    counts = np.zeros(row_count, np.int64)
    for rows, name, processes in zip(wants, names, alike.values(), strict=True):
        sums[rows] += name
        counts[rows] += len(processes)
    shared = np.flatnonzero(counts > 1)
    stream = np.full(row_count, -1, np.int64)
    if not len(shared):
        return Sharing([], stream)
    sums = sums[shared]
    order = np.lexsort(sums.T)
    fresh = np.append(True, (sums[order[1:]] != sums[order[:-1]]).any(axis=1))
    first = np.sort(order[fresh])  # streams in the order of their first chunks
    stream[shared[order]] = np.searchsorted(first, order[fresh])[np.cumsum(fresh) - 1]
    members: list[list[int]] = [[] for _ in first]
    for rows, processes in zip(wants, alike.values(), strict=True):
        for each in np.unique(stream[rows]).tolist():
            if each >= 0:
                members[each] += processes
    return Sharing([tuple(sorted(each)) for each in members], stream)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Stored bytes that several processes want.

    Attributes:
        members: these processes, ascending.
        rows: its chunks, in order.
        file: data file of each chunk.
        offset: offset of each chunk in its file.
        begin: offset of each chunk in the stream; the last entry is the length of the stream.
        piece_nbytes: bytes of a batch that each member reads; fewer in the last batch.
        first_batch: number of its first batch.
    """

    members: tuple[int, ...]
    rows: Column
    file: Column
    offset: Column
    begin: Column
    piece_nbytes: int
    first_batch: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return int(self.begin[-1])

    @property
    def batch_nbytes(self) -> int:
        """Bytes of each batch except the last."""
        return self.piece_nbytes * len(self.members)

    @property
    def batches(self) -> range:
        """Numbers of its batches."""
        count = -(-self.nbytes // self.batch_nbytes)
        return range(self.first_batch, self.first_batch + count)

    def piece(self, process: int, batch: int) -> tuple[int, int]:
        """Return begin and end, in the stream, of the piece of a batch that a member reads."""
        begin, end, share = self._batch(batch)
        begin += bisect.bisect_left(self.members, process) * share
        return min(begin, end), min(begin + share, end)

    def _batch(self, batch: int) -> tuple[int, int, int]:
        """Return begin and end of a batch, and the bytes of each piece except the last."""
        begin = (batch - self.first_batch) * self.batch_nbytes
        end = min(begin + self.batch_nbytes, self.nbytes)
        return begin, end, -(-(end - begin) // len(self.members))

    def parts(self, batch: int) -> list[slice]:
        """Return the slices of the joined pieces of all members that hold the bytes of a batch."""
        begin, end, share = self._batch(batch)
        if share == self.piece_nbytes:  # no gaps
            return [slice(0, end - begin)]
        return [
            slice(number * self.piece_nbytes, number * self.piece_nbytes + min(share, end - start))
            for number, start in enumerate(range(begin, end, share))
        ]

    def ranges(self, begin: int, end: int, gap_nbytes: int) -> list[Range]:
        """Return the ranges of files that hold bytes `begin` to `end` of the stream, in order.

        A range may include gaps of up to `gap_nbytes`.
        """
        found: list[Range] = []
        if begin >= end:
            return found
        first = int(np.searchsorted(self.begin, begin, side="right")) - 1
        last = int(np.searchsorted(self.begin, end, side="left"))
        columns = (self.file, self.offset, self.begin[:-1], self.begin[1:])
        rows = zip(*(column[first:last].tolist() for column in columns), strict=True)
        reached = 0  # end of the last range in its file
        for file, offset, start, stop in rows:
            skipped = max(begin - start, 0)
            at, nbytes = offset + skipped, min(stop, end) - start - skipped
            gap, reached = at - reached, at + nbytes
            if not found or found[-1].file != file or not 0 <= gap <= gap_nbytes:
                found.append(Range(file, at, [nbytes], []))
            elif gap:
                found[-1].gaps.append(gap)
                found[-1].runs.append(nbytes)
            else:
                found[-1].runs[-1] += nbytes
        return found


@dataclass(frozen=True, slots=True)
class Range:
    """One range of a file: runs of wanted bytes, with gaps between them.

    Attributes:
        file: number of the data file.
        offset: offset of the first run.
        runs: lengths of the runs.
        gaps: lengths of the gaps, one fewer.
    """

    file: int
    offset: int
    runs: list[int]
    gaps: list[int]


def streams(
    sharing: Sharing,
    *,
    file: Column,
    offset: Column,
    nbytes: Column,
    first_batch: int,
    batch_nbytes: int,
) -> list[Stream]:
    """Return the streams of a restore, by number, given the file, offset and length of each chunk.

    Streams without common members are exchanged concurrently. Inline chunks, whose `file` is -1,
    belong to no stream.
    """
    rows = np.flatnonzero((sharing.stream >= 0) & (file >= 0))
    rows = rows[np.lexsort((offset[rows], file[rows], sharing.stream[rows]))]
    edges = np.searchsorted(sharing.stream[rows], np.arange(len(sharing.members) + 1))
    free: dict[int, int] = {}
    found: list[Stream] = []
    for number, members in enumerate(sharing.members):
        own = rows[edges[number] : edges[number + 1]]
        stream = Stream(
            members,
            own,
            file[own],
            offset[own],
            np.concatenate([[0], np.cumsum(nbytes[own])]),
            piece_nbytes(len(members), batch_nbytes),
            max(free.get(member, first_batch) for member in members),
        )
        free.update(dict.fromkeys(members, stream.batches.stop))
        found.append(stream)
    return found


def piece_nbytes(member_count: int, batch_nbytes: int) -> int:
    """Return how many bytes of a batch each member reads."""
    return max(PIECE_MIN_NBYTES, batch_nbytes // member_count)
