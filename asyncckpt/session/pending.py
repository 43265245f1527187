"""A save that runs in the background."""

# Rule 1: a failure is raised by all calls that are waiting for the save when it fails, or else by
#   one later call that checks for failures (`InFlight.unseen_error`).
# Rule 2: a waiting call is a listener from before the end of the save until it has marked the
#   failure as seen: a check by another thread in between finds the listener and leaves the failure
#   to it. A call that gives up waiting stops listening first, so that a later check finds the
#   failure.
# Rule 3: a failure that no call has raised when its save is dropped, or the process ends, becomes a
#   warning, like asyncio's for a task whose exception was never retrieved.

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Generator, Iterator
from typing import Any

from asyncckpt.errors import SaveAbortedError, UsageError
from asyncckpt.flow.driver import blocks_here
from asyncckpt.flow.engine import Job, call_at_exit, ended, wait_quietly, warn
from asyncckpt.reports import Progress, SaveReport
from asyncckpt.save.save import SaveState


class PendingSave:
    """A save with a snapshot of the state; awaiting it gives the `SaveReport` once it is durable.

    On an object store, files that only other programs read may follow: `Checkpointer.wait` and
    `close` wait for them.

    Attributes:
        location: path or URL of the new checkpoint.
        step: its step, None for one-shot saves.
    """

    _seen = True  # until it is made: a signal handler's exception may come before

    def __init__(
        self, job: Job[SaveReport], state: SaveState, *, location: str, step: int | None
    ) -> None:
        self._job = job
        self._state = state
        self._listeners: set[object] = set()
        self.location = location
        self.step = step
        self._blocks = blocks_here()
        self._seen = False
        _alive.add(self)

    def __del__(self) -> None:
        if not self._seen:
            self._warn_unseen()

    def __repr__(self) -> str:
        name = f"step {self.step}" if self.step is not None else self.location
        if self.skipped:
            return f"<PendingSave {name}: skipped>"
        if not self.done():
            return f"<PendingSave {name}: {self._state.progress}>"
        error = self._job.future.exception()
        return f"<PendingSave {name}: {'committed' if error is None else f'failed: {error}'}>"

    def __await__(self) -> Generator[Any, None, SaveReport]:
        """Wait until the checkpoint is durable, and return the report.

        Cancelling or timing out this await only stops the waiting; `cancel` aborts the save.

        Raises:
            SaveError, StoreError, …: the save failed; every await of it raises the same error.
        """
        return self._wait().__await__()

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved, because another save was in flight (`on_overlap="skip"`)."""
        future = self._job.future
        return future.done() and future.exception() is None and future.result().skipped

    def done(self) -> bool:
        """Return whether the save has ended, in success or failure."""
        return self._job.done()

    def cancel(self) -> bool:
        """Ask the save to abort; return False if it has already ended, or in a forked child.

        Awaiting it then raises `SaveAbortedError` after the clean-up, or returns the report if
        publication had begun; other calls do not raise this error.
        """
        if self.done() or self._job.forked:
            return False
        self._job.cancel()
        return True

    @property
    def progress(self) -> Progress:
        """Progress of the save."""
        return self._state.progress

    def future(self) -> asyncio.Future[SaveReport]:
        """Return an `asyncio.Future` of the running loop; cancelling it only stops the waiting.

        Raises:
            UsageError: no event loop is running in this thread.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                f"{self!r}: future() belongs to an event loop, and none is running in this "
                "thread; await it inside a coroutine, or use asyncckpt.blocking, whose "
                "PendingSave has result()"
            ) from None
        return asyncio.ensure_future(self._wait())  # noqa: TID251 - owned by the caller

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable, and return the report. Blocking.

        Only for saves that `asyncckpt.blocking` has begun. Ctrl-C only stops the waiting; `cancel`
        aborts the save.

        Raises:
            TimeoutError: the save is not done after `timeout_s` seconds; it continues.
            UsageError: the save was begun in an event loop, or this is the engine's own thread,
                which makes callbacks; the save continues.
            SaveError, StoreError, …: the save failed.
        """
        if not self._blocks:
            raise UsageError(
                f"{self!r}: result() would block the event loop; write `report = await pending`, "
                "or use asyncckpt.blocking, whose PendingSave has result()"
            )
        with self._listening():
            if not wait_quietly(self._job.future, timeout_s):
                raise TimeoutError(f"{self!r} is not done after {timeout_s} s; it continues")
            self._seen = True
        return self._report()

    async def _wait(self) -> SaveReport:
        with self._listening():
            await ended(self._job.future)
            self._seen = True
        return self._report()

    def _report(self) -> SaveReport:
        """Return the report of the ended save, or raise its failure."""
        if isinstance(self._job.future.exception(), asyncio.CancelledError):
            # The caller's task, which nothing has cancelled, must not seem to be.
            raise SaveAbortedError(
                f"{self.location}: the save was cancelled before it had begun; earlier checkpoints "
                "are intact",
                location=self.location,
            )
        return self._job.future.result()

    async def _wait_owned(self) -> SaveReport:
        """Return the report; a cancellation aborts the save and waits for its clean-up."""
        self._seen = True
        try:
            return await self._job.wait()
        except asyncio.CancelledError as error:
            if self._job.done() and error is self._job.future.exception():
                return self._report()
            raise

    async def _wait_staged(self) -> None:
        """Wait until the state is staged, and raise a failure that prevented it.

        Cancellation, an exception of a signal handler, and blocking the engine's own thread abort
        the save.
        """
        with self._listening():
            try:
                if blocks_here():
                    self._job.refuse_own_thread()
                await ended(self._state.staged)
            except GeneratorExit:
                self.cancel()
                raise
            except BaseException:
                self._seen = True
                await self._job.abort()
                raise
            if not self._state.staged.result() and self._job.future.exception() is not None:
                self._seen = True
                self._report()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Count the caller as a listener inside the block."""
        self._job.refuse_fork()
        listener = object()
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def _unseen_error(self) -> BaseException | None:
        """Return the failure if no call has seen it, and count it as seen."""
        if self._seen or not self.done():
            return None
        error = self._job.future.exception()
        if error is not None:
            self._seen = True
        aborted = isinstance(error, (SaveAbortedError, asyncio.CancelledError))
        asked_for = self._job.cancelled and aborted
        return None if asked_for else error

    def _warn_unseen(self) -> None:
        """Log the failure and warn of it if no call has raised it; count it as seen."""
        if self._job.forked:  # the save belongs to the parent
            return
        error = self._unseen_error()
        if error is None:
            return
        warn(
            f"{self.location}: the save failed, and no call has raised its error "
            f"({type(error).__name__}: {error}); await the PendingSave, or close the Checkpointer, "
            "to get it as an exception",
            logging.ERROR,
        )


_alive: weakref.WeakSet[PendingSave] = weakref.WeakSet()


def _warn_at_exit() -> None:
    # The engines have already ended their saves (`engine._drain_all`).
    for pending in tuple(_alive):
        pending._warn_unseen()
        pending._seen = True  # modules may be gone by the time of `__del__`


call_at_exit(_warn_at_exit)
