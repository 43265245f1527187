"""One save: plan, data stages, commit, publication."""

# Rule 1: an existing checkpoint is reported before the caller continues: on local disk before
#   anything is staged; on object stores, where the check takes a round trip, during staging. The
#   attempt begins during staging, too, and ends a save before the caller continues if it cannot.
#   Files of an attempt are invisible before its record.
# Rule 2: the attempt ends with exactly one of publish and abort, even if cancelled repeatedly.
# Rule 3: once `publish` has been called, its outcome is awaited and is the save's outcome.

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from asyncckpt.arguments import progress_notes
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
    SaveAbortedError,
)
from asyncckpt.flow.recorder import Recorder
from asyncckpt.flow.shield import add_note, forget_frames, leading_error, to_completion, troubles
from asyncckpt.flow.threads import Outcome
from asyncckpt.format.record import RECORD_NAME, is_record
from asyncckpt.log import logger
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.ports import Attempt, AttemptFiles, CheckpointFiles, Sizes, Store
from asyncckpt.reports import Progress, SaveReport, Timeline
from asyncckpt.runtime import Runtime
from asyncckpt.save.commit import Commit, Committable
from asyncckpt.save.pipeline import Pipeline
from asyncckpt.save.plan_cache import (
    Layout,
    LayoutCache,
    Terms,
    add_mirrors,
    layout_of,
    terms_for,
    untie,
)
from asyncckpt.save.snapshot import SaveRequest, check_alone
from asyncckpt.save.stage import Staging
from asyncckpt.save.upload import DataFiles
from asyncckpt.stores.paths import below

ABORT_S = 30.0
"""Limit for the clean-up of an aborted save: an unresponsive store would delay a deadline error by
minutes. `asyncckpt gc` removes the rest."""


@dataclass(slots=True, eq=False)
class SaveState:
    """Visible state of a running save.

    `staged` resolves when every leaf may be mutated: to True if all are copied or held, to False if
    the save ended earlier.
    """

    stage: str = "plan"
    done_nbytes: int = 0
    total_nbytes: int = 0
    blocked_s: float = 0.0
    staged: Outcome[bool] = field(default_factory=Outcome)

    @property
    def progress(self) -> Progress:
        """Stage and bytes done."""
        return Progress(self.stage, self.done_nbytes, self.total_nbytes)

    def release_leaves(self, ended: bool = False) -> None:
        """Tell the caller that the leaves may be mutated; only the first call has an effect."""
        if not self.staged.done():
            self.staged.set_result(not ended)


async def record_of(
    files: CheckpointFiles, damaged: Callable[[], object] | None = None
) -> bytes | None:
    """Return the commit record of a valid checkpoint, or None; call `damaged` if it is invalid."""
    try:
        data = await files.read(RECORD_NAME, max_nbytes=MAX_RECORD_NBYTES)
    except CheckpointNotFoundError:
        return None
    except CorruptCheckpointError:
        data = b""  # longer than any record, or a link
    if is_record(data):
        return data
    if damaged is not None:
        damaged()
    return None


async def stored_record(store: Store, name: str | int) -> bytes | None:
    """Return the commit record of a checkpoint, or None if no valid one has this name."""
    files = store.files(str(name))
    try:
        return await record_of(files)
    finally:
        await files.close()


class Retaining(Protocol):
    """Deletion of older checkpoints after a save."""

    def look(self) -> None:
        """Begin to list older checkpoints, because the save is about to be committed."""

    async def forget(self) -> None:
        """End the listing after a failed save. Waits for its end, even if cancelled."""
        ...

    async def retain(self, report: SaveReport, record: bytes) -> SaveReport:
        """Delete older checkpoints after a save with this commit record; must not raise.

        Cancellation: ends with a note in the report.
        """
        ...


@dataclass(eq=False, repr=False)
class Save:
    """One save, run on the engine.

    Attributes:
        layouts: layouts of earlier saves.
        state: updated as the save proceeds.
        claim: returns the epoch of the session's claim, which the first save makes; None for 0.
        retaining: deletes older checkpoints; None without retention.
    """

    runtime: Runtime
    store: Store
    layouts: LayoutCache
    request: SaveRequest
    state: SaveState
    claim: Callable[[], Coroutine[Any, Any, int]] | None = None
    retaining: Retaining | None = None

    shared: ClassVar[bool] = False
    """Whether other processes also write to the attempt."""

    def __post_init__(self) -> None:
        self._epoch = 0
        self._clean_up_notes: list[str] = []
        self._recorder = Recorder(self.request.begun)
        self._attempt: Attempt | None = None
        self._opening = asyncio.Lock()
        self._record = b""  # set once the checkpoint is committed
        self._others: Sequence[Timeline] = ()
        self._timeout: asyncio.Timeout | None = None
        self._save_id = self._stem = uuid.uuid4().hex
        self._location = below(self.store.url, self.request.name)

    async def run(self, turn: asyncio.Lock) -> SaveReport:
        """Commit the checkpoint durably, then let `retaining` delete older ones.

        Holds `turn` meanwhile; waiting for it counts against `deadline_s`.

        Cancellation: aborts the attempt and cleans up, unless publication has begun.

        Raises:
            CheckpointExistsError: the name is taken; nothing of this save is left.
            FencedError: another process has taken the run over.
            DeadlineExceededError: `deadline_s` passed; nothing is left.
            SaveAbortedError: cancelled; nothing is left.
            SaveError, StoreError: names stage, leaf or file; nothing is left.
        """
        deadline_s = self.request.options.deadline_s
        left_s = deadline_s and deadline_s - (time.perf_counter() - self.request.begun)
        recorder = self._recorder
        recorder.add("snapshot", recorder.begun, until=self.request.snapshot_done)
        self._troubles = troubles()
        try:
            self._timeout = asyncio.timeout(left_s)
            async with self._timeout, turn:
                recorder.add("wait", self.request.snapshot_done)
                report = await self._run()
                logger.info("%s", report)
                if self.retaining is None:
                    return report
                # The checkpoint stays committed even if retention fails or is cancelled.
                with recorder.span("retain"):
                    retained = self.retaining.retain(report, self._record)
                    report = await to_completion(retained)
                return replace(report, timeline=self._timeline())
        except BaseException as raised:
            error = self._reason(raised)
            for note in self._clean_up_notes:
                add_note(error, note)
            logger.info("gave up saving %s: %s", self._location, error)
            # A stored error must not keep staging memory alive.
            forget_frames(raised)
            if error is raised:
                raise
            raise error from error.__cause__

    def _reason(self, error: BaseException) -> BaseException:
        """Return the error that a save raises instead of this one."""
        if isinstance(error, BaseExceptionGroup):
            error = leading_error(error)
        # A user's function may raise a `TimeoutError`, too.
        expired = self._timeout is not None and self._timeout.expired()
        state = self.state
        if isinstance(error, (TimeoutError, asyncio.CancelledError)) and expired:
            share = f", at {state.progress.fraction:.0%}" if state.total_nbytes else ""
            return DeadlineExceededError(
                f"{self._location}: the save did not finish within "
                f"{self.request.options.deadline_s} s (it was in {state.stage}{share}) and was "
                "aborted; earlier checkpoints are intact. Raise SaveOptions.deadline_s or save "
                f"less{''.join(self._troubles)}",
                stage=state.stage,
                location=self._location,
            )
        if isinstance(error, asyncio.CancelledError):
            return SaveAbortedError(
                f"{self._location}: the save was cancelled in {state.stage} and cleaned up; "
                "earlier checkpoints are intact",
                stage=state.stage,
                location=self._location,
            )
        return error

    async def _run(self) -> SaveReport:
        request, store, state = self.request, self.store, self.state
        positional = store.capabilities.positional_writes
        snapshot, compute = request.snapshot, self.runtime.engine.compute
        if snapshot.rest is None:  # a hop takes longer
            snapshot.tie()
        else:
            with self._recorder.span("snapshot"):
                await compute.run(snapshot.tie)
        if not self.shared:
            check_alone(snapshot)
        if self.claim is not None:
            self._epoch = await self.claim()
        if positional and not request.overwrite:
            await self._refuse_existing()
        terms = terms_for(self.runtime, store, snapshot.nbytes, request.options)
        sizes = terms.sizes
        hits = self.layouts.hits
        budget = self.runtime.budget
        try:
            with self._recorder.span("plan"):
                if snapshot.tied and request.options.leaf_options is not None:
                    await compute.run(untie, snapshot, request.options)
                layout = await self._plan(terms)
            request = self.request  # with the tree of all processes, if trees differ
            plan, cached = layout.plan, self.layouts.hits > hits
            unplaced = np.array((*plan.compressed, *plan.inline), np.int64)
            state.total_nbytes = sum(plan.file_nbytes) + int(plan.row_payload[unplaced].sum())
            budget.peak = budget.in_use
            staging, made = await self._write(layout, sizes)
            self._written(state.total_nbytes - state.done_nbytes)  # small leaves, with the index
            state.stage = "commit"
            if self.retaining is not None:
                self.retaining.look()
            with self._recorder.span("publish"):
                made = await self._conclude(made)
            self._others = made.timelines
        except BaseException as error:
            if self.retaining is not None:
                await self.retaining.forget()
            await self._give_up(error)
            raise
        self._record = made.record
        return SaveReport(
            location=self._location,
            step=request.step,
            save_id=self._save_id,
            leaf_count=len(request.snapshot.paths),
            array_count=len(plan.arrays.names) - len(plan.arrays.tied) - len(layout.mirrors),
            nbytes=request.snapshot.nbytes,
            stored_nbytes=made.stored_nbytes,
            file_count=made.file_count,
            blocked_s=state.blocked_s,
            total_s=time.perf_counter() - request.begun,
            plan_cached=cached,
            plan_cache_hits=self.layouts.hits,
            plan_cache_misses=self.layouts.misses,
            referenced_nbytes=staging.referenced_nbytes,
            peak_staged_nbytes=budget.peak,
            orbax=layout.orbax is not None,
            notes=(*layout.notes, *sizes.notes, *progress_notes(request.progress)),
            processes=made.parts,
            timeline=self._timeline(),
        )

    # -- overridden by `SharedSave`

    async def _plan(self, terms: Terms) -> Layout:
        """Return the layout of the tree, cached or new."""
        compute = self.runtime.engine.compute
        return await layout_of(self.request.snapshot, terms, cache=self.layouts, compute=compute)

    async def _begin(self) -> Attempt:
        """Begin the attempt that this save writes to, once; return it."""
        async with self._opening:
            if self._attempt is None:
                with self._recorder.span("open"):
                    self._attempt = await self.store.begin(
                        self.request.name,
                        self._save_id,
                        epoch=self._epoch,
                        overwrite=self.request.overwrite,
                        private=self.request.options.private,
                        shared=self.shared,
                    )
                self._begun()
        return self._attempt

    def _begun(self) -> None:
        """Tell the other processes that the attempt has begun."""

    async def _open(self) -> None:
        """Begin the attempt; do not wait where another process does."""
        await self._begin()

    async def _files(self) -> AttemptFiles:
        """Return the attempt, or this process's share of it, once it is open."""
        return await self._begin()

    def _committing(self, layout: Layout) -> Commit:
        """Return the commit stage."""
        return Commit(
            self._begin,
            layout,
            self.request,
            save_id=self._save_id,
            compute=self.runtime.engine.compute,
            epoch=self._epoch,
        )

    async def _conclude(self, made: Committable) -> Committable:
        """Publish the checkpoint; return its final sizes."""
        assert self._attempt is not None
        await self._attempt.publish(made.record)
        return made

    async def _abort(self) -> None:
        """Abort the attempt, if it was begun."""
        if self._attempt is not None:
            await self._attempt.abort()

    def _timeline(self) -> Timeline:
        """Return the timeline, joined with the known ones of other processes."""
        return self._recorder.timeline().joined(self._others)

    async def _refuse_existing(self) -> None:
        if await stored_record(self.store, self.request.name):
            # A process that has taken over may have saved it.
            await self.store.check_claim(self._epoch)
            other = "choose another location" if self.request.step is None else "save another step"
            raise CheckpointExistsError(
                f"{self._location}: a checkpoint already exists here; pass overwrite=True to "
                f"replace it, or {other}",
                location=self._location,
            )

    async def _write(self, layout: Layout, sizes: Sizes) -> tuple[Staging, Committable]:
        """Make everything but the record durable."""
        request, runtime, store = self.request, self.runtime, self.store
        snapshot, compute = request.snapshot, runtime.engine.compute
        # Scalars that Orbax expects as arrays are staged after the arrays of the tree.
        add_mirrors(snapshot, layout.mirrors)
        staging = Staging(
            layout.plan,
            snapshot,
            runtime.pool,
            runtime.window_pool(store.capabilities, sizes),
            compute,
            grow=request.stall_first,
            recorder=self._recorder,
        )
        commit = self._committing(layout)
        copied = asyncio.Event()
        pipeline = Pipeline(
            staging=staging,
            commit=commit,
            files=DataFiles(
                self._files,
                self._stem,
                list(layout.plan.file_nbytes),
                sizes.window_nbytes,
                self._written,
                positional=store.capabilities.positional_writes,
            ),
            sizes=sizes,
            reference=request.options.snapshot == "reference",
            staged=copied.set,
        )
        self.state.stage = "stage"
        async with asyncio.TaskGroup() as group:
            group.create_task(self._release_leaves(copied))
            group.create_task(commit.put_orbax())
            made = await pipeline.run()
        return staging, made

    async def _release_leaves(self, copied: asyncio.Event) -> None:
        """Tell the caller that the state may be mutated, unless the save cannot begin."""
        # Beside the copies: a flush may wait for the removal of older checkpoints.
        await self._open()
        if not self.request.overwrite and not self.store.capabilities.positional_writes:
            await self._refuse_existing()
        await copied.wait()
        self.state.blocked_s = time.perf_counter() - self.request.begun
        self.state.stage = "upload"
        self.state.release_leaves()

    async def _give_up(self, error: BaseException) -> None:
        """Clean up after a save that ends with this error."""

        async def abort() -> None:
            async with asyncio.timeout(ABORT_S):
                await self._abort()

        # Shielded, so that a second cancellation leaves no half attempt behind.
        try:
            await to_completion(abort())
        except TimeoutError:
            self._clean_up_notes.append(
                f"cleaning up did not finish within {ABORT_S:g} s, because the store does not "
                "respond; 'asyncckpt gc' removes the rest"
            )
        except AsyncCheckpointError as failure:
            self._clean_up_notes.append(f"cleaning up failed too: {failure}")

    def _written(self, nbytes: int) -> None:
        state = self.state
        state.done_nbytes = min(state.total_nbytes, state.done_nbytes + nbytes)
        if self.request.progress is not None:
            self.request.progress(state.progress)
