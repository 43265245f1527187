"""W9: how fast 1, 2, 4 and 8 processes save one state together.

The state has the same bytes in all for every number of processes: each holds an equal part of
every array, as under fully sharded data parallelism. The processes coordinate through a directory.
A round measures every number of processes once, in a shuffled order.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import DirectoryCoordinator, ShardedArray, blocking
from benchmarks.local.suite import Suite
from benchmarks.measure import Sample, cpu_seconds, peak_nbytes
from benchmarks.results import OURS, PROCESSES, Measurement
from benchmarks.workers import started
from benchmarks.workloads import random_floats

MIB = 1 << 20
ARRAYS = 64
"""Arrays of the state, each divided among all processes."""

COUNTS = (1, 2, 4, 8)
SAVES = 3
"""Saves of a round by each number of processes."""


def run(suite: Suite, nbytes: int) -> None:
    """Measure every number of processes; a sample is one save."""
    suite.log(f"W9: {nbytes // MIB} MiB in {ARRAYS} arrays, saved by several processes")
    suite.attempt(f"W9 {PROCESSES}", PROCESSES, lambda: _measure(suite, nbytes))


def _measure(suite: Suite, nbytes: int) -> None:
    samples: dict[int, list[Sample]] = {count: [] for count in COUNTS}
    with suite.scratch("W9") as directory:
        while len(samples[1]) < suite.protocol.samples:
            for count in suite.rng.sample(list(samples), len(samples)):
                samples[count] += measure(directory, count, nbytes, SAVES)
    for count, found in samples.items():
        made = Measurement("W9", PROCESSES, OURS, column(count), nbytes, ARRAYS, "", tuple(found))
        suite.found.measurements.append(made)


def column(count: int) -> str:
    """Return the name of what so many processes did."""
    return "1 process" if count == 1 else f"{count} processes"


def work(root: Path, keys: Path, process: int, count: int, nbytes: int, pipe: Connection) -> None:
    """Save the own part of the state at every word from the parent.

    Answers with CPU seconds, and by how many bytes the peak of resident memory rose.
    """
    rows = nbytes // ARRAYS // 4096 // count
    tree: dict[str, Any] = {"step": 0}
    for number in range(ARRAYS):
        part = random_floats(np.random.default_rng((number, process)), (rows, 1024), np.float32)
        shard = [((rows * process, 0), part)]
        tree[f"w{number}"] = ShardedArray((rows * count, 1024), np.float32, shard)
    coordinator: Any = "single"
    if count > 1:
        coordinator = DirectoryCoordinator(keys, process_index=process, process_count=count)
    with blocking.Checkpointer(root, coordinator=coordinator) as ckpt:
        pipe.send(None)
        while (step := pipe.recv()) is not None:
            cpu_s, peak = cpu_seconds(), peak_nbytes()
            ckpt.save(step, tree)
            pipe.send((cpu_seconds() - cpu_s, peak_nbytes() - peak))


def measure(directory: Path, count: int, nbytes: int, saves: int) -> list[Sample]:
    """Return samples of saves by so many processes, the first of which made the plan."""
    home = Path(tempfile.mkdtemp(dir=directory))
    given = [(home / "run", home / "keys", process, count, nbytes) for process in range(count)]
    samples: list[Sample] = []
    try:
        with started(work, given) as workers:
            workers.answers()
            for step in range(saves + 1):
                start = time.perf_counter()
                said = workers.ask(step)
                wall_s = time.perf_counter() - start
                cpu_s, extra_nbytes = map(sum, zip(*said, strict=True))
                samples.append(Sample(wall_s, cpu_s, extra_nbytes))
                if step:
                    shutil.rmtree(home / "run" / str(step - 1))
        return samples[1:]
    finally:
        shutil.rmtree(home, ignore_errors=True)
