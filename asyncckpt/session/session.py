"""The composition root: everything both facades do, as calls into one engine."""

# Rule 1: what must happen in the caller's thread (structure, scalars, thread-local framework state)
#   happens in plain functions here; everything else is a coroutine for the engine.
# Rule 2: saves of one core run one after the other, in the order of their calls.

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from asyncckpt.adapters import AdapterSet, adapter_named, adapters_for_loaded_frameworks
from asyncckpt.checkpointer.access import ReadAccess
from asyncckpt.checkpointer.arguments import (
    check_coordinator,
    check_keep,
    checked_globs,
    checked_metadata,
    checked_metrics,
    guarded,
    typed,
)
from asyncckpt.checkpointer.capture import capture
from asyncckpt.checkpointer.in_flight import InFlight, skipped
from asyncckpt.checkpointer.layout import LayoutCache
from asyncckpt.checkpointer.pending import PendingSave
from asyncckpt.checkpointer.restores import Mode, RestoreOutcome, RestoreRequest, wanted_leaves
from asyncckpt.checkpointer.retain import History
from asyncckpt.checkpointer.root import Root
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.checkpointer.saves import Save, SaveRequest, SaveState, sizes_for
from asyncckpt.checkpointer.steps import Steps
from asyncckpt.flow.engine import Job, wait_quietly
from asyncckpt.options import RestoreOptions, SaveOptions
from asyncckpt.ports import ArrayAdapter, Store
from asyncckpt.reports import CheckpointInfo, Progress, SaveReport, VerifyReport
from asyncckpt.retention import Retention
from asyncckpt.tree import Flat, flatten

T = TypeVar("T")


class Core:
    """One root (or the parent of a one-shot checkpoint) with its engine, budget and saves."""

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        one_shot: bool = False,
        keep: Retention | None = None,
        save_options: SaveOptions | None = None,
        restore_options: RestoreOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        coordinator: object = "auto",
    ) -> None:
        self.save_options = typed("save_options", save_options, SaveOptions)
        self.restore_options = typed("restore_options", restore_options, RestoreOptions)
        check_keep(keep)
        check_coordinator(coordinator)
        budget = self.save_options.host_memory_nbytes
        if budget is None and one_shot:
            budget = self.restore_options.host_memory_nbytes
        self.runtime = Runtime("asyncckpt", host_memory_nbytes=budget)
        self._root = Root(
            self.runtime,
            location,
            one_shot=one_shot,
            direct_io=self.save_options.direct_io,
            storage_options=storage_options,
        )
        self.url, self.name = self._root.url, self._root.name
        history = None if keep is None else History(keep, self.runtime.engine.compute)
        self._steps = Steps(self._root, history)
        self._access = ReadAccess(self.runtime, self._root, self._steps)
        self._layouts = LayoutCache()
        self._saves = InFlight()
        self._turn = asyncio.Lock()
        engine = self.runtime.engine
        engine.drain_deadline_s = self.save_options.exit_deadline_s
        engine.on_exit = _futures_of(weakref.ref(self))
        weakref.finalize(self, _end, engine).atexit = False

    def __repr__(self) -> str:
        state = (
            "closed" if self.runtime.engine.closed else f"{len(self.in_flight())} saves in flight"
        )
        return f"({self.url!r}, {state})"

    @property
    def store(self) -> Store:
        """What holds the checkpoints; open in everything that goes through `call`."""
        return self._root.store

    @store.setter
    def store(self, store: Store) -> None:
        self._root.store = store

    # -- in the caller's thread

    def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> Job[T]:
        """The coroutine runs on the engine.

        Raises:
            ClosedError: after `close`, or in a forked child.
        """
        return self.runtime.engine.submit(lambda: self._with_store(function))

    def in_flight(self) -> list[PendingSave]:
        """Saves that have not ended."""
        return self._saves.pending()

    def raise_unseen(self) -> None:
        """The failure of an earlier save that nobody has heard of is raised, once."""
        self._saves.raise_unseen()

    def heard(self) -> AbstractContextManager[None]:
        """As `raise_unseen`, after the block, and before an error of the block itself."""
        return self._saves.heard()

    def unseen_error(self) -> BaseException | None:
        """The first failure that nobody has heard of; it counts as heard from now on."""
        return self._saves.unseen_error()

    def begin_save(
        self,
        kind: type[PendingSave],
        name: str,
        step: int | None,
        tree: Any,
        *,
        metadata: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        overwrite: bool,
        options: SaveOptions | None,
        progress: Callable[[Progress], None] | None,
        stall_first: bool,
    ) -> Any:
        """A save of the tree as it is now is on its way.

        Raises:
            UsageError: arguments or leaves are wrong; nothing was begun.
            …: the unseen failure of an earlier save.
        """
        options = typed("options", options, SaveOptions, self.save_options)
        self.runtime.engine.check()
        self._saves.raise_unseen(options)
        location = f"{self.url}/{name}"
        if stall_first and not self._saves.admits(options, location):
            return skipped(kind, self.runtime.engine, location, step)
        state = SaveState()
        request = SaveRequest(
            name=name,
            step=step,
            taken=capture(tree, adapters_for_loaded_frameworks()),
            metadata=checked_metadata(metadata),
            metrics=checked_metrics(metrics),
            overwrite=overwrite,
            options=options,
            progress=guarded(progress),
            stall_first=stall_first,
        )
        staged: Future[None] = Future()
        staged.set_running_or_notify_cancel()  # a cancelled wait for it must not resolve it

        def all_staged() -> None:
            if not staged.done():
                staged.set_result(None)

        def save() -> Coroutine[Any, Any, SaveReport]:
            running = Save(self.runtime, self.store, self._layouts, request, state, all_staged)
            return running.run(self._turn, self._retained)

        job = self.call(save)
        # Whatever ends the job also ends the wait for staging.
        job.future.add_done_callback(lambda _: all_staged())
        pending = kind(job, staged, state, location=location, step=step)
        self._saves.add(pending)
        self._root.save_begun()
        return pending

    def restore_request(
        self,
        mode: Mode,
        like: Any,
        *,
        leaves: str,
        include: str | Sequence[str] | None,
        strict: bool,
        cast: bool,
        options: RestoreOptions | None,
        progress: Callable[[Progress], None] | None,
    ) -> tuple[RestoreRequest, Flat | None, AdapterSet]:
        """What a caller wants restored, taken in its thread."""
        options = typed("options", options, RestoreOptions, self.restore_options)
        self.runtime.engine.check()
        framework = adapter_named(leaves)
        adapters = adapters_for_loaded_frameworks()
        flat = None
        wanted = []
        stateful: dict[str, ArrayAdapter | None] = {}
        if mode != "saved":
            flat = flatten(like, adapters.nodes)
            wanted = wanted_leaves(flat.paths, flat.leaves, adapters, in_place=mode == "into")
            if mode == "into":
                stateful = {
                    path: adapters.expected_by(type(owner)) for path, owner in flat.stateful
                }
        request = RestoreRequest(
            mode=mode,
            wanted=wanted,
            framework=framework,
            include=checked_globs(include),
            strict=strict,
            cast=cast,
            options=options,
            progress=guarded(progress),
            stateful=stateful,
            loaded={adapter.name: adapter for adapter in adapters.adapters},
        )
        return request, flat, adapters

    # -- on the engine

    async def _with_store(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._root.open_store()
        return await function()

    async def open(self) -> None:
        """Leftovers of dead attempts below the root are swept; a failure to do so is logged."""
        await self._root.sweep()

    async def prepare(self, tree_nbytes: int) -> int:
        """Staging memory for a state of this size is allocated and touched; returns its bytes."""
        async with self._turn:  # a save holds windows of the size that was right when it began
            store = self.store
            sizes = sizes_for(self.runtime, store, tree_nbytes, self.save_options)
            pool = self.runtime.window_pool(store.capabilities, sizes)
            await pool.prepare(-(-tree_nbytes // pool.slot_nbytes) + 2)
            return pool.allocated_nbytes

    async def steps(self) -> list[int]:
        """Steps with a valid commit record, ascending."""
        return await self._steps.found()

    async def latest_step(self) -> int | None:
        """The highest step with a valid commit record."""
        return await self._steps.latest()

    async def restore(self, step: int | None, request: RestoreRequest) -> RestoreOutcome:
        """The checkpoint of a step, of the newest one with None, or the one-shot checkpoint."""
        return await self._access.restore(step, request)

    async def inspect(self, step: int | None) -> CheckpointInfo:
        """What the checkpoint holds, from its metadata."""
        return await self._access.inspect(step)

    async def verify(
        self, step: int | None, progress: Callable[[Progress], None] | None
    ) -> VerifyReport:
        """Every byte of the checkpoint was read and checked."""
        return await self._access.verify(step, progress)

    async def delete(self, name: str) -> None:
        """The checkpoint is gone.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of this name.
        """
        await self._steps.delete(name)

    async def delete_after(self, step: int) -> list[int]:
        """All steps above `step` are gone, those of saves in flight too; returns them."""
        async with self._turn:
            return await self._steps.delete_after(step)

    async def _retained(self, report: SaveReport) -> SaveReport:
        return await self._steps.retain(report, self._access.counts)

    # -- the end

    def forked(self) -> bool:
        """Whether this is a forked child, which has no part in the engine."""
        return self.runtime.engine.forked

    async def aclose(self) -> None:
        """Store, staging memory and threads are released. Idempotent."""
        engine = self.runtime.engine
        try:
            if engine.usable:
                await engine.submit(self._root.release).wait()
        finally:
            await engine.aclose()

    def wait_blocking(self) -> None:
        """No save is in flight, or they were abandoned; how they ended is not looked at."""
        if self.runtime.engine.abandoned:
            return
        for pending in self.in_flight():
            wait_quietly(pending._job.future)

    def close(self) -> None:
        """As `aclose`, blocking."""
        engine = self.runtime.engine
        try:
            if engine.usable and not engine.abandoned:
                engine.submit(self._root.release).result()
        finally:
            engine.close()


def _futures_of(core: weakref.ref[Core]) -> Callable[[], list[Future[Any]]]:
    def futures() -> list[Future[Any]]:
        alive = core()
        return [] if alive is None else [pending._job.future for pending in alive.in_flight()]

    return futures


def _end(engine: Any) -> None:
    # A core that was dropped without close(): its saves hold it alive, so none is in flight.
    if not engine.forked:
        engine.begin_close()
