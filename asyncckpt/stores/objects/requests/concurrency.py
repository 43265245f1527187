"""Concurrency controller of one direction: number of transfers, slowness, hedges."""

# Rule 1: hedges are a fixed share of all requests, so that a slow server does not get double load.
# Rule 2: only answered requests are measured, without their time in the queue.

from __future__ import annotations

from asyncckpt.flow.limiter import Limiter
from asyncckpt.stores.objects.requests.estimate import LARGE_NBYTES, StreamEstimate
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.sizes import Traffic
from asyncckpt.stores.objects.requests.tuner import ConcurrencyTuner


class ConcurrencyController:
    """Limit, latency estimate and hedges of the transfers in one direction.

    Attributes:
        gate: permits for transfers, as many as the tuner or the caller decides.
        fixed: streams that the caller asked for; None while the tuner decides.
        estimate: latency and bandwidth of one stream.
        tuner: how many streams the link rewards.
        hedges_in_flight: second requests in flight.
    """

    def __init__(self, policy: RequestPolicy) -> None:
        self._policy = policy
        self.fixed: int | None = None
        self._tokens = min(1.0, policy.hedge_burst)
        self.tuner = ConcurrencyTuner(policy.streams, policy.max_streams)
        self.estimate = StreamEstimate()
        self.gate = Limiter(self.tuner.streams)
        self.hedges_in_flight = 0

    def fix(self, streams: int | None) -> None:
        """Set the caller's number of streams; with None the tuner decides again."""
        self.fixed = streams
        self.gate.ceiling = self.tuner.streams if streams is None else streams

    @property
    def traffic(self) -> Traffic:
        """Measurements, from which sizes are chosen."""
        return Traffic(
            self.estimate.latency_s,
            self.estimate.nbytes_per_s,
            self.tuner.full_nbytes_per_s,
            self.gate.ceiling,
        )

    def began(self, now_s: float) -> None:
        """Note that a transfer began."""
        self.tuner.began(now_s)

    def ended(self, now_s: float, nbytes: int) -> None:
        """Note that a transfer ended after it moved `nbytes`; the gate may widen or narrow."""
        self.tuner.ended(now_s, nbytes)
        if self.fixed is None:
            self.gate.ceiling = self.tuner.streams

    def slow_s(self, nbytes: int) -> float:
        """Return the seconds after which a transfer of `nbytes` is slow, as far as is known now.

        Large ones are slow earlier if hardly any other is in flight: the whole save waits for its
        last transfer, and a second one takes no bandwidth from others.
        """
        policy = self._policy
        usual_s = self.estimate.quantile_s(nbytes, policy.hedge_quantile)
        if usual_s is None:
            return policy.hedge_cold_s + nbytes / policy.hedge_cold_nbytes_per_s
        if nbytes >= LARGE_NBYTES and self.tuner.active <= policy.hedges_at_once:
            return usual_s
        return max(policy.hedge_min_s, policy.hedge_factor * usual_s)

    def earn_hedge(self) -> None:
        """Note that one more request was made."""
        self._tokens = min(self._policy.hedge_burst, self._tokens + self._policy.hedge_share)

    def take_hedge(self) -> bool:
        """Return whether a second request may be made now; `end_hedge` must follow."""
        if self._tokens < 1.0 or self.hedges_in_flight >= self._policy.hedges_at_once:
            return False
        self._tokens -= 1.0
        self.hedges_in_flight += 1
        return True

    def end_hedge(self) -> None:
        """Note that a second request has ended."""
        self.hedges_in_flight -= 1
