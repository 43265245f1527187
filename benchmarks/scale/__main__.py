"""`python -m benchmarks.scale`: what planning, committing and agreeing cost up to 10,000 processes.

A Llama-like state of 10 TB (W1: bf16 parameters, fp32 master copy, m and v) is cut over the shards
of an HSDP job with ten replicas. No array exists. Everything else is the library's own: the plans
of sampled processes, the entries of all, and what process 0 makes of them; the messages of a round
by all processes; and what each says about the chunks that it wants in a restore. Each measurement
runs in a process of its own, whose peak memory is read at its end.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import facts
from benchmarks.report import write_page
from benchmarks.scale.costs import commit, messages, own_plan, sharing
from benchmarks.scale.job import STATE_NBYTES, Figures, Job, even, llama, write_entries
from benchmarks.workers import apart

COUNTS = (100, 1_000, 10_000)
CHUNKS = (125_000, 250_000, 500_000, 1_000_000)
"""Chunks of the job of 1,000 processes of which process 0's time is looked at."""

REQUESTS = 3
"""Store requests of each process beside data: it looks for the attempt and passes its entries on,
and process 0 reads them (tests/objects/test_requests_of_many.py)."""


def simulate(job: Job) -> Figures:
    """Return the figures of one job."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        found = {"processes": job.process_count, **apart(write_entries, job, place)}
        found |= apart(commit, job, place)
        found |= {f"share_{key}": value for key, value in apart(sharing, job, place).items()}
    metadata = found["record_nbytes"] + found["index_nbytes"]
    found["metadata_nbytes"] = metadata
    found["metadata_once_nbytes"] = metadata / job.process_count
    return found


def exponent(found: Sequence[Figures], what: str) -> float:
    """Return the slope of the logarithm of a figure over that of the number of chunks."""
    chunks, figures = ([math.log(one[key]) for one in found] for key in ("chunks", what))
    return float(np.polyfit(chunks, figures, 1)[0])


def report(jobs: Sequence[Figures], grown: Sequence[Figures], about: Any) -> str:
    """Return the figures as Markdown."""
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("chunks", lambda f: f"{f['chunks']:,.0f}"),
        ("own plan, of the state", lambda f: f"{f['plan_s'] * 1e3:.0f} ms"),
        ("own plan, 1,000 own chunks", lambda f: f"{f['own_plan_s'] * 1e3:.2f} ms"),
        ("entries of a process, first save", lambda f: _size(f["entries_nbytes"])),
        ("process 0: names of all chunks, once", lambda f: f"{f['names_s']:.2f} s"),
        ("process 0: entries decoded", lambda f: f"{f['entries_s']:.2f} s"),
        ("process 0: compared and merged", lambda f: f"{f['merge_s']:.2f} s"),
        ("process 0: index and record", lambda f: f"{f['index_s']:.2f} s"),
        ("process 0: memory for all this", lambda f: _size(f["peak_nbytes"])),
        ("messages of a process for a save", lambda f: f"{f['posts_per_process']:.0f}"),
        ("store requests beside data, all", lambda f: f"{REQUESTS * f['processes']:,.0f}"),
        (
            "the same per second, if a save takes a minute",
            lambda f: f"{REQUESTS * f['processes'] / 60:,.0f}",
        ),
        ("record and index", lambda f: _size(f["metadata_nbytes"])),
        ("read of these by each restoring process", lambda f: _size(f["metadata_nbytes"])),
        ("the same, read once", lambda f: _size(f["metadata_once_nbytes"])),
        ("what a process says that it wants", lambda f: _size(f["share_wanted_nbytes"])),
        ("what process 0 answers", lambda f: _size(f["share_sharing_nbytes"])),
        ("process 0: who shares what", lambda f: f"{f['share_share_s']:.2f} s"),
        ("each process: its streams", lambda f: f"{f['share_streams_s']:.2f} s"),
    ]
    lines = ["# Scale", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += _table("processes", [f"{one['processes']:,.0f}" for one in jobs], rows, jobs)
    if len(grown) > 1:
        parts = ("plan", "names", "entries", "merge", "index")
        for one in grown:
            one["all_cpu_s"] = sum(one[f"{part}_cpu_s"] for part in parts)
            one["planned_cpu_s"] = sum(one[f"{part}_cpu_s"] for part in ("plan", "names", "index"))
        cpu: list[tuple[str, Callable[[Figures], str]]] = [
            ("plans, names and indexes", lambda f: f"{f['planned_cpu_s']:.2f} s"),
            ("and entries, compared and merged", lambda f: f"{f['all_cpu_s']:.2f} s"),
            ("memory", lambda f: _size(f["peak_nbytes"])),
        ]
        lines += ["", "Processor time of process 0 of 1,000, by chunks:", ""]
        lines += _table("chunks", [f"{one['chunks']:,.0f}" for one in grown], cpu, grown)
        lines += ["", f"Exponent in chunks: {exponent(grown, 'all_cpu_s'):.2f}."]
    return "\n".join(lines) + "\n"


def _table(
    what: str,
    heads: Sequence[str],
    rows: Sequence[tuple[str, Callable[[Figures], str]]],
    found: Sequence[Figures],
) -> list[str]:
    cells = [(what, *heads), ("---",) * (len(heads) + 1)]
    cells += [(name, *map(text, found)) for name, text in rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def _size(nbytes: float) -> str:
    power = max(0, min(3, int(math.log2(max(1, nbytes)) // 10)))
    return f"{nbytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--chunks", type=int, nargs="*", default=CHUNKS)
    parser.add_argument("--state", type=int, default=STATE_NBYTES, help="bytes of the state")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    jobs: list[Figures] = []
    for count in given.processes:
        own = {**apart(own_plan, count), **apart(messages, count)}
        jobs.append({**simulate(Job(count, llama(given.state))), **own})
    grown = [simulate(even(1_000, chunks)) for chunks in given.chunks]
    about = {**facts(given.out), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    text = report(jobs, grown, about)
    write_page(given.out, "scale", text, {"about": about, "jobs": jobs, "chunks": grown})


if __name__ == "__main__":
    main()
