"""What a run found, as values: measurements, verdicts, and the JSON they become."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Sample, median

SAVE, WARM, COLD = "save", "restore, warm", "restore, cold"
STALL, LAG, FIRST = "stall", "loop lag", "first save after prepare"
IN_PLACE, OWN = "in place", "own memory"
OURS, SAFETENSORS = "asyncckpt", "safetensors"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The samples of one subject in one scenario.

    Attributes:
        workload: id of the workload.
        scenario: what was done.
        subject: who did it.
        column: `durable` or `as shipped`; `in place` or `own memory`; the kind of loop.
        nbytes: bytes of arrays.
        leaf_count: leaves.
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

    @property
    def wall_s(self) -> float:
        """Median seconds."""
        return median([sample.wall_s for sample in self.samples])

    @property
    def floor_ratio(self) -> float | None:
        """Median over the samples of floor seconds / own seconds; None without a floor."""
        ratios = [s.floor_s / s.wall_s for s in self.samples if s.floor_s is not None]
        return median(ratios) if ratios else None

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        times = [sample.wall_s for sample in self.samples]
        return (max(times) - min(times)) / median(times)

    def noisy(self, tolerance: float) -> int:
        """How many samples kept floor probes that differ by more than the tolerance."""
        return sum(sample.floor_spread > tolerance for sample in self.samples)

    def value(self, name: str) -> float:
        """Median of one of the further figures."""
        return median([sample.values[name] for sample in self.samples if name in sample.values])


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target and how it was met: `PASS`, `MISS`, or `-` where a figure is missing."""

    workload: str
    metric: str
    target: str
    measured: str
    status: str


@dataclass(slots=True)
class Results:
    """Everything one run found."""

    form: str
    facts: dict[str, Any] = field(default_factory=dict)
    floors: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def find(self, workload: str, scenario: str, subject: str, column: str) -> Measurement | None:
        """The measurement, or None when it was not taken."""
        for found in self.measurements:
            key = (found.workload, found.scenario, found.subject, found.column)
            if key == (workload, scenario, subject, column):
                return found
        return None

    def as_json(self) -> dict[str, Any]:
        """Plain values; figures with six significant digits."""
        return {
            "form": self.form,
            "facts": self.facts,
            "floors_gb_per_s": self.floors,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "measurements": [_measurement_json(found) for found in self.measurements],
            "errors": self.errors,
        }


# ------------------------------------------------------------------------------------- targets


def judge(results: Results) -> list[Verdict]:
    """The targets of the short form, each with what was measured."""
    verdicts: list[Verdict] = []
    for workload in ("W1", "W2", "W3", "W3-odd"):
        verdicts += _save_verdicts(results, workload)
        verdicts += _restore_verdicts(results, workload)
    verdicts += _slope_verdicts(results)
    for found in results.measurements:
        if found.scenario == STALL and "every leaf" not in found.column:
            verdicts.append(_stall_verdict(found))
    return verdicts


def _save_verdicts(results: Results, workload: str) -> list[Verdict]:
    ours = results.find(workload, SAVE, OURS, "durable")
    if ours is None:
        return []
    peer = results.find(workload, SAVE, SAFETENSORS, "durable")
    return [
        _at_least(workload, "durable save / raw write", 0.9, ours.floor_ratio, "of the floor"),
        _at_least(
            workload,
            "durable save / safetensors + fsync",
            1.2,
            _speedup(ours, peer),
            "× safetensors",
        ),
    ]


def _restore_verdicts(results: Results, workload: str) -> list[Verdict]:
    ours = results.find(workload, WARM, OURS, IN_PLACE)
    if ours is None:
        return []
    return [
        _at_least(
            workload,
            f"warm restore in place / safetensors {what}",
            2.0,
            _speedup(ours, results.find(workload, WARM, SAFETENSORS, column)),
            "× safetensors",
        )
        for column, what in ((OWN, "load_file"), (IN_PLACE, "into the same arrays"))
    ]


def slope_s(results: Results, scenario: str, subject: str, column: str) -> float | None:
    """Seconds per small leaf: from the smallest to the largest W4 that was measured."""
    found = [
        m
        for m in results.measurements
        if m.workload.startswith("W4")
        and (m.scenario, m.subject, m.column) == (scenario, subject, column)
    ]
    found.sort(key=lambda m: m.leaf_count)
    if len(found) < 2:
        return None
    low, high = found[0], found[-1]
    return (high.wall_s - low.wall_s) / (high.leaf_count - low.leaf_count)


def _slope_verdicts(results: Results) -> list[Verdict]:
    counts = sorted({m.leaf_count for m in results.measurements if m.workload.startswith("W4")})
    name = f"W4 {counts[0]}→{counts[-1]}" if counts else "W4"
    made = []
    for what, scenario, column in (
        ("save", SAVE, "durable"),
        ("restore in place", WARM, IN_PLACE),
    ):
        slope = slope_s(results, scenario, OURS, column)
        if slope is not None:
            made.append(
                Verdict(
                    name,
                    f"{what}, per small leaf",
                    "≤ 15 µs",
                    f"{slope * 1e6:.1f} µs",
                    "PASS" if slope <= 15e-6 else "MISS",
                )
            )
    return made


def _stall_verdict(found: Measurement) -> Verdict:
    shares, limits = [], []
    for sample in found.samples:
        if sample.floor_s is not None:
            limit = 1.3 * sample.floor_s + 6e-6 * found.leaf_count
            limits.append(limit)
            shares.append(sample.wall_s / limit)
    share = median(shares)
    return Verdict(
        found.workload,
        f"stall, {found.column}",
        f"≤ 1.3 × memcpy + 6 µs × {found.leaf_count} = {median(limits) * 1e3:.1f} ms",
        f"{found.wall_s * 1e3:.1f} ms ({share:.2f} of it)",
        "-" if math.isnan(share) else "PASS" if share <= 1 else "MISS",
    )


def _speedup(ours: Measurement, peer: Measurement | None) -> float | None:
    if peer is None:
        return None
    # Round by round, so that a disk or memory that changes its speed changes both.
    pairs = zip(ours.samples, peer.samples, strict=False)
    return median([theirs.wall_s / own.wall_s for own, theirs in pairs])


def _at_least(
    workload: str, metric: str, target: float, measured: float | None, unit: str
) -> Verdict:
    text = "not measured" if measured is None else f"{measured:.2f} {unit}"
    status = "-" if measured is None else "PASS" if measured >= target else "MISS"
    return Verdict(workload, metric, f"≥ {target} {unit}", text, status)


# ---------------------------------------------------------------------------------------- JSON


def _measurement_json(found: Measurement) -> dict[str, Any]:
    return {
        "workload": found.workload,
        "scenario": found.scenario,
        "subject": found.subject,
        "column": found.column,
        "nbytes": found.nbytes,
        "leaf_count": found.leaf_count,
        "floor": found.floor,
        "median_s": _short(found.wall_s),
        "spread": _short(found.spread),
        "floor_ratio": _short(found.floor_ratio),
        "samples": [_sample_json(sample) for sample in found.samples],
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    made: dict[str, Any] = {
        "wall_s": _short(sample.wall_s),
        "cpu_s": _short(sample.cpu_s),
        "extra_mib": round(sample.extra_nbytes / (1 << 20), 1),
    }
    if sample.floor_s is not None:
        made["floor_s"] = [_short(sample.floor_before_s), _short(sample.floor_after_s)]
        made["repeats"] = sample.repeats
    for name, value in sample.values.items():
        made[name] = _short(value)
    return made


def _short(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    return float(f"{value:.6g}")
