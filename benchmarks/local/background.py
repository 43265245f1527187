"""First save, loop lag, stall and retention: costs of a library that saves in the background."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import measure
from benchmarks.local.ours import AsyncCkpt
from benchmarks.local.stall import JaxLoop, LagRun, NumpyLoop, StallRun
from benchmarks.local.suite import Suite
from benchmarks.local.transfers import FirstRun, SaveRun
from benchmarks.measure import Floor, Run
from benchmarks.results import (
    DURABLE,
    FIRST,
    KEPT_ALL,
    KEPT_LAST,
    LAG,
    OURS,
    REFERENCE,
    RETENTION,
    STALL,
)
from benchmarks.workloads import Workload


def run(suite: Suite, workload: Workload, scenario: str) -> None:
    """Measure one of these scenarios."""
    what = f"{workload.id} {scenario}"
    if scenario == STALL:
        for column, (loop, options) in _loops(suite, workload).items():
            work = functools.partial(_stall, suite, workload, column, loop, options)
            suite.attempt(f"{what}, {column}", STALL, work)
        return
    measured = {FIRST: _first, LAG: _lag, RETENTION: _retention}[scenario]
    suite.attempt(what, scenario, lambda: measured(suite, workload))


def _first(suite: Suite, workload: Workload) -> None:
    # Each sample opens a `Checkpointer` of its own: there is nothing to warm up.
    runs = FirstRun(suite.directory / "first", workload)
    _only(suite, workload, FIRST, DURABLE, runs, warm_up=False)


def _lag(suite: Suite, workload: Workload) -> None:
    with _opened(suite, "lag") as subject:
        _only(suite, workload, LAG, "background", LagRun(subject, workload))


def _stall(
    suite: Suite,
    workload: Workload,
    column: str,
    loop: Callable[[], Any],
    options: Mapping[str, Any],
) -> None:
    floor = Floor(lambda: suite.floors.memcpy_s(workload.nbytes))
    with _opened(suite, "stall", options=options) as subject:
        runs = StallRun(subject, workload, loop())
        _only(suite, workload, STALL, column, runs, "memcpy", floor=floor)


def _only(
    suite: Suite,
    workload: Workload,
    scenario: str,
    column: str,
    runs: Run,
    floor_name: str = "",
    **more: Any,
) -> None:
    """Measure the one case of a scenario; what it raises goes through."""
    samples = measure.rounds([runs.case(OURS, **more)], suite.protocol, suite.rng)[OURS]
    suite.add(workload, scenario, OURS, column, floor_name, samples)


def _retention(suite: Suite, workload: Workload) -> None:
    from asyncckpt import KeepLast

    large = workload.is_large
    floor = Floor(lambda: suite.floors.write_s(workload.nbytes)) if large else None
    with (
        _opened(suite, "kept-last", retention=KeepLast(1)) as last,
        _opened(suite, "kept-all") as every,
    ):
        cases = []
        for column, subject in ((KEPT_LAST, last), (KEPT_ALL, every)):
            runs = SaveRun(subject, workload)
            cases.append(runs.case(column, floor=floor, warm_up=False))
        for column, samples in suite.rounds(workload, RETENTION, cases).items():
            suite.add(workload, RETENTION, OURS, column, "raw write" if large else "", samples)


@contextlib.contextmanager
def _opened(suite: Suite, name: str, **given: Any) -> Iterator[AsyncCkpt]:
    """Run the block with a subject in a directory of its own."""
    with suite.scratch(name) as directory:
        subject = AsyncCkpt(directory, **given)
        try:
            yield subject
        finally:
            subject.close()


def _loops(
    suite: Suite, workload: Workload
) -> dict[str, tuple[Callable[[], Any], Mapping[str, Any]]]:
    """Return loops by name, each with the options of the saves."""
    found: dict[str, tuple[Callable[[], Any], Mapping[str, Any]]] = {}
    jax = workload.id == "W1" and importlib.util.find_spec("jax")
    if suite.full or not jax:
        found["NumPy loop"] = (lambda: NumpyLoop(workload), {})
    if not jax:
        return found
    found["JAX loop"] = (lambda: JaxLoop(workload), {})
    # Nothing is donated, so that what the save holds stays what it is.
    held = {"snapshot": "reference"}
    found[REFERENCE] = (lambda: JaxLoop(workload, donating=False), held)
    if suite.full:
        found["JAX loop, every leaf updated"] = (lambda: JaxLoop(workload, every_leaf=True), {})
    return found
