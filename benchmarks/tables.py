"""The tables of the report. Each is empty where nothing of its kind was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

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
    exponent,
    slope_s,
    speedup,
)
from benchmarks.workloads import COMPRESSED, SMALL_LEAVES

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
    rows = [(v.workload, v.metric, v.target, v.measured, v.status) for v in results.verdicts]
    return table("Targets", "workload|metric|target|measured|", rows)


# -------------------------------------------------------------------------- saves and restores

_COLUMNS = (
    "workload|subject|column|median|fastest – slowest|rate|of the floor|"
    "CPU s per GB|extra memory|unsteady samples"
)


def _transfers(results: Results, scenario: str) -> str:
    found = results.where(scenario)
    columns, rows = _COLUMNS, [_row(m) for m in found]
    if scenario in (WARM, COLD):
        columns += "|read from disk"
        rows = [(*row, _disk_share(m)) for row, m in zip(rows, found, strict=True)]
    elif scenario in (SAVE, RETENTION):
        columns += "|until wait() returns"
        rows = [(*row, seconds(m.value("waited_s"))) for row, m in zip(rows, found, strict=True)]
    elif scenario in (FOREIGN, CONVERT):
        columns += "|the other takes"
        rows = [(*row, _faster(results, m)) for row, m in zip(rows, found, strict=True)]
    return table(scenario, columns, rows)


def _row(found: Measurement) -> tuple[str, ...]:
    gigabytes = found.nbytes / 1e9
    large = bool(found.floor)
    ratio = found.floor_ratio
    return (
        found.workload,
        found.subject,
        found.column,
        seconds(found.wall_s),
        span(found.times),
        f"{gigabytes / found.wall_s:.2f}" if large else "",
        "" if ratio is None else f"{ratio:.2f}",
        f"{_cpu_s(found) / gigabytes:.2f}" if large else "",
        _extra(found),
        f"{found.noisy(TOLERANCE)} of {len(found.samples)}" if large else "",
    )


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
    rows = [
        (
            found.column,
            str(found.leaf_count),
            seconds(found.wall_s),
            f"{found.wall_s / found.leaf_count * 1e6:.2f} µs",
        )
        for found in sorted(
            (m for m in results.measurements if m.scenario == PLAN), key=lambda m: m.column
        )
    ]
    return table(PLAN, "what|how many|median|of each", rows)


def _resharding(results: Results) -> str:
    rows = []
    for found in results.measurements:
        if found.scenario != RESHARD:
            continue
        wanted = found.value("wanted_nbytes")
        rows.append(
            (
                found.workload,
                found.subject,
                found.column,
                seconds(found.wall_s),
                span(found.times),
                f"{wanted / found.wall_s / 1e9:.2f}",
                _share(found.value("read_share")),
                _share(found.value("calls_share")),
                f"{_cpu_s(found):.2f} s",
                _extra(found),
                _faster(results, found),
            )
        )
    columns = (
        "workload|subject|onto|median|fastest – slowest|rate|read|by system calls|CPU|"
        "extra memory|the other takes"
    )
    return table(RESHARD, columns, rows)


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


# ------------------------------------------------------------------------------ in the background


def _stalls(results: Results) -> str:
    rows = []
    for found in results.measurements:
        if found.scenario != STALL:
            continue
        floor_s = [sample.floor_s for sample in found.samples if sample.floor_s is not None]
        rows.append(
            (
                found.workload,
                found.column,
                seconds(found.wall_s),
                seconds(found.value("start_save_s")),
                seconds(found.value("inflation_s")),
                seconds(found.value("step_s")),
                seconds(median(floor_s)),
                seconds(found.value("committed_s")),
            )
        )
    columns = (
        "workload|loop|stall|in start_save|three steps longer by|a step|memcpy|committed after"
    )
    return table(STALL, columns, rows)


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
    rows = []
    for found in results.where(scenario):
        plain = results.find(found.workload, scenario, NO_SAVES, found.column)
        longer = None if plain is None else speedup(plain, found)
        rows.append(
            (
                found.column,
                found.subject,
                seconds(found.wall_s),
                "" if longer is None else f"{longer:.2f} ×",
                seconds(found.value("step_s")),
                seconds(found.value("steps_s")),
                seconds(found.value("blocked_s")),
                seconds(found.value("committed_s")),
                seconds(found.value("total_s")),
                f"{_cpu_s(found):.2f} s",
                seconds(found.value("lag_p99_s")),
                seconds(found.value("lag_max_s")),
                _extra(found),
            )
        )
    columns = (
        "loop|saves by|training|of that without saves|a step|all steps|in calls to save|"
        "a save takes|until the last save|CPU|loop lag p99|largest|extra memory"
    )
    return table(scenario, columns, rows)


def _budgets(results: Results) -> str:
    rows = [
        (
            found.column,
            f"{found.nbytes / MIB:.0f} MiB",
            _extra(found),
            seconds(found.wall_s),
            f"{found.nbytes / found.wall_s / 1e9:.2f}",
            f"{_cpu_s(found):.2f} s",
        )
        for found in results.where(BUDGET)
    ]
    return table(BUDGET, "what|state|peak of extra memory|took|rate|CPU", rows)


def _growth(results: Results) -> str:
    rows = [
        (
            f"{found.nbytes / MIB:.0f} MiB",
            found.column,
            f"{found.value('per_save_nbytes') / MIB:.3f} MiB",
            f"{found.value('grown_nbytes') / MIB:.1f} MiB",
            seconds(found.wall_s),
        )
        for found in results.where(GROWTH)
    ]
    return table(GROWTH, "state|saves|growth per save|last over first|took", rows)


def _processes(results: Results) -> str:
    rows = []
    for found in results.where(PROCESSES):
        rows.append(
            (
                found.column,
                seconds(found.wall_s),
                span(found.times),
                f"{found.nbytes / found.wall_s / 1e9:.2f}",
                f"{_cpu_s(found):.2f} s",
                _extra(found),
            )
        )
    return table(PROCESSES, "by|median|fastest – slowest|rate|CPU of all|extra memory of all", rows)


# ------------------------------------------------------------------------------------ Markdown


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


def span(times: Sequence[float]) -> str:
    """Format the fastest and the slowest time."""
    return f"{seconds(min(times))} – {seconds(max(times))}"
