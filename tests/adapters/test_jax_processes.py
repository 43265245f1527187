"""JAX arrays over two real processes: each opens and restores its own part."""

from __future__ import annotations

import pytest

from tests.adapters.jax_cases import CASES, SPECS
from tests.adapters.processes import Results, check_whole, launch

SHARDED = [f"{name}, {dtype}" for name in SPECS for dtype in ("float32", "int4", "float64")]
KEYS = [name for name in CASES if name.startswith("keys")]


@pytest.fixture(scope="module")
def results() -> Results:
    return launch("jax", "tests.adapters.jax_cases", 2)


@pytest.mark.parametrize("case", [*SHARDED, *KEYS, "computed"])
def test_the_shards_of_both_processes_are_the_array(results: Results, case: str) -> None:
    found = results[case]
    check_whole(found)
    for answer in found:
        assert answer["views"] == [answer["views"][0]] * len(answer["shards"])
        if case.endswith("int4"):
            assert not any(answer["views"]), "packed in JAX's memory"
        assert answer["extra"] == ({"prng_impl": "threefry2x32"} if case in KEYS else None)


def test_holders_are_processes_and_not_devices(results: Results) -> None:
    rows, tiles, replicated = (
        results[f"{name}, float32"] for name in ("rows of each process", "tiles", "replicated")
    )
    assert [holders for _, _, holders in rows[0]["shards"]] == [[0, 1], [0, 1]]
    assert [holders for _, _, holders in tiles[1]["shards"]] == [[1], [1]]
    assert replicated[0]["shards"] == [[[0, 0], [8, 6], [0, 1]]]


@pytest.mark.parametrize("process", [0, 1])
def test_an_array_of_one_process_is_local_there_and_unheld_elsewhere(
    results: Results, process: int
) -> None:
    found = results[f"on process {process}"]
    own, other = found[process], found[1 - process]
    assert own == {"partition": None, "wanted": 2}
    assert other["shards"] == []
    assert other["wanted"] == 0
    assert other["partition"][0] == [4, 6]
    assert other["partition"][2] == [process]


def test_an_array_on_one_device_of_another_process(results: Results) -> None:
    first, last = results["without a mesh"]
    assert last == {"partition": None}
    assert (first["shards"], first["partition"][0], first["partition"][2]) == ([], [8, 6], [1])


def test_an_empty_array_has_no_shards_anywhere(results: Results) -> None:
    for answer in results["empty"]:
        assert answer["shards"] == []
        assert answer["partition"][0] == [0, 3]


def test_what_does_not_divide_is_named(results: Results) -> None:
    for text in results["undivided"]:
        assert text.startswith("a/b: this sharding does not divide shape (7, 6)")


def test_an_array_of_this_process_alone_is_local(results: Results) -> None:
    assert results["local"] == [{"partition": None}] * 2


@pytest.mark.parametrize("case", ["enumerated as with a mesh", "nothing enumerates devices"])
def test_divided_by_arithmetic(results: Results, case: str) -> None:
    assert results[case] == [None, None]
