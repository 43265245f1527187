"""First save, loop lag, stall and retention: costs of a library that saves in the background."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import files, measure
from benchmarks.local.ours import AsyncCkpt
from benchmarks.local.stall import JaxLoop, LagRun, NumpyLoop, StallRun
from benchmarks.local.suite import Suite
from benchmarks.local.transfers import FirstRun, RetainedRun
from benchmarks.measure import Case
from benchmarks.results import FIRST, KEPT_ALL, KEPT_LAST, LAG, OURS, RETENTION, STALL
from benchmarks.workloads import Workload


def run(suite: Suite, workload: Workload) -> None:
    """Measure all of this that concerns the workload."""
    if workload.id == "W1":
        suite.attempt(f"{workload.id} {FIRST}", FIRST, lambda: _first(suite, workload))
    if workload.id in ("W1", "W4-10k"):
        suite.attempt(f"{workload.id} {LAG}", LAG, lambda: _lag(suite, workload))
    if workload.id in ("W1", "W4-1k"):
        what = f"{workload.id} {RETENTION}"
        suite.attempt(what, RETENTION, lambda: _retention(suite, workload))
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


def _retention(suite: Suite, workload: Workload) -> None:
    from asyncckpt import KeepLast

    large = workload.is_large
    floor = (lambda: suite.floors.write_s(workload.nbytes)) if large else None
    with (
        _opened(suite.directory / "kept-last", KeepLast(1)) as last,
        _opened(suite.directory / "kept-all") as every,
    ):
        cases = []
        for column, subject in ((KEPT_LAST, last), (KEPT_ALL, every)):
            runs = RetainedRun(subject, workload)
            case = Case(
                name=column,
                run=runs.run,
                prepare=runs.prepare,
                finish=runs.finish,
                floor=floor,
                fresh_nbytes=workload.fresh_nbytes,
            )
            cases.append(case)
        for column, samples in suite.rounds(workload, RETENTION, cases).items():
            suite.add(workload, RETENTION, OURS, column, "raw write" if large else "", samples)


class _opened:
    # A subject of its own directory, closed and removed at the end of the block.
    def __init__(self, directory: Path, retention: Any = None) -> None:
        self._directory = directory
        self._subject = AsyncCkpt(directory, retention=retention)

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
