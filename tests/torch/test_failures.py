"""Whatever fails on one rank fails the save on all, and leaves the old checkpoint and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncckpt import blocking
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool
from tests.torch import failure_cases as cases


@pytest.fixture(scope="module")
def two(pools: Pools) -> Pool:
    return pools("torch", 2)


CALLS = [
    ("set_up_storage_writer", False, 1),
    ("prepare_local_plan", True, 1),
    ("prepare_global_plan", True, 0),
    ("write_data", False, 1),
    ("write_data", True, 1),
    ("write_data", True, 0),
    ("finish", False, 0),
]


@pytest.mark.parametrize(("call", "after", "rank"), CALLS)
def test_a_rank_that_raises_leaves_the_old_checkpoint(
    two: Pool, tmp_path: Path, call: str, after: bool, rank: int
) -> None:
    for found in two.all(cases.fail_in, str(tmp_path / "1"), call, after, rank):
        assert found[rank] == f"BrokenError: {call} is broken"


@pytest.mark.parametrize("call", ["read_metadata", "prepare_local_plan", "read_data"])
def test_a_rank_that_raises_in_a_load(two: Pool, tmp_path: Path, call: str) -> None:
    path = str(tmp_path / "1")
    two.all(cases.save_over, path, False)
    for found in two.all(cases.fail_in_load, path, call, 1):
        # DCP says of metadata only that they could not be read.
        assert f"{call} is broken" in found[1]


def test_a_full_disk_in_finish(two: Pool, tmp_path: Path) -> None:
    for found in two.all(cases.fill_the_disk_in_finish, str(tmp_path / "1")):
        assert found.keys() == {0}
        assert "StoreError" in found[0], found
        assert "No space left" in found[0]
    assert "No space left" in cases.fill_the_disk_in_finish(None, str(tmp_path / "alone" / "1"))[0]


def test_the_next_save_removes_what_one_without_finish_has_left(two: Pool, tmp_path: Path) -> None:
    for found in two.all(cases.abandon, str(tmp_path / "1")):
        assert found == {1: "BrokenError: once"}


BAD = {
    "an object that cannot be stored": "model.open: this value holds",
    "two ranks with one item": "w at [0]: ranks 0, 1 have all written this item",
    "an item that cannot be resolved": "cannot resolve w",
    "a quantized tensor": "q: this tensor is quantized",
    "no collectives": "use_collectives=False",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_on_all_ranks(two: Pool, tmp_path: Path, case: str) -> None:
    for found in two.all(cases.save_badly, str(tmp_path / "1"), case):
        assert any(BAD[case] in text for text in found.values()), found


def test_bad_input_without_a_process_group(tmp_path: Path) -> None:
    for case in ("an object that cannot be stored", "an item that cannot be resolved"):
        (text,) = cases.save_badly(None, str(tmp_path / "1"), case).values()
        assert BAD[case] in text


def test_another_save_in_the_same_place(two: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "1")
    assert two.all(cases.save_over, path, False) == [{}, {}]
    for found in two.all(cases.save_over, path, False):
        assert "a checkpoint already exists here" in found[0]
        assert found[0].startswith("CheckpointExistsError")
    assert two.all(cases.save_over, path, True) == [{}, {}]
    assert cases.left(tmp_path / "1") == []


def test_what_a_planner_asks_for_and_is_not_there(tmp_path: Path) -> None:
    blocking.save(tmp_path / "1", {"w": torch.ones(3)})
    (text,) = cases.load_badly(None, str(tmp_path / "1"), True, {"w": torch.zeros(3)}).values()
    assert text.startswith("TreeMismatchError: nowhere: the planner asks for a TENSOR item")
    assert "has no such key" in text


def test_a_checkpoint_of_another_library(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        cases.save_with_dcp(None, str(tmp_path / "1"))
    (text,) = cases.load_badly(None, str(tmp_path / "1"), False, {"w": torch.zeros(3)}).values()
    assert "FileSystemReader" in text


def test_a_part_of_the_ranks(pools: Pools, tmp_path: Path) -> None:
    four = pools("torch", 4)
    assert four.all(cases.in_group, str(tmp_path / "1"), [1, 3]) == [[]] * 4
    for members in ([1, 3], [0, 1]):
        for rank in members:
            path = str(tmp_path / "2")
            found = four.all(cases.in_unknown_group, path, members)[rank]
            assert any("StorageWriter(..., process_group=...)" in text for text in found.values())
