"""One process's part in a save by several processes.

::

    process p                          process 0
    join ◄──────────── mark ────────── begin
    plan, stage, serialize, upload     plan, stage, serialize, upload
    entries ──────── ready ──────────► merge, index
                                       decision, record, publish
    leave ◄───────── outcome ────────── report

Any failure on one process ends the round, and with it the save on all.
"""

# Rule 1: if the plan is known, staging waits for no other process, unless trees may differ by
#   process (`shared_plan.py`); the first write waits for the attempt.
# Rule 2: an error of this process is posted before clean-up, so that the others stop at once; an
#   error of another process is not posted again.
# Rule 3: all processes drop their cached plans after every failed round, even if they made no
#   attempt in it, because they may disagree about the plans. If process 0 has skipped the round,
#   all keep them, because process 0 does not know that it has failed on another process.
#   (test_the_save_after_one_that_a_process_has_refused_works,
#   test_a_save_in_place_of_one_that_process_0_skips_fails_alone)

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from dataclasses import KW_ONLY, dataclass, replace

from asyncckpt.coordinators.messages import encode_error
from asyncckpt.coordinators.rounds import Round, briefly
from asyncckpt.errors import (
    CheckpointNotFoundError,
    SaveAbortedError,
    SaveOutcomeUnknownError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.shield import to_completion
from asyncckpt.format.record import save_id_of
from asyncckpt.log import logger
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import AttemptFiles, JoinedAttempt, keeps_notes
from asyncckpt.reports import SaveReport
from asyncckpt.save.commit import Commit, Committable
from asyncckpt.save.merge import SharedCommit
from asyncckpt.save.plan_cache import Layout, Terms
from asyncckpt.save.save import Save, record_of
from asyncckpt.save.shared_plan import KNOWN, VISIBLE_S, SharedPlan

JOIN_S = 2.0
"""How long to wait for the attempt before checking whether process 0 has begun it."""

NOTE_S = 1.0
"""Limit for noting an error: the program waits for it."""

LOOK_S = 1.0
"""Seconds between two reads of the record after process 0 has fallen silent."""


@dataclass(eq=False, repr=False)
class SharedSave(Save):
    """The part of this process in a save by several.

    Attributes:
        round_: messages of the processes about this save.
        lost: numbers of failed rounds whose plans are not dropped yet.
    """

    shared = True

    _: KW_ONLY
    round_: Round
    lost: set[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._group = self.round_.group
        identity = f"{self._group.run_id}\n{self.round_.name}\n{self.round_.number}"
        self._save_id = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._process = self._recorder.process = self._group.process_index
        self._stem = f"{self._save_id}-{self._process}" if self._process else self._save_id
        self._joining: asyncio.Task[JoinedAttempt] | None = None
        self._ended_by_others = False
        self._posted = False
        self._known = False  # the plan of an earlier save is reused without comparing it
        self._kept = False  # files of this process may be part of a checkpoint

    async def run(self, turn: asyncio.Lock) -> SaveReport:
        """Take part in committing the checkpoint; as `Save.run`, inside of the round's `alive`.

        Raises:
            …: the error of the process that failed first, which it names.
            SaveOutcomeUnknownError: process 0 fell silent after its decision to commit.
        """
        try:
            report = await super().run(turn)
        except BaseException as error:
            if not self._record and not self.round_.skipped:
                self.lost.add(self.round_.number)
            await self._post(error)
            await self._note(error)
            raise
        await self._note(None)
        return report

    async def _note(self, error: BaseException | None) -> None:
        """Note the error that ended the save, for the next job; None removes the last note.

        Each process notes only its own errors. One-shot saves leave no notes, because no job
        continues them.
        """
        if self.request.step is None or not keeps_notes(self.store):
            return
        note = None
        if error is not None:
            # The round may have returned this process's own error.
            theirs = getattr(error, "process", None) not in (None, self._process)
            if theirs or isinstance(error, (SaveAbortedError, asyncio.CancelledError)):
                return
            host, stage = self._group.host, self.state.stage
            note = encode_error(error, process=self._process, host=host, stage=stage)
        with contextlib.suppress(Exception):  # raised by a user's store
            await to_completion(briefly(self.store.keep_note(self._process, note), limit_s=NOTE_S))

    async def _run(self) -> SaveReport:
        # Only now: earlier saves may have planned after a later one was refused.
        if earlier := {number for number in self.lost if number < self.round_.number}:
            self.layouts.forget()
            self.lost -= earlier
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._watching = tasks.create_task(self._watch())
                report = await super()._run()
                # The save has succeeded: a cancellation that comes now must not hide that.
                self._watching.cancel()
                await to_completion(asyncio.wait((self._watching,)))
        except BaseException:
            if not self.round_.skipped:
                self.layouts.forget()
            raise
        return report

    async def _watch(self) -> None:
        """Wait until all processes have succeeded; raise the error of one that has failed."""
        try:
            await self.round_.watch()
        except Exception as error:
            if self._kept and not self.round_.failed:
                # Process 0 has fallen silent, or its messages do not arrive.
                if await self._is_committed():
                    return
                self._ended_by_others = True
                if not isinstance(error, SaveOutcomeUnknownError):
                    raise self._unknown(error) from error
                raise
            # Process 0 raises this if its record may still arrive.
            self._kept = self._kept and isinstance(error, SaveOutcomeUnknownError)
            # Otherwise this process has failed by itself, as by an error of the coordinator.
            self._ended_by_others = self.round_.failed or self.round_.skipped
            await self._post(error)  # before the task group cancels all other tasks
            raise

    def _unknown(self, error: Exception) -> SaveOutcomeUnknownError:
        return SaveOutcomeUnknownError(
            f"{self._location}: the coordinator failed after this process had written its part, "
            "and the record has not appeared; whether the save succeeds is unknown: look at "
            f"latest_step(), then save again ({error})",
            location=self._location,
        )

    async def _is_committed(self) -> bool:
        """Return whether the record appears within another `silence_s`."""
        end = time.monotonic() + self.round_.silence_s
        while True:
            # Opened anew: files that are open stay those of the checkpoint that is replaced.
            files = self.store.files(self.request.name)
            try:
                record = await record_of(files)
            except StoreError:  # the network may be lost
                record = None
            finally:
                await files.close()
            if record is not None and save_id_of(record) == self._save_id:
                return True
            if time.monotonic() > end:
                return False
            await asyncio.sleep(LOOK_S)

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

    def _begun(self) -> None:
        self.round_.begun()

    async def _open(self) -> None:
        if self.round_.leads:
            await self._begin()
        else:  # the first write waits for this task
            self._joining = self._joining or self._tasks.create_task(self._join())

    async def _files(self) -> AttemptFiles:
        await self._open()
        return await (self._begin() if self.round_.leads else self._share())

    async def _share(self) -> JoinedAttempt:
        """Return this process's share of the attempt, once it has joined."""
        assert self._joining is not None
        return await asyncio.shield(self._joining)

    async def _join(self) -> JoinedAttempt:
        """Join the attempt of process 0 once it appears; refuse a location that is not shared."""
        begun_at: float | None = None
        try:
            while begun_at is None or time.monotonic() - begun_at <= VISIBLE_S:
                try:
                    return await self.store.join(
                        self.request.name,
                        self._save_id,
                        process=self._process,
                        timeout_s=JOIN_S,
                        private=self.request.options.private,
                    )
                except CheckpointNotFoundError:
                    await self.round_.post_name()
                    if self._known:
                        await self.round_.post(KNOWN, b"+")
                    if begun_at is None and self.round_.has_begun():
                        begun_at = time.monotonic()
            raise UsageError(
                f"{self._location}: {self._group.named(0)} has begun this save, but "
                f"{self._group.named(self._process)} cannot see it: the processes do not share "
                "this location, as with a host's own disk or memory://; pass a directory that "
                "every host mounts or the URL of a bucket, or "
                'coordinator="single" with a root per process',
                location=self._location,
            )
        except Exception as error:
            await self._post(error)  # before the task group cancels all other tasks
            raise

    def _written(self, nbytes: int) -> None:
        super()._written(nbytes)
        left_nbytes = self.state.total_nbytes - self.state.done_nbytes
        if self.round_.leads and left_nbytes < SLOT_NBYTES:
            self.round_.expect()  # all processes write as much, and end at about the same time

    def _committing(self, layout: Layout) -> Commit:
        return SharedCommit(
            self._begin,
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
            # The message may have arrived nevertheless, and process 0 may have committed.
            if not await self._is_committed():
                raise self._unknown(error) from error
        else:
            if self.request.consent is not None:
                self.request.consent.asked()
            await self._outcome()
        # The checkpoint is committed, whatever happens to the share.
        try:
            await to_completion(share.leave())
        except (Exception, asyncio.CancelledError) as error:  # also of a user's store
            logger.warning("%s: leaving the committed save failed: %r", self._location, error)
        totals = json.loads(self.round_.result or b"{}")
        return replace(
            made,
            stored_nbytes=totals.get("stored_nbytes", 0),
            file_count=totals.get("file_count", 0),
        )

    async def _outcome(self) -> None:
        """Wait until the save has succeeded.

        Cancellation: withdraws from the save, or waits if its success is already decided.
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
        """Abort the attempt; only leave it if its files may be part of a checkpoint."""
        await super()._abort()
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.wait((self._joining,))
            if not self._joining.cancelled() and self._joining.exception() is None:
                share = self._joining.result()
                await (share.leave() if self._kept else share.abort())

    async def _post(self, error: BaseException) -> None:
        """Tell all processes why this one failed, unless another one failed first."""
        if not self._ended_by_others and not self._posted:
            await to_completion(self._withdraw(error))

    async def _withdraw(self, error: BaseException) -> bool:
        """Abort the save on all processes; return False if its success was already decided."""
        self._posted = True
        aborted = await briefly(self.round_.abort(self._reason(error), self.state.stage))
        if aborted:
            self._kept = False
        return aborted is not False
