"""Which of many boxes meet which others: a sweep along one axis, never all pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncckpt.planning.table import Column
from asyncckpt.spec import Box


class BoxIndex:
    """Boxes of one array, to be asked which of them share elements with another box.

    The boxes are sorted along the axis on which most of them differ; a question looks at those
    that its own extent on this axis can meet.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        rank = len(boxes[0].shape) if boxes else 0
        starts = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), rank)
        shapes = np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), rank)
        counts = [len(np.unique(starts[:, axis])) for axis in range(rank)]
        self._axis = int(np.argmax(counts)) if rank else 0
        if rank:
            order = np.argsort(starts[:, self._axis], kind="stable")
        else:
            order = np.arange(len(boxes))
        self._order = order
        self._starts = starts[order]
        self._stops = self._starts + shapes[order]
        self._filled = np.asarray((shapes[order] > 0).all(axis=1))
        # Stops seen so far never decrease: the first box that can reach a start is found by halves.
        self._reach = np.maximum.accumulate(self._stops[:, self._axis]) if rank else None

    def meeting(self, box: Box) -> Column:
        """Numbers of the boxes that share elements with `box`, in no order."""
        if not box.size:
            return np.zeros(0, np.int64)
        if self._reach is None:
            return self._order[self._filled]
        start = np.array(box.offset, np.int64)
        stop = np.array(box.stop, np.int64)
        first = int(np.searchsorted(self._reach, start[self._axis], side="right"))
        last = int(np.searchsorted(self._starts[:, self._axis], stop[self._axis], side="left"))
        starts, stops = self._starts[first:last], self._stops[first:last]
        meets = np.all(starts < stop, axis=1) & np.all(stops > start, axis=1)
        found: Column = self._order[first:last][meets & self._filled[first:last]]
        return found
