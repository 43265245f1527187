"""One opened root with its engine, budget, saves and reads; both facades call it."""

# Rule 1: plain functions do what must happen in the caller's thread (structure, scalars,
#   thread-local framework state); everything else is a coroutine for the engine.
# Rule 2: the saves of a session run one after the other, in the order of their calls.

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from asyncckpt.adapters import AdapterSet, adapters_for_loaded_frameworks
from asyncckpt.arguments import (
    RestoreIntoArguments,
    StepSaveArguments,
    check_coordinator,
    check_keep,
    check_preemption,
    checked_globs,
    checked_metadata,
    checked_metrics,
    guarded,
    typed,
)
from asyncckpt.coordinators.rounds import BUSY, Round
from asyncckpt.errors import AsyncCheckpointError, FencedError, UsageError
from asyncckpt.flow.caller import CallerThread
from asyncckpt.flow.engine import Job, ended
from asyncckpt.flow.shield import uninterrupted, within
from asyncckpt.flow.threads import Outcome
from asyncckpt.options import RestoreOptions, SaveOptions
from asyncckpt.reports import RestoreReport, SaveReport
from asyncckpt.restore.request import Mode, RestoreRequest, restore_request
from asyncckpt.retention import Retention
from asyncckpt.runtime import Runtime
from asyncckpt.save.plan_cache import LayoutCache, terms_for
from asyncckpt.save.save import Save, SaveState
from asyncckpt.save.shared import SharedSave
from asyncckpt.save.snapshot import Consent, SaveRequest, take_snapshot
from asyncckpt.session.claiming import Claiming
from asyncckpt.session.in_flight import InFlight, overlap_error, skipped, skipped_report
from asyncckpt.session.pending import PendingSave
from asyncckpt.session.preemption import Preemption
from asyncckpt.session.processes import Processes
from asyncckpt.session.pruning import Pruner
from asyncckpt.session.reads import Finish, Reads
from asyncckpt.session.root import Root
from asyncckpt.session.steps import Steps
from asyncckpt.tree import Flat

T = TypeVar("T")

SESSION_OPTIONS = ("host_memory_nbytes", "direct_io", "exit_deadline_s", "silence_s", "arrival_s")
"""Fields of `SaveOptions` that belong to a session, not to a single save."""

_DEFAULTS = SaveOptions()


class Session:
    """One root (or the parent of a one-shot checkpoint) with its engine, budget and saves.

    Attributes:
        runtime: engine, budget, staging memory.
        root: the store.
        processes: processes that save and restore together.
        claims: claim under which it saves and deletes.
        steps: finds and deletes steps.
        reads: restores, inspects, verifies.
        saves: saves in flight.
        preemption: tells whether the job has to end; None unless requested.
    """

    def __init__(
        self,
        location: Any,
        *,
        one_shot: bool = False,
        keep: Retention | None = None,
        save_options: SaveOptions | None = None,
        restore_options: RestoreOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        coordinator: object = "auto",
        preemption: bool = False,
        grace_s: float | None = None,
        takeover: bool = False,
        owns_coordinator: bool = False,
        layouts: LayoutCache | None = None,
    ) -> None:
        names = ("options", "options") if one_shot else ("save_options", "restore_options")
        self.save_options = typed(names[0], save_options, SaveOptions)
        self.restore_options = typed(names[1], restore_options, RestoreOptions)
        shared: SaveOptions | RestoreOptions = self.save_options
        if one_shot and save_options is None:
            shared = self.restore_options
        check_keep(keep)
        check_coordinator(coordinator)
        check_preemption(preemption, grace_s)
        self.runtime = Runtime("asyncckpt", host_memory_nbytes=shared.host_memory_nbytes)
        self.runtime.engine.check()  # libraries for URLs cannot be imported at exit
        self.root = Root(
            self.runtime,
            location,
            one_shot=one_shot,
            direct_io=self.save_options.direct_io,
            storage_options=storage_options,
        )
        self.processes = Processes(
            self.runtime,
            self.root.location(self.root.name) if self.root.name else self.root.url,
            coordinator,
            arrival_s=shared.arrival_s,
            silence_s=shared.silence_s,
            owned=owns_coordinator,
        )
        self.claims = Claiming(self.root, self.processes, takeover=takeover)
        self.steps = Steps(self.root, self.claims)
        self.reads = Reads(self.runtime, self.root, self.steps, self.processes)
        self.saves = InFlight()
        self._pruner = None
        if keep is not None:
            self._pruner = Pruner(keep, self.runtime, self.root, self.steps, self.reads.pinned)
        self._layouts = LayoutCache() if layouts is None else layouts
        self._turn = asyncio.Lock()
        self._refusals: list[Outcome[None]] = []
        # Reentrant: a signal handler may close the session that its thread is closing.
        self._closing = threading.RLock()
        self._release_job: Job[None] | None = None
        self._settling: Job[None] | None = None
        engine = self.runtime.engine
        engine.owner = f"Checkpointer({self.root.url!r})"
        engine.drain_deadline_s = self.save_options.exit_deadline_s
        weakref.finalize(self, _end, engine).atexit = False
        self.preemption: Preemption | None = None
        if preemption:
            self.preemption = Preemption(engine, self.processes, grace_s=grace_s)
            weakref.finalize(self, self.preemption.close).atexit = False

    def __repr__(self) -> str:
        closed = self.runtime.engine.closed
        state = "closed" if closed else f"{len(self.saves.pending())} saves in flight"
        return f"({self.root.url!r}, {state})"

    # -- in the caller's thread

    def call(
        self,
        function: Callable[[], Coroutine[Any, Any, T]],
        at_end: Callable[[Future[Any]], object] | None = None,
    ) -> Job[T]:
        """Run the coroutine on the engine, with the store open; `at_end`: as `Engine.submit`.

        Raises:
            ClosedError: after `close`, or in a forked child.
        """
        return self.runtime.engine.submit(partial(self.root.opened, function), at_end, aborts=True)

    def call_once(self, name: str, function: Callable[[], Coroutine[Any, Any, T]]) -> Job[T]:
        """Run the coroutine on process 0, and return its result, a JSON value, on all processes.

        `name` is the call with its arguments, equal on all processes.

        Errors: as `call`; errors of the coroutine are raised on all processes.
        """
        if self.processes.alone:
            return self.call(function)
        return self._call_together("call", name, partial(self.processes.once, name, function))

    async def restore(
        self, step: int | None, request: RestoreRequest, finish: Finish[T]
    ) -> tuple[T, RestoreReport]:
        """Carry out a restore, which `finish` ends in this thread; all processes take part."""
        with self.reporting("call", "restore"):
            self.processes.check_broadcast(request.options.broadcast)
        if self.processes.alone:
            return finish(await self.call(partial(self.reads.restore, step, request)).wait())
        caller = CallerThread()
        restore = partial(self.reads.restore_together, step, request, finish, caller.run)
        job = self._call_together("call", "restore", restore)
        job.caller = caller
        return await job.wait()

    def _call_together(
        self,
        kind: str,
        name: str,
        function: Callable[[int], Coroutine[Any, Any, T]],
        at_end: Callable[[Future[Any]], object] | None = None,
    ) -> Job[T]:
        """Run this process's part of a call by all processes; `function` gets its number.

        A call that never begins also ends its round.
        """
        number = self.processes.count(kind)
        begun = False

        async def begin() -> T:
            nonlocal begun
            begun = True
            return await function(number)

        def end(future: Future[Any]) -> None:
            if at_end is not None:
                at_end(future)
            # A call that never begins was cancelled, or the store cannot be opened.
            error = None if begun else future.exception()
            if error is not None:
                self._refuse(kind, number, name, error)

        return self.call(begin, end)

    def start_save(
        self,
        step: int | None,
        tree: Any,
        *,
        stall_first: bool,
        consent: Consent | None = None,
        **arguments: Unpack[StepSaveArguments],
    ) -> PendingSave:
        """Begin a save of the tree as it is now.

        Raises:
            UsageError: arguments or leaves are wrong; no save has begun.
            …: the unseen failure of an earlier save.
        """
        begun = time.perf_counter()
        processes, engine = self.processes, self.runtime.engine
        alone = processes.alone
        name = self.root.name or str(step)
        location = self.root.location(name)
        with self.reporting("save"):
            options = typed("options", arguments["options"], SaveOptions, self.save_options)
        on_overlap = options.on_overlap if stall_first else "wait"
        call = _call(step, on_overlap)
        with self.reporting("save", call):
            self._check_shared(options)
            engine.check()
            self.saves.raise_unseen(options)
            others = [] if on_overlap == "wait" else self.saves.pending()
            if alone and others:
                if on_overlap == "error":
                    raise overlap_error(location, others[0])
                return skipped(engine, self._noted(skipped_report(location, step)))
            process = processes.coordinator.process_index
            snapshot = take_snapshot(tree, adapters_for_loaded_frameworks(process))
            request = SaveRequest(
                name=name,
                step=step,
                snapshot=snapshot,
                metadata=checked_metadata(arguments["metadata"]),
                metrics=checked_metrics(arguments["metrics"]),
                overwrite=arguments["overwrite"],
                options=options,
                progress=guarded(arguments["progress"]),
                stall_first=stall_first,
                consent=consent,
                begun=begun,
            )
        busy = None if on_overlap == "wait" else bool(others)
        pending = self._submit(request, location, call, busy)
        self.saves.add(pending)
        self.root.to_sweep = not self.root.swept and processes.leads
        return pending

    @contextlib.contextmanager
    def reporting(self, kind: str, name: str = "") -> Iterator[None]:
        """Report an error of the block to all processes as that of their next call of this kind.

        The block precedes the call, in which the others would wait for this process. Pass
        no `name` if the block fails before the call is known.
        """
        try:
            yield
        except BaseException as error:  # also Ctrl-C: the call has its number, as on the others
            self.refuse(kind, name, error)
            raise

    def refuse(self, kind: str, name: str, error: BaseException) -> None:
        """End the next call of this kind on all processes with an error that occurred before it."""
        with contextlib.suppress(UsageError):  # several processes that cannot coordinate
            if not self.processes.alone:
                self._refuse(kind, self.processes.count(kind), name, error)

    def _refuse(self, kind: str, number: int, name: str, error: BaseException) -> None:
        # The others would wait for this process. A closed session refuses this call.
        refuse = partial(self.processes.refuse, kind, number, name, error)
        with contextlib.suppress(AsyncCheckpointError):
            self._refusals.append(self.runtime.engine.submit(refuse).future)

    def _submit(
        self, request: SaveRequest, location: str, call: str, busy: bool | None
    ) -> PendingSave:
        """Hand the save to the engine; `busy` is None if saves in flight do not matter."""
        state = SaveState()

        def release(_: object) -> None:
            # The end of the job, for whatever reason, ends the wait for staging.
            state.release_leaves(ended=True)

        if self.processes.alone:
            job = self.call(partial(self._save, request, state), release)
        else:
            save = partial(self._save_together, request, state, call, busy)
            job = self._call_together("save", call, save, release)
        job.drained = True
        return PendingSave(job, state, location=location, step=request.step)

    def _check_shared(self, options: SaveOptions) -> None:
        """Check that the options of a save do not differ from those of the session that it shares.

        Raises:
            UsageError: an option belongs to the session, so that one save cannot set it.
        """
        for name in SESSION_OPTIONS:
            value, shared = getattr(options, name), getattr(self.save_options, name)
            if value not in (shared, getattr(_DEFAULTS, name)):
                raise UsageError(
                    f"options=SaveOptions({name}={value!r}): all saves of a Checkpointer share "
                    f"this, and this one has {shared!r}; pass it to the constructor, as "
                    f"Checkpointer(..., save_options=SaveOptions({name}={value!r}))",
                    expected=shared,
                    found=value,
                )

    def restore_request(
        self, mode: Mode, like: Any, *, leaves: str, **arguments: Unpack[RestoreIntoArguments]
    ) -> tuple[RestoreRequest, Flat | None, AdapterSet]:
        """Return the restore request of a caller; runs in its thread."""
        options = typed("options", arguments["options"], RestoreOptions, self.restore_options)
        self.runtime.engine.check()
        return restore_request(
            mode,
            like,
            leaves=leaves,
            include=checked_globs(arguments["include"]),
            strict=arguments["strict"],
            cast=arguments["cast"],
            options=options,
            progress=guarded(arguments["progress"]),
            process=self.processes.coordinator.process_index,
            process_count=self.processes.coordinator.process_count,
        )

    async def enter(self) -> None:
        """Sweep the root, and log the errors that ended processes of an earlier job."""
        coordinator = self.processes.foreseen()
        if coordinator is not None and coordinator.process_index == 0:
            await self.call(self.root.sweep).wait()
            # A single process has raised its errors itself.
            if coordinator.process_count > 1:
                await self.call(self.root.log_notes).wait()

    # -- on the engine

    async def _save(
        self, request: SaveRequest, state: SaveState, round_: Round | None = None
    ) -> SaveReport:
        # Only process 0 claims and deletes.
        leads = self.processes.leads
        claim, pruner = (self.claims.epoch, self._pruner) if leads else (None, None)
        given = (self.runtime, self.root.store, self._layouts, request, state, claim, pruner)
        if round_ is None:
            save = Save(*given)
        else:
            save = SharedSave(*given, round_=round_, lost=self.processes.lost)
        try:
            report = await save.run(self._turn)
        except FencedError as error:
            self.claims.note(error)
            raise
        self.steps.saved(report.step)
        with contextlib.suppress(AsyncCheckpointError):  # the engine has ended, not the save
            self._settling = self.runtime.engine.submit(self._settle)
            self._settling.drained = True
        return self._noted(report)

    async def _save_together(
        self, request: SaveRequest, state: SaveState, call: str, busy: bool | None, number: int
    ) -> SaveReport:
        deadline_s = request.options.deadline_s
        round_ = await self.processes.round("save", number, call, deadline_s=deadline_s)
        async with round_.alive():  # also between its two parts
            if busy is not None and await self._overlaps(round_, busy, request):
                location = self.root.location(request.name)
                if request.options.on_overlap == "error":
                    raise overlap_error(location)
                return self._noted(skipped_report(location, request.step))
            return await self._save(request, state, round_)

    async def _settle(self) -> None:
        # A method, so that the job keeps a dropped session alive.
        await self.root.store.settled()

    def _noted(self, report: SaveReport) -> SaveReport:
        """Return the report with its notes about preemption."""
        return report if self.preemption is None else self.preemption.noted(report)

    async def _overlaps(self, round_: Round, busy: bool, request: SaveRequest) -> bool:
        """Return whether a save was in flight on process 0, which decides, at its call."""
        limit = request.options.deadline_s, self.root.location(request.name)
        failure, option = "process 0 did not make this call", "SaveOptions.deadline_s"

        async def on_this() -> tuple[bool, str]:
            if round_.leads:
                await round_.answer(BUSY, f"{busy:d} {round_.name}".encode())
                return busy, round_.name
            async with within(*limit, failure, option, begun=request.begun):
                word, _, call = (await round_.answered(BUSY)).decode().partition(" ")
            if word == "0":
                round_.check_call(call)  # fails on all processes
            return word == "1", call

        try:
            skipped, call = await round_.run(on_this)
        except BaseException:
            self.processes.lost.add(round_.number)
            raise
        round_.check_call(call)  # fails on this process; process 0 has skipped its save
        return skipped

    async def prepare(self, tree_nbytes: int) -> int:
        """Allocate and touch staging memory for a state of this size; return its bytes."""
        async with self._turn:  # a running save holds windows of its own size
            store = self.root.store
            sizes = terms_for(self.runtime, store, tree_nbytes, self.save_options).sizes
            pool = self.runtime.window_pool(store.capabilities, sizes)
            # Files may be shorter than windows, and end a little below their limit.
            filled_nbytes = min(pool.slot_nbytes, sizes.data_file_nbytes * 15 // 16)
            await pool.prepare(-(-tree_nbytes // filled_nbytes) + 2)
            return pool.allocated_nbytes

    async def delete(self, step: int) -> None:
        """Delete a step, once its saves in flight have ended."""
        for pending in self.saves.pending():
            if pending.step == step:
                await ended(pending._job.future)
        await self.steps.delete(step)

    async def delete_after(self, step: int) -> list[int]:
        """Delete all steps above `step`, including those of saves in flight; return them."""
        async with self._turn:
            return await self.steps.delete_after(step)

    async def _release(self) -> None:
        try:
            if self.preemption is not None:
                await self.preemption.release()
            if self._pruner is not None:
                await self._pruner.settle()
        finally:
            try:
                await self.processes.release()
            finally:
                await self.root.release()

    # -- the end

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, GeneratorExit):  # nothing can be awaited
            self.begin_close()
            return
        try:
            await self._reported()
        except BaseException as interruption:
            await self.end(interruption)
            raise
        if (failure := await self.end(error)) is not None:
            raise failure

    async def idle(self) -> None:
        """Wait until nothing is being saved, completed or removed; ignore errors.

        Cancellation: only stops the waiting.

        Raises:
            ClosedError: this is a forked child, and saves were in flight when it was forked.
        """
        if self.runtime.engine.abandoned:
            return
        for pending in self.saves.pending():
            pending._job.refuse_fork()
            await ended(pending._job.future)
        await self._reported()
        await self.settled()
        if self._pruner is not None:
            await self._pruner.settle()

    async def _reported(self) -> None:
        """Wait until calls that failed before their rounds are reported to the other processes."""
        while self._refusals:
            await ended(self._refusals[0])
            self._refusals = [refused for refused in self._refusals if not refused.done()]

    async def settled(self) -> None:
        """Wait until the checkpoints of ended saves are also complete for other programs.

        Cancellation: only stops the waiting.
        """
        if self._settling is not None and not self.runtime.engine.abandoned:
            await ended(self._settling.future)

    @property
    def release_error(self) -> BaseException | None:
        """Error of the job that released store and staging memory, if any."""
        job = self._release_job
        return job.future.exception() if job is not None and job.done() else None

    async def end(self, error: BaseException | None = None) -> BaseException | None:
        """Close as `aclose`, to the end even if cancelled; return the `release_error`.

        If the caller raises an `error` of its own, the `release_error` becomes a note on that.
        """
        try:
            await uninterrupted(self.aclose())
        except BaseException as failure:
            if failure is not self.release_error:
                raise
            if error is None:
                return failure
            error.add_note(closing_note(failure))
        return None

    async def aclose(self) -> None:
        """Release store, staging memory and threads. Idempotent, also when called concurrently.

        The first call raises the errors; others only wait for it.
        """
        engine = self.runtime.engine
        try:
            job, first = self._released()
            # The engine refuses jobs once a call has ended it below, so only one call may submit
            # the job, and no call may end the engine before the job has ended.
            if job is not None and not engine.abandoned:
                await (job.wait() if first else ended(job.future))
        finally:
            await engine.aclose()
            if self.preemption is not None:
                self.preemption.close()

    def begin_close(self) -> None:
        """Release everything as `aclose` does, without waiting. From any thread."""
        engine = self.runtime.engine
        job, first = self._released()
        if job is not None and first:
            job.future.add_done_callback(lambda _: engine.begin_close())

    def _released(self) -> tuple[Job[None] | None, bool]:
        """Return the job that releases everything, if any, and whether this call submitted it."""
        with self._closing:
            first = self._release_job is None
            if first and self.runtime.engine.usable:
                self._release_job = self.runtime.engine.submit(self._release)
            return self._release_job, first


def closing_note(failure: BaseException) -> str:
    """Return the note on another error about a `Session.release_error`."""
    return f"closing failed, too: {type(failure).__name__}: {failure}"


def _call(step: int | None, on_overlap: str) -> str:
    """Return the name by which processes compare calls that save.

    All that wait have one name; the others ask process 0, which must know that it is asked.
    """
    return f"save({step})" if on_overlap == "wait" else f"start_save({step}, {on_overlap=})"


def _end(engine: Any) -> None:
    # The session was dropped without close(). Saves keep it alive, so none is in flight.
    if not engine.forked:
        engine.begin_close()
