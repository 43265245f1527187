"""Worker threads that a cancelled await waits for.

A cancelled `asyncio.to_thread` returns at once, while its thread still reads the buffer;
`loop.run_in_executor` refuses work once the interpreter has begun to exit. `Workers` does neither.
"""

# Rule 1: `run` returns only when its thread no longer uses the arguments. The one exception is a
#   thread stuck in a system call for `abandon_s` (an unresponsive mount): `run` then raises
#   ThreadAbandonedError, whose future resolves if the thread ever returns.
#   (test_a_cancelled_run_returns_after_its_thread, test_a_stuck_thread_is_abandoned_...)
# Rule 2: the same limit applies to clean-up from its start, because nothing uses its result.
#   (test_clean_up_of_a_mount_that_does_not_answer_is_abandoned)
# Rule 3: threads are daemons, named, and joined by `shutdown`; an abandoned thread is replaced.

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from asyncckpt.errors import ResourceError, SaveError
from asyncckpt.options import ABANDON_S

T = TypeVar("T")
P = ParamSpec("P")

SIGNAL_CHECK_S = 0.2
"""Interval at which blocking waits check for Ctrl-C: a signal that arrives just before a thread
starts waiting for a lock does not wake it."""

ABANDONED_JOIN_S = 0.1
"""Join timeout of each thread once any was abandoned: which one is stuck is unknown."""


class ThreadAbandonedError(SaveError):
    """A worker thread did not return from a system call; it was replaced.

    Attributes:
        future: resolves if the thread ever returns; its buffers must not be reused before that.
    """

    future: Future[Any]


_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Workers:
    """A fixed number of daemon threads, `count`, that serve one first-in, first-out queue."""

    def __init__(self, count: int, name: str, *, abandon_s: float = ABANDON_S) -> None:
        self._name = name
        self._abandon_s = abandon_s
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._started = 0
        self.count = count
        self._abandoned = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue the call; the future resolves with its result.

        Raises:
            ResourceError: no thread serves the queue and none can be started.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: worker threads are closed")
            if len(self._threads) < self.count:
                self._start_thread()
            self._queue.put((future, fn, args, kwargs))  # not behind what ends the threads
        return future

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the call, made in a worker thread.

        Cancellation: drops a queued call; waits for a running call, through repeated
        cancellations, then raises `CancelledError`.

        Raises:
            ThreadAbandonedError: cancelled, and the thread did not end within `abandon_s`.
        """
        future = self.submit(fn, *args, **kwargs)
        waiter = asyncio.wrap_future(future)
        try:
            await asyncio.wait((waiter,))
        except asyncio.CancelledError:
            # `asyncio.wait` did not cancel the waiter, so the call may still be queued.
            if not future.cancel():
                await self._end(future, waiter, fn)
            raise
        try:
            return waiter.result()
        finally:
            del future, waiter  # an error has this frame in its traceback: it would never be freed

    async def run_or_abandon(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the call, made in a worker thread.

        Cancellation: ends at once; a running call may go on, and use its arguments.
        """
        future = self.submit(fn, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                self.abandon(future)
            raise
        finally:
            del future  # as in `run`

    async def clean_up(self, call: Callable[[], object]) -> None:
        """Make the call in a worker thread, even if this task is cancelled.

        Cancellation: raised when the call has ended.

        Raises:
            ThreadAbandonedError: the call did not end within `abandon_s`; it may still complete.
        """
        future = self.submit(call)
        waiter = asyncio.wrap_future(future)
        try:
            await asyncio.wait((waiter,), timeout=self._abandon_s)
        except asyncio.CancelledError:
            await self._end(future, waiter, call)
            raise
        if not waiter.done():
            raise self._abandoned_error(future, waiter, call, "clean-up began")
        waiter.result()

    async def _end(
        self, future: Future[Any], waiter: asyncio.Future[Any], call: Callable[..., Any]
    ) -> None:
        """Wait for a call whose waiting task was cancelled, through repeated cancellations."""
        if not await finished(waiter, timeout_s=self._abandon_s):
            raise self._abandoned_error(future, waiter, call, "it was cancelled") from None
        seen(waiter)

    def _abandoned_error(
        self, future: Future[Any], waiter: asyncio.Future[Any], call: Callable[..., Any], since: str
    ) -> ThreadAbandonedError:
        self.abandon(future)
        waiter.add_done_callback(seen)
        error = ThreadAbandonedError(
            f"{self._name}: a thread was stuck in {called(call)} for {self._abandon_s:.0f} s after "
            f"{since}; it was abandoned and its buffers are not used again. The file system (in "
            "Staging, a device) is stuck: check the mount or device. A later sweep removes the rest"
        )
        error.future = future
        return error

    def abandon(self, future: Future[Any]) -> None:
        """Add a thread to replace the stuck one until this call has ended."""
        if not future.done():
            with self._lock:
                if not self._closed:
                    self.count += 1
                    self._abandoned += 1
                    with contextlib.suppress(ResourceError):
                        self._start_thread()
            future.add_done_callback(self._retire_thread)

    def shutdown(self) -> None:
        """Refuse new calls, run the queued ones, and join the threads.

        Stuck threads end with the process: each join takes at most `abandon_s`, or
        `ABANDONED_JOIN_S` once a thread was abandoned.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(ABANDONED_JOIN_S if self._abandoned else self._abandon_s)

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(
            target=self._serve, name=f"{self._name}-{self._started}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads:
                return  # fewer threads only make it slower
            raise thread_error(self._name, error) from error
        self._threads.append(thread)

    def _retire_thread(self, _: Future[Any]) -> None:
        # The abandoned call has ended: one thread too many, whichever of them ends.
        with self._lock:
            if not self._closed:
                self.count -= 1
                self._abandoned -= 1
                self._queue.put(None)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            future, function, arguments, keywords = item
            del item
            if not future.set_running_or_notify_cancel():
                del future, function, arguments, keywords
                continue
            try:
                result = function(*arguments, **keywords)
            except BaseException as error:
                future.set_exception(raisable(error))
            else:
                future.set_result(result)
                del result
            # This frame must not keep arguments or result alive.
            del future, function, arguments, keywords
        with self._lock:
            if not self._closed:
                self._threads.remove(threading.current_thread())


def thread_error(name: str, error: Exception) -> ResourceError:
    """Return the error for a thread or event loop that the system refuses to create."""
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    limit = "open files (ulimit -n)" if files else "processes (ulimit -u)"
    return ResourceError(
        f"{name}: a thread could not be started ({error}); raise the limit of {limit} or of the "
        "container, or use fewer Checkpointers at a time",
        found=str(error),
    )


def raisable(error: BaseException) -> BaseException:
    """Return the error, wrapped if it is a `StopIteration`, which asyncio futures refuse."""
    if not isinstance(error, StopIteration):
        return error
    instead = RuntimeError(f"a function raised StopIteration({error.value!r})")
    instead.__cause__ = error
    instead.__notes__ = list(getattr(error, "__notes__", ()))
    return instead


def called(function: Callable[..., Any]) -> str:
    """Return the name of a call, without a partial's arguments, which may be credentials."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


class Outcome(Future[T]):
    """A future that one thread resolves and others wait for without taking its lock.

    Cancelling a wait does not cancel the future.
    """

    # A signal handler may raise inside `threading.Condition.__enter__`, which is Python code, after
    # the lock was taken. The lock then stays taken, and the engine could never resolve the future.
    # So only `add_done_callback` takes it, which the main thread must not call once the engine can
    # see the future. Waits take a latch instead, which resolving does not need.
    # (test_ctrl_c_inside_a_condition_leaves_the_engine_alive)

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self._outcome: tuple[T | None, BaseException | None] | None = None
        self._traceback: TracebackType | None = None
        self._latch = threading.Lock()
        self._latch.acquire()

    def done(self) -> bool:
        """Return whether the future is resolved."""
        return self._outcome is not None

    def cancel(self) -> bool:
        """Return False: only the resolving thread ends it."""
        return False

    def cancelled(self) -> bool:
        """Return False."""
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` seconds; return whether the future is resolved."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            # Poll: a latch stays taken if a signal interrupts another wait just after taking it.
            left_s = SIGNAL_CHECK_S if end is None else min(SIGNAL_CHECK_S, end - time.monotonic())
            if left_s <= 0:
                return False
            if self._latch.acquire(timeout=left_s):
                self._latch.release()
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, then return the error, or None for a result."""
        if not self.wait(timeout) or self._outcome is None:
            raise TimeoutError
        return self._outcome[1]

    def result(self, timeout: float | None = None) -> T:
        """Wait, then return the result or raise the error."""
        error = self.exception(timeout)
        if error is None:
            assert self._outcome is not None
            return cast(T, self._outcome[0])
        try:
            # With the original traceback: otherwise every raise adds its frames.
            raise error.with_traceback(self._traceback)
        finally:
            del self, error  # the traceback would keep both in a cycle

    def set_result(self, result: T) -> None:
        """Resolve the future with a result, once."""
        self._outcome = self._outcome or (result, None)
        super().set_result(result)
        self._latch.release()

    def set_exception(self, exception: BaseException | None) -> None:
        """Resolve the future with an error, once."""
        if self._outcome is None and exception is not None:
            self._traceback = exception.__traceback__
        self._outcome = self._outcome or (None, exception)
        super().set_exception(exception)
        self._latch.release()


def seen(waiter: asyncio.Future[Any]) -> None:
    """Retrieve the outcome, so that asyncio does not log it."""
    if not waiter.cancelled():
        waiter.exception()


async def finished(waiter: asyncio.Future[Any], *, timeout_s: float | None = None) -> bool:
    """Wait for the future through repeated cancellations; return whether it is done."""
    loop = asyncio.get_running_loop()
    end = None if timeout_s is None else loop.time() + timeout_s
    while not waiter.done():
        left = None if end is None else end - loop.time()
        if left is not None and left <= 0:
            return False
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((waiter,), timeout=left)
    return True
