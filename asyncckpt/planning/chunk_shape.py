"""Chunk shapes that subdivide an array or a cell of its grid, within limits."""

# Rule 1: a chunk is a contiguous run of the array or cell, if the limits allow.
# Rule 2: the limits override the target size; a chunk exceeds it if there is no other cut.

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

PADDING_DIVISOR = 50
"""Padding stays within 1/50 = 2 % of the array."""

CHUNKS_PER_TARGET = 4
"""Maximum number of chunks per (bytes / target + distinct shards)."""

Lengths = Callable[[int, int], tuple[Iterable[int], Iterable[int]]]
"""Length of an axis and the rows that fit a target -> the lengths of cells that may cut the axis:
those that fit, longest first, then the others, shortest first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the chunk shape of one array."""

    shape: tuple[int, ...]
    itemsize: int
    target: int
    shards: int
    strict: bool

    def few(self, chunk: tuple[int, ...]) -> bool:
        """Return whether chunks of this shape are few enough."""
        return self.allow(math.prod(-(-n // c) for n, c in zip(self.shape, chunk, strict=True)))

    def allow(self, chunks: int) -> bool:
        """Return whether the array may have this many chunks."""
        nbytes = self.itemsize * math.prod(self.shape)
        return chunks * self.target <= CHUNKS_PER_TARGET * (nbytes + self.shards * self.target)

    def tight(self, chunk: tuple[int, ...]) -> bool:
        """Return whether the padding of chunks of this shape is small enough."""
        if not self.strict:
            return True
        padded = math.prod(-(-n // c) * c for n, c in zip(self.shape, chunk, strict=True))
        return (padded - math.prod(self.shape)) * PADDING_DIVISOR <= math.prod(self.shape)


def cut_freely(limits: Limits) -> tuple[int, ...]:
    """Return a chunk shape for an array that may be cut anywhere."""
    chunk = _first_allowed(limits, limits.shape, _even_lengths)
    # The last candidate takes all rows along the axis: no padding, few chunks (< bytes / target).
    assert chunk is not None
    return chunk


def cut_exactly(limits: Limits, cell: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a chunk shape that divides the cell exactly; None if none is within the limits."""
    return _first_allowed(limits, cell, _exact_lengths)


def _first_allowed(
    limits: Limits, cell: tuple[int, ...], lengths: Lengths
) -> tuple[int, ...] | None:
    """Return the best chunk shape within the limits that subdivides `cell`."""
    if not cell:
        return cell
    chunks = _chunk_shapes(limits, cell, lengths)
    return next((chunk for chunk in chunks if limits.tight(chunk) and limits.few(chunk)), None)


def _chunk_shapes(
    limits: Limits, cell: tuple[int, ...], lengths: Lengths
) -> Iterator[tuple[int, ...]]:
    """Yield chunk shapes that subdivide `cell`, best first."""
    if limits.itemsize * math.prod(cell) <= limits.target:
        yield cell
    axis, rows = cut_axis(cell, limits.itemsize, limits.target)
    lead, tail = (1,) * axis, cell[axis + 1 :]
    fitting, excess = lengths(cell[axis], rows)
    shorter = ((*lead, length, *tail) for length in fitting)
    # Each shape makes more chunks than the previous one.
    yield from itertools.takewhile(limits.few, shorter)
    if tail:
        # If a few large rows do not divide evenly, take all of them and cut along a later axis.
        later, rows_later = cut_axis(cell, limits.itemsize * cell[axis], limits.target, axis + 1)
        inner = (*lead, cell[axis], *((1,) * (later - axis - 1)))
        fitting, _ = lengths(cell[later], rows_later)
        shorter = ((*inner, length, *cell[later + 1 :]) for length in fitting)
        yield from itertools.takewhile(limits.few, shorter)
    for length in excess:
        yield (*lead, length, *tail)


def cut_axis(cell: tuple[int, ...], unit: int, target: int, first: int = 0) -> tuple[int, int]:
    """Return the first axis, from `first` on, whose rows fit `target` bytes, and how many fit."""
    for axis in range(first, len(cell)):
        row = unit * math.prod(cell[axis + 1 :])
        if row <= target:
            return axis, target // row
    return len(cell) - 1, 1


def _even_lengths(n: int, most: int) -> tuple[Iterator[int], Iterator[int]]:
    """Return the lengths that cut `n` evenly."""
    fewest = -(-n // most)
    shorter = itertools.groupby(-(-n // parts) for parts in range(fewest, n + 1))
    longer = (-(-n // parts) for parts in range(fewest - 1, 0, -1))
    return (length for length, _ in shorter), longer


def divisors(n: int) -> list[int]:
    low = np.arange(1, math.isqrt(n) + 1, dtype=np.int64)
    low = low[n % low == 0]
    return sorted({*low.tolist(), *(n // low).tolist()})


def _exact_lengths(n: int, most: int) -> tuple[list[int], list[int]]:
    """Return the lengths that divide `n`."""
    found = divisors(n)
    fit = bisect.bisect_right(found, most)
    return found[:fit][::-1], found[fit:]


def dense_cell(shape: tuple[int, ...], cell: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest exact part of the cell with little edge padding along every axis."""
    uneven = sum(n % c != 0 for n, c in zip(shape, cell, strict=True))
    # (1 + 1/(51 u))^u < 1.02 for every u, so all axes together stay within the limit.
    share = (PADDING_DIVISOR + 1) * max(1, uneven)
    return tuple(
        next(d for d in reversed(divisors(c)) if (-n % d) * share <= n)
        for n, c in zip(shape, cell, strict=True)
    )
