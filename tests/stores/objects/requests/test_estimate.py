"""Latency and bandwidth of a link, from requests whose times are given."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.requests.estimate import StreamEstimate
from asyncckpt.stores.objects.requests.sizes import ASSUMED_LATENCY_S, ASSUMED_STREAM_NBYTES_PER_S


def fill(stream: StreamEstimate, latency_s: float, nbytes_per_s: float, *, seed: int = 0) -> None:
    """Requests as a profile makes them: lognormal latency, one in a hundred ten times slower."""
    rng = random.Random(seed)
    for number in range(200):
        nbytes = 4 * KIB if number % 2 else 16 * MIB
        wait_s = latency_s * rng.lognormvariate(0.0, 0.4) * (10 if rng.random() < 0.01 else 1)
        stream.observe(nbytes, wait_s + nbytes / nbytes_per_s)


def test_before_anything_was_measured_the_assumptions_stand() -> None:
    stream = StreamEstimate()
    assert stream.latency_s == ASSUMED_LATENCY_S
    assert stream.nbytes_per_s == ASSUMED_STREAM_NBYTES_PER_S
    assert stream.quantile_s(MIB, 0.95) is None


@settings(max_examples=20)
@given(st.floats(0.001, 0.2), st.floats(20e6, 2e9), st.integers(0, 10**6))
def test_latency_and_bandwidth_are_found_in_spite_of_tails(
    latency_s: float, nbytes_per_s: float, seed: int
) -> None:
    stream = StreamEstimate()
    fill(stream, latency_s, nbytes_per_s, seed=seed)
    assert stream.latency_s == pytest.approx(latency_s, rel=0.35)
    # What a large request takes is known better than its parts.
    nbytes = 16 * MIB
    assert stream.expected_s(nbytes) == pytest.approx(latency_s + nbytes / nbytes_per_s, rel=0.35)


def test_one_slow_request_in_a_hundred_changes_nothing() -> None:
    calm, wild = StreamEstimate(), StreamEstimate()
    for number in range(100):
        calm.observe(16 * MIB, 0.25)
        wild.observe(16 * MIB, 30.0 if number == 50 else 0.25)
    assert wild.nbytes_per_s == calm.nbytes_per_s
    assert wild.latency_s == calm.latency_s


def test_old_requests_are_forgotten() -> None:
    stream = StreamEstimate()
    fill(stream, 0.2, 20e6)
    fill(stream, 0.01, 500e6)
    assert stream.latency_s == pytest.approx(0.01, rel=0.4)
    assert stream.nbytes_per_s == pytest.approx(500e6, rel=0.4)


def test_an_assumed_latency_is_never_more_than_a_large_request_took() -> None:
    stream = StreamEstimate()
    for _ in range(10):
        stream.observe(16 * MIB, 0.012)  # a server on the same machine, before any small request
    assert stream.latency_s == pytest.approx(0.006)
    assert stream.nbytes_per_s > 1e9


@settings(max_examples=20)
@given(st.integers(1, 256 * MIB), st.integers(0, 10**6))
def test_quantiles_are_in_order_and_above_most_requests(nbytes: int, seed: int) -> None:
    stream = StreamEstimate()
    fill(stream, 0.03, 85e6, seed=seed)
    found = [stream.quantile_s(nbytes, share) for share in (0.1, 0.5, 0.95, 1.0)]
    assert all(value is not None for value in found)
    assert found == sorted(found, key=lambda value: value or 0.0)
    assert found[1] == pytest.approx(stream.expected_s(nbytes), rel=0.3)


def test_quantiles_of_one_size_hold_for_that_size() -> None:
    stream = StreamEstimate()
    for number in range(100):
        stream.observe(8 * MIB, 0.1 + 0.001 * number)
    assert stream.quantile_s(8 * MIB, 0.95) == pytest.approx(0.195, rel=0.02)


def test_directions_are_kept_apart() -> None:
    put, get = StreamEstimate(), StreamEstimate()
    for _ in range(8):
        put.observe(64, 0.08)
        get.observe(64, 0.05)
    assert (put.latency_s, put.nbytes_per_s, put.count) == (0.08, 85e6, 8)
    assert (get.latency_s, get.nbytes_per_s, get.count) == (0.05, 85e6, 8)
