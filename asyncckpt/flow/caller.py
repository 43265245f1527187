"""Calls that a job runs in the thread that waits for it.

JAX's collectives must be launched by one thread in one order, so the caller's thread, which also
launches the training's, launches the job's.
"""

# Rule: a call runs only while the caller waits for the job, so it needs no lock against the caller.

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncckpt.flow.threads import Outcome, raisable

T = TypeVar("T")


class CallerThread:
    """The thread that waits for a job, as the job sees it.

    Attributes:
        wake: resolves once there is a call to run, or `poke` was called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.wake: Outcome[None] = Outcome()

    async def run(self, function: Callable[[], T]) -> T:
        """Call the function in the waiting thread, and return its result. For the job.

        Cancellation: returns at once; a running call continues, and its result is dropped.
        """
        done: Future[T] = Future()
        self._calls.append((function, done))
        self.poke()
        return await asyncio.wrap_future(done)

    def poke(self) -> None:
        """Wake the thread. From any thread."""
        with self._lock:
            if not self.wake.done():
                self.wake.set_result(None)

    def serve(self) -> None:
        """Run the pending calls. For the waiting thread, after `wake`."""
        with self._lock:
            self.wake = Outcome()
        while self._calls:
            function, done = self._calls.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(raisable(error))
            # A signal handler's BaseException is the caller's, who then aborts the job: in the
            # engine it would end the thread. (test_an_interrupted_call_of_a_job_is_its_callers)
