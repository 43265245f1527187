"""Plan of a measurement of an object store, and the recommendation from its results."""

# Rule 1: the plan is made before any request, so that its bytes can be announced.
# Rule 2: among points as fast as the best, up to noise, the one with the least memory wins.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from asyncckpt.options import GIB, MIB
from asyncckpt.pickled import PickledByName
from asyncckpt.reports import counted, nbytes_text, rate_text

MAX_NBYTES = 16 * GIB
"""Most bytes moved in both directions; the grid's axes take two thirds."""

MAX_S = 120.0
"""Seconds after which the measurement ends with the results so far."""

SIZES_MIB = (16, 64, 8, 32, 128, 4)
STREAMS = (16, 32, 8, 4, 1)
"""The grid, most informative first: both axes through 16 streams of 16 MiB, then the rest."""

FIRST = (4, 4)
"""MiB and streams of the first point, which predicts the time of the others."""

LEAST_REQUESTS = 4
"""Fewest requests per point; with fewer, one slow request would dominate."""

NEAR = 0.95
"""Share of the best rate that counts as equal: repeated measurements differ by as much."""


class GridPoint(NamedTuple):
    """One planned measurement.

    Attributes:
        nbytes: size of every request.
        streams: requests in flight.
        requests: requests in each direction.
    """

    nbytes: int
    streams: int
    requests: int

    @property
    def moved_nbytes(self) -> int:
        """Bytes of both directions together."""
        return 2 * self.nbytes * self.requests


@dataclass(frozen=True, slots=True)
class TunePoint(PickledByName):
    """One measurement: throughput with objects of one size and a number of streams.

    Attributes:
        direction: ``"put"`` or ``"get"``.
        nbytes: size of every object.
        streams: requests in flight.
        nbytes_per_s: throughput of all of them together.
    """

    direction: Literal["put", "get"]
    nbytes: int
    streams: int
    nbytes_per_s: float


@dataclass(frozen=True, slots=True)
class TuneReport(PickledByName):
    """Measurements of an object store, and the recommendation from them.

    Attributes:
        location: URL that was measured.
        client: library that made the requests.
        put_latency_s: seconds that a small write takes.
        get_latency_s: seconds that a small read takes.
        points: the measurements, in the order they were made.
        target_data_file_nbytes: recommended for `SaveOptions`.
        concurrency: likewise.
        read_concurrency: recommended for `RestoreOptions.concurrency`.
        nbytes_per_s: throughput of writing with the recommended values.
        reason: the reason for the recommendation, in a sentence.
        moved_nbytes: bytes written and read.
        total_s: seconds taken.
        notes: remarks for the user.
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
    moved_nbytes: int
    total_s: float
    notes: tuple[str, ...] = ()

    @property
    def best_nbytes_per_s(self) -> float:
        """Highest throughput of writing."""
        return max(point.nbytes_per_s for point in self.points if point.direction == "put")

    def __str__(self) -> str:
        return (
            f"{self.location}: target_data_file_nbytes={self.target_data_file_nbytes}, "
            f"concurrency={self.concurrency} ({rate_text(self.nbytes_per_s, 1.0)}); {self.reason}"
        )


def grid(max_nbytes: int, memory_nbytes: int, copies: int) -> tuple[GridPoint, ...]:
    """Return the points to measure with at most `max_nbytes`, the most informative first.

    `memory_nbytes` limits the bytes in flight, including the `copies` that the client makes of each
    body or response.
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
    """Return the point with the least memory in flight among those as good as the best.

    Raises:
        ValueError: there is no point of this direction.
    """
    own = [point for point in points if point.direction == direction]
    best = max(point.nbytes_per_s for point in own)
    near = [point for point in own if point.nbytes_per_s >= NEAR * best]
    return min(near, key=lambda point: (point.nbytes * point.streams, point.streams))


def reason(points: Sequence[TunePoint], chosen: TunePoint) -> str:
    """Explain the choice of a point in a sentence."""
    best = max(
        (point for point in points if point.direction == chosen.direction),
        key=lambda point: point.nbytes_per_s,
    )
    text = (
        f"{counted(chosen.streams, 'stream', 'streams')} of {nbytes_text(chosen.nbytes)} "
        f"{'carries' if chosen.streams == 1 else 'carry'} {rate_text(chosen.nbytes_per_s, 1.0)}"
    )
    if best is chosen:
        return text
    return (
        f"{text}, within {100 * (1 - NEAR):.0f} % of the best measured point "
        f"({best.streams} of {nbytes_text(best.nbytes)}: {rate_text(best.nbytes_per_s, 1.0)}) "
        "with less in memory"
    )
