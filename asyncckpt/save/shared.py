"""One process' part in a save by several.

::

    process p                          process 0
    join ◄──────────── mark ────────── begin
    plan, stage, serialize, upload     plan, stage, serialize, upload
    entries ──────── ready ──────────► merge, index
                                       decision, record, publish
    leave ◄───────── outcome ────────── report

Whatever fails on one process ends the round, and with it the save on all.
"""

# Rule 1: if the plan is known, staging waits for no other process, unless trees may differ by
#   process (`shared_plan.py`); the first write waits for the attempt.
# Rule 2: an error of this process is posted before anything is cleaned up, so that the others stop
#   at once; an error of another process is not posted again.
# Rule 3: cached plans are dropped after every failure: processes may disagree about them. All of
#   them drop those of the same saves: each also after a round in which it made no attempt.
#   (test_the_save_after_one_that_a_process_has_refused_works)

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeVar

from asyncckpt.coordinators.messages import encode_error
from asyncckpt.coordinators.rounds import Round, briefly
from asyncckpt.errors import (
    CheckpointNotFoundError,
    DeadlineExceededError,
    SaveAbortedError,
    SaveOutcomeUnknownError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.shield import leading_error, to_completion
from asyncckpt.format.record import save_id_of
from asyncckpt.ports import AttemptFiles, JoinedAttempt, NotingStore
from asyncckpt.reports import SaveReport
from asyncckpt.save.commit import Commit, Committable
from asyncckpt.save.merge import SharedCommit
from asyncckpt.save.plan_cache import Layout, Terms
from asyncckpt.save.save import Save, no_claim, record_of
from asyncckpt.save.shared_plan import KNOWN, VISIBLE_S, SharedPlan

T = TypeVar("T")

JOIN_S = 2.0
"""How long to look for the attempt before asking whether process 0 has begun it."""

NOTE_S = 1.0
"""How long noting an error may take: the program waits for it."""

LOOK_S = 1.0
"""Pause between two looks for the record of a process 0 that has fallen silent."""


@dataclass(eq=False, repr=False)
class SharedSave(Save):
    """The part of this process in a save by several.

    Attributes:
        round_: messages of the processes about this save.
        lost: numbers of failed rounds whose plans have yet to be dropped.
        Others: as `Save`.
    """

    shared = True

    _: KW_ONLY
    round_: Round
    lost: set[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._group = self.round_.group
        identity = f"{self._group.run_id}\n{self.request.name}\n{self.round_.number}"
        self._save_id = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._process = self._recorder.process = self._group.process_index
        self._stem = f"{self._save_id}-{self._process}" if self._process else self._save_id
        self._joining: asyncio.Task[JoinedAttempt] | None = None
        self._ended_by_others = False
        self._posted = False
        self._known = False  # the plan is that of an earlier save, and was not compared
        self._kept = False  # what was written may be part of a checkpoint
        if not self.round_.leads:
            self.claim = no_claim  # process 0 saves under its own

    async def run(self, turn: asyncio.Lock) -> SaveReport:
        """Take part in committing the checkpoint; as `Save.run`.

        Raises:
            …: the error of the process that failed first, which it names.
            SaveOutcomeUnknownError: process 0 fell silent after its decision to commit.
        """
        async with self.round_.alive():
            try:
                report = await super().run(turn)
            except BaseException as error:
                if not self._record:
                    self.lost.add(self.round_.number)
                await self._post(error)
                await self._note(error)
                raise
            await self._note(None)
            return report

    async def _note(self, error: BaseException | None) -> None:
        """Keep the error that ended the save for the next job; remove the last one after a success.

        Each process notes its own errors only. No job continues a one-shot save, which leaves no
        note.
        """
        if self.request.step is None or not isinstance(self.store, NotingStore):
            return
        note = None
        if error is not None:
            # The own error may have come back from the round.
            theirs = getattr(error, "process", None) not in (None, self._process)
            if theirs or isinstance(error, (SaveAbortedError, asyncio.CancelledError)):
                return
            host, stage = self._group.host, self.state.stage
            note = encode_error(error, process=self._process, host=host, stage=stage)
        with contextlib.suppress(Exception):  # of a user's store
            await to_completion(briefly(self.store.keep_note(self._process, note), limit_s=NOTE_S))

    async def _run(self) -> SaveReport:
        # In its turn: earlier saves may have planned after a later one was refused.
        if earlier := {number for number in self.lost if number < self.round_.number}:
            self.layouts.forget()
            self.lost -= earlier
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._watching = tasks.create_task(self._watch())
                report = await super()._run()
                self._watching.cancel()
        except BaseException:
            self.layouts.forget()
            raise
        return report

    async def _watch(self) -> None:
        """Return when all have succeeded; raise the error of a process that has failed."""
        try:
            await self.round_.watch()
        except Exception as error:
            if self._kept and not self.round_.failed:
                # Process 0 has fallen silent, or its messages do not come through.
                if await self._is_committed():
                    return
                self._ended_by_others = True
                if not isinstance(error, SaveOutcomeUnknownError):
                    raise self._unknown(error) from error
                raise
            self._ended_by_others, self._kept = True, False
            raise

    def _unknown(self, error: Exception) -> SaveOutcomeUnknownError:
        return SaveOutcomeUnknownError(
            f"{self._location}: the coordinator failed after this process had written its part, "
            "and the record has not appeared; whether the save succeeds is unknown: look at "
            f"latest_step(), then save again ({error})",
            location=self._location,
        )

    async def _is_committed(self) -> bool:
        """Look for the record for as long again as process 0 has been silent."""
        files = self.store.files(self.request.name)
        end = time.monotonic() + self.round_.silence_s
        try:
            while True:
                record = None
                with contextlib.suppress(StoreError):  # such as that of a lost network
                    record = await record_of(files)
                if record is not None and save_id_of(record) == self._save_id:
                    return True
                if time.monotonic() > end:
                    return False
                await asyncio.sleep(LOOK_S)
        finally:
            await files.close()

    # -- stages

    async def _refuse_existing(self) -> None:
        if self.round_.leads:
            await super()._refuse_existing()

    async def _plan(self, terms: Terms) -> Layout:
        plan = SharedPlan(self.round_, self.request, self._files, self.runtime.engine.compute)
        snapshot, layout = await plan.agree(terms, self.layouts)
        self.request = replace(self.request, snapshot=snapshot)
        self._known = not layout.compared
        return layout

    async def _begin(self) -> None:
        if not self.round_.leads:
            # The first write waits for it.
            self._joining = self._joining or self._tasks.create_task(self._joined())
        elif self._attempt is None:
            await super()._begin()
            self.round_.begun()

    async def _files(self) -> AttemptFiles:
        await self._begin()
        return await self._share() if self._attempt is None else self._attempt

    async def _share(self) -> JoinedAttempt:
        """Return this process' share of the attempt, once it is joined."""
        assert self._joining is not None
        return await asyncio.shield(self._joining)

    async def _joined(self) -> JoinedAttempt:
        try:
            return await self._join()
        except Exception as error:
            await self._post(error)  # before it cancels all the rest
            raise

    async def _join(self) -> JoinedAttempt:
        """Join the attempt of process 0 once it appears; refuse a place that is not shared."""
        begun_at: float | None = None
        while True:
            try:
                return await self.store.join(
                    self.request.name,
                    self._save_id,
                    process=self._group.process_index,
                    timeout_s=JOIN_S,
                    private=self.request.options.private,
                )
            except CheckpointNotFoundError:
                await self.round_.post_name()
                if self._known:
                    await self.round_.post(KNOWN, b"+")
                if begun_at is None and self.round_.has_begun():
                    begun_at = time.monotonic()
            if begun_at is not None and time.monotonic() - begun_at > VISIBLE_S:
                raise UsageError(
                    f"{self._location}: {self._group.named(0)} has begun this save, and "
                    f"{self._group.named(self._group.process_index)} cannot see it: this is no "
                    "place that all processes share, as one host's disk and memory:// are not; "
                    "pass a directory that every host mounts or the URL of a bucket, or "
                    'coordinator="single" with a root per process',
                    location=self._location,
                )

    def _committing(self, layout: Layout) -> Commit:
        return SharedCommit(
            self._attempt,
            layout,
            self.request,
            save_id=self._save_id,
            compute=self.runtime.engine.compute,
            epoch=self._epoch,
            round_=self.round_,
            files=self._files,
            state=self.state,
            layouts=self.layouts,
        )

    async def _conclude(self, made: Committable) -> Committable:
        if self.round_.leads:
            await self.round_.commit()
            await super()._conclude(made)
            totals = {"stored_nbytes": made.stored_nbytes, "file_count": made.file_count}
            await to_completion(briefly(self.round_.finish(json.dumps(totals).encode())))
            return made
        share = await self._share()
        await share.settle()
        self._kept = True
        try:
            await self.round_.post("ready", made.record)
        except StoreError as error:
            # The message may have arrived, and process 0 have committed.
            if not await self._is_committed():
                raise self._unknown(error) from error
        else:
            if self.request.consent is not None:
                self.request.consent.asked()
            await self._outcome()
        await share.leave()
        totals = json.loads(self.round_.result or b"{}")
        return replace(
            made,
            stored_nbytes=totals.get("stored_nbytes", 0),
            file_count=totals.get("file_count", 0),
        )

    async def _outcome(self) -> None:
        """Wait until the save has succeeded.

        Cancellation: withdraws from the save, unless its success is decided; then waits.
        """
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            await asyncio.wait((self._watching,))
        except asyncio.CancelledError as error:
            if self._watching.done() or await to_completion(self._withdraw(error)):
                raise
            await to_completion(asyncio.wait((self._watching,)))
            while task is not None and task.cancelling() > before:
                task.uncancel()

    # -- failures

    async def _give_up(self, error: BaseException) -> None:
        await self._post(error)
        await super()._give_up(error)

    async def _abort(self) -> None:
        """Abort the attempt, or end the share of it if what was written may be a checkpoint's."""
        await super()._abort()
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait((self._joining,))
            if not self._joining.cancelled() and self._joining.exception() is None:
                share = self._joining.result()
                await (share.leave() if self._kept else share.abort())

    async def _post(self, error: BaseException) -> None:
        """Tell all processes why this one failed, unless another's failure was the reason."""
        if not self._ended_by_others and not self._posted:
            await to_completion(self._withdraw(error))

    async def _withdraw(self, error: BaseException) -> bool:
        """Abort the save on all processes; return False if it was decided before."""
        self._posted = True
        aborted = await briefly(self.round_.abort(self._reason(error), self.state.stage))
        if aborted or self.round_.failed:
            self._kept = False
        return aborted is not False

    def _reason(self, error: BaseException) -> BaseException:
        if isinstance(error, BaseExceptionGroup):
            error = leading_error(error)
        if not isinstance(error, asyncio.CancelledError):
            return error
        if self._timeout is not None and self._timeout.expired():
            return DeadlineExceededError(
                f"{self._location}: the save did not finish within "
                f"{self.request.options.deadline_s} s",
                location=self._location,
            )
        return SaveAbortedError(
            f"{self._location}: the save was cancelled", location=self._location
        )
