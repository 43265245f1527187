"""State saved by `torch.distributed.checkpoint` through our plug-ins loads bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import test_torch
from tests.processes.fixtures import Pools
from tests.torch import cases

PLANNERS = ["default", "cached", "custom"]
HOW = ["save", "thread", "process"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("planner", PLANNERS)
def test_two_ranks(pools: Pools, tmp_path: Path, planner: str, how: str) -> None:
    two = pools("torch", 2)
    assert two.all(cases.round_trip, str(tmp_path / "1"), planner, how) == [[]] * 2


@pytest.mark.parametrize("planner", PLANNERS)
def test_without_a_process_group(tmp_path: Path, planner: str) -> None:
    assert cases.round_trip(None, str(tmp_path / "1"), planner, "save") == []
    assert cases.round_trip(None, str(tmp_path / "2"), planner, "thread") == []


@pytest.mark.parametrize("kind", ["tiles", "rows twice", "replicas of columns"])
def test_meshes_of_four_ranks_into_all_meshes(pools: Pools, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "1")
    pools("torch", 4).all(cases.save_tensors, path, kind)
    assert pools("torch", 4).all(cases.load_tensors, path, test_torch.KINDS) == [[]] * 4
    assert pools("torch", 2).all(cases.load_tensors, path, test_torch.KINDS) == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("planner", PLANNERS)
def test_four_ranks(pools: Pools, tmp_path: Path, planner: str, how: str) -> None:
    four = pools("torch", 4)
    assert four.all(cases.round_trip, str(tmp_path / "1"), planner, how) == [[]] * 4


CUTS = {"5 + 5": 0.5, "8 + 2": 0.8, "10 + 0": 1.0, "0 + 10": 0.0}


@pytest.mark.parametrize("cut", CUTS)
def test_rows_in_any_cut_into_any_other(pools: Pools, tmp_path: Path, cut: str) -> None:
    two, planner = pools("torch", 2), "shards as they are"
    for number, again in enumerate(CUTS.values()):
        path = str(tmp_path / str(number))
        assert two.all(cases.round_trip, path, planner, "save", CUTS[cut], again) == [[]] * 2
