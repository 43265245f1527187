"""Results of a run: measurements, points of sweeps, verdicts, and their JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import Sample, median
from benchmarks.remote.raw import Point
from benchmarks.results import Sampled, Verdict, measurement_json, short

SAVE, RESTORE = "save", "restore"
BACKGROUND, MEMORY = "save in the background", "small budget"
AUTO, SAME = "auto", "as the floor"
IN_PLACE, OWN = "in place", "own memory"
FLOOR = "the floor"

SCENARIOS = (SAVE, RESTORE, BACKGROUND, MEMORY, "sweep")


@dataclass(frozen=True, slots=True)
class Measurement(Sampled):
    """The samples of one subject in one scenario.

    Attributes:
        profile: of the service.
        workload: id of the workload.
        scenario: what was done.
        subject: who did it.
        column: how.
        nbytes: bytes of arrays.
        leaf_count: leaves.
        ours: whether it is this library.
        raw: whether it is a bare client.
        samples: one per round.
    """

    profile: str
    workload: str
    scenario: str
    subject: str
    column: str
    nbytes: int
    leaf_count: int
    ours: bool
    raw: bool
    samples: tuple[Sample, ...]

    @property
    def rate(self) -> float:
        """Bytes per second at the median."""
        return self.nbytes / self.wall_s

    def per_gib(self, seconds: float) -> float:
        """Seconds for each GiB of arrays."""
        return seconds * (1 << 30) / self.nbytes


@dataclass(frozen=True, slots=True)
class Swept:
    """One point of a sweep and the seconds that it took, sample by sample."""

    point: Point
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sizes × streams, and what ``"auto"`` did in the same rounds.

    Attributes:
        profile: of the service.
        subject: whose.
        nbytes: bytes of arrays.
        points: all of them, in the order of the grid; the best few have more samples.
        auto: seconds under ``"auto"``, once it knows the link, sample by sample.
        cold_s: seconds of the first save under ``"auto"``.
        picked: size of the largest data file and most requests in flight under ``"auto"``.
    """

    profile: str
    subject: str
    nbytes: int
    points: tuple[Swept, ...]
    auto: tuple[float, ...]
    cold_s: float
    picked: Point

    @property
    def best(self) -> Swept:
        """The point with the least median among those with the most samples."""
        most = max(len(found.seconds) for found in self.points)
        finalists = [found for found in self.points if len(found.seconds) == most]
        return min(finalists, key=lambda found: found.median_s)

    @property
    def auto_s(self) -> float:
        """Median seconds under ``"auto"``."""
        return median(self.auto)


@dataclass(frozen=True, slots=True)
class Grid:
    """Rates that a bare client reached, by point: what the floor is chosen from."""

    profile: str
    client: str
    direction: str
    rates: Mapping[Point, float]

    @property
    def best(self) -> Point:
        """The fastest point."""
        return max(self.rates, key=self.rates.__getitem__)


@dataclass(slots=True)
class Results:
    """Everything that one run found."""

    form: str
    facts: dict[str, Any] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def where(self, **wanted: Any) -> list[Measurement]:
        """Return the measurements with these attributes."""
        return [
            m
            for m in self.measurements
            if all(getattr(m, name) == value for name, value in wanted.items())
        ]

    def floor(self, found: Measurement) -> Measurement | None:
        """Return the fastest bare client in the rounds of this measurement."""
        here = self.where(
            profile=found.profile, workload=found.workload, scenario=found.scenario, raw=True
        )
        return min(here, key=lambda m: m.wall_s, default=None)

    def floor_ratio(self, found: Measurement) -> float | None:
        """Median of the fastest bare client / own median; None without one."""
        floor = self.floor(found)
        return None if floor is None else floor.wall_s / found.wall_s

    def own_ratio(self, found: Measurement) -> float | None:
        """Median of the same client alone / own median; None where it is not ours."""
        if not found.ours:
            return None
        label = "raw " + found.subject.removeprefix("asyncckpt, ")
        alone = self.where(
            profile=found.profile, workload=found.workload, scenario=found.scenario, subject=label
        )
        return alone[0].wall_s / found.wall_s if alone else None

    def as_json(self) -> dict[str, Any]:
        """Return plain values; figures with six significant digits."""
        return {
            "form": self.form,
            "facts": self.facts,
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "notes": self.notes,
            "errors": self.errors,
            "grids": [
                {
                    "profile": grid.profile,
                    "client": grid.client,
                    "direction": grid.direction,
                    "mb_per_s": {str(p): round(rate / 1e6, 1) for p, rate in grid.rates.items()},
                }
                for grid in self.grids
            ],
            "sweeps": [_sweep_json(sweep) for sweep in self.sweeps],
            "measurements": [measurement_json(found) for found in self.measurements],
        }


def _sweep_json(sweep: Sweep) -> dict[str, Any]:
    return {
        "profile": sweep.profile,
        "subject": sweep.subject,
        "nbytes": sweep.nbytes,
        "points_s": {str(p.point): [short(s) for s in p.seconds] for p in sweep.points},
        "auto_s": [short(s) for s in sweep.auto],
        "auto_cold_s": short(sweep.cold_s),
        "auto_picked": str(sweep.picked),
    }
