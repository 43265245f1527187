"""How many streams a link rewards, found by climbing the sum of what they carry."""

# Rule 1: no clock: times are told.
# Rule 2: only intervals in which the streams were really busy say anything.
# Rule 3: more streams have to earn their place: without a gain, the smaller number stands.

from __future__ import annotations

from typing import NamedTuple

LEVELS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of streams that are tried; neighbours differ by enough to be told apart."""

GAIN = 1.08
"""A step up stays if the sum of all streams grows by this factor: half of the least step's size
would be more, noise of one interval less."""

LOOKS = 2
"""Intervals without the gain, on average, before a step up is taken back: a tail in one of them, or
a neighbour's burst, would otherwise bar it for a long time."""

ROUNDS = 2
"""Transfers of every stream that make an interval: what is in flight at its ends weighs less."""

MIN_INTERVAL_S = 0.2
"""Shorter intervals measure the machine's scheduler."""

BUSY = 0.75
"""Share of the streams that must have been in use on average for an interval to count."""

REST = 24
"""Intervals at the top before the next step up is tried again: links change."""


class Interval(NamedTuple):
    """What went over a link while it was busy.

    Attributes:
        streams: transfers in flight, on average.
        nbytes_per_s: sum of all of them.
    """

    streams: float
    nbytes_per_s: float


class Meter:
    """Cuts the time in which transfers are in flight into intervals."""

    __slots__ = ("_active", "_area", "_begun_s", "_ended", "_nbytes", "_peak", "_seen_s")

    def __init__(self) -> None:
        self._active = self._peak = self._ended = self._nbytes = 0
        self._begun_s = self._seen_s = self._area = 0.0

    def began(self, now_s: float) -> None:
        """A transfer began."""
        if not self._active and now_s - self._seen_s > MIN_INTERVAL_S:
            self._restart(now_s)
        self._advance(now_s)
        self._active += 1
        self._peak = max(self._peak, self._active)

    def ended(self, now_s: float, nbytes: int) -> Interval | None:
        """A transfer ended after it moved `nbytes`; perhaps it completes an interval."""
        self._advance(now_s)
        self._active -= 1
        self._nbytes += nbytes
        self._ended += 1
        seconds = now_s - self._begun_s
        if self._ended < ROUNDS * self._peak or seconds < MIN_INTERVAL_S:
            return None
        interval = Interval(self._area / seconds, self._nbytes / seconds)
        self._restart(now_s)
        return interval

    def _advance(self, now_s: float) -> None:
        self._area += self._active * (now_s - self._seen_s)
        self._seen_s = now_s

    def _restart(self, now_s: float) -> None:
        self._begun_s = self._seen_s = now_s
        self._area = 0.0
        self._nbytes = 0
        self._ended = 0
        self._peak = self._active


class Climb:
    """The number of streams to use, moved one level at a time.

    Args:
        start: streams to begin with; the nearest level below is taken.
        ceiling: never more than this.

    Attributes:
        streams: streams to use now.
        nbytes_per_s: what they carried together at last; None before the first interval.
    """

    __slots__ = ("_doubts", "_level", "_rates", "_rest", "_top", "_tried", "nbytes_per_s")

    def __init__(self, start: int, ceiling: int) -> None:
        self._top = _level(ceiling)
        self._level = min(_level(start), self._top)
        self._rates: dict[int, float] = {}
        self._rest = 0
        self._tried = False
        self._doubts = 0
        self.nbytes_per_s: float | None = None

    def __repr__(self) -> str:
        return f"Climb({self.streams} streams, {(self.nbytes_per_s or 0.0) / 1e6:.1f} MB/s)"

    @property
    def streams(self) -> int:
        """Streams to use now."""
        return LEVELS[self._level]

    @property
    def room(self) -> int:
        """Streams that the next step would use, where one is due."""
        return LEVELS[self._level if self.settled else self._level + 1]

    @property
    def settled(self) -> bool:
        """Whether no step up is due."""
        return self._level == self._top or self._rest > 0

    @property
    def full_nbytes_per_s(self) -> float | None:
        """What the link carries at most, where more streams were seen to carry no more."""
        return self.nbytes_per_s if self._rest > 0 else None

    def observe(self, interval: Interval) -> None:
        """The link carried so much; the number of streams may change."""
        if interval.streams < BUSY * self.streams:
            return
        level, before = self._level, self._rates.get(self._level)
        rate = interval.nbytes_per_s if before is None else (before + interval.nbytes_per_s) / 2
        self._rates[level] = rate
        self.nbytes_per_s = rate
        below = self._rates.get(level - 1)
        if self._rest:
            self._rest -= 1
        elif self._tried and below is not None and rate < GAIN * below:
            self._doubts += 1
            if self._doubts == LOOKS:
                self._step(-1)
                self._rest = REST
                self.nbytes_per_s = below
        elif level < self._top:
            self._rates.pop(level + 1, None)
            self._step(1)
        else:
            self._tried = False

    def _step(self, by: int) -> None:
        self._level += by
        self._tried = by > 0
        self._doubts = 0


def _level(streams: int) -> int:
    return max(0, sum(level <= streams for level in LEVELS) - 1)
