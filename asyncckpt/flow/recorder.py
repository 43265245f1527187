"""Recorder of when the stages of a save or restore are busy."""

# Rule: `add` costs a few microseconds and is called per window, read or batch, never per leaf.

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

from asyncckpt.reports.timeline import Lane, Span, Timeline, put, spans_of


class Recorder:
    """The timeline of one operation as it grows. Any thread may use it.

    Args:
        begun: `time.perf_counter` at the call; None for now.
        process: number of this process.
    """

    def __init__(self, begun: float | None = None, process: int = 0) -> None:
        self.begun = time.perf_counter() if begun is None else begun
        self.process = process
        self._stages: dict[str, list[Lane]] = {}
        self._running: dict[object, tuple[str, float, int]] = {}
        self._lock = threading.Lock()

    def add(self, stage: str, since: float, nbytes: int = 0, until: float | None = None) -> None:
        """Record that a stage was busy from `since` to `until` (None: now), by `perf_counter`."""
        end = (time.perf_counter() if until is None else until) - self.begun
        with self._lock:
            put(self._stages.setdefault(stage, []), since - self.begun, end, nbytes)

    @contextmanager
    def span(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        """Record that a stage is busy during the block, unless the block raises."""
        begun = stage, time.perf_counter(), nbytes
        key = object()
        self._running[key] = begun
        try:
            yield
            self.add(*begun)
        finally:
            del self._running[key]

    def timeline(self) -> Timeline:
        """Return the spans so far; a running span counts all its bytes and ends now."""
        now = time.perf_counter()
        with self._lock:
            stages = dict(self._stages)
            for stage, since, nbytes in [*self._running.values()]:
                stages[stage] = [*map(list, stages.get(stage, []))]
                put(stages[stage], since - self.begun, now - self.begun, nbytes)
            spans: list[Span] = []
            for stage, lanes in stages.items():
                spans += spans_of(lanes, stage, self.process)
        spans.sort(key=attrgetter("start_s"))
        return Timeline(tuple(spans), self.process)
