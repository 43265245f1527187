"""Room for bodies. That of objects that are gone is used again.

The kernel clears every new page, which costs more than receiving the bytes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt

Room = npt.NDArray[np.uint8]

SMALL_NBYTES = 64 * 1024
"""Up to this size a bytearray is as good."""

CLASS_NBYTES = 1024 * 1024
"""From this size on rooms are used again. They are multiples of it, and there are at most four
sizes from one power of two to the next, so that a room often fits a new body."""


class Buffers:
    """Gives out buffers, and takes them back when nobody looks at them any more.

    Attributes:
        spare_max_nbytes: most bytes kept for later.
        spare_nbytes: bytes kept now.
    """

    def __init__(self, spare_max_nbytes: int) -> None:
        self.spare_max_nbytes = spare_max_nbytes
        self.spare_nbytes = 0
        self._spare: defaultdict[int, list[Room]] = defaultdict(list)

    def get(self, nbytes: int) -> memoryview:
        """A buffer of this length, with any contents."""
        if nbytes <= SMALL_NBYTES:
            return memoryview(bytearray(nbytes))
        if nbytes < CLASS_NBYTES:
            return memoryview(np.empty(nbytes, np.uint8))
        step = max(CLASS_NBYTES, 1 << (nbytes.bit_length() - 3))
        size = -(-nbytes // step) * step
        try:
            room = self._spare[size].pop()
            self.spare_nbytes -= size
        except IndexError:
            room = np.empty(size, np.uint8)
        view = np.frombuffer(room, np.uint8, nbytes)
        # The view dies with the last memoryview of it; the room does not.
        weakref.finalize(view, self._take_back, room).atexit = False
        return memoryview(view)

    def _take_back(self, room: Room) -> None:
        if self.spare_nbytes + room.nbytes <= self.spare_max_nbytes:
            self.spare_nbytes += room.nbytes
            self._spare[room.nbytes].append(room)

    def close(self) -> None:
        """Nothing is kept, now or later."""
        self.spare_max_nbytes = 0
        self._spare.clear()
        self.spare_nbytes = 0
