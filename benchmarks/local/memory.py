"""Memory of saves and restores: within budgets, and over many saves.

Every case runs in a process that has done nothing else, `python -m benchmarks.local.memory`, which
prints its results as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import asyncckpt
from benchmarks import measure, results
from benchmarks.local.suite import Suite
from benchmarks.measure import Sample
from benchmarks.results import BUDGET, GROWTH, OURS, Measurement
from benchmarks.workloads import Tree, Workload, difference, llama, targets_like

MIB = 1 << 20
BUDGETS = tuple(size * MIB for size in (64, 128, 256, 512, 1024, 2048))

STATES = 2
"""The state that is saved within budgets, by the size of W1."""

SAVES, SETTLED = 200, 20
"""Saves over which memory is watched, and how many before the growth is fitted."""

SAVED, RESTORED = "save", "restore"


def run_budgets(suite: Suite, nbytes: int, budgets: Sequence[int] = BUDGETS) -> None:
    """Measure the peak of a save and of a restore in place, for each budget."""
    suite.log(f"{BUDGET}: a state of {STATES * nbytes / MIB:.0f} MiB")
    for budget in budgets:

        def work(budget: int = budget) -> None:
            with suite.scratch("budget") as directory:
                for what in (SAVED, RESTORED):
                    given = (STATES * nbytes, f"--budget={budget}")
                    suite.in_child("benchmarks.local.memory", what, directory, *given)

        suite.attempt(f"{BUDGET} of {budget // MIB} MiB", BUDGET, work)


def run_growth(suite: Suite, nbytes: int, saves: int = SAVES) -> None:
    """Measure how much more memory is resident after each of many saves."""
    suite.log(f"{GROWTH}: {saves} saves of {nbytes / MIB:.0f} MiB")

    def work() -> None:
        with suite.scratch("growth") as directory:
            given = (nbytes, f"--saves={saves}")
            suite.in_child("benchmarks.local.memory", "growth", directory, *given)

    suite.attempt(GROWTH, GROWTH, work)


# ----------------------------------------------------------------------------------- the child


async def budgeted(what: str, root: Path, workload: Workload, budget: int) -> Measurement:
    """Save, or restore what another process saved, with a new `Checkpointer`."""
    targets: Tree | None = targets_like(workload.tree) if what == RESTORED else None
    options = asyncckpt.SaveOptions(host_memory_nbytes=budget)
    gc.collect()
    before = measure.resident_nbytes()
    measure.reset_peak()
    cpu_s, start = measure.cpu_seconds(), time.perf_counter()
    async with asyncckpt.Checkpointer(root, save_options=options) as checkpointer:
        if targets is None:
            await (await checkpointer.start_save(1, workload.tree))
        else:
            await checkpointer.restore_into(targets, step=1)
        wall_s = time.perf_counter() - start
        extra_nbytes = max(0, measure.peak_nbytes() - before)
    if targets is not None and (wrong := difference(workload.tree, targets)):
        raise AssertionError(f"something else was restored: {wrong}")
    sample = Sample(
        wall_s, measure.cpu_seconds() - cpu_s, extra_nbytes, values={"budget_nbytes": budget}
    )
    return Measurement.of(workload, BUDGET, OURS, f"{what}, {budget // MIB} MiB", [sample])


async def growing(root: Path, workload: Workload, saves: int) -> Measurement:
    """Save in the background again and again, and fit the memory that stays resident."""
    resident: list[int] = []
    keep = asyncckpt.KeepLast(2)
    cpu_s, start = measure.cpu_seconds(), time.perf_counter()
    async with asyncckpt.Checkpointer(root, keep=keep) as checkpointer:
        for step in range(saves):
            await (await checkpointer.start_save(step, workload.tree))
            await checkpointer.wait()
            gc.collect()
            resident.append(measure.resident_nbytes())
    wall_s = time.perf_counter() - start
    settled = resident[min(SETTLED, saves // 2) :]
    slope = statistics.linear_regression(range(len(settled)), settled).slope
    values = {"per_save_nbytes": slope, "saves": saves, "grown_nbytes": settled[-1] - settled[0]}
    sample = Sample(
        wall_s, measure.cpu_seconds() - cpu_s, max(resident) - resident[0], values=values
    )
    return Measurement.of(workload, GROWTH, OURS, f"{saves} saves", [sample])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one case, and print it as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local.memory", description=__doc__)
    parser.add_argument("what", choices=(SAVED, RESTORED, "growth"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("nbytes", type=int)
    parser.add_argument("--budget", type=int, default=BUDGETS[0])
    parser.add_argument("--saves", type=int, default=SAVES)
    options = parser.parse_args(arguments)
    answers = results.claim_output()
    workload = llama(options.nbytes)
    _warm_up(options.directory / "warm-up")
    root = options.directory / "run"
    if options.what == "growth":
        found = asyncio.run(growing(root, workload, options.saves))
    else:
        found = asyncio.run(budgeted(options.what, root, workload, options.budget))
    results.print_json(answers, [found])
    return 0


def _warm_up(path: Path) -> None:
    """Import what saves and restores use, so that modules do not count as memory of a save."""
    tree = {"x": np.arange(8.0)}
    if not path.exists():
        asyncckpt.blocking.save(path, tree)
    asyncckpt.blocking.restore_into(path, tree)


if __name__ == "__main__":
    sys.exit(main())
