"""`python -m benchmarks.device`: durable saves to a simulated device of a known rate.

The rate of a real disk changes from hour to hour, and few disks are faster than the copies and
checksums of a save. Here large blocks take as long as a device of the given rate needs for them,
one after the other in the order of the calls, and no processor time. What is written in such
blocks is not stored; everything else is real: files and their allocation, small writes, flushes,
renames, retention. Plain writes go to the same device, in the best of the usual ways.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import asyncckpt
from benchmarks import tables
from benchmarks.local.floors import Floors
from benchmarks.local.ours import AsyncCkpt
from benchmarks.machine import facts
from benchmarks.report import write_page
from benchmarks.workloads import Workload, llama, single

LARGE_NBYTES = 64 << 10
"""Smaller writes are real."""

TARGETS = {3.5: 0.95}
"""By GB/s: the share of the rate of plain writes; of faster devices the share is reported."""

Sample = dict[str, float]
"""Seconds of plain writes and of a save of as many bytes, and CPU seconds of the save."""


class Device:
    """A device that writes so many bytes per second.

    Attributes:
        nbytes_per_s: its rate.
    """

    def __init__(self, nbytes_per_s: float) -> None:
        self.nbytes_per_s = nbytes_per_s
        self._lock = threading.Lock()
        self._idle_from_s = 0.0
        self._pwrite = os.pwrite

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        """Take as long as the device needs; stands in for `os.pwrite`."""
        nbytes = memoryview(data).nbytes
        if nbytes < LARGE_NBYTES:
            return self._pwrite(fd, data, offset)
        with self._lock:
            begin_s = max(time.perf_counter(), self._idle_from_s)
            end_s = self._idle_from_s = begin_s + nbytes / self.nbytes_per_s
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return nbytes

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Write to this device inside the block."""
        os.pwrite = self.pwrite
        try:
            yield
        finally:
            os.pwrite = self._pwrite


def measure(directory: Path, workload: Workload, rate: float, rounds: int) -> list[Sample]:
    """Return the samples of all rounds but the first; `rate` is in GB/s."""
    found: list[Sample] = []
    with Device(rate * 1e9).installed(), contextlib.ExitStack() as stack:
        floors = Floors(directory)
        stack.callback(floors.close)
        floors.choose_write()
        subject = AsyncCkpt(directory / "ours", retention=asyncckpt.KeepLast(1))
        stack.callback(subject.close)
        for number in range(rounds + 1):
            floor_s = floors.write_s(workload.nbytes)
            cpu_s = time.process_time()
            saved = subject.save(workload)
            cpu_s = time.process_time() - cpu_s
            if number:
                found.append({"floor_s": floor_s, "wall_s": saved.values["wall_s"], "cpu_s": cpu_s})
    return found


def report(samples: dict[tuple[str, float], list[Sample]], about: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for (workload, rate), found in samples.items():
        ratio = statistics.median(one["floor_s"] / one["wall_s"] for one in found)
        target = TARGETS.get(rate)
        verdict = "" if target is None else tables.verdict(f"≥ {target}", ratio >= target)
        walls = [one["wall_s"] for one in found]
        rows.append(
            (
                workload,
                f"{rate:g} GB/s",
                tables.seconds(statistics.median(one["floor_s"] for one in found)),
                tables.seconds(statistics.median(walls)),
                tables.span(walls),
                tables.seconds(statistics.median(one["cpu_s"] for one in found)),
                f"{ratio:.2f}",
                verdict,
            )
        )
    title = "# Durable saves to a simulated device"
    columns = "workload|device|plain writes|save|fastest – slowest|CPU|of the plain rate|target"
    return f"{title}\n\n{tables.facts(about)}\n{tables.table('KeepLast(1)', columns, rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--size", type=int, default=1024, help="MiB of the states")
    parser.add_argument("--rate", type=float, nargs="+", default=[3.5, 7.0], help="GB/s")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    samples: dict[tuple[str, float], list[Sample]] = {}
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        for workload in (llama(given.size << 20), single(given.size << 20)):
            for rate in given.rate:
                directory = Path(name) / f"{workload.id}-{rate:g}"
                directory.mkdir()
                found = measure(directory, workload, rate, given.rounds)
                samples[workload.id, rate] = found
    about = {**facts(given.dir), "rounds": given.rounds}
    rows = [
        {"workload": workload, "rate": rate, "samples": found}
        for (workload, rate), found in samples.items()
    ]
    write_page(given.out, "device", report(samples, about), {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
