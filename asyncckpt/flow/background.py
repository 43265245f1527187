"""Background tasks: coroutines that run while their owner does other work."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from asyncckpt.flow.threads import finished, seen

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """A background task; its owner awaits `result`, `settled` or `stop`."""

    __slots__ = ("_task",)

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.create_task(coroutine)
        self._task.add_done_callback(seen)

    @property
    def done(self) -> bool:
        """Whether the task has ended."""
        return self._task.done()

    async def result(self) -> T:
        """Return the result or raise the error; cancelling the wait does not cancel the task."""
        await self.settled()
        return self._task.result()

    def cancel(self) -> None:
        """Cancel the task."""
        self._task.cancel()

    async def settled(self) -> None:
        """Wait for the end, ignoring the outcome; cancelling the wait does not cancel the task."""
        await asyncio.wait((self._task,))

    async def stop(self) -> None:
        """Cancel the task and wait for its end, through repeated cancellations."""
        self.cancel()
        await finished(self._task)
