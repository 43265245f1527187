"""The scenarios of one workload: which subjects save and restore it, and in which order."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import files, measure, results
from benchmarks.local import background, elsewhere, planning
from benchmarks.local.ours import AsyncCkpt
from benchmarks.local.suite import Suite
from benchmarks.local.transfers import RestoreRun, SaveRun
from benchmarks.measure import Case
from benchmarks.peers import Safetensors
from benchmarks.results import COLD, IN_PLACE, OWN, SAVE, WARM
from benchmarks.subject import Saved, Subject
from benchmarks.workloads import SMALL_LEAVES, Workload, targets_like


def run(suite: Suite, make: Callable[[], Workload]) -> None:
    """Run every scenario that concerns the workload; failures are in `suite.found.errors`."""
    workload = make()
    suite.log(
        f"{workload.id}: {workload.title}, {workload.leaf_count} leaves, "
        f"{workload.nbytes / 2**20:.0f} MiB"
    )
    _transfers(suite, workload)
    background.run(suite, workload)
    if workload.id == "W1":
        elsewhere.run(suite, workload)
    if workload.id.startswith(SMALL_LEAVES):
        planning.run(suite, workload)


def _transfers(suite: Suite, workload: Workload) -> None:
    base = suite.directory / workload.id
    makers: dict[str, Callable[[Path], Subject]] = {
        results.OURS: AsyncCkpt,
        results.SAFETENSORS: Safetensors,
        **suite.peers,
    }
    subjects = {
        label: make(base / f"subject-{index}") for index, (label, make) in enumerate(makers.items())
    }
    try:
        suite.attempt(f"{workload.id} {SAVE}", SAVE, lambda: _saves(suite, workload, subjects))
        saved: dict[str, Saved] = {}
        for label, subject in subjects.items():
            suite.attempt(
                f"{workload.id} save of {label} to restore from",
                None,
                functools.partial(_keep, saved, label, subject, workload),
            )
        suite.attempt(
            f"{workload.id} {WARM}",
            WARM,
            lambda: restores(suite, workload, subjects, saved, cold=False),
        )
        if workload.id in ("W1", "W2", "W3"):
            suite.attempt(
                f"{workload.id} {COLD}",
                COLD,
                lambda: restores(suite, workload, subjects, saved, cold=True),
            )
    finally:
        for label, subject in subjects.items():
            suite.attempt(f"{workload.id} close of {label}", None, subject.close)
        shutil.rmtree(base, ignore_errors=True)
        files.settle(suite.directory)


def _saves(suite: Suite, workload: Workload, subjects: Mapping[str, Subject]) -> None:
    large = workload.is_large
    floor = (lambda: suite.floors.write_s(workload.nbytes)) if large else None
    cases = []
    for label, subject in subjects.items():
        runs = SaveRun(subject, workload)
        cases.append(
            Case(
                name=label,
                run=runs.run,
                finish=runs.finish,
                floor=floor,
                fresh_nbytes=workload.fresh_nbytes,
                standing_nbytes=_standing_nbytes(suite, subject, workload),
                samples=suite.samples(label, workload),
            )
        )
    taken = suite.rounds(workload, SAVE, cases)
    for label, samples in taken.items():
        suite.add(workload, SAVE, label, "durable", "raw write" if large else "", samples)
        if label != results.OURS:
            shipped = [dataclasses.replace(s, wall_s=s.values["as_shipped_s"]) for s in samples]
            suite.add(workload, SAVE, label, "as shipped", "raw write" if large else "", shipped)


def _standing_nbytes(suite: Suite, subject: Subject, workload: Workload) -> int:
    # What a prepared pool takes; it would be missing from peaks that are counted later.
    if not isinstance(subject, AsyncCkpt):
        return 0
    before = measure.resident_nbytes()
    suite.attempt(f"{workload.id} prepare", None, lambda: subject.open(workload))
    return max(0, measure.resident_nbytes() - before)


def restores(
    suite: Suite,
    workload: Workload,
    subjects: Mapping[str, Subject],
    saved: Mapping[str, Saved],
    *,
    cold: bool,
) -> None:
    """Restore what each subject saved, warm or cold."""
    large = workload.is_large
    probe = suite.floors.cold_read_s if cold else suite.floors.warm_read_s
    floor = (lambda: probe(workload.nbytes)) if large else None
    targets = targets_like(workload.tree)
    cases, keys = [], {}
    for label, kept in saved.items():
        subject = subjects[label]
        for column in (IN_PLACE, OWN) if subject.restores_in_place else (OWN,):
            runs = RestoreRun(
                subject, workload, kept, targets if column == IN_PLACE else None, cold
            )
            name = f"{label}, {column}"
            keys[name] = (label, column)
            cases.append(
                Case(
                    name=name,
                    run=runs.run,
                    prepare=runs.prepare,
                    finish=runs.finish,
                    floor=floor,
                    fresh_nbytes=workload.fresh_nbytes,
                    samples=suite.samples(label, workload),
                )
            )
    scenario = COLD if cold else WARM
    taken = suite.rounds(workload, scenario, cases)
    floor_name = "" if not large else "raw read, cold" if cold else "raw read, warm"
    for name, samples in taken.items():
        suite.add(workload, scenario, *keys[name], floor_name, samples)


def _keep(saved: dict[str, Saved], label: str, subject: Subject, workload: Workload) -> None:
    saved[label] = subject.save(workload)
