"""Work that runs while its owner does something else, and that the owner ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from asyncckpt.flow.threads import finished

T = TypeVar("T")


class Beside(Generic[T]):
    """A coroutine that has been started; its owner ends it with `result`, `settled` or `stop`."""

    __slots__ = ("_task",)

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(_seen)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    async def result(self) -> T:
        """What it returned or raised; a cancellation of the waiter does not reach it."""
        await asyncio.wait((self._task,))
        return self._task.result()

    async def settled(self) -> None:
        """It has ended, in whatever way; a cancellation of the waiter does not reach it."""
        await asyncio.wait((self._task,))

    async def stop(self) -> None:
        """It was cancelled, if it had not ended, and has ended, however often the waiter is."""
        self._task.cancel()
        await finished(self._task)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
