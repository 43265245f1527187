"""Memory of saves and restores: within budgets, and over many saves.

Every case runs in a process that has done nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import asyncckpt
from benchmarks import measure
from benchmarks.local.suite import Suite
from benchmarks.measure import Sample
from benchmarks.results import BUDGET, GROWTH, OURS, Measurement
from benchmarks.workers import apart
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
                    found = apart(budgeted, what, directory, STATES * nbytes, budget)
                    suite.found.measurements.append(found)

        suite.attempt(f"{BUDGET} of {budget // MIB} MiB", BUDGET, work)


def run_growth(suite: Suite, nbytes: int, saves: int = SAVES) -> None:
    """Measure how much more memory is resident after each of many saves."""
    suite.log(f"{GROWTH}: {saves} saves of {nbytes / MIB:.0f} MiB")

    def work() -> None:
        with suite.scratch("growth") as directory:
            suite.found.measurements.append(apart(growing, directory, nbytes, saves))

    suite.attempt(GROWTH, GROWTH, work)


# ----------------------------------------------------------------------------------- the child


def budgeted(what: str, directory: Path, nbytes: int, budget: int) -> Measurement:
    """Save, or restore what another process saved, with a new `Checkpointer`."""
    workload = llama(nbytes)
    _warm_up(directory)
    return asyncio.run(_budgeted(what, directory / "run", workload, budget))


async def _budgeted(what: str, root: Path, workload: Workload, budget: int) -> Measurement:
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


def growing(directory: Path, nbytes: int, saves: int) -> Measurement:
    """Save in the background again and again, and fit the memory that stays resident."""
    workload = llama(nbytes)
    _warm_up(directory)
    return asyncio.run(_growing(directory / "run", workload, saves))


async def _growing(root: Path, workload: Workload, saves: int) -> Measurement:
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


def _warm_up(directory: Path) -> None:
    """Import what saves and restores use, so that modules do not count as memory of a save."""
    path = directory / "warm-up"
    tree = {"x": np.arange(8.0)}
    if not path.exists():
        asyncckpt.blocking.save(path, tree)
    asyncckpt.blocking.restore_into(path, tree)
