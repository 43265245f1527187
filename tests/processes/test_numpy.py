"""Four processes without a runtime, which coordinate through a directory."""

from __future__ import annotations

import builtins
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import asyncckpt
from tests.processes import numpy_cases as cases
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool
from tests.processes.values import array, differing


@pytest.fixture(scope="module")
def pool(pools: Pools) -> Pool:
    return pools("numpy", 4)


@pytest.fixture(scope="module")
def saved(pool: Pool) -> Path:
    """Step 1 of a run, saved by four processes."""
    root = pool.directory / "run"
    reports = pool.all(cases.save, str(root), 4, 1)
    assert len(set(reports)) == 1
    return root


def some(pool: Pool, count: int, function: Any, *args: Any) -> list[Any]:
    """Results of the first processes; raises their first exception."""
    outcomes = pool.outcomes(function, *args, processes=range(count))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def test_what_four_save_is_the_whole(saved: Path) -> None:
    tree = await asyncckpt.restore(saved / "1")
    assert differing(tree, cases.whole_state(1)) == []
    assert (await asyncckpt.verify(saved / "1")).ok


async def test_it_is_what_one_process_saves(saved: Path, tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "one", cases.whole_state(1))
    report = await asyncckpt.diff(saved / "1", tmp_path / "one", bitwise=True)
    assert report.equal, report
    assert report.leaf_count == len(cases.SHAPES) + 9


def test_four_restore_what_two_saved_of_what_four_saved(pool: Pool, saved: Path) -> None:
    root = str(saved)
    assert some(pool, 4, cases.restore, root, 4, 1) == [[]] * 4
    assert some(pool, 2, cases.restore, root, 2, 1) == [[]] * 2
    some(pool, 2, cases.save, root, 2, 2)
    assert some(pool, 4, cases.restore, root, 4, 2) == [[]] * 4


async def test_processes_save_a_tree_of_their_own_each(pool: Pool, tmp_path: Path) -> None:
    pool.all(cases.save_stages, str(tmp_path))
    for shift in (0, 1):
        assert pool.all(cases.restore_stages, str(tmp_path), shift) == [[]] * 4
    tree = await asyncckpt.restore(tmp_path / "2")
    assert list(tree["layers"]) == [f"stage {index}" for index in range(4)]
    for index in range(4):
        assert differing(tree["layers"][f"stage {index}"], cases.layers(index, 2)) == []
    assert np.array_equal(tree["rows"], array("eight and two", (10, 300), seed=2))
    assert (await asyncckpt.verify(tmp_path / "2")).ok


async def test_tensorstore_reads_what_four_wrote(saved: Path) -> None:
    info = await asyncckpt.inspect(saved / "1")
    assert [leaf.path for leaf in info.leaves if leaf.pieces], "no leaf is stored in pieces"
    context = ts.Context()
    for name, (shape, dtype) in cases.SHAPES.items():
        (leaf,) = [leaf for leaf in info.leaves if leaf.path == f"arrays/{name}"]
        found = ts.open(leaf.tensorstore_spec(), read=True, open=True, context=context).result()
        np.testing.assert_array_equal(found.read().result(), array(name, shape, dtype, seed=1))


async def test_orbax_reads_what_four_wrote(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # blockbuster replaces the builtin `dir` by one that fails on Orbax's Composite.
    monkeypatch.setattr(builtins, "dir", inspect.unwrap(dir))
    pool.all(cases.save_regular, str(tmp_path))
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "1" / "default")
    names = cases.SHAPES.keys() - {"uneven rows"}
    assert found["arrays"].keys() == names
    for name in names:
        shape, dtype = cases.SHAPES[name]
        np.testing.assert_array_equal(found["arrays"][name], array(name, shape, dtype, seed=1))
    wanted = cases.whole_state(1)
    for name in ("table", "small", "scalar", "step", "rate"):
        np.testing.assert_array_equal(found[name], wanted[name])


async def check_spread(pool: Pool, root: Path, kind: str) -> None:
    """Check how many bytes the processes write, as counted at the store port."""
    told = pool.all(cases.save_counted, str(root), kind)
    info = await asyncckpt.inspect(root / "2")
    nbytes = info.nbytes
    assert nbytes > 60 << 20
    for written in zip(*told, strict=True):
        assert sum(written) <= 1.02 * nbytes
        assert max(written) <= 1.05 * sum(written) / pool.count, written


@pytest.mark.parametrize("kind", ["replicas", "hsdp", "one of 60 %"])
async def test_each_byte_is_written_once_and_by_all_alike(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    await check_spread(pool, tmp_path, kind)
