"""The claim of one session: made once, when it first saves or deletes, by process 0."""

# Rule 1: a session makes one claim. One that was taken over makes no other: only a new session,
#   which begins with what the run has then, may take over in its turn.

from __future__ import annotations

import asyncio
import copy
import logging

from asyncckpt.errors import FencedError, UsageError
from asyncckpt.session.processes import Processes
from asyncckpt.session.root import Root

logger = logging.getLogger("asyncckpt")


class Claiming:
    """The right of a session to change what is below its root.

    Args:
        root: what is claimed.
        processes: several of them make a claim.
        one_shot: a single checkpoint needs none.
        takeover: a single process also makes one.
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
        """Return the epoch of the claim, which the first call makes; 0 for none.

        Cancellation: the claim may have been made; the next call makes another one.

        Raises:
            FencedError: it was taken over, or another process was faster.
            UsageError: a takeover was asked for, and this store cannot keep other writers out.
            StoreError: it could not be made.
        """
        if self._lost is not None:
            # A new one each time: an error that is raised again gets itself for a context.
            raise copy.copy(self._lost)
        async with self._lock:
            if self._epoch is None:
                self._epoch = await self._claim() if self._wanted else 0
        return self._epoch

    def note(self, error: BaseException) -> None:
        """Remember that the claim was taken over, so that nothing is begun any more."""
        if isinstance(error, FencedError):
            self._lost = self._lost or copy.copy(error)

    @property
    def _wanted(self) -> bool:
        return not self._one_shot and (self._takeover or not self._processes.alone)

    async def _claim(self) -> int:
        claim = await self._root.store.claim()
        if claim is not None:
            logger.info("%s: made claim %d", self._root.url, claim.epoch)
            return claim.epoch
        if self._takeover:
            raise UsageError(
                f"{self._root.url}: takeover=True needs a store that creates an object only where "
                "there is none, and this one does not: an earlier job could go on writing; use "
                "another store, or leave it out and make sure that earlier jobs have ended",
                location=self._root.url,
            )
        logger.warning(
            "%s: this store creates objects without conditions, so that a job that was stopped "
            "and replaced by another one is not kept from writing",
            self._root.url,
        )
        return 0
