"""The scenarios of one workload: which subjects save and restore it, and in which order."""

from __future__ import annotations

import dataclasses
import functools
import gc
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncckpt import KeepLast
from benchmarks import files, measure
from benchmarks.local import background, elsewhere, planning
from benchmarks.local.ours import AsyncCkpt, OneShot
from benchmarks.local.suite import Suite
from benchmarks.local.transfers import SaveRun, restores
from benchmarks.measure import Floor
from benchmarks.peers import Makers
from benchmarks.peers.safetensors import Safetensors
from benchmarks.results import (
    AS_SHIPPED,
    COLD,
    CONVERT,
    DURABLE,
    FIRST,
    FOREIGN,
    LAG,
    ONE_SHOT,
    OURS,
    PLAN,
    RETAINED,
    RETENTION,
    SAFETENSORS,
    SAVE,
    STALL,
    UNPLANNED,
    WARM,
)
from benchmarks.subject import Saved, Subject
from benchmarks.workloads import COMPRESSED, SMALL_LEAVES, Workload

SHORT_ONCE_LEAVES = 10_000
"""The most leaves with which the short form measures what is done once: it takes seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured with one workload.

    Attributes:
        make: returns the workload.
        scenarios: those that concern it.
        peers: beside safetensors.
    """

    make: Callable[[], Workload]
    scenarios: frozenset[str]
    peers: Makers = field(default_factory=dict)

    def run(self, suite: Suite) -> None:
        """Run every scenario that is wanted; failures are in `suite.found.errors`."""
        wanted = {scenario for scenario in self.scenarios if suite.wants(scenario)}
        if not wanted:
            return
        workload = self.make()
        suite.log(
            f"{workload.id}: {workload.title}, {workload.leaf_count} leaves, "
            f"{workload.nbytes / 2**20:.0f} MiB"
        )
        if wanted & {SAVE, WARM, COLD}:
            _transfers(suite, workload, wanted, self.peers)
        for scenario in (FIRST, LAG, RETENTION, STALL):
            if scenario in wanted:
                background.run(suite, workload, scenario)
        if wanted & {FOREIGN, CONVERT}:
            elsewhere.run(suite, workload)
        if PLAN in wanted:
            planning.run(suite, workload)


def makers(workload: Workload, peers: Makers, *, full: bool) -> Makers:
    """Return the subjects that save and restore the workload, by label."""
    if workload.id.startswith(COMPRESSED):
        return {OURS: functools.partial(AsyncCkpt, options={"compression": "zstd"}), **peers}
    ours: Makers
    if workload.id.startswith(SMALL_LEAVES):
        ours = {OURS: AsyncCkpt}
        if full or workload.leaf_count <= SHORT_ONCE_LEAVES:
            unplanned = functools.partial(AsyncCkpt, unplanned=True)
            ours = {**ours, ONE_SHOT: OneShot, UNPLANNED: unplanned}
    else:
        # The older step is removed while the next one is saved, as in training.
        ours = {OURS: functools.partial(AsyncCkpt, retention=KeepLast(1))}
    return {**ours, SAFETENSORS: Safetensors, **peers}


def _transfers(suite: Suite, workload: Workload, wanted: set[str], peers: Makers) -> None:
    base = suite.directory / workload.id
    subjects = {
        label: make(base / f"subject-{index}")
        for index, (label, make) in enumerate(makers(workload, peers, full=suite.full).items())
    }
    newest: dict[str, Saved] = {}
    kept: dict[str, tuple[Subject, Saved]] = {}
    try:
        if SAVE in wanted:
            work = functools.partial(_saves, suite, workload, subjects, newest)
            suite.attempt(f"{workload.id} {SAVE}", SAVE, work)
        if wanted & {WARM, COLD}:
            for label, subject in subjects.items():
                # Restores know no plan from before; those of peers are left to the full form.
                if label == UNPLANNED or (label in peers and not suite.full):
                    continue
                if label not in newest:
                    what = f"{workload.id} save of {label} to restore from"
                    work = functools.partial(_keep, newest, label, subject, workload)
                    suite.attempt(what, None, work)
                if label in newest:
                    kept[label] = (subject, newest[label])
        for scenario in (WARM, COLD):
            if scenario in wanted:
                restored = scenario == COLD and WARM in wanted
                work = functools.partial(
                    restores, suite, workload, scenario, kept, warm_up=not restored
                )
                suite.attempt(f"{workload.id} {scenario}", scenario, work)
    finally:
        for label, subject in subjects.items():
            suite.attempt(f"{workload.id} close of {label}", None, subject.close)
        gc.collect()
        shutil.rmtree(base, ignore_errors=True)
        files.settle(suite.directory)


def _saves(
    suite: Suite, workload: Workload, subjects: Mapping[str, Subject], newest: dict[str, Saved]
) -> None:
    floor = Floor(lambda: suite.floors.write_s(workload.nbytes)) if workload.is_large else None
    floor_name = "raw write" if workload.is_large else ""
    runs = {label: SaveRun(subject, workload) for label, subject in subjects.items()}
    cases = []
    for label, subject in subjects.items():
        cases.append(
            runs[label].case(
                label,
                floor=floor,
                fresh_nbytes=subject.fresh_nbytes(workload),
                standing_nbytes=_standing_nbytes(suite, subject, workload),
                samples=suite.samples(label, workload),
                warm_up=False,
            )
        )
    for label, samples in suite.rounds(workload, SAVE, cases).items():
        column = RETAINED if subjects[label].deletes_older else DURABLE
        suite.add(workload, SAVE, label, column, floor_name, samples)
        if not label.startswith(OURS):
            shipped = [dataclasses.replace(s, wall_s=s.values["as_shipped_s"]) for s in samples]
            suite.add(workload, SAVE, label, AS_SHIPPED, floor_name, shipped)
    newest.update({label: run.newest for label, run in runs.items() if run.newest is not None})


def _standing_nbytes(suite: Suite, subject: Subject, workload: Workload) -> int:
    # What a prepared pool takes; it would be missing from peaks that are counted later.
    if not isinstance(subject, AsyncCkpt) or subject.unplanned:
        return 0
    before = measure.resident_nbytes()
    suite.attempt(f"{workload.id} prepare", None, lambda: subject.open(workload))
    return max(0, measure.resident_nbytes() - before)


def _keep(newest: dict[str, Saved], label: str, subject: Subject, workload: Workload) -> None:
    newest[label] = subject.save(workload)
