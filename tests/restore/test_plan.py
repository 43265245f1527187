"""Planned reads alone: what is wanted as the planner sees it, and reads in two parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncckpt.restore.plan import Destinations, flat_target, plan_reads
from asyncckpt.spec import Box
from tests.restore.opened import destinations, opened, packed


def test_only_memory_that_is_one_run_is_read_into() -> None:
    values = np.arange(12.0).reshape(4, 3)
    _, extents = packed([values.tobytes()] * 2)
    checkpoint: Any = opened({"a": values, "b": values})
    wide = np.zeros((4, 6))
    wanted = destinations({"a": np.zeros((4, 3)), "b": wide[:, ::2]})
    sizes = {"slot_nbytes": 1 << 20, "direct_nbytes": 0}
    for boxes in (False, True):
        if boxes:
            wanted.add("c", 1, Box((1, 0), (2, 3)), wide[:2, :3], flat_target(wide[:2, :3]))
        plan = plan_reads(checkpoint, extents, wanted, **sizes).plan
        parts = [(p.row, p.request, p.direct) for batch in plan.batches for p in batch.parts]
        assert parts == [(0, 0, 0), (1, 1, -1), *([(1, 2, -1)] if boxes else [])]


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
