from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.planning.balance import assign_writers


@st.composite
def held_rows(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    holders = draw(
        st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=4)
    )
    rows = draw(
        st.lists(
            st.tuples(
                st.one_of(st.integers(0, 10), st.integers(0, 2**45)),
                st.integers(0, len(holders) - 1),
            ),
            max_size=60,
        )
    )
    return [n for n, _ in rows], [c for _, c in rows], holders


@given(held_rows())
def test_every_row_is_written_once_by_one_of_its_holders(
    rows: tuple[list[int], list[int], list[list[int]]],
) -> None:
    nbytes, kinds, holders = rows
    writers = assign_writers(nbytes, kinds, holders)
    assert len(writers) == len(nbytes)
    assert all(w in holders[k] for w, k in zip(writers.tolist(), kinds, strict=True))


@given(held_rows())
def test_bytes_are_balanced_within_one_chunk_per_class(
    rows: tuple[list[int], list[int], list[list[int]]],
) -> None:
    nbytes, kinds, holders = rows
    writers = assign_writers(nbytes, kinds, holders).tolist()
    for processes in {frozenset(h) for h in holders}:
        mine = [i for i, k in enumerate(kinds) if frozenset(holders[k]) == processes]
        total = sum(nbytes[i] for i in mine)
        largest = max((nbytes[i] for i in mine), default=0)
        for process in processes:
            share = sum(nbytes[i] for i in mine if writers[i] == process)
            assert abs(share * len(processes) - total) <= largest * len(processes)


@given(held_rows())
def test_each_holder_writes_one_contiguous_run_of_its_class(
    rows: tuple[list[int], list[int], list[list[int]]],
) -> None:
    nbytes, kinds, holders = rows
    writers = assign_writers(nbytes, kinds, holders).tolist()
    for processes in {frozenset(h) for h in holders}:
        mine = [
            w for w, k in zip(writers, kinds, strict=True) if frozenset(holders[k]) == processes
        ]
        assert mine == sorted(mine)


@given(held_rows(), st.randoms())
def test_the_order_of_holders_does_not_matter(
    rows: tuple[list[int], list[int], list[list[int]]], random: np.random.Generator
) -> None:
    nbytes, kinds, holders = rows
    mixed = [list(h) for h in holders]
    for h in mixed:
        random.shuffle(h)
    one, other = (assign_writers(nbytes, kinds, h) for h in (holders, mixed))
    assert one.tolist() == other.tolist()


def test_two_replicas_in_one_process_are_written_once() -> None:
    assert assign_writers([8, 8, 8], [0, 0, 0], [[3, 3]]).tolist() == [3, 3, 3]
    assert assign_writers([8, 8], [0, 1], [[3, 3, 4], [4, 3]]).tolist() == [3, 4]
    # A second replica gives no second share either.
    assert assign_writers([8] * 6, [0] * 6, [[3, 3, 4]]).tolist() == [3, 3, 3, 4, 4, 4]


def test_balance_counts_bytes_and_not_chunks() -> None:
    writers = assign_writers([60, 10, 10, 10, 10], [0] * 5, [[0, 1]])
    assert writers.tolist() == [0, 1, 1, 1, 1]


def test_replicas_over_two_hosts_balance_each_class_by_itself() -> None:
    # HSDP: shard s is held by processes s and s + 4.
    kinds = np.repeat(np.arange(4), 100)
    writers = assign_writers(np.full(400, 16), kinds, [[s, s + 4] for s in range(4)])
    assert np.bincount(writers).tolist() == [50] * 8


def test_rows_without_bytes_have_a_writer() -> None:
    assert set(assign_writers([0, 0, 0], [0, 0, 0], [[5, 9]]).tolist()) <= {5, 9}
    assert assign_writers([], [], [[1]]).tolist() == []


def test_a_row_without_holder_is_refused() -> None:
    with pytest.raises(ValueError, match="no holder"):
        assign_writers([1], [0], [[]])
    with pytest.raises(ValueError, match="index"):
        assign_writers([1], [1], [[0]])
