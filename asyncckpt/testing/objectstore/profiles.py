"""What a service is like: latency, bandwidth of a connection, rate limits, tails.

A test that needs a service of its own makes one: `replace(S3, put_latency_s=0.2, seed=7)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Profile:
    """A service. The defaults shape nothing.

    Attributes:
        name: for the command line and reports.
        get_latency_s: median time from the whole request to the first byte of the answer, for
            requests that change nothing.
        put_latency_s: the same for requests that change something.
        latency_sigma: of the lognormal distribution of both.
        get_bandwidth: bytes per second that one connection delivers, or None for no limit.
        put_bandwidth: bytes per second that one connection accepts, or None.
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
    """The profile itself, or the one with this name."""
    if isinstance(value, Profile):
        return value
    if value not in PROFILES:
        raise ValueError(f"no profile {value!r}; there are {', '.join(sorted(PROFILES))}")
    return PROFILES[value]


def with_overrides(profile: Profile, overrides: dict[str, str]) -> Profile:
    """The profile with fields set from text; ``none`` lifts a limit."""
    known = {f.name for f in fields(Profile)}
    values: dict[str, Any] = {}
    for name, text in overrides.items():
        if name not in known:
            raise ValueError(f"a profile has no {name!r}; it has {', '.join(sorted(known))}")
        if name == "name":
            values[name] = text
        elif text.lower() == "none":
            values[name] = None
        else:
            values[name] = int(text) if name == "seed" else float(text)
    return replace(profile, **values)
