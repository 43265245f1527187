"""A slow request is raced by a second one, and nothing of either is left behind."""

# Rule 1: both tasks have ended when `first` returns or raises, however often it is cancelled.
# Rule 2: second requests are paid for: they are a fixed share of all requests, so that a server
#   that is slow for everybody does not get twice the load.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class HedgeBudget:
    """Allows second requests for a share of all requests, a few of them at once.

    Args:
        share: second requests per request, in the long run.
        burst: second requests that can be saved up; one is there from the beginning.
        at_once: second requests in flight, at most.
    """

    __slots__ = ("_at_once", "_burst", "_share", "_tokens", "in_flight", "spent")

    def __init__(self, *, share: float, burst: float, at_once: int) -> None:
        self._share = share
        self._burst = burst
        self._at_once = at_once
        self._tokens = min(1.0, burst)
        self.in_flight = 0
        self.spent = 0

    def __repr__(self) -> str:
        return (
            f"HedgeBudget({self._tokens:.2f} left, {self.in_flight} in flight, {self.spent} in all)"
        )

    def earn(self) -> None:
        """One more request was made."""
        self._tokens = min(self._burst, self._tokens + self._share)

    def take(self) -> bool:
        """Whether a second request may be made now; `give_back` then says that it has ended."""
        if self._tokens < 1.0 or self.in_flight >= self._at_once:
            return False
        self._tokens -= 1.0
        self.in_flight += 1
        self.spent += 1
        return True

    def give_back(self) -> None:
        """A second request has ended."""
        self.in_flight -= 1


async def first(
    start: Callable[[], Coroutine[Any, Any, T]],
    delay_s: float | None,
    second: Callable[[], Coroutine[Any, Any, T] | None],
) -> T:
    """The result of the request that succeeds first.

    `start()` runs at once. If it has not ended after `delay_s` seconds, `second()` is asked for
    another request of the same, which runs beside it unless it is None. Whichever succeeds first
    ends the other; if one fails, the other is waited for.

    Args:
        start: makes the coroutine of the first request.
        delay_s: seconds; None never makes a second one.
        second: makes the coroutine of the second request, or declines; called at most once.

    Cancellation: both requests are cancelled and have ended, through repeated cancellations.

    Raises:
        Exception: of the request that was made first, if both failed.
    """
    if delay_s is None:
        return await start()
    tasks = [asyncio.create_task(start())]
    try:
        await asyncio.wait(tasks, timeout=delay_s)
        if not tasks[0].done() and (coroutine := second()) is not None:
            tasks.append(asyncio.create_task(coroutine))
        while not any(map(_succeeded, tasks)):
            if not (pending := [task for task in tasks if not task.done()]):
                break
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(tasks)
    try:
        return next((task for task in tasks if _succeeded(task)), tasks[0]).result()
    finally:
        tasks.clear()  # an error holds this frame through its traceback; in a cycle it would stay


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """All tasks have ended; a cancellation of the caller is raised only then."""
    for task in tasks:
        task.cancel()
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: the winner, or the caller's cancellation, is what counts
    if cancelled:
        raise asyncio.CancelledError
