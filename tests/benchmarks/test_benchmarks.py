"""The benchmark suite measures what it says it measures. Nothing here looks at a clock."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from benchmarks import files, machine, measure, report, results, workloads
from benchmarks.__main__ import main
from benchmarks.local import scenarios, targets
from benchmarks.local.floors import Floors
from benchmarks.local.stall import heartbeat, percentile
from benchmarks.local.suite import Suite
from benchmarks.measure import Case, Protocol, Sample
from benchmarks.peers import Safetensors
from benchmarks.results import (
    CONVERT,
    FOREIGN,
    IN_PLACE,
    KEPT_ALL,
    KEPT_LAST,
    ORBAX,
    OURS,
    OWN,
    PLAN,
    RESHARD,
    RETENTION,
    SAFETENSORS,
    SAVE,
    STALL,
    WARM,
)
from tests import children

MIB = 1 << 20


def scripted(probes: list[float], walls: list[float], events: list[str] | None = None) -> Case:
    """A case whose floor probes and wall times are given; the unmeasured run has no probes."""
    floor_s, wall_s = iter(probes), iter(walls)
    log = [] if events is None else events

    def run() -> Mapping[str, float]:
        log.append("run")
        return {"wall_s": next(wall_s)}

    def floor() -> float:
        log.append("floor")
        return next(floor_s)

    return Case(
        "scripted",
        run,
        prepare=lambda: log.append("prepare"),
        finish=lambda: log.append("finish"),
        floor=floor,
    )


# ------------------------------------------------------------------------------------ protocol


def test_floor_is_probed_right_before_and_right_after_the_run() -> None:
    events: list[str] = []
    sample = measure.take(scripted([1.0, 1.05], [2.0], events), Protocol(), 0.0)
    assert events == ["prepare", "floor", "run", "floor", "finish"]
    assert (sample.wall_s, sample.floor_s, sample.repeats) == (2.0, pytest.approx(1.025), 0)


def test_unsteady_sample_is_taken_again_until_its_probes_agree() -> None:
    case = scripted([1.0, 1.5, 1.0, 1.2, 1.0, 1.01], [9.0, 8.0, 7.0])
    sample = measure.take(case, Protocol(), 0.0)
    assert (sample.wall_s, sample.repeats) == (7.0, 2)
    assert sample.floor_spread == pytest.approx(0.01)


def test_after_five_repeats_the_steadiest_attempt_is_kept_with_its_spread() -> None:
    spreads = [1.5, 1.4, 1.2, 1.3, 1.6, 1.7, 1.0]
    probes = [probe for spread in spreads for probe in (1.0, spread)]
    sample = measure.take(scripted(probes, [1, 2, 3, 4, 5, 6, 7]), Protocol(), 0.0)
    assert (sample.wall_s, sample.repeats) == (3, 5)
    assert sample.floor_spread == pytest.approx(0.2)


def test_nothing_is_repeated_once_the_time_is_up() -> None:
    protocol = Protocol(repeats_for_s=10.0, clock=lambda: 111.0)
    assert measure.take(scripted([1.0, 2.0], [5.0]), protocol, 100.0).repeats == 0


def test_every_round_has_every_case_after_one_unmeasured_run_each() -> None:
    order: list[str] = []

    def case(name: str, samples: int | None = None) -> Case:
        def run() -> Mapping[str, float]:
            order.append(name)
            return {"wall_s": 1.0, "more": 2.0}

        return Case(name, run, samples=samples)

    cases = [case("a"), case("b"), case("single", samples=1)]
    taken = measure.rounds(cases, Protocol(samples=6), random.Random(0))
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 6, "b": 6, "single": 1}
    assert order[:2] == ["a", "b"]
    pairs = [tuple(n for n in order[5 + i : 7 + i]) for i in range(0, 10, 2)]
    assert {frozenset(pair) for pair in pairs} == {frozenset("ab")}
    assert len(set(pairs)) == 2, "the order is shuffled"
    assert taken["a"][0].values == {"more": 2.0}


def test_failing_case_is_cleaned_up_and_left_out_and_the_others_go_on() -> None:
    events: list[str] = []

    def fail() -> Mapping[str, float]:
        raise OSError("no space")

    bad = Case("bad", fail, finish=lambda: events.append("finish"))
    good = Case("good", lambda: {"wall_s": 1.0})
    told: list[tuple[str, str]] = []
    taken = measure.rounds(
        [bad, good],
        Protocol(),
        random.Random(0),
        lambda case, error: told.append((case.name, str(error))),
    )
    assert told == [("bad", "no space")]
    assert events == ["finish"]
    assert set(taken) == {"good"}
    with pytest.raises(OSError, match="no space"):
        measure.rounds([bad], Protocol(), random.Random(0))


def test_peak_memory_counts_from_the_reset() -> None:
    """In a process of its own, where nobody else gives memory back meanwhile."""
    grown = children.output(
        """
        import numpy as np
        from benchmarks import measure

        first = np.ones(64 << 20, dtype=np.uint8)
        del first
        if measure.reset_peak():
            baseline = measure.resident_nbytes()
            second = np.ones(24 << 20, dtype=np.uint8)
            print(measure.peak_nbytes() - baseline)
        """
    )
    assert not grown or 20 * MIB <= int(grown) <= 40 * MIB


async def test_missed_heartbeats_count_with_the_lag_each_would_have_had() -> None:
    def clock() -> Iterator[float]:
        # One beat in time, then one that comes 5.5 ms late.
        yield from (0.0, 0.001, 0.001, 0.0075)

    readings = clock()
    lags: list[float] = []
    with pytest.raises(RuntimeError):  # the script is over
        await heartbeat(lags, lambda: next(readings))
    assert lags == pytest.approx([0.0, 0.0055, 0.0045, 0.0035, 0.0025, 0.0015, 0.0005])
    assert percentile(lags, 0.99) == pytest.approx(0.0055)
    assert percentile([], 0.99) == 0.0


# ----------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize(("stacked", "leaf_count"), [(False, 588), (True, 48)])
def test_llama_has_its_leaves_dtypes_and_size(stacked: bool, leaf_count: int) -> None:
    workload = workloads.llama(8 * MIB, stacked=stacked)
    assert workload.leaf_count == leaf_count
    assert 0.7 < workload.nbytes / (8 * MIB) < 1.4
    flat = workloads.flat_arrays(workload.tree)
    assert {array.dtype for path, array in flat.items() if path.startswith("params")} == {
        np.dtype(ml_dtypes.bfloat16)
    }
    assert {array.dtype for path, array in flat.items() if path.startswith("m")} == {
        np.dtype(np.float32)
    }


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_random_floats_are_finite_never_zero_and_do_not_compress(dtype: type) -> None:
    values = workloads.random_floats(np.random.default_rng(1), (1 << 16,), dtype)
    wide = np.abs(values.astype(np.float64))
    assert np.isfinite(wide).all()
    assert wide.min() >= 2.0**-15
    assert wide.max() < 2
    low_bytes = values.view(np.uint8).reshape(-1, values.itemsize)[:, 0]
    counts = np.bincount(low_bytes, minlength=256)
    assert counts.min() > 0.5 * counts.mean()


def test_single_array_is_aligned_or_divided_by_no_page() -> None:
    aligned, odd = workloads.single(4 * MIB), workloads.single(4 * MIB, odd=True)
    assert aligned.nbytes == 4 * MIB
    assert odd.nbytes % 4096
    assert (odd.nbytes // 4) % 2 == 1
    assert 0.99 < odd.nbytes / (4 * MIB) < 1


def test_small_leaves_have_their_count_and_sizes_and_scalars() -> None:
    workload = workloads.small(200)
    assert workload.leaf_count == 200
    found = [leaf for _, leaf in workloads.leaves(workload.tree)]
    arrays = [leaf for leaf in found if isinstance(leaf, np.ndarray) and leaf.ndim]
    assert len(arrays) == 180
    assert all(256 <= leaf.nbytes <= 1024 for leaf in arrays)
    assert {type(leaf) for leaf in found} == {np.ndarray, int, float}


def test_difference_finds_a_flipped_bit_a_dtype_and_a_missing_leaf() -> None:
    tree = workloads.llama(MIB).tree
    targets = workloads.targets_like(tree)
    assert "bytes differ" in (workloads.difference(tree, targets) or "")
    for (_, a), (_, b) in zip(workloads.leaves(tree), workloads.leaves(targets), strict=True):
        np.copyto(b, a)
    assert workloads.difference(tree, targets) is None
    targets["m"]["norm"].view(np.uint8)[3] ^= 1
    assert workloads.difference(tree, targets) == "m.norm: bytes differ"
    targets["m"]["norm"] = tree["m"]["norm"].astype(np.float64)
    assert "float64" in (workloads.difference(tree, targets) or "")
    del targets["m"]["norm"]
    assert "leaves differ" in (workloads.difference(tree, targets) or "")
    assert workloads.difference({"a": 1}, {"a": 1.0}) == "a: expected 1, found 1.0"


# -------------------------------------------------------------------------------------- floors


@pytest.mark.parametrize("nbytes", [1, 4096, MIB + 12_345, 5 * MIB])
def test_floors_move_every_byte_and_leave_no_file(tmp_path: Path, nbytes: int) -> None:
    floors = Floors(tmp_path, buffer_nbytes=2 * MIB)
    try:
        assert floors.write_s(nbytes) > 0
        assert floors.warm_read_s(nbytes) > 0
        assert floors.cold_read_s(nbytes) > 0
        assert floors.warm_read_s(nbytes) > 0
        assert floors.memcpy_s(nbytes) > 0
    finally:
        floors.close()
    assert list(tmp_path.iterdir()) == []


def test_fastest_way_is_chosen_for_each_floor(tmp_path: Path) -> None:
    floors = Floors(tmp_path, buffer_nbytes=MIB)
    try:
        found = floors.choose()
    finally:
        floors.close()
    ways = (floors.write_way, floors.warm_way, floors.cold_way, floors.copy_way)
    for rates, way in zip(found.values(), ways, strict=True):
        assert rates[str(way)] == max(rates.values())


def test_fsync_warm_and_chill_accept_files_and_trees(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"1" * 10_000)
    for path in (tmp_path / "a", tmp_path / "a" / "b" / "x"):
        files.fsync_tree(path)
        files.warm(path)
        files.chill(path)
        assert [file.name for file in files.files_under(path)] == ["x"]


def test_refusal_says_how_much_is_missing_and_what_to_do(tmp_path: Path) -> None:
    assert machine.refusal(tmp_path, 1, 1) is None
    disk = machine.refusal(tmp_path, 1 << 60, 1)
    assert disk is not None
    assert "MiB free" in disk
    assert "--dir" in disk
    if machine.available_nbytes() is not None:
        memory = machine.refusal(tmp_path, 1, 1 << 60)
        assert memory is not None
        assert "--size" in memory


# -------------------------------------------------------------------------------------- report


def sample(wall_s: float, floor_s: float | None = None, **values: float) -> Sample:
    return Sample(wall_s, 0.1, MIB, floor_s, floor_s, 0, values)


def taken(
    workload: str, scenario: str, subject: str, column: str, *samples: Sample, leaves: int = 590
) -> results.Measurement:
    return results.Measurement(
        workload, scenario, subject, column, 1 << 30, leaves, "floor", tuple(samples)
    )


def resharded(read: float, most: float) -> Sample:
    values = {"read_share": read, "most_read": most, "calls_share": read, "wanted_nbytes": 1e9}
    return sample(0.5, **values)


@pytest.fixture
def found() -> results.Results:
    stalled = sample(0.07, 0.05, start_save_s=0.06, inflation_s=0.01, step_s=0.02, committed_s=0.5)
    made = results.Results("short", facts={"cores": 2, "versions": {"numpy": "2"}})
    made.measurements = [
        taken("W1", SAVE, OURS, "durable", sample(0.50, 0.48), sample(0.52, 0.49)),
        taken("W1", SAVE, SAFETENSORS, "durable", sample(0.55, 0.48), sample(0.57, 0.49)),
        taken("W1", WARM, OURS, IN_PLACE, sample(0.10, 0.05)),
        taken("W1", WARM, SAFETENSORS, IN_PLACE, sample(0.15, 0.05)),
        taken("W1", WARM, SAFETENSORS, OWN, sample(0.45, 0.05)),
        taken("W1", STALL, OURS, "JAX loop", stalled),
        taken("W4-1k", SAVE, OURS, "durable", sample(0.01), leaves=1000),
        taken("W4-100k", SAVE, OURS, "durable", sample(0.901), leaves=100_000),
        taken("W4-1k", WARM, OURS, IN_PLACE, sample(0.01), leaves=1000),
        taken("W4-100k", WARM, OURS, IN_PLACE, sample(1.99), leaves=100_000),
        taken("W4-1k", PLAN, OURS, "save, leaves", sample(0.001), leaves=1000),
        taken("W4-10k", PLAN, OURS, "save, leaves", sample(0.01), leaves=10_000),
        taken("W4-100k", PLAN, OURS, "save, leaves", sample(0.16), leaves=100_000),
        taken("W4-1k", PLAN, OURS, "cached plan", sample(0.001), leaves=1000),
        taken("W4-100k", PLAN, OURS, "cached plan", sample(0.04), leaves=100_000),
        taken("W7", RESHARD, OURS, "same layout", resharded(1.02, 1.01)),
        taken("W7", RESHARD, OURS, "8 → 2 devices", resharded(1.02, 1.1)),
        taken("W7", RESHARD, ORBAX, "8 → 2 devices", sample(1.5, wanted_nbytes=1e9)),
        taken("W1", FOREIGN, OURS, "of Orbax, own memory", sample(0.5, 0.1)),
        taken("W1", FOREIGN, ORBAX, "of Orbax, own memory", sample(2.0, 0.1)),
    ]
    made.verdicts = targets.judge(made)
    return made


def test_verdicts_compare_medians_of_ratios_with_the_targets(found: results.Results) -> None:
    status = {(v.workload, v.metric): v.status for v in found.verdicts}
    assert status == {
        ("W1", "durable save / raw write"): "PASS",
        ("W1", "durable save / safetensors + fsync"): "MISS",
        ("W1", "warm restore in place / safetensors load_file"): "PASS",
        ("W1", "warm restore in place / safetensors into the same arrays"): "MISS",
        ("W4 1000→100000", "save, per small leaf"): "PASS",
        ("W4 1000→100000", "restore in place, per small leaf"): "MISS",
        ("W4-100k", "save, leaves"): "MISS",
        ("W4 1000→100000", "save, leaves: grows with the power"): "MISS",
        ("W4-100k", "cached plan, per leaf"): "PASS",
        ("W1", "stall, JAX loop"): "MISS",
        ("W7", "read amplification, same layout"): "MISS",
        ("W7", "read amplification, 8 → 2 devices"): "PASS",
    }
    assert next(v for v in found.verdicts if "stall" in v.metric).target.endswith("= 68.5 ms")
    measured = {v.metric: v.measured for v in found.verdicts}
    assert measured["save, per small leaf"] == "9 µs"
    assert measured["save, leaves: grows with the power"] == "1.10"
    assert measured["cached plan, per leaf"] == "0.4 µs"


@pytest.mark.parametrize(("kept_s", "status"), [(1.04, "PASS"), (1.07, "MISS")])
def test_retention_is_judged_against_saves_without_it(
    found: results.Results, kept_s: float, status: str
) -> None:
    found.measurements = [
        taken("W1", RETENTION, OURS, KEPT_LAST, sample(kept_s)),
        taken("W1", RETENTION, OURS, KEPT_ALL, sample(1.0)),
    ]
    (verdict,) = targets.judge(found)
    assert (verdict.metric, verdict.target) == (
        "durable save, KeepLast(1) / no retention",
        "≤ 1.05",
    )
    assert (verdict.measured, verdict.status) == (f"{kept_s:.2f}", status)


def test_growth_of_time_is_fitted_over_all_sizes(found: results.Results) -> None:
    found.measurements = [
        taken("W4", PLAN, OURS, "x", sample(3e-6 * n**1.5), leaves=n) for n in (10, 700, 5000)
    ]
    assert results.exponent(found, PLAN, OURS, "x") == pytest.approx(1.5)
    assert results.exponent(found, PLAN, OURS, "y") is None
    assert results.slope_s(found, PLAN, OURS, "y") is None


def test_missing_peer_is_not_measured_instead_of_passed(found: results.Results) -> None:
    found.measurements = [m for m in found.measurements if m.subject == OURS]
    status = {v.metric: (v.measured, v.status) for v in targets.judge(found)}
    assert status["durable save / safetensors + fsync"] == ("not measured", "-")


def test_report_writes_json_with_every_sample_and_a_table(
    found: results.Results, tmp_path: Path
) -> None:
    found.errors = ["W3 save: OSError: no space"]
    written = report.write(found, tmp_path / "out")
    data = json.loads((tmp_path / "out" / "short.json").read_text())
    assert len(data["measurements"]) == len(found.measurements)
    assert data["measurements"][0]["samples"][1]["floor_s"] == [0.49, 0.49]
    assert data["errors"] == found.errors
    table = (tmp_path / "out" / "short.md").read_text()
    assert (
        "| W1 | durable save / raw write | ≥ 0.9 of the floor | 0.95 of the floor | PASS |" in table
    )
    assert "OSError: no space" in table
    assert "| W1 | JAX loop | 70.0 ms | 60.0 ms | 10.0 ms |" in table
    assert "| save, leaves | 100000 | 160.0 ms | 1.60 µs |" in table
    assert "| W7 | asyncckpt | 8 → 2 devices | 500.0 ms |" in table
    assert "| 3.00 × |" in table, "Orbax onto two devices"
    assert "| 4.00 × |" in table, "Orbax with its own checkpoint"
    assert "nan" not in table
    if importlib.util.find_spec("matplotlib"):
        assert [path.suffix for path in written] == [".json", ".md", ".png"]
        assert "short.png" in table


def test_report_of_nothing_is_still_a_report(tmp_path: Path) -> None:
    report.write(results.Results("short"), tmp_path)
    assert json.loads((tmp_path / "short.json").read_text())["measurements"] == []


# --------------------------------------------------------------------------------------- suite


def test_suite_runs_every_scenario_without_errors_and_cleans_up(tmp_path: Path) -> None:
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    arguments = [
        "--only",
        "W1",
        "W4-1k",
        "--size",
        "16",
        "--samples",
        "1",
        "--no-plots",
        "--steady-s",
        "0.001",
    ]
    status = main([*arguments, "--dir", str(scratch), "--out", str(out)])
    data = json.loads((out / "short.json").read_text())
    assert data["errors"] == []
    assert status == 0
    assert list(scratch.iterdir()) == []
    keys = {(m["workload"], m["scenario"], m["subject"]) for m in data["measurements"]}
    assert ("W1", STALL, OURS) in keys
    waited = [m for m in data["measurements"] if "waited_s" in m["samples"][0]]
    assert {m["scenario"] for m in waited if m["workload"] == "W1"} == {SAVE, RETENTION}
    assert all(m["samples"][0]["waited_s"] >= m["samples"][0]["wall_s"] for m in waited)
    retained = {m["column"] for m in data["measurements"] if m["scenario"] == RETENTION}
    assert retained == {KEPT_LAST, KEPT_ALL}
    assert "until wait() returns" in (out / "short.md").read_text()
    for workload in ("W1", "W4-1k"):
        for subject in (OURS, SAFETENSORS):
            assert (workload, SAVE, subject) in keys
            assert (workload, WARM, subject) in keys
    assert {s for w, what, s in keys if what == FOREIGN} == {OURS, SAFETENSORS, ORBAX}
    assert ("W1", CONVERT, OURS) in keys
    planned = [m for m in data["measurements"] if m["scenario"] == PLAN]
    assert {(m["column"], m["leaf_count"]) for m in planned} == {
        ("save, leaves", 1000),
        ("restore, leaves", 1000),
        ("save, shards", 49),
        ("restore, shards", 49),
        ("save, own shards among 100", 1000),
        ("save, own shards among 10000", 1000),
        ("cached plan", 1000),
        ("cached plan of several processes", 1000),
    }
    assert all(m["samples"][0]["cpu_s"] >= 0 for m in data["measurements"])


def test_restored_bytes_that_differ_are_an_error_and_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results.Results("short")
    floors = Floors(tmp_path, buffer_nbytes=MIB)
    suite = Suite(
        tmp_path, floors, Protocol(samples=1), found, random.Random(0), log=lambda line: None
    )
    workload = workloads.small(20)
    restore = Safetensors.restore

    def damaged(self: Safetensors, *args: object) -> object:
        restored = restore(self, *args)  # type: ignore[arg-type]
        tree = {path: array + 1 for path, array in restored.tree.items()}
        return dataclasses.replace(restored, tree=tree)

    monkeypatch.setattr(Safetensors, "restore", damaged)
    try:
        subject = Safetensors(tmp_path / "st")
        saved = {SAFETENSORS: subject.save(workload)}
        scenarios.restores(suite, workload, {SAFETENSORS: subject}, saved, cold=False)
    finally:
        floors.close()
    assert [(m.scenario, m.column) for m in found.measurements] == [(WARM, IN_PLACE)]
    assert len(found.errors) == 1
    assert "restored something else" in found.errors[0]


def test_unknown_workload_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "W9"]) == 2
    there = "no workload W9; there are W1, W3, W3-odd, W4-1k, W4-10k, W4-100k, W7"
    assert there in capsys.readouterr().out


def test_too_little_space_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "refusal", lambda *args: "too little")
    assert main(["--dir", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "too little" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
