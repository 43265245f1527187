"""Calls that a job makes in the thread that waits for it.

JAX's collectives must be launched by one thread in one order: that of the caller, which launches
those of the training, too.
"""

# Rule: a call runs only while the caller waits for the job: it needs no lock against the caller.

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
    """The thread that waits for a job, as seen by the job.

    Attributes:
        wake: resolves once there is a call to make, or `poke` was called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.wake: Outcome[None] = Outcome()

    async def run(self, function: Callable[[], T]) -> T:
        """Call the function in the thread that waits, and return its result. For the job.

        Cancellation: returns at once; a call that has begun goes on, and its result is dropped.
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
        """Make the pending calls. For the thread that waits, after `wake`."""
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
            # What else is raised is of a signal handler: the caller's, who then aborts the job. It
            # would end the engine's thread. (test_an_interrupted_call_of_a_job_is_its_callers)
