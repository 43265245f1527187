"""Worker threads own their arguments until their calls have ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from asyncckpt.errors import ResourceError
from asyncckpt.flow.threads import ThreadAbandonedError, Workers, finished


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2, "flow-test", abandon_s=0.05)
    yield made
    made.shutdown()


class Held:
    """A call that a test releases."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self.ended = threading.Event()

    def __call__(self, error: BaseException | None = None) -> int:
        self.started.set()
        assert self.go.wait(30)
        self.ended.set()
        if error is not None:
            raise error
        return 7


async def test_results_and_errors_arrive(workers: Workers) -> None:
    assert await workers.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await workers.run(divmod, 7, 0)


@pytest.mark.parametrize("name", ["run", "run_or_abandon"])
async def test_an_error_keeps_nothing_alive(workers: Workers, name: str) -> None:
    """Neither itself, nor what the frames of its traceback held."""
    held: list[weakref.ref[Held]] = []

    async def fail() -> None:
        value = Held()
        held.append(weakref.ref(value))
        await getattr(workers, name)(divmod, 7, 0)
        del value

    await workers.run(int)
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            await fail()
        await workers.run(int)  # a thread may hold its last call until it has another one
        await workers.run(int)
        assert held[0]() is None
    finally:
        gc.enable()


async def test_base_exceptions_of_a_call_arrive_and_its_thread_lives_on(workers: Workers) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await asyncio.shield(asyncio.wrap_future(workers.submit(leave)))
    assert await workers.run(int, "5") == 5


class Over(StopIteration):
    pass


@pytest.mark.parametrize("kind", [StopIteration, Over])
async def test_a_stop_iteration_of_a_call_ends_the_wait(
    workers: Workers, kind: type[StopIteration]
) -> None:
    def last() -> None:
        error = kind(3)
        error.add_note("of the leaf")
        raise error

    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match=r"raised StopIteration\(3\)") as caught:
            await workers.run(last)
    assert type(caught.value.__cause__) is kind
    assert caught.value.__notes__ == ["of the leaf"]


async def test_threads_are_few_named_and_joined() -> None:
    workers = Workers(2, "asyncckpt-few")
    barrier = threading.Barrier(2)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(workers.run(barrier.wait, 30))
    for _ in range(20):
        await workers.run(int)
    names = {t.name for t in threading.enumerate() if t.name.startswith("asyncckpt-few")}
    assert names == {"asyncckpt-few-1", "asyncckpt-few-2"}
    assert all(t.daemon for t in threading.enumerate() if t.name in names)
    workers.shutdown()
    workers.shutdown()
    assert not {t.name for t in threading.enumerate() if t.name.startswith("asyncckpt-few")}
    with pytest.raises(RuntimeError, match="closed"):
        workers.submit(int)


def test_a_call_is_queued_before_anyone_can_end_the_threads() -> None:
    workers = Workers(1, "flow-test")
    queue, excluded = workers._queue, []

    class Queue:
        def put(self, item: Any) -> None:
            excluded.append(workers._lock.locked())  # `shutdown` takes it
            queue.put(item)

        def get(self) -> Any:
            return queue.get()

    workers._queue = Queue()  # type: ignore[assignment]
    assert workers.submit(int, "5").result(10) == 5
    workers.shutdown()
    assert excluded == [True, True]  # the call, and the end of the thread


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_run_returns_after_its_thread(times: int) -> None:
    workers = Workers(1, "flow-test")
    held = Held()
    task = asyncio.create_task(workers.run(held))
    await asyncio.to_thread(held.started.wait, 30)
    for _ in range(times):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.ended.is_set()
    workers.shutdown()


async def test_a_cancelled_run_hides_the_error_of_its_call() -> None:
    workers = Workers(1, "flow-test")
    held = Held()
    task = asyncio.create_task(workers.run(held, OSError("late")))
    await asyncio.to_thread(held.started.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    workers.shutdown()


@pytest.mark.parametrize("method", [Workers.run, Workers.run_or_abandon])
async def test_a_call_that_has_not_begun_is_dropped_when_it_is_cancelled(method: Any) -> None:
    workers = Workers(1, "flow-test")
    held = Held()
    running = asyncio.create_task(workers.run(held))
    await asyncio.to_thread(held.started.wait, 30)
    called: list[int] = []
    queued = asyncio.create_task(method(workers, called.append, 1))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued  # at once: nothing was running
    held.go.set()
    assert await running == 7
    assert await workers.run(len, called) == 0
    assert workers.count == 1
    workers.shutdown()


async def test_a_cancelled_run_or_abandon_ends_though_its_thread_does_not() -> None:
    workers, held = Workers(1, "flow-test"), Held()
    calling = asyncio.create_task(workers.run_or_abandon(held))
    await asyncio.to_thread(held.started.wait, 30)
    calling.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert await workers.run_or_abandon(int, "3") == 3  # in another thread
    held.go.set()
    workers.shutdown()


async def test_a_stuck_thread_is_abandoned_named_and_replaced(workers: Workers) -> None:
    held, second = Held(), Held()
    task = asyncio.create_task(workers.run(held))
    other = asyncio.create_task(workers.run(second))
    await asyncio.to_thread(held.started.wait, 30)
    await asyncio.to_thread(second.started.wait, 30)
    task.cancel()
    with pytest.raises(ThreadAbandonedError, match=r"stuck in .*Held.* was abandoned") as caught:
        await task
    assert not caught.value.future.done()
    # Both threads are busy, one for good: a third does the work.
    assert await workers.run(int, "3") == 3
    second.go.set()
    assert await other == 7
    held.go.set()
    assert await asyncio.wrap_future(caught.value.future) == 7


async def test_what_was_stuck_is_named_without_the_values_that_it_holds(workers: Workers) -> None:
    held = Held()
    call = partial(partial(_wait_for, "zXsecretX0815"), held=held)
    task = asyncio.create_task(workers.run(call))
    await asyncio.to_thread(held.started.wait, 30)
    task.cancel()
    with pytest.raises(ThreadAbandonedError, match="stuck in _wait_for for") as caught:
        await task
    assert "zXsecret" not in str(caught.value)
    held.go.set()
    assert await asyncio.wrap_future(caught.value.future) == 7


def _wait_for(secret: str, *, held: Held) -> int:
    return held()


async def test_a_call_that_nobody_waits_for_takes_no_thread_from_others() -> None:
    workers = Workers(1, "asyncckpt-left")
    held = Held()
    left = workers.submit(held)
    await asyncio.to_thread(held.started.wait, 30)
    workers.abandon(left)
    async with asyncio.timeout(30):
        assert await workers.run(int, "3") == 3
    ended = threading.Thread(target=workers.shutdown, daemon=True)
    ended.start()
    await asyncio.to_thread(ended.join, 30)
    assert not ended.is_alive()
    held.go.set()
    assert await asyncio.wrap_future(left) == 7


async def test_threads_are_no_more_once_calls_that_nobody_waited_for_have_ended() -> None:
    workers = Workers(2, "asyncckpt-again")
    for _ in range(5):
        held = Held()
        left = workers.submit(held)
        await asyncio.to_thread(held.started.wait, 30)
        workers.abandon(left)
        held.go.set()
        await asyncio.wrap_future(left)
        workers.abandon(left)  # it has ended: nothing to replace
    # Each call needs its own thread: there are two, and no third.
    line = threading.Barrier(2)
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(workers.run(line.wait, 30))
    async with asyncio.timeout(30):
        while workers.count != 2 or len(_alive("asyncckpt-again")) != 2:
            await workers.run(int)
    workers.shutdown()
    assert _alive("asyncckpt-again") == []


def _alive(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


async def test_an_idle_thread_holds_neither_arguments_nor_results(workers: Workers) -> None:
    class Big:
        pass

    argument = Big()
    seen = weakref.ref(argument)
    assert await workers.run(lambda big: None, argument) is None
    del argument
    async with asyncio.timeout(10):  # the thread still runs after handing over the result
        while seen() is not None:
            await asyncio.sleep(0.001)
            gc.collect()


async def test_finished_waits_through_cancellations_and_stops_at_its_limit() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not await finished(future, timeout_s=0.01)
    task = asyncio.create_task(finished(future))
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    future.set_result(None)
    assert await task


async def test_clean_up_of_a_mount_that_does_not_answer_is_abandoned(workers: Workers) -> None:
    held = Held()
    with pytest.raises(ThreadAbandonedError, match=r"stuck in .* after clean-up began") as caught:
        await workers.clean_up(held)
    held.go.set()
    await asyncio.wrap_future(caught.value.future)


async def test_a_cancelled_clean_up_returns_after_its_thread() -> None:
    workers = Workers(1, "asyncckpt-clean")
    held = Held()
    task = asyncio.create_task(workers.clean_up(held))
    await asyncio.to_thread(held.started.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    workers.shutdown()


def test_threads_that_cannot_start_are_a_clear_error_and_not_missed_where_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(3, "asyncckpt-none")
    start = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(ResourceError, match="asyncckpt-none: a thread could not be started"):
            workers.submit(int)
        patch.setattr(threading.Thread, "start", start)
        assert workers.submit(int).result(30) == 0
        patch.setattr(threading.Thread, "start", _no_thread)
        assert [workers.submit(int, n).result(30) for n in range(5)] == list(range(5))
    workers.shutdown()
    assert _alive("asyncckpt-none") == []


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
