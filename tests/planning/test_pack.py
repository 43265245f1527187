"""Data files of a size with which all uploads end at about the same time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.options import MIB, PAGE_NBYTES
from asyncckpt.planning.leaves import LeafLayout
from asyncckpt.planning.pack import (
    CHUNKS_MAX,
    NEAR,
    REQUEST_NBYTES,
    WAVES,
    even_data_files,
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


def even(payloads: Sequence[int], streams: int, size: int = FILE) -> int:
    return even_data_files(payloads, [8] * len(payloads), size, FILE, streams)


def test_one_file_more_than_streams_makes_them_all_smaller() -> None:
    payloads = [CHUNK] * 36
    assert len(files_of(payloads, FILE)) == 9
    size = even(payloads, 8)
    assert size < FILE
    assert ends(files_of(payloads, size), 8) < 0.85 * ends(files_of(payloads, FILE), 8)


def test_files_that_fill_all_streams_stay_as_they_are() -> None:
    assert even([CHUNK] * 32, 8) == FILE
    assert even([CHUNK] * 64, 8) == FILE


def test_a_single_file_and_very_many_stay_as_they_are() -> None:
    assert even([], 8) == FILE
    assert even([CHUNK], 8) == FILE
    assert even([CHUNK] * 4 * (8 * WAVES + 1), 8) == FILE
    assert even([1024] * (CHUNKS_MAX + 1), 1, size=MIB) == MIB


@given(st.lists(st.integers(1, 9 * MIB), max_size=60), st.integers(1, 40), st.integers(1, FILE))
def test_no_size_is_worse_than_the_one_that_was_asked_for(
    payloads: list[int], streams: int, size: int
) -> None:
    found = even(payloads, streams, size)
    assert size // 2 <= found <= size
    asked = ends(files_of(payloads, size), streams) if payloads else 0
    assert (ends(files_of(payloads, found), streams) if payloads else 0) <= NEAR * asked


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
    assert asked.digest != found.digest
    assert plan_save(leaves, **sizes, even_streams=9).digest == asked.digest
