"""Rows of NumPy columns, viewed as named tuples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False, repr=False)
class Table(Generic[Row]):
    """Rows `first` to `stop` of some columns, converted to named tuples of a kind on access.

    100,000 small objects would cost more time and memory than the rest of a plan.
    """

    kind: type[Row]
    columns: Sequence[npt.NDArray[Any]]
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    def __iter__(self) -> Iterator[Row]:
        values = [column[self.first : self.stop].tolist() for column in self.columns]
        # tuple.__new__, because a named tuple's own constructor costs four times as much.
        return map(tuple.__new__, repeat(self.kind), zip(*values, strict=True))

    def column(self, number: int) -> list[int]:
        """Return one column of the rows, as Python ints."""
        values: list[int] = self.columns[number][self.first : self.stop].tolist()
        return values

    def __getitem__(self, index: int) -> Row:
        at = range(self.first, self.stop)[index]
        return tuple.__new__(self.kind, [column.item(at) for column in self.columns])
