"""`DTensor` in four and six real processes: each opens, restores and fills its own part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.adapters.dtensor_cases import SIX
from tests.adapters.processes import Results, check_whole, launch


@pytest.fixture(scope="module")
def results() -> Results:
    return launch("torch", "tests.adapters.dtensor_cases", 4)


def leaves(found: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """What each process says of every leaf; all have the same ones."""
    for name in found[0]:
        yield name, [answer[name] for answer in found]


@pytest.mark.parametrize(
    "case",
    [
        "distributed over 4",
        "distributed over 2 x 2",
        "strided",
        "counted",
        "fsdp",
        "hsdp",
        "parallel, 10",
        "parallel, 5",
        "trained",
    ],
)
def test_the_shards_of_all_processes_are_the_tensor(results: Results, case: str) -> None:
    found = results[case]
    assert found[0]
    for _, answers in leaves(found):
        check_whole(answers)


def test_a_strided_shard_is_two_boxes(results: Results) -> None:
    shards = [[offset for (offset,), _, _ in a["(8,)"]["shards"]] for a in results["strided"]]
    assert shards == [[0, 4], [0, 4], [2, 6], [2, 6]]


def test_uneven_shards_of_fsdp_over_tensor_parallelism(results: Results) -> None:
    for rows, cuts in ((10, [3, 5, 8]), (5, [2, 3, 4])):
        for answer in results[f"parallel, {rows}"]:
            assert answer["0.weight"]["partition"][0] == [cuts, 3]
            assert answer["0.bias"]["partition"][0] == [cuts]


def test_replicas_of_hsdp_hold_the_same(results: Results) -> None:
    for process, answer in enumerate(results["hsdp"]):
        for _, _, holders in answer["up.weight"]["shards"]:
            assert holders == [process % 2, process % 2 + 2]


def test_module_and_optimizer_are_opened_by_both_kinds_of_state_dict(results: Results) -> None:
    paths = set(results["trained"][0])
    for state in ("exp_avg", "exp_avg_sq"):
        assert f"/1/state/up.weight/{state}" in paths  # get_state_dict
        assert f"/1/state/1/{state}" in paths  # optimizer.state_dict, by number
    assert {"/0/up.weight", "/0/scale"} <= paths


def test_a_process_outside_the_mesh_holds_nothing_and_wants_nothing(results: Results) -> None:
    found = results["on two ranks"]
    check_whole([answer["(5, 3)"] for answer in found])
    assert [len(answer["(5, 3)"]["shards"]) for answer in found] == [0, 1, 0, 1]
    assert [answer["wanted"] for answer in found] == [0, 1, 0, 1]
    assert found[0]["(5, 3)"]["partition"][2] == [1, 3]


def test_a_tensor_of_one_process_is_local_there(results: Results) -> None:
    assert results["on one rank"] == [[[2], 0], [[2], 0], None, [[2], 0]]


def test_partial_sums_and_contradictions_are_refused_by_name(results: Results) -> None:
    for process, (plain, mixed, shard, strided) in enumerate(results["refusals"]):
        for text in (plain, mixed):
            assert text.startswith("a/b: this DTensor ([")
            assert "Partial" in text
            assert "is a partial sum on each process; reduce it first" in text
        assert (
            f"has shape (3, 2); its placements, [Shard(dim=0)] on a mesh of shape (4,), give "
            f"coordinate ({process},) the shape (2, 2) of a tensor of shape (8, 2)"
        ) in shard
        assert "has shape (3,); its placements, [_StridedShard(dim=0, sf=2), Shard" in strided


def test_a_tensor_that_is_being_received_is_waited_for(results: Results) -> None:
    assert results["still communicating"] == [{"holders": [0, 1, 2, 3]}] * 4


@pytest.mark.parametrize("case", ["on meta", "of every dtype", "boxes in a window"])
def test_in_every_process(results: Results, case: str) -> None:
    assert results[case] == [None] * 4


@pytest.mark.long
def test_uneven_shards_on_six_processes() -> None:
    results = launch("torch", "tests.adapters.dtensor_cases_of_six", 6)
    for case in SIX:
        for _, answers in leaves(results[case]):
            check_whole(answers)
    cuts = results["parallel, 13"][0]["0.bias"]["partition"][0]
    assert cuts == [[3, 6, 7, 9, 11]]
