"""Opened arrays of one tree, by column: most arrays need no object of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.ports import ArrayAdapter, Source
from asyncckpt.spec import ArraySpec

_NUMPY = NumpyAdapter()


class Sources(Sequence[Source]):
    """The arrays of a tree, in leaf order.

    A `Source` per leaf costs more time than copying a small array, most of it in the garbage
    collector. NumPy arrays without other facts than shape and dtype are kept as they are;
    `sources[number]` makes and keeps the `Source` of one on demand.

    Attributes:
        specs: shape and dtype of each.
        plain: the array itself if it has no `Source` yet, else None.
        opened: sources by number.
        adapters: adapters of those that were appended with one, by number.
    """

    def __init__(self) -> None:
        self.specs: list[ArraySpec] = []
        self.plain: list[npt.NDArray[Any] | None] = []
        self.opened: dict[int, Source] = {}
        self.adapters: dict[int, ArrayAdapter] = {}

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, number: Any) -> Any:
        # Called from several threads. The array is read first: it is removed only once it has a
        # source.
        array = self.plain[number]
        found = self.opened.get(number)
        if found is None:
            found = self.opened.setdefault(number, Source(self.specs[number], array, array))
            self.plain[number] = None
        return found

    def adapter(self, number: int) -> ArrayAdapter:
        """Return the adapter of an array."""
        return self.adapters.get(number, _NUMPY)

    def append(self, source: Source, adapter: ArrayAdapter) -> None:
        """Add an array that has facts of its own."""
        number = len(self.specs)
        self.opened[number] = source
        self.adapters[number] = adapter
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
            source.leaf = source.view = source.stream = None
            source.views = ()
            source.identity = None
