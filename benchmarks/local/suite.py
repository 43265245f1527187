"""The suite: takes samples for the scenarios, and collects measurements and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import files, measure, results
from benchmarks.local.floors import Floors
from benchmarks.measure import Case, Protocol, Sample
from benchmarks.workloads import LARGE_NBYTES, Workload

SMALL_SAMPLES = 9
"""Runs of a few milliseconds are cheap, and their medians need more of them."""

ONE_SAMPLE_LEAVES = 10_000
"""Above, peers other than safetensors take minutes per sample and get one."""


@dataclass(slots=True)
class Suite:
    """Runs cases of scenarios, and collects what they find.

    Attributes:
        directory: everything is made below it, and removed again.
        floors: the probes.
        protocol: how samples are taken.
        found: where measurements and errors go.
        full: whether it is the full form.
        only: names of the scenarios to run; empty for all.
        log: gets a line per scenario.
    """

    directory: Path
    floors: Floors
    protocol: Protocol
    found: results.Results
    rng: random.Random
    full: bool = False
    only: frozenset[str] = frozenset()
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def wants(self, scenario: str) -> bool:
        """Whether the scenario is to be run."""
        return not self.only or scenario in self.only

    def attempt(self, what: str, scenario: str | None, work: Callable[[], Any]) -> None:
        """Do the work if its scenario is to be run; record what it raises as an error.

        After a scenario, cycles of objects that it has left are gone with their memory.
        """
        if scenario is not None and not self.wants(scenario):
            return
        start = self.protocol.clock()
        if scenario is not None and self.protocol.is_late():
            self.found.left_out.append(what)
            self.log(f"  {what}: left out, the time is up")
            return
        try:
            work()
        except Exception as error:
            self._report(what, error)
        else:
            if scenario is not None:
                self.log(f"  {what}: {self.protocol.clock() - start:.1f} s")
        if scenario is not None:
            gc.collect()

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Make a directory for the block; on return nothing of it is left, on disk either."""
        directory = self.directory / name
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            files.settle(self.directory)

    def rounds(
        self, workload: Workload, scenario: str, cases: Sequence[Case]
    ) -> dict[str, list[Sample]]:
        """Take samples; return them by name of the case, of a failed case those before."""

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

    def samples(self, label: str, workload: Workload) -> int | None:
        """Return how many samples a subject gets; None for as many as all."""
        if label.startswith((results.OURS, results.SAFETENSORS)):
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
    ) -> None:
        """Record the samples."""
        found = results.Measurement.of(workload, scenario, subject, column, samples, floor)
        self.found.measurements.append(found)
