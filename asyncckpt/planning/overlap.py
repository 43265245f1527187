"""Arithmetic of boxes, chunks and runs of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from asyncckpt.planning.chunk_shape import cut_axis
from asyncckpt.planning.table import Column, expanded
from asyncckpt.spec import Box, ChunkGrid

_NONE = np.zeros(0, np.int64)
_FIRST = np.zeros(1, np.int64)


class BoxIndex:
    """Index of the boxes of one array, to find those that overlap a given box.

    The boxes are sorted along the axis on which most of them differ; a query considers only the
    boxes that overlap it on this axis. An array of rank 0 is treated as a line of one element.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._only = boxes[0] if len(boxes) == 1 else None
        if self._only is not None:
            return  # sorting would take longer than many queries
        rank = max(1, len(boxes[0].shape)) if boxes else 1
        starts = np.array([box.offset or 0 for box in boxes], np.int64).reshape(len(boxes), rank)
        shapes = np.array([box.shape or 1 for box in boxes], np.int64).reshape(len(boxes), rank)
        self._axis = int(np.argmax([len(np.unique(column)) for column in starts.T]))
        order = np.argsort(starts[:, self._axis], kind="stable")
        self._order = order
        self._starts = starts[order]
        self._stops = self._starts + shapes[order]
        self._filled = np.asarray((shapes[order] > 0).all(axis=1))
        # Running maxima never decrease: a binary search finds the first box that reaches a start.
        self._reach = np.maximum.accumulate(self._stops[:, self._axis])

    def meeting(self, box: Box) -> Column:
        """Return the numbers of the boxes that share elements with `box`, unordered."""
        if self._only is not None:
            return _NONE if self._only.intersect(box) is None else _FIRST
        if not box.size:
            return _NONE
        start = np.array(box.offset or (0,), np.int64)
        stop = np.array(box.stop or (1,), np.int64)
        first = int(np.searchsorted(self._reach, start[self._axis], side="right"))
        last = int(np.searchsorted(self._starts[:, self._axis], stop[self._axis], side="left"))
        starts, stops = self._starts[first:last], self._stops[first:last]
        meets = np.all(starts < stop, axis=1) & np.all(stops > start, axis=1)
        found: Column = self._order[first:last][meets & self._filled[first:last]]
        return found

    def parts(self, box: Box) -> Iterator[tuple[int, Box, Any]]:
        """Yield the number of each box that shares elements with `box`, and where they are.

        The second value is their box relative to the numbered one, the third their index in an
        array with the values of `box`, which always makes a view.
        """
        for number in self.meeting(box).tolist():
            held = self._boxes[number]
            common = held.intersect(box)
            assert common is not None
            index = (*common.relative_to(box.offset).slices(), ...)
            yield number, common.relative_to(held.offset), index


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield at most 2 × rank boxes that hold elements `start` to `stop` of an array, in C order.

    Every box is a run of consecutive elements.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, head, tail)
        return
    if head:
        yield from _in_row(shape, first, head, row)
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(shape, last, 0, tail)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((index, *box.offset), (1, *box.shape))


def runs(shape: tuple[int, ...], itemsize: int, target_nbytes: int) -> Iterator[Box]:
    """Yield boxes that tile the array in C order, of the target size or less, in few shapes.

    Every box is a run of consecutive elements; a single element may exceed the target size.
    """
    size = math.prod(shape)
    if not shape or size * itemsize <= target_nbytes:
        if size:
            yield Box.whole(shape)
        return
    axis, rows = cut_axis(shape, itemsize, target_nbytes)
    grid = ChunkGrid(shape, (*(1,) * axis, rows, *shape[axis + 1 :]))
    yield from map(grid.box, grid.cells())


def cells_between(grid: ChunkGrid, first: Column, counts: Column) -> tuple[Column, Column]:
    """Return the range and the C-order number of each chunk in ranges of cells.

    `first` and `counts`, the first cell and the number of cells, have a row per range and a column
    per axis.
    """
    which, place = expanded(counts.prod(axis=1))
    cells, stride = np.zeros(len(which), np.int64), 1
    for axis in reversed(range(len(grid.shape))):
        place, at = np.divmod(place, counts[which, axis])
        cells += (first[which, axis] + at) * stride
        stride *= grid.counts[axis]
    return which, cells


def runs_within(
    grid: ChunkGrid,
    itemsize: int,
    rows: Column,
    offsets: Sequence[int | Column],
    shapes: Sequence[int | Column],
) -> tuple[Column, Column]:
    """Return each chunk's byte offset in the C-order memory of a box, and its size in bytes.

    The offset is -1 unless the chunk lies whole in the box as one run of bytes that is also the
    beginning of its payload (so that padding trails). The size excludes elements outside the array.

    Args:
        grid: chunk grid of the array.
        itemsize: bytes per element.
        rows: numbers of chunks in the array.
        offsets: per axis, the offset of the box in the array, or a column with one per row.
        shapes: likewise the lengths of the box, which may extend beyond the array.
    """
    if not len(rows) or not grid.shape:
        return np.zeros(len(rows), np.int64), np.full(len(rows), itemsize, np.int64)
    cells = np.unravel_index(rows, grid.counts)
    inside = np.ones(len(rows), bool)
    in_box, box_full, in_chunk, chunk_full = (np.ones(len(rows), bool) for _ in range(4))
    offset = np.zeros(len(rows), np.int64)
    nbytes = np.full(len(rows), itemsize, np.int64)
    stride: int | Column = itemsize
    for cell, n, c, first, length in zip(
        cells[::-1],
        grid.shape[::-1],
        grid.chunk_shape[::-1],
        offsets[::-1],
        shapes[::-1],
        strict=True,
    ):
        start = cell.astype(np.int64) * c - first
        held = np.minimum(c, n - first - start)
        inside &= (start >= 0) & (start + held <= length)
        # A part is one run if, after leading axes of length 1, at most one axis is not full.
        in_box = ((held == 1) & in_box) | box_full
        in_chunk = ((held == 1) & in_chunk) | chunk_full
        box_full &= held == length
        chunk_full &= held == c
        offset += start * stride
        nbytes *= held
        stride = stride * length
    return np.where(inside & in_box & in_chunk, offset, -1), nbytes
