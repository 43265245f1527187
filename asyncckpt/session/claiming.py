"""The claim of one session, made once by process 0 when the session first saves or deletes."""

# Rule 1: a session makes one claim, and no other once it was taken over: only a new session, which
#   starts from the current state of the run, may take over again.
# Rule 2: the sessions of a job of several processes share one claim per root, or they would take
#   over the run from each other. Process 0 makes all claims of a job, so that it knows them.

from __future__ import annotations

import asyncio
import copy
import threading
from weakref import WeakKeyDictionary

from asyncckpt.errors import AsyncCheckpointError, FencedError, UsageError
from asyncckpt.flow.engine import ended
from asyncckpt.flow.threads import Outcome
from asyncckpt.format.claim import Claim
from asyncckpt.log import logger
from asyncckpt.session.processes import Processes
from asyncckpt.session.root import Root

_guard = threading.Lock()

_made: WeakKeyDictionary[object, dict[str, Outcome[Claim | None]]] = WeakKeyDictionary()
"""Claims that this process has made for jobs of several, by job and root; under `_guard`."""


class Claiming:
    """The right of a session to write below its root.

    Args:
        root: the root to claim.
        processes: jobs of several processes always make a claim.
        one_shot: a single checkpoint needs no claim.
        takeover: a single process also makes a claim.
    """

    def __init__(self, root: Root, processes: Processes, *, one_shot: bool, takeover: bool) -> None:
        self._root = root
        self._processes = processes
        self._one_shot = one_shot
        self._takeover = takeover
        self._lock = asyncio.Lock()
        self._epoch: int | None = None
        self._lost: FencedError | None = None

    async def epoch(self) -> int:
        """Return the epoch of the claim, which the first call makes; 0 if none is needed.

        Cancellation: the claim may have been made; the next call makes another one.

        Raises:
            FencedError: the claim was taken over, or another process was faster.
            UsageError: the root is itself a checkpoint; `takeover` with a store that cannot keep
                other writers out.
            StoreError: the claim could not be made.
        """
        if self._one_shot:
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

    def note(self, error: FencedError) -> None:
        """Remember that the claim was taken over."""
        self._lost = self._lost or copy.copy(error)

    async def _first_claim(self) -> Claim | None:
        if self._processes.alone:
            return await self._claim() if self._takeover else None
        while True:
            with _guard:
                try:
                    claims = _made.setdefault(self._processes.job, {})
                except TypeError:  # a coordinator without weak references: sessions share no claim
                    claims = {}
                found = claims.get(self._root.url)
                made = claims[self._root.url] = Outcome() if found is None else found
            if found is None:
                try:
                    made.set_result(await self._claim())
                except BaseException:
                    self._forget(claims, made)
                    # The waiting sessions then try themselves.
                    made.set_exception(AsyncCheckpointError("the claim was not made"))
                    raise
                return made.result()
            await ended(made)
            if made.exception() is None:
                newest = (*await self._root.store.claims(),)[-1:]
                if made.result() == next(iter(newest), None):
                    return made.result()
                # Another job has taken over since, or the run was removed: claim anew.
                self._forget(claims, made)

    def _forget(
        self, claims: dict[str, Outcome[Claim | None]], made: Outcome[Claim | None]
    ) -> None:
        with _guard:
            if claims.get(self._root.url) is made:
                del claims[self._root.url]

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
