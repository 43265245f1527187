"""Every number of the request discipline, with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncckpt.flow.retry import Patience
from asyncckpt.options import KIB, MIB


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Every number of the request discipline.

    Attributes:
        timeout_s: seconds that any request gets: stores pause for tens of seconds while they
            repartition, and answer then.
        floor_nbytes_per_s: a body gets the time that it takes at this rate, if that is more:
            sixteen streams of it are a 32 Mbit/s uplink. After a try that ran out of time the
            next one gets twice as long.
        per_key_s: seconds more for every key of a deletion, which a client may send one by one.
        list_timeout_s: seconds that a listing gets, which is one request for every 1,000 keys.
        patience: tries and waits between them. Ten tries that end at once take half a minute,
            which bridges what S3 needs to split a partition under load.
        streams: transfers in flight each way to begin with: 16 fill most links.
        max_streams: transfers in flight each way, at most.
        ceiling: requests in flight in all: what the connection pools of the clients hold.
        hedge_quantile: a transfer is slow when it takes longer than this share of all …
        hedge_factor: … times this, so that of transfers that are all alike none is raced.
        hedge_min_s: none is raced earlier: less cannot be won than a second one costs.
        hedge_cold_s: when one is raced as long as there are no measurements, in seconds …
        hedge_cold_nbytes_per_s: … and for its bytes at this rate.
        hedge_share: second transfers per transfer, at most.
        hedge_burst: second transfers that may be saved up.
        hedges_at_once: second transfers in flight each way; a read holds memory that is counted
            once only.
        first_read_nbytes: size of the first ranged read of an object of unknown size: most
            records fit.
        next_read_nbytes: size of the further ones.
    """

    timeout_s: float = 60.0
    floor_nbytes_per_s: float = 256.0 * KIB
    per_key_s: float = 0.1
    list_timeout_s: float = 300.0
    patience: Patience = field(default_factory=Patience)
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
        """Seconds that the first try of a request with a body of `nbytes` gets."""
        return max(self.timeout_s, nbytes / self.floor_nbytes_per_s)


HASTY = RequestPolicy(
    timeout_s=2.0,
    floor_nbytes_per_s=64.0 * MIB,
    list_timeout_s=5.0,
    patience=Patience(tries=6, total_s=20.0, backoff_s=0.01, backoff_cap_s=0.1),
    hedge_cold_s=0.2,
)
"""For servers on the same machine that fail on purpose: tests."""
