"""The tables of the report. Each is empty where nothing of its kind was measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from benchmarks.measure import median
from benchmarks.results import (
    BACK_TO_BACK,
    BUDGET,
    COLD,
    CONVERT,
    FIRST,
    FOREIGN,
    GROWTH,
    LAG,
    NO_SAVES,
    OURS,
    PLAN,
    PROCESSES,
    RESHARD,
    RETENTION,
    SAVE,
    STALL,
    TRAINING,
    WARM,
    Measurement,
    Results,
    Sampled,
    Verdict,
    exponent,
    slope_s,
    speedup,
)
from benchmarks.workloads import COMPRESSED, SMALL_LEAVES

T = TypeVar("T")

Columns = dict[str, Callable[[T], str]]
"""By the head of each column, what makes its cells."""

MIB = 1 << 20
TOLERANCE = 0.10


def all_of(results: Results) -> list[str]:
    """Return every table but that of the targets."""
    return [
        *(_transfers(results, scenario) for scenario in (SAVE, RETENTION, WARM, COLD)),
        _small_leaves(results),
        _planning(results),
        _resharding(results),
        *(_transfers(results, scenario) for scenario in (FOREIGN, CONVERT)),
        _stalls(results),
        _background(results),
        *(_trainings(results, scenario) for scenario in (TRAINING, BACK_TO_BACK)),
        _budgets(results),
        _growth(results),
        _processes(results),
    ]


def targets(results: Results) -> str:
    """Return the table of targets, and whether they were met."""
    columns: Columns[Verdict] = {
        "workload": lambda v: v.workload,
        "metric": lambda v: v.metric,
        "target": lambda v: v.target,
        "measured": lambda v: v.measured,
        "": lambda v: v.status,
    }
    return table_of("Targets", results.verdicts, columns)


# -------------------------------------------------------------------------- saves and restores


def _transfers(results: Results, scenario: str) -> str:
    columns: Columns[Measurement] = {
        "workload": lambda m: m.workload,
        "subject": lambda m: m.subject,
        "column": lambda m: m.column,
        "median": _median,
        "fastest – slowest": _span,
        "rate": lambda m: _rate(m) if m.floor else "",
        "of the floor": lambda m: "" if m.floor_ratio is None else f"{m.floor_ratio:.2f}",
        "CPU s per GB": lambda m: f"{_cpu_s(m) / (m.nbytes / 1e9):.2f}" if m.floor else "",
        "extra memory": _extra,
        "unsteady samples": lambda m: (
            f"{m.noisy(TOLERANCE)} of {len(m.samples)}" if m.floor else ""
        ),
    }
    if scenario in (WARM, COLD):
        columns["read from disk"] = _disk_share
    elif scenario in (SAVE, RETENTION):
        columns["until wait() returns"] = _figure("waited_s")
    elif scenario in (FOREIGN, CONVERT):
        columns["the other takes"] = functools.partial(_faster, results)
    return table_of(scenario, results.where(scenario), columns)


def _median(found: Sampled) -> str:
    return seconds(found.wall_s)


def _span(found: Sampled) -> str:
    return span(found.times)


def _figure(name: str) -> Callable[[Sampled], str]:
    return lambda found: seconds(found.value(name))


def _rate(found: Measurement) -> str:
    return f"{found.nbytes / found.wall_s / 1e9:.2f}"


def _disk_share(found: Measurement) -> str:
    share = found.value("device_share")
    return "" if math.isnan(share) else f"{share:.0%}"


def _faster(results: Results, found: Measurement) -> str:
    """Return how many times as long a peer takes for the same."""
    if found.subject != OURS:
        return ""
    key = (found.workload, found.scenario, found.column)
    for other in results.measurements:
        if other.subject != OURS and (other.workload, other.scenario, other.column) == key:
            ratio = speedup(found, other)
            return "" if ratio is None else f"{ratio:.2f} ×"
    return ""


def _cpu_s(found: Measurement) -> float:
    return median([sample.cpu_s for sample in found.samples])


def _cpu(found: Measurement) -> str:
    return f"{_cpu_s(found):.2f} s"


def _extra(found: Measurement) -> str:
    return f"{median([sample.extra_nbytes for sample in found.samples]) / MIB:.0f} MiB"


# --------------------------------------------------------------------------- leaves and shards


def _small_leaves(results: Results) -> str:
    rows = []
    for family, name in ((SMALL_LEAVES, ""), (COMPRESSED, "4 KiB, zstd")):
        keys = dict.fromkeys(
            (m.scenario, m.subject, m.column)
            for m in results.measurements
            if m.workload.startswith(family) and m.scenario in (SAVE, WARM)
        )
        for key in keys:
            slope = slope_s(results, *key, family)
            power = exponent(results, *key, family)
            if slope is not None and power is not None:
                rows.append((*key, name, f"{slope * 1e6:.1f} µs", f"{power:.2f}"))
    return table("per small leaf", "scenario|subject|column|leaves|slope|power", rows)


def _planning(results: Results) -> str:
    columns: Columns[Measurement] = {
        "what": lambda m: m.column,
        "how many": lambda m: str(m.leaf_count),
        "median": _median,
        "of each": lambda m: f"{m.wall_s / m.leaf_count * 1e6:.2f} µs",
    }
    return table_of(PLAN, sorted(results.where(PLAN), key=lambda m: m.column), columns)


def _resharding(results: Results) -> str:
    columns: Columns[Measurement] = {
        "workload": lambda m: m.workload,
        "subject": lambda m: m.subject,
        "onto": lambda m: m.column,
        "median": _median,
        "fastest – slowest": _span,
        "rate": lambda m: f"{m.value('wanted_nbytes') / m.wall_s / 1e9:.2f}",
        "read": lambda m: _share(m.value("read_share")),
        "by system calls": lambda m: _share(m.value("calls_share")),
        "CPU": _cpu,
        "extra memory": _extra,
        "the other takes": functools.partial(_faster, results),
    }
    return table_of(RESHARD, results.where(RESHARD), columns)


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


# ------------------------------------------------------------------------------ in the background


def _stalls(results: Results) -> str:
    columns: Columns[Measurement] = {
        "workload": lambda m: m.workload,
        "loop": lambda m: m.column,
        "stall": _median,
        "in start_save": _figure("start_save_s"),
        "three steps longer by": _figure("inflation_s"),
        "a step": _figure("step_s"),
        "memcpy": lambda m: seconds(
            median([s.floor_s for s in m.samples if s.floor_s is not None])
        ),
        "committed after": _figure("committed_s"),
    }
    return table_of(STALL, results.where(STALL), columns)


def _background(results: Results) -> str:
    rows = []
    for found in results.measurements:
        if found.scenario == LAG:
            for name, key in (
                ("loop lag p99 during a save", "lag_p99_s"),
                ("largest loop lag", "lag_max_s"),
                ("loop lag p99 before the save", "idle_lag_p99_s"),
            ):
                rows.append((found.workload, name, seconds(found.value(key))))
        elif found.scenario == FIRST:
            rows.append((found.workload, "first save after prepare", seconds(found.wall_s)))
            rows.append((found.workload, "steady save", seconds(found.value("steady_s"))))
            rows.append((found.workload, "first / steady", f"{found.value('first_to_steady'):.2f}"))
    return table("background", "workload|metric|median", rows)


def _trainings(results: Results, scenario: str) -> str:
    def longer(found: Measurement) -> str:
        plain = results.find(found.workload, scenario, NO_SAVES, found.column)
        ratio = None if plain is None else speedup(plain, found)
        return "" if ratio is None else f"{ratio:.2f} ×"

    columns: Columns[Measurement] = {
        "loop": lambda m: m.column,
        "saves by": lambda m: m.subject,
        "training": _median,
        "of that without saves": longer,
        "a step": _figure("step_s"),
        "all steps": _figure("steps_s"),
        "in calls to save": _figure("blocked_s"),
        "a save takes": _figure("committed_s"),
        "until the last save": _figure("total_s"),
        "CPU": _cpu,
        "loop lag p99": _figure("lag_p99_s"),
        "largest": _figure("lag_max_s"),
        "extra memory": _extra,
    }
    return table_of(scenario, results.where(scenario), columns)


def _budgets(results: Results) -> str:
    columns: Columns[Measurement] = {
        "what": lambda m: m.column,
        "state": _state,
        "peak of extra memory": _extra,
        "took": _median,
        "rate": _rate,
        "CPU": _cpu,
    }
    return table_of(BUDGET, results.where(BUDGET), columns)


def _growth(results: Results) -> str:
    columns: Columns[Measurement] = {
        "state": _state,
        "saves": lambda m: m.column,
        "growth per save": lambda m: f"{m.value('per_save_nbytes') / MIB:.3f} MiB",
        "last over first": lambda m: f"{m.value('grown_nbytes') / MIB:.1f} MiB",
        "took": _median,
    }
    return table_of(GROWTH, results.where(GROWTH), columns)


def _processes(results: Results) -> str:
    columns: Columns[Measurement] = {
        "by": lambda m: m.column,
        "median": _median,
        "fastest – slowest": _span,
        "rate": _rate,
        "CPU of all": _cpu,
        "extra memory of all": _extra,
    }
    return table_of(PROCESSES, results.where(PROCESSES), columns)


def _state(found: Measurement) -> str:
    return f"{found.nbytes / MIB:.0f} MiB"


# ------------------------------------------------------------------------------------ Markdown


def table_of(title: str, found: Iterable[T], columns: Columns[T]) -> str:
    """Return a heading and a table with a row for each thing found; nothing without rows."""
    rows = [[text(one) for text in columns.values()] for one in found]
    return table(title, "|".join(columns), rows)


def table(title: str, columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a heading and a table; nothing without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    heads = columns.split("|")
    head = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return f"## {title[0].upper()}{title[1:]}\n\n" + "\n".join([*head, *lines]) + "\n"


def facts(values: Mapping[str, object]) -> str:
    """Return facts as a list."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {item}" for key, item in value.items())
        return str(value)

    return "".join(f"- {key}: {text(value)}\n" for key, value in values.items())


def seconds(value: float) -> str:
    """Format a time for people; empty for NaN."""
    if math.isnan(value):
        return ""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs"


def verdict(target: str, met: bool) -> str:
    """Return a target, and whether it was met."""
    return f"{target}: {'PASS' if met else 'MISS'}"


def span(times: Sequence[float]) -> str:
    """Format the fastest and the slowest time."""
    return f"{seconds(min(times))} – {seconds(max(times))}"
