"""The suite on object stores measures what it says it measures. Nothing here looks at a clock."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import workloads
from benchmarks.measure import Sample
from benchmarks.remote import report, roundtrips, state, targets
from benchmarks.remote import suite as suite_module
from benchmarks.remote.child import Failed, Role, child
from benchmarks.remote.forms import QUICK
from benchmarks.remote.raw import Point
from benchmarks.remote.results import (
    AUTO,
    FLOOR,
    IN_PLACE,
    RESTORE,
    SAME,
    SAVE,
    Measurement,
    Results,
    Sweep,
    Swept,
)
from benchmarks.remote.suite import CASTS, Cast, Suite, grid
from tests.simulator import simulator_process

MIB = 1 << 20
TINY = dataclasses.replace(
    QUICK,
    nbytes=16 * MIB,
    samples=1,
    grid_sizes=(8 * MIB,),
    range_sizes=(8 * MIB,),
    grid_streams=(2,),
    sweep_sizes=(8 * MIB,),
    sweep_streams=(2,),
    finalists=1,
)


# ---------------------------------------------------------------------------------- the whole


def test_suite_measures_bare_clients_and_ours_without_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASTS, "loopback", Cast(("obstore",), (), swept="obstore"))
    found = Results("tiny")
    suite = Suite(
        TINY,
        tmp_path,
        found,
        random.Random(0),
        scenarios=frozenset((SAVE, RESTORE, "sweep")),
        workloads=frozenset(("W1",)),
        log=lambda line: None,
    )
    suite.run("loopback")
    assert found.errors == []
    keys = {(m.scenario, m.subject, m.column) for m in found.measurements}
    for column in (AUTO, SAME):
        assert (SAVE, "asyncckpt, obstore", column) in keys
        assert (RESTORE, "asyncckpt, obstore", f"{IN_PLACE}, {column}") in keys
    floors = [m for m in found.where(raw=True) if m.column.endswith(FLOOR)]
    assert {m.scenario for m in floors} == {SAVE, RESTORE}
    assert all(m.subject == "raw obstore" and len(m.samples) > 1 for m in floors)
    ours = found.where(subject="asyncckpt, obstore", scenario=SAVE, column=AUTO)[0]
    assert ours.samples[0].values["requests"] > 2
    assert ours.samples[0].floor_s is not None
    assert [sweep.best.point for sweep in found.sweeps] == [Point(8 * MIB, 2)]
    found.verdicts = targets.judge(found)
    report.write(found, tmp_path / "out", plots=False)
    data = json.loads((tmp_path / "out" / "remote.json").read_text())
    assert all("server_cpu_s" in m["samples"][0] for m in data["measurements"] if m["ours"])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("asyncckpt-bench-")]


def test_peers_that_are_not_installed_are_named_in_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASTS, "loopback", Cast(("obstore",), ("s3torchconnector",)))
    monkeypatch.setattr(suite_module.importlib.util, "find_spec", lambda name: None)
    found = Results("tiny")
    Suite(TINY, tmp_path, found, random.Random(0), frozenset(), log=lambda line: None).run(
        "loopback"
    )
    assert found.errors == []
    assert found.notes == ["torch DCP, s3torchconnector: not installed"]


def test_nothing_begins_once_the_time_is_up(tmp_path: Path) -> None:
    found = Results("tiny")
    late = dataclasses.replace(TINY, limit_s=-1.0)
    suite = Suite(late, tmp_path, found, random.Random(0), log=lambda line: None)
    suite.attempt("s3 W1 save", SAVE, lambda: pytest.fail("it was begun"))
    assert found.notes == ["s3 W1 save: left out, the time was up"]


def test_process_that_fails_says_why_and_goes_on(tmp_path: Path) -> None:
    state.write(workloads.small(20), tmp_path / "W4")
    with (
        simulator_process() as service,
        child(Role("raw", "obstore", raw=True), service, tmp_path, "p", MIB) as process,
    ):
        with pytest.raises(Failed, match="raw: FileNotFoundError"):
            process.ask("load", path=str(tmp_path / "missing"))
        process.ask("load", path=str(tmp_path / "W4"))
        process.ask("write", name=1, nbytes=1000, size=400, streams=2)
        assert list(service.objects().values()) == [400, 400, 200]


def test_restored_bytes_that_differ_are_an_error(tmp_path: Path) -> None:
    """What was saved is another workload of the same form."""
    for name, seed in (("one", 1), ("other", 2)):
        state.write(workloads.small(20, seed=seed), tmp_path / name)
    with (
        simulator_process() as service,
        child(Role("ours", "obstore"), service, tmp_path, "p", 64 * MIB) as process,
    ):
        process.ask("load", path=str(tmp_path / "one"))
        process.ask("save", name=1)
        process.ask("load", path=str(tmp_path / "other"))
        with pytest.raises(Failed, match="ours: AssertionError: something else was restored"):
            process.ask("restore", name=1, in_place=False)


# ---------------------------------------------------------------------------------- the parts


def test_workload_comes_back_from_its_file(tmp_path: Path) -> None:
    for workload in (workloads.small(200), workloads.llama(MIB, layers=2)):
        described = state.write(workload, tmp_path / "state")
        found = state.read(tmp_path / "state")
        flat = dict(workloads.leaves(workload.tree))
        assert workloads.difference(flat, found.tree) is None
        assert (described.nbytes, described.leaf_count) == (found.nbytes, found.leaf_count)


def entry(kind: str, key: str, began_s: float, ended_s: float) -> dict[str, Any]:
    return {"kind": kind, "key": key, "began_s": began_s, "ended_s": ended_s, "status": 200}


def test_round_trips_are_counted_after_the_last_data() -> None:
    log = [
        entry("get_object", "run/1/checkpoint.json", 0.0, 0.1),
        entry("put_object", "run/1/default/d/x-0", 0.1, 0.5),
        entry("put_object", "run/1/default/d/x-1", 0.1, 1.0),
        entry("put_object", "run/1/checkpoint.json", 1.1, 1.2),
        entry("put_object", "run/1/default/_METADATA", 1.3, 1.5),
        entry("put_object", "run/1/default/manifest.ocdbt", 1.3, 1.4),
    ]
    found = roundtrips.commit(log, record="checkpoint.json", data="/d/")
    assert found is not None
    assert (found.to_record, found.to_end) == (1, 2)
    assert found.end_s == pytest.approx(0.5)
    log.insert(3, entry("put_object", "run/1/.asyncckpt/x-fixed", 1.02, 1.08))
    later = roundtrips.commit(log, record="checkpoint.json", data="/d/")
    assert later is not None
    assert (later.to_record, later.to_end) == (2, 3)
    assert roundtrips.commit(log[:3], record="checkpoint.json", data="/d/") is None


def test_grid_leaves_out_streams_that_would_have_no_object() -> None:
    points = list(grid((8 * MIB, 64 * MIB), (4, 8, 16), 64 * MIB))
    assert [str(point) for point in points] == ["8 MiB × 4", "8 MiB × 8", "64 MiB × 4"]


def measurement(column: str, walls: list[float], *, raw: bool = False) -> Measurement:
    samples = tuple(Sample(wall_s=wall, cpu_s=1.0, extra_nbytes=0) for wall in walls)
    subject = "raw obstore" if raw else "asyncckpt, obstore"
    return Measurement("s3", "W1", SAVE, subject, column, 64 * MIB, 9, not raw, raw, samples)


def test_verdict_compares_medians_with_those_of_the_floor() -> None:
    found = Results("tiny")
    found.measurements = [
        measurement(f"8 MiB × 8, {FLOOR}", [0.8, 0.9, 9.0], raw=True),
        measurement(SAME, [1.0, 1.0, 7.0]),
        measurement(AUTO, [2.0, 1.5, 1.8]),
    ]
    statuses = {v.metric: (v.measured, v.status) for v in targets.judge(found)}
    assert statuses[f"save, {SAME}, best bare client"] == (
        "0.90 of the floor (asyncckpt, obstore)",
        "PASS",
    )
    assert statuses["save, auto, best bare client"][1] == "MISS"


def test_best_point_is_one_of_those_with_the_most_samples() -> None:
    lucky = Swept(Point(8 * MIB, 4), (0.1,))
    best = Swept(Point(8 * MIB, 8), (0.3, 0.2, 0.2))
    other = Swept(Point(16 * MIB, 8), (0.3, 0.3, 0.4))
    sweep = Sweep("s3", "x", MIB, (lucky, best, other), (0.25,), 0.5, Point(MIB, 3))
    assert sweep.best is best
