"""What `tune` measures on a store, and what follows from it."""

# Rule 1: the plan is made before anything is sent, so that its bytes can be announced.
# Rule 2: a point near the fastest that holds less memory is the better one: what more memory buys
#   is then within the noise.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncckpt.options import GIB, MIB
from asyncckpt.planning.sizes import (
    ASSUMED_LATENCY_S,
    ASSUMED_STREAM_NBYTES_PER_S,
    Choice,
    Traffic,
)
from asyncckpt.reports import nbytes_text, rate_text

MAX_NBYTES = 16 * GIB
"""Bytes that are moved at most, both ways together; two thirds of them for the grid's axes."""

MAX_S = 120.0
"""Seconds after which the measurement ends with what it has."""

STATE_NBYTES = 16 * GIB
"""The state for which the automatic choice is computed: large enough that its size does not
matter."""

SIZES_MIB = (16, 64, 8, 32, 128, 4)
STREAMS = (16, 32, 8, 4, 1)
"""The grid, what tells most first: both axes through 16 streams of 16 MiB, then the rest."""

FIRST = (4, 4)
"""MiB and streams of the point that is made before all others: it tells how long they will take."""

LEAST_REQUESTS = 4
"""Requests that make a point: fewer, and one slow one decides."""

GAIN = 1.08
"""What more streams must carry to be used; the factor that saves climb by."""

NEAR = 0.95
"""Share of the best rate that is as good as the best: repeated points differ by this much."""


class GridPoint(NamedTuple):
    """One measurement to be made.

    Attributes:
        nbytes: size of every request.
        streams: requests in flight.
        requests: how many are made each way.
    """

    nbytes: int
    streams: int
    requests: int

    @property
    def moved_nbytes(self) -> int:
        """Bytes of both ways together."""
        return 2 * self.nbytes * self.requests


@dataclass(frozen=True, slots=True)
class TunePoint:
    """One measurement: objects of one size, so many requests in flight.

    Attributes:
        direction: ``"put"`` or ``"get"``.
        nbytes: size of every object.
        streams: requests in flight.
        nbytes_per_s: what all of them carried together.
    """

    direction: Literal["put", "get"]
    nbytes: int
    streams: int
    nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What a store was found to be like, and what to save and restore with.

    Attributes:
        location: URL that was measured.
        client: library that made the requests.
        put_latency_s: seconds that a small write takes.
        get_latency_s: seconds that a small read takes.
        points: the measurements, in the order they were made.
        target_data_file_nbytes: recommended for `SaveOptions`.
        concurrency: likewise.
        read_concurrency: recommended for `RestoreOptions.concurrency`.
        nbytes_per_s: what writing carried with the recommended values.
        reason: why these, in a sentence.
        state_nbytes: size of the state for which `auto` was asked.
        auto_data_file_nbytes: what ``target_data_file_nbytes="auto"`` makes of these measurements.
        auto_concurrency: likewise.
        auto_nbytes_per_s: what writing carried with those two; None where no time was left.
        moved_nbytes: bytes written and read.
        total_s: seconds taken.
        notes: anything a person should know.
    """

    location: str
    client: str
    put_latency_s: float
    get_latency_s: float
    points: tuple[TunePoint, ...]
    target_data_file_nbytes: int
    concurrency: int
    read_concurrency: int
    nbytes_per_s: float
    reason: str
    state_nbytes: int
    auto_data_file_nbytes: int
    auto_concurrency: int
    auto_nbytes_per_s: float | None
    moved_nbytes: int
    total_s: float
    notes: tuple[str, ...] = ()

    @property
    def best_nbytes_per_s(self) -> float:
        """What writing carried at most."""
        return max(point.nbytes_per_s for point in self.points if point.direction == "put")

    def __str__(self) -> str:
        return (
            f"{self.location}: target_data_file_nbytes={self.target_data_file_nbytes}, "
            f"concurrency={self.concurrency} ({rate_text(self.nbytes_per_s, 1.0)}); {self.reason}"
        )


def grid(max_nbytes: int, memory_nbytes: int, copies: int) -> tuple[GridPoint, ...]:
    """The measurements that together move at most `max_nbytes`, those that tell most first.

    Args:
        max_nbytes: bytes of both ways together.
        memory_nbytes: bytes that may be in flight, copies by the client included.
        copies: copies of a body or answer that the client makes.
    """
    cross = [(SIZES_MIB[0], streams) for streams in STREAMS]
    cross += [(size, STREAMS[0]) for size in SIZES_MIB[1:]]
    rest = [(size, streams) for size in SIZES_MIB[1:] for streams in STREAMS[1:]]
    found: list[GridPoint] = []
    left = max_nbytes
    rest.sort(key=lambda point: point[0] * point[1])
    for size_mib, streams in dict.fromkeys([FIRST, *cross, *rest]):
        nbytes = size_mib * MIB
        rounds = -(-LEAST_REQUESTS // streams)
        point = GridPoint(nbytes, streams, streams * rounds)
        if point.moved_nbytes <= left and streams * nbytes * (1 + copies) <= memory_nbytes:
            found.append(point)
            left -= point.moved_nbytes
    return tuple(found)


def recommend(points: Sequence[TunePoint], direction: Literal["put", "get"]) -> TunePoint:
    """The point with the least memory in flight among those that are as good as the best.

    Raises:
        ValueError: there is none of this direction.
    """
    own = [point for point in points if point.direction == direction]
    best = max(point.nbytes_per_s for point in own)
    near = [point for point in own if point.nbytes_per_s >= NEAR * best]
    return min(near, key=lambda point: (point.nbytes * point.streams, point.streams))


def reason(points: Sequence[TunePoint], chosen: TunePoint) -> str:
    """Why this point, from what its neighbours carried."""
    own = [point for point in points if point.direction == chosen.direction]
    best = max(own, key=lambda point: point.nbytes_per_s)
    size = nbytes_text(chosen.nbytes)
    text = f"{chosen.streams} streams of {size} carry {rate_text(chosen.nbytes_per_s, 1.0)}"
    if best is not chosen:
        text += (
            f", within {100 * (1 - NEAR):.0f} % of the best that was measured "
            f"({best.streams} of {nbytes_text(best.nbytes)}: {rate_text(best.nbytes_per_s, 1.0)}) "
            "with less in memory"
        )
    worse = [
        f"{point.streams} of {nbytes_text(point.nbytes)} only {rate_text(point.nbytes_per_s, 1.0)}"
        for point in (
            _neighbour(own, chosen, "streams"),
            _neighbour(own, chosen, "nbytes"),
        )
        if point is not None and point.nbytes_per_s < NEAR * best.nbytes_per_s
    ]
    return text + "".join(f"; {part}" for part in worse)


def auto_traffic(points: Sequence[TunePoint], latency_s: float) -> Traffic | None:
    """What a save would have learnt of the link from writing; None if too little was measured.

    Saves begin with the first number of streams of the grid, and go on to more if they carry more.
    """
    rates = {
        point.streams: point.nbytes_per_s
        for point in points
        if point.direction == "put" and point.nbytes == SIZES_MIB[0] * MIB
    }
    start, more = STREAMS[:2]
    if start not in rates:
        return None
    one_s = start * SIZES_MIB[0] * MIB / rates[start]
    stream = SIZES_MIB[0] * MIB / max(one_s - latency_s, one_s / 10)
    if more not in rates:
        return Traffic(latency_s, stream, None, start)
    if rates[more] >= GAIN * rates[start]:
        return Traffic(latency_s, stream, None, more)
    return Traffic(latency_s, stream, max(rates.values()), start)


ASSUMED = Traffic(ASSUMED_LATENCY_S, ASSUMED_STREAM_NBYTES_PER_S, None, STREAMS[0])
"""What the first save of a `Checkpointer` goes by."""


def measured(
    points: Sequence[TunePoint], choice: Choice, direction: Literal["put", "get"] = "put"
) -> TunePoint | None:
    """The measurement that was made with what the planner chose; None if there was none."""
    for point in points:
        if (point.direction, point.streams) == (direction, choice.concurrency) and (
            point.nbytes == choice.window_nbytes
        ):
            return point
    return None


def _neighbour(
    points: Sequence[TunePoint], chosen: TunePoint, axis: Literal["streams", "nbytes"]
) -> TunePoint | None:
    """The next smaller point along one axis."""
    other: Literal["streams", "nbytes"] = "nbytes" if axis == "streams" else "streams"
    smaller = [
        point
        for point in points
        if getattr(point, other) == getattr(chosen, other)
        and getattr(point, axis) < getattr(chosen, axis)
    ]
    return max(smaller, key=lambda point: getattr(point, axis), default=None)
