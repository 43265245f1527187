"""Timelines as pictures, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.reports.texts import nbytes_text, rate_text
from asyncckpt.reports.timeline import Span, Timeline

INSTALL_LINE = 'pip install "asyncckpt[plot]"'

SUFFIXES = (".png", ".svg")

MAX_PROCESSES = 16
"""Processes drawn; more would not be readable."""

SHORT = 0.01
"""Stages with a smaller share of the time and of the bytes are named below, not drawn."""

NARROWEST = 0.0015
"""Width of the narrowest span, as a share of the time: about a pixel."""

LANE, GAP, TALLEST = 0.2, 0.5, 3.0
"""Heights of further lanes, of gaps, and of all further lanes of a stage together at most, where
the first lane of a stage with bytes has 1."""

COLOURS: Mapping[str, str] = {
    **{"stage": "#0072B2", "serialize": "#009E73", "upload": "#E69F00"},
    **{"fetch": "#E69F00", "decode": "#009E73", "place": "#0072B2", "exchange": "#56B4E9"},
    **{"index": "#CC79A7", "publish": "#D55E00", "retain": "#999999"},
}
OTHER = "#7F7F7F"


def draw(timeline: Timeline, path: Any, title: str = "", marks: Mapping[str, float] = {}) -> None:
    """Draw a timeline: a band for each stage, in it a line for each lane.

    Args:
        timeline: what to draw.
        path: a file, in .png or .svg.
        title: a line above it.
        marks: seconds from the call at which to draw a line, by what it says.

    Raises:
        UsageError: the suffix is another one, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"plot({os.fspath(path)!r}): pass a name in .png or .svg", found=suffix)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError(f"plot() needs the package matplotlib: {INSTALL_LINE}") from None
    bands, short = _bands(timeline)
    total_s = max(timeline.end_s, 1e-6)
    unit, scale = ("s", 1.0) if total_s >= 1 else ("ms", 1e3)
    height = sum(_height(whole, spans) + GAP for _, whole, _, spans in bands)
    figure = Figure(figsize=(11, 1.5 + 0.36 * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bottom = 0.0
    ticks: dict[float, str] = {}
    right: dict[float, str] = {}
    for name, whole, busy_s, spans in bands:
        thick = _height(whole, spans) / (1 + max(span.lane for span in spans))
        for span in spans:
            width = max(span.end_s - span.start_s, NARROWEST * total_s)
            axes.broken_barh(
                [(span.start_s * scale, width * scale)],
                (bottom + span.lane * thick, 0.9 * thick),
                facecolor=COLOURS.get(whole.stage, OTHER),
                edgecolor="white",
                linewidth=0.4 if width > 4 * NARROWEST * total_s else 0,
            )
        middle = bottom + _height(whole, spans) / 2
        ticks[middle], right[middle] = name, _facts(whole, busy_s, spans)
        bottom += _height(whole, spans) + GAP
    for number, (text, at_s) in enumerate(marks.items()):
        axes.axvline(at_s * scale, color="black", linestyle="--", linewidth=1)
        axes.text(
            at_s * scale,
            -GAP - 0.6 * number,
            f" {text} ",
            fontsize=9,
            va="center",
            ha="right" if at_s > 0.7 * total_s else "left",
        )
    axes.set_ylim(bottom, -GAP - 0.5 - 0.6 * max(0, len(marks) - 1))  # the first stage on top
    axes.set_xlim(0, total_s * scale * 1.005)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=11)
    legend = axes.secondary_yaxis("right")
    legend.set_yticks(list(right), list(right.values()), fontsize=9)
    for side in (axes, legend):
        side.tick_params(axis="y", length=0)
    for edge in ("left", "right", "top"):
        axes.spines[edge].set_visible(False)
        legend.spines[edge].set_visible(False)
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{unit} since the call" + (f"      (and {short})" if short else ""))
    axes.set_title(title, fontsize=11, loc="left")
    figure.savefig(path, format=suffix[1:], dpi=110)


def _bands(timeline: Timeline) -> tuple[list[tuple[str, Span, float, list[Span]]], str]:
    """Return name, sum, busy seconds and spans of what is drawn, and a text on shorter stages."""
    bands: list[tuple[str, Span, float, list[Span]]] = []
    short: list[str] = []
    processes = timeline.processes()
    several = len(processes) > 1
    for process in processes[:MAX_PROCESSES]:
        busy_s = timeline.busy_s(process)
        stages = timeline.stages(process)
        small = SHORT * max(whole.nbytes for whole in stages.values())
        for stage, whole in stages.items():
            spans = [s for s in timeline.spans if s.process == process and s.stage == stage]
            seconds = busy_s[stage]
            name = f"{stage} ({process})" if several else stage
            if whole.nbytes <= small and seconds < SHORT * timeline.end_s:
                short.append(f"{name} {seconds * 1e3:.1f} ms")
            else:
                bands.append((name, whole, seconds, spans))
    if len(processes) > MAX_PROCESSES:
        short.append(f"{len(processes) - MAX_PROCESSES} more processes")
    return bands, ", ".join(short)


def _height(whole: Span, spans: list[Span]) -> float:
    return (1 if whole.nbytes else 0.5) + min(LANE * max(span.lane for span in spans), TALLEST)


def _facts(whole: Span, seconds: float, spans: list[Span]) -> str:
    """Return size, busy time and rate of a stage for people."""
    text = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
    if whole.nbytes:
        text = f"{nbytes_text(whole.nbytes)} in {text} ({rate_text(whole.nbytes, seconds)})"
    lanes = 1 + max(span.lane for span in spans)
    return f"{text}, {lanes} at a time" if lanes > 1 else text
