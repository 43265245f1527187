"""Rows of NumPy columns, viewed as named tuples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
"""One integer per row."""

Row = TypeVar("Row", bound=tuple[Any, ...])


def expanded(counts: Column) -> tuple[Column, Column]:
    """Return each row's item, and its place in the item, for items with these counts of rows."""
    item = np.repeat(np.arange(len(counts)), counts)
    return item, np.arange(len(item)) - (np.cumsum(counts) - counts)[item]


class Table(Generic[Row]):
    """Rows `first` to `stop` of some columns, converted to named tuples on access.

    100,000 small objects would cost more time and memory than the rest of a plan.
    """

    __slots__ = ("_columns", "_first", "_kind", "_stop")

    def __init__(
        self, kind: type[Row], columns: Sequence[npt.NDArray[Any]], first: int, stop: int
    ) -> None:
        self._kind = kind
        self._columns = columns
        self._first = first
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._first

    def __iter__(self) -> Iterator[Row]:
        values = [column[self._first : self._stop].tolist() for column in self._columns]
        # tuple.__new__, because a named tuple's own constructor costs four times as much.
        return map(tuple.__new__, repeat(self._kind), zip(*values, strict=True))

    def column(self, number: int) -> list[int]:
        """Return one column of the rows, as Python ints."""
        values: list[int] = self._columns[number][self._first : self._stop].tolist()
        return values

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = index + (self._stop if index < 0 else self._first)
        return tuple.__new__(self._kind, [column.item(at) for column in self._columns])

    def __repr__(self) -> str:
        return repr(tuple(self))
