"""Hedged requests: a second request races a slow one, and neither is left behind.

A body that is on its way when nobody wants it any more may land first.
"""

# Rule: both tasks have ended when `race` returns or raises, even if it is cancelled repeatedly.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from asyncckpt.flow.threads import finished, seen

T = TypeVar("T")


async def race(
    start: Callable[[], Coroutine[Any, Any, T]],
    delays_s: Iterable[float],
    second: Callable[[], Coroutine[Any, Any, T] | None],
) -> T:
    """Return the result of the request that succeeds first.

    `start()` runs at once. If it has not ended after a delay, `second()` is called for the same
    request again, to run in parallel; if it returns None, it is called again after the next delay.
    The first success cancels the other request; after a failure, the other one is awaited.

    Args:
        start: makes the coroutine of the first request.
        delays_s: seconds before each call of `second`.
        second: makes the coroutine of the second request, or declines.

    Cancellation: cancels both requests and waits for their ends, through repeated cancellations.

    Raises:
        Exception: of the first request, if both failed.
    """
    tasks = [asyncio.create_task(start())]
    try:
        for delay_s in delays_s:
            await asyncio.wait(tasks, timeout=delay_s)
            if tasks[0].done():
                break
            if (coroutine := second()) is not None:
                tasks.append(asyncio.create_task(coroutine))
                break
        while not any(map(_succeeded, tasks)):
            if not (pending := [task for task in tasks if not task.done()]):
                break
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        return next((task for task in tasks if _succeeded(task)), tasks[0]).result()
    finally:
        await _end(tasks)
        tasks.clear()  # an error holds this frame by its traceback: it would be a cycle


async def landed(sending: Coroutine[Any, Any, T], cancelled: Callable[[], float]) -> T:
    """Return the coroutine's result; one whose caller is cancelled gets some time to end.

    Cancellation: calls `cancelled`, waits for as many seconds as it returns, cancels the coroutine
    and waits for its end.
    """
    task = asyncio.create_task(sending)
    try:
        await asyncio.wait((task,))
        return task.result()
    except asyncio.CancelledError:
        if not await finished(task, timeout_s=cancelled()):
            await _end((task,))
        seen(task)  # the caller gets the cancellation instead
        raise
    finally:
        del task  # an error holds this frame by its traceback: it would be a cycle


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel all tasks and wait for them; raise a cancellation of the caller only then."""
    for task in tasks:
        task.cancel()
    cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        seen(task)  # only the winner or the cancellation counts
    if cancelled:
        raise asyncio.CancelledError
