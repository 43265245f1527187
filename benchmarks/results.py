"""Results of a run: measurements, verdicts, and their JSON."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Sample, median
from benchmarks.workloads import SMALL_LEAVES, Workload

SAVE, WARM, COLD = "save", "restore, warm", "restore, cold"
STALL, LAG, FIRST = "stall", "loop lag", "first save after prepare"
PLAN, RESHARD = "planning", "restore, resharded"
FOREIGN, CONVERT = "restore of what others saved", "conversion"
RETENTION = "save with retention"
TRAINING, BACK_TO_BACK = "training with saves", "saves back to back"
BUDGET, GROWTH = "memory within a budget", "memory over many saves"
PROCESSES = "save by several processes"
SCENARIOS = (
    SAVE,
    WARM,
    COLD,
    STALL,
    LAG,
    FIRST,
    RETENTION,
    PLAN,
    RESHARD,
    FOREIGN,
    CONVERT,
    TRAINING,
    BACK_TO_BACK,
    BUDGET,
    GROWTH,
    PROCESSES,
)
KEPT_LAST, KEPT_ALL = "KeepLast(1)", "no retention"
DURABLE, AS_SHIPPED = "durable", "as shipped"
RETAINED = f"{DURABLE}, {KEPT_LAST}"
IN_PLACE, OWN, NEW_PROCESS = "in place", "own memory", "new process"
OURS, SAFETENSORS, NO_SAVES = "asyncckpt", "safetensors", "no saves"
ONE_SHOT, UNPLANNED = f"{OURS}, one-shot", f"{OURS}, first save of a tree"
REFERENCE = 'JAX loop, snapshot="reference"'

PROCESS_COUNTS = (100, 10_000)
"""Processes among which one plans what it holds: the time must hardly depend on their number."""

AGREED = "cached plan of several processes"
"""The time to find a plan that is known, and what the processes agreed on with it."""


class Sampled:
    """Samples of one subject in one scenario, and their medians."""

    __slots__ = ()

    leaf_count: int
    samples: tuple[Sample, ...]

    @property
    def times(self) -> list[float]:
        """Seconds, sample by sample."""
        return [sample.wall_s for sample in self.samples]

    @property
    def wall_s(self) -> float:
        """Median seconds."""
        return median(self.times)

    def value(self, name: str) -> float:
        """Return the median of one of the further figures; NaN where it was not measured."""
        return median(self.values(name))

    def values(self, name: str) -> list[float]:
        """Return one of the further figures, sample by sample."""
        return [sample.values[name] for sample in self.samples if name in sample.values]


@dataclass(frozen=True, slots=True)
class Measurement(Sampled):
    """The samples of one subject in one scenario.

    Attributes:
        workload: id of the workload.
        scenario: what was done.
        subject: who did it.
        column: `durable` or `as shipped`; `in place` or `own memory`; the kind of loop; what was
            planned; between which shardings; the retention; the budget; how many processes.
        nbytes: bytes of arrays.
        leaf_count: leaves, or whatever else a plan is about.
        floor: name of the floor that was probed; empty where none applies.
        samples: one per round.
    """

    workload: str
    scenario: str
    subject: str
    column: str
    nbytes: int
    leaf_count: int
    floor: str
    samples: tuple[Sample, ...]

    @classmethod
    def of(
        cls,
        workload: Workload,
        scenario: str,
        subject: str,
        column: str,
        samples: Iterable[Sample],
        floor: str = "",
    ) -> Measurement:
        """Return the measurement of a workload."""
        counts = workload.nbytes, workload.leaf_count
        return cls(workload.id, scenario, subject, column, *counts, floor, tuple(samples))

    @property
    def floor_ratio(self) -> float | None:
        """Median over the samples of floor seconds / own seconds; None without a floor."""
        ratios = [s.floor_s / s.wall_s for s in self.samples if s.floor_s is not None]
        return median(ratios) if ratios else None

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.times) - min(self.times)) / self.wall_s

    def noisy(self, tolerance: float) -> int:
        """Count samples whose floor probes differ by more than the tolerance."""
        return sum(sample.floor_spread > tolerance for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and how it was met: `PASS`, `MISS`, or `-` where a figure is missing."""

    workload: str
    metric: str
    target: str
    measured: str
    status: str

    @classmethod
    def of(
        cls, workload: str, metric: str, target: str, measured: str, met: bool | None
    ) -> Verdict:
        """Return the verdict; `met` is None where a figure is missing."""
        status = "-" if met is None else "PASS" if met else "MISS"
        return cls(workload, metric, target, measured, status)


@dataclass(slots=True)
class Results:
    """Everything that one run found.

    Attributes:
        form: name of the form, and of the files of the results.
        facts: about the machine and the run.
        floors: rates of plain system calls, by way.
        timelines: what each step and save took in one training each; see `local/training.py`.
        left_out: scenarios for which there was no time.
        errors: what failed.
    """

    form: str
    facts: dict[str, Any] = field(default_factory=dict)
    floors: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def where(self, scenario: str) -> list[Measurement]:
        """Return what was measured in the scenario."""
        return [m for m in self.measurements if m.scenario == scenario]

    def find(self, workload: str, scenario: str, subject: str, column: str) -> Measurement | None:
        """Return the measurement, or None when it was not taken."""
        for found in self.measurements:
            key = (found.workload, found.scenario, found.subject, found.column)
            if key == (workload, scenario, subject, column):
                return found
        return None

    def as_json(self) -> dict[str, Any]:
        """Return plain values; figures with six significant digits."""
        return {
            "form": self.form,
            "facts": self.facts,
            "floors_gb_per_s": self.floors,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "measurements": [
                measurement_json(found, spread=found.spread, floor_ratio=found.floor_ratio)
                for found in self.measurements
            ],
            "timelines": self.timelines,
            "left_out": self.left_out,
            "errors": self.errors,
        }


# --------------------------------------------------------------------------- with more leaves


def own_shards(process_count: int) -> str:
    """Return the column of plans of one process among so many."""
    return f"save, own shards among {process_count}"


def by_size(
    results: Results, scenario: str, subject: str, column: str, family: str = SMALL_LEAVES
) -> list[Measurement]:
    """Return what was measured on the workloads of a family, the fewest leaves first."""
    found = [
        m
        for m in results.measurements
        if m.workload.startswith(family)
        and (m.scenario, m.subject, m.column) == (scenario, subject, column)
    ]
    return sorted(found, key=lambda m: m.leaf_count)


def slope_s(
    results: Results, scenario: str, subject: str, column: str, family: str = SMALL_LEAVES
) -> float | None:
    """Return seconds per additional leaf, from the smallest to the largest workload, or None."""
    found = by_size(results, scenario, subject, column, family)
    if len(found) < 2:
        return None
    low, high = found[0], found[-1]
    return (high.wall_s - low.wall_s) / (high.leaf_count - low.leaf_count)


def exponent(
    results: Results, scenario: str, subject: str, column: str, family: str = SMALL_LEAVES
) -> float | None:
    """Fit the power of the leaves with which the time grows; None with fewer than two workloads.

    1 is proportional. What does not depend on the leaves lowers it.
    """
    found = by_size(results, scenario, subject, column, family)
    if len(found) < 2:
        return None
    return statistics.linear_regression(
        [math.log(m.leaf_count) for m in found], [math.log(m.wall_s) for m in found]
    ).slope


def speedup(ours: Measurement, peer: Measurement | None) -> float | None:
    """Return how many times as long the peer takes, the median over the rounds, or None.

    Round by round, so that a disk or memory that changes its speed changes both.
    """
    if peer is None:
        return None
    pairs = zip(ours.samples, peer.samples, strict=False)
    return median([theirs.wall_s / own.wall_s for own, theirs in pairs])


# ---------------------------------------------------------------------------------------- JSON


def measurement_json(found: Any, **more: float | None) -> dict[str, Any]:
    """Return the fields of a measurement and more figures, the samples last."""
    names = [item.name for item in dataclasses.fields(found) if item.name != "samples"]
    return {
        **{name: getattr(found, name) for name in names},
        "median_s": short(found.wall_s),
        **{name: short(value) for name, value in more.items()},
        "samples": [_sample_json(sample) for sample in found.samples],
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    made: dict[str, Any] = {
        "wall_s": short(sample.wall_s),
        "cpu_s": short(sample.cpu_s),
        "extra_mib": round(sample.extra_nbytes / (1 << 20), 1),
    }
    if sample.floor_s is not None:
        made["floor_s"] = [short(sample.floor_before_s), short(sample.floor_after_s)]
        made["repeats"] = sample.repeats
    for name, value in sample.values.items():
        made[name] = short(value)
    return made


def short(value: float | None) -> float | None:
    """Return six significant digits; None for NaN."""
    if value is None or math.isnan(value):
        return None
    return float(f"{value:.6g}")
