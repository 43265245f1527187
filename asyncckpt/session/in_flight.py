"""Saves of one session that have not ended, and failures that no caller has seen."""

from __future__ import annotations

from typing import Literal

from asyncckpt.errors import UsageError
from asyncckpt.flow.engine import Engine, Job
from asyncckpt.flow.shield import said
from asyncckpt.log import logger
from asyncckpt.options import SaveOptions
from asyncckpt.reports import SaveReport
from asyncckpt.save.save import SaveState
from asyncckpt.session.pending import PendingSave


class InFlight:
    """Saves from their call until a caller has seen their outcome. Used from any thread."""

    # A failure is raised exactly once, however threads interleave: a save that ends during a check
    # is left to the next check, and `pop` hands each save to one caller. No lock is needed, which a
    # signal handler could find taken: each access is one atomic operation of the dictionary.

    def __init__(self) -> None:
        self._saves: dict[PendingSave, Literal[True]] = {}  # in the order of their calls

    def add(self, pending: PendingSave) -> None:
        """Add a save that has begun."""
        self._saves[pending] = True

    def pending(self) -> list[PendingSave]:
        """Return the saves that have not ended."""
        return [pending for pending in list(self._saves) if not pending.done()]

    def unseen_error(self) -> BaseException | None:
        """Return the first failure that no caller has seen, with its save, and count it as seen.

        Skips saves that callers are waiting for: the failure is theirs unless they stop waiting.
        """
        first: BaseException | None = None
        for pending in list(self._saves):
            if not pending.done() or pending._listeners:
                continue
            error = pending._unseen_error() if self._saves.pop(pending, False) else None
            if error is not None and first is None:
                first = error
                first.add_note(f"this ended the save of {pending.location}")
            elif error is not None and first is not None:
                first.add_note(f"another save failed too: {error}")
        return first

    def raise_unseen(self, options: SaveOptions | None = None) -> None:
        """Raise the failure of an earlier save that no caller has seen, once."""
        error = self.unseen_error()
        if error is None:
            return
        if options is not None and options.on_failed_save == "log":
            logger.error("an earlier save failed: %s", said(error))
            return
        raise error


def overlap_error(location: str, other: PendingSave | None = None) -> UsageError:
    """Return the error for a save that may not begin while another one is in flight."""
    which = "" if other is None else f" ({other!r})"
    return UsageError(
        f'{location}: another save is in flight{which} and on_overlap="error"; await it first',
        location=location,
    )


def skipped_report(location: str, step: int | None) -> SaveReport:
    """Return the report of a save skipped because another one was in flight."""
    return SaveReport(location, step, skipped=True, notes=("another save was in flight",))


def skipped(engine: Engine, report: SaveReport) -> PendingSave:
    """Return a save that was skipped because another one was in flight."""
    job: Job[SaveReport] = Job(engine)
    job.future.set_result(report)
    state = SaveState()
    state.release_leaves()
    return PendingSave(job, state, location=report.location, step=report.step)
