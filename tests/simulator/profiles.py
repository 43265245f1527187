"""Latencies, tails and rate limits of a profile."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import NamedTuple

from asyncckpt.testing.objectstore.profiles import Profile
from asyncckpt.testing.objectstore.requests import COMMITS, Request

REMEMBERED_WRITES = 10_000
"""Times of the last writes of this many objects are kept before old ones are dropped."""


class TokenBucket:
    """`rate_per_s` tokens a second, of which at most `burst_s` seconds' worth are kept."""

    def __init__(self, rate_per_s: float, burst_s: float) -> None:
        self._rate = rate_per_s
        self._most = max(1.0, rate_per_s * burst_s)
        self._tokens = self._most
        self._at: float | None = None

    def take(self, now_s: float) -> bool:
        """A token was there and is taken."""
        if self._at is not None:
            self._tokens = min(self._most, self._tokens + (now_s - self._at) * self._rate)
        self._at = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Shape(NamedTuple):
    """What one request meets.

    Attributes:
        latency_s: from its last byte to the first of the answer.
        get_bandwidth: bytes per second of the answer, or None.
        put_bandwidth: bytes per second of its body, or None.
        refusal: code of the error that it gets instead, or None.
    """

    latency_s: float
    get_bandwidth: float | None
    put_bandwidth: float | None
    refusal: str | None


UNSHAPED = Shape(0.0, None, None, None)


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
        self._shapeless = profile == Profile(name=profile.name, seed=profile.seed)

    def shape(self, request: Request) -> Shape:
        """What this request meets."""
        if self._shapeless:
            return UNSHAPED
        profile = self.profile
        writes = request.is_write
        median_s = profile.put_latency_s if writes else profile.get_latency_s
        latency_s = median_s * math.exp(self._random.gauss(0.0, profile.latency_sigma))
        slow = self._random.random() < profile.tail_fraction
        if slow:
            latency_s *= profile.tail_latency
        divisor = profile.tail_bandwidth if slow else 1.0
        return Shape(
            latency_s,
            profile.get_bandwidth and profile.get_bandwidth / divisor,
            profile.put_bandwidth and profile.put_bandwidth / divisor,
            self._refusal(request, writes),
        )

    def _refusal(self, request: Request, writes: bool) -> str | None:
        now_s = self._clock()
        bucket = self._writes if writes else self._reads
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
