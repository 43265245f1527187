"""Four and two ranks of torch with gloo save and restore sharded modules and tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from tests.processes import torch_cases as cases
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool
from tests.processes.torch_cases import Prints
from tests.processes.values import array

Saved = tuple[str, Prints]


@pytest.fixture(scope="module")
def four(pools: Pools) -> Pool:
    return pools("torch", 4)


@pytest.fixture(scope="module")
def two(pools: Pools) -> Pool:
    return pools("torch", 2)


FORMS = ["objects", "state dicts"]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fsdp(four: Pool, form: str) -> Saved:
    """A model that four ranks saved, in one of both forms, and its fingerprints."""
    root = str(four.directory / f"fsdp {form}")
    first, *others = four.all(cases.save, root, "fsdp", form)
    assert all(other == first for other in others)
    return root, first


def test_fsdp_is_restored_into_a_fresh_model(four: Pool, fsdp: Saved, form: str) -> None:
    root, wanted = fsdp
    assert four.all(cases.restore, root, "fsdp", form) == [wanted] * 4


def test_on_two_ranks(two: Pool, fsdp: Saved, form: str) -> None:
    root, wanted = fsdp
    assert two.all(cases.restore, root, "fsdp", form) == [wanted] * 2


def test_into_hsdp_and_back(four: Pool, fsdp: Saved, form: str) -> None:
    root, wanted = fsdp
    assert four.all(cases.restore, root, "hsdp", form) == [wanted] * 4
    root = str(four.directory / f"hsdp {form}")
    saved = four.all(cases.save, root, "hsdp", form)
    assert four.all(cases.restore, root, "fsdp", form) == saved


def test_by_one_process_into_plain_tensors(four: Pool, fsdp: Saved, form: str) -> None:
    root, wanted = fsdp
    assert four.run(2, cases.restore, root, "plain", form, "single") == wanted


def test_tensor_parallelism_under_fsdp(four: Pool, form: str) -> None:
    root = str(four.directory / f"tp {form}")
    saved = four.all(cases.save, root, "fsdp over tp", form)
    assert four.all(cases.restore, root, "fsdp over tp", form) == saved
    assert four.run(1, cases.restore_plain, root) == []


KINDS = ["rows", "columns", "replicated", "tiles", "rows twice", "replicas of columns"]


@pytest.mark.parametrize("kind", KINDS)
async def test_tensors_of_uneven_sizes(four: Pool, two: Pool, tmp_path: Path, kind: str) -> None:
    four.all(cases.save_tensors, str(tmp_path), kind)
    assert four.all(cases.restore_tensors, str(tmp_path), KINDS) == [[]] * 4
    assert two.all(cases.restore_tensors, str(tmp_path), KINDS) == [[]] * 2
    tree = await asyncckpt.restore(tmp_path / "1")
    for name, shape in cases.TENSORS.items():
        np.testing.assert_array_equal(tree[name], array(name, shape, seed=1))


def test_a_trainer_runs_its_collectives_during_saves(four: Pool, tmp_path: Path) -> None:
    assert four.all(cases.save_while_training, str(tmp_path)) == [[]] * 4
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == list("0123")


def test_an_expert_gets_its_optimizer_state_later_than_another(two: Pool, tmp_path: Path) -> None:
    first, other = two.all(cases.save_experts, str(tmp_path))
    assert first == other
    late = [{path for path in paths if path.startswith("/opt1/state/")} for paths in first]
    assert [bool(paths) for paths in late] == [False, False, True, True, True]


def test_stages_of_a_pipeline_under_one_key_are_restored_by_whoever_has_them(
    two: Pool, tmp_path: Path
) -> None:
    root = str(tmp_path / "x")
    wanted = two.all(cases.save_stages, root)
    assert wanted[0].keys() != wanted[1].keys()
    for change in (0, 1):
        for rank, (found, errors) in enumerate(two.all(cases.restore_stages, root, change)):
            assert found == wanted[(rank + change) % 2]
            other, lacking = errors
            assert "model/more1.weight: the target has this key in the state of an object" in other
            assert "norm0" not in other and "norm1" not in other
            assert "model/norm1.weight: the checkpoint has this leaf, the target of no" in lacking


def test_cancelling_a_save_returns_while_the_server_is_stopped(two: Pool, tmp_path: Path) -> None:
    root = str(tmp_path)
    two.all(cases.open_and_save, root)
    two.stop(0)
    try:
        taken_s, tasks, opened, leases, threads = two.run(1, cases.cancel_save)
    finally:
        two.resume(0)
    assert taken_s < 5  # the call of the coordinator lasts for `CALL_LIMIT_S`, 10 s
    assert (tasks, opened, leases) == (0, [], 0)
    # In a call that does not return; it is a daemon, and its name says whose it is.
    assert threads == ["asyncckpt-torch-coordinator"]
    assert two.all(cases.go_on) == [[1, 3]] * 2
