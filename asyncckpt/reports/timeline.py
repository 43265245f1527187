"""Timelines: when the stages of a save or restore were busy, and with how many bytes."""

# Rule 1: recording costs a few microseconds per call, and calls are made per window, read or batch,
#   never per leaf: less than a thousandth of a save.
# Rule 2: however long the operation, what is kept is bounded. Neighbours in a lane are merged, so
#   that the begin, the end and the bytes of every stage stay exact; idle time between neighbours
#   is lost.

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SPANS_PER_STAGE = 256
"""Spans kept of one stage of one process: a picture is about a thousand pixels wide."""

LANES_PER_STAGE = 64
"""Lanes of one stage, as many as an object store gets requests at a time by default."""


class Span(NamedTuple):
    """A time in which one worker or stream was busy with one stage.

    Attributes:
        stage: name of the stage.
        process: number of the process.
        lane: worker or stream of the stage. Spans of one lane do not overlap; the numbers say how
            many were busy at the same time, not which thread it was.
        start_s: seconds from the call, on the process' own clock.
        end_s: the same of its end.
        nbytes: bytes that went through the stage, 0 where bytes mean nothing.
    """

    stage: str
    process: int
    lane: int
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the stages of one save or restore were busy.

    A stage has at most 256 spans per process, in at most 64 lanes. Where there were more,
    neighbours in a lane were merged, and the idle time between them counts as busy; begin, end and
    bytes of every stage are exact in any case.

    Attributes:
        spans: by start.
        process: number of the process that has recorded it.
    """

    spans: tuple[Span, ...] = ()
    process: int = 0

    def stages(self, process: int | None = None) -> Mapping[str, Span]:
        """Return all spans of a stage as one, by stage and in the order of their begins.

        Args:
            process: whose; None for the process that has recorded them.
        """
        process = self.process if process is None else process
        found: dict[str, Span] = {}
        for span in self.spans:
            if span.process == process:
                known = found.get(span.stage, span._replace(lane=0, nbytes=0))
                found[span.stage] = known._replace(
                    end_s=max(known.end_s, span.end_s), nbytes=known.nbytes + span.nbytes
                )
        return found

    def busy_s(self) -> Mapping[str, float]:
        """Return the seconds in which each stage of this process had at least one busy lane."""
        busy: dict[str, float] = {}
        ends: dict[str, float] = {}
        for span in self.spans:  # by start
            if span.process == self.process:
                start = max(span.start_s, ends.get(span.stage, 0.0))
                ends[span.stage] = max(span.end_s, start)
                busy[span.stage] = busy.get(span.stage, 0.0) + max(0.0, span.end_s - start)
        return busy


_Row = tuple[float, float, int]  # start, end, bytes


class Recorder:
    """Records the timeline of one operation. All threads may use it.

    Args:
        begun: `time.perf_counter` at the call; None for now.
        process: number of this process.
    """

    def __init__(self, begun: float | None = None, process: int = 0) -> None:
        self.begun = time.perf_counter() if begun is None else begun
        self.process = process
        self._stages: dict[str, list[list[_Row]]] = {}  # the lanes of each
        self._lock = threading.Lock()

    def add(self, stage: str, since: float, nbytes: int = 0, until: float | None = None) -> None:
        """Record that a stage was busy since then, until now or the time given.

        Args:
            stage: its name.
            since: `time.perf_counter` at the begin.
            nbytes: bytes that went through the stage.
            until: `time.perf_counter` at the end.
        """
        end = (time.perf_counter() if until is None else until) - self.begun
        with self._lock:
            lanes = self._stages.setdefault(stage, [])
            _put(lanes, (since - self.begun, end, nbytes))
            if sum(map(len, lanes)) > SPANS_PER_STAGE:
                lanes[:] = map(_halved, lanes)

    def timeline(self) -> Timeline:
        """Return what was recorded so far."""
        with self._lock:
            spans = [
                Span(stage, self.process, number, *row)
                for stage, lanes in self._stages.items()
                for number, lane in enumerate(sorted(lanes))
                for row in lane
            ]
        spans.sort(key=lambda span: span.start_s)
        return Timeline(tuple(spans), self.process)


def _put(lanes: list[list[_Row]], row: _Row) -> None:
    """Put a span, which ends after all others, into the lane that ended last before its start."""
    start, end, nbytes = row
    idle = [lane for lane in lanes if lane[-1][1] <= start]
    if idle:
        max(idle, key=_end).append(row)
        return
    if len(lanes) < LANES_PER_STAGE:
        lanes.append([row])
        return
    # More at a time than there are lanes: it becomes one span with those that it overlaps.
    lane = min(lanes, key=_end)
    while lane and lane[-1][1] > start:
        first, last, more = lane.pop()
        start, end, nbytes = min(start, first), max(end, last), nbytes + more
    lane.append((start, end, nbytes))


def _end(lane: Sequence[_Row]) -> float:
    return lane[-1][1]


def _halved(lane: Sequence[_Row]) -> list[_Row]:
    """Return the lane with every two neighbours as one span."""
    pairs = zip(lane[::2], [*lane[1::2], None], strict=False)
    return [one if other is None else (one[0], other[1], one[2] + other[2]) for one, other in pairs]
