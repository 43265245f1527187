"""The scenarios: who does what with which workload, in which order, and what is checked after."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import background, elsewhere, files, measure, planning, results
from benchmarks.floors import Floors
from benchmarks.measure import Case, Protocol, Sample
from benchmarks.ours import AsyncCkpt
from benchmarks.peers import Safetensors
from benchmarks.results import COLD, IN_PLACE, OWN, SAVE, WARM
from benchmarks.subject import Saved, Subject
from benchmarks.transfers import RestoreRun, SaveRun
from benchmarks.workloads import LARGE_NBYTES, SMALL_LEAVES, Workload, targets_like

SMALL_SAMPLES = 15
"""Runs of a few milliseconds are cheap, and their medians need more of them."""

ONE_SAMPLE_LEAVES = 10_000
"""Above, peers other than safetensors take minutes per sample and get one."""


@dataclass(slots=True)
class Suite:
    """Runs scenarios on one workload after another and collects what they find.

    Attributes:
        directory: everything is made below it, and removed again.
        floors: the probes.
        protocol: how samples are taken.
        found: where measurements and errors go.
        peers: label -> maker of those beyond safetensors.
        only: names of the scenarios to run; empty for all.
        log: gets a line per scenario.
    """

    directory: Path
    floors: Floors
    protocol: Protocol
    found: results.Results
    rng: random.Random
    peers: Mapping[str, Callable[[Path], Subject]] = field(default_factory=dict)
    only: frozenset[str] = frozenset()
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def run(self, make: Callable[[], Workload]) -> None:
        """Every scenario that concerns the workload was run; failures are in `found.errors`."""
        workload = make()
        self.log(
            f"{workload.id}: {workload.title}, {workload.leaf_count} leaves, "
            f"{workload.nbytes / 2**20:.0f} MiB"
        )
        self._transfers(workload)
        background.run(self, workload)
        if workload.id == "W1":
            elsewhere.run(self, workload)
        if workload.id.startswith(SMALL_LEAVES):
            planning.run(self, workload)

    # ------------------------------------------------------------------- saves and restores

    def _transfers(self, workload: Workload) -> None:
        base = self.directory / workload.id
        makers: dict[str, Callable[[Path], Subject]] = {
            results.OURS: AsyncCkpt,
            results.SAFETENSORS: Safetensors,
            **self.peers,
        }
        subjects = {
            label: make(base / f"subject-{index}")
            for index, (label, make) in enumerate(makers.items())
        }
        try:
            self.attempt(f"{workload.id} {SAVE}", SAVE, lambda: self._saves(workload, subjects))
            saved: dict[str, Saved] = {}
            for label, subject in subjects.items():
                self.attempt(
                    f"{workload.id} save of {label} to restore from",
                    None,
                    functools.partial(_keep, saved, label, subject, workload),
                )
            self.attempt(
                f"{workload.id} {WARM}",
                WARM,
                lambda: self._restores(workload, subjects, saved, cold=False),
            )
            if workload.id in ("W1", "W2", "W3"):
                self.attempt(
                    f"{workload.id} {COLD}",
                    COLD,
                    lambda: self._restores(workload, subjects, saved, cold=True),
                )
        finally:
            for label, subject in subjects.items():
                self.attempt(f"{workload.id} close of {label}", None, subject.close)
            shutil.rmtree(base, ignore_errors=True)
            files.settle(self.directory)

    def _saves(self, workload: Workload, subjects: Mapping[str, Subject]) -> None:
        large = workload.is_large
        floor = (lambda: self.floors.write_s(workload.nbytes)) if large else None
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
                    standing_nbytes=self._standing_nbytes(subject, workload),
                    samples=self._samples(label, workload),
                )
            )
        taken = self.rounds(workload, SAVE, cases)
        for label, samples in taken.items():
            self.add(workload, SAVE, label, "durable", "raw write" if large else "", samples)
            if label != results.OURS:
                shipped = [dataclasses.replace(s, wall_s=s.values["as_shipped_s"]) for s in samples]
                self.add(workload, SAVE, label, "as shipped", "raw write" if large else "", shipped)

    def _standing_nbytes(self, subject: Subject, workload: Workload) -> int:
        # What a prepared pool takes; it would be missing from peaks that are counted later.
        if not isinstance(subject, AsyncCkpt):
            return 0
        before = measure.resident_nbytes()
        self.attempt(f"{workload.id} prepare", None, lambda: subject.open(workload))
        return max(0, measure.resident_nbytes() - before)

    def _restores(
        self,
        workload: Workload,
        subjects: Mapping[str, Subject],
        saved: Mapping[str, Saved],
        *,
        cold: bool,
    ) -> None:
        large = workload.is_large
        probe = self.floors.cold_read_s if cold else self.floors.warm_read_s
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
                        samples=self._samples(label, workload),
                    )
                )
        scenario = COLD if cold else WARM
        taken = self.rounds(workload, scenario, cases)
        floor_name = "" if not large else "raw read, cold" if cold else "raw read, warm"
        for name, samples in taken.items():
            self.add(workload, scenario, *keys[name], floor_name, samples)

    # ------------------------------------------------------------------------------ plumbing

    def attempt(self, what: str, scenario: str | None, work: Callable[[], Any]) -> None:
        """The work was done if its scenario is to be run; what it raised is among the errors."""
        if scenario is not None and self.only and scenario not in self.only:
            return
        start = time.perf_counter()
        try:
            work()
        except Exception as error:
            self._report(what, error)
        else:
            if scenario is not None:
                self.log(f"  {what}: {time.perf_counter() - start:.1f} s")
        gc.collect()

    def rounds(
        self, workload: Workload, scenario: str, cases: Sequence[Case]
    ) -> dict[str, list[Sample]]:
        """Samples by name of the case; of a case that failed, those before."""

        def failed(case: Case, error: Exception) -> None:
            self._report(f"{workload.id} {scenario}: {case.name}", error)

        return measure.rounds(cases, self._protocol(workload), self.rng, failed)

    def _report(self, what: str, error: Exception) -> None:
        self.found.errors.append(f"{what}: {type(error).__name__}: {error}")
        self.log(f"  {what} failed\n{''.join(traceback.format_exception(error))}")

    def _protocol(self, workload: Workload) -> Protocol:
        if workload.nbytes >= LARGE_NBYTES or self.protocol.samples < 5:
            return self.protocol
        return dataclasses.replace(self.protocol, samples=SMALL_SAMPLES)

    def _samples(self, label: str, workload: Workload) -> int | None:
        if label in (results.OURS, results.SAFETENSORS):
            return None
        return 1 if workload.leaf_count > ONE_SAMPLE_LEAVES else self.protocol.samples

    def add(
        self,
        workload: Workload,
        scenario: str,
        subject: str,
        column: str,
        floor: str,
        samples: Sequence[Sample],
        *,
        leaf_count: int | None = None,
    ) -> None:
        """The samples are among what was found; `leaf_count` where it is not the workload's."""
        self.found.measurements.append(
            results.Measurement(
                workload.id,
                scenario,
                subject,
                column,
                workload.nbytes,
                workload.leaf_count if leaf_count is None else leaf_count,
                floor,
                tuple(samples),
            )
        )


def _keep(saved: dict[str, Saved], label: str, subject: Subject, workload: Workload) -> None:
    saved[label] = subject.save(workload)
