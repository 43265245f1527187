"""The pictures of the report: rates, small leaves, other shardings, and trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measure import median
from benchmarks.results import (
    COLD,
    CONVERT,
    FOREIGN,
    OURS,
    PLAN,
    RESHARD,
    SAVE,
    WARM,
    Measurement,
    Results,
)
from benchmarks.workloads import SMALL_LEAVES

PER_ROW = 3


def plot(results: Results, path: Path) -> None:
    """One picture with a panel per kind of measurement, every sample as a dot."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    drawn = panels(results)
    rows = -(-len(drawn) // PER_ROW)
    columns = min(PER_ROW, len(drawn))
    figure = Figure(figsize=(4.8 * columns + 1, 4.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    for axis, (draw, title, found) in zip(axes, drawn, strict=False):
        axis.set_title(title)
        draw(axis, found, colormaps["tab20" if len(found) > 20 else "tab10"])
    figure.savefig(path, dpi=80)


def panels(results: Results) -> list[tuple[Any, str, list[Measurement]]]:
    """Return what draws each panel, its title, and what it shows."""
    made: list[tuple[Any, str, list[Measurement]]] = []
    for scenario in (SAVE, WARM, COLD, FOREIGN, CONVERT):
        made.append((_plot_rates, scenario, [m for m in results.where(scenario) if m.floor]))
    small = [
        m
        for m in results.measurements
        if m.workload.startswith(SMALL_LEAVES)
        and (m.scenario in (SAVE, WARM) or (m.scenario, m.subject) == (PLAN, OURS))
    ]
    made.append((_plot_growth, "time by number of leaves", small))
    made.append((_plot_shardings, RESHARD, results.where(RESHARD)))
    return [panel for panel in made if panel[2]]


LANE, BLOCKED, SLOW, SAVING = "#c9d3df", "#c0392b", "#e08e45", "#2b6cb0"

SLOWER = 1.2
"""Steps that took so many times as long as the median step without saves are marked."""


def plot_training(results: Results, path: Path) -> None:
    """Plot the trainings with each framework, one below the other: a lane for who saved."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in results.timelines:
        panels.setdefault((line["scenario"], line["loop"]), []).append(line)
    figure = Figure(figsize=(9, 0.7 + 1.9 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True).reshape(-1)
    for axis, ((_, loop), lines) in zip(axes, panels.items(), strict=True):
        _plot_lanes(axis, lines)
        count = len(lines[-1]["saves"])
        axis.set_title(f"{loop} loop: the same steps, {count} saves", fontsize="medium")
    axes[-1].set_xlabel("s since the start of the training")
    handles = [
        Patch(color=LANE, label="steps"),
        Patch(color=SLOW, label=f"steps {SLOWER - 1:.0%} slower than without saves"),
        Patch(color=BLOCKED, label="training blocked by the call to save"),
        Patch(color=SAVING, label="save in flight"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)


def _plot_lanes(axis: Any, lines: list[dict[str, Any]]) -> None:
    # Those without saves come first, and say how long a step takes.
    usual_s = median([end - begin for begin, end in lines[0]["steps"]])
    names = []
    for place, line in enumerate(lines):
        steps = [(begin, end - begin) for begin, end in line["steps"]]
        slow = [seconds > SLOWER * usual_s for _, seconds in steps]
        axis.broken_barh(
            steps,
            (place - 0.3, 0.45),
            facecolors=[SLOW if each else LANE for each in slow],
            edgecolor="white",
            linewidth=0.4,
        )
        for spans, low, height, colour in (
            (line["calls"], place - 0.3, 0.45, BLOCKED),
            (line["saves"], place + 0.17, 0.12, SAVING),
        ):
            bars = [(begin, end - begin) for begin, end in spans]
            axis.broken_barh(bars, (low, height), facecolors=colour)
        names.append(f"{line['subject']}\n{line['steps'][-1][1]:.2f} s")
    axis.set_yticks(range(len(names)), names, fontsize="small")
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _plot_growth(axis: Any, found: list[Measurement], colours: Any) -> None:
    kinds = list(dict.fromkeys((m.scenario, m.subject, m.column) for m in found))
    for number, (scenario, subject, column) in enumerate(kinds):
        sizes = sorted(
            (m for m in found if (m.scenario, m.subject, m.column) == (scenario, subject, column)),
            key=lambda m: m.leaf_count,
        )
        what = "planning: " if scenario == PLAN else f"{subject}, {scenario}, "
        axis.loglog(
            [m.leaf_count for m in sizes],
            [m.wall_s for m in sizes],
            "--." if scenario == PLAN else "-o",
            color=colours(number % colours.N),
            label=f"{what}{column}",
            markersize=4,
        )
    axis.set_xlabel("leaves, or shards")
    axis.set_ylabel("s")
    axis.legend(fontsize="xx-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _plot_shardings(axis: Any, found: list[Measurement], colours: Any) -> None:
    columns = list(dict.fromkeys(m.column for m in found))
    subjects = list(dict.fromkeys(m.subject for m in found))
    height = 0.8 / len(subjects)
    for number, subject in enumerate(subjects):
        mine = [m for m in found if m.subject == subject]
        places = [
            len(columns) - 1 - columns.index(m.column) + (len(subjects) / 2 - number - 0.5) * height
            for m in mine
        ]
        axis.barh(places, [m.wall_s for m in mine], height, color=colours(number), label=subject)
        for place, measurement in zip(places, mine, strict=True):
            times = measurement.times
            axis.plot(times, [place] * len(times), ".", color="black", markersize=3)
    axis.set_yticks(range(len(columns)), columns[::-1])
    axis.set_xlabel("s")
    axis.legend(fontsize="x-small")


def _plot_rates(axis: Any, found: list[Measurement], colours: Any) -> None:
    workloads = list(dict.fromkeys(m.workload for m in found))
    kinds = list(dict.fromkeys((m.subject, m.column) for m in found))
    width = 0.8 / len(kinds)
    for k, (subject, column) in enumerate(kinds):
        for w, workload in enumerate(workloads):
            match = [
                m for m in found if (m.workload, m.subject, m.column) == (workload, subject, column)
            ]
            if not match:
                continue
            rates = [match[0].nbytes / sample.wall_s / 1e9 for sample in match[0].samples]
            at = w + (k - (len(kinds) - 1) / 2) * width
            label = f"{subject}, {column}" if w == 0 else None
            rate = match[0].nbytes / match[0].wall_s / 1e9
            axis.bar(at, rate, width, color=colours(k % colours.N), label=label)
            axis.plot([at] * len(rates), rates, ".", color="black", markersize=3)
    for w, workload in enumerate(workloads):
        floors = [
            m.nbytes / s.floor_s / 1e9
            for m in found
            if m.workload == workload
            for s in m.samples
            if s.floor_s
        ]
        if floors:
            middle = sorted(floors)[len(floors) // 2]
            label = "floor" if w == 0 else None
            axis.plot([w - 0.45, w + 0.45], [middle] * 2, "--", color="grey", label=label)
    axis.set_xticks(range(len(workloads)), workloads)
    axis.set_ylabel("GB/s")
    axis.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
