"""Calls that some processes of a job leave out while the others make them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncckpt import Checkpointer, SaveOptions
from asyncckpt.errors import AsyncCheckpointError, DeadlineExceededError, UsageError
from tests.session.together.job import Job, state

OPTIONS = SaveOptions(arrival_s=8.0)

Call = Callable[[], Coroutine[Any, Any, Any]]


async def results(*calls: tuple[str, Call]) -> dict[str, str]:
    """Make the calls one after the other; return the name of each that succeeds or its error."""
    found: dict[str, str] = {}
    for name, call in calls:
        try:
            await call()
            found[name] = "done"
        except AsyncCheckpointError as error:
            assert isinstance(error, UsageError), error
            found[name] = str(error)
    return found


def done(found: dict[str, str]) -> list[str]:
    return [name for name, result in found.items() if result == "done"]


@pytest.mark.parametrize("job", [2, 4], indirect=True)
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("left_out", [1, 2])
def test_saves_meet_again_after_one_process_has_left_some_out(
    job: Job, missing: int, left_out: int
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        steps = range(1 + left_out if this == missing else 1, 9)
        found = await results(*((str(s), lambda s=s: ckpt.save(s, state())) for s in steps))
        return done(found), await ckpt.steps()

    first = 2 * left_out + 1
    kept = [str(step) for step in range(first, 9)]
    every = [0, *range(first, 9)]
    assert job.play(part, save_options=OPTIONS) == [(kept, every)] * job.count


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("left_out", [1, 2, 3])
def test_calls_meet_again_after_one_process_has_left_some_out(
    job: Job, missing: int, left_out: int
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in range(4):
            await ckpt.save(step, state())
        calls: list[tuple[str, Call]] = [
            ("latest", ckpt.latest_step),
            ("restore", lambda: ckpt.restore(like=state())),
            ("delete 0", lambda: ckpt.delete(0)),
            ("delete after 2", lambda: ckpt.delete_after(2)),
            ("delete 1", lambda: ckpt.delete(1)),
            ("delete after 9", lambda: ckpt.delete_after(9)),
            ("delete 2", lambda: ckpt.delete(2)),
            ("delete after 8", lambda: ckpt.delete_after(8)),
        ]
        found = await results(*(calls[left_out:] if this == missing else calls))
        return done(found)[-8 + 2 * left_out + 1 :]

    calls = job.play(part, save_options=OPTIONS)
    assert calls[0] == calls[1]
    assert calls[0][-1] == "delete after 8", calls


@pytest.mark.parametrize("missing", [0, 1])
def test_calls_that_alternate_meet_again(job: Job, missing: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        calls: list[tuple[str, Call]] = []
        for number in range(4):
            calls.append((f"latest {number}", ckpt.latest_step))
            calls.append((f"restore {number}", lambda: ckpt.restore(like=state())))
        found = await results(*(calls[1:] if this == missing else calls))
        return len(found) - len(done(found))

    failed = job.play(part, save_options=OPTIONS)
    assert all(count <= 3 for count in failed), failed


def test_a_save_that_is_made_again_meets_the_first_attempt_of_the_other_process(job: Job) -> None:
    """Both fail and are made again: the process that was behind is so only once."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        if this == 0:
            with pytest.raises(UsageError, match=r"called save\(2\)"):
                await ckpt.save(1, state())
        with pytest.raises(UsageError, match=r"save\(2\)"):
            await ckpt.save(2, state())
        return (await ckpt.save(2, state())).step

    assert job.play(part, save_options=OPTIONS) == [2] * job.count


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_call_that_ends_before_the_processes_have_met_does_not_count(
    job: Job, early: int, how: str
) -> None:
    ended = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        assert await ckpt.steps() == [], "the engine runs"
        if this != early:
            assert await asyncio.to_thread(ended.wait, 20)
            await ckpt.save(1, state())
        elif how == "late":
            with pytest.raises(DeadlineExceededError):
                await ckpt.save(1, state(), options=SaveOptions(deadline_s=0.5))
            ended.set()
            await ckpt.save(1, state())
        else:
            for call in (lambda: ckpt.save(1, state()), ckpt.latest_step):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call(), 0.5)
            ended.set()
            await ckpt.save(1, state())
        return await ckpt.latest_step()

    begun = time.monotonic()
    assert job.play(part, save_options=OPTIONS) == [1] * job.count
    assert time.monotonic() - begun < OPTIONS.arrival_s


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("late", [1, 2])
def test_calls_that_wait_for_the_processes_keep_their_numbers_when_another_one_ends(
    job: Job, early: int, late: int
) -> None:
    ended = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        assert await ckpt.steps() == [], "the engine runs"
        if this != early:
            assert await asyncio.to_thread(ended.wait, 20)
            await ckpt.save(3 - late, state())
        else:
            options = [SaveOptions(deadline_s=0.5) if step == late else None for step in (1, 2)]
            saves = [
                asyncio.create_task(ckpt.save(step, state(), options=of))
                for step, of in enumerate(options, 1)
            ]
            with pytest.raises(DeadlineExceededError):
                await saves[late - 1]
            ended.set()
            await saves[2 - late]
        await ckpt.save(3, state())
        return await ckpt.steps()

    begun = time.monotonic()
    assert job.play(part, save_options=OPTIONS) == [[3 - late, 3]] * job.count
    assert time.monotonic() - begun < OPTIONS.arrival_s


def test_a_call_that_is_left_out_says_why(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        found = await results(
            *((str(s), lambda s=s: ckpt.save(s, state())) for s in range(1 + this, 4))
        )
        return found["2"]

    first, second = job.play(part, save_options=OPTIONS)
    assert "process 0 (" in first and "calls save(2), which has failed already" in first
    assert "called save(2) where" in second
