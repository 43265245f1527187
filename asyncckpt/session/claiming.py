"""The claim of one session, made once by process 0 when the session first saves or deletes."""

# Rule 1: a session makes one claim, and no other once it was taken over: only a new session, which
#   starts from the current state of the run, may take over again.
# Rule 2: the sessions of a job of several processes share one claim per root, or they would take
#   over the run from each other. Process 0 makes all claims of a job, so that it knows them.
# Rule 3: a claim that was taken over is lost to every session of the job that is open by then, also
#   to one that has not saved yet.
#   (test_a_checkpointer_that_was_idle_during_a_takeover_does_not_take_the_run_back)

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

from asyncckpt.errors import AsyncCheckpointError, FencedError, UsageError
from asyncckpt.flow.engine import ended
from asyncckpt.flow.threads import Outcome
from asyncckpt.format.claim import Claim
from asyncckpt.log import logger
from asyncckpt.session.processes import Processes
from asyncckpt.session.root import Root

_guard = threading.Lock()

_Claims = dict[str, Outcome[Claim | None]]
_Losses = dict[str, FencedError]

_jobs: WeakKeyDictionary[object, tuple[_Claims, _Losses]] = WeakKeyDictionary()
"""Claims that this process holds for jobs of several processes, and the errors of those that they
have lost, by root; changed under `_guard`."""


class Claiming:
    """The right of a session to write below its root.

    Args:
        root: the root to claim; a single checkpoint needs no claim.
        processes: jobs of several processes always make a claim.
        takeover: a single process also makes a claim.
    """

    def __init__(self, root: Root, processes: Processes, *, takeover: bool) -> None:
        self._root = root
        self._processes = processes
        self._takeover = takeover
        self._lock = asyncio.Lock()
        self._epoch: int | None = None
        self._held: Outcome[Claim | None] | None = None
        self._lost: FencedError | None = None
        try:  # without the lock, which another thread could hold during a fork
            self._made, self._losses = _jobs.setdefault(processes.job, ({}, {}))
        except TypeError:  # a coordinator without weak references: sessions share no claim
            self._made, self._losses = {}, {}
        self._lost_before = self._losses.get(root.url)

    async def epoch(self) -> int:
        """Return the epoch of the claim, which the first call makes; 0 if none is needed.

        Cancellation: the claim may have been made; the next call makes another one.

        Raises:
            FencedError: the claim was taken over, or another process was faster.
            UsageError: the root is itself a checkpoint; `takeover` with a store that cannot keep
                other writers out.
            StoreError: the claim could not be made.
        """
        if self._root.name:
            return 0
        if self._lost is not None:
            # A copy each time: an error raised again would become its own context.
            raise copy.copy(self._lost)
        async with self._lock:
            if self._epoch is None:
                await self._root.refuse_checkpoint()
                claim = await self._first_claim()
                self._epoch = 0 if claim is None else claim.epoch
        return self._epoch

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[int]:
        """Yield the epoch (see `epoch`); an error that says the claim was taken over is noted."""
        epoch = await self.epoch()
        try:
            yield epoch
        except FencedError as error:
            self.note(error)
            raise

    def note(self, error: FencedError) -> None:
        """Remember that the claim was taken over."""
        self._lost = self._lost or copy.copy(error)
        if self._held is not None:
            self._forget(self._held, error)

    async def _first_claim(self) -> Claim | None:
        if self._processes.alone:
            return await self._claim() if self._takeover else None
        url = self._root.url
        while True:
            with _guard:
                lost = self._losses.get(url)
                if lost is not None and lost is not self._lost_before:
                    raise copy.copy(lost)
                found = self._made.get(url)
                self._held = made = self._made[url] = Outcome() if found is None else found
            if found is None:
                try:
                    made.set_result(await self._claim())
                except BaseException as error:
                    self._forget(made, error)
                    # The waiting sessions then try themselves.
                    made.set_exception(AsyncCheckpointError("the claim was not made"))
                    raise
                return made.result()
            await ended(made)
            if made.exception() is not None:
                continue
            claim = made.result()
            if claim is None:
                return None
            try:
                await self._root.store.check_claim(claim.epoch)
            except FencedError as error:
                self._forget(made, error)
                raise
            if claim in await self._root.store.claims():
                return claim
            self._forget(made)  # the run was removed

    def _forget(self, made: Outcome[Claim | None], error: BaseException | None = None) -> None:
        with _guard:
            if self._made.get(self._root.url) is made:
                del self._made[self._root.url]
                if isinstance(error, FencedError):
                    self._losses[self._root.url] = copy.copy(error)  # without its traceback

    async def _claim(self) -> Claim | None:
        claim = await self._root.store.claim()
        if claim is not None:
            logger.info("%s: made claim %d", self._root.url, claim.epoch)
            return claim
        if self._takeover:
            raise UsageError(
                f"{self._root.url}: takeover=True needs a store that creates an object only where "
                "there is none, and this one does not: an earlier job could continue to write; use "
                "another store, or leave it out and make sure that earlier jobs have ended",
                location=self._root.url,
            )
        logger.warning(
            "%s: this store creates objects without conditions, so a job that was stopped and "
            "replaced by another one can still write",
            self._root.url,
        )
        return None
