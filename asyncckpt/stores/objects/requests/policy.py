"""Numbers of the request discipline, with their units and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.requests.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Deadlines, tries, streams and hedges of requests.

    Attributes:
        timeout_s: seconds that any request gets: stores pause for tens of seconds while they
            repartition, and answer then.
        floor_nbytes_per_s: a body gets the time that it takes at this rate, if that is more:
            sixteen such streams are a 32 Mbit/s uplink. After a try that ran out of time the next
            one gets twice as long.
        per_key_s: seconds more for every key of a deletion, which a client may send one by one.
        list_timeout_s: seconds that a listing gets, which is one request for every 1,000 keys.
        retry: tries and waits between them. Ten tries that end at once take half a minute,
            which bridges what S3 needs to split a partition under load.
        streams: transfers in flight in each direction to begin with: 16 fill most links.
        max_streams: transfers in flight in each direction, at most.
        ceiling: requests in flight in all: what the connection pools of the clients hold.
        hedge_quantile: a transfer is slow when it takes longer than this share of all …
        hedge_factor: … times this, so that no transfer is hedged where all are alike.
        hedge_min_s: no transfer is hedged earlier: a second one would cost more than it can win.
        hedge_cold_s: without measurements a transfer is hedged after this many seconds …
        hedge_cold_nbytes_per_s: … and the time of its bytes at this rate.
        hedge_share: second transfers per transfer, at most.
        hedge_burst: second transfers that may be saved up.
        hedges_at_once: second transfers in flight in each direction; the memory of a hedged read
            is counted only once.
        first_read_nbytes: size of the first ranged read of an object of unknown size: most
            records fit.
        next_read_nbytes: size of the further ones.
    """

    timeout_s: float = 60.0
    floor_nbytes_per_s: float = 256.0 * KIB
    per_key_s: float = 0.1
    list_timeout_s: float = 300.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    streams: int = 16
    max_streams: int = 64
    ceiling: int = 64
    hedge_quantile: float = 0.95
    hedge_factor: float = 1.5
    hedge_min_s: float = 0.05
    hedge_cold_s: float = 2.0
    hedge_cold_nbytes_per_s: float = 4.0 * MIB
    hedge_share: float = 0.05
    hedge_burst: float = 4.0
    hedges_at_once: int = 2
    first_read_nbytes: int = 1 * MIB
    next_read_nbytes: int = 16 * MIB

    def deadline_s(self, nbytes: int) -> float:
        """Return the seconds that the first try of a request with a body of `nbytes` gets."""
        return max(self.timeout_s, nbytes / self.floor_nbytes_per_s)


HASTY = RequestPolicy(
    timeout_s=2.0,
    floor_nbytes_per_s=64.0 * MIB,
    list_timeout_s=5.0,
    retry=RetryPolicy(tries=6, total_s=20.0, backoff_s=0.01, backoff_cap_s=0.1),
    hedge_cold_s=0.2,
)
"""Policy for tests: servers on the same machine that fail on purpose."""
