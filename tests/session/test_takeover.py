"""A job that was taken over is fenced, wherever it was stopped; nothing that it saved is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from asyncckpt import Checkpointer, UsageError
from asyncckpt.stores.objects.store import ObjectStore
from tests.objects.stores import Place, place
from tests.session.takeover_controls import LOCAL, REMOTE
from tests.session.takeovers import SCENARIOS, Scenario, local_round, remote_round

MAX_POINTS = 1000
"""Steps that no save has: a count that does not end is a bug of these tests."""

ROUNDS = 200
"""Rounds of each long test: in a directory once for every point, of which there are more."""

STRIDE = {"local": 23, "obstore": 5, "gcsfs": 7}
"""Short tests stop at every so manieth point."""

BROKEN_STRIDE = 11
"""As `STRIDE`, for tests that end at the first point with an error."""


@pytest.fixture(params=["obstore", "gcsfs"])
async def at(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """An S3-like and a GCS-like service."""
    async with place(request.param) as found:
        yield found


def test_a_takeover_is_asked_for_with_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="takeover='yes': pass True or False"):
        Checkpointer(tmp_path, takeover="yes")  # type: ignore[arg-type]


async def test_on_a_store_without_conditions_a_takeover_is_refused_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_claim(self: ObjectStore) -> None:
        return None

    monkeypatch.setattr(ObjectStore, "claim", no_claim)
    async with place("obstore") as at:
        async with Checkpointer(at.store(), takeover=True) as ckpt:
            with pytest.raises(UsageError, match="takeover=True needs a store that creates"):
                await ckpt.save(1, {"w": 1.0})
        async with Checkpointer(at.store()) as ckpt:
            await ckpt.save(1, {"w": 1.0})


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_writer_that_was_stopped_anywhere_is_fenced(
    tmp_path: Path, scenario: Scenario
) -> None:
    visited = 0
    for number in range(1, MAX_POINTS, STRIDE["local"]):
        found = await local_round(tmp_path / str(number), scenario, number)
        assert not found.wrong, (number, found.wrong)
        if not found.stopped:
            break
        visited += 1
    assert visited > 3, visited
    print(f"{scenario}: {visited} points")


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_writer_whose_request_was_held_anywhere_is_fenced(
    at: Place, scenario: Scenario
) -> None:
    visited = 0
    for number in range(1, MAX_POINTS, STRIDE[at.kind]):
        at.sim.clear()
        found = await remote_round(at, scenario, number)
        assert not found.wrong, (number, found.wrong)
        if not found.stopped:
            break
        visited += 1
    assert visited > 1, visited
    print(f"{at.kind}, {scenario}: {visited} points")


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_two_hundred_writers_in_a_directory_are_fenced(
    tmp_path: Path, scenario: Scenario
) -> None:
    for number in range(1, MAX_POINTS):
        found = await local_round(tmp_path / str(number), scenario, number)
        assert not found.wrong, (number, found.wrong)
        if not found.stopped:
            break
    assert number > ROUNDS


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_two_hundred_writers_on_an_object_store_are_fenced(
    at: Place, scenario: Scenario
) -> None:
    number = 0
    for _ in range(ROUNDS):
        at.sim.clear()
        number += 1
        found = await remote_round(at, scenario, number)
        assert not found.wrong, (number, found.wrong)
        number = number if found.stopped else 0


# -- the rounds notice when a rule is broken


@pytest.mark.parametrize("broken", LOCAL, ids=lambda broken: broken.__name__)
async def test_a_broken_rule_in_a_directory_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[..., None]
) -> None:
    broken(monkeypatch)
    for number in range(1, MAX_POINTS, BROKEN_STRIDE):
        found = await local_round(tmp_path / str(number), "create", number)
        if found.wrong:
            return
        assert found.stopped, "nothing was noticed"


@pytest.mark.parametrize(
    ("broken", "scenario"), REMOTE, ids=lambda one: getattr(one, "__name__", one)
)
async def test_a_broken_rule_on_an_object_store_is_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., None], scenario: Scenario
) -> None:
    broken(monkeypatch)
    async with place("obstore") as at:
        for number in range(1, MAX_POINTS):
            at.sim.clear()
            found = await remote_round(at, scenario, number)
            if found.wrong:
                return
            assert found.stopped, "nothing was noticed"
