"""The saves of one core that have not ended, and the failures that nobody has heard of."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Literal

from asyncckpt.checkpointer.pending import PendingSave
from asyncckpt.checkpointer.saves import SaveState
from asyncckpt.errors import UsageError
from asyncckpt.flow.engine import Engine, Job
from asyncckpt.options import SaveOptions
from asyncckpt.reports import SaveReport

logger = logging.getLogger("asyncckpt")


class InFlight:
    """Saves from their call until their end is known to somebody. Used from any thread."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may begin a save wherever its thread is.
        self._lock = threading.RLock()
        self._saves: dict[PendingSave, Literal[True]] = {}  # in the order of their calls

    def add(self, pending: PendingSave) -> None:
        """One more save is on its way."""
        with self._lock:
            self._saves[pending] = True

    def pending(self) -> list[PendingSave]:
        """Saves that have not ended."""
        return [pending for pending in self._all() if not pending.done()]

    def unseen_error(self) -> BaseException | None:
        """The first failure that nobody has heard of; it counts as heard from now on."""
        first: BaseException | None = None
        for pending in self._take_ended():
            error = pending._unseen_error()
            if error is not None:
                if first is None:
                    first = error
                else:
                    first.add_note(f"another save failed too: {error}")
        return first

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """After the block, the failure that nobody has heard of is raised.

        It comes before an error of the block itself, which becomes its note and context. If the
        block is cancelled or interrupted, the failure is left to whoever looks next.
        """
        try:
            yield
        except Exception as error:
            failure = self.unseen_error()
            if failure is None:
                raise
            failure.add_note(f"closing failed, too: {type(error).__name__}: {error}")
            raise failure  # noqa: B904 - the error is its context, not its cause
        self.raise_unseen()

    def raise_unseen(self, options: SaveOptions | None = None) -> None:
        """The failure of an earlier save that nobody has heard of is raised, once."""
        error = self.unseen_error()
        if error is None:
            return
        if options is not None and options.on_failed_save == "log":
            logger.error("an earlier save failed: %s", error)
            return
        raise error

    def admits(self, options: SaveOptions, location: str) -> bool:
        """Whether one more save may begin; False: it is to be skipped.

        Raises:
            UsageError: it may not, and `on_overlap` is ``"error"``.
        """
        if options.on_overlap == "wait" or not (pending := self.pending()):
            return True
        if options.on_overlap == "error":
            raise UsageError(
                f"{location}: another save is in flight ({pending[0]!r}) and "
                'on_overlap="error"; await it first',
                location=location,
            )
        return False

    def _all(self) -> list[PendingSave]:
        with self._lock:
            return list(self._saves)

    def _take_ended(self) -> list[PendingSave]:
        """The saves that have ended, each of which only one caller gets.

        Those that somebody waits for are left until that one has heard, or has given up.
        """
        ended = [pending for pending in self._all() if pending.done() and not pending._awaited()]
        with self._lock:
            return [pending for pending in ended if self._saves.pop(pending, False)]


def skipped(
    kind: type[PendingSave], engine: Engine, location: str, step: int | None
) -> PendingSave:
    """A save that ended before it began, because another one was in flight."""
    report = SaveReport(
        location=location,
        step=step,
        save_id="",
        leaf_count=0,
        array_count=0,
        nbytes=0,
        stored_nbytes=0,
        file_count=0,
        blocked_s=0.0,
        total_s=0.0,
        skipped=True,
        notes=("another save was in flight",),
    )
    job: Job[SaveReport] = Job(engine)
    job.future.set_result(report)
    staged: Future[None] = Future()
    staged.set_result(None)
    return kind(job, staged, SaveState(), location=location, step=step, skipped=True)
