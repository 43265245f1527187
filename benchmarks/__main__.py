"""`python -m benchmarks`: one command that measures, checks, and writes the results."""

from __future__ import annotations

import argparse
import functools
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import files, machine, report, results
from benchmarks.local import targets
from benchmarks.local.floors import Floors
from benchmarks.local.plans import runs
from benchmarks.local.suite import Suite
from benchmarks.measure import Protocol

MIB = 1 << 20
COPIES_ON_DISK, FULL_COPIES_ON_DISK = 8, 24
"""At one time: a checkpoint of each peer, the floor's file, one being saved, one probe."""

COPIES_IN_MEMORY = 8
"""At one time: state, targets, pool, a restored copy, the loop's state and a copy to compare, and
the memory that is held between samples."""

SPARE_NBYTES = 768 * MIB

SHORT_STEADY_S, FULL_STEADY_S = 1.0, 20.0
"""Seconds per scenario in which unsteady samples are taken again."""

SHORT_LIMIT_S, FULL_LIMIT_S = 340.0, 3 * 3600.0
"""After so many seconds no scenario begins any more; the short form is to end in six minutes."""

BUFFER_NBYTES = 256 * MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 1 when a scenario failed, 2 when it cannot run here.

    A missed target is no failure: speed is no test, the table says PASS or MISS.
    """
    options = _parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    size = options.size * MIB
    full = options.full
    if options.steady_s is None:
        options.steady_s = FULL_STEADY_S if full else SHORT_STEADY_S
    if options.limit_s is None:
        options.limit_s = FULL_LIMIT_S if full else SHORT_LIMIT_S
    made = runs(size, full=full)
    unknown = set(options.only) - made.keys()
    if unknown:
        print(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(made)}")
        return 2
    with files.scratch(options.dir) as directory:
        refused = machine.refusal(
            directory,
            (FULL_COPIES_ON_DISK if full else COPIES_ON_DISK) * size + SPARE_NBYTES,
            COPIES_IN_MEMORY * size + SPARE_NBYTES,
        )
        if refused:
            print(refused, file=sys.stderr)
            return 2
        found = _measure(options, directory, made)
    for path in _write(found, options, plots=not options.no_plots):
        print(f"wrote {path}", file=sys.stderr)
    print(report.markdown(found))
    return 1 if found.errors else 0


def _measure(
    options: argparse.Namespace, directory: Path, made: Mapping[str, Callable[[Suite], None]]
) -> results.Results:
    start = time.monotonic()
    until_s = start + options.limit_s
    found = results.Results(options.name or ("full" if options.full else "short"))
    found.facts = {
        **machine.facts(directory),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "samples": f"{options.samples} per case, order shuffled with seed {options.seed}",
        "command": shlex.join(["python", "-m", "benchmarks", *options.arguments]),
    }
    floors = Floors(directory, buffer_nbytes=min(BUFFER_NBYTES, options.size * MIB))
    try:
        found.floors = floors.choose()
        found.facts["floors"] = (
            f"raw write {floors.write_way}; raw read, cold {floors.cold_way}; "
            f"memcpy {floors.copy_way.threads} × {floors.copy_way.block_nbytes // MIB} MiB"
        )
        suite = Suite(
            directory,
            floors,
            Protocol(options.samples, repeats_for_s=options.steady_s, until_s=until_s),
            found,
            random.Random(options.seed),
            full=options.full,
            only=frozenset(options.scenario),
        )
        for name, run in made.items():
            if not options.only or name in options.only:
                suite.attempt(name, None, functools.partial(run, suite))
                found.facts["duration"] = f"{time.monotonic() - start:.0f} s"
                suite.log(f"  {found.facts['duration']}")
                _write(found, options, plots=False)  # what is killed later has taken hours
    except (KeyboardInterrupt, SystemExit):
        found.errors.append("interrupted: these are the results until then")
    finally:
        floors.close()
    found.facts["duration"] = f"{time.monotonic() - start:.0f} s"
    return found


def _write(found: results.Results, options: argparse.Namespace, *, plots: bool) -> list[Path]:
    found.verdicts = targets.judge(found)
    return report.write(found, options.out, plots=plots)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help="every workload with every peer; takes hours")
    add("--dir", type=Path, default=None, help="where to write; default: the system's temp")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where the results go; default: benchmarks/results",
    )
    add("--name", default=None, help="of the files of the results; default: short or full")
    add("--size", type=int, default=1024, help="MiB of the large workloads; default 1024")
    add("--samples", type=int, default=5, help="samples per case; default 5")
    add("--seed", type=int, default=0, help="seed of the order; default 0")
    add(
        "--steady-s",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long each scenario may take again what was unsteady; default 1 (--full: 20)",
    )
    add(
        "--limit-s",
        type=float,
        default=None,
        metavar="SECONDS",
        help="after which no scenario begins any more; default 340 (--full: 3 hours)",
    )
    add("--only", nargs="+", default=[], metavar="W", help="workloads to run")
    add(
        "--scenario",
        nargs="+",
        default=[],
        choices=results.SCENARIOS,
        metavar="NAME",
        help=f"scenarios to run, of {', '.join(map(repr, results.SCENARIOS))}; default all",
    )
    add("--no-plots", action="store_true", help="write no pictures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
