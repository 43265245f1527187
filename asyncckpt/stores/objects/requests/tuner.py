"""Concurrency tuner: finds how many streams of one direction use a link fully.

It moves one level up as long as the total bandwidth grows.
"""

# Rule 1: no clock. Callers pass the time.
# Rule 2: only intervals with busy streams count.
# Rule 3: if more streams gain nothing, the smaller number is kept.

from __future__ import annotations

LEVELS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of streams to try; neighbours differ enough to measure a difference."""

GAIN = 1.08
"""Growth of total bandwidth for which a step up is kept: more than the noise of one interval, less
than half of the smallest step."""

LOOKS = 2
"""Intervals without the gain before a step up is reverted. With only one, a slow request or a
neighbour's burst would block the step for a long time."""

ROUNDS = 2
"""Transfers per stream in an interval; with more, those in flight at its ends weigh less."""

MIN_INTERVAL_S = 0.2
"""Shorter intervals would measure the machine's scheduler."""

BUSY = 0.75
"""Minimum average share of streams in use for an interval to count."""

REST = 24
"""Intervals until a reverted step up is tried again, because links change."""


class ConcurrencyTuner:
    """Number of streams to use in one direction, moved one level at a time.

    Args:
        start: streams to begin with, rounded down to a level.
        ceiling: upper bound.

    Attributes:
        active: transfers in flight now.
        nbytes_per_s: total bandwidth as last measured; None before the first interval.
    """

    def __init__(self, start: int, ceiling: int) -> None:
        self._top = _level(ceiling)
        self._level = min(_level(start), self._top)
        self._rates: dict[int, float] = {}
        self._rest = 0
        self._stepped_up = False
        self._doubts = 0
        self.nbytes_per_s: float | None = None
        # The current interval: maximum transfers in flight, ended transfers, bytes, stream-seconds.
        self.active = self._peak = self._ended = self._nbytes = 0
        self._begun_s = self._seen_s = self._area = 0.0

    @property
    def streams(self) -> int:
        """Streams to use now."""
        return LEVELS[self._level]

    @property
    def full_nbytes_per_s(self) -> float | None:
        """Capacity of the link, if more streams did not gain bandwidth; else None."""
        return self.nbytes_per_s if self._rest > 0 else None

    def began(self, now_s: float) -> None:
        """Note that a transfer began."""
        if not self.active and now_s - self._seen_s > MIN_INTERVAL_S:
            self._restart(now_s)  # intervals contain no pauses
        self._advance(now_s)
        self.active += 1
        self._peak = max(self._peak, self.active)

    def ended(self, now_s: float, nbytes: int) -> None:
        """Note that a transfer of `nbytes` ended, which may complete an interval."""
        self._advance(now_s)
        self.active -= 1
        self._nbytes += nbytes
        self._ended += 1
        seconds = now_s - self._begun_s
        if self._ended >= ROUNDS * self._peak and seconds >= MIN_INTERVAL_S:
            streams, nbytes_per_s = self._area / seconds, self._nbytes / seconds
            self._restart(now_s)
            self.observe(streams, nbytes_per_s)

    def observe(self, streams: float, nbytes_per_s: float) -> None:
        """Add an interval with its average streams and total bandwidth; may change `streams`."""
        if streams < BUSY * self.streams:
            return
        level = self._level
        rate = (self._rates.get(level, nbytes_per_s) + nbytes_per_s) / 2
        self._rates[level] = self.nbytes_per_s = rate
        below = self._rates.get(level - 1)
        if self._rest:
            self._rest -= 1
        elif self._stepped_up and below is not None and rate < GAIN * below:
            self._doubts += 1
            if self._doubts == LOOKS:
                self._level, self._stepped_up, self._doubts = level - 1, False, 0
                self._rest = REST
                self.nbytes_per_s = below
        elif level < self._top:
            self._rates.pop(level + 1, None)
            self._level, self._stepped_up, self._doubts = level + 1, True, 0
        else:
            self._stepped_up = False

    def _advance(self, now_s: float) -> None:
        self._area += self.active * (now_s - self._seen_s)
        self._seen_s = now_s

    def _restart(self, now_s: float) -> None:
        self._begun_s = self._seen_s = now_s
        self._area = 0.0
        self._nbytes = self._ended = 0
        self._peak = self.active


def _level(streams: int) -> int:
    return max(0, sum(level <= streams for level in LEVELS) - 1)
