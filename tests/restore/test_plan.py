"""Planned reads alone: what is wanted as the planner sees it, and reads in two parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncckpt.restore.plan import Destinations, flat_target, plan_reads
from asyncckpt.spec import Box
from tests.restore.opened import destinations, opened, packed


def test_whole_arrays_and_boxes_are_requested_by_column() -> None:
    wide = np.zeros((4, 6))
    wanted = destinations({"a": np.zeros((4, 3)), "b": wide[:, ::2]})
    box = Box((1, 0), (2, 3))
    wanted.add("c", 0, box, wide[:2, :3], flat_target(wide[:2, :3]))
    requests = wanted.requests()
    assert requests.array.tolist() == [0, 1, 0]
    assert requests.contiguous.tolist() == [True, False, False]
    assert requests.box == [None, None, box]


def test_memory_that_may_not_be_written_is_no_target() -> None:
    values = np.zeros((2, 3))
    flat = flat_target(values)
    assert flat is not None and np.shares_memory(flat, values) and flat.nbytes == values.nbytes
    values.flags.writeable = False
    assert flat_target(values) is None


def test_reads_in_two_parts_share_no_chunk_and_count_all() -> None:
    """Two fetches that fill the same destinations count down the same numbers."""
    values = np.arange(12.0).reshape(4, 3)
    data, extents = packed([values[row].tobytes() for row in range(4)])
    checkpoint: Any = opened({"a": values}, chunks={"a": (1, 3)})
    wanted = Destinations()
    wanted.add("a", 0, None, np.zeros((4, 3)), None)
    whole = plan_reads(checkpoint, extents, wanted, slot_nbytes=1 << 20)
    assert whole.plan.rows.tolist() == [0, 1, 2, 3] and whole.plan.counts == [4]
    assert whole.plan.read_nbytes == len(data) and whole.files is checkpoint.files
    shared = np.array([False, True, True, False])
    for only, rows in ((shared, [1, 2]), (~shared, [0, 3])):
        part = plan_reads(checkpoint, extents, wanted, slot_nbytes=1 << 20, only=only)
        assert part.plan.rows.tolist() == rows and part.plan.counts == [4]
