"""What a link is like, from the requests that were made over it: latency and bandwidth."""

# Rule 1: no clock: whoever observes says how long it took.
# Rule 2: medians of windows: one request in a hundred takes ten times as long and means nothing.
# Rule 3: a stream's bandwidth falls where streams share a pipe. It says how large a request should
#   be, never how many there should be; that is for `Climb`, which looks at their sum.

from __future__ import annotations

import statistics
from collections import deque
from typing import Literal

from asyncckpt.options import KIB, MIB
from asyncckpt.planning.sizes import ASSUMED_LATENCY_S, ASSUMED_STREAM_NBYTES_PER_S

Direction = Literal["put", "get"]

SMALL_NBYTES = 256 * KIB
"""Requests up to this size take as long as an empty one: 3 ms of transfer at 85 MB/s."""

LARGE_NBYTES = 4 * MIB
"""Requests from this size on spend at least half of their time on the transfer."""

WINDOW = 64
"""Requests of each class that count: a few seconds' worth at 16 streams."""

ENOUGH = 5
"""Requests of a class before its median is trusted."""

REFRESH = 8
"""Requests after which medians are taken anew: sorting costs as much as a small request."""

CLOCK_S = 1e-4
"""Shorter times are not told apart: clocks of event loops may tick in milliseconds."""


class Stream:
    """One direction of a link: how long a request takes when its size is known."""

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
            f"Stream({self.latency_s * 1e3:.1f} ms, {self.nbytes_per_s / 1e6:.1f} MB/s, "
            f"{self.count} requests)"
        )

    def observe(self, nbytes: int, seconds: float) -> None:
        """A request of `nbytes` was answered after `seconds`."""
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
        """Whether the bandwidth stands on measurements."""
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
        """Seconds that a request of this size takes, as a rule."""
        latency_s, nbytes_per_s = self._estimates()
        return latency_s + nbytes / nbytes_per_s

    def quantile_s(self, nbytes: int, share: float) -> float | None:
        """Seconds within which this share of requests of `nbytes` ended; None if too few did.

        Requests of all sizes count, each relative to what its size lets expect.
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
        if not known:  # it cannot be more than the fastest large request left for it
            latency_s = min(latency_s, min(seconds for _, seconds in self._large) / 2)
        rates = [nbytes / max(seconds - latency_s, seconds / 10) for nbytes, seconds in self._large]
        return latency_s, statistics.median(rates)


class Link:
    """A link to a store, both ways.

    Attributes:
        put: uploads.
        get: downloads.
    """

    __slots__ = ("get", "put")

    def __init__(self) -> None:
        self.put = Stream()
        self.get = Stream()

    def __repr__(self) -> str:
        return f"Link(put={self.put!r}, get={self.get!r})"

    def observe(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """A request that moved `nbytes` this way was answered after `seconds`."""
        self.toward(direction).observe(nbytes, seconds)

    def toward(self, direction: Direction) -> Stream:
        """The estimates of one direction."""
        return self.put if direction == "put" else self.get
