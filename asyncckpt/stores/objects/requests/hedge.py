"""Hedged requests: a second request races a slow one, and neither is left running."""

# Rule: both tasks have ended when `race` returns or raises, even if it is cancelled repeatedly.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from asyncckpt.flow.threads import seen

T = TypeVar("T")


async def race(
    first: Coroutine[Any, Any, T], second: Callable[[], Coroutine[Any, Any, T] | float]
) -> T:
    """Return the result of the request that succeeds first.

    While the first one runs, calls `second()`, which returns another request to run in parallel, or
    the seconds after which to call it again. The first success cancels the other request; after a
    failure, the other one is awaited.

    Cancellation: cancels both requests and waits for their ends, through repeated cancellations.

    Raises:
        Exception: of the first request, if both failed.
    """
    tasks = [asyncio.create_task(first)]
    try:
        while len(tasks) == 1 and not tasks[0].done():
            if isinstance(found := second(), float):
                await asyncio.wait(tasks, timeout=found)
            else:
                tasks.append(asyncio.create_task(found))
        while not any(map(_succeeded, tasks)):
            if not (pending := [task for task in tasks if not task.done()]):
                break
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        return next((task for task in tasks if _succeeded(task)), tasks[0]).result()
    finally:
        await _end(tasks)
        tasks.clear()  # breaks the reference cycle of error, traceback and frame


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel all tasks and wait for them; raise a cancellation of the caller afterwards."""
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
