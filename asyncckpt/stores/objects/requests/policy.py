"""Deadlines, retries, streams and hedges of requests: numbers with their units and reasons."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from asyncckpt.options import KIB, MIB


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and for how long, one request is tried.

    Attributes:
        tries: maximum number of tries.
        total_s: seconds after which no further try begins, without time in the queue.
        backoff_s: upper bound of the first wait, doubled for every further wait.
        backoff_cap_s: upper bound of every wait, unless the server asks for more.
    """

    tries: int = 10
    total_s: float = 300.0
    backoff_s: float = 0.2
    backoff_cap_s: float = 20.0

    def wait_s(
        self,
        failed: int,
        spent_s: float,
        rng: random.Random,
        *,
        asked_s: float = 0.0,
        deadline_s: float = 0.0,
    ) -> float | None:
        """Return the seconds to wait before the next try, or None to give up.

        Waits have full jitter, so that clients that failed together do not come back together
        ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

        Args:
            failed: number of failed tries, at least 1.
            spent_s: seconds spent on these tries and the waits between them.
            rng: source of the jitter.
            asked_s: minimum wait requested by the server.
            deadline_s: deadline of one try; after a first try that used all of it there is another,
                even beyond `total_s`.
        """
        if failed >= self.tries:
            return None
        bound_s = min(self.backoff_cap_s, self.backoff_s * 2.0 ** (failed - 1))
        wait_s = asked_s + rng.uniform(0.0, bound_s)
        return None if spent_s + wait_s > max(self.total_s, 2.0 * deadline_s) else wait_s


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """Deadlines, tries, streams and hedges of requests.

    Attributes:
        timeout_s: minimum deadline of a request in seconds: stores may take tens of seconds to
            answer while they repartition.
        floor_nbytes_per_s: a body gets at least its time at this rate: sixteen such streams are a
            32 Mbit/s uplink. After a timeout the next try gets twice as long.
        per_key_s: additional seconds per key of a deletion, which a client may send one by one.
        list_timeout_s: deadline of a listing, which is one request for every 1,000 keys.
        retry: tries and waits between them. Ten tries that fail at once take half a minute, enough
            for S3 to split a partition under load.
        streams: initial transfers in flight in each direction: at the 85 MB/s of a stream to S3,
            32 fill a link of 20 Gbit/s; on a slower link each is merely slower.
        ceiling: maximum requests in flight in all: the size of the clients' connection pools.
        hedge_quantile: a transfer is slow when it takes longer than this share of all …
        hedge_factor: … times this factor, so that uniform transfers are not hedged. The factor does
            not apply to large transfers when few others are in flight.
        hedge_min_s: earliest hedge; an earlier one would cost more than it can gain.
        hedge_cold_s: without measurements a transfer is hedged after this many seconds …
        hedge_cold_nbytes_per_s: … plus the time of its bytes at this rate.
        hedge_share: hedges allowed per transfer, on average.
        hedge_burst: maximum allowance of hedges that may accumulate.
        hedges_at_once: maximum hedges in flight in each direction; the memory of a hedged read is
            counted only once.
        first_read_nbytes: size of the first ranged read of an object of unknown size; most records
            fit.
        next_read_nbytes: size of further ranged reads.
    """

    timeout_s: float = 60.0
    floor_nbytes_per_s: float = 256.0 * KIB
    per_key_s: float = 0.1
    list_timeout_s: float = 300.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    streams: int = 32
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
