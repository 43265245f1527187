"""RELIABILITY row 5: every request of a save and a restore fails in every way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.objects import controls
from tests.objects.matrix import FAULTS, Matrix, every_restore, every_save, matrix
from tests.objects.stores import CLIENTS, Place, place
from tests.watch import nothing_left_behind

SAVE_FAULTS = ("503", "412", "reset", "lost", "hang")
RESTORE_FAULTS = ("500", "reset", "hang", "truncated", "corrupt")

SAVE_REQUESTS = {"s3fs": 9, "gcsfs": 11, "obstore": 9}
RESTORE_REQUESTS = {"s3fs": 4, "gcsfs": 4, "obstore": 4}
"""Fewest requests that a save and a restore make: below, something was not seen."""

LASTING = 1000
"""More requests than a save makes, so that it happens to all of them from one on."""


def told(made: Matrix, title: str) -> None:
    """What a person sees of a run with -s, and the verdict."""
    visited = made.visited
    print(
        f"\n{title}: {visited.points} points, {dict(visited.outcomes)}, {dict(visited.kinds)}, "
        f"collected after {visited.collected}"
    )
    assert visited.wrong == [], "\n".join([f"{len(visited.wrong)} in all", *visited.wrong[:5]])


async def warm_up(at: Place) -> None:
    """What a client library opens once per process is open."""
    async with matrix(at):
        pass


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_fault_at_any_request_leaves_a_whole_step_or_none_and_nothing_else(
    kind: str,
) -> None:
    async with place(kind) as at:
        await warm_up(at)
        with nothing_left_behind():
            async with matrix(at) as made:
                saves = await every_save(made, SAVE_FAULTS)
                restores = await every_restore(made, RESTORE_FAULTS)
    told(made, f"{kind}, once")
    assert saves >= SAVE_REQUESTS[kind]
    assert restores >= RESTORE_REQUESTS[kind]
    assert made.visited.points >= 5 * (SAVE_REQUESTS[kind] + RESTORE_REQUESTS[kind])


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 2, 4, LASTING])
@pytest.mark.parametrize("kind", CLIENTS)
async def test_any_fault_that_lasts_leaves_a_whole_step_or_none_and_nothing_else(
    kind: str, times: int
) -> None:
    async with place(kind) as at, matrix(at) as made:
        saves = await every_save(made, FAULTS, times=times)
        await every_restore(made, FAULTS, times=times)
    told(made, f"{kind}, {times} times")
    assert saves >= SAVE_REQUESTS[kind]
    assert made.visited.points >= (len(FAULTS) - 2) * (SAVE_REQUESTS[kind] + RESTORE_REQUESTS[kind])


@pytest.mark.parametrize(
    ("control", "kind", "fault", "complaint"),
    [
        (controls.record_first, "obstore", "412", "step 1 is listed, and"),
        (controls.no_read_back, "obstore", "lost", "ended with"),
        (controls.fixed_names_first, "obstore", "503", "was written before the record"),
        (controls.first_contents_stay, "obstore", "lost", "is of another index than the record's"),
        (controls.errors_are_forgotten, "obstore", "403", "step 1 is listed, and"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_broken_rule_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    control: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    fault: str,
    complaint: str,
) -> None:
    async with place(kind) as at, matrix(at) as made:
        control(monkeypatch)
        await every_save(made, [fault])
    assert any(complaint in text for text in made.visited.wrong), made.visited.wrong
