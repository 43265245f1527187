"""`python -m benchmarks.processes`: how fast 1, 2, 4 and 8 processes save one state together (W9).

The state has the same bytes in all for every number of processes: each holds an equal part of
every array, as under fully sharded data parallelism. The processes coordinate through a directory.
A round measures every number of processes once, in a shuffled order; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncckpt import DirectoryCoordinator, ShardedArray, blocking
from benchmarks.machine import facts

MIB = 1 << 20
ARRAYS = 64
"""Arrays of the state, each divided among all processes."""

COUNTS = (1, 2, 4, 8)
TARGET = 0.9
"""Of the rate of one process, for 2 and for 4."""

LIMIT_S = 120.0


class Sample(NamedTuple):
    """One save: seconds until the last process had its report, and CPU seconds per process."""

    seconds: float
    cpu_s: tuple[float, ...]


def work(root: Path, keys: Path, process: int, count: int, nbytes: int, pipe: Connection) -> None:
    """Save the own part of the state at every word from the parent; answer with CPU seconds."""
    rows = nbytes // ARRAYS // 4096 // count
    tree: dict[str, Any] = {"step": 0}
    for number in range(ARRAYS):
        part = np.full((rows, 1024), number + process, np.float32)
        shard = [((rows * process, 0), part)]
        tree[f"w{number}"] = ShardedArray((rows * count, 1024), np.float32, shard)
    coordinator: Any = "single"
    if count > 1:
        coordinator = DirectoryCoordinator(keys, process_index=process, process_count=count)
    with blocking.Checkpointer(root, coordinator=coordinator) as ckpt:
        pipe.send(None)
        while (step := pipe.recv()) is not None:
            before = resource.getrusage(resource.RUSAGE_SELF)
            ckpt.save(step, tree)
            after = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(directory: Path, count: int, nbytes: int, saves: int) -> list[Sample]:
    """Return samples of saves by so many processes, the first of which made the plan."""
    context = multiprocessing.get_context("spawn")
    home = Path(tempfile.mkdtemp(dir=directory))
    pipes: list[Connection] = []
    workers = []
    try:
        for process in range(count):
            mine, theirs = context.Pipe()
            given = (home / "run", home / "keys", process, count, nbytes, theirs)
            workers.append(context.Process(target=work, args=given, daemon=True))
            workers[-1].start()
            pipes.append(mine)
        answers(pipes)
        samples: list[Sample] = []
        for step in range(saves + 1):
            start = time.perf_counter()
            for pipe in pipes:
                pipe.send(step)
            cpu_s = answers(pipes)
            samples.append(Sample(time.perf_counter() - start, tuple(cpu_s)))
            if step:
                shutil.rmtree(home / "run" / str(step - 1))
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(LIMIT_S)
        return samples[1:]
    finally:
        for worker in workers:
            worker.kill()
        shutil.rmtree(home, ignore_errors=True)


def answers(pipes: Sequence[Connection]) -> list[Any]:
    """Return what every process says next."""
    found = []
    for number, pipe in enumerate(pipes):
        if not pipe.poll(LIMIT_S):
            raise TimeoutError(f"process {number} of {len(pipes)} has said nothing")
        found.append(pipe.recv())
    return found


def report(samples: dict[int, list[Sample]], nbytes: int, about: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = ["# Saves by several processes", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        "| processes | median | fastest – slowest | MB/s | of one process | target "
        "| CPU s of each process |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = statistics.median(sample.seconds for sample in samples[1])
    for count, found in sorted(samples.items()):
        seconds = sorted(sample.seconds for sample in found)
        median = statistics.median(seconds)
        cpu = [statistics.median(each) for each in zip(*(s.cpu_s for s in found), strict=True)]
        ratio = alone / median
        verdict = ""
        if count in (2, 4):
            verdict = f"≥ {TARGET}: {'PASS' if ratio >= TARGET else 'MISS'}"
        lines.append(
            f"| {count} | {median:.3f} s | {seconds[0]:.3f} – {seconds[-1]:.3f} s | "
            f"{nbytes / median / 1e6:.0f} | {ratio:.2f} | {verdict} | "
            f"{', '.join(f'{value:.2f}' for value in cpu)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.processes", description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="saves per round and number")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    samples: dict[int, list[Sample]] = {count: [] for count in sorted({1, *given.counts})}
    order = random.Random(0)
    for _ in range(given.rounds):
        for count in order.sample(list(samples), len(samples)):
            samples[count] += measure(given.dir, count, given.size * MIB, given.saves)
    about = {**facts(given.dir), "state": f"{given.size} MiB in {ARRAYS} arrays"}
    text = report(samples, given.size * MIB, about)
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "processes.md").write_text(text)
    figures = {str(count): found for count, found in samples.items()}
    document = {"about": about, "samples": figures}
    (given.out / "processes.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
