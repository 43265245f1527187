"""Runs: which boxes of an array a range of its C-order elements covers.

A chunk travels through buffers that are smaller than it, in C order. Where neither side is one
contiguous run of bytes, a range of elements is taken apart into boxes whose elements are
consecutive, so that each can be copied by one strided copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from asyncckpt.spec import Box


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that together hold elements `start` to `stop` of an array, in C order.

    Every box is a run of consecutive elements; their number is at most twice the rank.
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
