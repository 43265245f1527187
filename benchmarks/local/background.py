"""What only a library that saves in the background has: first save, loop lag, and stall."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files, measure
from benchmarks.measure import Case
from benchmarks.ours import AsyncCkpt
from benchmarks.results import FIRST, LAG, OURS, STALL
from benchmarks.stall import JaxLoop, LagRun, NumpyLoop, StallRun
from benchmarks.transfers import FirstRun
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from benchmarks.suite import Suite


def run(suite: Suite, workload: Workload) -> None:
    """Everything of this that concerns the workload was measured."""
    if workload.id == "W1":
        suite.attempt(f"{workload.id} {FIRST}", FIRST, lambda: _first(suite, workload))
    if workload.id in ("W1", "W4-10k"):
        suite.attempt(f"{workload.id} {LAG}", LAG, lambda: _lag(suite, workload))
    for column, loop in _loops(workload):
        suite.attempt(
            f"{workload.id} {STALL} {column}",
            STALL,
            functools.partial(_stall, suite, workload, column, loop),
        )


def _first(suite: Suite, workload: Workload) -> None:
    runs = FirstRun(suite.directory / "first", workload)
    case = Case(
        name=OURS,
        run=runs.run,
        prepare=runs.prepare,
        finish=runs.finish,
        floor=lambda: suite.floors.write_s(workload.nbytes),
    )
    samples = measure.rounds([case], suite.protocol, suite.rng)[OURS]
    suite.add(workload, FIRST, OURS, "durable", "raw write", samples)


def _lag(suite: Suite, workload: Workload) -> None:
    with _opened(suite.directory / "lag") as subject:
        runs = LagRun(subject, workload)
        case = Case(name=OURS, run=runs.run, prepare=runs.prepare, finish=runs.finish)
        samples = measure.rounds([case], suite.protocol, suite.rng)[OURS]
    suite.add(workload, LAG, OURS, "background", "", samples)


def _stall(suite: Suite, workload: Workload, column: str, loop: Callable[[], Any]) -> None:
    with _opened(suite.directory / "stall") as subject:
        runs = StallRun(subject, workload, loop())
        case = Case(
            name=OURS,
            run=runs.run,
            prepare=runs.prepare,
            finish=runs.finish,
            floor=lambda: suite.floors.memcpy_s(workload.nbytes),
        )
        samples = measure.rounds([case], suite.protocol, suite.rng)[OURS]
    suite.add(workload, STALL, OURS, column, "memcpy", samples)


class _opened:
    # A subject of its own directory, closed and removed at the end of the block.
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._subject = AsyncCkpt(directory)

    def __enter__(self) -> AsyncCkpt:
        return self._subject

    def __exit__(self, *error: object) -> None:
        try:
            self._subject.close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            files.settle(self._directory.parent)


def _loops(workload: Workload) -> list[tuple[str, Callable[[], Any]]]:
    if workload.id in ("W3", "W4-10k"):
        return [("NumPy loop", lambda: NumpyLoop(workload))]
    if workload.id != "W1":
        return []
    made: list[tuple[str, Callable[[], Any]]] = [("NumPy loop", lambda: NumpyLoop(workload))]
    if importlib.util.find_spec("jax"):
        made += [
            ("JAX loop", lambda: JaxLoop(workload)),
            ("JAX loop, every leaf updated", lambda: JaxLoop(workload, every_leaf=True)),
        ]
    return made
