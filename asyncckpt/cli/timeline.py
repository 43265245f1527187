"""The timeline of a stored checkpoint as a table with bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncckpt.cli.tables import GAP, Grid
from asyncckpt.reports import Span, Timeline, nbytes_text, rate_text
from asyncckpt.reports.timeline import Stage

SHADES = " ░▒▓█"
"""Shades of a cell, from idle to busy all the time."""

WIDTH = 48
"""Cells of a bar in a pipe or file; a bar in a terminal has up to twice as many."""


def gantt(timeline: Timeline, width: int | None) -> Grid:
    """Return a line per stage: a bar over the duration of the save, times, bytes and rate.

    `width` is the width of the terminal in columns, None for a pipe or file.
    """
    several = len(timeline.processes()) > 1
    stages = {
        f"{name} ({process})" if several else name: stage
        for process in timeline.processes()
        for name, stage in timeline.stages(process).items()
    }
    facts = [(name, *_facts(stage)) for name, stage in stages.items()]
    taken = sum(max(map(len, column)) for column in zip(*facts, strict=True))
    room = WIDTH if width is None else width - taken - len(GAP) * 6
    cells = max(10, min(room, 2 * WIDTH))
    bars = [_bar(stage.spans, timeline.end_s, cells) for stage in stages.values()]
    columns = ["stage", "", ">begin", ">end", ">busy", ">bytes", ">rate"]
    return Grid(columns, [[row[0], bar, *row[1:]] for row, bar in zip(facts, bars, strict=True)])


def spans_document(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as JSON."""
    spans = [dict(zip(Span._fields, span, strict=True)) for span in timeline.spans]
    return {"process": timeline.process, "spans": spans}


def _facts(stage: Stage) -> list[str]:
    times = [f"{s * 1e3:.1f} ms" for s in (stage.start_s, stage.end_s, stage.busy_s)]
    if not stage.nbytes:
        return [*times, "", ""]
    return [*times, nbytes_text(stage.nbytes), rate_text(stage.nbytes, stage.busy_s)]


def _bar(spans: Iterable[Span], end_s: float, cells: int) -> str:
    """Return a bar whose cells are shaded by the fraction of time that any lane was busy."""
    busy = [0.0] * cells
    done = 0.0  # in cells
    for span in spans:  # by start
        start, end = (at / end_s * cells if end_s else 0.0 for at in (span.start_s, span.end_s))
        start = max(start, done)
        done = max(done, end)
        for cell in range(int(start), min(cells, int(end) + 1)):
            busy[cell] += max(0.0, min(end, cell + 1) - max(start, cell))
    most = len(SHADES) - 1
    # Rounded up, so that even the shortest stage is visible.
    return "".join(SHADES[min(most, int(share * most + 0.999))] for share in busy)
