"""Meshes: arrays of processes, and the coordinates of each process."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Coordinate = tuple[int, ...]
"""Position in a mesh: one index per mesh axis."""

_TEXT_LENGTH = 200
"""Longer texts are replaced by their SHA-256, because a schema has one text per leaf."""


class Mesh:
    """An array of processes, in which a process may occur several times. Compared by identity.

    Attributes:
        processes: the process at each coordinate.
        members: the distinct processes, ascending.
        text: shape and processes as a short text, equal for equal meshes.
        pattern: like `text`, with indices into `members` instead of processes.
    """

    __slots__ = ("members", "pattern", "processes", "text")

    def __init__(self, processes: npt.ArrayLike) -> None:
        self.processes = np.asarray(processes, np.int64)
        self.members = interned(tuple(np.unique(self.processes).tolist()))
        shape = "x".join(map(str, self.processes.shape))
        numbers = self.processes.ravel()
        places = np.searchsorted(self.members, numbers)
        self.text, self.pattern = (
            shortened(f"{shape}[{','.join(map(str, each.tolist()))}]") for each in (numbers, places)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each mesh axis."""
        return self.processes.shape


@lru_cache(maxsize=4096)
def coordinates_of(mesh: Mesh, process: int) -> tuple[Coordinate, ...]:
    """Return the coordinates of a process, in C order."""
    return tuple(map(tuple, np.argwhere(mesh.processes == process).tolist()))


@lru_cache(maxsize=4096)
def holders_at(mesh: Mesh, fixed: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Return the processes at all coordinates with these (mesh axis, index) pairs."""
    index: list[int | slice] = [slice(None)] * len(mesh.shape)
    for axis, place in fixed:
        index[axis] = place
    return interned(tuple(np.unique(mesh.processes[tuple(index)]).tolist()))


@lru_cache(maxsize=1 << 16)
def interned(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same object for equal tuples, which are compared and hashed for every leaf."""
    return holders


def shortened(text: str) -> str:
    """Return the text, or its digest if it is long."""
    if len(text) <= _TEXT_LENGTH:
        return text
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()
