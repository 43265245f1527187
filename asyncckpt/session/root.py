"""The root of a session: a store that is opened at first use, swept once, and closed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

from asyncckpt.coordinators.messages import decode_error
from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.log import logger
from asyncckpt.ports import Store, keeps_notes
from asyncckpt.runtime import Runtime, place_of
from asyncckpt.stores.objects.clients.urls import check_options, check_scheme, is_url, parse_url
from asyncckpt.stores.paths import below

SWEEP_S = 120.0
"""Time limit of the automatic sweep when a session is closed."""


class Root:
    """The root of a run, or the parent of a one-shot checkpoint.

    Attributes:
        url: its path or URL.
        name: name of the one-shot checkpoint; empty for a run.
        store: holds the checkpoints; set once `opened` has been awaited.
        to_sweep: there were saves, but no sweep yet.
        swept: the root has been swept.

    Raises:
        UsageError: the location or its options are wrong.
    """

    store: Store

    def __init__(
        self,
        runtime: Runtime,
        location: str | os.PathLike[str],
        *,
        one_shot: bool,
        direct_io: Any,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.to_sweep = False
        self._runtime = runtime
        self.swept = False
        self._opening = asyncio.Lock()
        self._open_store: Callable[[], Store] | None = None
        root, self.name = place_of(location, storage_options) if one_shot else (location, "")
        check_options(storage_options)
        # Copied, because a URL is opened later, when the caller may have changed its dict.
        options = {
            name: copy(value) if isinstance(value, dict) else value
            for name, value in (storage_options or {}).items()
        }
        open_store = partial(runtime.store, root, direct_io=direct_io, storage_options=options)
        if is_url(root):
            # Opening imports libraries and looks up accounts: not on the caller's loop.
            url = parse_url(str(root))
            if not options.keys() & {"client", "filesystem"}:
                check_scheme(url)
            self.url = str(url)
            self._open_store = open_store
        else:
            self.store = open_store()
            self.url = self.store.url

    def location(self, name: object) -> str:
        """Return the path or URL of a checkpoint."""
        return below(self.url, f"{name}")

    async def opened(self, function: Callable[[], Any]) -> Any:
        """Open the store if necessary, then await the coroutine of `function`."""
        if self._open_store is not None:
            async with self._opening:
                if self._open_store is not None:
                    self.store = await self._runtime.engine.compute.run(self._open_store)
                    self._open_store = None
        return await function()

    async def refuse_checkpoint(self) -> None:
        """Check, before anything was listed, that a local root is not itself a checkpoint.

        Raises:
            UsageError: it is one.
        """
        if is_url(self.url):  # would cost each new run a request
            return
        record = os.path.join(self.url, RECORD_NAME)
        if await self._runtime.engine.io.run(os.path.isfile, record):
            raise self.checkpoint_error()

    def checkpoint_error(self) -> UsageError:
        """Return the error for a root that is itself a checkpoint."""
        return UsageError(
            f"{self.url}: this is a checkpoint, not the root of a run; pass the directory "
            f"above it to Checkpointer, or read it with restore({self.url!r})",
            location=self.url,
        )

    async def sweep(self) -> None:
        """Remove leftovers of dead attempts; a failure is logged."""
        self.swept, self.to_sweep = True, False
        try:
            swept = await self.store.sweep()
        except AsyncCheckpointError as error:
            logger.warning("%s could not be swept: %s", self.url, error)
        except Exception:
            # An error of a third-party store; the checkpoints are durable.
            logger.warning("%s could not be swept", self.url, exc_info=True)
        else:
            if swept:
                logger.info("repaired %s: removed leftovers %s", self.url, ", ".join(swept))

    async def log_notes(self) -> None:
        """Log the last errors of the processes of earlier jobs, and remove them from the store."""
        if not keeps_notes(self.store):
            return
        try:
            notes = await self.store.take_notes()
        except Exception as error:
            # With the traceback of an error of a third-party store.
            own = isinstance(error, AsyncCheckpointError)
            text = "%s: the errors of earlier jobs cannot be read: %s"
            logger.warning(text, self.url, error, exc_info=not own)
            return
        for note in notes:
            # Any writer to this root could forge lines, or control a terminal.
            text = "".join(
                character if character.isprintable() else repr(character)[1:-1]
                for character in str(decode_error(note))
            )
            logger.warning("%s: in an earlier job, %s", self.url, text)

    async def release(self) -> None:
        """Sweep if still due, then release all resources of the runtime.

        Cancellation: ends the sweep, releases, then raises.
        """
        try:
            # There was no `with` block, which sweeps first: one-shot saves, for example.
            late = self.to_sweep and self._open_store is None
            if late and (not self.name or self.store.capabilities.proves_dead):
                try:
                    async with asyncio.timeout(SWEEP_S):
                        await self.sweep()
                except TimeoutError:
                    logger.warning(
                        "sweeping %s did not end within %g s; the next Checkpointer sweeps again",
                        self.url,
                        SWEEP_S,
                    )
        finally:
            await self._runtime.release()
