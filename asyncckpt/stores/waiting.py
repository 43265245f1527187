"""Waiting for worker threads: for several at once, and in spite of cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncckpt.errors import SaveError
from asyncckpt.flow.shield import leading_error
from asyncckpt.flow.threads import ABANDON_S, Workers, finished


async def side_by_side(workers: Workers, calls: list[Callable[[], None]]) -> None:
    """All calls were made, each in a worker thread.

    Raises:
        StoreError: the first failure; the others are its notes.
    """
    if len(calls) == 1:
        await workers.run(calls[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(workers.run(call))
    except BaseExceptionGroup as errors:
        raise leading_error(errors) from None


async def to_the_end(workers: Workers, call: Callable[[], None]) -> None:
    """The call was made in a worker thread, also if this task was cancelled meanwhile.

    Cancellation: raised when the call has ended.

    Raises:
        SaveError: cancelled, and the thread did not come back within `ABANDON_S`.
    """
    waiter = asyncio.wrap_future(workers.submit(call))
    try:
        await asyncio.wait((waiter,))
    except asyncio.CancelledError:
        if not await finished(waiter, timeout_s=ABANDON_S):
            raise SaveError(
                f"cleaning up did not end within {ABANDON_S:.0f} s: the file system does not "
                "answer; check the mount. What is left is removed by the next sweep"
            ) from None
        waiter.exception()
        raise
    waiter.result()
