"""Where the checkpoints of one core lie: a store, opened at first use, swept once, and closed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.ports import Store
from asyncckpt.stores.objects.urls import is_url, location_text, split_url

logger = logging.getLogger("asyncckpt")

SWEEP_S = 120.0
"""What a sweep may take that nobody has asked for, at the end."""


class Root:
    """The root of a run, or the parent of a one-shot checkpoint.

    Attributes:
        url: its path or URL.
        name: name of the one-shot checkpoint, empty for a run.

    Raises:
        UsageError: the location or its options are wrong.
    """

    def __init__(
        self,
        runtime: Runtime,
        location: str | os.PathLike[str],
        *,
        one_shot: bool,
        direct_io: Any,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.name = ""
        self._runtime = runtime
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._open_store: Callable[[], Store] | None = None
        self._swept = False
        self._to_sweep = False
        if one_shot and is_url(location):
            # Libraries are imported and accounts looked up: nothing for the caller's loop.
            root, self.name = split_url(str(location))
            self.url = location_text(root)
            self._open_store = partial(
                runtime.store, root, direct_io=direct_io, storage_options=storage_options
            )
        elif one_shot:
            self._store, self.name = runtime.one(
                location, direct_io=direct_io, storage_options=storage_options
            )
            self.url = self._store.url.rstrip("/")
        else:
            self._store = runtime.store(
                location, direct_io=direct_io, storage_options=storage_options
            )
            self.url = self._store.url.rstrip("/")

    def __repr__(self) -> str:
        return f"Root({self.url!r}, name={self.name!r})"

    @property
    def store(self) -> Store:
        """What holds the checkpoints; there once `open_store` has returned."""
        assert self._store is not None
        return self._store

    @store.setter
    def store(self, store: Store) -> None:
        self._store = store

    async def open_store(self) -> None:
        """The store is open. Idempotent."""
        if self._store is None:
            async with self._opening:
                if self._store is None:
                    assert self._open_store is not None
                    self._store = await self._runtime.engine.compute.run(self._open_store)

    def save_begun(self) -> None:
        """What saves may leave is swept in the end, unless it was in the beginning."""
        self._to_sweep = not self._swept

    async def sweep(self) -> None:
        """Leftovers of dead attempts are removed; a failure to do so is logged."""
        self._swept, self._to_sweep = True, False
        try:
            swept = await self.store.sweep()
        except AsyncCheckpointError as error:
            logger.warning("%s could not be swept: %s", self.url, error)
        except Exception:
            # From a store that is not ours. What was saved is durable all the same.
            logger.warning("%s could not be swept", self.url, exc_info=True)
        else:
            if swept:
                logger.info("%s: removed leftovers %s", self.url, ", ".join(swept))

    async def release(self) -> None:
        """All that the runtime holds is released, and before that, what has to be swept is.

        Cancellation: ends the sweep, releases, then raises.
        """
        store = self._store
        try:
            if self._to_sweep and store and (not self.name or store.capabilities.proves_dead):
                # Nobody opened this with a `with` block: one-shot saves, for example.
                try:
                    async with asyncio.timeout(SWEEP_S):
                        await self.sweep()
                except TimeoutError:
                    logger.warning(
                        "leftovers of dead saves were looked for and not found within %g s; the "
                        "next Checkpointer looks again",
                        SWEEP_S,
                    )
        finally:
            await self._runtime.release()
