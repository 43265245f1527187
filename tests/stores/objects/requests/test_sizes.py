"""Sizes of files and requests: within the budget, what the store takes, near the model's best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.options import DEFAULT_CHUNK_NBYTES, GIB, MIB, MIN_BUDGET_NBYTES, PAGE_NBYTES
from asyncckpt.planning.pack import WAVES, even_count
from asyncckpt.stores.objects.requests.sizes import (
    PUT_THRESHOLD_NBYTES,
    STRETCH,
    Choice,
    Traffic,
    choose,
)

SLOT = 8 * MIB
S3 = Traffic(0.04, 85e6, None, 16)

TRAFFIC = st.builds(
    Traffic,
    st.floats(1e-4, 1.0),
    st.floats(1e5, 5e9),
    st.none() | st.floats(1e6, 1e11),
    st.integers(1, 128),
)


def held(choice: Choice, copies: int) -> int:
    """Memory of the windows in flight and the one that is being filled."""
    return (choice.concurrency + 1) * choice.window_nbytes * (1 + copies)


def s3(nbytes: int, budget_nbytes: int, **more: object) -> Choice:
    arguments = {"copies": 1, **more}
    return choose(nbytes, S3, budget_nbytes=budget_nbytes, **arguments)  # type: ignore[arg-type]


@settings(max_examples=100)
@given(
    nbytes=st.integers(0, 1 << 44),
    traffic=TRAFFIC,
    budget_nbytes=st.integers(MIN_BUDGET_NBYTES, 16 * GIB),
    copies=st.integers(0, 3),
    asked=st.none() | st.integers(SLOT, 1 << 42),
    chunk_nbytes=st.sampled_from([4096, 1 * MIB, DEFAULT_CHUNK_NBYTES, 1 * GIB]),
)
def test_the_budget_and_the_rules_of_the_store_hold_always(
    nbytes: int,
    traffic: Traffic,
    budget_nbytes: int,
    copies: int,
    asked: int | None,
    chunk_nbytes: int,
) -> None:
    choice = choose(
        nbytes,
        traffic,
        budget_nbytes=budget_nbytes,
        copies=copies,
        chunk_nbytes=chunk_nbytes,
        data_file_nbytes=asked,
    )
    window, file = choice.window_nbytes, choice.data_file_nbytes
    assert held(choice, copies) <= budget_nbytes
    assert 1 <= choice.concurrency <= traffic.streams
    assert window >= 1 * MIB
    assert window % PAGE_NBYTES == 0
    if asked is not None:
        assert file <= max(STRETCH * asked, asked + PAGE_NBYTES)
    assert file <= window <= PUT_THRESHOLD_NBYTES
    assert choice.expected_s > 0
    assert choice == choose(
        nbytes,
        traffic,
        budget_nbytes=budget_nbytes,
        copies=copies,
        chunk_nbytes=chunk_nbytes,
        data_file_nbytes=asked,
        last=choice,
    )


def test_more_memory_buys_larger_requests_up_to_where_latency_no_longer_shows() -> None:
    sizes = [s3(16 * GIB, budget).window_nbytes for budget in (128 * MIB, GIB, 8 * GIB, 64 * GIB)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 16 * MIB <= sizes[1] < sizes[2]
    assert 48 * MIB <= sizes[2] == sizes[3] <= 96 * MIB


def test_a_window_of_whole_chunks_has_room_for_their_trailers() -> None:
    choice = s3(16 * GIB, 8 * GIB)
    count, rest = divmod(choice.window_nbytes, DEFAULT_CHUNK_NBYTES)
    assert rest == count * PAGE_NBYTES


def test_a_file_of_one_window_is_one_request() -> None:
    choice = s3(16 * GIB, 8 * GIB)
    assert choice.data_file_nbytes == choice.window_nbytes


def test_a_small_state_is_cut_so_that_every_stream_sends_one_file_of_4_mib_or_more() -> None:
    choice = s3(256 * MIB, 8 * GIB)
    assert even_count(256 * MIB, choice.data_file_nbytes, 16) == 16
    assert 16 * MIB < choice.window_nbytes < 18 * MIB
    few = s3(20 * MIB, 8 * GIB)
    assert even_count(20 * MIB, few.data_file_nbytes, 16) == 5
    assert 4 * MIB < few.data_file_nbytes < 5 * MIB
    assert few.window_nbytes == 8 * MIB


@pytest.mark.parametrize(
    ("mib", "asked", "streams", "files"),
    [
        (1024, None, 16, 64),
        (1040, 16, 32, 64),  # 65 of 16 MiB would be three rounds of 32 streams
        (512, 16, 32, 32),
        (514, 16, 24, 48),
        (300, 64, 16, 16),
        (6000, 64, 16, 96),
        (7000, 64, 16, 110),  # with so many the last ones hardly matter
    ],
)
def test_all_streams_send_equally_many_files_of_about_the_size_that_was_asked_for(
    mib: int, asked: int | None, streams: int, files: int
) -> None:
    nbytes = mib * MIB
    choice = choose(
        nbytes,
        replace(S3, streams=streams),
        budget_nbytes=16 * GIB,
        copies=0,
        data_file_nbytes=asked and asked * MIB,
    )
    assert choice.concurrency == streams
    assert even_count(nbytes, choice.data_file_nbytes, streams) == files
    assert choice.even_streams == (None if files > WAVES * streams else streams)
    assert choice.window_nbytes >= choice.data_file_nbytes >= nbytes // files


@pytest.mark.parametrize(
    ("latency_s", "stream_nbytes_per_s"),
    [(0.04, 85e6), (0.04, 40e6), (0.04, 25e6), (0.02, 40e6), (0.02, 25e6)],
)
def test_a_state_that_all_streams_send_at_once_is_not_cut_smaller(
    latency_s: float, stream_nbytes_per_s: float
) -> None:
    """However slow the streams: when the machine is what is slow, more requests do not help."""
    for nbytes, files in ((512 * MIB, 32), (1000 * MIB, 32)):
        traffic = Traffic(latency_s, stream_nbytes_per_s, None, 32)
        choice = choose(nbytes, traffic, budget_nbytes=8 * GIB, copies=0)
        assert even_count(nbytes, choice.data_file_nbytes, choice.concurrency) == files


def test_a_link_that_is_full_anyway_gets_small_requests() -> None:
    full = choose(8 * GIB, Traffic(0.002, 60e6, 0.7e9, 16), budget_nbytes=8 * GIB, copies=1)
    assert full.window_nbytes < s3(8 * GIB, 8 * GIB).window_nbytes


def test_the_smallest_budget_still_keeps_some_streams_busy() -> None:
    choice = s3(2 * GIB, MIN_BUDGET_NBYTES)
    assert choice.concurrency >= 3
    assert s3(2 * GIB, 256 * MIB).concurrency >= 12
    assert held(s3(2 * GIB, 256 * MIB, copies=3), 3) <= 256 * MIB


def test_what_is_asked_for_is_one_request_and_clamped_to_what_one_may_hold() -> None:
    one = s3(16 * GIB, 8 * GIB, data_file_nbytes=100 * MIB)
    assert (one.data_file_nbytes, one.window_nbytes) == (100 * MIB, 100 * MIB)
    clamped = s3(16 * GIB, 8 * GIB, data_file_nbytes=GIB)
    assert clamped.data_file_nbytes == clamped.window_nbytes == PUT_THRESHOLD_NBYTES
    odd = s3(16 * GIB, 8 * GIB, data_file_nbytes=50_000_001)
    assert odd.data_file_nbytes == 50_000_001
    assert 0 <= odd.window_nbytes - odd.data_file_nbytes < PAGE_NBYTES


def test_the_budget_wins_over_what_is_asked_for() -> None:
    cut = choose(
        16 * GIB,
        S3,
        budget_nbytes=256 * MIB,
        copies=2,
        data_file_nbytes=512 * MIB,
    )
    assert cut.data_file_nbytes == cut.window_nbytes < PUT_THRESHOLD_NBYTES
    assert held(cut, 2) <= 256 * MIB


def test_a_very_large_state_gets_the_largest_files() -> None:
    """Objects beyond `FEW_FILES` are a burden for every listing and deletion."""
    assert s3(64 << 40, 8 * GIB).data_file_nbytes > s3(GIB, 8 * GIB).data_file_nbytes


def test_the_last_choice_stands_until_something_is_a_tenth_faster() -> None:
    first = s3(16 * GIB, 8 * GIB)
    # The link is measured a little differently at every save.
    for factor in (0.8, 0.9, 1.1, 1.3):
        again = choose(
            16 * GIB,
            replace(S3, latency_s=S3.latency_s * factor, stream_nbytes_per_s=85e6 / factor),
            budget_nbytes=8 * GIB,
            copies=1,
            last=first,
        )
        assert again.sizes == first.sizes
    far = choose(
        16 * GIB,
        Traffic(0.8, 400e6, None, 16),
        budget_nbytes=8 * GIB,
        copies=1,
        last=first,
    )
    assert far.window_nbytes > first.window_nbytes


def test_the_last_choice_falls_with_its_budget_or_with_another_wish() -> None:
    large = s3(16 * GIB, 8 * GIB)
    small = s3(16 * GIB, 256 * MIB, last=large)
    assert held(small, 1) <= 256 * MIB
    asked = s3(16 * GIB, 8 * GIB, last=large, data_file_nbytes=16 * MIB)
    assert asked.data_file_nbytes == 16 * MIB


@settings(max_examples=60)
@given(st.integers(1, 1 << 40), st.integers(1, 64), st.floats(1e7, 1e9))
def test_measured_contention_does_not_make_sizes_run_away(
    nbytes: int, streams: int, pipe: float
) -> None:
    """Streams that share a full pipe are each slower: fed back, sizes stay as they are."""
    traffic = Traffic(0.04, 85e6, None, streams)
    choice = choose(nbytes, traffic, budget_nbytes=4 * GIB, copies=1)
    seen = []
    for _ in range(8):
        shared = min(85e6, pipe / choice.concurrency)
        traffic = Traffic(0.04, shared, pipe, streams)
        choice = choose(nbytes, traffic, budget_nbytes=4 * GIB, copies=1, last=choice)
        seen.append(choice.sizes)
    assert len(set(seen[1:])) == 1


def test_a_state_of_nothing_has_sizes_too() -> None:
    assert s3(0, MIN_BUDGET_NBYTES).concurrency >= 1
    assert s3(0, MIN_BUDGET_NBYTES).expected_s == pytest.approx(0.041)


def test_files_stay_as_they_are_while_other_streams_would_gain_less_than_a_tenth() -> None:
    """Plans are made anew where the streams have become others, not at every step of them."""
    asked: dict[str, object] = {"data_file_nbytes": 32 * MIB}
    first = s3(512 * MIB, 4 * GIB, **asked)
    assert first.even_streams == first.concurrency == 16
    for streams, kept in ((15, False), (17, True), (24, False), (32, False), (8, True)):
        again = choose(
            512 * MIB,
            replace(S3, streams=streams),
            budget_nbytes=4 * GIB,
            copies=1,
            data_file_nbytes=32 * MIB,
            last=first,
        )
        assert again.concurrency == streams
        assert (again.sizes == first.sizes and again.even_streams == 16) == kept, streams


def test_the_ends_of_many_files_are_left_alone() -> None:
    assert s3(64 * GIB, GIB, data_file_nbytes=32 * MIB).even_streams is None
