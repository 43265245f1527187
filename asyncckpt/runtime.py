"""Resources of a `Checkpointer` or one-shot call: engine, budget, staging memory, stores."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import weakref
from typing import Any

from asyncckpt.arguments import check_path
from asyncckpt.errors import UsageError
from asyncckpt.flow.arena import Recycled
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool
from asyncckpt.flow.engine import Engine
from asyncckpt.format.record import epoch_of, is_record, outline_of, save_id_of
from asyncckpt.options import MIN_BUDGET_NBYTES, SLOT_NBYTES, default_budget_nbytes
from asyncckpt.ports import Bytes, Sizes, Store, StoreCapabilities
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.objects.clients.urls import check_options, is_url, split_url, without_scheme
from asyncckpt.stores.paths import check_name, open_local

SPARE_WINDOWS = 2
"""Windows that are copied and checksummed while every stream sends another."""


class StagingMemory(AnonymousMemory):
    """Anonymous memory, page-locked once torch uses CUDA in this process, until it is unmapped."""

    def allocate(self, nbytes: int) -> Bytes:
        buffer = super().allocate(nbytes)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            buffer.fill(0)  # NumPy releases the interpreter lock, and CUDA may not
            address = buffer.ctypes.data
            importlib.import_module("asyncckpt.adapters.torch").page_lock(address, nbytes)
            # Of the array that all views keep alive. The finalizer keeps the mapping alive, because
            # CUDA must not find the pages gone, and NumPy 2.5 drops an array's base first.
            owner: Any = buffer.base
            unlock = weakref.finalize(owner, _page_unlock, owner.base, address, os.getpid())
            unlock.atexit = False
        return buffer


def _page_unlock(mapping: object, address: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child cannot use CUDA
        importlib.import_module("asyncckpt.adapters.torch").page_unlock(address)


class Runtime:
    """Engine, budget, pools and stores of one owner. `pool` belongs to the engine's loop."""

    def __init__(self, name: str, *, host_memory_nbytes: int | None) -> None:
        if os.name == "nt":
            raise UsageError("asyncckpt saves on Linux and macOS; on Windows use WSL")
        self.engine = Engine(name)
        self._divides = host_memory_nbytes is None
        nbytes = default_budget_nbytes() if host_memory_nbytes is None else host_memory_nbytes
        self.budget = ByteBudget(max(SLOT_NBYTES, nbytes))
        self.pool = SlotPool(self.budget, self.engine.compute, StagingMemory())
        self.recycled = Recycled(self.budget)
        self._window_pool: SlotPool | None = None
        self._stores: list[Store] = []

    def share_host(self, processes: int) -> None:
        """Divide the default budget and the threads among the processes of this host.

        Call it once, on the engine's loop, before anything is saved.
        """
        for workers in (self.engine.compute, self.engine.io):
            workers.count = max(1, workers.count // processes)
        if self._divides:
            self.budget.capacity = max(MIN_BUDGET_NBYTES, self.budget.capacity // processes)
            self.budget.evict()  # prepared before

    def window_pool(self, capabilities: StoreCapabilities, sizes: Sizes) -> SlotPool:
        """Return the pool that stages the windows of a save."""
        if capabilities.positional_writes:
            return self.pool
        # The budget covers the client's copies, too.
        held = min(sizes.window_nbytes * (1 + capabilities.client_copies), self.budget.capacity)
        pool = self._window_pool
        if pool is None or (pool.slot_nbytes, pool.held_nbytes) != (sizes.window_nbytes, held):
            if pool is not None:
                pool.close()
            pool = self._window_pool = SlotPool(
                self.budget,
                self.engine.compute,
                StagingMemory(),
                slot_nbytes=sizes.window_nbytes,
                held_nbytes=held,
                pipeline_slots=sizes.concurrency + SPARE_WINDOWS,
            )
        return pool

    def store(self, root: Any, *, direct_io: Any, storage_options: Any) -> Store:
        """Return the store of a path or URL, or the store object itself."""
        _check_location(root, storage_options)
        if _is_store(root):
            store: Store = root
        elif is_url(root):
            store = self._objects(str(root), storage_options)
        else:
            store = LocalStore(
                _local(root), self.engine.io, direct_io=direct_io, is_valid=is_record
            )
        self._stores.append(store)
        return store

    def one(self, location: Any, *, direct_io: Any, storage_options: Any) -> tuple[Store, str]:
        """Return store and name of one checkpoint; see `place_of`."""
        root, name = place_of(location, storage_options)
        return self.store(root, direct_io=direct_io, storage_options=storage_options), name

    def _objects(self, root: str, storage_options: Any) -> Store:
        # Imported when needed: a save to local disk needs none of this.
        from asyncckpt.stores.objects.clients.opening import open_client
        from asyncckpt.stores.objects.context import Context
        from asyncckpt.stores.objects.requests.requests import Requests
        from asyncckpt.stores.objects.store import ObjectStore

        client = open_client(root, storage_options=storage_options, workers=self.engine.io)
        workers = self.engine.compute
        return ObjectStore(Context(Requests(client), workers, save_id_of, outline_of, epoch_of))

    async def release(self) -> None:
        """Close stores and free staging memory; then raise errors of stores. On the engine."""
        try:
            async with contextlib.AsyncExitStack() as stores:
                for store in self._stores:
                    stores.push_async_callback(store.close)
        finally:
            self.recycled.close()
            self.pool.close()
            if self._window_pool is not None:
                self._window_pool.close()

    async def aclose(self) -> None:
        """Release all resources and end all threads. Idempotent."""
        try:
            if self.engine.usable:
                await self.engine.submit(self.release).wait()
        finally:
            await self.engine.aclose()


def place_of(location: Any, storage_options: object) -> tuple[Any, str]:
    """Return root and name of a checkpoint; its location may be a pair of store and name."""
    if isinstance(location, tuple) and len(location) == 2 and _is_store(location[0]):
        return location[0], check_name(location[1])
    _check_location(location, storage_options)
    return split_url(str(location)) if is_url(location) else open_local(_local(location))


def _is_store(location: object) -> bool:
    return all(hasattr(location, name) for name in ("begin", "names", "files", "sizes"))


def _local(location: Any) -> str | os.PathLike[str]:
    path: str | os.PathLike[str] = location
    return without_scheme(path) if isinstance(path, str) else path


def _check_location(location: object, storage_options: object) -> None:
    check_options(storage_options)
    if _is_store(location):
        if storage_options:
            raise UsageError("storage_options apply to URLs; a store object has its own")
        return
    if not isinstance(location, (str, os.PathLike)):
        raise UsageError(
            f"location={location!r:.80}: pass a path (str or os.PathLike), a URL, or a store",
            found=type(location),
        )
    check_path(location)
    if storage_options and not is_url(location):
        raise UsageError("storage_options apply to object stores; leave them out for local paths")
