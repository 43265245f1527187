"""Worker threads whose work is never left behind by a cancelled await.

`asyncio.to_thread` returns at once when it is cancelled while its thread still reads the buffer;
`loop.run_in_executor` refuses work once the interpreter has begun to exit. `Workers` does neither.
"""

# Rule 1: whoever awaits `run` gets control back only when the thread no longer touches the
#   arguments; the one exception is a thread stuck past `abandon_s`, which raises
#   ThreadAbandonedError with the future that tells when it has ended after all.
# Rule 2: threads are daemons, named, and joined by `close`; an abandoned one is replaced.

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asyncckpt.errors import SaveError

T = TypeVar("T")
P = ParamSpec("P")

ABANDON_S = 30.0
"""How long a cancelled await waits for a thread stuck in a system call (a dead NFS mount)."""

ABANDONED_JOIN_S = 0.1
"""Once a thread was abandoned, which one is unknown: each gets this long to end."""


class ThreadAbandonedError(SaveError):
    """A worker thread did not come back from a system call; it was replaced.

    Attributes:
        future: resolves if the thread ever ends; until then its buffers must not be used again.
    """

    future: Future[Any]


class Workers(Executor):
    """A fixed number of daemon threads that serve one first-in, first-out queue."""

    def __init__(self, count: int, name: str, *, abandon_s: float = ABANDON_S) -> None:
        self._name = name
        self._abandon_s = abandon_s
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._started = 0
        self._count = count
        self._abandoned = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"Workers({self._name!r}, {self._count} threads)"

    @property
    def count(self) -> int:
        """Number of threads that serve the queue."""
        return self._count

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The call is queued; the future resolves with its result."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: worker threads are closed")
            if len(self._threads) < self._count:
                self._start_thread()
        self._queue.put((future, lambda: fn(*args, **kwargs)))
        return future

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of the call, made in a worker thread.

        Cancellation: a call that has not begun is dropped; one that runs is waited for, through
        repeated cancellations, and then `CancelledError` is raised.

        Raises:
            ThreadAbandonedError: cancelled, and the thread did not end within `abandon_s`.
        """
        future = self.submit(fn, *args, **kwargs)
        waiter = asyncio.wrap_future(future)
        try:
            await asyncio.wait((waiter,))
        except asyncio.CancelledError:
            # wrap_future passes a cancellation of the waiter on; here the call itself is asked.
            if not future.cancel() and not await finished(waiter, timeout_s=self._abandon_s):
                self._replace_thread()
                waiter.add_done_callback(_seen)
                error = ThreadAbandonedError(
                    f"{self._name}: a thread was stuck in {_called(fn)} for "
                    f"{self._abandon_s:.0f} s after it was cancelled; it was abandoned and its "
                    "buffers are not used again. The file system does not answer: check the mount"
                )
                error.future = future
                raise error from None
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what the caller hears of
                with contextlib.suppress(asyncio.CancelledError):
                    waiter.exception()
            raise
        return waiter.result()

    def abandon(self, future: Future[Any]) -> None:
        """Nobody waits for this call any more: while it runs, another thread takes its place."""
        if not future.done():
            self._replace_thread()
            future.add_done_callback(self._retire_thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more work is accepted; queued work is done, and with `wait` the threads have ended.

        An abandoned thread is not waited for.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        if wait:
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(None if not self._abandoned else ABANDONED_JOIN_S)

    def _start_thread(self) -> None:
        self._started += 1
        thread = threading.Thread(
            target=self._serve, name=f"{self._name}-{self._started}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _replace_thread(self) -> None:
        # Which thread is stuck does not matter: one more takes its place in the queue.
        with self._lock:
            if not self._closed:
                self._count += 1
                self._abandoned += 1
                self._start_thread()

    def _retire_thread(self, _: Future[Any]) -> None:
        # What was abandoned has come back: one thread is too many, whichever it is.
        with self._lock:
            if not self._closed:
                self._count -= 1
                self._abandoned -= 1
                self._queue.put(None)

    def _serve(self) -> None:
        self._work()
        with self._lock:
            if not self._closed:
                self._threads.remove(threading.current_thread())

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            del item
            if not future.set_running_or_notify_cancel():
                del future, call
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # Neither the arguments nor the result may outlive the call in this frame.
            del future, call


def _called(function: Callable[..., Any]) -> str:
    """What a call is, without the values that a partial holds: they may be credentials."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _seen(waiter: asyncio.Future[Any]) -> None:
    if not waiter.cancelled():
        waiter.exception()


async def finished(waiter: asyncio.Future[Any], *, timeout_s: float | None = None) -> bool:
    """Whether the future is done, after waiting for it through repeated cancellations."""
    loop = asyncio.get_running_loop()
    end = None if timeout_s is None else loop.time() + timeout_s
    while not waiter.done():
        left = None if end is None else end - loop.time()
        if left is not None and left <= 0:
            return False
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((waiter,), timeout=left)
    return True
