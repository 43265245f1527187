"""Latency and bandwidth of one direction of a link, estimated from the requests made over it."""

# Rule 1: no clock. Callers pass how long a request took.
# Rule 2: medians of windows: one request in a hundred takes ten times as long and means nothing.
# Rule 3: a stream's bandwidth falls where streams share a link. It says how large a request should
#   be, never how many there should be; that is the job of the concurrency tuner.

from __future__ import annotations

import statistics
from collections import deque

from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.requests.sizes import ASSUMED_LATENCY_S, ASSUMED_STREAM_NBYTES_PER_S

SMALL_NBYTES = 256 * KIB
"""Requests up to this size take as long as an empty one: 3 ms of transfer at 85 MB/s."""

LARGE_NBYTES = 4 * MIB
"""Requests from this size on spend at least half of their time on the transfer."""

WINDOW = 64
"""Requests of each class that count: a few seconds' worth at 16 streams."""

ENOUGH = 5
"""Requests of a class before its median is trusted."""

REFRESH = 8
"""Requests after which medians are computed again: sorting costs as much as a small request."""

CLOCK_S = 1e-4
"""Shorter times are not told apart: clocks of event loops may tick in milliseconds."""


class StreamEstimate:
    """How long a request in one direction takes when its size is known.

    Attributes:
        count: requests observed.
    """

    __slots__ = ("_all", "_large", "_ratios", "_small", "_stale", "_values", "count")

    def __init__(self) -> None:
        self._small: deque[float] = deque(maxlen=WINDOW)
        self._large: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._all: deque[tuple[int, float]] = deque(maxlen=2 * WINDOW)
        self._stale = False
        self._ratios: list[float] = []
        self._values = (ASSUMED_LATENCY_S, ASSUMED_STREAM_NBYTES_PER_S)
        self.count = 0

    def __repr__(self) -> str:
        return (
            f"StreamEstimate({self.latency_s * 1e3:.1f} ms, {self.nbytes_per_s / 1e6:.1f} MB/s, "
            f"{self.count} requests)"
        )

    def observe(self, nbytes: int, seconds: float) -> None:
        """Take a request of `nbytes` into account that was answered after `seconds`."""
        seconds = max(seconds, CLOCK_S)
        self.count += 1
        self._stale |= self.count % REFRESH == 0 or self.count < 4 * REFRESH
        self._all.append((nbytes, seconds))
        if nbytes <= SMALL_NBYTES:
            self._small.append(seconds)
        elif nbytes >= LARGE_NBYTES:
            self._large.append((nbytes, seconds))

    @property
    def measured(self) -> bool:
        """Whether the bandwidth was measured rather than assumed."""
        return len(self._large) >= ENOUGH

    @property
    def latency_s(self) -> float:
        """Seconds that a request takes beside its transfer."""
        return self._estimates()[0]

    @property
    def nbytes_per_s(self) -> float:
        """Bytes per second of one stream, among as many as there were."""
        return self._estimates()[1]

    def expected_s(self, nbytes: int) -> float:
        """Return the seconds that a request of this size usually takes."""
        latency_s, nbytes_per_s = self._estimates()
        return latency_s + nbytes / nbytes_per_s

    def quantile_s(self, nbytes: int, share: float) -> float | None:
        """Return the seconds within which this share of requests of `nbytes` ended.

        Requests of all sizes count, each relative to the time expected for its size. None if
        there were too few.
        """
        if len(self._all) < 4 * ENOUGH:
            return None
        expected_s = self.expected_s(nbytes)
        return expected_s * self._ratios[min(len(self._ratios) - 1, int(share * len(self._ratios)))]

    def _estimates(self) -> tuple[float, float]:
        if self._stale:
            self._stale = False
            self._values = latency_s, nbytes_per_s = self._estimate()
            self._ratios = sorted(
                seconds / (latency_s + nbytes / nbytes_per_s) for nbytes, seconds in self._all
            )
        return self._values

    def _estimate(self) -> tuple[float, float]:
        known = len(self._small) >= ENOUGH
        latency_s = statistics.median(self._small) if known else ASSUMED_LATENCY_S
        if not self.measured:
            return latency_s, ASSUMED_STREAM_NBYTES_PER_S
        if not known:  # bounded by what the fastest large request leaves for it
            latency_s = min(latency_s, min(seconds for _, seconds in self._large) / 2)
        rates = [nbytes / max(seconds - latency_s, seconds / 10) for nbytes, seconds in self._large]
        return latency_s, statistics.median(rates)
