"""Saves in flight: none is lost, whatever happens between two instructions of a look."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from asyncckpt.errors import StoreError
from asyncckpt.flow.driver import run_blocking
from asyncckpt.flow.engine import Engine, Job
from asyncckpt.reports import SaveReport
from asyncckpt.save.save import SaveState
from asyncckpt.session import in_flight
from asyncckpt.session.in_flight import InFlight
from asyncckpt.session.pending import PendingSave
from tests.script import in_thread

ENGINE = Engine("not started")

counts: list[int] = []
"""Instructions of each call of `at_instruction`."""


def running(step: int) -> PendingSave:
    job: Job[SaveReport] = Job(ENGINE)
    return PendingSave(job, SaveState(), location="here", step=step)


async def begun() -> PendingSave:
    return running(1)


def fail(pending: PendingSave) -> None:
    pending._job.future.set_exception(StoreError(f"step {pending.step}"))


def at_instruction(number: int, event: Callable[[], object], call: Callable[[], Any]) -> Any:
    """What `call` returns, and whether `event` happened at that instruction of `in_flight`.

    It happens in the same thread, as in a signal handler: whoever stands that stands threads too.
    """
    count = 0

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != in_flight.__file__:
            return None
        frame.f_trace_opcodes = True
        if what == "opcode":
            count += 1
            if count == number:
                event()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    counts.append(count)
    return result, 0 < number <= count


def at_every_instruction(law: Callable[[int], bool]) -> None:
    """The law holds at each; it tells whether there was such an instruction."""
    law(0)  # Python 3.12 traces instructions from the second time on
    law(0)
    count = counts[-1]  # of instructions, if nothing happens
    number = 1
    while law(number):
        number += 1
    assert number > count > 20


def test_a_save_that_begins_while_failures_are_looked_for_is_in_flight() -> None:
    def law(number: int) -> bool:
        saves, ended, first, new = InFlight(), running(1), running(2), running(3)
        saves.add(ended)
        saves.add(first)
        fail(ended)
        error, began = at_instruction(number, lambda: saves.add(new), saves.unseen_error)
        assert str(error) == "step 1"
        assert saves.pending() == ([first, new] if began else [first]), number
        assert saves.unseen_error() is None
        return bool(began)

    at_every_instruction(law)


def test_a_save_that_fails_while_failures_are_looked_for_is_heard_of_once() -> None:
    def law(number: int) -> bool:
        saves, late, other = InFlight(), running(1), running(2)
        saves.add(late)
        saves.add(other)
        first, failed = at_instruction(number, lambda: fail(late), saves.unseen_error)
        heard = [str(error) for error in (first, saves.unseen_error(), saves.unseen_error())]
        assert sorted(heard) == ["None", "None", "step 1" if failed else "None"], number
        assert saves.pending() == ([other] if failed else [late, other])
        return bool(failed)

    at_every_instruction(law)


def test_a_failure_is_heard_of_by_one_of_those_who_look_at_the_same_time() -> None:
    def law(number: int) -> bool:
        saves = InFlight()
        for pending in (running(1), running(2)):
            saves.add(pending)
            fail(pending)
        others: list[BaseException | None] = []
        own, looked = at_instruction(
            number, lambda: others.append(saves.unseen_error()), saves.unseen_error
        )
        errors = [error for error in (own, *others, saves.unseen_error()) if error is not None]
        heard = [text for e in errors for text in (str(e), *getattr(e, "__notes__", ()))]
        heard = [text for text in heard if not text.startswith("this ended")]
        assert sorted(text[-6:] for text in heard) == ["step 1", "step 2"], number
        return bool(looked)

    at_every_instruction(law)


async def test_a_failure_that_somebody_waits_for_is_raised_by_nobody_else() -> None:
    saves, pending = InFlight(), running(1)
    saves.add(pending)
    waiting = [asyncio.create_task(pending._wait()) for _ in range(2)]
    await asyncio.sleep(0)
    fail(pending)
    # The waiting loop has not run again, and another thread looks.
    assert await asyncio.to_thread(saves.unseen_error) is None
    for task in waiting:
        with pytest.raises(StoreError, match="step 1"):
            await task
    assert saves.unseen_error() is None
    assert not saves._saves


async def test_a_failure_is_left_to_others_by_those_who_give_up_waiting() -> None:
    saves, pending = InFlight(), running(1)
    saves.add(pending)
    waiting = asyncio.create_task(pending._wait())
    await asyncio.sleep(0)
    fail(pending)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert str(saves.unseen_error()) == "step 1"
    assert saves.unseen_error() is None


@pytest.mark.parametrize(
    "wait",
    [PendingSave.result, lambda pending: run_blocking(pending._wait_staged())],
    ids=["result", "staged"],
)
async def test_a_failure_that_a_thread_waits_for_is_raised_by_nobody_else(
    wait: Callable[[PendingSave], object],
) -> None:
    saves = InFlight()
    pending = run_blocking(begun())
    saves.add(pending)
    waiting = in_thread(lambda: wait(pending))
    while not pending._listeners:
        await asyncio.sleep(0.001)
    looked: list[BaseException | None] = []
    pending._job.future.add_done_callback(lambda _: looked.append(saves.unseen_error()))
    fail(pending)  # a look at this very moment finds nothing
    pending._state.staged.set_result(False)
    with pytest.raises(StoreError, match="step 1"):
        await waiting
    assert looked == [None] and saves.unseen_error() is None


def test_a_failure_is_left_to_others_by_a_thread_whose_time_is_up() -> None:
    saves = InFlight()
    pending = run_blocking(begun())
    saves.add(pending)
    with pytest.raises(TimeoutError):
        pending.result(0.0)
    fail(pending)
    assert str(saves.unseen_error()) == "step 1"


async def test_a_failure_while_staging_is_raised_by_nobody_else() -> None:
    saves, pending = InFlight(), running(1)
    saves.add(pending)
    starting = asyncio.create_task(pending._wait_staged())
    await asyncio.sleep(0)
    fail(pending)
    pending._state.staged.set_result(False)
    assert await asyncio.to_thread(saves.unseen_error) is None
    with pytest.raises(StoreError, match="step 1"):
        await starting
    assert saves.unseen_error() is None


def test_what_was_heard_of_is_not_kept() -> None:
    saves = InFlight()
    for step in range(3):
        pending = running(step)
        saves.add(pending)
        fail(pending)
    assert saves.unseen_error() is not None
    assert not saves._saves
