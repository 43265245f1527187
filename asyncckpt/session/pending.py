"""A save that goes on in the background."""

# Rule 1: a failure is heard of by all who wait for the save when it fails, or else by one who looks
#   for failures later.
# Rule 2: whoever waits is a listener from before the save's end until it has marked the failure as
#   seen, so that nobody else is told in between; one that gives up waiting leaves it to others.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any

from asyncckpt.checkpointer.saves import SaveState
from asyncckpt.errors import UsageError
from asyncckpt.flow.engine import Job, wait_quietly
from asyncckpt.flow.threads import finished
from asyncckpt.reports import Progress, SaveReport


class PendingSave:
    """A save whose state was taken; awaiting it gives the `SaveReport` once it is durable.

    Attributes:
        location: path or URL of the checkpoint to be.
        step: its step, None for one-shot saves.
        skipped: nothing is being saved: another save was in flight (`on_overlap="skip"`).
    """

    def __init__(
        self,
        job: Job[SaveReport],
        staged: Future[None],
        state: SaveState,
        *,
        location: str,
        step: int | None,
        skipped: bool = False,
    ) -> None:
        self._job = job
        self._staged = staged
        self._state = state
        self._seen = False
        self._listeners: set[object] = set()
        self.location = location
        self.step = step
        self.skipped = skipped

    def __repr__(self) -> str:
        name = f"step {self.step}" if self.step is not None else self.location
        if self.skipped:
            return f"<PendingSave {name}: skipped>"
        if not self.done():
            return f"<PendingSave {name}: {self._state.progress}>"
        error = self._job.future.exception()
        return f"<PendingSave {name}: {'committed' if error is None else f'failed: {error}'}>"

    def __await__(self) -> Generator[Any, None, SaveReport]:
        """The report, once the checkpoint is durable.

        Cancelling or timing out this await stops the waiting only; `cancel` aborts the save.

        Raises:
            SaveError, StoreError, …: the save failed; every await of it raises the same error.
        """
        return self._wait().__await__()

    def done(self) -> bool:
        """Whether the save has ended, in success or failure."""
        return self._job.done()

    def cancel(self) -> bool:
        """The save is asked to abort; False when it has ended already.

        The await then raises `SaveAbortedError` after the clean-up, or returns the report where
        publication had begun.
        """
        if self.done():
            return False
        self._job.cancel()
        return True

    @property
    def progress(self) -> Progress:
        """How far it has come."""
        return self._state.progress

    def future(self) -> asyncio.Future[SaveReport]:
        """An `asyncio.Future` of the running loop; cancelling it stops the waiting only."""
        return asyncio.ensure_future(self._wait())  # noqa: TID251 - owned by the caller

    async def _wait(self) -> SaveReport:
        waiter = asyncio.wrap_future(self._job.future)
        with self._listening():
            try:
                await asyncio.wait((waiter,))
            except asyncio.CancelledError:
                waiter.cancel()  # detaches; the job's own future cannot be cancelled
                raise
            self._seen = True
        return waiter.result()

    async def _wait_owned(self) -> SaveReport:
        """The report; a cancellation aborts the save and waits for its clean-up."""
        self._seen = True
        return await self._job.wait()

    async def _wait_staged(self) -> None:
        """The state was copied, or the save has failed, which is raised.

        Cancellation: aborts the save and waits for its clean-up.
        """
        waiter = asyncio.wrap_future(self._staged)
        with self._listening():
            try:
                await asyncio.wait((waiter,))
            except asyncio.CancelledError:
                waiter.cancel()
                self._seen = True
                self._job.cancel()
                await self._settled()
                raise
            self._raise_early()

    async def _settled(self) -> None:
        waiter = asyncio.wrap_future(self._job.future)
        await finished(waiter)
        waiter.exception()

    def _raise_early(self) -> None:
        if self._job.done() and self._job.future.exception() is not None:
            self._seen = True
            self._job.future.result()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Inside the block, the caller waits for the end of the save, and hears if it fails."""
        listener = object()
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def _awaited(self) -> bool:
        """Whether somebody waits, who has not heard yet."""
        return bool(self._listeners)

    def _unseen_error(self) -> BaseException | None:
        """The failure that nobody has heard of; from now on it counts as heard."""
        if self._seen or not self.done():
            return None
        error = self._job.future.exception()
        if error is not None:
            self._seen = True
        return error


class BlockingPendingSave(PendingSave):
    """A `PendingSave` for callers without an event loop."""

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """The report, once the checkpoint is durable. Blocking.

        Ctrl-C stops the waiting only; `cancel` aborts the save.

        Raises:
            TimeoutError: it is not done after `timeout_s` seconds; it goes on.
            UsageError: called from a callback, on the engine's own thread; it goes on.
            SaveError, StoreError, …: the save failed.
        """
        with self._listening():
            if not wait_quietly(self._job.future, timeout_s):
                raise TimeoutError(f"{self!r} is not done after {timeout_s} s; it goes on")
            self._seen = True
        return self._job.future.result()

    def _own_result(self) -> SaveReport:
        """As `_wait_owned`, blocking; Ctrl-C aborts the save and waits for its clean-up."""
        self._seen = True
        return self._job.result()

    def _await_staged(self) -> None:
        """As `_wait_staged`, blocking; Ctrl-C aborts the save and waits for its clean-up.

        Raises:
            UsageError: called from a callback, on the engine's own thread; nothing is saved.
        """
        with self._listening():
            try:
                self._job.refuse_own_thread()
                wait_quietly(self._staged)
            except UsageError:  # which has cancelled the save
                self._seen = True
                raise
            except KeyboardInterrupt:
                self._seen = True
                self._job.abort()
                raise
            self._raise_early()
