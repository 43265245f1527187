"""Errors for processes that are missing from a round: closed, silent or late."""

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.coordinators.group import Group
from asyncckpt.errors import SaveError, SaveOutcomeUnknownError, UsageError


def closed_error(group: Group, closed: Sequence[int]) -> UsageError:
    """Return the error for processes that have closed their `Checkpointer`."""
    has = "has" if len(closed) == 1 else "have"
    return UsageError(
        f"{group.listed(closed)} {has} closed the Checkpointer with which this call was made here; "
        "nothing was committed. Make the same calls on all processes, then close it on all",
        expected=group.process_count,
        found=group.process_count - len(closed),
    )


def silent_error(group: Group, silent: Sequence[int], silence_s: float) -> SaveError:
    """Return the error for processes that post no beats any more."""
    return SaveError(
        f"{group.listed(silent)} gave no sign of life for {silence_s:g} s (silence_s) and may have "
        "died; nothing was committed. Restart the job",
        expected=group.process_count,
        found=group.process_count - len(silent),
    )


def late_error(group: Group, late: Sequence[int], arrival_s: float) -> SaveError:
    """Return the error for processes that have not made a call in time."""
    come = group.process_count - len(late)
    return SaveError(
        f"{come} of {group.process_count} processes made this call; {group.listed(late)} did not "
        f"within {arrival_s:g} s (arrival_s). Call it on all processes, or pass "
        'coordinator="single" where one process is to do it alone',
        expected=group.process_count,
        found=come,
    )


def unknown_error(group: Group, call: str) -> SaveOutcomeUnknownError:
    """Return the error for a process 0 that does not say how what it decided to do has ended."""
    return SaveOutcomeUnknownError(
        f"{group.named(0)} has fallen silent in {call}, after it had decided to commit: whether "
        "that was done is unknown. Restart the job, and look at steps() first"
    )
