"""Concurrency controller of one direction: number of transfers, slowness, hedges."""

# Rule: hedges are a fixed share of all requests, so that a slow server does not get twice the load.

from __future__ import annotations

from asyncckpt.flow.limiter import Limiter
from asyncckpt.stores.objects.requests.estimate import LARGE_NBYTES, StreamEstimate
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.sizes import Traffic
from asyncckpt.stores.objects.requests.tuner import ConcurrencyTuner


class ConcurrencyController:
    """Limit, latency estimate and hedges of the transfers in one direction.

    Attributes:
        gate: permits for transfers; their number is set by the tuner or the caller.
        fixed: number of streams set by the caller; None while the tuner decides.
        estimate: latency and bandwidth of one stream.
        tuner: finds the number of streams.
    """

    def __init__(self, policy: RequestPolicy) -> None:
        self._policy = policy
        self.fixed: int | None = None
        self._tokens = min(1.0, policy.hedge_burst)
        self.tuner = ConcurrencyTuner(policy.streams, policy.ceiling)
        self.estimate = StreamEstimate()
        self.gate = Limiter(self.tuner.streams)
        self.hedges_in_flight = 0

    def fix(self, streams: int | None) -> None:
        """Fix the number of streams; None lets the tuner decide again."""
        self.fixed = streams
        self.gate.ceiling = self.tuner.streams if streams is None else streams

    @property
    def traffic(self) -> Traffic:
        """Measurements for the choice of sizes."""
        return Traffic(
            self.estimate.latency_s,
            self.estimate.nbytes_per_s,
            self.tuner.full_nbytes_per_s,
            self.gate.ceiling,
        )

    def ended(self, now_s: float, nbytes: int) -> None:
        """Note that a transfer ended after it moved `nbytes`; the gate may widen or narrow."""
        self.tuner.ended(now_s, nbytes)
        if self.fixed is None:
            self.gate.ceiling = self.tuner.streams

    def slow_s(self, nbytes: int) -> float:
        """Return the seconds after which a transfer of `nbytes` is slow.

        The limit of a large transfer is lower when few others are in flight: the whole save waits
        for it, and its hedge takes no bandwidth from others.
        """
        policy = self._policy
        usual_s = self.estimate.quantile_s(nbytes, policy.hedge_quantile)
        if usual_s is None:
            return policy.hedge_cold_s + nbytes / policy.hedge_cold_nbytes_per_s
        if nbytes >= LARGE_NBYTES and self.tuner.active <= policy.hedges_at_once:
            return usual_s
        return max(policy.hedge_min_s, policy.hedge_factor * usual_s)

    def earn_hedge(self) -> None:
        """Add one request's share of a hedge to the allowance."""
        self._tokens = min(self._policy.hedge_burst, self._tokens + self._policy.hedge_share)

    def take_hedge(self) -> bool:
        """Return whether a hedge may be sent now; if so, `end_hedge` must follow."""
        if self._tokens < 1.0 or self.hedges_in_flight >= self._policy.hedges_at_once:
            return False
        self._tokens -= 1.0
        self.hedges_in_flight += 1
        return True

    def end_hedge(self) -> None:
        """Note that a hedge has ended."""
        self.hedges_in_flight -= 1
