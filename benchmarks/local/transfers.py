"""Single saves and restores in the form of the sampling protocol: prepare, run, finish."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import files, measure
from benchmarks.local.newprocess import NewProcessRun
from benchmarks.local.ours import AsyncCkpt
from benchmarks.local.suite import Suite
from benchmarks.measure import Floor, Run
from benchmarks.results import COLD, IN_PLACE, NEW_PROCESS, ONE_SHOT, OURS, OWN, SAFETENSORS
from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import (
    Tree,
    Workload,
    difference,
    flat_arrays,
    scribble,
    targets_like,
)

HUGE_NBYTES = 3 << 30
"""States above are restored in one way only, because there is no memory for one more copy."""


@dataclass(slots=True)
class SaveRun(Run):
    """Saves the next checkpoint while one before it exists; the first save is not measured.

    The older checkpoint is deleted afterwards, outside the timing, unless the save has done so. The
    newest one stays.
    """

    subject: Subject
    workload: Workload
    newest: Saved | None = None
    saved: Saved | None = None

    def prepare(self) -> None:
        if self.newest is None:
            self.newest = self.subject.save(self.workload)
            files.settle(self.subject.directory)

    def run(self) -> Mapping[str, float]:
        self.saved = self.subject.save(self.workload)
        return self.saved.values

    def finish(self) -> None:
        if self.saved is not None and self.newest is not None:
            older, self.newest, self.saved = self.newest, self.saved, None
            if not self.subject.deletes_older:
                self.subject.discard(older)
        files.settle(self.subject.directory)


@dataclass(slots=True)
class RestoreRun(Run):
    """Restores a checkpoint, warm or cold, and compares what came back."""

    subject: Subject
    workload: Workload
    saved: Saved
    targets: Tree | None
    cold: bool
    restored: Restored | None = None

    def prepare(self) -> None:
        if self.targets is not None:
            scribble(self.targets)
        if self.cold:
            files.chill(self.saved.path)
        else:
            files.warm(self.saved.path)

    def run(self) -> Mapping[str, float]:
        before = measure.device_read_nbytes()
        if self.targets is None:
            self.restored = self.subject.restore(self.saved, self.workload)
        else:
            self.restored = self.subject.restore_into(self.saved, self.targets)
        after = measure.device_read_nbytes()
        values = dict(self.restored.values)
        if before is not None and after is not None:
            values["device_share"] = (after - before) / max(1, self.workload.nbytes)
        return values

    def finish(self) -> None:
        restored, self.restored = self.restored, None
        if restored is None:
            return
        tree = self.workload.tree
        wrong = difference(flat_arrays(tree) if restored.flat else tree, restored.tree)
        if wrong:
            raise AssertionError(f"{self.subject.name} restored something else: {wrong}")


def restores(
    suite: Suite,
    workload: Workload,
    scenario: str,
    kept: Mapping[str, tuple[Subject, Saved]],
    *,
    of: str = "",
    warm_up: bool = True,
) -> None:
    """Restore what each subject saved, warm or cold.

    Args:
        suite: takes the samples.
        workload: what was saved.
        scenario: cold ones are measured against raw reads, others against memcpy.
        kept: label -> subject and its checkpoint.
        of: in front of the columns.
        warm_up: whether the subjects have restored nothing yet.
    """
    cold, large = scenario == COLD, workload.is_large
    probe = suite.floors.cold_read_s if cold else suite.floors.memcpy_s
    floor = Floor(lambda: probe(workload.nbytes)) if large else None
    targets = targets_like(workload.tree)
    cases, keys = [], {}
    for label, (subject, saved) in kept.items():
        columns = [IN_PLACE, OWN] if subject.restores_in_place else [OWN]
        if workload.nbytes > HUGE_NBYTES:
            columns = columns[:1]
        elif label == ONE_SHOT or (cold and not suite.full and label == SAFETENSORS):
            columns = [OWN]
        for column in columns:
            into = targets if column == IN_PLACE else None
            runs = RestoreRun(subject, workload, saved, into, cold)
            case = runs.case(
                f"{label}, {column}",
                floor=floor,
                fresh_nbytes=subject.fresh_nbytes(workload),
                samples=suite.samples(label, workload),
                warm_up=warm_up and subject.warms_up,
            )
            keys[case.name] = (label, of + column)
            cases.append(case)
        if cold and large and label in (OURS, SAFETENSORS):
            case = NewProcessRun(label, workload, saved).case(
                f"{label}, {NEW_PROCESS}",
                floor=floor,
                fresh_nbytes=workload.fresh_nbytes,
                warm_up=False,
            )
            keys[case.name] = (label, NEW_PROCESS)
            cases.append(case)
    floor_name = "" if not large else "raw read, cold" if cold else "memcpy"
    for name, samples in suite.rounds(workload, scenario, cases).items():
        suite.add(workload, scenario, *keys[name], floor_name, samples)


@dataclass(slots=True)
class FirstRun(Run):
    """The first save of a prepared `Checkpointer`, and how long later ones take."""

    directory: Path
    workload: Workload
    subject: AsyncCkpt | None = None

    def prepare(self) -> None:
        self.subject = AsyncCkpt(self.directory)
        self.subject.open(self.workload)

    def run(self) -> Mapping[str, float]:
        assert self.subject is not None
        first = self.subject.save(self.workload)
        return {"wall_s": first.values["wall_s"], **self._steady(first)}

    def _steady(self, first: Saved) -> dict[str, float]:
        assert self.subject is not None
        self.subject.discard(first)
        times = []
        for _ in range(2):
            files.settle(self.directory)
            saved = self.subject.save(self.workload)
            times.append(saved.values["wall_s"])
            self.subject.discard(saved)
        return {"steady_s": min(times), "first_to_steady": first.values["wall_s"] / min(times)}

    def finish(self) -> None:
        if self.subject is not None:
            self.subject.close()
            self.subject = None
        shutil.rmtree(self.directory, ignore_errors=True)
        files.settle(self.directory.parent)
