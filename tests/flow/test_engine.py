"""One thread, one loop: jobs end when their work has ended, whatever callers do."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError as FutureCancelledError
from typing import Any

import pytest

from asyncckpt.errors import ClosedError, EngineDiedError, ResourceError, UsageError
from asyncckpt.flow import engine as module
from asyncckpt.flow.caller import CallerThread
from asyncckpt.flow.driver import run_blocking
from asyncckpt.flow.engine import Engine, Job, wait_quietly
from tests import children
from tests.signals import Expired, raised_once
from tests.watch import collect_others


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine("asyncckpt-test")
    yield made
    made.close()


class Step:
    """A job's coroutine, held at one await until a test releases it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.cancelled = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.event: asyncio.Event | None = None
        self.cleanups = 0
        self.cancellations = 0

    async def __call__(self) -> str:
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.reached.set()
        try:
            await self.event.wait()
        except asyncio.CancelledError:
            # Clean-up that needs the test's permission, and outlives further cancellations.
            while not self.event.is_set():
                self.cancellations += 1
                self.cancelled.set()
                try:
                    await self.event.wait()
                except asyncio.CancelledError:
                    continue
            self.cleanups += 1
            raise
        return threading.current_thread().name

    def go(self) -> None:
        assert self.loop is not None and self.event is not None
        self.loop.call_soon_threadsafe(self.event.set)


async def answer() -> int:
    return 42


def names() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("asyncckpt-test")}


async def test_no_thread_exists_before_the_first_job(engine: Engine) -> None:
    assert names() == set()
    assert await engine.submit(answer).wait() == 42
    assert "asyncckpt-test" in names()
    await engine.aclose()
    assert names() == set()
    await engine.aclose()


def test_a_job_may_be_waited_for_without_a_loop(engine: Engine) -> None:
    assert engine.submit(answer).result() == 42


async def test_the_error_of_a_job_is_its_result(engine: Engine) -> None:
    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await engine.submit(fail).wait()


async def test_a_function_that_makes_no_coroutine_fails_its_own_job_only(engine: Engine) -> None:
    def broken() -> object:
        raise ValueError("no coroutine")

    with pytest.raises(ValueError, match="no coroutine"):
        await engine.submit(broken).wait()  # type: ignore[arg-type]
    assert await engine.submit(answer).wait() == 42


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_wait_returns_after_the_jobs_clean_up(engine: Engine, times: int) -> None:
    step = Step()
    task = asyncio.create_task(engine.submit(step).wait())
    await asyncio.sleep(0)  # the task has begun
    await asyncio.to_thread(step.reached.wait, 30)
    for _ in range(times):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)  # the task has passed it on
        await engine.submit(answer).wait()  # and the engine has seen it
        assert not task.done()
    step.go()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert step.cleanups == 1
    # Repeated cancellation of the waiting does not cancel the clean-up again and again.
    assert step.cancellations == 1


async def test_repeated_cancellation_of_a_wait_leaves_nothing_on_the_outcome(
    engine: Engine,
) -> None:
    step = Step()
    job = engine.submit(step)
    task = asyncio.create_task(job.wait())
    await asyncio.to_thread(step.reached.wait, 30)
    await asyncio.sleep(0)
    for _ in range(50):  # as a cancel scope of anyio does, once per iteration of the loop
        task.cancel()
        await asyncio.sleep(0)
    waits = len(job.future._done_callbacks)
    step.go()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waits < 5


async def test_a_job_cancelled_before_its_first_step_never_runs(engine: Engine) -> None:
    await engine.submit(answer).wait()
    step = Step()
    block = threading.Event()
    engine.post(lambda: block.wait(30) or None)
    job = engine.submit(step)
    job.cancel()
    block.set()
    with pytest.raises(asyncio.CancelledError):
        await job.wait()
    assert not step.reached.is_set()


async def test_cancelling_a_finished_job_changes_nothing(engine: Engine) -> None:
    job = engine.submit(answer)
    assert await job.wait() == 42
    job.cancel()
    assert await job.wait() == 42
    assert job.done()


async def test_close_ends_jobs_that_nobody_cancelled_with_a_closed_error(engine: Engine) -> None:
    step = Step()
    job = engine.submit(step)
    await asyncio.to_thread(step.reached.wait, 30)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.to_thread(step.cancelled.wait, 30)
    step.go()
    with pytest.raises(ClosedError, match="was closed while this was outstanding"):
        await job.wait()
    await closing
    with pytest.raises(ClosedError, match="this Checkpointer is closed; create a new"):
        engine.submit(answer)


async def test_a_cancelled_close_waits_for_the_end(engine: Engine) -> None:
    step = Step()
    job = engine.submit(step)
    await asyncio.to_thread(step.reached.wait, 30)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    for _ in range(3):
        closing.cancel()
        await asyncio.sleep(0)
    assert not closing.done()
    step.go()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert job.done()
    assert names() == set()


async def test_a_close_that_is_cancelled_while_the_thread_ends_raises_the_cancellation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.submit(answer).wait()
    engine.close()
    thread, closing = engine._thread, asyncio.create_task(engine.aclose())
    assert thread is not None
    alive = iter([True, True])

    def is_alive() -> bool:
        return next(alive, False) and closing.cancel()

    monkeypatch.setattr(thread, "is_alive", is_alive)
    with pytest.raises(asyncio.CancelledError):
        await closing


def test_closing_an_engine_that_was_never_used_is_fine() -> None:
    engine = Engine("asyncckpt-test")
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.submit(answer)


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt])
async def test_when_the_loop_dies_every_outstanding_job_says_so(
    engine: Engine, death: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    waiting, running = Step(), asyncio.Event()

    async def held() -> None:
        waiting.loop = asyncio.get_running_loop()
        waiting.reached.set()
        await running.wait()

    jobs = [engine.submit(held), engine.submit(held)]
    await asyncio.to_thread(waiting.reached.wait, 30)

    def die() -> None:
        raise death("on purpose")

    with caplog.at_level(logging.ERROR, "asyncckpt"):
        engine.post(die)
        for job in jobs:
            with pytest.raises(EngineDiedError, match="ended while this was outstanding"):
                await job.wait()
    assert "the engine's loop failed" in caplog.text
    with pytest.raises(EngineDiedError, match="its thread has ended"):
        engine.submit(answer)
    assert not engine.usable
    await engine.aclose()
    assert names() == set()


async def test_two_loops_may_wait_for_jobs_of_one_engine(engine: Engine) -> None:
    async def other_loop() -> int:
        return await engine.submit(answer).wait()

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(other_loop())))
    thread.start()
    assert await engine.submit(answer).wait() == 42
    await asyncio.to_thread(thread.join, 30)
    assert results == [42]


async def test_the_engine_does_not_need_the_callers_loop(engine: Engine) -> None:
    done = threading.Event()

    async def work() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        await engine.compute.run(int)
        done.set()

    engine.submit(work)
    assert done.wait(30)  # this blocks the thread's own loop


@pytest.mark.parametrize("error", [Expired, SystemExit, KeyboardInterrupt])
def test_an_exception_of_a_signal_handler_ends_the_job_first(
    engine: Engine, error: type[BaseException]
) -> None:
    step = Step()
    job = engine.submit(step)

    def go() -> None:
        assert step.cancelled.wait(30)
        step.go()

    with raised_once(error, step.reached.wait, go), pytest.raises(error):
        job.result()
    assert job.done() and step.cleanups == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_interrupted_call_of_a_job_is_its_callers(
    engine: Engine, error: type[BaseException]
) -> None:
    caller = CallerThread()

    def interrupted() -> None:
        raise error

    job = engine.submit(lambda: caller.run(interrupted))
    job.caller = caller
    with pytest.raises(error):
        job.result()
    assert job.done()
    assert engine.submit(answer).result() == 42


async def test_a_job_that_cannot_be_made_for_a_stop_iteration_ends(engine: Engine) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await engine.submit(lambda: next(iter(()))).wait()


def test_a_second_exception_of_a_signal_handler_abandons_the_clean_up(engine: Engine) -> None:
    step = Step()
    job = engine.submit(step)
    with raised_once(Expired, step.reached.wait), raised_once(Expired, step.cancelled.wait):
        with pytest.raises(Expired):
            job.result()
        assert not job.done() and not engine.usable
    step.go()
    wait_quietly(job.future)


def test_a_wait_that_is_closed_cancels_its_job(engine: Engine) -> None:
    step = Step()
    job = engine.submit(step)
    assert step.reached.wait(30)

    async def begin() -> Coroutine[Any, Any, str]:
        waiting = job.wait()
        waiting.send(None)
        return waiting

    asyncio.run(begin()).close()
    assert step.cancelled.wait(30)
    step.go()
    with pytest.raises(asyncio.CancelledError):
        job.result()


WAITS: list[tuple[str, bool, Callable[[Engine, Job[Any]], Any]]] = [
    # Owners of the job cancel it: no one else waits for it.
    ("result", True, lambda _, job: job.result()),
    ("abort", True, lambda _, job: run_blocking(job.abort())),
    ("refuse", False, lambda _, job: job.refuse_own_thread()),
    ("wait", False, lambda _, job: wait_quietly(job.future)),
    ("timeout", False, lambda _, job: wait_quietly(job.future, 30)),
    ("close", False, lambda engine, _: engine.close()),
]


@pytest.mark.parametrize(
    ("cancels", "wait"), [wait[1:] for wait in WAITS], ids=[name for name, *_ in WAITS]
)
def test_blocking_on_the_engines_own_thread_is_refused_instead_of_a_deadlock(
    engine: Engine, cancels: bool, wait: Callable[[Engine, Job[Any]], Any]
) -> None:
    step = Step()
    job = engine.submit(step)

    async def call() -> None:
        with pytest.raises(UsageError, match=r"library's own thread .* wait for itself"):
            wait(engine, job)

    try:
        engine.submit(call).future.result(30)
    except TimeoutError:
        engine.abandoned = True  # or its fixture hangs too
        raise
    assert step.reached.wait(30)
    if cancels:
        assert step.cancelled.wait(30)
    assert not job.done()
    step.go()
    if cancels:
        with pytest.raises(asyncio.CancelledError):
            job.result()
    else:
        assert job.result().startswith("asyncckpt-test")
    assert engine.submit(answer).result() == 42


async def test_the_thread_of_one_engine_may_wait_for_another(engine: Engine) -> None:
    other = Engine("asyncckpt-test-other")
    ended = engine.submit(answer)
    assert await ended.wait() == 42

    async def call() -> list[Any]:
        job = other.submit(answer)
        return [wait_quietly(job.future), job.result(), ended.result(), wait_quietly(ended.future)]

    assert await engine.submit(call).wait() == [True, 42, 42, True]
    await other.aclose()


async def test_a_finished_engine_leaves_no_reference_to_what_it_ran(engine: Engine) -> None:
    import weakref

    class Big:
        async def work(self) -> None:
            pass

    big = Big()
    seen = weakref.ref(big)
    job = engine.submit(big.work)
    await job.wait()
    await engine.submit(answer).wait()
    del big, job
    gc.collect()
    assert seen() is None


def test_a_job_that_has_ended_keeps_no_context_variables_of_its_caller(engine: Engine) -> None:
    class Big:
        pass

    variable = contextvars.ContextVar[Big]("variable")

    def call() -> tuple[Job[int], weakref.ref[Big]]:
        variable.set(big := Big())
        job = engine.submit(answer)
        job.result()
        return job, weakref.ref(big)

    jobs = [contextvars.Context().run(call) for _ in range(2)]  # the first one starts the engine
    engine.submit(answer).result()
    gc.collect()
    assert [big() for _, big in jobs] == [None, None]


def test_a_drained_engine_ends_within_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("asyncckpt-test")
    step = Step()
    job = engine.submit(step)
    assert step.reached.wait(30)
    engine.drain_deadline_s = 0.1
    job.drained = True
    collect_others()
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING, "asyncckpt"), pytest.warns(RuntimeWarning) as warned:
        engine.drain(begun)  # the job's clean-up hangs, too
    assert time.monotonic() - begun < 5
    ours = [w for w in warned if str(w.message).startswith("asyncckpt-test: ")]
    assert [w.category for w in ours] == [RuntimeWarning, RuntimeWarning]
    assert "the process ends without close(); waiting up to 0.1 s for 1 save(s)" in caplog.text
    assert "was abandoned" in caplog.text
    step.go()
    with pytest.raises((ClosedError, FutureCancelledError)):
        job.future.result(30)
    engine.close()


def test_an_engine_that_cannot_be_drained_does_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = [Engine(f"asyncckpt-test-{number}") for number in range(3)]
    for engine in engines:
        engine.submit(answer).result()

    def drain(engine: Engine, exit_s: float) -> None:
        drained.append(engine)
        raise OSError("broken")

    drained: list[Engine] = []
    monkeypatch.setattr(module, "_exit_begun", False)
    monkeypatch.setattr(module, "_live", engines)
    monkeypatch.setattr(module, "_last_calls", [lambda: drained.append(engines[0])])
    monkeypatch.setattr(Engine, "drain", drain)
    with pytest.warns(RuntimeWarning, match="could not be ended"):
        module._drain_all()
    assert drained == [*engines, engines[0]]
    assert module.exiting()
    with pytest.raises(ResourceError, match="the interpreter is exiting"):
        engines[0].submit(answer)
    for engine in engines:
        engine.close()


def test_the_last_calls_are_made_if_ctrl_c_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(engine: Engine, exit_s: float) -> None:
        raise KeyboardInterrupt

    calls: list[str] = []
    monkeypatch.setattr(module, "_exit_begun", False)
    monkeypatch.setattr(module, "_live", [Engine("asyncckpt-test")])
    monkeypatch.setattr(module, "_last_calls", [lambda: calls.append("last")])
    monkeypatch.setattr(Engine, "drain", drain)
    with pytest.raises(KeyboardInterrupt):
        module._drain_all()
    assert calls == ["last"]


def test_a_forked_child_waits_for_no_lock_of_an_inherited_engine() -> None:
    out = children.output(
        """
        import os, signal, threading, time, warnings
        from asyncckpt.flow.engine import Engine
        warnings.filterwarnings("ignore", message=".*fork.*")

        engine, locked, forked = Engine(), threading.Event(), threading.Event()

        async def answer():
            return 42

        def hold():
            with engine._lock:
                locked.set()
                forked.wait()

        job = engine.submit(answer)
        job.result()
        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            job.cancel()
            engine.post(lambda: None)
            os._exit(3)
        forked.set()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        thread.join()
        engine.close()
        """
    )
    assert out == "3\n"


def test_the_process_ends_after_the_threads_of_an_abandoned_engine() -> None:
    # At interpreter exit, NumPy's C++ would be unwound and abort the process.
    out = children.output(
        """
        import threading, time
        import numpy as np
        from asyncckpt.flow.engine import Engine

        engine, begun, values = Engine(), threading.Event(), np.arange(50)
        held = [[number] for number in range(500_000)]  # the collector needs a while at the end
        async def answer(): pass
        engine.submit(answer).result()

        def work():
            for _ in range(5_000):
                np.unique(values)
            begun.set()
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                np.unique(values)

        engine.compute.submit(work)
        begun.wait()
        engine.abandoned = True  # as a second Ctrl-C leaves it
        print("exits", flush=True)
        """
    )
    assert out == "exits\n"


@pytest.mark.parametrize("fails", ["the thread", "the loop", "the exit hook"])
async def test_an_engine_whose_thread_cannot_start_says_so_and_may_start_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        if fails == "the thread":
            patch.setattr(threading.Thread, "start", fail)
        elif fails == "the loop":
            patch.setattr(module, "_new_loop", no_loop)
        else:
            patch.setattr(module, "_hook_registered", False)
            patch.setattr(threading, "_register_atexit", fail)
            patch.setattr(module, "_exit_begun", False)
            module._register_exit_hook()  # as each new engine does
        text = {
            "the thread": "a thread .* limit of processes .ulimit -u.",
            "the loop": "a thread .* limit of open files .ulimit -n.",
        }.get(fails, "the interpreter is exiting")
        for _ in range(2):
            with pytest.raises(ResourceError, match=f"^asyncckpt-test: {text}"):
                engine.submit(answer)
        assert not engine.usable and names() == set()
    assert await engine.submit(answer).wait() == 42
    await engine.aclose()


# `Thread.start` forgets a thread that it has started, which then fails before it begins.
@pytest.mark.filterwarnings("ignore:Exception ignored in thread started by")
@pytest.mark.parametrize("raised", [Expired, TimeoutError, KeyboardInterrupt, None])
def test_an_exception_of_a_signal_handler_while_the_thread_starts_leaves_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException] | None
) -> None:
    jobs: list[Job[int]] = []

    def handle(*_: object) -> None:
        patch.undo()
        if raised is not None:
            raise raised
        jobs.append(engine.submit(answer))

    name = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
    real = getattr(threading, name)

    def start(*args: Any, **keywords: Any) -> Any:
        started = real(*args, **keywords)
        signal.raise_signal(signal.SIGUSR1)
        return started

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading, name, start)
            with contextlib.nullcontext() if raised is None else pytest.raises(raised):
                jobs.append(engine.submit(answer))
    finally:
        signal.signal(signal.SIGUSR1, before)
    if raised is not Expired:  # then closed at once, as by a one-shot call
        assert all(job.result() == 42 for job in (*jobs, engine.submit(answer)))
    engine.close()
    while names():  # a thread started in vain ends by itself
        os.sched_yield()


def test_an_exception_of_a_signal_handler_while_a_thread_is_waited_for_is_raised(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Condition.wait` replaces it by a RuntimeError if it comes between its two locks."""

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            try:
                raise KeyboardInterrupt
            finally:
                threading.Lock().release()

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.submit(answer)
    assert engine.submit(answer).result() == 42
    engine.close()
    while names():  # the thread that was started in vain ends by itself
        os.sched_yield()


def test_an_engine_that_a_signal_handler_closes_while_its_thread_starts_is_closed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    collect_others()

    def interrupted(thread: threading.Thread) -> None:
        engine.begin_close()  # `close` in a signal handler
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(ClosedError):
            engine.submit(answer)
    engine.close()
    while names():  # the thread started in vain ends by itself
        os.sched_yield()
