"""The files a run leaves: JSON with every sample, a Markdown table, and plots."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import (
    COLD,
    FIRST,
    LAG,
    SAVE,
    STALL,
    WARM,
    Measurement,
    Results,
    slope_s,
)

TOLERANCE = 0.10


def write(results: Results, directory: Path, *, plots: bool = True) -> list[Path]:
    """JSON, table and (where matplotlib is installed) plots are in `directory`; returns them."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"{results.form}.json"
    data.write_text(json_text(results))
    table = directory / f"{results.form}.md"
    made = [data, table]
    picture = directory / f"{results.form}.png"
    if plots and importlib.util.find_spec("matplotlib"):
        plot(results, picture)
        made.append(picture)
    table.write_text(markdown(results, picture.name if picture in made else None))
    return made


def json_text(results: Results) -> str:
    """JSON with one sample per line: small, and a change shows in a diff."""
    value = results.as_json()
    measurements = value.pop("measurements")
    head = json.dumps(value, indent=1, ensure_ascii=False)[:-2]
    lines = [f'{head},\n "measurements": [']
    for index, found in enumerate(measurements):
        samples = found.pop("samples")
        start = json.dumps(found, ensure_ascii=False)[:-1]
        rows = ",\n   ".join(json.dumps(sample) for sample in samples)
        comma = "," if index + 1 < len(measurements) else ""
        lines.append(f'  {start}, "samples": [\n   {rows}]}}{comma}')
    return "\n".join([*lines, " ]\n}\n"])


# ------------------------------------------------------------------------------------ markdown


def markdown(results: Results, picture: str | None = None) -> str:
    """The tables, targets first."""
    parts = [f"# Benchmarks, {results.form} form\n", _facts(results.facts)]
    if results.errors:
        parts.append("## Failed\n\n" + "\n".join(f"- {error}" for error in results.errors) + "\n")
    if results.verdicts:
        judged = [(v.workload, v.metric, v.target, v.measured, v.status) for v in results.verdicts]
        parts.append("## Targets\n\n" + _table("workload|metric|target|measured|", judged))
    if picture:
        parts.append(f"![rates, slopes and stalls]({picture})\n")
    for scenario in (SAVE, WARM, COLD):
        found = [m for m in results.measurements if m.scenario == scenario]
        if not found:
            continue
        columns, rows = _COLUMNS, [_row(m) for m in found]
        if scenario != SAVE:
            columns += "|read from disk"
            rows = [(*row, _disk_share(m)) for row, m in zip(rows, found, strict=True)]
        parts.append(f"## {scenario.capitalize()}\n\n" + _table(columns, rows))
    parts += [_small_leaves(results), _stalls(results), _background(results), _NOTES]
    return "\n".join(part for part in parts if part)


_COLUMNS = (
    "workload|subject|column|median|fastest – slowest|rate|of the floor|"
    "CPU s per GB|extra memory|unsteady samples"
)

_NOTES = """## How to read this

Rates are GB/s (10⁹ bytes). *Of the floor* is the median of floor seconds / own seconds, where the
floor is what plain system calls or copies took for as many bytes, probed right before and after
each sample. Samples whose two probes differ by more than 10 % are taken again, at most five times;
*unsteady samples* counts those that still differed. As much free memory as a sample may need is
touched and freed right before it, because virtual machines lose free pages to their host and get
them back slowly. *Extra memory* is the peak of resident memory above what was resident before, the
pool that asyncckpt keeps for saves included. CPU seconds are those of the process; the kernel's
write-back of buffered files is not in them. *Read from disk* is the share of the bytes that came
from the device: about 100 % is cold, 0 % is warm. Every restore was compared with its source,
outside the timed part.
"""


def _facts(facts: dict[str, Any]) -> str:
    lines = [f"- {key}: {_text(value)}" for key, value in facts.items()]
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _row(found: Measurement) -> Sequence[str]:
    times = [sample.wall_s for sample in found.samples]
    gigabytes = found.nbytes / 1e9
    large = bool(found.floor)
    cpu_s = sorted(sample.cpu_s for sample in found.samples)[len(times) // 2]
    extra = sorted(sample.extra_nbytes for sample in found.samples)[len(times) // 2]
    ratio = found.floor_ratio
    return (
        found.workload,
        found.subject,
        found.column,
        _seconds(found.wall_s),
        f"{_seconds(min(times))} – {_seconds(max(times))}",
        f"{gigabytes / found.wall_s:.2f}" if large else "",
        "" if ratio is None else f"{ratio:.2f}",
        f"{cpu_s / gigabytes:.2f}" if large else "",
        f"{extra / 2**20:.0f} MiB",
        f"{found.noisy(TOLERANCE)} of {len(times)}" if large else "",
    )


def _disk_share(found: Measurement) -> str:
    share = found.value("device_share")
    return "" if math.isnan(share) else f"{share:.0%}"


def _small_leaves(results: Results) -> str:
    keys = dict.fromkeys(
        (m.scenario, m.subject, m.column)
        for m in results.measurements
        if m.workload.startswith("W4") and m.scenario in (SAVE, WARM)
    )
    rows = []
    for scenario, subject, column in keys:
        slope = slope_s(results, scenario, subject, column)
        if slope is not None:
            rows.append((scenario, subject, column, f"{slope * 1e6:.1f} µs"))
    if not rows:
        return ""
    return "## Per small leaf\n\n" + _table("scenario|subject|column|slope", rows)


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
                _seconds(found.wall_s),
                _seconds(found.value("start_save_s")),
                _seconds(found.value("inflation_s")),
                _seconds(found.value("step_s")),
                _seconds(sorted(floor_s)[len(floor_s) // 2]) if floor_s else "",
                _seconds(found.value("committed_s")),
            )
        )
    if not rows:
        return ""
    columns = (
        "workload|loop|stall|in start_save|three steps longer by|a step|memcpy|committed after"
    )
    return "## Stall\n\n" + _table(columns, rows)


def _background(results: Results) -> str:
    rows = []
    for found in results.measurements:
        if found.scenario == LAG:
            for name, key in (
                ("loop lag p99 during a save", "lag_p99_s"),
                ("largest loop lag", "lag_max_s"),
                ("loop lag p99 before the save", "idle_lag_p99_s"),
            ):
                rows.append((found.workload, name, _seconds(found.value(key))))
        elif found.scenario == FIRST:
            rows.append((found.workload, "first save after prepare", _seconds(found.wall_s)))
            rows.append((found.workload, "steady save", _seconds(found.value("steady_s"))))
            rows.append((found.workload, "first / steady", f"{found.value('first_to_steady'):.2f}"))
    if not rows:
        return ""
    return "## Background\n\n" + _table("workload|metric|median", rows)


def _table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    heads = columns.split("|")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return ""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    if abs(value) >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs"
