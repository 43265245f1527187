"""The files a run leaves: JSON with every sample, a Markdown table, and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import median
from benchmarks.remote import plots as pictures
from benchmarks.remote.raw import Point
from benchmarks.remote.results import (
    BACKGROUND,
    MEMORY,
    RESTORE,
    SAVE,
    Measurement,
    Results,
    Sweep,
)
from benchmarks.report import write_files
from benchmarks.tables import Columns, facts, seconds, span, table, table_of, targets

NAME = "remote"
MIB = 1 << 20


def write(results: Results, directory: Path, *, name: str = NAME, plots: bool = True) -> list[Path]:
    """Write JSON, table and, where matplotlib is installed, a picture; return their paths."""
    return write_files(results, directory, name, markdown, {"": pictures.plot} if plots else {})


def markdown(results: Results, pictures: Sequence[str] = ()) -> str:
    """Return the tables, targets first."""
    parts = [f"# Benchmarks on object stores, {results.form} form\n", facts(results.facts)]
    if results.notes:
        parts.append("".join(f"- {note}\n" for note in results.notes))
    if results.errors:
        parts.append("## Failed\n\n" + "".join(f"- {error}\n" for error in results.errors))
    parts.append(targets(results))
    parts += [f"![rates, and sizes × streams]({picture})\n" for picture in pictures]
    for scenario in (SAVE, RESTORE):
        parts.append(_transfers(results, scenario))
    parts += [_background(results), _memory(results), _sweeps(results), _grids(results), _NOTES]
    return "\n".join(part for part in parts if part)


def _transfers(results: Results, scenario: str) -> str:
    columns: Columns[Measurement] = {
        "service": lambda m: m.profile,
        "workload": lambda m: m.workload,
        "subject": lambda m: m.subject,
        "column": lambda m: m.column,
        "median": lambda m: seconds(m.wall_s),
        "fastest – slowest": lambda m: span(m.times),
        "samples": _samples,
        "MB/s": lambda m: _rate(m) if m.nbytes >= 16 * MIB else "",
        "of the floor": lambda m: _number(results.floor_ratio(m)),
        "of its client alone": lambda m: _number(results.own_ratio(m)),
        "CPU s per GiB": lambda m: _cpu(m, [sample.cpu_s for sample in m.samples]),
        "service's CPU s per GiB": lambda m: _cpu(m, m.values("server_cpu_s")),
        "most in flight": lambda m: _count(m.value("in_flight")),
        "requests": lambda m: _count(m.value("requests")),
        "extra memory": lambda m: (
            "" if m.raw else _mib(median([sample.extra_nbytes for sample in m.samples]))
        ),
        "commit" if scenario == SAVE else "": lambda m: _trips(m) if scenario == SAVE else "",
    }
    return table_of(scenario, results.where(scenario=scenario), columns)


def _trips(found: Measurement) -> str:
    trips, more = found.value("record_trips"), found.value("end_trips")
    if math.isnan(trips):
        return ""
    return f"{trips:.0f} + {more - trips:.0f} round trips, {seconds(found.value('end_s'))}"


def _background(results: Results) -> str:
    columns: Columns[Measurement] = {
        "service": lambda m: m.profile,
        "workload": lambda m: m.workload,
        "subject": lambda m: m.subject,
        "how": lambda m: m.column,
        "committed after": lambda m: seconds(m.wall_s),
        "in start_save": lambda m: seconds(m.value("start_save_s")),
        "lag of the caller's loop, p99": lambda m: seconds(m.value("lag_p99_s")),
        "longest stall": lambda m: seconds(m.value("lag_max_s")),
        "samples": _samples,
    }
    return table_of(BACKGROUND, results.where(scenario=BACKGROUND), columns)


def _memory(results: Results) -> str:
    columns: Columns[Measurement] = {
        "service": lambda m: m.profile,
        "subject": lambda m: m.subject,
        "what": lambda m: m.column,
        "state": lambda m: _mib(m.nbytes),
        "budget": lambda m: _mib(m.value("budget_nbytes")),
        "peak of extra memory": lambda m: _mib(max(sample.extra_nbytes for sample in m.samples)),
        "median": lambda m: seconds(m.wall_s),
        "MB/s": _rate,
        "samples": _samples,
    }
    return table_of(MEMORY, results.where(scenario=MEMORY), columns)


def _sweeps(results: Results) -> str:
    return "\n".join(_sweep(sweep) for sweep in results.sweeps)


def _sweep(sweep: Sweep) -> str:
    streams = sorted({found.point.streams for found in sweep.points})
    sizes = sorted({found.point.nbytes for found in sweep.points})
    cells = {found.point: found for found in sweep.points}
    rows = []
    for nbytes in sizes:
        row = [f"{nbytes / MIB:g} MiB"]
        for number in streams:
            found = cells.get(Point(nbytes, number))
            if found is None:
                row.append("")
                continue
            rate = f"{sweep.nbytes / found.median_s / 1e6:.0f}"
            row.append(f"**{rate}**" if found is sweep.best else rate)
        rows.append(row)
    title = f"sweep of data files × streams, {sweep.profile}, {sweep.subject}: MB/s of a save"
    columns = "|".join(["data file", *(f"{number} streams" for number in streams)])
    return table(title, columns, rows) + (
        f"\nauto: {sweep.nbytes / sweep.auto_s / 1e6:.0f} MB/s with files of up to "
        f"{sweep.picked.nbytes / MIB:.1f} MiB and up to {sweep.picked.streams} requests in flight; "
        f"its first save, which knew nothing of the link, "
        f"{sweep.nbytes / sweep.cold_s / 1e6:.0f} MB/s. Best point: {sweep.best.point}. The best "
        f"few points have more samples ({len(sweep.best.seconds)}), taken in turn with auto's "
        f"({len(sweep.auto)}).\n"
    )


def _grids(results: Results) -> str:
    rows = []
    for found in results.grids:
        best = found.best
        others = sorted(found.rates.items(), key=lambda item: -item[1])
        text = ", ".join(f"{point} {rate / 1e6:.0f}" for point, rate in others)
        rows.append((found.profile, found.client, found.direction, str(best), text))
    return table("bare clients", "service|client|what|best|MB/s of every point", rows)


def _samples(found: Measurement) -> str:
    return str(len(found.samples))


def _rate(found: Measurement) -> str:
    return f"{found.rate / 1e6:.0f}"


def _cpu(found: Measurement, values: list[float]) -> str:
    if found.nbytes < 16 * MIB:
        value = median(values) if values else float("nan")
        return "" if math.isnan(value) else f"{value:.2f} s"
    return _number(found.per_gib(median(values)) if values else None)


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.2f}"


def _count(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}"


def _mib(nbytes: float) -> str:
    return "" if math.isnan(nbytes) else f"{nbytes / MIB:.0f} MiB"


_NOTES = """## How to read this

The service:

- The service is a simulator, in its own process on the same machine, and shares the cores with the
  program under test.
- *loopback* is not shaped, so the CPU seconds of the service are a part of every figure, including
  that of the floor.
- *s3* and *gcs* have latencies, bandwidths per connection, rate limits and tails like those
  services: one request in a hundred is ten times slower, in bandwidth as well. If this happens to a
  large object, it may take as long as all others together. Single samples therefore differ widely,
  and so do floors.
- Nothing here was measured on the real services.

Ratios:

- *The floor* is the fastest bare client over a grid of sizes and streams, at its best point, with
  bodies prepared beforehand and without hashing, checks or planning. It is probed between any two
  samples.
- *Of the floor* is the median time of the bare client that was fastest in these rounds / the own
  median time.
- *Of its client alone* is the same ratio for the bare client of the same library, at its own best
  point.
- *As the floor* means data files, streams and reads in flight of the client's best point; *auto*
  means the defaults.

Other columns:

- MB are 10⁶ bytes. Every program under test runs in its own process.
- CPU seconds are those of the process, and those of the service in the meantime; for W4 per run.
- *Commit* counts the sequential requests after the last byte of data was acknowledged: until the
  record was written + until the names for other programs were written, with the seconds of both
  together.
- *Most in flight* is the number that the service saw.
- Every restore is compared with its source, outside the timed part. Peers restore into their own
  memory.
- *The longest stall* is how much too late a task woke up that sleeps for a millisecond on the
  caller's loop, during a save. Peers have no async interface, so they ran in a thread.
"""
