"""Two processes of `jax.distributed` with two devices each save and restore train states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import MismatchError
from tests.processes import jax_cases as cases
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool
from tests.processes.values import differing


@pytest.fixture(scope="module")
def pool(pools: Pools) -> Pool:
    return pools("jax", 2, devices=2)


@pytest.fixture(scope="module")
def saved(pool: Pool) -> tuple[str, list[list[Any]]]:
    """Two steps of one run, and what the reports of each process say."""
    root = str(pool.directory / "run")
    return root, pool.all(cases.save_twice, root)


def test_all_processes_report_one_save_and_the_second_has_a_cached_plan(saved: Any) -> None:
    _, told = saved
    assert told[0] == told[1]
    first, second = told[0]
    assert first[0] != second[0]
    assert (first[1], second[1]) == (False, True)
    assert second[3] <= 1.02 * second[2] + 65536


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("kind", ["mesh", "turned", "flat"])
def test_a_state_is_restored_onto_any_mesh(pool: Pool, saved: Any, kind: str, step: int) -> None:
    assert pool.all(cases.restore, saved[0], step, kind) == [[], []]


def test_a_state_is_restored_from_abstract_arrays(pool: Pool, saved: Any) -> None:
    assert pool.all(cases.restore_abstract, saved[0], 1, "turned") == [[], []]


def test_one_process_restores_what_both_saved(pool: Pool, saved: Any) -> None:
    assert pool.run(1, cases.restore, saved[0], 2, "local", "single") == []


async def test_any_process_reads_whole_arrays(saved: Any) -> None:
    tree = await asyncckpt.restore(f"{saved[0]}/2")
    assert differing(tree["params"], cases.expected("params", 2)) == []
    assert np.array_equal(tree["opt"][0]["count"], 2)
    assert (await asyncckpt.verify(f"{saved[0]}/2")).ok


def test_both_restore_what_one_process_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(0, cases.save_alone, str(tmp_path), 5)
    assert pool.all(cases.restore, str(tmp_path), 5, "mesh") == [[], []]


def test_arrays_may_be_donated_once_a_save_has_started(pool: Pool, tmp_path: Path) -> None:
    assert pool.all(cases.save_and_donate, str(tmp_path)) == [[], []]


def test_donated_and_abstract_arrays_are_replaced_where_other_processes_hold_them(
    pool: Pool, tmp_path: Path
) -> None:
    found = pool.all(cases.restore_what_was_donated, str(tmp_path))
    assert found == [[(True, True)] * 2] * 2


def test_trees_must_be_the_same(pool: Pool, tmp_path: Path) -> None:
    for error in pool.outcomes(cases.save_same_but_for, str(tmp_path)):
        assert isinstance(error, MismatchError), error
        assert "more" in str(error)
    assert pool.all(cases.save_twice, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["1", "2"]


def test_four_processes_go_on_where_two_ended_and_back(
    pools: Pools, pool: Pool, saved: Any, tmp_path: Path
) -> None:
    four = pools("jax", 4)
    assert four.all(cases.restore, saved[0], 2, "turned") == [[]] * 4
    told = four.all(cases.save_twice, str(tmp_path))
    assert told == told[:1] * 4
    assert pool.all(cases.restore, str(tmp_path), 2, "mesh") == [[]] * 2
