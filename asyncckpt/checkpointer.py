"""The async facade: `Checkpointer` for the steps of a run, functions for single checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsIndex, TypeVar, Unpack, overload

from asyncckpt.arguments import (
    Location,
    LocationRestoreArguments,
    LocationRestoreIntoArguments,
    LocationSaveArguments,
    ProgressCallback,
    RestoreArguments,
    RestoreIntoArguments,
    RunArguments,
    StepSaveArguments,
    check_switch,
    completed,
    documented,
    step_number,
)
from asyncckpt.errors import SaveError, StoreError, UsageError
from asyncckpt.flow.driver import blocks_here, check_loop
from asyncckpt.flow.engine import warn
from asyncckpt.flow.shield import said
from asyncckpt.log import logger
from asyncckpt.options import check_function
from asyncckpt.ports import Store
from asyncckpt.reports import CheckpointInfo, RestoreReport, SaveReport, VerifyReport
from asyncckpt.restore.rebuild import finish_into, finish_tree, warn_of
from asyncckpt.save.snapshot import tree_nbytes
from asyncckpt.session.pending import PendingSave
from asyncckpt.session.session import Session, closing_note

T = TypeVar("T")

Place = Location | tuple[Store, str]
"""Location of one checkpoint: a path, a URL, or a store and a name in it."""


class OpenRun:
    """Base of the async and the blocking `Checkpointer`."""

    @documented
    def __init__(self, root: Location | Store, **arguments: Unpack[RunArguments]) -> None:
        self._session = Session(root, **completed(RunArguments, arguments))

    def __repr__(self) -> str:
        return f"Checkpointer{self._session!r}"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"{self!r} cannot be pickled or copied: its threads and saves in flight belong to this "
            "process. Create a new Checkpointer in the other process, such as a worker of a data "
            "loader, or pass the location"
        )

    async def _enter(self) -> None:
        check_loop()
        try:
            await self._session.enter()
        except BaseException as error:
            # The block is not entered, so nothing else closes the session.
            await self._session.__aexit__(type(error), error)
            raise

    async def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, GeneratorExit) and not blocks_here():
            return  # nothing can be awaited: the saves and then the session end by themselves
        failure = await self._closed()
        if failure is None:
            return
        if error is None or isinstance(error, GeneratorExit):  # `close()` of a generator drops it
            raise failure
        # The caller must see the body's exception; this one becomes a note.
        note = f"a save failed, too: {type(failure).__name__}: {said(failure)}"
        if failure is self._session.release_error:
            note = closing_note(failure)
        error.add_note(note)
        if not isinstance(error, Exception):  # sys.exit() or a cancellation: no traceback shows it
            warn(f"{self._session.root.url}: {note}", logging.ERROR)

    async def _closed(self) -> BaseException | None:
        """Close; return the failure that no caller has seen, or the error of the release.

        Cancellation, exception of a signal handler: raised; the failure is left to the next check.
        """
        session = self._session
        if session.runtime.engine.forked:
            return None
        check_loop()
        try:
            await session.idle()
        except UsageError:  # on the engine's own thread: the saves continue, nothing is closed
            raise
        except BaseException as interruption:
            await self._abort(interruption)
            raise
        closing = await session.end()
        failure = session.saves.unseen_error()
        if failure is None or closing is None:
            return failure or closing
        failure.add_note(closing_note(closing))
        failure.__context__ = closing
        return failure

    async def _abort(self, error: BaseException) -> None:
        """Abort the saves in flight and close; add a failure to `error` as a note."""
        session = self._session
        pending = session.saves.pending()
        for save in pending:  # all before the first wait, during which the next one would begin
            save.cancel()
        if isinstance(error, GeneratorExit):  # nothing can be awaited
            session.begin_close()
            return
        try:
            for save in pending:
                await save._job.abort()
        finally:
            await session.end(error)

    async def _begin_save(
        self, step: SupportsIndex, tree: Any, arguments: StepSaveArguments, *, stall_first: bool
    ) -> PendingSave:
        check_loop()
        with self._session.reporting("save"):
            number = step_number(step)
            given = completed(StepSaveArguments, arguments)
            if self._session.preemption is not None:
                try:
                    await self._session.preemption.reached(number)
                except (SaveError, StoreError) as error:
                    # This may be the last save before the end of the job.
                    logger.warning("agreeing on the last step before preemption failed: %s", error)
        return self._session.start_save(number, tree, stall_first=stall_first, **given)


class Checkpointer(OpenRun):
    """The checkpoints of one training run, by step, below one root.

    May be used from several event loops and threads. Leaving an `async with` block (`with`, in
    `asyncckpt.blocking`) waits for saves in flight and raises the error of one that failed;
    without a block, `close` does.

    Args:
        root: directory or URL of the run; it need not exist.
        keep: which steps to keep after each save: `KeepLast(n)`, `KeepEvery(k)`,
            `KeepBest(n, metric)`, several of them joined by ``|``, or any `Retention`; None keeps
            all.
        save_options: defaults of every save, and the byte budget.
        restore_options: defaults of every restore.
        storage_options: options of the file system for URLs.
        coordinator: ``"auto"``: all processes of the runtime that the program has initialised save
            and restore together; ``"single"``: this process alone; or an object, such as a
            `DirectoryCoordinator`.
        preemption: notice SIGTERM, and report it on all processes at the same step (`reached`).
        grace_s: seconds between SIGTERM and the end of the process, if known; reports note a save
            that took longer.
        takeover: the first save or deletion takes over the run: an earlier job that saves to it
            gets a `FencedError` from then on. Several processes that save together always do so.

    Raises:
        UsageError: an argument is wrong, or `preemption` needs the main thread.
    """

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(error)

    @documented
    async def save(
        self, step: SupportsIndex, tree: Any, **arguments: Unpack[StepSaveArguments]
    ) -> SaveReport:
        """Save a tree as `step`; on return the checkpoint is committed, durable and whole.

        Until this returns, the leaves must not be mutated.

        Args:
            step: a non-negative integer.
            tree: nested containers of arrays and scalars.
            metadata: JSON values kept in the record.
            overwrite: replace a checkpoint of this step atomically.
            options: replace the `Checkpointer`'s as a whole.
            progress: called on the engine's thread with a `Progress` as the save proceeds.
            metrics: numbers by name, for retention and listings.

        Cancellation: aborts the save, waits for its clean-up, then raises; a save whose
        publication had begun is still committed.

        Raises:
            CheckpointExistsError: the step exists; nothing was written.
            FencedError: another process has taken over the run.
            UnsupportedLeafError: names the path of a leaf that cannot be saved.
            SaveError, StoreError: names leaf, stage or file; no file of the attempt remains.
        """
        pending = await self._begin_save(step, tree, arguments, stall_first=False)
        report = await pending._wait_owned()
        await self._session.settled()
        return report

    @documented
    async def start_save(
        self, step: SupportsIndex, tree: Any, **arguments: Unpack[StepSaveArguments]
    ) -> PendingSave:
        """Copy every leaf, and save the copies in the background.

        On return the leaves may be mutated, donated or freed. Arguments and errors: as `save`. An
        error that occurs later is raised by awaiting the result, or else once by the next save,
        `wait`, `close` or the end of the block; if none of these follows, it is a `RuntimeWarning`
        and logged.

        Cancellation: aborts the save, waits for its clean-up, then raises.
        """
        pending = await self._begin_save(step, tree, arguments, stall_first=True)
        await pending._wait_staged()
        return pending

    async def reached(self, step: SupportsIndex) -> bool:
        """Return whether the job should save this step and then end.

        All processes call it once per training step, before any `save` of that step, with the same
        steps, which must not decrease. It returns False until one process gets SIGTERM, and True
        on all processes from the same step on. Without a notice it sends no messages. With one, it
        may wait until the processes have agreed; training and saves in flight continue meanwhile.
        `save` and `start_save` report their step, too: see `SaveReport.preempted`.

        Cancellation: only stops the waiting.

        Raises:
            UsageError: this `Checkpointer` was created without `preemption=True`, or another
                process has closed its own.
            SaveError: another process is missing; names it.
            StoreError: the coordinator's service failed again and again.
        """
        number = step_number(step)
        if self._session.preemption is None:
            raise UsageError(
                f"{self!r}: reached() needs notices of preemption; pass preemption=True to the "
                "Checkpointer"
            )
        return await self._session.preemption.reached(number)

    @overload
    async def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: None = None,
        **arguments: Unpack[RestoreArguments],
    ) -> Any: ...

    @overload
    async def restore(
        self, step: SupportsIndex | None = None, *, like: T, **arguments: Unpack[RestoreArguments]
    ) -> T: ...

    @documented
    async def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        like: Any = None,
        **arguments: Unpack[RestoreArguments],
    ) -> Any:
        """Return the tree of a step.

        Args:
            step: the step; None for the newest valid one.
            like: a tree whose types, dtypes and containers the result has; arrays, abstract
                arrays (`jax.ShapeDtypeStruct`, meta tensors) or scalars.
            include: globs on paths; other leaves are left out (with `like`: kept as they are).
                Lists and tuples hold `None` in place of such a leaf; dicts lack its key.
            strict: leaves that only one side has, and `include` selects, are errors.
            cast: convert dtypes, in memory beyond the budget; values that do not fit, and fractions
                for integers, remain errors.
            options: replace the `Checkpointer`'s as a whole.
            progress: called on the engine's thread with a `Progress`.
            leaves: without `like`: ``"numpy"``, ``"jax"`` or ``"torch"`` arrays.
            on_report: called in the caller's thread with the `RestoreReport` before this returns.

        Cancellation: waits until no thread writes to host memory, then raises.

        Raises:
            CheckpointNotFoundError: there is no such step, or none at all.
            MismatchError: lists every leaf that does not fit; nothing was read.
            CorruptCheckpointError: names leaf, file and offset; nothing is returned.
        """
        return await _tree(self._session, step, like, arguments)

    @documented
    async def restore_into(
        self,
        target: Any,
        *,
        step: SupportsIndex | None = None,
        **arguments: Unpack[RestoreIntoArguments],
    ) -> RestoreReport:
        """Restore a step into the arrays of `target`, and into its objects with a state dict.

        Modules and optimizers are filled in place; other objects get new arrays.

        Arguments, cancellation and errors: as `restore`; in addition:

        Raises:
            MismatchError: a leaf is immutable, as is what holds it, unless they are equal scalars.
            UsageError: two targets overlap in memory, or `include` selects a part of an object's
                state dict.
            RestoreError: an object refused its state dict.
            AsyncCheckpointError: `written` lists the targets whose contents are now undefined.
        """
        return await _into(self._session, step, target, arguments)

    async def prepare(self, tree: Any) -> int:
        """Allocate and touch staging memory for this tree, as far as the budget allows.

        The first save then stalls no longer than later ones. Several processes call it after the
        first call that all of them make, because they divide the budget of their host there.

        Returns:
            Bytes of staging memory.
        """
        nbytes = tree_nbytes(tree)
        return await self._session.call(lambda: self._session.prepare(nbytes)).wait()

    async def steps(self) -> list[int]:
        """Return all steps with a valid commit record, ascending.

        Raises:
            StoreError: a record cannot be read, so it is unknown whether the step is valid.
        """
        return await self._session.call(self._session.steps.found).wait()

    async def latest_step(self) -> int | None:
        """Return the highest step with a valid commit record, or None.

        Logs a warning if there are only steps of another library.
        """
        return await self._session.call_once("latest_step()", self._session.steps.latest).wait()

    async def inspect(
        self, step: SupportsIndex | None = None, *, timeline: bool = False
    ) -> CheckpointInfo:
        """Describe a step (None: the newest) from its metadata alone.

        With `timeline=True`, the result includes that of the save, which takes one more read.
        """
        check_switch("timeline", timeline)
        number = None if step is None else step_number(step)
        reads = self._session.reads
        return await self._session.call(lambda: reads.inspect(number, timeline)).wait()

    async def verify(
        self, step: SupportsIndex | None = None, *, progress: ProgressCallback | None = None
    ) -> VerifyReport:
        """Read and check every byte of a step (None: the newest)."""
        number = None if step is None else step_number(step)
        return await self._session.call(lambda: self._session.reads.verify(number, progress)).wait()

    async def delete(self, step: SupportsIndex) -> None:
        """Delete a step: make it invisible, durably, then remove its bytes.

        Waits for a save of this step in flight.

        Raises:
            CheckpointNotFoundError: there is no such step.
        """
        with self._session.reporting("call"):
            number = step_number(step)
        await self._session.call_once(
            f"delete({number})", lambda: self._session.delete(number)
        ).wait()

    async def delete_after(self, step: SupportsIndex) -> list[int]:
        """Delete all steps above `step` (an abandoned branch), highest first, and return them.

        Waits for saves in flight, and also deletes their steps if they are above `step`.
        """
        with self._session.reporting("call"):
            number = step_number(step)
        return await self._session.call_once(
            f"delete_after({number})", lambda: self._session.delete_after(number)
        ).wait()

    async def wait(self) -> None:
        """Wait until no save is in flight, checkpoints are whole and no bytes are being removed.

        On an object store, a whole checkpoint includes the files that only other programs read.

        Cancellation: stops the waiting; the saves continue.

        Raises:
            …: the error of a save that has not been raised anywhere else, once.
        """
        await self._session.idle()
        self._session.saves.raise_unseen()

    async def close(self) -> None:
        """Wait for saves in flight and end all threads. Idempotent.

        Cancellation: aborts the saves in flight, waits for their clean-up, closes, then raises.

        Raises:
            …: the error of a save that has not been raised anywhere else, once; or that of a
                store that could not be closed.
        """
        failure = await self._closed()
        if failure is not None:
            raise failure


@documented
async def save(
    location: Place, tree: Any, **arguments: Unpack[LocationSaveArguments]
) -> SaveReport:
    """Save a tree at `location`; on return the checkpoint is committed and durable.

    Arguments, cancellation and errors: as `Checkpointer` and `Checkpointer.save`.
    """
    given = completed(LocationSaveArguments, arguments)
    async with _opened(location, given, save_options=given["options"]) as session:
        pending = session.start_save(None, tree, metrics=None, stall_first=False, **given)
        return await pending._wait_owned()


@overload
async def restore(
    location: Place, *, like: None = None, **arguments: Unpack[LocationRestoreArguments]
) -> Any: ...


@overload
async def restore(
    location: Place, *, like: T, **arguments: Unpack[LocationRestoreArguments]
) -> T: ...


@documented
async def restore(
    location: Place, *, like: Any = None, **arguments: Unpack[LocationRestoreArguments]
) -> Any:
    """Return the tree saved at `location`.

    Arguments, cancellation and errors: as `Checkpointer` and `Checkpointer.restore`.
    """
    given = completed(LocationRestoreArguments, arguments)
    async with _opened(location, given, restore_options=given["options"]) as session:
        return await _tree(session, None, like, given)


@documented
async def restore_into(
    location: Place, target: Any, **arguments: Unpack[LocationRestoreIntoArguments]
) -> RestoreReport:
    """Restore the checkpoint at `location` into the arrays and objects of `target`.

    Arguments, cancellation and errors: as `Checkpointer` and `Checkpointer.restore_into`.
    """
    given = completed(LocationRestoreIntoArguments, arguments)
    async with _opened(location, given, restore_options=given["options"]) as session:
        return await _into(session, None, target, given)


async def inspect(
    location: Place, *, timeline: bool = False, storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    """Describe the checkpoint at `location` from its metadata alone.

    With `timeline=True`, the result includes that of the save, which takes one more read.
    """
    check_switch("timeline", timeline)
    async with _opened(location, {"storage_options": storage_options}) as session:
        return await session.call(lambda: session.reads.inspect(None, timeline)).wait()


async def verify(
    location: Place,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read and check every byte of the checkpoint at `location`."""
    async with _opened(location, {"storage_options": storage_options}) as session:
        return await session.call(lambda: session.reads.verify(None, progress)).wait()


def _opened(location: Place, arguments: dict[str, Any], **options: Any) -> Session:
    """Open a session for one checkpoint; removes the location's arguments from `arguments`."""
    check_loop()
    return Session(
        location,
        one_shot=True,
        storage_options=arguments.pop("storage_options"),
        coordinator=arguments.pop("coordinator", "single"),
        **options,
    )


async def _tree(
    session: Session, step: SupportsIndex | None, like: Any, arguments: Mapping[str, Any]
) -> Any:
    with session.reporting("call", "restore"):
        given = completed(RestoreArguments, arguments)
        number = None if step is None else step_number(step)
        on_report = given.pop("on_report")
        check_function("on_report", on_report, "one RestoreReport")
        mode: Literal["saved", "like"] = "saved" if like is None else "like"
        if like is not None and given["leaves"] != "numpy":
            raise UsageError(
                f"leaves={given['leaves']!r} with like=: the result has the leaves of `like`; "
                "leave out one of the two"
            )
        request, flat, adapters = session.restore_request(mode, like, **given)
    tree, report = await session.restore(number, request, partial(finish_tree, flat, adapters))
    warn_of(report)
    if on_report is not None:
        on_report(report)
    return tree


async def _into(
    session: Session, step: SupportsIndex | None, target: Any, arguments: Mapping[str, Any]
) -> RestoreReport:
    with session.reporting("call", "restore"):
        given = completed(RestoreIntoArguments, arguments)
        number = None if step is None else step_number(step)
        request, flat, _ = session.restore_request("into", target, leaves="numpy", **given)
    assert flat is not None
    _, report = await session.restore(number, request, partial(finish_into, flat))
    warn_of(report)
    return report
