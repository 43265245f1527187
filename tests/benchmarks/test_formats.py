"""Other shardings, other formats, and planning: what is measured is what is said, and compared."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncckpt import ShardedArray, blocking
from benchmarks import results, workloads
from benchmarks.local import elsewhere, planning, reshard, shardings
from benchmarks.local.floors import Floors
from benchmarks.local.suite import Suite
from benchmarks.measure import Protocol
from benchmarks.peers import ORBAX
from benchmarks.peers.safetensors import Safetensors
from benchmarks.results import OURS, RESHARD
from benchmarks.workers import apart

MIB = 1 << 20


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    floors = Floors(tmp_path, buffer_nbytes=MIB)
    found = results.Results("short")
    rng = random.Random(0)
    yield Suite(tmp_path, floors, Protocol(samples=1), found, rng, log=lambda line: None)
    floors.close()


# ------------------------------------------------------------------------------------ shardings


def test_every_sharding_is_measured_in_a_child_that_leaves_nothing(suite: Suite) -> None:
    reshard.run(suite, MIB, layers=1)
    assert suite.found.errors == []
    assert list(suite.directory.iterdir()) == []
    found = {(m.subject, m.column): m for m in suite.found.measurements}
    assert {column for subject, column in found if subject == OURS} == {
        way.column for way in reshard.WAYS
    }
    assert {column for subject, column in found if subject == ORBAX} == {
        way.column for way in reshard.WAYS if way.peer
    }
    workload = workloads.llama(reshard.even_nbytes(MIB), layers=1)
    params = sum(array.nbytes for _, array in workloads.leaves(workload.tree["params"]))
    for (subject, column), measurement in found.items():
        assert (measurement.workload, measurement.scenario) == ("W7", RESHARD)
        assert measurement.nbytes == workload.nbytes
        (sample,) = measurement.samples
        wanted = {"parameters only": params}.get(column, workload.nbytes)
        wanted = wanted // 2 if column.startswith("one half") else wanted
        assert sample.values["wanted_nbytes"] == wanted
        assert ("read_share" in sample.values) is (subject == OURS)
        if subject == OURS:
            assert 1 <= sample.values["read_share"] <= sample.values["calls_share"]
    assert found[OURS, "one half, by columns"].value("read_share") > 1.9


def test_child_that_fails_is_an_error_and_no_measurement(suite: Suite) -> None:
    reshard.run(suite, MIB, layers="many")  # type: ignore[arg-type]
    assert suite.found.measurements == []
    (error,) = suite.found.errors
    assert "measured failed in a process of its own: Traceback" in error
    assert "TypeError" in error


def test_child_that_ends_is_an_error() -> None:
    with pytest.raises(
        RuntimeError,
        match="_exit failed in a process of its own: process 0 of 1 has ended with status 3",
    ):
        apart(os._exit, 3)


@pytest.mark.parametrize("nbytes", [0, 1 << 30, 484 * MIB, 5 * MIB])
def test_eight_devices_divide_every_leaf_of_the_state(nbytes: int) -> None:
    size = reshard.even_nbytes(nbytes)
    assert size <= max(nbytes, 4 * MIB)
    width = 512 * math.isqrt(size >> 10) >> 10
    shapes = workloads._llama_shapes(width, 1, stacked=False)
    assert all(n % 8 == 0 for _, shape in workloads.leaves(shapes) for n in shape)


def test_a_shard_that_differs_is_found_and_named() -> None:
    tree = {"params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}}
    array = tree["params"]["w"]
    shardings.check(tree, {"params": {"w": jnp.array(array)}})
    half = shardings.target(shardings.HALF_COLUMNS, tree)
    assert shardings.wanted_nbytes(half) == array.nbytes // 2
    with pytest.raises(AssertionError, match=r"params\.w: bytes differ"):
        shardings.check(tree, half)
    ((_, part),) = half["params"]["w"].shards
    part[...] = array[:, :2]
    shardings.check(tree, half)
    moved = ShardedArray((3, 4), np.float32, [((0, 2), part)])
    with pytest.raises(AssertionError, match=r"params\.w: bytes differ"):
        shardings.check(tree, {"params": {"w": moved}})
    with pytest.raises(AssertionError, match=r"params\.w: bytes differ"):
        shardings.check(tree, {"params": {"w": jax.device_put(array + 1)}})


# --------------------------------------------------------------------------------- conversions


def test_conversions_are_compared_and_leave_nothing(tmp_path: Path) -> None:
    workload = workloads.small(30)
    blocking.save(tmp_path / "ours", workloads.flat_arrays(workload.tree))
    theirs = Safetensors(tmp_path / "theirs").save(workload).path
    made = tmp_path / "made"
    runs = elsewhere.conversions(tmp_path / "ours", theirs, made, workload)
    assert set(runs) == {
        (who, what)
        for who in (OURS, elsewhere.PLAIN)
        for what in (elsewhere.TO_SAFETENSORS, elsewhere.FROM_SAFETENSORS)
    }
    for run in runs.values():
        for _ in range(2):
            run.prepare()
            assert run.run()["wall_s"] > 0
            run.finish()
    assert [path for path in made.rglob("*") if not path.is_dir()] == []


def test_a_conversion_to_something_else_is_an_error(tmp_path: Path) -> None:
    workload, other = workloads.small(30), workloads.small(30, seed=5)
    blocking.save(tmp_path / "ours", workloads.flat_arrays(other.tree))
    theirs = Safetensors(tmp_path / "theirs").save(other).path
    runs = elsewhere.conversions(tmp_path / "ours", theirs, tmp_path / "made", workload)
    for run in runs.values():
        run.prepare()
        run.run()
        with pytest.raises(AssertionError, match="converted to something else"):
            run.finish()
    assert [path for path in (tmp_path / "made").rglob("*") if not path.is_dir()] == []


# ------------------------------------------------------------------------------------ planning


def test_a_plan_of_shards_has_a_chunk_and_a_part_for_each() -> None:
    count, leaves = planning.sharded_leaf(400)
    plan = planning.save(leaves)
    restore = planning.restoring(plan, leaves)()
    assert count == len(plan.row_array) == len(restore.rows) == 400
    assert restore.counts == [1] * 400


def test_a_plan_of_leaves_restores_every_chunk_once() -> None:
    tree = workloads.small(200).tree
    found = {work.column: work for work in planning.planned(tree)}
    assert found["restore, leaves"].count == found["cached plan"].count == 200
    restore = found["restore, leaves"].work()
    assert len(restore.rows) == 200  # type: ignore[attr-defined]
    assert all(work.run()["wall_s"] > 0 for work in found.values())
