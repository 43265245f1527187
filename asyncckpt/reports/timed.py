"""Reports with a timeline that can be written as a trace or drawn."""

from __future__ import annotations

import json
import os
from typing import Any

from asyncckpt.pickled import PickledByName
from asyncckpt.reports.picture import draw
from asyncckpt.reports.texts import rate_text
from asyncckpt.reports.timeline import Timeline


class Timed(PickledByName):
    """A report with a `timeline`."""

    __slots__ = ()

    timeline: Timeline

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as trace events, JSON that https://ui.perfetto.dev opens. Blocking."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace_document(self.timeline, str(self)), file)

    def plot(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the timeline: a band for each stage, with a line for each lane. Blocking.

        Takes about a second, mostly for importing matplotlib.

        Args:
            path: name of the file, ending in .png or .svg; replaced if it exists.
            title: line above the picture; None for the text of the report.

        Raises:
            UsageError: the path has another suffix, or matplotlib is not installed.
            OSError: the file cannot be written.
        """
        title = str(self) if title is None else title
        draw(self.timeline, path, title, getattr(self, "blocked_s", 0.0))


def trace_document(timeline: Timeline, title: str = "") -> dict[str, Any]:
    """Return trace events, with a thread for each lane.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events
    ("X") with times in microseconds, and metadata events ("M") that name processes and threads.
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str, int], int] = {}
    for process in timeline.processes():
        events += _named("process", process, 0, f"process {process}", process)
        # Lanes of a stage are adjacent; stages are in the order of their begin.
        for stage, whole in timeline.stages(process).items():
            for lane in range(whole.lanes):
                number = threads[process, stage, lane] = len(threads)
                name = f"{stage} {lane}" if lane else stage
                events += _named("thread", process, number, name, number)
    for span in timeline.spans:
        seconds = span.end_s - span.start_s
        facts = {"nbytes": span.nbytes, "rate": rate_text(span.nbytes, seconds)}
        events.append(
            {
                "name": span.stage,
                "cat": "asyncckpt",
                "ph": "X",
                "ts": round(span.start_s * 1e6, 3),
                "dur": round(seconds * 1e6, 3),
                "pid": span.process,
                "tid": threads[span.process, span.stage, span.lane],
                "args": facts if span.nbytes else {},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}


def _named(what: str, process: int, thread: int, name: str, place: int) -> list[dict[str, Any]]:
    same = {"ph": "M", "ts": 0, "pid": process, "tid": thread}
    return [
        {"name": f"{what}_name", **same, "args": {"name": name}},
        {"name": f"{what}_sort_index", **same, "args": {"sort_index": place}},
    ]
