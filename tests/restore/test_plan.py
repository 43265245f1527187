"""Planned reads alone: what is wanted as the planner sees it, and reads in two parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncckpt.ports import StoreCapabilities
from asyncckpt.restore.plan import Destinations, plan_reads
from asyncckpt.spec import Box
from tests.restore.opened import destinations, opened, packed


def test_whole_arrays_and_boxes_are_requested_by_column() -> None:
    saved = {"a": np.zeros((4, 3)), "b": np.zeros((4, 3)), "c": np.zeros((4, 3)), "d": np.zeros(2)}
    wide, fixed = np.zeros((4, 6)), np.zeros((4, 3))
    fixed.flags.writeable = False
    wanted = destinations({"a": np.zeros((4, 3)), "b": wide[:, ::2], "c": fixed, "d": np.zeros(2)})
    box = Box((1, 0), (2, 3))
    wanted.add("a", 0, box, wide[:2, :3])
    wanted.add("a", 0, None, None)
    requests = wanted.requests(opened(saved).stored, saved["a"].nbytes)
    assert requests.array.tolist() == [0, 1, 2, 3, 0, 0]
    # Without strides, writable, and large.
    assert requests.contiguous.tolist() == [True, False, False, False, False, False]
    assert requests.box == [None, None, None, None, box, None]


def test_reads_in_two_parts_share_no_chunk_and_count_all() -> None:
    """Two fetches that fill the same destinations count down the same numbers."""
    values = np.arange(12.0).reshape(4, 3)
    data, extents = packed([values[row].tobytes() for row in range(4)])
    checkpoint: Any = opened({"a": values}, chunks={"a": (1, 3)})
    wanted = Destinations()
    wanted.add("a", 0, None, np.zeros((4, 3)))
    whole = plan_reads(checkpoint, extents, wanted, slot_nbytes=1 << 20)
    assert whole.plan.rows.tolist() == [0, 1, 2, 3] and whole.plan.counts == [4]
    assert whole.plan.read_nbytes == len(data) and whole.files is checkpoint.files
    shared = np.array([False, True, True, False])
    for only, rows in ((shared, [1, 2]), (~shared, [0, 3])):
        part = plan_reads(checkpoint, extents, wanted, slot_nbytes=1 << 20, only=only)
        assert part.plan.rows.tolist() == rows and part.plan.counts == [4]


@pytest.mark.parametrize(
    ("sizes", "near", "far"),
    [
        ([20] * 30, [True], [False]),
        ([20] * 20, [False], [False]),  # a run of 400 KiB
        ([8] * 30, [False], [False]),
        ([20, 2] * 30, [False], [False]),
        ([20] * 20 + [120] + [2] + [20] * 20, [True, False], [False, True, False]),
        ([70, 2, 70], [True, False, True], [True, False, True]),
    ],
)
def test_short_chunks_go_straight_to_their_destinations_in_long_runs_of_local_files(
    sizes: list[int], near: list[bool], far: list[bool]
) -> None:
    """A batch for each of two chunks that alternate would take longer than copying both."""
    saved = {f"{n:02}": np.ones(size << 10, np.uint8) for n, size in enumerate(sizes)}
    data, extents = packed([value.tobytes() for value in saved.values()])
    checkpoint: Any = opened(saved)
    wanted = destinations({key: np.zeros_like(value) for key, value in saved.items()})
    for capabilities, direct in (
        (StoreCapabilities(), near),
        (StoreCapabilities(read_copies=1), far),
    ):
        checkpoint.files.capabilities = capabilities
        plan = plan_reads(checkpoint, extents, wanted, slot_nbytes=8 << 20).plan
        assert [batch.direct for batch in plan.batches] == direct
        assert plan.read_nbytes == len(data)
