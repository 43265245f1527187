"""`python -m benchmarks.remote`: measures saves and restores on simulated object stores.

A missed target is no failure: speed is no test, the table says PASS or MISS.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import files, machine
from benchmarks.peers import installed, versions
from benchmarks.remote import report, targets
from benchmarks.remote.forms import FORMS, MIB, PEERS, WORKLOADS
from benchmarks.remote.results import RESTORE, SAVE, SCENARIOS, Results
from benchmarks.remote.suite import CASTS, Suite

COPIES_ON_DISK = 3
COPIES_IN_MEMORY = 24
"""At one time: staged in every process, restored, and of every process in the service."""

COPIES_OF_ONE = 18
"""Forms that measure only saves or only restores, so that 24 GiB are enough for 1 GiB."""

SPARE_NBYTES = 2048 * MIB

CLIENTS = ("fsspec", "s3fs", "gcsfs", "obstore", "s3torchconnector")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status: 1 when a scenario failed, 2 when it cannot run here."""
    options = _parser().parse_args(arguments)
    form = FORMS["full" if options.full else "quick" if options.quick else "short"]
    if options.size is not None:
        form = dataclasses.replace(form, nbytes=options.size * MIB)
    if options.large is not None:
        form = dataclasses.replace(form, large_nbytes=options.large * MIB)
    if options.samples is not None:
        form = dataclasses.replace(form, samples=options.samples)
    if options.peers is not None:
        form = dataclasses.replace(form, peers=tuple(options.peers))
    if options.limit_s is not None:
        form = dataclasses.replace(form, limit_s=options.limit_s)
    scenarios = options.scenario or form.scenarios
    alone = not {SAVE, RESTORE} <= {*scenarios}
    copies = COPIES_OF_ONE if alone else COPIES_IN_MEMORY
    start = time.monotonic()
    with files.scratch(options.dir) as directory:
        refused = machine.refusal(
            directory,
            COPIES_ON_DISK * form.nbytes + form.large_nbytes,
            max(copies * form.nbytes, 3 * form.large_nbytes) + SPARE_NBYTES,
        )
        if refused:
            print(refused, file=sys.stderr)
            return 2
        found = Results(form.name)
        suite = Suite(
            form,
            directory,
            found,
            random.Random(options.seed),
            frozenset(scenarios),
            frozenset(options.only or form.workloads),
        )
        facts = machine.facts(directory)
        facts.pop("file system")
        facts["versions"] = {**versions(), **installed(CLIENTS)}
        found.facts = facts
        try:
            for profile in options.profile or CASTS:
                suite.attempt(profile, None, lambda profile=profile: suite.run(profile))
        except (KeyboardInterrupt, SystemExit):
            found.errors.append("interrupted: these are the results until then")
    found.facts["duration"] = f"{time.monotonic() - start:.0f} s"
    found.facts["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    found.facts["sizes"] = (
        f"W1 and W3 of {form.nbytes / MIB:.0f} MiB, W4 of {form.small} leaves; "
        f"{form.samples} samples, of peers on W1 {form.peer_samples}, of slow ones and on other "
        f"workloads {form.slow_samples}, in an order shuffled with seed {options.seed}"
    )
    found.verdicts = targets.judge(found)
    for path in report.write(found, options.out, name=options.name, plots=not options.no_plots):
        print(f"wrote {path}", file=sys.stderr)
    print(report.markdown(found))
    return 1 if found.errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    add = parser.add_argument
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--quick", action="store_true", help="small states and few samples")
    forms.add_argument(
        "--full",
        action="store_true",
        help="1 GiB, every workload, peer and sweep; takes hours, and with 24 GiB of memory only "
        f"without either of --scenario {SAVE} and {RESTORE}",
    )
    add("--only", nargs="+", choices=WORKLOADS, help="workloads to run; default all")
    add("--profile", nargs="+", choices=tuple(CASTS), help="services; default all")
    add("--scenario", nargs="+", choices=SCENARIOS, help="scenarios to run; default all")
    add("--peers", nargs="*", choices=PEERS, default=None)
    add("--size", type=int, default=None, help="MiB of W1 and W3")
    add("--large", type=int, default=None, help="MiB of the state saved with a small budget")
    add("--samples", type=int, default=None, help="samples per case")
    add("--limit-s", type=float, default=None, help="after which no scenario begins; default 300")
    add("--name", default=report.NAME, help="of the files of the results; default: remote")
    add("--seed", type=int, default=0, help="seed of the order; default 0")
    add("--dir", type=Path, default=None, help="for the states; default: the system's temp")
    add(
        "--out",
        type=Path,
        default=Path(__file__).parents[1] / "results",
        help="where the results go; default: benchmarks/results",
    )
    add("--no-plots", action="store_true", help="write no picture")
    return parser


if __name__ == "__main__":
    sys.exit(main())
