"""What one `Checkpointer` (or one one-shot call) owns: engine, budget, staging memory, adapters."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool
from asyncckpt.flow.engine import Engine
from asyncckpt.options import SLOT_NBYTES, default_budget_nbytes
from asyncckpt.ports import HostMemory, Store
from asyncckpt.stages.opened import is_record
from asyncckpt.stores.local import LocalStore, open_local

CONCURRENCY = 6
"""Reads or writes in flight on local disk under `concurrency="auto"`: four threads make them, and
two wait in line, so that no thread idles while the engine hears of the last one's end."""


class Runtime:
    """Engine, budget and pool with the life of their owner.

    `pool` is used on the engine's loop only.
    """

    def __init__(self, name: str, *, host_memory_nbytes: int | None) -> None:
        if os.name == "nt":
            raise UsageError("asyncckpt saves on Linux and macOS; on Windows use WSL")
        self.engine = Engine(name)
        nbytes = default_budget_nbytes() if host_memory_nbytes is None else host_memory_nbytes
        self.budget = ByteBudget(max(1, nbytes // SLOT_NBYTES))
        self.pool = SlotPool(self.budget, self.engine.compute, _host_memory())
        self._stores: list[Store] = []

    def __repr__(self) -> str:
        return f"Runtime({self.engine!r}, {self.pool!r})"

    def concurrency(self, wanted: Any) -> int:
        """Operations in flight for an option that is a number or ``"auto"``."""
        return CONCURRENCY if wanted == "auto" else int(wanted)

    def store(self, root: str | os.PathLike[str], *, direct_io: Any, storage_options: Any) -> Store:
        """The store of a root directory."""
        _check_location(root, storage_options)
        store = LocalStore(_local(root), self.engine.io, direct_io=direct_io, is_valid=is_record)
        self._stores.append(store)
        return store

    def one(
        self, location: str | os.PathLike[str], *, direct_io: Any, storage_options: Any
    ) -> tuple[Store, str]:
        """The store and the name in it of one checkpoint."""
        _check_location(location, storage_options)
        root, name = open_local(_local(location))
        store = LocalStore(root, self.engine.io, direct_io=direct_io, is_valid=is_record)
        self._stores.append(store)
        return store, name

    async def release(self) -> None:
        """Stores are closed and staging memory is returned. Runs on the engine."""
        for store in self._stores:
            await store.close()
        self.pool.close()

    async def aclose(self) -> None:
        """As `release`, and all threads have ended. Idempotent."""
        if self.engine.usable:
            await self.engine.submit(self.release).wait()
        await self.engine.aclose()

    def close(self) -> None:
        """As `aclose`, blocking."""
        if self.engine.usable and not self.engine.abandoned:
            self.engine.submit(self.release).result()
        self.engine.close()


def _host_memory() -> HostMemory:
    """Page-locked memory where this process uses CUDA already, plain memory elsewhere."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        memory: HostMemory = importlib.import_module("asyncckpt.adapters.torch").PinnedMemory()
        return memory
    return AnonymousMemory()


def _local(location: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if isinstance(location, str):
        return location.removeprefix("file://")
    return location


def _check_location(location: object, storage_options: object) -> None:
    if not isinstance(location, (str, os.PathLike)):
        raise UsageError(f"location={location!r}: pass a path (str or os.PathLike)", found=location)
    text = os.fspath(location)
    if not text:
        raise UsageError("location='': pass the path of a directory")
    scheme, separator, _ = str(text).partition("://")
    if separator and scheme != "file":
        raise UsageError(
            f"{scheme}://…: this release saves to local disk; object stores are not supported yet",
            location=str(text).split("?")[0],
        )
    if storage_options:
        raise UsageError("storage_options apply to object stores; leave them out for local paths")
