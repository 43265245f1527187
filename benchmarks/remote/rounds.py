"""Sampling: floors between samples, shuffled rounds, CPU seconds of client and service.

The floor is probed between any two samples, so that each has a probe right before and one right
after it. On an unshaped service, where probes that differ mean a machine that was not steady, such
a sample is taken again; a shaped one draws its latencies, and its probes differ for that reason.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measure import Sample, back_memory
from tests.simulator import SimulatorProcess

TOLERANCE = 0.10
MAX_REPEATS = 5


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Case:
    """One measured case.

    Attributes:
        name: unique within its rounds.
        run: does it; returns at least `wall_s`, `cpu_s` and `extra_nbytes`.
        finish: called after it: what was stored is gone.
        samples: how many; None for as many as there are rounds. Who has one has no unmeasured run.
        after: further figures of the run, asked for before anything else happens.
    """

    name: str
    run: Callable[[], Mapping[str, float]]
    finish: Callable[[], None] = _nothing
    samples: int | None = None
    after: Callable[[], Mapping[str, float]] = dict


@dataclass(slots=True)
class Rounds:
    """Takes samples of cases.

    Attributes:
        service: that all of them use.
        rng: of the order.
        count: of rounds.
        fresh_nbytes: memory that a run may take; it is made sure that the machine has so much
            ready.
        floor: seconds of the floor; None where there is none.
        steady_s: seconds for which unsteady samples are taken again.
        failed: is told of a case that raised, which is left out from there on.
    """

    service: SimulatorProcess
    rng: random.Random
    count: int
    fresh_nbytes: int
    floor: Callable[[], float] | None
    steady_s: float
    failed: Callable[[str, Exception], None]

    def take(self, cases: Sequence[Case]) -> dict[str, list[Sample]]:
        """Take samples, and return them by name of the case."""
        taken: dict[str, list[Sample]] = {case.name: [] for case in cases}
        out: set[str] = set()
        until_s = time.monotonic() + self.steady_s
        if self.floor is not None:
            self.floor()
        for case in cases:
            if case.samples != 1:
                self._guarded(case, out, lambda case=case: self._one(case))
        before_s = self._probe()
        for index in range(self.count):
            order = [c for c in cases if c.samples is None or index < c.samples]
            self.rng.shuffle(order)
            for case in order:
                if case.name in out:
                    continue

                def sampled(case: Case = case) -> None:
                    nonlocal before_s
                    sample, before_s = self._steady(case, before_s, until_s)
                    taken[case.name].append(sample)

                self._guarded(case, out, sampled)
        return {name: samples for name, samples in taken.items() if samples}

    def _steady(
        self, case: Case, before_s: float | None, until_s: float
    ) -> tuple[Sample, float | None]:
        """Return the steadiest of the attempts, and the last probe."""
        attempts: list[Sample] = []
        while True:
            values = self._one(case)
            after_s = self._probe()
            sample = Sample(
                wall_s=values.pop("wall_s"),
                cpu_s=values.pop("cpu_s"),
                extra_nbytes=int(values.pop("extra_nbytes")),
                floor_before_s=before_s,
                floor_after_s=after_s,
                repeats=len(attempts),
                values=values,
            )
            attempts.append(sample)
            before_s = after_s
            steady = sample.floor_spread <= TOLERANCE
            if steady or len(attempts) > MAX_REPEATS or time.monotonic() > until_s:
                break
        return min(attempts, key=lambda attempt: attempt.floor_spread), before_s

    def _one(self, case: Case) -> dict[str, float]:
        back_memory(self.fresh_nbytes)
        self.service.reset()
        try:
            values = dict(case.run())
            stats = self.service.stats()
            values["server_cpu_s"] = stats["cpu_s"]
            values["requests"] = stats["requests"]
            values["in_flight"] = stats["max_in_flight"]
            values.update(case.after())
        finally:
            case.finish()
        return values

    def _probe(self) -> float | None:
        return None if self.floor is None else self.floor()

    def _guarded(self, case: Case, out: set[str], work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            out.add(case.name)
            self.failed(case.name, error)
