"""What the short and the full form run: workloads, their scenarios, and the peers of each."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from benchmarks import machine, workloads
from benchmarks.local import memory, processes, reshard, training
from benchmarks.local.scenarios import Plan
from benchmarks.local.suite import Suite
from benchmarks.peers import ORBAX, all_peers, fastest, one_of_each
from benchmarks.results import (
    BACK_TO_BACK,
    COLD,
    CONVERT,
    FIRST,
    FOREIGN,
    LAG,
    PLAN,
    RETENTION,
    SAVE,
    STALL,
    TRAINING,
    WARM,
)

TRAINED = 4
"""The state of the training with saves has one part in so many of the size."""

WATCHED = 16
"""The state of many saves, likewise."""

LARGEST = 4
"""W2 once more, so many times as large: the full form, where there is memory for it."""

COPIES_OF_LARGEST = 6
"""State, targets, pool, what a peer holds beside them, and what is held between samples."""

Runs = dict[str, Callable[[Suite], None]]


def runs(size: int, *, full: bool) -> Runs:
    """Return what is run, by the name of its workload, in order.

    The short form begins with small leaves: as long as no peer but safetensors is imported, a full
    garbage collection takes a tenth of the time.

    Args:
        size: bytes of the large workloads.
        full: the full form.
    """
    made = _full(size) if full else _short(size)
    if importlib.util.find_spec("jax") is None:
        made.pop("W7", None)
    return made


def _short(size: int) -> Runs:
    llama = functools.partial(workloads.llama, size)
    moved = frozenset((SAVE, WARM))

    def small(count: int, *scenarios: str) -> Callable[[Suite], None]:
        return Plan(functools.partial(workloads.small, count), moved | {*scenarios}).run

    def compressed(count: int) -> Callable[[Suite], None]:
        return Plan(functools.partial(workloads.compressed, count), moved).run

    return {
        "W4-1k": small(1_000, PLAN),
        "W4-10k": small(10_000, STALL, LAG),
        "W4-100k": small(100_000, PLAN),
        "W4z-1k": compressed(1_000),
        "W4z-10k": compressed(10_000),
        "W1": Plan(llama, moved | {COLD, STALL, FIRST, LAG}, fastest()).run,
        **_lags(),
        "training": lambda suite: training.run(suite, size // TRAINED, TRAINING),
        "W3": Plan(functools.partial(workloads.single, size), moved).run,
    }


def _full(size: int) -> Runs:
    llama = functools.partial(workloads.llama, size)
    moved = frozenset((SAVE, WARM, COLD))
    small = frozenset((SAVE, WARM, PLAN))
    families = one_of_each()
    zstd = {label: make for label, make in all_peers().items() if label == f"{ORBAX} async, zstd"}
    background = frozenset((STALL, FIRST, LAG, RETENTION, FOREIGN, CONVERT))
    return {
        "W1": Plan(llama, moved | background, all_peers()).run,
        "W2": Plan(functools.partial(llama, stacked=True), moved, families).run,
        "W3": Plan(functools.partial(workloads.single, size), moved | {STALL}, families).run,
        "W3-odd": Plan(
            functools.partial(workloads.single, size, odd=True), frozenset((SAVE, WARM)), families
        ).run,
        "W4-1k": Plan(functools.partial(workloads.small, 1_000), small | {RETENTION}, families).run,
        "W4-10k": Plan(
            functools.partial(workloads.small, 10_000), small | {STALL, LAG}, families
        ).run,
        **_lags(),
        "W4z-1k": Plan(
            functools.partial(workloads.compressed, 1_000), frozenset((SAVE, WARM)), zstd
        ).run,
        "W4z-10k": Plan(
            functools.partial(workloads.compressed, 10_000), frozenset((SAVE, WARM))
        ).run,
        "training": lambda suite: training.run(suite, size // TRAINED, TRAINING),
        "W7": lambda suite: reshard.run(suite, size),
        "W8": lambda suite: training.run(suite, size, BACK_TO_BACK),
        "W9": lambda suite: processes.run(suite, size),
        "budgets": lambda suite: memory.run_budgets(suite, size),
        "growth": lambda suite: memory.run_growth(suite, size // WATCHED),
        "W5": Plan(
            functools.partial(workloads.experts, 2 * size), frozenset((SAVE, WARM)), families
        ).run,
        "W4-100k": Plan(functools.partial(workloads.small, 100_000), small, families).run,
        "W2-large": functools.partial(_largest, size=LARGEST * size),
    }


def _lags() -> Runs:
    """Return the loop lag of small leaves of the frameworks that are installed."""
    return {
        f"W4-10k-{name}": Plan(
            functools.partial(workloads.small_of, name, 10_000), frozenset((LAG,))
        ).run
        for name in ("jax", "torch")
        if importlib.util.find_spec(name) is not None
    }


def _largest(suite: Suite, size: int) -> None:
    """Measure W2 once more, where there is memory for a state of this size."""
    available = machine.available_nbytes()
    if available is not None and available < COPIES_OF_LARGEST * size:
        suite.found.left_out.append(f"W2 of {size >> 20} MiB: too little memory")
        return
    make = functools.partial(workloads.llama, size, stacked=True, name="W2-large")
    Plan(make, frozenset((SAVE, WARM)), fastest()).run(suite)
