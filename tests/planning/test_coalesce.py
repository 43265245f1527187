from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.planning import restore


def coalesce(
    offsets: np.ndarray, nbytes: np.ndarray, *, starts: np.ndarray | None = None, **sizes: int
) -> np.ndarray:
    if starts is None:
        starts = np.zeros(len(offsets), bool)
    return restore.coalesce(offsets, nbytes, starts=starts, **sizes)


@st.composite
def extents(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    offsets, lengths = [], []
    at = draw(st.integers(0, 20))
    for gap, nbytes in draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 40)), max_size=40)
    ):
        at += gap
        offsets.append(at)
        lengths.append(nbytes)
        at += nbytes
    return offsets, lengths


def expected(
    offsets: list[int], lengths: list[int], gap: int, limit: int, starts: set[int]
) -> list[int]:
    firsts: list[int] = []
    for i, (o, n) in enumerate(zip(offsets, lengths, strict=True)):
        if (
            not firsts
            or i in starts
            or o - offsets[i - 1] - lengths[i - 1] > gap
            or o + n - offsets[firsts[-1]] > limit
        ):
            firsts.append(i)
    return firsts


@given(extents(), st.integers(0, 12), st.integers(1, 120), st.sets(st.integers(0, 40), max_size=5))
def test_groups_are_those_of_a_greedy_scan(
    ranges: tuple[list[int], list[int]], gap: int, limit: int, starts: set[int]
) -> None:
    offsets, lengths = ranges
    flags = np.array([i in starts for i in range(len(offsets))], bool)
    groups = coalesce(
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
        gap_nbytes=gap,
        limit_nbytes=limit,
        starts=flags,
    )
    assert groups.tolist() == expected(offsets, lengths, gap, limit, starts)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=30),
    st.integers(0, 12),
    st.integers(1, 120),
)
def test_overlapping_extents_keep_to_the_limit(
    ranges: list[tuple[int, int]], gap: int, limit: int
) -> None:
    ranges.sort()
    offsets = np.array([o for o, _ in ranges], np.int64)
    lengths = np.array([n for _, n in ranges], np.int64)
    groups = coalesce(offsets, lengths, gap_nbytes=gap, limit_nbytes=limit).tolist()
    assert groups[:1] == ([0] if ranges else [])
    for first, stop in zip(groups, [*groups[1:], len(ranges)], strict=False):
        assert first < stop
        reach = max(o + n for o, n in ranges[first:stop])
        assert stop - first == 1 or reach - ranges[first][0] <= limit


def test_gap_and_limit_are_themselves_allowed() -> None:
    offsets, lengths = np.array([0, 15, 30, 45]), np.array([10, 10, 10, 10])
    groups = coalesce(offsets, lengths, gap_nbytes=5, limit_nbytes=25)
    assert groups.tolist() == [0, 2]
    assert coalesce(offsets, lengths, gap_nbytes=4, limit_nbytes=25).tolist() == [0, 1, 2, 3]
    assert coalesce(offsets, lengths, gap_nbytes=5, limit_nbytes=24).tolist() == [0, 1, 2, 3]


def test_nothing_is_no_group() -> None:
    none = np.zeros(0, np.int64)
    assert coalesce(none, none, gap_nbytes=0, limit_nbytes=1).tolist() == []
