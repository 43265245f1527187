"""Restores that read once, by real processes with the collectives of JAX and torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncckpt.errors import AsyncCheckpointError, SaveError, StoreError
from tests.processes import exchange_cases as cases
from tests.processes import jax_exchange_cases, torch_exchange_cases
from tests.processes.exchange_cases import DATA
from tests.processes.fixtures import Pools
from tests.processes.pool import Pool

RUNTIMES = [("torch", 4), ("jax", 2)]


@pytest.fixture(params=RUNTIMES, ids=lambda each: each[0])
def pool(pools: Pools, request: pytest.FixtureRequest) -> Pool:
    kind, count = request.param
    return pools(kind, count, devices=2) if kind == "jax" else pools(kind, count)


@pytest.fixture
def root(pool: Pool, tmp_path: Path) -> str:
    pool.all(cases.save, str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["all", "groups"])
def test_payload_is_read_once(pool: Pool, root: str, kind: str) -> None:
    each = pool.all(cases.restore, root, kind, False)
    once = pool.all(cases.restore, root, kind, True)
    assert [wrong for wrong, _ in [*each, *once]] == [[]] * 2 * len(once)
    total = sum(read.payload for _, read in once)
    assert DATA.nbytes <= total <= 1.02 * (DATA.nbytes + 100_000)
    wanted = 0.5 if kind == "groups" else 1.0
    assert sum(read.payload for _, read in each) >= len(each) * wanted * DATA.nbytes


def test_an_event_loop_may_wait_for_it(pool: Pool, root: str) -> None:
    assert pool.all(cases.restore_async, root) == [[]] * len(pool.alive())


@pytest.mark.parametrize("process", [0, 1])
def test_a_read_that_fails_between_two_batches_is_named_on_all(
    pool: Pool, root: str, process: int
) -> None:
    outcomes = pool.outcomes(cases.restore_and_fail, root, process, "fails", timeout_s=30)
    assert {type(outcome) for outcome in outcomes} == {StoreError}
    named = [outcome for outcome in outcomes if f"process {process} " in str(outcome)]
    assert len(named) == len(outcomes) - 1
    # The next restore works.
    assert {tuple(wrong) for wrong, _ in pool.all(cases.restore, root, "all", True)} == {()}


def test_jax_compiles_once(pools: Pools, tmp_path: Path) -> None:
    pool = pools("jax", 2, devices=2)
    pool.all(cases.save, str(tmp_path))
    first, second = pool.all(jax_exchange_cases.compilations, str(tmp_path))
    assert first == second == [1, 0]


@pytest.mark.parametrize("setting", ["mesh", "no jit"])
def test_settings_of_the_callers_thread_do_not_change_the_collectives(
    pools: Pools, tmp_path: Path, setting: str
) -> None:
    pool = pools("jax", 2, devices=2)
    pool.all(cases.save, str(tmp_path))
    assert pool.all(jax_exchange_cases.restore_under, str(tmp_path), setting) == [[], []]


def test_states_of_jax_are_restored_onto_another_mesh(pools: Pools, tmp_path: Path) -> None:
    pool = pools("jax", 2, devices=2)
    assert pool.all(jax_exchange_cases.move, str(tmp_path)) == [[], []]


def test_a_trainer_of_torch_goes_on(pools: Pools, tmp_path: Path) -> None:
    pool = pools("torch", 4)
    pool.all(cases.save, str(tmp_path))
    assert pool.all(torch_exchange_cases.restore_while_training, str(tmp_path)) == [[]] * 4


def test_dtensors_are_read_once(pools: Pools, tmp_path: Path) -> None:
    pool = pools("torch", 4)
    assert pool.all(torch_exchange_cases.move, str(tmp_path)) == [True] * 4


# ---------------------------------------------------------------------------------------- deaths


@pytest.fixture
def doomed(pools: Pools, tmp_path: Path) -> Iterator[Pool]:
    made = pools.new("torch", 2)
    made.all(cases.save, str(tmp_path))
    yield made
    made.close()


def test_a_process_that_dies_between_two_batches_is_named(doomed: Pool, tmp_path: Path) -> None:
    survivor, dead = doomed.outcomes(cases.restore_and_fail, str(tmp_path), 1, "dies", timeout_s=40)
    assert isinstance(survivor, SaveError), survivor
    assert "process 1" in str(survivor)
    assert not isinstance(dead, AsyncCheckpointError)


def test_a_process_that_stops_between_two_batches_is_named_and_raises_later(
    doomed: Pool, tmp_path: Path
) -> None:
    calls = [doomed.start(n, cases.restore_and_fail, str(tmp_path), 1, "stops") for n in (0, 1)]
    with pytest.raises(SaveError, match="process 1"):
        calls[0].result(40)
    doomed.resume(1)
    with pytest.raises(AsyncCheckpointError):
        calls[1].result(40)
