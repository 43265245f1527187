"""The suite: takes samples for the scenarios, and collects measurements and errors."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure, results
from benchmarks.local.floors import Floors
from benchmarks.measure import Case, Protocol, Sample
from benchmarks.subject import Subject
from benchmarks.workloads import LARGE_NBYTES, Workload

SMALL_SAMPLES = 15
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

    def attempt(self, what: str, scenario: str | None, work: Callable[[], Any]) -> None:
        """Do the work if its scenario is to be run; record what it raises as an error."""
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
        """Record the samples; `leaf_count` where it is not the workload's."""
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
