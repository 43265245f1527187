"""The targets, each with what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.local.processes import column as processes
from benchmarks.measure import median
from benchmarks.peers import DCP, ORBAX
from benchmarks.results import (
    BACK_TO_BACK,
    BUDGET,
    COLD,
    DURABLE,
    FIRST,
    FOREIGN,
    GROWTH,
    IN_PLACE,
    KEPT_ALL,
    KEPT_LAST,
    LAG,
    NEW_PROCESS,
    NO_SAVES,
    ONE_SHOT,
    OURS,
    OWN,
    PLAN,
    PROCESS_COUNTS,
    PROCESSES,
    REFERENCE,
    RESHARD,
    RETAINED,
    RETENTION,
    SAFETENSORS,
    SAVE,
    STALL,
    TRAINING,
    UNPLANNED,
    WARM,
    Measurement,
    Results,
    Sampled,
    Verdict,
    by_size,
    exponent,
    own_shards,
    slope_s,
    speedup,
)
from benchmarks.workloads import COMPRESSED, SMALL_LEAVES

MIB = 1 << 20

SAVE_FLOOR = 0.95
SAVE_PEERS = ((f"{SAFETENSORS} + fsync", SAFETENSORS, 1.5), (DCP, DCP, 2.0), (ORBAX, ORBAX, 4.0))
COLD_FLOOR = {OWN: 0.90, IN_PLACE: 0.85}
COLD_PEER = 1.5
WARM_FLOOR = 0.40
MAPPED = {"W1": 1.2}
"""Against safetensors' memory-map-and-copy, on two cores; of other workloads as against peers."""

WARM_PEER = 2.0
ORBAX_READ_BYTES_PER_S = 1.4e9

PER_LEAF_S, FIRST_PER_LEAF_S = 7e-6, 10e-6
PER_COMPRESSED_LEAF_S = {SAVE: 40e-6, WARM: 30e-6}
PLAN_100K_S = 0.15
CACHE_HIT_PER_LEAF_S = 0.5e-6
EXPONENT = 1.05
MORE_PROCESSES = 1.2
"""Most that a hundred times as many processes may multiply the time of a plan by."""

RETAINED_SLOWER = 1.05
"""Most that `KeepLast(1)` may multiply the time of a durable save by."""

STALL_COPY, STALL_LEAF_S = 1.15, 6e-6
REFERENCE_S = 1e-3
FIRST_TO_STEADY = 1.3
LAG_S, LAG_SMALL_S = 5e-3, 12e-3
BUDGET_SHARE, PER_LEAF_NBYTES, BUDGET_SPARE_NBYTES = 1.05, 2048, 16 * MIB
GROWTH_NBYTES = 0.1 * MIB
INTERFERENCE = 0.05
PROCESSES_SHARE = 0.9


def judge(results: Results) -> list[Verdict]:
    """Judge the targets that concern something that was measured."""
    verdicts: list[Verdict] = []
    for workload in dict.fromkeys(m.workload for m in results.measurements):
        verdicts += _saves(results, workload)
        verdicts += _warm(results, workload)
        verdicts += _cold(results, workload)
        verdicts += _retention(results, workload)
    verdicts += _slopes(results)
    verdicts += _planning(results)
    verdicts += [_stall(found) for found in results.where(STALL) if "every" not in found.column]
    verdicts += [_first(found) for found in results.where(FIRST)]
    verdicts += [_lag(found) for found in results.where(LAG)]
    verdicts += _interference(results)
    verdicts += [_budget(found) for found in results.where(BUDGET)]
    verdicts += [_growth(found) for found in results.where(GROWTH)]
    verdicts += _amplification(results)
    verdicts += _foreign(results)
    verdicts += _processes(results)
    return verdicts


# -------------------------------------------------------------------------- saves and restores


def _saves(results: Results, workload: str) -> Iterator[Verdict]:
    ours = results.find(workload, SAVE, OURS, RETAINED)
    if ours is None:
        return
    name = "durable save with retention"
    yield _at_least(workload, f"{name} / raw write", SAVE_FLOOR, ours.floor_ratio, "of the floor")
    for text, family, target in SAVE_PEERS:
        peers = _family(results, workload, SAVE, family, DURABLE)
        if family == SAFETENSORS or peers:
            ratio = _against_best(ours, peers)
            yield _at_least(workload, f"{name} / {text}", target, ratio, f"× {family}")


def _warm(results: Results, workload: str) -> Iterator[Verdict]:
    ours = results.find(workload, WARM, OURS, IN_PLACE)
    if ours is None or ours.floor_ratio is None:
        return
    name = "warm restore in place"
    yield _at_least(workload, f"{name} / memcpy", WARM_FLOOR, ours.floor_ratio, "of memcpy")
    mapped = _family(results, workload, WARM, SAFETENSORS, IN_PLACE)
    target = MAPPED.get(workload, WARM_PEER)
    metric = f"{name} / {SAFETENSORS} into the same arrays"
    yield _at_least(workload, metric, target, _against_best(ours, mapped), f"× {SAFETENSORS}")
    copied = _family(results, workload, WARM, SAFETENSORS, OWN)
    metric = f"{name} / {SAFETENSORS} load_file"
    yield _at_least(workload, metric, WARM_PEER, _against_best(ours, copied), f"× {SAFETENSORS}")
    for family in (DCP, ORBAX):
        peers = _family(results, workload, WARM, family)
        if peers:
            ratio = _against_best(ours, peers)
            yield _at_least(workload, f"{name} / {family}", WARM_PEER, ratio, f"× {family}")


def _cold(results: Results, workload: str) -> Iterator[Verdict]:
    for column, share in COLD_FLOOR.items():
        ours = results.find(workload, COLD, OURS, column)
        if ours is None:
            continue
        name = f"cold restore, {column}"
        yield _at_least(workload, f"{name} / raw read", share, ours.floor_ratio, "of the floor")
        peers = [
            m
            for m in results.where(COLD)
            if m.workload == workload and m.subject != OURS and m.column != NEW_PROCESS
        ]
        ratio = _against_best(ours, peers)
        yield _at_least(workload, f"{name} / best peer", COLD_PEER, ratio, "× best peer")


def _retention(results: Results, workload: str) -> Iterator[Verdict]:
    kept = results.find(workload, RETENTION, OURS, KEPT_LAST)
    plain = results.find(workload, RETENTION, OURS, KEPT_ALL)
    ratio = None if plain is None or kept is None else speedup(plain, kept)
    if ratio is not None:
        metric = f"durable save, {KEPT_LAST} / {KEPT_ALL}"
        yield _limit(workload, metric, RETAINED_SLOWER, ratio)


def _family(
    results: Results, workload: str, scenario: str, family: str, column: str | None = None
) -> list[Measurement]:
    """Return what the variants of one peer did."""
    return [
        m
        for m in results.where(scenario)
        if m.workload == workload
        and m.subject.startswith(family)
        and (column is None or m.column == column)
    ]


def _against_best(ours: Measurement, peers: list[Measurement]) -> float | None:
    """Return how many times as long the fastest of the peers takes; None without one."""
    ratios = [speedup(ours, peer) for peer in peers]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


# --------------------------------------------------------------------------- leaves and plans


def _slopes(results: Results) -> Iterator[Verdict]:
    for what, scenario, subject, column, limit_s in (
        ("save", SAVE, OURS, DURABLE, PER_LEAF_S),
        ("restore in place", WARM, OURS, IN_PLACE, PER_LEAF_S),
        ("restore", WARM, OURS, OWN, PER_LEAF_S),
        ("first save of a tree", SAVE, UNPLANNED, DURABLE, FIRST_PER_LEAF_S),
        ("one-shot save", SAVE, ONE_SHOT, DURABLE, FIRST_PER_LEAF_S),
        ("one-shot restore", WARM, ONE_SHOT, OWN, FIRST_PER_LEAF_S),
    ):
        slope = slope_s(results, scenario, subject, column)
        if slope is not None:
            span = _span(by_size(results, scenario, subject, column), SMALL_LEAVES)
            yield _at_most(span, f"{what}, per small leaf", limit_s, slope)
    for scenario, column in ((SAVE, DURABLE), (WARM, IN_PLACE), (WARM, OWN)):
        slope = slope_s(results, scenario, OURS, column, COMPRESSED)
        if slope is not None:
            span = _span(by_size(results, scenario, OURS, column, COMPRESSED), COMPRESSED)
            metric = f"{scenario}, {column}, per compressed leaf"
            yield _at_most(span, metric, PER_COMPRESSED_LEAF_S[scenario], slope)


def _planning(results: Results) -> Iterator[Verdict]:
    for column in dict.fromkeys(m.column for m in results.where(PLAN)):
        sizes = by_size(results, PLAN, OURS, column)
        largest = sizes[-1]
        if "cached" in column:
            per_leaf_s = largest.wall_s / largest.leaf_count
            metric = f"{column}, per leaf"
            yield _at_most(largest.workload, metric, CACHE_HIT_PER_LEAF_S, per_leaf_s)
            continue
        if largest.leaf_count == 100_000:
            yield _at_most(largest.workload, column, PLAN_100K_S, largest.wall_s)
        power = exponent(results, PLAN, OURS, column)
        if power is not None:
            name = f"{column}: grows with the power"
            yield _limit(_span(sizes, SMALL_LEAVES), name, EXPONENT, power)
    few, many = (by_size(results, PLAN, OURS, own_shards(count)) for count in PROCESS_COUNTS)
    if few and many:
        ratio = many[-1].wall_s / few[-1].wall_s
        name = f"own shards among {PROCESS_COUNTS[1]} processes, to {PROCESS_COUNTS[0]}"
        yield _limit(many[-1].workload, name, MORE_PROCESSES, ratio, " ×")


# -------------------------------------------------------------------------- beside the training


def _stall(found: Measurement) -> Verdict:
    leaves_s = STALL_LEAF_S * found.leaf_count
    if found.column == REFERENCE:
        limit_s, stall_s = REFERENCE_S + leaves_s, found.wall_s
        target = f"≤ 1 ms + 6 µs × {found.leaf_count} = {limit_s * 1e3:.1f} ms"
        share = stall_s / limit_s
    else:
        limits = [STALL_COPY * s.floor_s + leaves_s for s in found.samples if s.floor_s is not None]
        pairs = zip(found.samples, limits, strict=False)
        share = median([sample.wall_s / limit for sample, limit in pairs])
        target = (
            f"≤ {STALL_COPY} × memcpy + 6 µs × {found.leaf_count} = {median(limits) * 1e3:.1f} ms"
        )
    return Verdict.of(
        found.workload,
        f"stall, {found.column}",
        target,
        f"{found.wall_s * 1e3:.1f} ms ({share:.2f} of it)",
        None if math.isnan(share) else share <= 1,
    )


def _first(found: Measurement) -> Verdict:
    ratio = found.value("first_to_steady")
    return _limit(found.workload, "first save / steady save", FIRST_TO_STEADY, ratio, " ×")


def _lag(found: Measurement) -> Verdict:
    limit_s = LAG_SMALL_S if found.workload.startswith(SMALL_LEAVES) else LAG_S
    return _at_most(found.workload, "loop lag p99 during a save", limit_s, found.value("lag_p99_s"))


def interference(ours: Measurement, plain: Measurement) -> float:
    """Return by which share steps took longer, beyond the CPU seconds of the save beside them.

    The CPU seconds of the calls themselves do not count: no step runs meanwhile.
    """
    shares = []
    for saved, free in zip(ours.samples, plain.samples, strict=False):
        cpu_s = saved.cpu_s - saved.values["calls_cpu_s"] - free.cpu_s
        longer_s = saved.values["steps_s"] - free.values["steps_s"]
        shares.append(max(0.0, longer_s - max(0.0, cpu_s)) / free.values["steps_s"])
    return median(shares)


def _interference(results: Results) -> Iterator[Verdict]:
    for scenario in (TRAINING, BACK_TO_BACK):
        for ours in results.where(scenario):
            plain = results.find(ours.workload, scenario, NO_SAVES, ours.column)
            if ours.subject == OURS and plain is not None:
                share = interference(ours, plain)
                name = f"{scenario}, {ours.column}: steps longer beyond the CPU of the save"
                target, measured = f"≤ {INTERFERENCE:.0%}", f"{share:.1%}"
                yield Verdict.of(ours.workload, name, target, measured, share <= INTERFERENCE)


def _budget(found: Measurement) -> Verdict:
    metric = f"extra memory of a {found.column.replace(', ', ' in ')}"
    return within_budget(found.workload, metric, found)


def within_budget(workload: str, metric: str, found: Sampled) -> Verdict:
    """Judge the peak of memory of saves or restores within a budget."""
    budget = found.value("budget_nbytes")
    limit = BUDGET_SHARE * budget + PER_LEAF_NBYTES * found.leaf_count + BUDGET_SPARE_NBYTES
    most = max(sample.extra_nbytes for sample in found.samples)
    return Verdict.of(
        workload,
        metric,
        f"≤ 1.05 × {budget / MIB:.0f} MiB + 2 KiB per leaf + 16 MiB = {limit / MIB:.0f} MiB",
        f"{most / MIB:.0f} MiB",
        most <= limit,
    )


def _growth(found: Measurement) -> Verdict:
    slope = found.value("per_save_nbytes")
    return Verdict.of(
        found.workload,
        f"memory over {found.value('saves'):.0f} saves",
        f"≤ {GROWTH_NBYTES / MIB} MiB per save",
        f"{slope / MIB:.3f} MiB per save",
        slope <= GROWTH_NBYTES,
    )


# ---------------------------------------------------------------------------------------- others


def _amplification(results: Results) -> Iterator[Verdict]:
    for found in results.where(RESHARD):
        read, most = found.value("read_share"), found.value("most_read")
        if math.isnan(most):
            continue
        yield Verdict.of(
            found.workload,
            f"read amplification, {found.column}",
            f"≤ {most} of what is wanted",
            f"{read:.3f} of it",
            read <= most,
        )


def _foreign(results: Results) -> Iterator[Verdict]:
    for found in results.where(FOREIGN):
        if found.subject == OURS and found.column.startswith(f"of {ORBAX}"):
            rate = found.nbytes / found.wall_s / 1e9
            target = ORBAX_READ_BYTES_PER_S / 1e9
            yield _at_least(found.workload, f"restore {found.column}", target, rate, "GB/s")


def _processes(results: Results) -> Iterator[Verdict]:
    alone = results.find("W9", PROCESSES, OURS, processes(1))
    for count in (2, 4):
        found = results.find("W9", PROCESSES, OURS, processes(count))
        if alone is not None and found is not None:
            ratio = alone.wall_s / found.wall_s
            metric = f"rate of {processes(count)} / {processes(1)}"
            yield _at_least("W9", metric, PROCESSES_SHARE, ratio, "of it")


def _span(sizes: list[Measurement], family: str) -> str:
    return f"{family[:-1]} {sizes[0].leaf_count}→{sizes[-1].leaf_count}"


def _at_least(
    workload: str, metric: str, target: float, measured: float | None, unit: str
) -> Verdict:
    text = "not measured" if measured is None else f"{measured:.2f} {unit}"
    met = None if measured is None else measured >= target
    return Verdict.of(workload, metric, f"≥ {target} {unit}", text, met)


def _limit(workload: str, metric: str, target: float, measured: float, unit: str = "") -> Verdict:
    text = f"{measured:.2f}{unit}"
    return Verdict.of(workload, metric, f"≤ {target}{unit}", text, measured <= target)


def _at_most(workload: str, metric: str, target_s: float, measured_s: float) -> Verdict:
    target, measured = f"≤ {_time(target_s)}", _time(measured_s)
    return Verdict.of(workload, metric, target, measured, measured_s <= target_s)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
