"""`python -m benchmarks`: one command that measures, checks, and writes the results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import machine, report, results, workloads
from benchmarks.local import reshard, scenarios, targets
from benchmarks.local.floors import Floors
from benchmarks.local.suite import Suite
from benchmarks.measure import Protocol
from benchmarks.peers import full_peers
from benchmarks.subject import Subject

Runs = Mapping[str, Callable[[Suite], None]]
Peers = Mapping[str, Callable[[Path], Subject]]

MIB = 1 << 20
COPIES_ON_DISK = 5
"""At one time: the floor's file, two checkpoints to restore from, one being saved, one probe."""

COPIES_IN_MEMORY = 6
"""At one time: state, targets, pool, a restored copy, the loop's state and a copy to compare."""

SPARE_NBYTES = 768 * MIB

SHORT_STEADY_S, FULL_STEADY_S = 10.0, 600.0
"""Seconds per scenario within which unsteady samples are taken again: the short form is to end in
ten minutes on a machine that is busy now and then."""

SHORT_RESHARDED = 2
"""The short form reshards a state of one part in so many: eight devices on a few cores are slow."""

BUFFER_NBYTES = 256 * MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 1 when a scenario failed, 2 when it cannot run here.

    A missed target is no failure: speed is no test, the table says PASS or MISS.
    """
    options = _parser().parse_args(arguments)
    size = options.size * MIB
    if options.steady_s is None:
        options.steady_s = FULL_STEADY_S if options.full else SHORT_STEADY_S
    peers = full_peers() if options.full else {}
    runs = _workloads(size, full=options.full)
    unknown = set(options.only) - runs.keys()
    if unknown:
        print(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
        return 2
    with (
        _terminated_by_exception(),
        tempfile.TemporaryDirectory(prefix="asyncckpt-bench-", dir=options.dir) as name,
    ):
        directory = Path(name)
        refused = machine.refusal(
            directory,
            (COPIES_ON_DISK + len(peers)) * size + SPARE_NBYTES,
            COPIES_IN_MEMORY * size + SPARE_NBYTES,
        )
        if refused:
            print(refused, file=sys.stderr)
            return 2
        found = _measure(options, directory, peers, runs)
    found.verdicts = targets.judge(found)
    for path in report.write(found, options.out, plots=not options.no_plots):
        print(f"wrote {path}", file=sys.stderr)
    print(report.markdown(found))
    return 1 if found.errors else 0


def _measure(
    options: argparse.Namespace, directory: Path, peers: Peers, runs: Runs
) -> results.Results:
    start = time.monotonic()
    found = results.Results("full" if options.full else "short")
    found.facts = machine.facts(directory)
    floors = Floors(directory, buffer_nbytes=min(BUFFER_NBYTES, options.size * MIB))
    try:
        found.floors = floors.choose()
        found.facts["floors"] = (
            f"raw write {floors.write_way}; raw read, warm {floors.warm_way}; raw read, cold "
            f"{floors.cold_way}; memcpy {floors.copy_way.threads} threads"
        )
        suite = Suite(
            directory,
            floors,
            Protocol(samples=options.samples, repeats_for_s=options.steady_s),
            found,
            random.Random(options.seed),
            peers,
            frozenset(options.scenario),
        )
        for name, run in runs.items():
            if not options.only or name in options.only:
                run(suite)
    finally:
        floors.close()
    found.facts["duration"] = f"{time.monotonic() - start:.0f} s"
    found.facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    found.facts["samples"] = f"{options.samples} per case, order shuffled with seed {options.seed}"
    return found


@contextlib.contextmanager
def _terminated_by_exception() -> Iterator[None]:
    # SIGTERM ends the block like any exception, so that its temporary directory is removed.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _workloads(size: int, *, full: bool) -> dict[str, Callable[[Suite], None]]:
    made: dict[str, Callable[[], workloads.Workload]] = {
        "W1": functools.partial(workloads.llama, size),
        "W3": functools.partial(workloads.single, size),
        "W3-odd": functools.partial(workloads.single, size, odd=True),
        "W4-1k": functools.partial(workloads.small, 1_000),
        "W4-10k": functools.partial(workloads.small, 10_000),
        "W4-100k": functools.partial(workloads.small, 100_000),
    }
    if full:
        made["W2"] = functools.partial(workloads.llama, size, stacked=True)
    runs: dict[str, Callable[[Suite], None]] = {
        name: functools.partial(scenarios.run, make=make) for name, make in made.items()
    }
    if importlib.util.find_spec("jax"):
        nbytes = size if full else size // SHORT_RESHARDED
        runs["W7"] = functools.partial(reshard.run, nbytes=nbytes, every_peer=full)
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="also W2, Orbax and torch DCP; takes long",
    )
    parser.add_argument(
        "--dir", type=Path, default=None, help="where to write; default: the system's temp"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where the results go; default: benchmarks/results",
    )
    parser.add_argument(
        "--size", type=int, default=1024, help="MiB of the large workloads; default 1024"
    )
    parser.add_argument("--samples", type=int, default=5, help="samples per case; default 5")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order; default 0")
    parser.add_argument(
        "--steady-s",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long each scenario may take again what was unsteady; default 10 (--full: 600)",
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="W", help="workloads to run")
    parser.add_argument(
        "--scenario",
        nargs="+",
        default=[],
        choices=results.SCENARIOS,
        help="scenarios to run; default all",
    )
    parser.add_argument("--no-plots", action="store_true", help="write no pictures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
