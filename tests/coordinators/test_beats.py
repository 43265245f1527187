"""Beats: silence is found, by the observer's clock, and nothing else is taken for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncckpt.coordinators import beats as module
from asyncckpt.coordinators.beats import BEAT_S, SLOW_BEAT_S, Beats
from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.service import CALL_LIMIT_S
from asyncckpt.errors import StoreError
from tests.coordinators.members import Member, members


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def group_of(member: Member) -> Group:
    count = member.process_count
    return Group(member, "ab" * 16, member.process_index, count, ("host",) * count, "asyncckpt/m")


def beats_of(count: int, silence_s: float = 60.0) -> list[Beats]:
    return [Beats(group_of(member), silence_s) for member in members(count)]


@asynccontextmanager
async def running(*beats: Beats) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each.run()) for each in beats]
        await settled()
        yield
        for task in tasks:
            task.cancel()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def beat(clock: Clock, observer: Beats, *others: Beats, seconds: float) -> None:
    """Time passes; the others post, then the observer looks."""
    clock.now += seconds
    for each in (*others, observer):
        each._changed.set()
        await settled()


def silent_ones(observer: Beats) -> tuple[int, ...]:
    """Return the silent processes among those that the observer watches."""
    return tuple(process for process in observer._heard if observer.silent(process))


async def test_a_living_process_is_never_silent(clock: Clock) -> None:
    first, *others = beats_of(3)
    for each in (first, *others):
        each.reached("save", 1)
    async with running(*others, first):
        for _ in range(30):
            await beat(clock, first, *others, seconds=5)
            assert silent_ones(first) == ()
        assert first.last(1, "save") == first.last(2, "save") == 1


async def test_a_process_that_posts_no_more_is_silent_after_its_time(clock: Clock) -> None:
    first, second, third = beats_of(3)
    for each in (first, second, third):
        each.reached("save", 1)
    async with running(third, first):
        async with running(second):
            await beat(clock, first, second, third, seconds=5)
            assert first.last(1, "save") == 1
        # The second has ended without a word.
        for _ in range(11):
            await beat(clock, first, third, seconds=5)
            assert silent_ones(first) == ()
        await beat(clock, first, third, seconds=5)
        assert silent_ones(first) == (1,)
        assert (first.silent(1), first.silent(2)) == (True, False)


async def test_the_others_watch_process_0_only(clock: Clock) -> None:
    first, second, third = beats_of(3)
    first.reached("save", 1)
    async with running(second):
        with pytest.raises(KeyError):
            second.silent(2)
        assert not second.silent(0)
        async with running(first):
            await beat(clock, second, first, seconds=5)
            assert second.last(0, "save") == 1
        for _ in range(11):
            await beat(clock, second, seconds=5)
            assert silent_ones(second) == ()
        await beat(clock, second, seconds=5)
        assert silent_ones(second) == (0,)
        async with running(first):
            await beat(clock, second, first, seconds=5)
            assert silent_ones(second) == ()
    assert silent_ones(third) == ()


async def test_a_process_at_rest_is_not_silent(clock: Clock) -> None:
    first, second = beats_of(2)
    second.reached("save", 1)
    async with running(first):
        async with running(second):
            await beat(clock, first, second, seconds=5)
        await second._post(at_work=False)
        for _ in range(60):
            await beat(clock, first, seconds=5)
        assert silent_ones(first) == ()
        assert first.last(1, "save") == 1
        assert not first.at_work(1)


async def test_an_observer_that_was_stopped_looks_again_first(clock: Clock) -> None:
    first, second = beats_of(2)
    second.reached("save", 1)
    async with running(first):
        async with running(second):
            await beat(clock, first, second, seconds=5)
        await beat(clock, first, seconds=3600)
        assert silent_ones(first) == ()


async def test_a_service_without_an_answer_is_silence(clock: Clock) -> None:
    first, second = beats_of(2)
    first.reached("save", 1)
    async with running(second):
        async with running(first):
            await beat(clock, second, first, seconds=5)

        async def fail(*_: object) -> None:
            raise StoreError("no answer")

        second.group.coordinator.put = fail  # type: ignore[method-assign]
        for _ in range(4):
            await beat(clock, second, seconds=CALL_LIMIT_S + BEAT_S)
        assert silent_ones(second) == (0,)


async def test_many_processes_beat_more_slowly_and_cost_one_call() -> None:
    count = 300
    job = members(count)
    many = [Beats(group_of(member), 60.0) for member in job]
    assert {each._every_s for each in many} == {SLOW_BEAT_S}
    async with running(*many):
        pass
    assert dict(job[0].calls) == {"put": 1, "list": 1}
    assert dict(job[1].calls) == {"put": 1, "look": 1}
    assert Beats(group_of(members(2)[0]), 60.0)._every_s == BEAT_S
    # Processes that must arrive within 15 s are heard of within them, however many there are.
    assert Beats(group_of(job[0]), 60.0, every_s=5.0)._every_s == 5.0


async def test_beats_come_at_their_interval() -> None:
    member = members(2)[0]
    beats = Beats(group_of(member), 60.0, every_s=0.02)
    start = time.monotonic()
    beating = asyncio.create_task(beats.run())
    while member.calls["put"] < 5:
        await asyncio.sleep(0.02)
    beating.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await beating
    assert member.calls["put"] <= 1 + (time.monotonic() - start) / 0.02
