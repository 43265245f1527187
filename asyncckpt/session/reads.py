"""Reads of the checkpoints of one root: restore, inspect and verify."""

# Rule 1: a checkpoint that is being read is pinned: retention does not delete it.
# Rule 2: a checkpoint that was deleted or replaced during a read is not reported as damaged.

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal, TypeVar

from asyncckpt.arguments import guarded
from asyncckpt.checkpoint.open import Verb, check_unchanged, open_any
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.flow.shield import within
from asyncckpt.format.foreign.orbax_read import step_number
from asyncckpt.log import logger
from asyncckpt.ports import CallIn, CheckpointFiles, Exchange, ExchangingCoordinator
from asyncckpt.reports import CheckpointInfo, Progress, RestoreReport, VerifyReport
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from asyncckpt.restore.request import RestoreRequest
from asyncckpt.restore.restore import RestoreOutcome, Written, listing_written, run_restore
from asyncckpt.runtime import Runtime
from asyncckpt.session.processes import Processes
from asyncckpt.session.root import Root
from asyncckpt.session.steps import LISTED_STEPS, Steps, foreign_steps
from asyncckpt.verify.inspect import info_of
from asyncckpt.verify.verify import verify_checkpoint

T = TypeVar("T")

Finish = Callable[[RestoreOutcome], tuple[T, RestoreReport]]
"""Makes the result of a restore and its report, in the caller's thread."""

Read = Callable[[CheckpointFiles, int | None], Awaitable[T]]
"""Returns a result for the files of a checkpoint and its step."""


TRIES = 3
"""How often one process reads a checkpoint that other saves replace meanwhile."""


class Reads:
    """Restores, inspects and verifies for one session. Used on its engine only.

    Each method reads the checkpoint of a step, of the newest step (None), or the one-shot
    checkpoint. If it is replaced meanwhile, a single process reads the new one instead. It raises a
    `CheckpointNotFoundError` if it is deleted; with None it reads the next newest step instead.

    Attributes:
        pinned: number of reads in progress, by name of checkpoint.
    """

    def __init__(self, runtime: Runtime, root: Root, steps: Steps, processes: Processes) -> None:
        self._runtime = runtime
        self._processes = processes
        self._root = root
        self._steps = steps
        self.pinned: Counter[str] = Counter()

    async def restore(self, step: int | None, request: RestoreRequest) -> RestoreOutcome:
        """Carry out a request.

        Raises:
            DeadlineExceededError: the restore took longer than its options allow.
        """
        with listing_written() as written:
            async with self._within(step, request):
                return await self._restore(step, request, written)

    def _within(
        self, step: int | None, request: RestoreRequest
    ) -> contextlib.AbstractAsyncContextManager[None]:
        name, seconds = self._root.name or step, request.options.deadline_s
        location = self._root.url if name is None else self._root.location(name)
        failure, option = "the restore did not finish", "RestoreOptions.deadline_s"
        return within(seconds, location, failure, option, begun=request.begun)

    async def _restore(
        self,
        step: int | None,
        request: RestoreRequest,
        written: Written,
        agreement: RestoreAgreement | None = None,
    ) -> RestoreOutcome:
        async def restore(files: CheckpointFiles, number: int | None) -> RestoreOutcome:
            return await run_restore(self._runtime, files, number, request, written, agreement)

        outcome = await self._read("restore", step, restore)
        logger.info("%s", outcome.report)
        return outcome

    async def restore_together(
        self,
        step: int | None,
        request: RestoreRequest,
        finish: Finish[T],
        in_caller: CallIn,
        number: int,
    ) -> tuple[T, RestoreReport]:
        """Carry out the request of this process while all others carry out theirs.

        Process 0 chooses the step; nothing is read before the targets of all processes match, and
        no process returns before all have succeeded, `finish` included. `in_caller` makes calls in
        the thread that waits for the restore.

        Errors: as `restore`, of any process; names the process.
        """
        options, deadline_s = request.options, request.options.deadline_s
        round_ = await self._processes.round("call", number, "restore", deadline_s=deadline_s)
        exchange = self._exchange(round_, options.broadcast, in_caller)
        agreement = RestoreAgreement(round_, exchange)

        async def on_this() -> tuple[T, RestoreReport]:
            async with self._within(step, request):
                chosen = await agreement.step(options, step, self._latest)
                with self._pinned(chosen):  # until the last process has read it
                    outcome = await self._restore(chosen, request, written, agreement)
                    result, report = await in_caller(lambda: finish(outcome))
                    timeline = await agreement.restored(outcome.report.timeline)
                    return result, dataclasses.replace(report, timeline=timeline)

        try:
            with listing_written() as written:
                return await round_.run(on_this)
        finally:
            if exchange is not None:
                await exchange.close()

    def _exchange(
        self, round_: Round, broadcast: bool | Literal["auto"], in_caller: CallIn
    ) -> Exchange | None:
        """Return the collectives that let processes share reads, None if each reads everything."""
        coordinator = self._processes.coordinator
        wanted = self._root.store.capabilities.shared_link if broadcast == "auto" else broadcast
        if not wanted or not isinstance(coordinator, ExchangingCoordinator):
            return None
        return coordinator.exchange(
            round_.group.key("exchange", str(round_.number)),
            in_caller=in_caller,
            in_worker=self._runtime.engine.compute.run,
            timeout_s=round_.silence_s,
        )

    async def _latest(self) -> int | None:
        """Return the newest step; None for a one-shot checkpoint."""
        if self._root.name:
            return None
        newest = await self._steps.latest()
        if newest is None:
            raise await self._nothing("restore")
        return newest

    async def inspect(self, step: int | None, timeline: bool) -> CheckpointInfo:
        """Describe the checkpoint from its metadata."""

        async def inspect(files: CheckpointFiles, number: int | None) -> CheckpointInfo:
            compute = self._runtime.engine.compute
            opened = await open_any(files, compute)
            return await info_of(opened, number, compute, timeline=timeline)

        return await self._read("inspect", step, inspect)

    async def verify(
        self, step: int | None, progress: Callable[[Progress], None] | None
    ) -> VerifyReport:
        """Read and check every byte of the checkpoint."""
        progress = guarded(progress)

        async def verify(files: CheckpointFiles, number: int | None) -> VerifyReport:
            report = await verify_checkpoint(self._runtime, files, number, progress)
            if not report.ok:
                await check_unchanged(files, "verify")
            return report

        return await self._read("verify", step, verify)

    async def _read(self, verb: Verb, step: int | None, read: Read[T]) -> T:
        if self._root.name or step is not None:
            for tries_left in reversed(range(TRIES if self._processes.alone else 1)):
                files = self._root.store.files(self._root.name or str(step))
                try:
                    return await self._read_one(verb, step, files, read)
                except CheckpointNotFoundError as error:
                    if error.found != "replaced" or not tries_left:
                        raise
        newest, below = await self._steps.newest(), None
        gone: set[int] = set()
        while newest is not None:
            tried, files = newest
            try:
                return await self._read_one(verb, tried, files, read)
            except CheckpointNotFoundError:
                # Deleted during the read: another step is the newest now. A replaced step still
                # exists and is tried once more.
                below = tried if tried in gone else below
                gone.add(tried)
                newest = await self._steps.newest(below)
        raise await self._nothing(verb)

    async def _nothing(self, verb: Verb) -> CheckpointNotFoundError:
        advice = await self._steps.foreign() or "; check that latest_step() is not None first"
        return CheckpointNotFoundError(
            f"{self._root.url}: there is no checkpoint to {verb}{advice}", location=self._root.url
        )

    async def _without(
        self, step: int, files: CheckpointFiles, error: CheckpointNotFoundError
    ) -> CheckpointNotFoundError:
        """Return the error that lists the steps, or `error` if that is about something else."""
        names = await self._root.store.names()
        if str(step) in names:
            return error
        try:
            there = await self._steps.found()
        except AsyncCheckpointError:
            return error  # another step is unreadable, or the root is itself a checkpoint
        some = ", ".join(map(str, there[-LISTED_STEPS:])) or "none"
        some = f"…, {some}" if len(there) > LISTED_STEPS else some
        like = [name for name in names if step_number(name) == step]
        others = "" if there else await foreign_steps(self._root.store, names)
        others += f"; did you mean {self._root.location(min(like))}?" if like else ""
        return CheckpointNotFoundError(
            f"{files.location}: there is no such step; the steps are {some}{others}",
            location=files.location,
            found=there,
        )

    async def _read_one(
        self, verb: Verb, step: int | None, files: CheckpointFiles, read: Read[T]
    ) -> T:
        with self._pinned(step):
            try:
                return await read(files, step)
            except CheckpointNotFoundError as error:
                if step is None or error.found in ("deleted", "replaced"):
                    raise
                other = await self._without(step, files, error)
                if other is error:
                    raise
                raise other from error
            except CorruptCheckpointError as error:
                await check_unchanged(files, verb, error)
                raise
            finally:
                await files.close()

    @contextlib.contextmanager
    def _pinned(self, step: int | None) -> Iterator[None]:
        """Keep retention from deleting a checkpoint during the block."""
        name = self._root.name or str(step)
        self.pinned[name] += 1
        try:
            yield
        finally:
            self.pinned -= Counter((name,))  # in place; removes names without reads
