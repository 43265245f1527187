"""Latency and bandwidth of one direction of a link, estimated from its requests."""

# Rule 1: no clock. Callers pass how long a request took.
# Rule 2: medians of windows, since one request in a hundred takes ten times as long.
# Rule 3: a stream's bandwidth falls when streams share a link. It determines the size of requests;
#   the concurrency tuner determines their number.

from __future__ import annotations

import statistics
from collections import deque

from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.requests.sizes import ASSUMED_LATENCY_S, ASSUMED_STREAM_NBYTES_PER_S

SMALL_NBYTES = 256 * KIB
"""Requests up to this size take as long as an empty one: 3 ms of transfer at 85 MB/s."""

LARGE_NBYTES = 4 * MIB
"""Requests of at least this size spend half of their time or more on the transfer."""

WINDOW = 64
"""Requests of each class in the estimate: a few seconds' worth at 16 streams."""

ENOUGH = 5
"""Requests of a class before its median counts."""

REFRESH = 8
"""Requests between computations of the medians: sorting costs as much as a small request."""

CLOCK_S = 1e-4
"""Minimum time of a request: clocks of event loops may tick in milliseconds."""


class StreamEstimate:
    """Expected duration of a request in one direction by its size.

    Attributes:
        count: requests observed.
        latency_s: seconds of a request without its transfer.
        nbytes_per_s: bandwidth of one stream.
    """

    def __init__(self) -> None:
        self.count = 0
        self.latency_s = ASSUMED_LATENCY_S
        self.nbytes_per_s = ASSUMED_STREAM_NBYTES_PER_S
        self._small: deque[float] = deque(maxlen=WINDOW)
        self._large: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._all: deque[tuple[int, float]] = deque(maxlen=2 * WINDOW)
        self._ratios: list[float] = []  # of actual to expected seconds, ascending

    def observe(self, nbytes: int, seconds: float) -> None:
        """Add a request of `nbytes` that was answered after `seconds`."""
        seconds = max(seconds, CLOCK_S)
        self.count += 1
        self._all.append((nbytes, seconds))
        if nbytes <= SMALL_NBYTES:
            self._small.append(seconds)
        elif nbytes >= LARGE_NBYTES:
            self._large.append((nbytes, seconds))
        if self.count % REFRESH == 0 or self.count < 4 * REFRESH:
            self._estimate()
            self._ratios.clear()

    def expected_s(self, nbytes: int) -> float:
        """Return the seconds that a request of this size usually takes."""
        return self.latency_s + nbytes / self.nbytes_per_s

    def quantile_s(self, nbytes: int, share: float) -> float | None:
        """Return the seconds within which this share of requests of `nbytes` ended.

        Requests of all sizes count, relative to the expected time for their size. None if there
        were too few.
        """
        if len(self._all) < 4 * ENOUGH:
            return None
        if not self._ratios:
            self._ratios = sorted(seconds / self.expected_s(size) for size, seconds in self._all)
        count = len(self._ratios)
        return self.expected_s(nbytes) * self._ratios[min(count - 1, int(share * count))]

    def _estimate(self) -> None:
        known = len(self._small) >= ENOUGH
        self.latency_s = statistics.median(self._small) if known else ASSUMED_LATENCY_S
        if len(self._large) >= ENOUGH:
            if not known:  # at most half of the fastest large request
                fastest_s = min(seconds for _, seconds in self._large)
                self.latency_s = min(self.latency_s, fastest_s / 2)
            self.nbytes_per_s = statistics.median(
                nbytes / max(seconds - self.latency_s, seconds / 10)
                for nbytes, seconds in self._large
            )
