"""The timeline of a stored checkpoint as a table with bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncckpt.cli.tables import GAP, Grid
from asyncckpt.reports import Span, Timeline, nbytes_text, rate_text

SHADES = " ░▒▓█"
"""From a cell whose time was idle to one whose time was busy throughout."""

WIDTH = 48
"""Cells of a bar in a pipe or file, and the most of one in a terminal is twice that."""


def gantt(timeline: Timeline, width: int | None) -> Grid:
    """Return a line per stage: a bar over the time of the save, times, bytes and rate.

    Args:
        timeline: that of the save.
        width: columns of the terminal, None for a pipe or file.
    """
    several = len(timeline.processes()) > 1
    rows = [list(_facts(timeline, process, several)) for process in timeline.processes()]
    lines = [line for lines in rows for line in lines]
    taken = sum(max(len(cell) for cell in column) for column in zip(*lines, strict=True))
    room = WIDTH if width is None else width - taken - len(GAP) * 6
    bars = [
        _bar(
            [s for s in timeline.spans if (s.process, s.stage) == (process, stage)],
            timeline.end_s,
            max(10, min(room, 2 * WIDTH)),
        )
        for process in timeline.processes()
        for stage in timeline.stages(process)
    ]
    columns = ["stage", "", ">begin", ">end", ">busy", ">bytes", ">rate"]
    return Grid(
        columns, [[name, bar, *rest] for (name, *rest), bar in zip(lines, bars, strict=True)]
    )


def spans_document(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as JSON, for `--json`."""
    spans = [dict(zip(Span._fields, span, strict=True)) for span in timeline.spans]
    return {"process": timeline.process, "spans": spans}


def _facts(timeline: Timeline, process: int, several: bool) -> Iterator[Sequence[str]]:
    busy_s = timeline.busy_s(process)
    for stage, whole in timeline.stages(process).items():
        yield (
            f"{stage} ({process})" if several else stage,
            *(f"{seconds * 1e3:.1f} ms" for seconds in (whole.start_s, whole.end_s, busy_s[stage])),
            nbytes_text(whole.nbytes) if whole.nbytes else "",
            rate_text(whole.nbytes, busy_s[stage]) if whole.nbytes else "",
        )


def _bar(spans: Iterable[Span], end_s: float, cells: int) -> str:
    """Return a bar: each cell is shaded by the share of its time in which a lane was busy."""
    busy = [0.0] * cells
    done = 0.0  # in cells
    for span in spans:  # by start
        start, end = (at / end_s * cells if end_s else 0.0 for at in (span.start_s, span.end_s))
        start = max(start, done)
        done = max(done, end)
        for cell in range(int(start), min(cells, int(end) + 1)):
            busy[cell] += max(0.0, min(end, cell + 1) - max(start, cell))
    most = len(SHADES) - 1
    # The shortest stage is seen, too.
    return "".join(SHADES[min(most, int(share * most + 0.999))] for share in busy)
