"""Retention: after each save of a run, the steps that its policy does not keep are deleted."""

# Rule 1: the save that called is durable already: whatever goes wrong here is a note in its report,
#   and a policy that fails, or answers with anything but steps, deletes nothing.
# Rule 2: a step is deleted only if its record is still the one that the decision was made on.
# Rule 3: what has no record that this release reads is no step, and is left alone.
# Rule 4: a process that was taken over deletes nothing: every deletion is one under its claim.
# Rule 5: a step is unlisted, durably, inside the save; its bytes go in the background. Before the
#   next step is unlisted the last removal has ended: a disk never holds more than the steps kept,
#   the one just saved, and those of one removal.

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FencedError,
    UnsupportedFormatError,
)
from asyncckpt.flow.background import BackgroundTask
from asyncckpt.flow.engine import Job, ended
from asyncckpt.flow.shield import mapped
from asyncckpt.format.record import RECORD_TAIL_NBYTES, decode_record
from asyncckpt.ports import Removal
from asyncckpt.reports import SaveReport
from asyncckpt.retention import Retention, concerns, uses_metrics
from asyncckpt.runtime import Runtime
from asyncckpt.save.save import record_of
from asyncckpt.session.root import Root
from asyncckpt.session.steps import Steps

logger = logging.getLogger("asyncckpt")


@dataclass(frozen=True, slots=True)
class Seen:
    """A step as its record described it: the record's checksum, and the metrics in it."""

    seal: bytes
    metrics: Mapping[str, float]


@dataclass(eq=False, repr=False)
class Pruner:
    """Applies the policy of one run.

    Records are read of steps that other processes have saved, once, and of the steps that are
    about to be deleted. A deletion by another process is noticed at the next save; a replacement
    when the step is about to be deleted.

    Attributes:
        policy: which steps to keep.
        runtime: engine and threads.
        root: where the steps are.
        steps: finds them.
        pinned: names that are being read now, which stay, kept up to date by `Reads`.
    """

    policy: Retention
    runtime: Runtime
    root: Root
    steps: Steps
    pinned: Mapping[str, int]

    def __post_init__(self) -> None:
        self._uses_metrics = uses_metrics(self.policy)
        self._seen: dict[int, Seen] = {}
        self._own: dict[int, None] = {}  # steps that this run has saved, the latest last
        self._looking: BackgroundTask[list[int]] | None = None
        self._removing: Job[None] | None = None
        self._late_notes: list[str] = []  # of removals, for the next report
        self._logged: set[str] = set()

    def look(self) -> None:
        """List the steps while a save is being committed. As `Retaining.look`.

        A step that appears meanwhile counts after the next save.
        """
        self._looking = BackgroundTask(self.steps.candidates())

    async def forget(self) -> None:
        """End the listing. As `Retaining.forget`."""
        looking, self._looking = self._looking, None
        if looking is not None:
            await looking.stop()

    async def retain(self, report: SaveReport, record: bytes) -> SaveReport:
        """Delete the steps that the policy does not keep after a save; never raises.

        Args:
            report: of the save.
            record: its commit record.

        Returns:
            The report, with the steps deleted and what a person should know.
        """
        saved = report.step
        if saved is None:
            return report
        self._own.pop(saved, None)
        self._own[saved] = None
        deleted: list[int] = []
        notes: list[str] = []
        try:
            await self.settle()
            notes, self._late_notes = self._late_notes, []
            self._seen[saved] = await self._described(record, self.root.location(saved))
            steps, reasons = await self._decide(saved)
            notes += reasons
            await self._unlist(steps, deleted, notes)
        except Exception as error:
            # Also what a store of somebody else raises: the save itself is durable.
            notes.append(f"no step was deleted: {error}")
        for note in notes:
            if note not in self._logged:
                self._logged.add(note)
                with contextlib.suppress(Exception):  # a log handler that fails
                    logger.warning("%s", note)
        return dataclasses.replace(
            report, deleted_steps=tuple(deleted), notes=(*report.notes, *notes)
        )

    async def settle(self) -> None:
        """Wait until no bytes are being removed in the background. From any thread."""
        if self._removing is not None:
            await ended(self._removing.future)

    async def _unlist(self, steps: list[int], deleted: list[int], notes: list[str]) -> None:
        removals: list[tuple[int, Removal]] = []
        try:
            for step in steps:
                if self.pinned.get(str(step)):
                    continue
                try:
                    # Forgotten, so that a step that has changed is read again after the next save.
                    seal = self._seen.pop(step).seal
                    removals.append((step, await self.steps.unlist(str(step), seal)))
                    deleted.append(step)
                    with contextlib.suppress(Exception):
                        name = _name(self.policy)
                        logger.info("deleted %s (%s)", self.root.location(step), name)
                except CheckpointNotFoundError:
                    continue
                except FencedError as error:
                    notes.append(f"no more steps were deleted: {error}")
                    break
                except Exception as error:
                    # Tried again after the next save.
                    notes.append(f"step {step} could not be deleted: {error}")
        finally:
            if removals:
                self._removing = self.runtime.engine.submit(lambda: self._remove(removals))

    async def _remove(self, removals: Sequence[tuple[int, Removal]]) -> None:
        for step, remove in removals:
            try:
                await remove()
            except Exception as error:
                note = (
                    f"step {step} was deleted, but not all of its bytes were removed: {error}; "
                    "the next sweep or 'asyncckpt gc' removes the rest"
                )
                self._late_notes.append(note)
                self._logged.add(note)
                logger.warning("%s", note)

    async def _decide(self, saved: int) -> tuple[list[int], list[str]]:
        """Return the steps to delete, and what a person should know about the decision."""
        known: dict[int, Seen | None] = dict(self._seen)
        looking, self._looking = self._looking, None
        listed = await (self.steps.candidates() if looking is None else looking.result())
        candidates = sorted({*listed, saved})

        async def read(step: int) -> None:
            known[step] = await self._read(step)

        unread = [step for step in candidates if step not in known]
        await mapped(read, unread, self.root.store.capabilities.reads)
        seen = {step: one for step in candidates if (one := known[step]) is not None}
        self._seen = seen
        # Where a run has gone back to an earlier step, those that it saves are newer than the
        # higher ones of the branch that it left, which would else push each of them out at once.
        others = [step for step in seen if step not in self._own]
        steps = [*others, *(step for step in self._own if step in seen)]
        metrics = {step: one.metrics for step, one in seen.items()}
        try:
            kept = _steps(self.policy.keep(tuple(steps), metrics))
            notes = concerns(self.policy, steps, metrics)
        except BaseException as error:  # even sys.exit(), which would end the engine's thread
            name = _name(self.policy)
            with contextlib.suppress(Exception):
                logger.exception("the retention policy %s failed", name)
            return [], [f"no step was deleted, because {name} failed: {error!r}"]
        if (highest := max(steps)) > saved:
            notes.append(
                f"step {highest} is above the one saved last and is what latest_step() finds; "
                "delete_after(step) right after restoring an earlier step deletes such a branch"
            )
        return [step for step in sorted(steps) if step not in kept and step != saved], notes

    async def _read(self, step: int) -> Seen | None:
        files = self.root.store.files(str(step))
        try:
            data = await record_of(files)
            return None if data is None else await self._described(data, files.location)
        except (CorruptCheckpointError, UnsupportedFormatError):
            return None
        finally:
            await files.close()

    async def _described(self, record: bytes, location: str) -> Seen:
        metrics: Mapping[str, float] = {}
        if self._uses_metrics:
            run = self.runtime.engine.compute.run
            metrics = (await run(decode_record, record, location=location)).metrics
        return Seen(record[-RECORD_TAIL_NBYTES:], metrics)


def _steps(answer: Any) -> set[int]:
    """Return the steps that a policy named, in a container of any kind or one by one.

    Raises:
        TypeError: these are no steps (None, text, a mask), so that it is unknown what to keep.
    """
    if not isinstance(answer, Iterable):
        raise TypeError(f"keep() returned {answer!r:.80}, not the steps to keep")
    steps = list(answer)
    for step in steps:
        if not isinstance(step, Integral) or isinstance(step, bool):
            raise TypeError(f"keep() returned {step!r:.80} among the steps to keep")
    return set(map(int, steps))


def _name(policy: Retention) -> str:
    """Return the policy's `repr`, or its type where that fails."""
    try:
        return repr(policy)
    except Exception:
        return type(policy).__name__
