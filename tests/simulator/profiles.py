"""Profiles of services: latency, bandwidth of a connection, rate limits, tails.

A test that needs a service of its own makes one: `replace(S3, put_latency_s=0.2, seed=7)`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.simulator.requests import COMMITS, Request

REMEMBERED_WRITES = 10_000
"""Times of the last writes of this many objects are kept before old ones are dropped."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A service. The defaults shape nothing.

    Attributes:
        name: for the command line and reports.
        get_latency_s: median time from the whole request to the first byte of the response, for
            requests that change nothing.
        put_latency_s: the same for requests that change something.
        latency_sigma: of the lognormal distribution of both.
        get_bandwidth: bytes per second that one connection delivers, or None for no limit.
        put_bandwidth: bytes per second that one connection accepts, or None.
        link_bandwidth: bytes per second of all responses together, as of the link that the
            processes of a host share; None for no limit.
        tail_fraction: share of requests that are slow.
        tail_latency: factor on the latency of a slow request.
        tail_bandwidth: divisor of the bandwidth of a slow request.
        reads_per_s: reads above this get 503 (S3) or 429 (GCS); None for no limit.
        writes_per_s: the same for writes.
        burst_s: how many seconds of its rate a token bucket holds.
        object_write_interval_s: a second write of an object within this time gets 429.
        seed: of latencies and tails.
    """

    name: str = "loopback"
    get_latency_s: float = 0.0
    put_latency_s: float = 0.0
    latency_sigma: float = 0.0
    get_bandwidth: float | None = None
    put_bandwidth: float | None = None
    link_bandwidth: float | None = None
    tail_fraction: float = 0.0
    tail_latency: float = 10.0
    tail_bandwidth: float = 10.0
    reads_per_s: float | None = None
    writes_per_s: float | None = None
    burst_s: float = 1.0
    object_write_interval_s: float = 0.0
    seed: int = 0


LOOPBACK = Profile()
"""As fast as the machine is."""

S3 = Profile(
    "s3",
    get_latency_s=0.030,
    put_latency_s=0.040,
    latency_sigma=0.4,
    get_bandwidth=85e6,
    put_bandwidth=85e6,
    tail_fraction=0.01,
    reads_per_s=5500,
    writes_per_s=3500,
)
"""A bucket of S3 in the same region, one prefix."""

GCS = Profile(
    "gcs",
    get_latency_s=0.050,
    put_latency_s=0.080,
    latency_sigma=0.4,
    get_bandwidth=60e6,
    put_bandwidth=60e6,
    tail_fraction=0.01,
    reads_per_s=5000,
    writes_per_s=1000,
    object_write_interval_s=1.0,
)
"""A bucket of GCS in the same region that has not been scaled up yet."""

PROFILES = {profile.name: profile for profile in (LOOPBACK, S3, GCS)}


def profile_of(value: Profile | str) -> Profile:
    """Return the profile itself, or the one with this name."""
    if isinstance(value, Profile):
        return value
    if value not in PROFILES:
        raise ValueError(f"no profile {value!r}; there are {', '.join(sorted(PROFILES))}")
    return PROFILES[value]


class TokenBucket:
    """`rate_per_s` tokens a second, of which at most `burst_s` seconds' worth are kept."""

    def __init__(self, rate_per_s: float, burst_s: float) -> None:
        self._rate = rate_per_s
        self._most = max(1.0, rate_per_s * burst_s)
        self._tokens = self._most
        self._at: float | None = None

    def take(self, now_s: float) -> bool:
        """Take a token; return whether there was one."""
        if self._at is not None:
            self._tokens = min(self._most, self._tokens + (now_s - self._at) * self._rate)
        self._at = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Shape(NamedTuple):
    """Latency, bandwidth and refusal of one request.

    Attributes:
        latency_s: from its last byte to the first of the response.
        get_bandwidth: bytes per second of the response, or None.
        put_bandwidth: bytes per second of its body, or None.
        refusal: code of the error that it gets instead, or None.
    """

    latency_s: float
    get_bandwidth: float | None
    put_bandwidth: float | None
    refusal: str | None


class Shaper:
    """Draws the shape of each request, in the order in which they come."""

    def __init__(self, profile: Profile, clock: Callable[[], float] = time.monotonic) -> None:
        self.profile = profile
        self._clock = clock
        self._random = random.Random(profile.seed)
        burst_s = profile.burst_s
        self._reads = profile.reads_per_s and TokenBucket(profile.reads_per_s, burst_s)
        self._writes = profile.writes_per_s and TokenBucket(profile.writes_per_s, burst_s)
        self._written: dict[tuple[str, str], float] = {}
        self._link_free_s = 0.0

    def shape(self, request: Request) -> Shape:
        """Draw the shape of this request."""
        profile = self.profile
        median_s = profile.put_latency_s if request.is_write else profile.get_latency_s
        latency_s = median_s * math.exp(self._random.gauss(0.0, profile.latency_sigma))
        slow = self._random.random() < profile.tail_fraction
        divisor = profile.tail_bandwidth if slow else 1.0
        return Shape(
            latency_s * (profile.tail_latency if slow else 1.0),
            profile.get_bandwidth and profile.get_bandwidth / divisor,
            profile.put_bandwidth and profile.put_bandwidth / divisor,
            self._refusal(request),
        )

    def link_wait_s(self, nbytes: int) -> float:
        """Return how long a response of so many bytes waits for its turn on the link."""
        if not self.profile.link_bandwidth:
            return 0.0
        now_s = self._clock()
        begins_s = max(now_s, self._link_free_s)
        self._link_free_s = begins_s + nbytes / self.profile.link_bandwidth
        return self._link_free_s - now_s

    def _refusal(self, request: Request) -> str | None:
        now_s = self._clock()
        bucket = self._writes if request.is_write else self._reads
        if bucket and not bucket.take(now_s):
            return "SlowDown"
        interval_s = self.profile.object_write_interval_s
        if interval_s and request.kind in COMMITS and request.key:
            where = (request.bucket, request.key)
            if now_s - self._written.get(where, -math.inf) < interval_s:
                return "ObjectWriteRate"
            if len(self._written) >= REMEMBERED_WRITES:
                self._written = {k: t for k, t in self._written.items() if now_s - t < interval_s}
            self._written[where] = now_s
        return None
