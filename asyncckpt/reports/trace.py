"""Timelines as trace events, the JSON that Perfetto and Chrome's `about:tracing` open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events
("X") with times in microseconds, and metadata events ("M") that name processes and threads.
"""

from __future__ import annotations

from typing import Any

from asyncckpt.reports.texts import rate_text
from asyncckpt.reports.timeline import Timeline


def trace_document(timeline: Timeline, title: str = "") -> dict[str, Any]:
    """Return the JSON of a timeline: a process for each process, a thread for each lane."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str, int], int] = {}
    for process in timeline.processes():
        events += _named("process", process, 0, f"process {process}", process)
        # Lanes of one stage are next to each other, stages in the order in which they began.
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
