"""Data files of a size with which all uploads end at about the same time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.options import MIB, PAGE_NBYTES
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.pack import (
    REQUEST_NBYTES,
    RUNS_PER_FILE,
    WAVES,
    even_count,
    even_order,
    pack,
)
from asyncckpt.planning.save import plan_save
from asyncckpt.spec import ArraySpec

CHUNK = 8 * MIB - PAGE_NBYTES
FILE = 32 * MIB


def ends(files: Sequence[int], streams: int) -> float:
    """When the last file is sent, each by the stream that is free first."""
    free = [0] * streams
    for nbytes in files:
        heapq.heappush(free, heapq.heappop(free) + REQUEST_NBYTES + nbytes)
    return max(free)


def files_of(payloads: Sequence[int], size: int) -> list[int]:
    return pack(payloads, [8] * len(payloads), size, FILE)[1]


def even(payloads: Sequence[int], streams: int, size: int = FILE) -> list[int]:
    """Lengths of the files of these chunks, in their order, at most as long as a window."""
    found = even_order(np.array(payloads, np.int64), size, streams)
    if found is None:
        return files_of(payloads, size)
    order, firsts = found
    assert sorted(order.tolist()) == list(range(len(payloads)))
    ordered = [payloads[row] for row in order]
    return pack(ordered, [8] * len(payloads), FILE, FILE, firsts)[1]


def test_one_file_more_than_streams_makes_them_all_smaller() -> None:
    payloads = [CHUNK] * 36
    assert len(files_of(payloads, FILE)) == 9
    assert ends(even(payloads, 8), 8) < 0.85 * ends(files_of(payloads, FILE), 8)


def test_files_are_equally_long_and_as_many_as_all_streams_send_in_whole_rounds() -> None:
    """Large chunks leave room that small ones fill, wherever these are in the tree."""
    payloads = [15 * MIB if n % 9 == 0 else MIB // 3 + n for n in range(288)]
    files = even(payloads, 32, 24 * MIB)
    assert len(files) == 32
    assert max(files) < 1.06 * sum(files) / 32
    assert all(later <= earlier + 64 for earlier, later in itertools.pairwise(files))
    assert len(even(payloads, 32, 17 * MIB)) == 64


def test_neighbours_stay_together_in_runs() -> None:
    """A restore of some leaves reads runs of a sixteenth of a file, not single small chunks."""
    payloads = [4096] * 64 * 1024
    found = even_order(np.array(payloads, np.int64), 16 * MIB, 16)
    assert found is not None
    order, firsts = found
    breaks = int((np.diff(order) != 1).sum())
    assert len(firsts) == 32
    assert breaks <= RUNS_PER_FILE * len(firsts)
    for first, last in itertools.pairwise([*firsts, len(order)]):
        assert (np.diff(order[first:last]) > 0).all()  # in the order of the tree


def test_a_single_file_and_very_many_are_left_in_the_order_of_the_tree() -> None:
    assert even_order(np.zeros(0, np.int64), FILE, 8) is None
    assert even_order(np.array([MIB]), FILE, 8) is None
    assert even_order(np.array([CHUNK] * 4 * (8 * WAVES + 1)), FILE, 8) is None


@given(
    st.lists(st.integers(1, 9 * MIB), max_size=60),
    st.integers(1, 40),
    st.integers(9 * MIB, FILE),
)
def test_no_chunk_is_lost_and_no_file_is_longer_than_a_window(
    payloads: list[int], streams: int, size: int
) -> None:
    files = even(payloads, streams, size)
    assert max(files, default=0) <= FILE
    assert sum(files) >= sum(payloads) + 4 * len(payloads)
    count = even_count(sum(payloads), size, streams)
    assert count <= max(-(-sum(payloads) // REQUEST_NBYTES), 2 * len(payloads) + 1)


@given(st.integers(1, 1 << 40), st.integers(MIB, FILE), st.integers(1, 64))
def test_streams_send_equally_many_unless_there_are_too_many_or_they_are_too_short(
    nbytes: int, size: int, streams: int
) -> None:
    count = even_count(nbytes, size, streams)
    assert count * size >= nbytes
    if count <= WAVES * streams:
        assert count % streams == 0 or nbytes // (count + 1) < REQUEST_NBYTES


def test_a_plan_has_files_of_that_size() -> None:
    leaves = [LeafLayout(f"w{n}", ArraySpec((CHUNK,), "uint8"), CHUNK) for n in range(36)]
    sizes = {
        "data_file_nbytes": FILE,
        "slot_nbytes": FILE,
        "page_nbytes": PAGE_NBYTES,
        "aligned_chunk_nbytes": 64 * 1024,
        "inline_nbytes": 0,
    }
    asked, found = plan_save(leaves, **sizes), plan_save(leaves, **sizes, even_streams=8)
    assert len(asked.file_nbytes) == 9
    assert ends(found.file_nbytes, 8) < 0.85 * ends(asked.file_nbytes, 8)
    assert list(found.file_nbytes) == sorted(found.file_nbytes, reverse=True)
    assert [window.nbytes for window in found.windows] == list(found.file_nbytes)
    # Every chunk is in one place of one file.
    places = sorted(zip(found.row_file.tolist(), found.row_offset.tolist(), strict=True))
    for (file, offset), (next_file, next_offset) in itertools.pairwise(places):
        assert next_file > file or next_offset >= offset + CHUNK + 4
