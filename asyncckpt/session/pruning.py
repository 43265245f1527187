"""Retention: deletion, after each save of a run, of the steps that its policy does not keep."""

# Rule 1: the save that called is already durable: any failure here becomes a note in its report,
#   and a policy that fails, or returns anything but steps, deletes nothing.
# Rule 2: a step is deleted only if its record is still the one that the decision was based on, and
#   only for steps whose records this save has read: if one has changed, the policy decides again.
#   `KeepEvery` never keeps a step in place of another, so its steps are not read again.
#   (test_a_step_damaged_meanwhile_displaces_no_good_one)
# Rule 3: an entry without a valid record is not a step and is left alone; so is a step whose record
#   cannot be read now, or by this release.
# Rule 4: steps are deleted under a claim: a process that was taken over deletes nothing.
# Rule 5: a step is unlisted, durably, inside the save; its bytes are removed in the background. The
#   previous removal ends before the next step is unlisted, so a disk never holds more than the
#   steps kept, the one just saved, and those of one removal: at most UNLISTED_MAX.
# Rule 6: a step that appears above the one being saved is another writer's newest, and is left
#   alone. Only steps that existed when the run went back to an earlier one can be an abandoned
#   branch.
#   (test_two_runs_on_one_root_never_delete_the_newest_step)

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncckpt.errors import CheckpointNotFoundError, FencedError
from asyncckpt.flow.background import BackgroundTask
from asyncckpt.flow.engine import Job, ended
from asyncckpt.flow.shield import mapped, together
from asyncckpt.format.record import RECORD_TAIL_NBYTES, check_version, decode_record
from asyncckpt.log import logger
from asyncckpt.ports import Removal
from asyncckpt.reports import SaveReport
from asyncckpt.retention import Retention, concerns, decided, uses_metrics
from asyncckpt.runtime import Runtime
from asyncckpt.save.save import stored_record
from asyncckpt.session.root import Root
from asyncckpt.session.steps import Steps

UNLISTED_MAX = 32
"""Most steps that are unlisted before their bytes are removed: each may hold a descriptor."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A step as its record describes it: checksum of the record, and the metrics in it."""

    seal: bytes
    metrics: Mapping[str, float]


Records = dict[int, Seen | Exception | None]
"""Records read for one decision, by step: None without a valid one, or why it cannot be read."""

Removals = list[tuple[int, Removal]]
"""Unlisted steps, with the calls that remove their bytes."""


@dataclass(eq=False, repr=False)
class Pruner:
    """Applies the policy of one run.

    Reads the records of steps that other processes saved, once; of steps about to be deleted, and
    of those kept in their place, again.

    Attributes:
        pinned: names of steps being read, which are not deleted; kept up to date by `Reads`.
    """

    policy: Retention
    runtime: Runtime
    root: Root
    steps: Steps
    pinned: Mapping[str, int]

    def __post_init__(self) -> None:
        self._uses_metrics = uses_metrics(self.policy)
        self._seen: dict[int, Seen] = {}
        self._known: set[int] | None = None  # steps saved here or found, except other writers'
        self._left: list[int] = []  # steps from before the run went back, the oldest first
        self._displacing: list[int] = []  # steps that the last decision kept in place of others
        self._looking: BackgroundTask[tuple[list[int], Records]] | None = None
        self._removing: Job[None] | None = None
        self._late_notes: list[str] = []  # of removals, for the next report
        self._logged: set[str] = set()

    def look(self) -> None:
        """List the steps while a save commits, as `Retaining.look`; later steps count next time."""
        self._looking = BackgroundTask(self._look())

    async def forget(self) -> None:
        """End the listing, as `Retaining.forget`."""
        looking, self._looking = self._looking, None
        if looking is not None:
            await looking.stop()

    async def retain(self, report: SaveReport, record: bytes) -> SaveReport:
        """Delete the steps that the policy does not keep after a save; never raises.

        Returns the report of the save with the deleted steps and notes, also if it is cancelled;
        `record` is its commit record.
        """
        saved = report.step
        if saved is None:
            return report
        if self._known is not None:
            self._known.add(saved)  # whatever fails below
        deleted: list[int] = []
        notes: list[str] = []
        try:
            await self.settle()
            notes, self._late_notes = self._late_notes, []
            self._seen[saved] = await self._described(record, saved)
            steps, reasons = await self._decide(saved)
            notes += reasons
            await self._unlist(steps, deleted, notes)
        except asyncio.CancelledError:
            notes.append("deleting older checkpoints was cancelled; the next save continues it")
        except Exception as error:
            # Includes errors of third-party stores: the save itself is durable.
            notes.append(f"no step was deleted: {error}")
        for note in notes:
            if note not in self._logged:
                self._logged.add(note)
                logger.warning("%s", note)
        return replace(report, deleted_steps=tuple(deleted), notes=(*report.notes, *notes))

    async def settle(self) -> None:
        """Wait until no bytes are being removed in the background. From any thread."""
        if self._removing is not None:
            await ended(self._removing.future)

    async def _unlist(self, steps: list[int], deleted: list[int], notes: list[str]) -> None:
        removals: Removals = []
        kept: dict[int, Exception] = {}
        unremoved: dict[int, Exception] = {}
        try:
            for step in steps:
                if len(removals) == UNLISTED_MAX:
                    await self._remove(removals, unremoved)
                if self.pinned.get(str(step)):
                    continue
                try:
                    # Forgotten, so that a changed step is read again after the next save.
                    seal = self._seen.pop(step).seal
                    removals.append((step, await self.steps.unlist(step, seal)))
                    deleted.append(step)
                    logger.info("deleted %s (%s)", self.root.location(step), _name(self.policy))
                except CheckpointNotFoundError:
                    if self._known is not None:
                        self._known.discard(step)  # if it exists, it is another writer's
                except Exception as error:
                    concerns_all = getattr(error, "location", None) == self.root.store.url
                    if concerns_all or isinstance(error, FencedError):
                        notes.append(f"no more steps were deleted: {error}")
                        break
                    kept[step] = error  # tried again after the next save
        finally:
            if kept:
                notes.append(_folded(kept, "could not be deleted"))
            if removals or unremoved:
                self._removing = self.runtime.engine.submit(
                    lambda: self._remove_last(removals, unremoved)
                )

    async def _remove(self, removals: Removals, unremoved: dict[int, Exception]) -> None:
        while removals:
            step, remove = removals.pop(0)
            try:
                await remove()
            except Exception as error:
                unremoved[step] = error

    async def _remove_last(self, removals: Removals, unremoved: dict[int, Exception]) -> None:
        await self._remove(removals, unremoved)
        if unremoved:
            note = _folded(unremoved, "could only be unlisted, not removed completely")
            note = f"{note}; the next sweep or 'asyncckpt gc' removes the rest"
            self._late_notes.append(note)
            self._logged.add(note)
            logger.warning("%s", note)

    async def _look(self) -> tuple[list[int], Records]:
        """List the steps; meanwhile read the records that the decision is likely to need."""
        # A single one is nearly always the step saved last, which the next one displaces.
        again = self._displacing if len(self._displacing) > 1 else []
        records: Records = {}
        listed, _ = await together((self.steps.candidates(), self._read(again, records)))
        return listed or [], records

    async def _decide(self, saved: int) -> tuple[list[int], list[str]]:
        """Return the steps to delete, and notes about the decision."""
        looking, self._looking = self._looking, None
        listed, records = await (self._look() if looking is None else looking.result())
        candidates = sorted({*listed, saved})
        records[saved] = self._seen[saved]
        due = [step for step in candidates if step not in self._seen]
        while True:
            await self._read(due, records)
            found = {step: records.get(step, self._seen.get(step)) for step in candidates}
            self._seen = {step: one for step, one in found.items() if isinstance(one, Seen)}
            steps = self._ranked(saved, candidates)
            metrics = {step: self._seen[step].metrics for step in steps}
            try:
                kept, displacing = decided(self.policy, tuple(steps), metrics)
                worries = concerns(self.policy, steps, metrics)
            except BaseException as error:  # even sys.exit(), which would end the engine's thread
                name = _name(self.policy)
                logger.exception("the retention policy %s failed", name)
                return [], [f"no step was deleted, because {name} failed: {error!r}"]
            deleted = [step for step in sorted(steps) if step not in kept and step != saved]
            self._displacing = [step for step in steps if deleted and step in displacing]
            if not (due := [step for step in self._displacing if step not in records]):
                break
        notes: list[str] = []
        if unread := {step: one for step, one in found.items() if isinstance(one, Exception)}:
            notes.append(_folded(unread, "could not be read and will stay"))
        if len(steps) < len(self._seen):
            notes.append(
                "another job saves to this root: steps above the one saved last have appeared, and "
                "are left alone; give each job its own root, or let the later one take over "
                "(takeover=True)"
            )
        notes += worries
        if (highest := max({saved, *steps}.difference(deleted))) > saved:
            notes.append(
                f"step {highest} is above the one saved last, and latest_step() returns it; call "
                "delete_after(step) right after restoring an earlier step to delete such a branch"
            )
        return deleted, notes

    def _ranked(self, saved: int, listed: Collection[int]) -> list[int]:
        """Return the steps that count for the policy, the newest last.

        They ascend, except that the steps from before the run went back to an earlier one come
        first: otherwise the higher numbers of the abandoned branch would displace every new save
        at once.
        """
        seen = set(self._seen)
        known = seen if self._known is None else self._known.intersection(listed)
        others = {step for step in seen - known if step > saved}
        self._known = (known | seen) - others
        self._left = [step for step in self._left if step in known and step != saved]
        branch = sorted(known.difference(self._left, (saved,)))
        if branch and branch[-1] > saved:
            self._left += branch
        left = [step for step in self._left if step in seen]
        return [*left, *sorted(seen - others - set(left))]

    async def _read(self, steps: Sequence[int], records: Records) -> None:
        async def read(step: int) -> None:
            try:
                data = await stored_record(self.root.store, step)
                records[step] = None if data is None else await self._described(data, step)
            except Exception as error:  # another user's or a newer release's, for example
                records[step] = error

        await mapped(read, steps, self.root.store.capabilities.reads)

    async def _described(self, record: bytes, step: int) -> Seen:
        if (seen := self._seen.get(step)) is not None and record.endswith(seen.seal):
            return seen  # unchanged: long records take a while to decode
        location = self.root.location(step)
        check_version(record, location=location)
        metrics: Mapping[str, float] = {}
        if self._uses_metrics:
            run = self.runtime.engine.compute.run
            metrics = (await run(decode_record, record, location=location)).metrics
        return Seen(record[-RECORD_TAIL_NBYTES:], metrics)


def _folded(failed: Mapping[int, Exception], what: str) -> str:
    """Return one note about a failure of these steps."""
    (step, error), *others = failed.items()
    if not others:
        return f"step {step} {what}: {error}"
    return f"{len(failed)} steps {what}, the first: step {step}: {error}"


def _name(policy: Retention) -> str:
    """Return the policy's `repr`, or its type if that fails."""
    try:
        return repr(policy)
    except Exception:
        return type(policy).__name__
