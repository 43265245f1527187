"""SIGTERM: the handler in the main thread, and the step on which processes, in threads, agree.

Real processes of JAX and torch, of which one gets the signal, are in `tests/processes`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from asyncckpt import Checkpointer, SaveOptions, blocking
from asyncckpt.errors import ClosedError, SaveAbortedError, UsageError
from asyncckpt.flow.driver import run_blocking
from asyncckpt.flow.engine import Engine
from asyncckpt.session import preemption
from asyncckpt.session.preemption import WATCH_S, Agreement, SyncPoint
from tests import children
from tests.script import in_thread
from tests.session.together.job import Job
from tests.session.together.test_hiccups import let_fail, let_fail_once_it_is_there

SIGTERM = signal.SIGTERM

LARGE = {"x": np.arange(100_000.0)}

Received = list[int]


@pytest.fixture
def received() -> Iterator[Received]:
    """Signals received by the program's handler, which was installed before ours."""
    got: Received = []
    before = signal.signal(SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(SIGTERM, before)


# ------------------------------------------------------------------------------------ one process


def test_the_step_after_the_signal_is_the_last(tmp_path: Path, received: Received) -> None:
    own = signal.getsignal(SIGTERM)
    with blocking.Checkpointer(tmp_path, preemption=True) as ckpt:
        assert not ckpt.reached(1)
        assert not ckpt.save(1, {"x": 1}).preempted
        signal.raise_signal(SIGTERM)
        assert ckpt.reached(2) and ckpt.reached(2) and ckpt.reached(3)
        assert ckpt.save(2, {"x": 2}).preempted
        assert received == [SIGTERM]
    assert signal.getsignal(SIGTERM) is own


async def test_the_async_facade_reports_it_too(tmp_path: Path, received: Received) -> None:
    async with Checkpointer(tmp_path, preemption=True) as ckpt:
        assert not await ckpt.reached(1)
        signal.raise_signal(SIGTERM)
        assert await ckpt.reached(2)
        pending = await ckpt.start_save(2, {"x": 2})
        assert (await pending).preempted


def test_a_save_without_reached_reports_it(tmp_path: Path, received: Received) -> None:
    with blocking.Checkpointer(tmp_path, preemption=True) as ckpt:
        signal.raise_signal(SIGTERM)
        assert ckpt.save(1, {"x": 1}).preempted


def test_a_second_signal_does_no_more_than_the_first(tmp_path: Path, received: Received) -> None:
    with blocking.Checkpointer(tmp_path, preemption=True) as ckpt:
        signal.raise_signal(SIGTERM)
        assert ckpt.reached(1)
        signal.raise_signal(SIGTERM)
        assert ckpt.reached(2)
        assert ckpt.save(2, {"x": 2}).preempted
    assert received == [SIGTERM] * 2


def test_a_signal_during_a_save_leaves_it_alone(tmp_path: Path, received: Received) -> None:
    with blocking.Checkpointer(tmp_path, preemption=True) as ckpt:
        ckpt.save(1, LARGE, progress=lambda _: signal.raise_signal(SIGTERM))
        assert received
        assert np.array_equal(ckpt.restore(1)["x"], LARGE["x"])
        assert ckpt.reached(2)
        ckpt.save(2, {"x": 2})
        assert ckpt.steps() == [1, 2]


def test_a_skipped_save_reports_it_nevertheless(tmp_path: Path, received: Received) -> None:
    go_on = threading.Event()
    options = SaveOptions(on_overlap="skip")
    with blocking.Checkpointer(tmp_path, preemption=True, save_options=options) as ckpt:
        first = ckpt.start_save(1, LARGE, progress=lambda _: seen(go_on))
        signal.raise_signal(SIGTERM)
        second = ckpt.start_save(2, {"x": 2})
        go_on.set()
        assert second.skipped and second.result().preempted
        assert not first.result().preempted


def seen(event: threading.Event) -> None:
    assert event.wait(20)


# ---------------------------------------------------------------------------------- grace periods


def test_a_grace_period_shorter_than_the_last_save_is_reported(
    tmp_path: Path, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    with blocking.Checkpointer(tmp_path, preemption=True, grace_s=1e-6) as ckpt:
        (note,) = ckpt.save(1, {"x": 1}).notes
        assert "the last save took" in note
        assert "the grace period is 1e-06 s (grace_s)" in note
        signal.raise_signal(SIGTERM)
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            assert ckpt.reached(2) and ckpt.reached(2)
    (record,) = caplog.records
    assert record.getMessage().startswith("preempted: step 2 is the last one: the last save took")


def test_a_grace_period_that_is_long_enough_is_not(
    tmp_path: Path, received: Received, caplog: pytest.LogCaptureFixture
) -> None:
    with blocking.Checkpointer(tmp_path, preemption=True, grace_s=3600) as ckpt:
        assert ckpt.save(1, {"x": 1}).notes == ()
        signal.raise_signal(SIGTERM)
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            assert ckpt.reached(2)
    assert [r.getMessage() for r in caplog.records] == ["preempted: step 2 is the last one"]


# ------------------------------------------------------------------------------ JAX's sync point


@pytest.mark.parametrize(
    ("chosen", "steps", "expected"),
    [
        (7, (5, 6, 7), [None, None, 7]),
        (7, (0, 5, 10), [None, None, 7]),  # steps that leave numbers out
        (1, (5000,), [1]),  # the signal came before the first step of a run that goes on
        (1, (0, 1), [None, 1]),
        (7, (6, 3, 4, 7), [None, None, None, 7]),  # a run that went back
    ],
)
async def test_the_number_that_jax_chooses_is_not_missed(
    chosen: int, steps: tuple[int, ...], expected: list[int | None]
) -> None:
    point = SyncPoint(lambda number: number == chosen)
    assert [await point.reached(step) for step in steps] == expected


# ------------------------------------------------------------------------------------ the handler


async def test_outside_the_main_thread_the_error_says_so(
    tmp_path: Path, received: Received
) -> None:
    own = signal.getsignal(SIGTERM)
    with pytest.raises(UsageError, match="Python handles signals in the main thread only; create"):
        await in_thread(lambda: blocking.Checkpointer(tmp_path, preemption=True))
    assert signal.getsignal(SIGTERM) is own


def test_closing_twice_restores_the_handler_once(tmp_path: Path, received: Received) -> None:
    ckpt = blocking.Checkpointer(tmp_path, preemption=True)
    ckpt.close()
    later: Received = []
    signal.signal(SIGTERM, lambda number, frame: later.append(number))
    ckpt.close()
    signal.raise_signal(SIGTERM)
    assert (received, later) == ([], [SIGTERM])
    with pytest.raises(ClosedError):
        ckpt.reached(1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nested_checkpointers_both_notice_in_any_order_of_closing(
    tmp_path: Path, received: Received, order: tuple[int, int]
) -> None:
    own = signal.getsignal(SIGTERM)
    both = [blocking.Checkpointer(tmp_path / name, preemption=True) for name in "ab"]
    signal.raise_signal(SIGTERM)
    assert all(ckpt.reached(1) for ckpt in both)
    both[order[0]].close()
    assert signal.getsignal(SIGTERM) is not own
    signal.raise_signal(SIGTERM)
    both[order[1]].close()
    assert signal.getsignal(SIGTERM) is own
    assert received == [SIGTERM] * 2


async def test_a_handler_of_the_event_loop_that_was_installed_before_notices_it_too(
    tmp_path: Path, received: Received
) -> None:
    noticed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(SIGTERM, noticed.set)
    async with Checkpointer(tmp_path, preemption=True) as ckpt:
        signal.raise_signal(SIGTERM)
        assert await ckpt.reached(1)
        await noticed.wait()
    loop.remove_signal_handler(SIGTERM)


def test_a_handler_installed_on_top_stays_and_still_reaches_the_one_below(
    tmp_path: Path, received: Received
) -> None:
    ckpt = blocking.Checkpointer(tmp_path, preemption=True)
    ours = signal.getsignal(SIGTERM)
    assert callable(ours)
    signal.signal(SIGTERM, top := lambda number, frame: ours(number, frame))
    ckpt.close()
    assert signal.getsignal(SIGTERM) is top
    signal.raise_signal(SIGTERM)
    assert received == [SIGTERM]


def test_a_checkpointer_that_was_dropped_leaves_no_handler(
    tmp_path: Path, received: Received
) -> None:
    own = signal.getsignal(SIGTERM)
    ckpt = blocking.Checkpointer(tmp_path, preemption=True)
    assert signal.getsignal(SIGTERM) is not own
    del ckpt
    gc.collect()
    assert signal.getsignal(SIGTERM) is own


def test_the_default_action_waits_until_the_checkpointer_is_closed(tmp_path: Path) -> None:
    child = children.start(
        """
        import os, signal, sys
        from asyncckpt import blocking

        with blocking.Checkpointer(sys.argv[1], preemption=True) as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert ckpt.reached(5)
            ckpt.save(5, {"x": 5})
        print("saved", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("alive", flush=True)
        """,
        tmp_path,
    )
    assert children.finish(child)[:2] == (-SIGTERM, "saved\n")
    assert blocking.restore(tmp_path / "5") == {"x": 5}


def test_a_handler_that_cannot_be_removed_carries_out_the_default_action(tmp_path: Path) -> None:
    child = children.start(
        """
        import os, signal, sys, threading
        from asyncckpt import blocking

        ckpt = blocking.Checkpointer(sys.argv[1], preemption=True)
        thread = threading.Thread(target=ckpt.close)
        thread.start()
        thread.join()
        print("closed", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("alive", flush=True)
        """,
        tmp_path,
    )
    assert children.finish(child)[:2] == (-SIGTERM, "closed\n")


def test_a_forked_child_ends_by_sigterm_as_before(tmp_path: Path) -> None:
    said = children.output(
        """
        import os, signal, sys
        from asyncckpt import blocking

        with blocking.Checkpointer(sys.argv[1], preemption=True) as ckpt:
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            print(os.WTERMSIG(os.waitpid(child, 0)[1]), ckpt.reached(1))
        """,
        tmp_path,
    )
    assert said == f"{int(SIGTERM)} False\n"


def test_a_signal_handler_that_saves_may_interrupt_any_call(
    tmp_path: Path, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocking.Checkpointer(tmp_path, preemption=True) as ckpt:
        handler = agreement(ckpt)._handler
        saved = []

        class Interrupted:
            """Runs a handler where `reached` looks for the notice."""

            @property
            def noticed(self) -> bool:
                if not saved:
                    saved.append(None)
                    saved[0] = ckpt.save(1, {"x": 1})
                return handler.noticed

        monkeypatch.setattr(agreement(ckpt), "_handler", Interrupted())
        thread = threading.Thread(target=ckpt.reached, args=(1,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        monkeypatch.undo()
        assert ckpt.steps() == [1]


async def test_a_signal_handler_during_the_first_call_begins_no_second_agreement(
    received: Received,
) -> None:
    engine = Engine()
    submitted = []

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    def submit(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if not submitted:
            submitted.append(None)
            assert run_blocking(agreeing.reached(1)) is None  # the handler's
        submitted.append(function)
        return real(function)

    real = engine.submit
    processes = mock.Mock(alone=False, group=never)
    agreeing = Agreement(mock.Mock(submit=submit), processes)
    assert await agreeing.reached(1) is None
    assert await agreeing.reached(2) is None
    assert len(submitted) == 2
    agreeing.close()
    await engine.aclose()


def test_without_preemption_no_handler_is_installed(tmp_path: Path, received: Received) -> None:
    own = signal.getsignal(SIGTERM)
    with blocking.Checkpointer(tmp_path) as ckpt:
        assert signal.getsignal(SIGTERM) is own
        with pytest.raises(UsageError, match="pass preemption=True to the Checkpointer"):
            ckpt.reached(1)
        assert not ckpt.save(1, {"x": 1}).preempted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preemption": "yes"}, "preemption='yes': pass True or False"),
        ({"preemption": True, "grace_s": 0}, "grace_s=0: pass a positive number of seconds"),
        ({"grace_s": 30}, "grace_s=30 without preemption=True"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, received: Received, arguments: dict[str, Any], message: str
) -> None:
    own = signal.getsignal(SIGTERM)
    with pytest.raises(UsageError, match=message):
        blocking.Checkpointer(tmp_path, **arguments)
    assert signal.getsignal(SIGTERM) is own


# ------------------------------------------------------------------------------ several processes

Part = Callable[[Checkpointer, int, Callable[[], None]], Coroutine[Any, Any, Any]]


def play(job: Job, part: Part, **options: Any) -> list[Any]:
    """Let every process play its part; it gets a function that sends SIGTERM to it alone."""
    made = []
    for process in range(job.count):
        # As the program of another process would, each has a handler of its own below it.
        signal.signal(SIGTERM, lambda number, frame: None)
        coordinator = job.coordinator(process)
        ckpt = Checkpointer(job.root, coordinator=coordinator, preemption=True, **options)
        made.append((ckpt, signal.getsignal(SIGTERM)))

    async def main(process: int) -> Any:
        ckpt, handler = made[process]
        assert callable(handler)
        async with ckpt:
            return await part(ckpt, process, lambda: handler(SIGTERM, None))

    return job.run(main)


def agreement(ckpt: Checkpointer | blocking.Checkpointer) -> Agreement:
    preemption = ckpt._session.preemption
    assert preemption is not None
    assert isinstance(preemption._source, Agreement)
    return preemption._source


@pytest.fixture
def job(tmp_path: Path, received: Received) -> Job:
    return Job(tmp_path, 4)


@pytest.mark.parametrize("noticing", [{0}, {2}, {0, 1, 2, 3}])
def test_all_processes_end_at_one_step_however_fast_each_is(job: Job, noticing: set[int]) -> None:
    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        for step in itertools.count():
            if await ckpt.reached(step):
                report = await ckpt.save(step, {"step": step})
                return step, report.preempted, await ckpt.latest_step()
            if process in noticing and step == 20:
                sigterm()
                sigterm()
            await asyncio.sleep(0.001 * (process + 1))
        raise AssertionError

    results = play(job, part)
    step = results[0][0]
    assert results == [(step, True, step)] * 4
    assert step > 20


def test_steps_that_count_in_tens_end_together(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        for step in itertools.count(0, 10):
            if await ckpt.reached(step):
                return step
            if process == 3 and step == 20:
                sigterm()
            await asyncio.sleep(0.001 * (process + 1))
        raise AssertionError

    results = play(job, part)
    assert results == [results[0]] * 4
    assert results[0] % 10 == 0


def test_saves_report_it_at_one_step_without_reached(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        for step in itertools.count():
            pending = await ckpt.start_save(step, {"step": step})
            if process == 1 and step == 0:
                sigterm()
            if (await pending).preempted:
                return step
        raise AssertionError

    results = play(job, part)
    assert results == [results[0]] * 4


def test_processes_agree_while_their_threads_are_busy(job: Job) -> None:
    reached = threading.Event()

    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        for step in itertools.count():
            if await ckpt.reached(step):
                reached.set()
                return step
            if process == 0:
                sigterm()
                await asyncio.sleep(0.001)
            else:
                reached.wait(20)  # as in a collective, with the loop of this thread
        raise AssertionError

    results = play(job, part)
    assert results == [results[0]] * 4


@pytest.mark.parametrize("tries", [1, 3])
def test_processes_agree_anew_after_a_call_to_the_service_has_failed(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tries: int
) -> None:
    monkeypatch.setattr(preemption, "TRIES", tries)

    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        if process == 1:
            # After its step was posted, the others might agree nevertheless: see the next test.
            let_fail(ckpt._session.processes.coordinator, "put", "/preemption/0/last/1")
        if process == 0:
            sigterm()
        preempted = []
        while not any(preempted) and (tries > 1 or len(preempted) < 30):
            step = len(preempted)
            preempted.append((await ckpt.save(step, {"step": step})).preempted)
        return preempted

    results = play(job, part)
    assert results == [results[0]] * 4
    # Without another try, all saves succeed nevertheless.
    assert results[0][-1] == (tries > 1)
    said = "agreeing on the last step before preemption"
    assert len([record for record in caplog.records if said in record.getMessage()]) >= 4


def test_a_process_asks_again_for_the_step_on_which_all_have_agreed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "TRIES", 1)

    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        failed = []
        if process == 1:
            coordinator = ckpt._session.processes.coordinator
            failed = let_fail_once_it_is_there(coordinator, "/preemption/0/outcome")
        if process == 0:
            sigterm()
        step = 0
        while not (await ckpt.save(step, {"step": step})).preempted:
            step += 1
        return step, len(failed)

    results = play(job, part)
    assert {step for step, _ in results} == {results[0][0]}
    assert [count for _, count in results] == [0, 1, 0, 0]


def test_a_step_costs_no_message(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        coordinator = ckpt._session.processes.coordinator
        calls: list[str] = []
        begin = time.monotonic()
        await ckpt.reached(0)
        await ckpt.latest_step()  # all have met
        look = coordinator.look

        async def counted(key: str) -> bytes | None:
            calls.append(key)
            return await look(key)

        put = mock.patch.object(coordinator, "put", side_effect=AssertionError)
        with put, mock.patch.object(coordinator, "look", counted):
            for step in range(1, 10_000):
                assert not await ckpt.reached(step)
        return calls, time.monotonic() - begin

    for calls, taken_s in play(job, part):
        assert all(key.endswith("/preempted") for key in calls)
        assert len(calls) <= taken_s / WATCH_S + 1


def test_a_process_that_ends_while_the_others_agree_still_answers(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        assert not await ckpt.reached(5)
        if process == 0:
            sigterm()
        while not agreement(ckpt)._held:
            await asyncio.sleep(0.001)
        return None if process == 3 else await ckpt.reached(6)

    assert play(job, part) == [True, True, True, None]


def test_a_save_that_is_cancelled_while_the_processes_agree_fails_on_all(job: Job) -> None:
    cancelled = threading.Event()

    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        assert not await ckpt.reached(4)
        if process == 3:
            sigterm()
            while not agreement(ckpt)._held:
                await asyncio.sleep(0.001)
            saving = asyncio.create_task(ckpt.save(5, {"step": 5}))
            await asyncio.sleep(0)  # it waits for the others, whose engines have not agreed
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            cancelled.set()
        else:
            assert await asyncio.to_thread(cancelled.wait, 20)
            with pytest.raises(SaveAbortedError, match="the call was cancelled there"):
                await ckpt.save(5, {"step": 5})
        return (await ckpt.save(6, {"step": 6})).step

    assert play(job, part) == [6] * job.count


def test_a_process_that_has_closed_before_is_named(job: Job) -> None:
    closed = threading.Event()

    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        assert not await ckpt.reached(0)
        await ckpt.latest_step()
        if process == 3:
            await ckpt.close()
            closed.set()
            return None
        assert await asyncio.to_thread(closed.wait, 20)
        sigterm()
        while not await ckpt.reached(1):
            await asyncio.sleep(0.001)
        raise AssertionError

    *others, last = play(job, part)
    assert last is None
    for error in others:
        assert isinstance(error, UsageError)
        assert "process 3" in str(error)
        assert "closed the Checkpointer" in str(error)


def test_a_process_that_never_comes_is_named(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int, sigterm: Callable[[], None]) -> Any:
        if process == 3:
            return None
        while not await ckpt.reached(0):
            await asyncio.sleep(0.001)
        raise AssertionError

    *others, _ = play(job, part, save_options=SaveOptions(arrival_s=2))
    for error in others:
        assert isinstance(error, UsageError)
        assert "process 3" in str(error)
