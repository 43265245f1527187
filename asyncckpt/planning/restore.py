"""Plan of a restore: the ranges to read, and the destination of each chunk.

`plan_restore` takes stored arrays, the extents of their chunks, and the wanted boxes; it returns
ranges to read, each with its chunks and the requests that they serve.
"""

# Rule 1: every chunk is read once and whole, because its CRC covers all of it.
# Rule 2: overlaps of boxes and grids are computed; the cost depends on the overlapping chunks only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncckpt.planning.overlap import cells_between, runs_within
from asyncckpt.planning.table import Column, Table, expanded
from asyncckpt.spec import Box, ChunkGrid

TAIL_NBYTES = 1 << 20
"""Longest padding and trailer that are read together with a payload that goes to its target."""

SHORT_RUN_NBYTES = 512 << 10
"""Shortest run of rows in which short ones are read directly: another batch costs as much as
copying a few hundred kilobytes."""

OWN_BATCH_NBYTES = 1 << 20
"""Rows of this length are batches of their own: the chunks of a batch are decoded one after the
other, in one thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Wanted boxes of stored arrays, as columns without an object per box.

    Attributes:
        array: index of the array.
        box: the wanted part; None for the whole array.
        contiguous: the target's memory for the box is C-contiguous, has the stored dtype, and may
            be written directly.
    """

    array: Column
    box: Sequence[Box | None]
    contiguous: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class StoredArrays:
    """Many stored arrays, as columns without an object per array.

    Attributes:
        kinds: the distinct (grid, bytes per element, whether compressed).
        kind: index into `kinds` per array.
        first_row: first chunk row per array.
    """

    kinds: Sequence[tuple[ChunkGrid, int, bool]]
    kind: Column
    first_row: Column


class Part(NamedTuple):
    """One chunk that serves one request.

    Attributes:
        row: the chunk.
        request: index of the request.
        direct: byte offset in the target's memory at which the payload can be read directly; -1 if
            it is decoded in a buffer and placed by `intersection`.
        nbytes: bytes of the payload without padding and trailer; -1 if `direct` is -1.
    """

    row: int
    request: int
    direct: int
    nbytes: int


class ReadBatch(NamedTuple):
    """One range of one file, and all parts in it.

    Attributes:
        file: the file.
        offset: first byte.
        nbytes: length.
        parts: all parts of the chunks in it, by offset.
        direct: whether every chunk in it is read straight into the target of its only part.
    """

    file: int
    offset: int
    nbytes: int
    parts: Table[Part]
    direct: bool


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Reads of a restore.

    Attributes:
        batches: ranges by file and offset.
        inline: parts of inline rows, which are in no file, by row.
        read_nbytes: bytes of all batches, gaps included.
        rows: the required chunks, inline ones included.
        counts: number of parts of every request, including parts that are not read.
    """

    batches: tuple[ReadBatch, ...]
    inline: Table[Part]
    read_nbytes: int
    rows: Column
    counts: Sequence[int]


def plan_restore(
    arrays: StoredArrays,
    requests: Requests,
    *,
    row_file: Column,
    row_offset: Column,
    row_nbytes: Column,
    slot_nbytes: int,
    gap_nbytes: int,
    direct_nbytes: int,
    short_nbytes: int | None = None,
    only: npt.NDArray[np.bool_] | None = None,
) -> RestorePlan:
    """Plan the reads that serve all requests.

    Rows of `direct_nbytes` or more are read directly into their targets if they can be, as are
    those of `short_nbytes` or more in runs of `SHORT_RUN_NBYTES`; all others go through a buffer.
    Adjacent rows of one file and one of these kinds share batches, except those of
    `OWN_BATCH_NBYTES`.

    Args:
        arrays: the stored arrays.
        requests: the wanted boxes; empty ones need no reads.
        row_file: file of each row; -1 for inline rows.
        row_offset: offset of each row's extent.
        row_nbytes: length of each row's extent, trailer included.
        slot_nbytes: longest batch of several rows that go through a buffer.
        gap_nbytes: longest run of unwanted bytes inside a batch.
        direct_nbytes: minimum length of a row that is read directly.
        short_nbytes: the same within a run of such rows; None if it is no shorter.
        only: whether to read each row; None to read all wanted rows.

    Raises:
        ValueError: a request is outside its array.
    """
    row, request, direct, nbytes = _parts(arrays, requests)
    counts = np.bincount(request, minlength=len(requests.array)).tolist()
    if only is not None:
        kept = only[row]
        row, request, direct, nbytes = row[kept], request[kept], direct[kept], nbytes[kept]
    order = np.lexsort((request, row, row_offset[row], row_file[row]))
    row, request, direct, nbytes = row[order], request[order], direct[order], nbytes[order]
    fresh = np.ones(len(row), bool)
    fresh[1:] = row[1:] != row[:-1]
    leads = np.flatnonzero(fresh)
    wanted = row[leads]
    stored = row_file[wanted] >= 0

    part_edges = np.append(leads, len(row))
    into = stored & (np.diff(part_edges) == 1) & (direct[leads] >= 0)
    lengths = row_nbytes[wanted]
    tails = lengths - nbytes[leads]  # negative only in damaged foreign checkpoints
    least = direct_nbytes if short_nbytes is None else short_nbytes
    into &= (lengths >= least) & (tails >= 0) & (tails <= TAIL_NBYTES)
    run = np.append(0, np.cumsum(into[1:] != into[:-1]))[: len(into)]
    is_long = np.bincount(run, lengths) >= SHORT_RUN_NBYTES
    into &= (lengths >= direct_nbytes) | is_long[run]
    is_direct = into[np.cumsum(fresh) - 1]
    parts = (row, request, np.where(is_direct, direct, -1), np.where(is_direct, nbytes, -1))

    inline = int(np.count_nonzero(~stored))
    wanted, into, part_edges = wanted[inline:], into[inline:], part_edges[inline:]
    file, offset, length = row_file[wanted], row_offset[wanted], row_nbytes[wanted]
    starts = length >= OWN_BATCH_NBYTES
    starts[1:] |= starts[:-1] | (file[1:] != file[:-1]) | (into[1:] != into[:-1])
    # Extents of foreign files may overlap; those that are read directly must not.
    starts[1:] |= into[1:] & (offset[1:] < offset[:-1] + length[:-1])
    limits = np.where(into, OWN_BATCH_NBYTES, slot_nbytes)
    groups = coalesce(offset, length, gap_nbytes=gap_nbytes, limit_nbytes=limits, starts=starts)
    begins = offset[groups]
    sizes = np.maximum.reduceat(offset + length, groups) - begins if len(groups) else begins
    edges = part_edges[np.append(groups, len(wanted))]
    columns = (file[groups], begins, sizes, edges[:-1], edges[1:], into[groups])
    batches = tuple(
        ReadBatch(f, o, n, Table(Part, parts, i, j), direct)
        for f, o, n, i, j, direct in zip(*[column.tolist() for column in columns], strict=True)
    )
    return RestorePlan(
        batches=batches,
        inline=Table(Part, parts, 0, int(part_edges[0])),
        read_nbytes=int(sizes.sum()),
        rows=row[leads],
        counts=counts,
    )


def cells_overlapping(grid: ChunkGrid, box: Box) -> Column:
    """Return the chunks, numbered in C order, that hold elements of `box`."""
    if not box.size:
        return np.zeros(0, np.int64)
    cells = np.zeros((), np.int64)
    for o, n, c, count in zip(box.offset, box.shape, grid.chunk_shape, grid.counts, strict=True):
        cells = cells[..., None] * count + np.arange(o // c, -(-(o + n) // c))
    return cells.reshape(-1)


def intersection(
    grid: ChunkGrid, row_in_array: int, box: Box
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the intersection of a chunk and a box within the array.

    The first result indexes the chunk's payload, of shape `grid.chunk_shape`, the second an array
    of the box's shape.

    Raises:
        ValueError: they do not overlap.
    """
    in_chunk: list[slice] = []
    in_box: list[slice] = []
    rest = row_in_array
    for n, c, o, length in zip(
        grid.shape[::-1], grid.chunk_shape[::-1], box.offset[::-1], box.shape[::-1], strict=True
    ):
        rest, cell = divmod(rest, -(-n // c))
        start, stop = max(cell * c, o), min(cell * c + c, o + length)
        if start >= stop:
            raise ValueError(f"chunk {row_in_array} of {grid} holds nothing of {box}")
        in_chunk.append(slice(start - cell * c, stop - cell * c))
        in_box.append(slice(start - o, stop - o))
    return tuple(in_chunk[::-1]), tuple(in_box[::-1])


def _parts(stored: StoredArrays, requests: Requests) -> tuple[Column, Column, Column, Column]:
    """Return every chunk of every request, as the columns row, request, direct and nbytes."""
    array = requests.array
    # One computation per kind of array, for all its distinct wanted boxes.
    boxes = list(dict.fromkeys(requests.box))
    wanted = stored.kind[array] * 2 + requests.contiguous
    if len(boxes) > 1:
        number_of = dict(zip(boxes, range(len(boxes)), strict=True))
        box_of = np.array([number_of[box] for box in requests.box], np.int64)
        wanted = wanted * len(boxes) + box_of
    codes, want_of = np.unique(wanted, return_inverse=True)
    wants, numbers = np.divmod(codes, max(1, len(boxes)))
    found: list[tuple[Column, Column, Column, Column]] = []
    for want in np.unique(wants).tolist():
        grid, itemsize, compressed = stored.kinds[want >> 1]
        own = [boxes[number] for number in numbers[wants == want].tolist()]
        found.append(_overlaps(grid, itemsize, own, bool(want & 1) and not compressed))
    counts_of = np.concatenate([np.zeros(0, np.int64), *(counts for counts, *_ in found)])
    base_of = np.cumsum(counts_of) - counts_of
    request, place = expanded(counts_of[want_of])
    at = base_of[want_of][request] + place
    columns = np.hstack([np.zeros((3, 0), np.int64), *(own for _, *own in found)])
    rows, direct, nbytes = columns[:, at]
    return stored.first_row[array][request] + rows, request, direct, nbytes


def _overlaps(
    grid: ChunkGrid, itemsize: int, boxes: Sequence[Box | None], direct: bool
) -> tuple[Column, Column, Column, Column]:
    """Return the number of chunks that overlap each box (None: all), and three columns of chunks.

    The columns, box by box, are the number in the array and the results of `runs_within`.

    Raises:
        ValueError: a box extends beyond the array.
    """
    shape = grid.shape
    if boxes in ([None], [Box.whole(shape)]) and grid.chunk_shape == shape:
        # Nearly all small leaves: a single chunk, wanted whole.
        size = np.array([grid.chunk_size * itemsize], np.int64)
        return np.ones(1, np.int64), np.zeros(1, np.int64), np.array([direct - 1], np.int64), size
    given = [Box.whole(shape) if box is None else box for box in boxes]
    bad = next((box for box in given if len(box.shape) != len(shape)), None)
    if bad is None:
        form, whole = (len(given), len(shape)), np.array(shape, np.int64)
        offset = np.array([box.offset for box in given], np.int64).reshape(form)
        length = np.array([box.shape for box in given], np.int64).reshape(form)
        outside = (length > 0).all(1) & ((offset < 0) | (offset + length > whole)).any(1)
        bad = given[int(np.argmax(outside))] if outside.any() else None
    if bad is not None:
        raise ValueError(f"{bad} is not a part of an array of shape {shape}")
    chunk = np.array(grid.chunk_shape, np.int64)
    first = offset // chunk
    counts = -(-(offset + length) // chunk) - first
    counts[(length == 0).any(1)] = 0
    box_of, rows = cells_between(grid, first, counts)
    starts, nbytes = runs_within(
        grid, itemsize, rows, list(offset[box_of].T), list(length[box_of].T)
    )
    return counts.prod(axis=1), rows, starts if direct else np.full(len(rows), -1, np.int64), nbytes


def coalesce(
    offsets: Column,
    nbytes: Column,
    *,
    gap_nbytes: int,
    limit_nbytes: int | Column,
    starts: npt.NDArray[np.bool_],
) -> Column:
    """Return the index of the first extent of each group that is read as one range.

    A group grows while the gap to its next extent is at most `gap_nbytes` and the whole range at
    most `limit_nbytes` (an integer, or that of each group's first extent); a longer extent is a
    group of its own. Greedy grouping from the left gives the fewest groups.

    `offsets` are sorted within each file. Extents in `starts`, such as the first of a file, always
    begin a group.
    """
    if not len(offsets):
        return np.zeros(0, np.int64)
    ends = offsets + nbytes
    breaks = np.append(True, offsets[1:] - ends[:-1] > gap_nbytes)
    firsts = np.flatnonzero(breaks | starts)
    lasts = np.append(firsts[1:], len(offsets))
    # Extents of foreign files may be nested, so ends need not increase.
    limits = np.broadcast_to(limit_nbytes, offsets.shape)
    spans = np.maximum.reduceat(ends, firsts) - offsets[firsts]
    long = np.flatnonzero(spans > limits[firsts])
    more: list[int] = []
    for run in long.tolist():
        first, last = int(firsts[run]), int(lasts[run])
        reach = np.maximum.accumulate(ends[first:last])
        at = 0
        while True:
            limit = offsets[first + at] + limits[first + at]
            at = max(at + 1, int(np.searchsorted(reach, limit, side="right")))
            if first + at >= last:
                break
            more.append(first + at)
    return np.sort(np.concatenate([firsts, np.array(more, np.int64)]))
