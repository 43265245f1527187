"""The targets, each with what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.local.targets import LAG_S, LAG_SMALL_S, within_budget
from benchmarks.measure import median
from benchmarks.remote.results import (
    AUTO,
    BACKGROUND,
    IN_PLACE,
    MEMORY,
    OWN,
    RESTORE,
    SAME,
    SAVE,
    Measurement,
    Results,
    Sweep,
)
from benchmarks.results import Verdict
from benchmarks.workloads import SMALL_LEAVES

SHARES = {SAVE: (0.90, 0.85), RESTORE: (0.95, 0.90)}
"""Of the bare client: for a state of a gibibyte, and for a smaller one."""

LARGE_NBYTES = 1000 << 20
NEAR_BEST = 1.10


def judge(results: Results) -> list[Verdict]:
    """Every target that concerns something that was measured."""
    return [
        *_floors(results),
        *_peers(results),
        *(_swept(sweep) for sweep in results.sweeps),
        *(_budget(m) for m in results.where(scenario=MEMORY)),
        *_commits(results),
        *(_lag(m) for m in results.where(scenario=BACKGROUND, ours=True)),
    ]


def _floors(results: Results) -> Iterator[Verdict]:
    """Compare our best with the best bare client, and ours on each client with it alone."""
    for profile, workload in _places(results):
        for scenario in SHARES:
            for how in (SAME, AUTO):
                found = _fastest(_ours(results, profile, workload, scenario, how))
                ratio = None if found is None else results.floor_ratio(found)
                if found is not None and ratio is not None:
                    what = f"{scenario}, {how}, best bare client"
                    yield _share(found, what, ratio, f" ({found.subject})")
            for found in _ours(results, profile, workload, scenario, SAME):
                ratio = results.own_ratio(found)
                if ratio is not None:
                    what = f"{scenario}, {SAME}, {found.subject} / its client alone"
                    yield _share(found, what, ratio, "")


def _ours(
    results: Results, profile: str, workload: str, scenario: str, how: str
) -> list[Measurement]:
    column = how if scenario == SAVE else f"{IN_PLACE}, {how}"
    return results.where(
        profile=profile, workload=workload, scenario=scenario, column=column, ours=True
    )


def _share(found: Measurement, what: str, ratio: float, who: str) -> Verdict:
    share = SHARES[found.scenario][found.nbytes < LARGE_NBYTES]
    floor = "of the floor"
    return _verdict(found, what, f"≥ {share} {floor}", f"{ratio:.2f} {floor}{who}", ratio >= share)


def _peers(results: Results) -> Iterator[Verdict]:
    for profile, workload in _places(results):
        for scenario in (SAVE, RESTORE):
            column = AUTO if scenario == SAVE else f"{OWN}, {AUTO}"
            here = results.where(profile=profile, workload=workload, scenario=scenario)
            for ours in [m for m in here if m.ours and m.column == column]:
                for peer in here:
                    if peer.ours or peer.raw or peer.subject.startswith("safetensors"):
                        continue  # a bare file is reported, and no target
                    ratio = peer.wall_s / ours.wall_s
                    yield _verdict(
                        ours,
                        f"{scenario}, {peer.subject} / {ours.subject}",
                        "ahead",
                        f"{ratio:.2f} × as fast",
                        ratio > 1,
                    )


def _swept(sweep: Sweep) -> Verdict:
    best = sweep.best
    ratio = sweep.auto_s / best.median_s
    return Verdict.of(
        f"W1 {sweep.profile}",
        f"auto / best point of the sweep, {sweep.subject}",
        f"≤ {NEAR_BEST}",
        f"{ratio:.2f} (auto {sweep.picked}, best {best.point})",
        ratio <= NEAR_BEST,
    )


def _budget(found: Measurement) -> Verdict:
    size = f"{found.nbytes / 2**30:.1f} GiB"
    metric = f"memory of a {found.column} of {size}, {found.subject}"
    return within_budget(f"{found.workload} {found.profile}", metric, found)


def _commits(results: Results) -> Iterator[Verdict]:
    for found in results.where(scenario=SAVE, ours=True, column=AUTO):
        trips, more = found.values("record_trips"), found.values("end_trips")
        if not trips:
            continue
        # Orbax wants the mark of a finished checkpoint on GCS to be the last object of all.
        end = 3 if found.profile == "gcs" else 2
        yield _verdict(
            found,
            f"commit, {found.subject}",
            f"1 round trip to the record, {end} to the end",
            f"{median(trips):.0f} and {median(more):.0f} (at most {max(trips):.0f} and "
            f"{max(more):.0f})",
            median(trips) <= 1 and median(more) <= end,
        )


def _lag(found: Measurement) -> Verdict:
    lag_s = found.value("lag_p99_s")
    most_s = LAG_SMALL_S if found.workload.startswith(SMALL_LEAVES) else LAG_S
    return _verdict(
        found,
        f"lag of the caller's loop, p99, {found.subject}",
        f"≤ {most_s * 1e3:.0f} ms",
        f"{lag_s * 1e3:.1f} ms (longest {found.value('lag_max_s') * 1e3:.0f} ms)",
        lag_s <= most_s,
    )


def _verdict(found: Measurement, metric: str, target: str, measured: str, kept: bool) -> Verdict:
    met = None if math.isnan(found.wall_s) else kept
    return Verdict.of(f"{found.workload} {found.profile}", metric, target, measured, met)


def _places(results: Results) -> list[tuple[str, str]]:
    return list(dict.fromkeys((m.profile, m.workload) for m in results.measurements))


def _fastest(found: list[Measurement]) -> Measurement | None:
    return min(found, key=lambda m: m.wall_s, default=None)
