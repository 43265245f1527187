"""The targets, each with what was measured."""

from __future__ import annotations

import math

from benchmarks.measure import median
from benchmarks.results import (
    IN_PLACE,
    KEPT_ALL,
    KEPT_LAST,
    OURS,
    OWN,
    PLAN,
    PROCESS_COUNTS,
    RESHARD,
    RETENTION,
    SAFETENSORS,
    SAVE,
    STALL,
    WARM,
    Measurement,
    Results,
    Verdict,
    by_size,
    exponent,
    own_shards,
    slope_s,
    speedup,
)
from benchmarks.workloads import SMALL_LEAVES

PER_LEAF_S = 10e-6
PLAN_100K_S = 0.15
CACHE_HIT_PER_LEAF_S = 0.5e-6
EXPONENT = 1.05
MORE_PROCESSES = 1.2
"""Most that a hundred times as many processes may multiply the time of a plan by."""

RETAINED = 1.05
"""Most that `KeepLast(1)` may multiply the time of a durable save by."""


def judge(results: Results) -> list[Verdict]:
    """Judge the targets of the short form, each with what was measured."""
    verdicts: list[Verdict] = []
    for workload in ("W1", "W2", "W3", "W3-odd"):
        verdicts += _save_verdicts(results, workload)
        verdicts += _restore_verdicts(results, workload)
    for workload in ("W1", f"{SMALL_LEAVES}-1k"):
        verdicts += _retention_verdicts(results, workload)
    verdicts += _slope_verdicts(results)
    verdicts += _planning_verdicts(results)
    for found in results.measurements:
        if found.scenario == STALL and "every leaf" not in found.column:
            verdicts.append(_stall_verdict(found))
        elif found.scenario == RESHARD and not math.isnan(found.value("most_read")):
            verdicts.append(_amplification_verdict(found))
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
            speedup(ours, peer),
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
            speedup(ours, results.find(workload, WARM, SAFETENSORS, column)),
            "× safetensors",
        )
        for column, what in ((OWN, "load_file"), (IN_PLACE, "into the same arrays"))
    ]


def _retention_verdicts(results: Results, workload: str) -> list[Verdict]:
    kept = results.find(workload, RETENTION, OURS, KEPT_LAST)
    plain = results.find(workload, RETENTION, OURS, KEPT_ALL)
    ratio = None if plain is None else speedup(plain, kept)
    if ratio is None:
        return []
    status = "PASS" if ratio <= RETAINED else "MISS"
    metric = f"durable save, {KEPT_LAST} / {KEPT_ALL}"
    return [Verdict(workload, metric, f"≤ {RETAINED}", f"{ratio:.2f}", status)]


def _slope_verdicts(results: Results) -> list[Verdict]:
    made = []
    for what, scenario, column in (
        ("save", SAVE, "durable"),
        ("restore in place", WARM, IN_PLACE),
        ("restore", WARM, OWN),
    ):
        slope = slope_s(results, scenario, OURS, column)
        if slope is not None:
            name = _span(by_size(results, scenario, OURS, column))
            made.append(_at_most(name, f"{what}, per small leaf", PER_LEAF_S, slope))
    return made


def _planning_verdicts(results: Results) -> list[Verdict]:
    made = []
    plans = [m for m in results.measurements if m.scenario == PLAN]
    for column in dict.fromkeys(m.column for m in plans):
        sizes = by_size(results, PLAN, OURS, column)
        largest = sizes[-1]
        if "cached" in column:
            per_leaf_s = largest.wall_s / largest.leaf_count
            made.append(
                _at_most(
                    f"{largest.workload}", f"{column}, per leaf", CACHE_HIT_PER_LEAF_S, per_leaf_s
                )
            )
            continue
        if largest.leaf_count == 100_000:
            made.append(_at_most(largest.workload, column, PLAN_100K_S, largest.wall_s))
        power = exponent(results, PLAN, OURS, column)
        if power is not None:
            status = "PASS" if power <= EXPONENT else "MISS"
            name = f"{column}: grows with the power"
            made.append(Verdict(_span(sizes), name, f"≤ {EXPONENT}", f"{power:.2f}", status))
    few, many = (by_size(results, PLAN, OURS, own_shards(count)) for count in PROCESS_COUNTS)
    if few and many:
        ratio = many[-1].wall_s / few[-1].wall_s
        status = "PASS" if ratio <= MORE_PROCESSES else "MISS"
        name = f"own shards among {PROCESS_COUNTS[1]} processes, to {PROCESS_COUNTS[0]}"
        limit = f"≤ {MORE_PROCESSES} ×"
        made.append(Verdict(many[-1].workload, name, limit, f"{ratio:.2f} ×", status))
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


def _amplification_verdict(found: Measurement) -> Verdict:
    read, most = found.value("read_share"), found.value("most_read")
    return Verdict(
        found.workload,
        f"read amplification, {found.column}",
        f"≤ {most} of what is wanted",
        f"{read:.3f} of it",
        "PASS" if read <= most else "MISS",
    )


def _span(sizes: list[Measurement]) -> str:
    return f"{SMALL_LEAVES} {sizes[0].leaf_count}→{sizes[-1].leaf_count}"


def _at_least(
    workload: str, metric: str, target: float, measured: float | None, unit: str
) -> Verdict:
    text = "not measured" if measured is None else f"{measured:.2f} {unit}"
    status = "-" if measured is None else "PASS" if measured >= target else "MISS"
    return Verdict(workload, metric, f"≥ {target} {unit}", text, status)


def _at_most(workload: str, metric: str, target_s: float, measured_s: float) -> Verdict:
    status = "PASS" if measured_s <= target_s else "MISS"
    return Verdict(workload, metric, f"≤ {_time(target_s)}", _time(measured_s), status)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
