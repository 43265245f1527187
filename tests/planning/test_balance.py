from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.planning import balance


def assign_writers(nbytes: Any, kinds: Any, holders: Sequence[Sequence[int]]) -> Any:
    """Return the writers of rows whose holders come in any order, and repeatedly."""
    sets = balance.Holders(process_count=10)
    numbers = np.array([sets.number(tuple(each)) for each in holders])
    kind = numbers[np.asarray(kinds, int)]
    return balance.assign_writers(np.asarray(nbytes, np.int64), kind, sets.sets)


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
def test_one_class_is_balanced_within_one_chunk(
    rows: tuple[list[int], list[int], list[list[int]]],
) -> None:
    nbytes, _, holders = rows
    processes = set(holders[0])
    writers = assign_writers(nbytes, [0] * len(nbytes), holders[:1]).tolist()
    for process in processes:
        share = sum(n for n, w in zip(nbytes, writers, strict=True) if w == process)
        assert abs(share * len(processes) - sum(nbytes)) <= max(nbytes, default=0) * len(processes)


@given(held_rows())
def test_holders_of_a_chunk_agree_although_each_knows_its_own_chunks_only(
    rows: tuple[list[int], list[int], list[list[int]]],
) -> None:
    nbytes, kinds, holders = rows
    whole = assign_writers(nbytes, kinds, holders).tolist()
    for process in range(8):
        own = [row for row, kind in enumerate(kinds) if process in holders[kind]]
        found = assign_writers([nbytes[r] for r in own], [kinds[r] for r in own], holders)
        assert found.tolist() == [whole[r] for r in own]


def test_small_chunks_are_contiguous_runs() -> None:
    writers = assign_writers([10] * 4000, [0] * 4000, [[0, 1, 2, 3]])
    assert (np.diff(writers) >= 0).all()
    assert np.bincount(writers).tolist() == [1000] * 4


def test_runs_of_small_chunks_level_out_the_large_ones() -> None:
    writers = assign_writers([900, *[10] * 1000], [0] * 1001, [[0, 1, 2]])
    sums = [int(np.array([900, *[10] * 1000])[writers == process].sum()) for process in range(3)]
    assert max(sums) - min(sums) <= 20


def test_a_class_levels_out_what_its_members_write_for_larger_ones() -> None:
    # One chunk of all four; then what 0 and 1 hold goes to the one that has written less.
    writers = assign_writers([100, 40, 40, 40], [0, 1, 1, 1], [[0, 1, 2, 3], [0, 1]])
    assert writers.tolist() == [0, 1, 1, 1]


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
    assert sorted(assign_writers([8] * 6, [0] * 6, [[3, 3, 4]]).tolist()) == [3, 3, 3, 4, 4, 4]


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
