"""The picture of the report: rates by service, and the sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.remote.results import RESTORE, SAVE, Measurement, Results, Sweep

MIB = 1 << 20
PER_ROW = 2


def plot(results: Results, path: Path) -> None:
    """Plot a panel per service and direction on W1, every sample as a dot, and one per sweep."""
    from matplotlib.figure import Figure

    panels: list[tuple[Any, str, Any]] = []
    for profile in dict.fromkeys(m.profile for m in results.measurements):
        for scenario in (SAVE, RESTORE):
            found = results.where(profile=profile, workload="W1", scenario=scenario)
            if found:
                panels.append((_rates, f"{profile}: {scenario} of W1", found))
    for sweep in results.sweeps:
        title = f"{sweep.profile}: data files × streams, {sweep.subject}"
        panels.append((_lines, title, sweep))
    rows = max(1, -(-len(panels) // PER_ROW))
    figure = Figure(figsize=(6.4 * PER_ROW, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, PER_ROW, squeeze=False).reshape(-1)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (draw, title, found) in zip(axes, panels, strict=False):
        axis.set_title(title, fontsize="medium")
        draw(axis, found)
    figure.savefig(path, dpi=80)


def _rates(axis: Any, found: list[Measurement]) -> None:
    found = sorted(found, key=lambda m: m.rate)
    colours = {(True, False): "tab:blue", (False, True): "tab:grey", (False, False): "tab:orange"}
    for place, m in enumerate(found):
        axis.barh(place, m.rate / 1e6, color=colours[m.ours, m.raw])
        rates = [m.nbytes / sample.wall_s / 1e6 for sample in m.samples]
        axis.plot(rates, [place] * len(rates), ".", color="black", markersize=3)
    names = [f"{m.subject}: {m.column}" for m in found]
    axis.set_yticks(range(len(found)), names, fontsize="x-small")
    axis.set_xlabel("MB/s at the median; a dot for each sample")


def _lines(axis: Any, sweep: Sweep) -> None:
    def rate(seconds: float) -> float:
        return sweep.nbytes / seconds / 1e6

    for streams in sorted({found.point.streams for found in sweep.points}):
        line = [found for found in sweep.points if found.point.streams == streams]
        line.sort(key=lambda found: found.point.nbytes)
        sizes = [found.point.nbytes / MIB for found in line]
        drawn = axis.plot(sizes, [rate(f.median_s) for f in line], "-o", markersize=3,
                          label=f"{streams} streams")  # fmt: skip
        for size, f in zip(sizes, line, strict=True):
            samples = [rate(s) for s in f.seconds]
            axis.plot([size] * len(samples), samples, ".", color=drawn[0].get_color(),
                      markersize=2)  # fmt: skip
    best, picked = sweep.best, sweep.picked
    axis.plot(best.point.nbytes / MIB, rate(best.median_s), "o", color="none",
              markeredgecolor="black", markersize=12, label=f"best: {best.point}")  # fmt: skip
    axis.plot(picked.nbytes / MIB, rate(sweep.auto_s), "*", color="red", markersize=14,
              label=f"auto: {picked.nbytes / MIB:.1f} MiB × {picked.streams}")  # fmt: skip
    samples = [rate(s) for s in sweep.auto]
    axis.plot([picked.nbytes / MIB] * len(samples), samples, ".", color="red", markersize=2)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("MiB of a data file")
    axis.set_ylabel("MB/s")
    axis.legend(fontsize="x-small")
