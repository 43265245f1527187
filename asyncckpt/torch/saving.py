"""One save, from `write_data` on every rank to `finish` on the coordinator.

All ranks save together, as with `asyncckpt.save`, but the commit waits for consent::

    rank r                                   coordinator
    write: stage, write, post "ready"        write: stage, write, gather "ready", ask for consent
    return                                   return
      │ (DCP gathers the results)              │
      │                                      commit: consent, index, record, publish
    leave ◄──────────── outcome ──────────── report

If a rank fails, the save ends on all ranks, and the files that they had written are removed.
"""

# Rule 1: nothing here refers to the writer, so that a garbage-collected writer ends its save, which
#   holds open files and staging memory. (test_a_save_without_finish_ends_with_its_writer)
# Rule 2: only DCP's own collective runs between `write` and `commit`. If `commit` is not called
#   within `arrival_s`, DCP has failed and will never call it.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from asyncckpt.arguments import Location
from asyncckpt.errors import SaveError
from asyncckpt.flow.driver import run_blocking
from asyncckpt.flow.engine import ended, wait_quietly
from asyncckpt.flow.threads import Outcome
from asyncckpt.options import SaveOptions
from asyncckpt.reports import SaveReport
from asyncckpt.save.plan_cache import LayoutCache
from asyncckpt.save.snapshot import Consent
from asyncckpt.session.pending import PendingSave
from asyncckpt.session.session import Session

FINISH_S = 10.0
"""Time that an exiting process waits for a save that lacks only its commit."""

OUTCOME_S = 1.0
"""Time that a rank waits for the outcome of a save before it begins the next one. If `finish` was
called, the outcome was posted before DCP returned."""

_layouts: deque[LayoutCache] = deque(maxlen=2)
"""Idle plan caches of this process, reused by any writer because each save has a new session. They
hold no values and no user memory."""


class Saving:
    """One rank's part of a save. Its methods block. Owns the coordinator."""

    def __init__(
        self,
        location: Location,
        *,
        options: SaveOptions,
        storage_options: Mapping[str, Any] | None,
        coordinator: object,
    ) -> None:
        self._options = options
        try:
            self._layouts = _layouts.pop()
        except IndexError:  # the first save, or a concurrent one
            self._layouts = LayoutCache()
        self._session = Session(
            location,
            one_shot=True,
            save_options=options,
            storage_options=storage_options,
            coordinator=coordinator,
            owns_coordinator=True,
            layouts=self._layouts,
        )
        self._written: Outcome[None] = Outcome()
        self._consent: Outcome[Mapping[str, Any]] = Outcome()
        self._pending: PendingSave | None = None

    def write(self, tree: dict[str, Any], *, overwrite: bool) -> None:
        """Write this rank's part; on return it is written, but not visible.

        Ctrl-C aborts the save on all ranks.

        Raises:
            …: as `asyncckpt.save`, of any rank; nothing of the save is left.
        """
        session = self._session
        try:
            pending = session.start_save(
                None,
                tree,
                metadata=None,
                metrics=None,
                overwrite=overwrite,
                options=None,
                progress=None,
                stall_first=False,
                consent=Consent(self._ask, self._given),
            )
            self._pending = pending
            # On the engine: Ctrl-C in `add_done_callback` could leave the future locked.
            session.runtime.engine.post(partial(pending._job.future.add_done_callback, self._end))
            wait_quietly(self._written)
            if pending.done():
                run_blocking(pending._wait())
        except BaseException:
            self.abandon()
            raise

    def commit(self, metadata: Mapping[str, Any]) -> SaveReport:
        """Add the metadata, commit, and close; on return the checkpoint is durable.

        Raises:
            …: as `asyncckpt.save`; nothing of the save is left.
        """
        assert self._pending is not None
        if not self._consent.done():
            self._consent.set_result(metadata)
        try:
            return run_blocking(self._pending._wait())
        except KeyboardInterrupt:
            self.abandon()
            raise
        finally:
            self.close()

    def refuse(self, error: BaseException) -> None:
        """End the save on all ranks with an error raised before this rank's part began."""
        self._session.refuse("save", "", error)
        self.close()

    def leave(self) -> None:
        """Wait briefly for the outcome of the save, then abort it."""
        if self._pending is not None:
            wait_quietly(self._pending._job.future, OUTCOME_S)
        self.abandon()

    def drop(self) -> None:
        """Abort the save if it has not ended, without waiting."""
        if self._pending is not None:
            self._pending.cancel()

    def abandon(self) -> None:
        """Abort the save if it has not ended, and wait for its clean-up."""
        self.drop()
        self.close()

    def close(self) -> None:
        """Wait for the end of the save, and release everything."""
        run_blocking(self._session.idle())
        run_blocking(self._session.aclose())

    # -- on the engine

    def _ask(self) -> None:
        engine = self._session.runtime.engine
        engine.drain_deadline_s = min(engine.drain_deadline_s, FINISH_S)
        self._end_wait()

    async def _given(self) -> Mapping[str, Any]:
        limit_s = self._options.arrival_s
        try:
            async with asyncio.timeout(limit_s):
                await ended(self._consent)
        except TimeoutError:
            raise SaveError(
                f"{self._session.root.url}: torch.distributed.checkpoint did not call finish() "
                f"within {limit_s:g} s (arrival_s) after all ranks had written; a rank probably "
                "failed outside this library; nothing was committed",
                location=self._session.root.url,
                stage="commit",
            ) from None
        return self._consent.result()

    def _end(self, _: object) -> None:
        self._end_wait()
        _layouts.append(self._layouts)
        self._session.begin_close()

    def _end_wait(self) -> None:
        if not self._written.done():
            self._written.set_result(None)
