"""The number of streams: it follows the sum of what they carry, and stops where that stops."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.flow.climb import LEVELS, REST, Climb, Interval, Meter


def carried(streams: int, *, stream: float, pipe: float) -> float:
    """What streams of their own speed carry together through a shared pipe."""
    return min(streams * stream, pipe)


def run(climb: Climb, steps: int, *, stream: float, pipe: float, noise: float = 0.0) -> list[int]:
    rng = random.Random(1)
    seen = []
    for _ in range(steps):
        rate = carried(climb.streams, stream=stream, pipe=pipe) * rng.uniform(1 - noise, 1 + noise)
        climb.observe(Interval(climb.streams, rate))
        seen.append(climb.streams)
    return seen


def test_streams_grow_while_their_sum_does_and_stop_at_the_ceiling() -> None:
    climb = Climb(16, 64)
    assert run(climb, 8, stream=80e6, pipe=1e12) == [24, 32, 48, 64, 64, 64, 64, 64]
    assert climb.nbytes_per_s == pytest.approx(64 * 80e6)
    assert climb.settled


def test_a_full_pipe_ends_the_climb_at_the_number_that_filled_it() -> None:
    climb = Climb(16, 64)
    seen = run(climb, 10, stream=80e6, pipe=1.0e9)
    assert seen[:3] == [24, 24, 16]
    assert set(seen[3:]) == {16}
    assert climb.settled


def test_one_slow_interval_does_not_end_the_climb() -> None:
    climb = Climb(16, 64)
    climb.observe(Interval(16, 16 * 80e6))
    climb.observe(Interval(24, 16 * 80e6))  # a tail, or somebody else's burst
    assert climb.streams == 24
    climb.observe(Interval(24, 24 * 80e6))
    assert climb.streams == 32


def test_it_does_not_creep_upward_while_the_pipe_stays_full() -> None:
    climb = Climb(16, 64)
    seen = run(climb, 20 * REST, stream=80e6, pipe=1.0e9, noise=0.02)
    assert max(seen) == 24
    assert sum(streams == 16 for streams in seen) > 0.9 * len(seen)


def test_a_pipe_that_widens_is_noticed() -> None:
    climb = Climb(16, 64)
    run(climb, 10, stream=80e6, pipe=1.0e9)
    assert run(climb, 3 * REST, stream=80e6, pipe=1e12)[-1] == 64


def test_intervals_with_idle_streams_say_nothing() -> None:
    climb = Climb(16, 64)
    for _ in range(10):
        climb.observe(Interval(6.0, 1e9))
    assert climb.streams == 16
    assert climb.nbytes_per_s is None


@settings(max_examples=60)
@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.lists(st.tuples(st.floats(0, 300), st.floats(0, 1e10)), max_size=80),
)
def test_whatever_is_observed_the_number_is_a_level_below_the_ceiling(
    start: int, ceiling: int, intervals: list[tuple[float, float]]
) -> None:
    climb = Climb(start, ceiling)
    assert climb.streams <= max(1, min(start, ceiling))
    for interval in intervals:
        climb.observe(Interval(*interval))
        assert climb.streams in LEVELS
        assert climb.streams <= ceiling


def test_a_meter_measures_what_full_streams_carry() -> None:
    meter = Meter()
    for _ in range(4):
        meter.began(0.0)
    found = []
    for turn in range(1, 5):
        for _ in range(4):
            interval = meter.ended(float(turn), 100)
            if interval is not None:
                found.append(interval)
            meter.began(float(turn))
    assert [interval.streams for interval in found] == pytest.approx([4.0, 4.0])
    assert [interval.nbytes_per_s for interval in found] == pytest.approx([400.0, 400.0], rel=0.3)


def test_a_meter_begins_anew_after_a_pause() -> None:
    meter = Meter()
    meter.began(0.0)
    assert meter.ended(1.0, 100) is None
    meter.began(1000.0)
    assert meter.ended(1001.0, 100) is None
    meter.began(1001.0)
    interval = meter.ended(1002.0, 100)
    assert interval is not None
    assert interval == Interval(1.0, 100.0)
