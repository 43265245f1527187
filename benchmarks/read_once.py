"""`python -m benchmarks.read_once`: restores that read once against each process for itself.

Processes of a torch job (gloo) restore the whole of one state: from local disk, from the S3-like
simulator, and from the same over a link of 250 MB/s that all of them share, as the processes of a
host do. A round measures both ways once, in a shuffled order; ratios are of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncckpt import RestoreOptions, blocking
from benchmarks import tables
from benchmarks.machine import facts
from benchmarks.report import write_page
from benchmarks.workers import started
from tests.simulator import S3, simulator_process

MIB = 1 << 20
ARRAYS = 64
COUNTS = (2, 4)
BUCKET = "bench"
SERVICES = {
    "s3": S3,
    "s3, shared link": dataclasses.replace(S3, name="link", link_bandwidth=250e6),
}


class Sample(NamedTuple):
    """One restore: seconds until the last process had its values, bytes read by all together."""

    seconds: float
    read_nbytes: int


def work(
    root: str,
    storage: dict[str, Any] | None,
    rendezvous: Path,
    index: int,
    count: int,
    nbytes: int,
    pipe: Connection,
) -> None:
    """Restore in one way or the other at every word from the parent."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=index, world_size=count
    )
    like = {f"w{n}": np.zeros(nbytes // ARRAYS // 4, np.float32) for n in range(ARRAYS)}
    with blocking.Checkpointer(root, storage_options=storage) as ckpt:
        pipe.send(None)
        while (broadcast := pipe.recv()) is not None:
            options = RestoreOptions(broadcast=broadcast)
            report = ckpt.restore_into(like, step=1, options=options)
            assert like[f"w{ARRAYS - 1}"][7] == ARRAYS - 1
            pipe.send(report.read_nbytes)


def measure(
    root: str, storage: dict[str, Any] | None, count: int, nbytes: int, rounds: int
) -> dict[bool, list[Sample]]:
    """Return samples of both ways, after one of each that does not count."""
    samples: dict[bool, list[Sample]] = {False: [], True: []}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as home:
        rendezvous = Path(home) / "store"
        given = [(root, storage, rendezvous, index, count, nbytes) for index in range(count)]
        with started(work, given) as workers:
            workers.answers()
            for number in range(rounds + 1):
                for broadcast in order.sample((False, True), 2):
                    start = time.perf_counter()
                    read = sum(workers.ask(broadcast))
                    if number:
                        samples[broadcast].append(Sample(time.perf_counter() - start, read))
    return samples


def report(found: Sequence[tuple[str, int, dict[bool, list[Sample]]]], about: Any) -> str:
    """Return the figures as Markdown."""
    rows = []
    for service, count, samples in found:
        each, once = (statistics.median(s.seconds for s in samples[way]) for way in (False, True))
        ratio = samples[False][0].read_nbytes / samples[True][0].read_nbytes
        rows.append(
            (
                service,
                str(count),
                tables.seconds(each),
                tables.seconds(once),
                f"{each / once:.2f} ×",
                f"{ratio:.2f} ×",
            )
        )
    columns = "where|processes|each for itself|read once|speed-up|bytes read, of once"
    title = "# Restores that read once"
    return f"{title}\n\n{tables.facts(about)}\n{tables.table('restores', columns, rows)}"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.read_once", description=__doc__)
    parser.add_argument("--size", type=int, default=512, help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    nbytes = given.size * MIB
    tree = {f"w{n}": np.full(nbytes // ARRAYS // 4, n, np.float32) for n in range(ARRAYS)}
    found = []
    with tempfile.TemporaryDirectory(dir=given.dir) as home, contextlib.ExitStack() as stack:
        places: dict[str, tuple[str, dict[str, Any] | None]] = {"local disk": (f"{home}/run", None)}
        for name, profile in SERVICES.items():
            service = stack.enter_context(simulator_process(profile, buckets=[BUCKET]))
            places[name] = f"s3://{BUCKET}/run", service.s3_options(client="obstore")
        for name, (root, storage) in places.items():
            with blocking.Checkpointer(root, storage_options=storage, coordinator="single") as ckpt:
                ckpt.save(1, tree)
            for count in given.counts:
                samples = measure(root, storage, count, nbytes, given.rounds)
                found.append((name, count, samples))
    about = {**facts(given.dir), "state": f"{given.size} MiB in {ARRAYS} arrays"}
    text = report(found, about)
    figures = [
        {"where": name, "processes": count, "each": samples[False], "once": samples[True]}
        for name, count, samples in found
    ]
    write_page(given.out, "read_once", text, {"about": about, "samples": figures})


if __name__ == "__main__":
    main()
