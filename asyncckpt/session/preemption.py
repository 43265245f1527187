"""Preemption: how all processes of a job learn, at the same step, that the scheduler will end it.

Every process reports its progress by calling `reached` with its step. Under JAX, the sync point of
its runtime does the rest. Otherwise, the processes agree here::

    process p                                other processes
    notes SIGTERM
    puts the notice ──────────────────────►  each finds it, at most one pause later
    holds its next `reached`                 hold their next `reached`
    posts the step of its last call          post theirs
                  ◄── process 0 answers: the highest of these, plus one ──►
    `reached` continues                      `reached` continues
"""

# Rule 1: between posting its last step and learning the answer, a process reaches no further step,
#   so the answer is ahead of every process, and all of them reach it.
#   (test_all_processes_end_at_one_step_however_fast_each_is)
# Rule 2: processes agree on their engines. The training thread may be inside a collective that
#   waits for a process whose `reached` is held, so the agreement must not need that thread.
#   (test_processes_agree_while_their_threads_are_busy)
# Rule 3: without a notice, a step costs no message: `reached` compares numbers. Each process polls
#   one key every `WATCH_S`, however long its steps take.

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from asyncckpt.coordinators.choice import sync_point
from asyncckpt.coordinators.group import Group
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import StoreError, UsageError
from asyncckpt.flow.engine import Engine, Job, ended
from asyncckpt.log import logger
from asyncckpt.reports import SaveReport
from asyncckpt.session.processes import Processes
from asyncckpt.session.sigterm import SigtermHandler

WATCH_S = 0.5
"""Interval at which a process polls for a notice: short compared to a grace period of 30 s."""

WATCH_PER_PROCESS_S = 500e-6
"""Minimum interval per process of a large job: the server gets at most 2,000 polls a second."""


TRIES = 3
"""Rounds in which processes try to agree while calls to the coordinator's service fail."""


class Preemption:
    """Notice that the job has to end, and the step at which it ends.

    Args:
        grace_s: seconds between the notice and the end, None if unknown.

    Attributes:
        step: first step at which all processes know of the notice; None until they do.

    Raises:
        UsageError: a signal handler is needed, and this is not the main thread.
    """

    def __init__(self, engine: Engine, processes: Processes, *, grace_s: float | None) -> None:
        self._engine = engine
        self._grace_s = grace_s
        self._last_save_s = 0.0
        self._logged = False
        self.step: int | None = None
        point = sync_point()
        self._source = Agreement(engine, processes) if point is None else SyncPoint(point)

    async def reached(self, step: int) -> bool:
        """Report that this process has reached `step`; return whether the job has to end at it.

        Cancellation: only stops waiting for other processes.

        Raises:
            ClosedError: the `Checkpointer` was closed.
            SaveError, UsageError: the processes cannot agree; names a missing one.
            StoreError: the coordinator's service has failed in `TRIES` rounds.
        """
        self._engine.check()
        if self.step is None:
            self.step = await self._source.reached(step)
        if self.step is None or step < self.step:
            return False
        if not self._logged:
            self._logged = True
            logger.warning("preempted: step %d is the last one%s", step, self._too_short())
        return True

    def noted(self, report: SaveReport) -> SaveReport:
        """Return the report of a save with its notes about preemption."""
        notes = report.notes
        if not report.skipped:
            self._last_save_s = report.total_s
            if self._too_short():
                notes = (*notes, f"a preempted job may not finish{self._too_short()}")
        ends = self.step is not None and report.step is not None and report.step >= self.step
        return replace(report, preempted=ends, notes=notes)

    async def release(self) -> None:
        """Stop polling for a notice, or wait for an agreement that has begun."""
        await self._source.release()

    def close(self) -> None:
        """Restore the signal handler. Idempotent."""
        self._source.close()

    def _too_short(self) -> str:
        if self._grace_s is None or self._last_save_s <= self._grace_s:
            return ""
        return (
            f": the last save took {self._last_save_s:.1f} s, and the grace period is "
            f"{self._grace_s:g} s (grace_s)"
        )


class SyncPoint:
    """JAX's sync point, whose runtime handles SIGTERM; we install no handler.

    A call takes less than a microsecond; while processes agree, it holds the calling thread for a
    few milliseconds.

    Args:
        point: `jax.experimental.multihost_utils.reached_preemption_sync_point`.
    """

    def __init__(self, point: Callable[[int], bool]) -> None:
        self._point = point
        self._last: int | None = None

    async def reached(self, step: int) -> int | None:
        """Report the step to JAX; return the step that JAX chose once this process reaches it."""
        # JAX chooses the highest number it was asked about, plus one, and compares for equality, so
        # no number may be skipped. If the signal came before the first step, JAX chooses 1.
        if self._last is None:
            numbers: Sequence[int] = (1, step) if step > 1 else (step,)
        else:
            numbers = range(min(self._last + 1, step), step + 1)
        self._last = step
        return next((number for number in numbers if self._point(number)), None)

    async def release(self) -> None:
        """Do nothing: the sync point belongs to the runtime."""

    def close(self) -> None:
        """Do nothing: there is no handler."""


class Agreement:
    """Agreement of a session's processes on a step after one of them has received SIGTERM."""

    def __init__(self, engine: Engine, processes: Processes) -> None:
        self._engine = engine
        self._processes = processes
        self._handler = SigtermHandler()
        self._lock = threading.RLock()  # reentrant: for calls of signal handlers
        self._last: int | None = None
        self._held = False
        self._submitted = False
        self._job: Job[int] | None = None

    async def reached(self, step: int) -> int | None:
        """Record the step; return the agreed one, waiting for it, or None without a notice."""
        if self._last is None:
            _check_order()
        alone = self._processes.alone  # without the lock: a signal handler may save meanwhile
        with self._lock:
            if not self._held:
                self._last = step
            if alone:
                return step if self._handler.noticed else None
            if not self._submitted:
                self._submitted = True  # first: a signal handler may run inside the next call
                try:
                    self._job = self._engine.submit(self._agree)
                except BaseException:
                    self._submitted = False
                    raise
            job = self._job
            if job is None or not (self._held or job.done()):
                return None
        await ended(job.future)
        return job.future.result()

    async def release(self) -> None:
        """Stop polling for a notice, or wait for an agreement that has begun.

        The others need this process to agree, even if it takes no further step.
        """
        if self._job is None:
            return
        if not self._held:
            self._job.cancel()
        await ended(self._job.future)

    def close(self) -> None:
        """Restore the signal handler. Idempotent."""
        self._handler.close()

    # -- on the engine

    async def _agree(self) -> int:
        """Return the step on which all processes agree after one of them has received notice."""
        await self._notice(await self._processes.group())
        with self._lock:
            self._held = True
            last = self._last
        assert last is not None
        for left in reversed(range(TRIES)):
            number = self._processes.count("preemption")
            round_ = await self._processes.round("preemption", number)
            try:
                return await round_.run(partial(self._agree_on, round_, last))
            except StoreError as error:  # all processes get it, and begin the next round
                if not left:
                    raise
                logger.warning("agreeing on the last step before preemption: %s", error)
        raise AssertionError("the last try returns or raises")

    async def _agree_on(self, round_: Round, last: int) -> int:
        """Return the step after the last one of any process."""
        if not round_.leads:
            await round_.post("last", str(last).encode())
            return int(await round_.outcome())
        others = await round_.gathered("last")
        step = max(last, *map(int, others.values())) + 1
        await round_.commit()
        await round_.finish(str(step).encode())
        return step

    async def _notice(self, group: Group) -> None:
        """Return once any process has posted a notice."""
        key = group.key("preempted")
        pause_s = max(WATCH_S, WATCH_PER_PROCESS_S * group.process_count)
        answers = True
        while True:
            try:
                if self._handler.noticed:
                    await group.coordinator.put(key, str(group.process_index).encode())
                    return
                if await group.coordinator.look(key) is not None:
                    return
                answers = True
            except StoreError as error:
                if answers:  # log each outage once
                    logger.warning("polling for a notice of preemption: %s", error)
                answers = False
            await asyncio.sleep(pause_s)


def _check_order() -> None:
    """Check that JAX has not replaced the handler since it was installed."""
    if sync_point() is not None:
        raise UsageError(
            "jax.distributed.initialize() was called after Checkpointer(preemption=True), and "
            "handles SIGTERM now: call it first"
        )
