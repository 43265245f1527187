"""Waits between tries: random below a growing bound, as the server asks, and not for ever."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.stores.objects.requests.policy import RetryPolicy


class Highest(random.Random):
    """Always draws the bound itself."""

    def uniform(self, a: float, b: float) -> float:
        return b


def waits(policy: RetryPolicy, *, rng: random.Random, took_s: float = 0.0) -> list[float]:
    """All waits of a request whose tries take `took_s` each."""
    found: list[float] = []
    while True:
        failed = len(found) + 1
        wait_s = policy.wait_s(failed, sum(found) + failed * took_s, rng)
        if wait_s is None:
            return found
        found.append(wait_s)


def test_bounds_double_up_to_their_cap() -> None:
    policy = RetryPolicy(tries=8, total_s=1e9, backoff_s=0.5, backoff_cap_s=10.0)
    assert waits(policy, rng=Highest()) == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_waits_spread_over_the_whole_interval() -> None:
    policy = RetryPolicy(tries=2, total_s=1e9, backoff_s=1.0)
    drawn = [waits(policy, rng=random.Random(seed))[0] for seed in range(200)]
    assert min(drawn) < 0.05
    assert max(drawn) > 0.95
    assert 0.4 < sum(drawn) / len(drawn) < 0.6


def test_the_same_seed_gives_the_same_waits() -> None:
    policy = RetryPolicy()
    assert waits(policy, rng=random.Random(7)) == waits(policy, rng=random.Random(7))


@given(st.integers(1, 20), st.floats(0.001, 5.0), st.floats(0.1, 100.0), st.integers(0, 9999))
def test_tries_and_total_time_are_bounded(
    count: int, backoff_s: float, total_s: float, seed: int
) -> None:
    policy = RetryPolicy(tries=count, total_s=total_s, backoff_s=backoff_s)
    found = waits(policy, rng=random.Random(seed), took_s=0.5)
    assert len(found) < count
    assert sum(found) + 0.5 * len(found) <= total_s or not found
    assert all(0.0 <= wait <= policy.backoff_cap_s for wait in found)


def test_no_try_comes_earlier_than_the_server_asks() -> None:
    wait_s = RetryPolicy(backoff_s=0.1).wait_s(1, 0.0, random.Random(1), asked_s=7.0)
    assert wait_s is not None
    assert 7.0 <= wait_s <= 7.1


def test_a_server_that_asks_for_more_time_than_there_is_ends_the_tries() -> None:
    assert RetryPolicy(total_s=60.0).wait_s(1, 1.0, random.Random(1), asked_s=61.0) is None


def test_after_a_try_that_took_all_its_time_there_is_another_one() -> None:
    policy = RetryPolicy(total_s=100.0)
    assert policy.wait_s(1, 300.0, random.Random(1), deadline_s=300.0) is not None
    assert policy.wait_s(2, 600.5, random.Random(1), deadline_s=300.0) is None
