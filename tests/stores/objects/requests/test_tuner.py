"""The number of streams: it follows the sum of what they carry, and stops where that stops."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.stores.objects.requests.tuner import LEVELS, REST, ConcurrencyTuner


def carried(streams: int, *, stream: float, pipe: float) -> float:
    """What streams of their own speed carry together through a shared pipe."""
    return min(streams * stream, pipe)


def run(
    tuner: ConcurrencyTuner, steps: int, *, stream: float, pipe: float, noise: float = 0.0
) -> list[int]:
    rng = random.Random(1)
    seen = []
    for _ in range(steps):
        rate = carried(tuner.streams, stream=stream, pipe=pipe) * rng.uniform(1 - noise, 1 + noise)
        tuner.observe(tuner.streams, rate)
        seen.append(tuner.streams)
    return seen


def test_streams_grow_while_their_sum_does_and_stop_at_the_ceiling() -> None:
    tuner = ConcurrencyTuner(16, 64)
    assert run(tuner, 8, stream=80e6, pipe=1e12) == [24, 32, 48, 64, 64, 64, 64, 64]
    assert tuner.nbytes_per_s == pytest.approx(64 * 80e6)
    assert tuner.full_nbytes_per_s is None


def test_a_full_pipe_ends_the_climb_at_the_number_that_filled_it() -> None:
    tuner = ConcurrencyTuner(16, 64)
    seen = run(tuner, 10, stream=80e6, pipe=1.0e9)
    assert seen[:3] == [24, 24, 16]
    assert set(seen[3:]) == {16}
    assert tuner.full_nbytes_per_s == pytest.approx(1.0e9)


def test_one_slow_interval_does_not_end_the_climb() -> None:
    tuner = ConcurrencyTuner(16, 64)
    tuner.observe(16, 16 * 80e6)
    tuner.observe(24, 16 * 80e6)  # a tail, or somebody else's burst
    assert tuner.streams == 24
    tuner.observe(24, 24 * 80e6)
    assert tuner.streams == 32


def test_it_does_not_creep_upward_while_the_pipe_stays_full() -> None:
    tuner = ConcurrencyTuner(16, 64)
    seen = run(tuner, 20 * REST, stream=80e6, pipe=1.0e9, noise=0.02)
    assert max(seen) == 24
    assert sum(streams == 16 for streams in seen) > 0.9 * len(seen)


def test_a_pipe_that_widens_is_noticed() -> None:
    tuner = ConcurrencyTuner(16, 64)
    run(tuner, 10, stream=80e6, pipe=1.0e9)
    assert run(tuner, 3 * REST, stream=80e6, pipe=1e12)[-1] == 64


def test_intervals_with_idle_streams_say_nothing() -> None:
    tuner = ConcurrencyTuner(16, 64)
    for _ in range(10):
        tuner.observe(6.0, 1e9)
    assert tuner.streams == 16
    assert tuner.nbytes_per_s is None


@settings(max_examples=60)
@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.lists(st.tuples(st.floats(0, 300), st.floats(0, 1e10)), max_size=80),
)
def test_whatever_is_observed_the_number_is_a_level_below_the_ceiling(
    start: int, ceiling: int, intervals: list[tuple[float, float]]
) -> None:
    tuner = ConcurrencyTuner(start, ceiling)
    assert tuner.streams <= max(1, min(start, ceiling))
    for interval in intervals:
        tuner.observe(*interval)
        assert tuner.streams in LEVELS
        assert tuner.streams <= ceiling


def test_an_interval_measures_what_full_streams_carry() -> None:
    tuner = ConcurrencyTuner(4, 4)
    for _ in range(4):
        tuner.began(0.0)
    for turn in range(1, 5):
        for _ in range(4):
            tuner.ended(float(turn), 100)
            tuner.began(float(turn))
    assert tuner.nbytes_per_s == pytest.approx(400.0, rel=0.3)


def test_an_interval_begins_again_after_a_pause() -> None:
    tuner = ConcurrencyTuner(1, 1)
    tuner.began(0.0)
    tuner.ended(1.0, 100)
    tuner.began(1000.0)
    tuner.ended(1001.0, 100)
    assert tuner.nbytes_per_s is None
    tuner.began(1001.0)
    tuner.ended(1002.0, 100)
    assert tuner.nbytes_per_s == 100.0
