"""Timelines as pictures, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.reports.texts import nbytes_text, rate_text
from asyncckpt.reports.timeline import Stage, Timeline

INSTALL_LINE = 'pip install "asyncckpt[plot]"'

MAX_PROCESSES = 16
"""Maximum number of processes drawn; more would not be readable."""

SHORT = 0.01
"""Stages with a smaller share of time and bytes are only named below the picture."""

NARROWEST = 0.0015
"""Minimum width of a span, as a share of the time: about a pixel."""

LANE, GAP, TALLEST = 0.2, 0.5, 3.0
"""Height of an additional lane, height of a gap, and maximum for all additional lanes of a stage;
the first lane of a stage with bytes has height 1."""

COLOURS: Mapping[str, str] = {
    **{"stage": "#0072B2", "serialize": "#009E73", "upload": "#E69F00"},
    **{"fetch": "#E69F00", "decode": "#009E73", "place": "#0072B2", "exchange": "#56B4E9"},
    **{"index": "#CC79A7", "publish": "#D55E00", "retain": "#999999"},
}
OTHER = "#7F7F7F"


def draw(timeline: Timeline, path: Any, title: str = "", blocked_s: float = 0.0) -> None:
    """Draw a timeline, with a line at `blocked_s`. Errors: as `Timed.plot`."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in (".png", ".svg"):
        raise UsageError(f"plot({os.fspath(path)!r}): pass a name in .png or .svg", found=suffix)
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError(f"plot() needs the package matplotlib: {INSTALL_LINE}") from None
    bands, short = _bands(timeline)
    total_s = max(timeline.end_s, 1e-6)
    unit, scale = ("s", 1.0) if total_s >= 1 else ("ms", 1e3)
    height = sum(_height(stage) + GAP for stage in bands.values())
    figure = Figure(figsize=(11, 1.5 + 0.36 * height), layout="constrained")
    axes = figure.subplots()
    bottom = 0.0
    ticks: dict[float, str] = {}
    right: dict[float, str] = {}
    for name, stage in bands.items():
        thick = _height(stage) / stage.lanes
        for span in stage.spans:
            width = max(span.end_s - span.start_s, NARROWEST * total_s)
            axes.broken_barh(
                [(span.start_s * scale, width * scale)],
                (bottom + span.lane * thick, 0.9 * thick),
                facecolor=COLOURS.get(span.stage, OTHER),
                edgecolor="white",
                linewidth=0.4 if width > 4 * NARROWEST * total_s else 0,
            )
        middle = bottom + _height(stage) / 2
        ticks[middle], right[middle] = name, _facts(stage)
        bottom += _height(stage) + GAP
    if blocked_s:
        axes.axvline(blocked_s * scale, color="black", linestyle="--", linewidth=1)
        side = "right" if blocked_s > 0.7 * total_s else "left"
        text = " the state may change "
        axes.text(blocked_s * scale, -GAP, text, fontsize=9, va="center", ha=side)
    axes.set_ylim(bottom, -GAP - 0.5)  # the first stage is on top
    axes.set_xlim(0, total_s * scale * 1.005)
    # Paths, and names of stages in a hostile checkpoint, may contain "$".
    plain: Any = {"parse_math": False}
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=11, **plain)
    legend = axes.secondary_yaxis("right")
    legend.set_yticks(list(right), list(right.values()), fontsize=9)
    for edges in (axes, legend):
        edges.tick_params(axis="y", length=0)
        edges.spines[["left", "right", "top"]].set_visible(False)
    axes.grid(visible=True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{unit} since the call" + (f"      (and {short})" if short else ""), **plain)
    axes.set_title(title, fontsize=11, loc="left", **plain)
    figure.savefig(path, format=suffix[1:], dpi=110)


def _bands(timeline: Timeline) -> tuple[dict[str, Stage], str]:
    """Return the stages to draw, by label, and a text that names the others."""
    bands: dict[str, Stage] = {}
    short: list[str] = []
    processes = timeline.processes()
    for process in processes[:MAX_PROCESSES]:
        stages = timeline.stages(process)
        small = SHORT * max(stage.nbytes for stage in stages.values())
        for name, stage in stages.items():
            named = f"{name} ({process})" if len(processes) > 1 else name
            if stage.nbytes <= small and stage.busy_s < SHORT * timeline.end_s:
                short.append(f"{named} {stage.busy_s * 1e3:.1f} ms")
            else:
                bands[named] = stage
    if len(processes) > MAX_PROCESSES:
        short.append(f"{len(processes) - MAX_PROCESSES} more processes")
    return bands, ", ".join(short)


def _height(stage: Stage) -> float:
    return (1 if stage.nbytes else 0.5) + min(LANE * (stage.lanes - 1), TALLEST)


def _facts(stage: Stage) -> str:
    """Return size, busy time and rate of a stage as text."""
    text = f"{stage.busy_s:.2f} s" if stage.busy_s >= 1 else f"{stage.busy_s * 1e3:.1f} ms"
    if stage.nbytes:
        text = f"{nbytes_text(stage.nbytes)} in {text} ({rate_text(stage.nbytes, stage.busy_s)})"
    return f"{text}, {stage.lanes} at a time" if stage.lanes > 1 else text
