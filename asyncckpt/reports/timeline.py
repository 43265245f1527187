"""Timelines: when the stages of a save or restore were busy, and how many bytes they moved."""

# Rule: memory is bounded however long the operation takes. Neighbours in a lane are merged, which
#   keeps the begin, the end and the bytes of every stage exact, but hides the idle time in between.

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from asyncckpt.pickled import PickledByName

SPANS_PER_STAGE = 256
"""Maximum number of spans of a stage per process: a picture is about a thousand pixels wide."""

LANES_PER_STAGE = 64
"""Maximum number of lanes: the default number of concurrent requests to an object store."""


class Span(NamedTuple):
    """Time during which one worker or stream was busy with one stage.

    Attributes:
        stage: name of the stage.
        process: number of the process.
        lane: number of its lane, whose spans do not overlap; lanes show how many workers were busy
            at a time, not which threads.
        start_s: start in seconds from the call, on the process's own clock.
        end_s: end, likewise.
        nbytes: bytes that went through the stage, 0 for stages without bytes.
    """

    stage: str
    process: int
    lane: int
    start_s: float
    end_s: float
    nbytes: int


class Stage(NamedTuple):
    """All spans of one stage of one process.

    Attributes:
        start_s: seconds from the call to the first begin.
        end_s: seconds from the call to the last end.
        busy_s: seconds during which at least one lane was busy.
        nbytes: bytes that went through the stage.
        lanes: maximum number of lanes busy at the same time.
        spans: by start.
    """

    start_s: float
    end_s: float
    busy_s: float
    nbytes: int
    lanes: int
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Timeline(PickledByName):
    """When the stages of one save or restore were busy.

    A stage has at most 256 spans per process, in at most 64 lanes. Beyond that, neighbours in a
    lane are merged, and the idle time between them counts as busy; begin, end and bytes of every
    stage are always exact.

    Of other processes, process 0 knows one span per stage. Clocks of hosts differ, so the times of
    a process are seconds from its own call.

    Attributes:
        spans: by start.
        process: number of the process that recorded it.
    """

    spans: tuple[Span, ...] = ()
    process: int = 0

    @property
    def end_s(self) -> float:
        """Seconds from the call until the last stage ended."""
        return max((span.end_s for span in self.spans), default=0.0)

    def processes(self) -> list[int]:
        """Return the numbers of the processes, in order."""
        return sorted({span.process for span in self.spans})

    def stages(self, process: int | None = None) -> Mapping[str, Stage]:
        """Return the stages of a process (None: the recording one) by name, in order of begin."""
        process = self.process if process is None else process
        spans: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.process == process:
                spans.setdefault(span.stage, []).append(span)
        return {stage: _whole(found) for stage, found in spans.items()}

    def joined(self, others: Iterable[Timeline]) -> Timeline:
        """Return this timeline with the spans of others added."""
        spans = [*self.spans, *(span for other in others for span in other.spans)]
        return Timeline(tuple(sorted(spans, key=attrgetter("start_s"))), self.process)

    def rows(self, most: int = SPANS_PER_STAGE) -> list[list[Any]]:
        """Return the spans as JSON: stage, process, begin and end in microseconds, bytes.

        Consecutive spans of a stage are merged to at most `most`.
        """
        stages: dict[tuple[str, int], list[list[Any]]] = {}
        for stage, process, _, start_s, end_s, nbytes in self.spans:
            row = [stage, process, round(start_s * 1e6), round(end_s * 1e6), nbytes]
            stages.setdefault((stage, process), []).append(row)
        rows: list[list[Any]] = []
        for found in stages.values():
            size = -(-len(found) // most)
            for first in range(0, len(found), size):
                row = found[first]
                for other in found[first + 1 : first + size]:
                    row[3:] = max(row[3], other[3]), row[4] + other[4]
                rows.append(row)
        return rows

    @classmethod
    def from_rows(cls, rows: Iterable[Any], process: int = 0) -> Timeline:
        """Return the timeline from the `rows` of a process; lanes are assigned anew.

        Raises:
            ValueError: the rows are malformed.
        """
        lanes: dict[tuple[str, int], list[Lane]] = {}
        for row in sorted(map(_checked, rows), key=itemgetter(3)):
            stage, number, start, end, nbytes = row
            put(lanes.setdefault((stage, number), []), start / 1e6, end / 1e6, nbytes)
        spans = [span for named, found in lanes.items() for span in spans_of(found, *named)]
        return cls(tuple(sorted(spans, key=attrgetter("start_s"))), process)


def _whole(spans: Sequence[Span]) -> Stage:
    busy_s = end_s = 0.0
    for span in spans:
        busy_s += max(0.0, span.end_s - max(span.start_s, end_s))
        end_s = max(end_s, span.end_s)
    nbytes, lanes = sum(span.nbytes for span in spans), 1 + max(span.lane for span in spans)
    return Stage(spans[0].start_s, end_s, busy_s, nbytes, lanes, spans)


def _checked(row: Any) -> tuple[str, int, int, int, int]:
    if type(row) is not list or [*map(type, row)] != [str, int, int, int, int]:
        raise ValueError(f"{row!r:.80} is not a span")
    stage, process, start_us, end_us, nbytes = row
    if not 0 <= start_us <= end_us < 1 << 53 or process < 0 or nbytes < 0:
        raise ValueError(f"{row!r:.80} is not a span")
    return stage, process, start_us, end_us, nbytes


Lane = list[tuple[float, float, int]]
"""Spans of one lane, in order: start, end, bytes."""


def put(lanes: list[Lane], start: float, end: float, nbytes: int) -> None:
    """Add a span, which ends after all others, to the idle lane that ended last.

    If there are too many spans then, pairs of neighbours are merged.
    """
    idle = [lane for lane in lanes if lane[-1][1] <= start]
    if idle:
        max(idle, key=lambda lane: lane[-1][1]).append((start, end, nbytes))
    elif len(lanes) < LANES_PER_STAGE:
        lanes.append([(start, end, nbytes)])
    else:
        # All lanes are busy: merge the span with the spans that it overlaps.
        lane = min(lanes, key=lambda lane: lane[-1][1])
        while lane and lane[-1][1] > start:
            first, last, more = lane.pop()
            start, end, nbytes = min(start, first), max(end, last), nbytes + more
        lane.append((start, end, nbytes))
    if sum(map(len, lanes)) > SPANS_PER_STAGE:
        lanes[:] = map(_halved, lanes)


def spans_of(lanes: list[Lane], stage: str, process: int) -> Iterator[Span]:
    """Yield the spans of one stage; lanes are ordered by their first spans."""
    for number, lane in enumerate(sorted(lanes)):
        for row in lane:
            yield Span(stage, process, number, *row)


def _halved(lane: Lane) -> Lane:
    """Return the lane with pairs of neighbours merged."""
    pairs = itertools.zip_longest(lane[::2], lane[1::2])
    return [one if other is None else (one[0], other[1], one[2] + other[2]) for one, other in pairs]
