"""Latencies, tails, bandwidths and rate limits are those of the profile."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import pytest

from tests.simulator import GCS, LOOPBACK, S3, Profile, Request, simulator
from tests.simulator import http as protocol
from tests.simulator.profiles import (
    Shape,
    Shaper,
    TokenBucket,
    profile_of,
)
from tests.simulator.requests import Kind
from tests.simulator_tests.asking import ask

MIB = 1024**2
DRAWS = 4000


def request(kind: Kind, key: str = "") -> Request:
    return Request("GET", "/bucket", {}, kind=kind, bucket="bucket", key=key)


def draw(profile: Profile, kind: Kind, count: int = DRAWS) -> list[Shape]:
    shaper = Shaper(profile, clock=lambda: 0.0)
    return [shaper.shape(request(kind)) for _ in range(count)]


@pytest.mark.parametrize("profile", [S3, GCS])
def test_latencies_have_the_median_and_the_tail_of_the_profile(profile: Profile) -> None:
    kinds: tuple[tuple[Kind, float], ...] = (
        ("get_object", profile.get_latency_s),
        ("put_object", profile.put_latency_s),
    )
    for kind, median_s in kinds:
        shapes = draw(profile, kind)
        latencies = [shape.latency_s for shape in shapes]
        assert statistics.median(latencies) == pytest.approx(median_s, rel=0.05)
        quartiles = statistics.quantiles(latencies)
        assert quartiles[2] / quartiles[0] == pytest.approx(1.715, rel=0.1)  # exp(2 · 0.6745 · 0.4)
        assert profile.get_bandwidth is not None
        slow = [shape for shape in shapes if shape.get_bandwidth != profile.get_bandwidth]
        assert 0.005 * DRAWS < len(slow) < 0.017 * DRAWS
        assert {shape.get_bandwidth for shape in slow} == {profile.get_bandwidth / 10}
        assert statistics.median(s.latency_s for s in slow) == pytest.approx(10 * median_s, rel=0.5)


def test_a_seed_decides_what_is_drawn() -> None:
    assert draw(S3, "get_object", 50) == draw(S3, "get_object", 50)
    assert draw(S3, "get_object", 50) != draw(replace(S3, seed=1), "get_object", 50)


def test_loopback_shapes_nothing() -> None:
    unshaped = Shape(0.0, None, None, None)
    assert draw(LOOPBACK, "put_object", 1) == [unshaped]
    assert draw(replace(LOOPBACK, seed=5, name="mine"), "put_object", 1) == [unshaped]


def test_a_token_bucket_gives_its_rate() -> None:
    bucket = TokenBucket(10.0, burst_s=0.5)
    assert [bucket.take(0.0) for _ in range(6)] == [True] * 5 + [False]
    assert [bucket.take(0.2) for _ in range(3)] == [True, True, False]
    given = sum(bucket.take(1.0 + step / 1000) for step in range(10_000))
    assert given == pytest.approx(5 + 100, abs=2)


def test_an_object_is_written_once_a_second() -> None:
    now_s = 0.0
    shaper = Shaper(replace(GCS, writes_per_s=None), clock=lambda: now_s)

    def refusal(kind: Kind, key: str) -> str | None:
        return shaper.shape(request(kind, key)).refusal

    assert refusal("put_object", "a") is None
    assert refusal("put_object", "b") is None
    assert refusal("get_object", "a") is None
    now_s = 0.9
    assert refusal("put_object", "a") == "ObjectWriteRate"
    assert refusal("delete_object", "a") == "ObjectWriteRate"
    now_s = 1.0
    assert refusal("delete_object", "a") is None


@pytest.mark.parametrize(
    ("api", "target", "status", "says"),
    [
        ("s3", "/bucket/a", 503, b"<Code>SlowDown</Code>"),
        ("gcs", "/bucket/a", 429, b"<Code>SlowDown</Code>"),
        ("gcs", "/storage/v1/b/bucket/o/a?alt=media", 429, b'"reason": "rateLimitExceeded"'),
    ],
)
def test_requests_above_the_rate_are_told_to_slow_down(
    api: str, target: str, status: int, says: bytes
) -> None:
    slow = Profile("slow", reads_per_s=0.001, burst_s=2000, writes_per_s=0.001)
    with simulator(slow) as sim:
        endpoint = sim.s3_endpoint if api == "s3" else sim.gcs_endpoint
        answers = [ask(endpoint, "GET", target) for _ in range(3)]
        assert [answer.status for answer in answers] == [404, 404, status]
        assert says in answers[2].body
        written = [ask(sim.s3_endpoint, "PUT", f"/bucket/{key}", b"x").status for key in "abc"]
        assert written == [200, 200, 503]
        assert list(sim.objects()) == ["a", "b"]


def test_a_second_write_within_a_second_gets_429() -> None:
    with simulator(Profile("gcs-like", object_write_interval_s=60.0)) as sim:
        target = "/upload/storage/v1/b/bucket/o?uploadType=media&name=a"
        first, second = (ask(sim.gcs_endpoint, "POST", target, b"x") for _ in range(2))
        assert (first.status, second.status) == (200, 429)
        assert "rate limit for object mutation" in second.json["error"]["message"]


def test_an_answer_begins_after_the_latency() -> None:
    with simulator(Profile("late", get_latency_s=0.02, put_latency_s=0.06)) as sim:
        ask(sim.s3_endpoint, "PUT", "/bucket/a", b"x")
        ask(sim.s3_endpoint, "GET", "/bucket/a")
        put, get = sim.requests
        assert 0.06 <= put.applied_s - put.received_s < 30.0
        assert 0.02 <= get.applied_s - get.received_s < 30.0


@pytest.mark.parametrize("kernel", [True, False])
def test_a_connection_has_its_bandwidth(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "KERNEL_PACES", kernel and protocol.KERNEL_PACES)
    data = bytes(4 * MIB)
    with simulator(Profile("narrow", get_bandwidth=16e6, put_bandwidth=32e6)) as sim:
        began_s = time.monotonic()
        assert ask(sim.s3_endpoint, "PUT", "/bucket/a", data).status == 200
        put_s = time.monotonic() - began_s
        assert ask(sim.s3_endpoint, "GET", "/bucket/a").body == data
        get_s = time.monotonic() - began_s - put_s
        assert 4.19 / 32 * 0.9 < put_s < 30.0
        assert 4.19 / 16 * 0.8 < get_s < 30.0


def test_profiles_are_found_by_name() -> None:
    assert profile_of("s3") is S3
    assert profile_of(GCS) is GCS
    with pytest.raises(ValueError, match="no profile 'azure'; there are gcs, loopback, s3"):
        profile_of("azure")
