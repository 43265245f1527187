"""Races of two requests: the first success wins, and nobody is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncckpt.stores.objects.requests.hedge import race as raced


class Race:
    """Two requests that end when the test says so."""

    def __init__(self, delay_s: float = 0.0, *, hedged: bool = True, late: bool = False) -> None:
        self.delays_s = [delay_s]
        self.answers: list[asyncio.Future[str]] = []
        self.running = 0
        self.hedged = hedged
        self.late = late
        self.asked = 0
        self.cancelled: list[int] = []
        self.hold_s = 0

    def second(self) -> Coroutine[Any, Any, str] | float:
        if self.delays_s:
            return self.delays_s.pop()
        self.asked += 1
        return self._run(1) if self.hedged and (self.asked == 3 or not self.late) else 0.001

    def begin(self) -> asyncio.Task[str]:
        return asyncio.create_task(raced(self._run(0), self.second))

    async def _run(self, number: int) -> str:
        self.answers.append(asyncio.get_running_loop().create_future())
        self.running += 1
        try:
            return await self.answers[number]
        except asyncio.CancelledError:
            for _ in range(self.hold_s):  # a client that needs a few turns to let go
                await asyncio.sleep(0)
            self.cancelled.append(number)
            raise
        finally:
            self.running -= 1

    async def begun(self, count: int) -> None:
        while len(self.answers) < count:
            await asyncio.sleep(0)


async def test_a_quick_request_is_not_raced() -> None:
    race = Race(60.0)
    task = race.begin()
    await race.begun(1)
    race.answers[0].set_result("first")
    assert await task == "first"
    assert (race.asked, race.running) == (0, 0)


@pytest.mark.parametrize("winner", [0, 1])
async def test_whichever_succeeds_first_ends_the_other(winner: int) -> None:
    race = Race()
    race.hold_s = 5
    task = race.begin()
    await race.begun(2)
    race.answers[winner].set_result(f"request {winner}")
    assert await task == f"request {winner}"
    assert race.cancelled == [1 - winner]
    assert race.running == 0


async def test_a_second_request_that_is_declined_leaves_the_first_alone() -> None:
    race = Race(hedged=False)
    task = race.begin()
    while not race.asked:
        await asyncio.sleep(0)
    race.answers[0].set_result("first")
    assert await task == "first"
    assert len(race.answers) == 1


@pytest.mark.parametrize("late", [False, True])
async def test_a_second_request_that_is_declined_is_asked_for_again_after_the_next_delay(
    late: bool,
) -> None:
    race = Race(late=late)
    task = race.begin()
    await race.begun(2)
    race.answers[1].set_result("second")
    assert await task == "second"
    assert race.asked == (3 if late else 1)


@pytest.mark.parametrize("loser", [0, 1])
async def test_if_one_fails_the_other_is_waited_for(loser: int) -> None:
    race = Race()
    task = race.begin()
    await race.begun(2)
    race.answers[loser].set_exception(OSError("no"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    race.answers[1 - loser].set_result("yes")
    assert await task == "yes"
    assert race.running == 0


async def test_a_request_that_fails_before_its_time_is_not_raced() -> None:
    race = Race(60.0)
    task = race.begin()
    await race.begun(1)
    race.answers[0].set_exception(OSError("at once"))
    with pytest.raises(OSError, match="at once"):
        await task
    assert race.asked == 0


async def test_if_both_fail_the_first_ones_error_is_raised() -> None:
    race = Race()
    task = race.begin()
    await race.begun(2)
    race.answers[1].set_exception(OSError("second"))
    race.answers[0].set_exception(OSError("first"))
    with pytest.raises(OSError, match="first"):
        await task
    assert race.running == 0


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_cancelled_race_has_ended_both_requests(requests: int, times: int) -> None:
    race = Race(0.0 if requests == 2 else 60.0)
    race.hold_s = 6
    task = race.begin()
    await race.begun(requests)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert race.running == 0
    assert sorted(race.cancelled) == list(range(requests))


async def test_a_cancellation_while_the_loser_ends_is_not_lost() -> None:
    race = Race()
    race.hold_s = 10
    task = race.begin()
    await race.begun(2)
    race.answers[1].set_result("won")
    for _ in range(4):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert race.running == 0
