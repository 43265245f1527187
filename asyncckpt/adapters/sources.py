"""Opened arrays of one tree, stored in columns: most arrays need no object of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from asyncckpt.ports import Source
from asyncckpt.spec import ArraySpec


class Sources(Sequence[Source]):
    """The arrays of a tree, in leaf order.

    Making a `Source` takes longer than copying a small array, mostly because of the garbage
    collector. So NumPy arrays described by shape and dtype alone are kept as they are, and
    `sources[number]` makes a `Source` on demand and keeps it.

    Attributes:
        specs: shape and dtype of each array.
        plain: the array if it has no `Source` yet, else None.
        opened: sources by index.
    """

    def __init__(self) -> None:
        self.specs: list[ArraySpec] = []
        self.plain: list[npt.NDArray[Any] | None] = []
        self.opened: dict[int, Source] = {}

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, number: Any) -> Any:
        # Called from several threads. Read the array first: it is dropped once its source exists.
        array = self.plain[number]
        found = self.opened.get(number)
        if found is None:
            found = self.opened.setdefault(number, Source(self.specs[number], array, array))
            self.plain[number] = None
        return found

    def append(self, source: Source) -> None:
        """Add an array with its source."""
        self.opened[len(self.specs)] = source
        self.specs.append(source.spec)
        self.plain.append(None)

    def append_plain(self, spec: ArraySpec, array: npt.NDArray[Any]) -> None:
        """Add a NumPy array of this shape and dtype."""
        self.specs.append(spec)
        self.plain.append(array)

    def forget(self) -> None:
        """Drop all references to leaves."""
        self.plain = [None] * len(self.plain)
        for source in self.opened.values():
            source.leaf = source.view = source.captured = None
            source.views = ()
            source.identity = None
