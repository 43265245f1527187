"""The composition root: everything both facades do, as calls into one engine."""

# Rule 1: what must happen in the caller's thread (structure, scalars, thread-local framework state)
#   happens in plain functions here; everything else is a coroutine for the engine.
# Rule 2: saves of one core run one after the other, in the order of their calls.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from asyncckpt.adapters import AdapterSet, adapter_named, adapters_for_loaded_frameworks
from asyncckpt.checkpointer.capture import capture
from asyncckpt.checkpointer.layout import LayoutCache
from asyncckpt.checkpointer.pending import PendingSave
from asyncckpt.checkpointer.reading import info_of, verify_checkpoint
from asyncckpt.checkpointer.restores import (
    Mode,
    RestoreOutcome,
    RestoreRequest,
    run_restore,
    wanted_leaves,
)
from asyncckpt.checkpointer.retain import History
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.checkpointer.saves import Save, SaveRequest, SaveState, exists
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
    UsageError,
)
from asyncckpt.flow.engine import Job, wait_quietly
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import (
    MAX_RECORD_NBYTES,
    SLOT_NBYTES,
    RestoreOptions,
    SaveOptions,
    step_number,
)
from asyncckpt.ports import ArrayAdapter, CheckpointFiles, Store
from asyncckpt.reports import CheckpointInfo, Progress, SaveReport, VerifyReport
from asyncckpt.retention import Retention
from asyncckpt.stages.elsewhere import open_any
from asyncckpt.stages.opened import RECORD
from asyncckpt.stores.objects.urls import is_url, location_text, split_url
from asyncckpt.tree import Flat, flatten

T = TypeVar("T")

STEP = re.compile(r"0|[1-9][0-9]{0,18}")
"""Names that are steps; all others are ignored, and never deleted."""

MAX_METADATA_NBYTES = 16 << 20
"""User metadata travels in the record, which every listing reads."""

logger = logging.getLogger("asyncckpt")


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
        if keep is not None and not callable(getattr(keep, "keep", None)):
            raise UsageError(f"keep={keep!r}: pass a retention policy such as KeepLast(3)")
        _check_coordinator(coordinator)
        budget = self.save_options.host_memory_nbytes
        if budget is None and one_shot:
            budget = self.restore_options.host_memory_nbytes
        self.runtime = Runtime("asyncckpt", host_memory_nbytes=budget)
        direct_io = self.save_options.direct_io
        self.name = ""
        self._store: Store | None = None
        self._opening = asyncio.Lock()
        self._open_store: Callable[[], Store] | None = None
        if one_shot and is_url(location):
            # Libraries are imported and accounts looked up: nothing for the caller's loop.
            root, self.name = split_url(str(location))
            self.url = location_text(root)
            self._open_store = partial(
                self.runtime.store, root, direct_io=direct_io, storage_options=storage_options
            )
        elif one_shot:
            self._store, self.name = self.runtime.one(
                location, direct_io=direct_io, storage_options=storage_options
            )
            self.url = self._store.url.rstrip("/")
        else:
            self._store = self.runtime.store(
                location, direct_io=direct_io, storage_options=storage_options
            )
            self.url = self._store.url.rstrip("/")
        self._history = None if keep is None else History(keep, self.runtime.engine.compute)
        self._layouts = LayoutCache()
        self._saves: list[PendingSave] = []
        self._turn = asyncio.Lock()
        self._swept = False
        self._to_sweep = False
        self._reading: Counter[str] = Counter()
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
        assert self._store is not None
        return self._store

    @store.setter
    def store(self, store: Store) -> None:
        self._store = store

    # -- in the caller's thread

    def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> Job[T]:
        """The coroutine runs on the engine.

        Raises:
            ClosedError: after `close`, or in a forked child.
        """
        return self.runtime.engine.submit(lambda: self._with_store(function))

    def in_flight(self) -> list[PendingSave]:
        """Saves that have not ended."""
        return [pending for pending in self._saves if not pending.done()]

    def raise_unseen(self, options: SaveOptions | None = None) -> None:
        """The failure of an earlier save that nobody has heard of is raised, once."""
        error = self.unseen_error()
        if error is None:
            return
        if options is not None and options.on_failed_save == "log":
            logger.error("an earlier save failed: %s", error)
            return
        raise error

    def unseen_error(self) -> BaseException | None:
        """The first failure that nobody has heard of; it counts as heard from now on."""
        first: BaseException | None = None
        for pending in self._saves:
            error = pending._unseen_error()
            if error is not None:
                if first is None:
                    first = error
                else:
                    first.add_note(f"another save failed too: {error}")
        self._saves = self.in_flight()
        return first

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
        self.raise_unseen(options)
        location = f"{self.url}/{name}"
        state = SaveState()
        if stall_first and self.in_flight() and options.on_overlap != "wait":
            if options.on_overlap == "error":
                raise UsageError(
                    f"{location}: another save is in flight ({self.in_flight()[0]!r}) and "
                    'on_overlap="error"; await it first',
                    location=location,
                )
            return _skipped(kind, self, location, step, state)
        request = SaveRequest(
            name=name,
            step=step,
            taken=capture(tree, adapters_for_loaded_frameworks()),
            metadata=checked_metadata(metadata),
            metrics=_metrics(metrics),
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
        self._saves.append(pending)
        self._to_sweep = not self._swept
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
            include=_globs(include),
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
        if self._store is None:
            async with self._opening:
                if self._store is None:
                    assert self._open_store is not None
                    self._store = await self.runtime.engine.compute.run(self._open_store)
        return await function()

    async def _retained(self, report: SaveReport) -> SaveReport:
        if self._history is None or report.step is None:
            return report
        deleted: list[int] = []
        try:
            deleted, notes = await self._history.retain(
                self.store, await self._candidates(), report.step, self._reading
            )
        except AsyncCheckpointError as error:
            # The save itself is durable.
            logger.warning("no step was deleted: %s", error)
            notes = [f"no step was deleted: {error}"]
        return dataclasses.replace(
            report, deleted_steps=tuple(deleted), notes=(*report.notes, *notes)
        )

    async def prepare(self, tree_nbytes: int) -> int:
        """Staging memory for a state of this size is allocated and touched; returns its bytes."""
        pool = self.runtime.pool
        await pool.prepare(-(-tree_nbytes // SLOT_NBYTES) + 2)
        return pool.allocated_nbytes

    async def sweep(self) -> Sequence[str]:
        """Leftovers of dead attempts are removed."""
        return await self.store.sweep()

    async def steps(self) -> list[int]:
        """Steps with a valid commit record, ascending."""
        waiting = iter(await self._candidates())
        found: list[int] = []

        async def look() -> None:
            found.extend([step for step in waiting if await exists(self.store, str(step))])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.store.capabilities.reads):
                    group.create_task(look())
        except BaseExceptionGroup as errors:
            raise leading_error(errors) from None
        return sorted(found)

    async def latest_step(self, below: int | None = None) -> int | None:
        """The highest step with a valid commit record, below `below` if given."""
        for step in reversed(await self._candidates()):
            if (below is None or step < below) and await exists(self.store, str(step)):
                return step
        return None

    async def _candidates(self) -> list[int]:
        return sorted(int(name) for name in await self.store.names() if STEP.fullmatch(name))

    async def restore(self, step: int | None, request: RestoreRequest) -> RestoreOutcome:
        """The checkpoint of a step, of the newest one with None, or the one-shot checkpoint."""
        if self.name:
            return await self._restore(self.name, None, request)
        if step is not None:
            return await self._restore(str(step), step, request)
        newest = await self.latest_step()
        again = True
        while newest is not None:
            try:
                return await self._restore(str(newest), newest, request)
            except CheckpointNotFoundError:
                # Deleted while it was being restored: the next one is as good as newest. Or
                # replaced: then it is there, and is tried once more.
                tried, newest = newest, await self.latest_step(below=newest + again)
                again = newest != tried
        raise CheckpointNotFoundError(
            f"{self.url}: there is no checkpoint to restore; latest_step() tells beforehand",
            location=self.url,
        )

    async def _restore(
        self, name: str, step: int | None, request: RestoreRequest
    ) -> RestoreOutcome:
        with self._read(name) as location:
            files = self.store.files(name)
            try:
                async with asyncio.timeout(request.options.deadline_s):
                    return await run_restore(self.runtime, files, step, request)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{location}: the restore did not finish within "
                    f"{request.options.deadline_s} s and was aborted; raise "
                    "RestoreOptions.deadline_s",
                    location=location,
                ) from None
            except CorruptCheckpointError as error:
                # Deleted under our hands is not damage.
                changed = await _changed(files)
                if changed is not None:
                    raise CheckpointNotFoundError(
                        f"{location}: the checkpoint was {changed} while being restored; "
                        + ("restore another step" if changed == "deleted" else "restore it again"),
                        location=location,
                    ) from error
                raise
            finally:
                await files.close()

    @contextlib.contextmanager
    def _read(self, name: str) -> Iterator[str]:
        self._reading[name] += 1
        try:
            yield f"{self.url}/{name}"
        finally:
            self._reading[name] -= 1

    async def inspect(self, step: int | None) -> CheckpointInfo:
        """What the checkpoint holds, from its metadata."""
        name, number = await self._named(step)
        files = self.store.files(name)
        try:
            return await info_of(await open_any(files), number)
        finally:
            await files.close()

    async def verify(
        self, step: int | None, progress: Callable[[Progress], None] | None
    ) -> VerifyReport:
        """Every byte of the checkpoint was read and checked."""
        name, number = await self._named(step)
        files = self.store.files(name)
        with self._read(name):
            try:
                return await verify_checkpoint(self.runtime, files, number, guarded(progress))
            finally:
                await files.close()

    async def delete(self, name: str) -> None:
        """The checkpoint is gone; what has no record is none, and is left alone.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of this name.
        """
        files = self.store.files(name)
        try:
            await files.read(RECORD, max_nbytes=MAX_RECORD_NBYTES)
        except CorruptCheckpointError:
            pass  # a damaged checkpoint is one that can be deleted
        except CheckpointNotFoundError:
            raise CheckpointNotFoundError(
                f"{self.url}/{name}: there is no checkpoint to delete",
                location=f"{self.url}/{name}",
            ) from None
        finally:
            await files.close()
        await self.store.delete(name)

    async def delete_after(self, step: int) -> list[int]:
        """All steps above `step` are gone, those of saves in flight too; returns them."""
        deleted: list[int] = []
        async with self._turn:
            for number in reversed(await self.steps()):
                if number <= step:
                    break
                with contextlib.suppress(CheckpointNotFoundError):  # somebody else was faster
                    await self.store.delete(str(number))
                    deleted.append(number)
        return deleted[::-1]

    async def _named(self, step: int | None) -> tuple[str, int | None]:
        if self.name:
            return self.name, None
        if step is None:
            step = await self.latest_step()
            if step is None:
                raise CheckpointNotFoundError(
                    f"{self.url}: there is no checkpoint", location=self.url
                )
        return str(step), step

    async def open(self) -> None:
        """Leftovers of dead attempts below the root are swept; a failure to do so is logged."""
        self._swept, self._to_sweep = True, False
        try:
            swept = await self.store.sweep()
        except AsyncCheckpointError as error:
            logger.warning("%s could not be swept: %s", self.url, error)
        else:
            if swept:
                logger.info("%s: removed leftovers %s", self.url, ", ".join(swept))

    async def _release(self) -> None:
        store = self._store
        if self._to_sweep and store and (not self.name or store.capabilities.proves_dead):
            # Nobody opened this with a `with` block: one-shot saves, for example.
            await self.open()
        await self.runtime.release()

    # -- the end

    def forked(self) -> bool:
        """Whether this is a forked child, which has no part in the engine."""
        return self.runtime.engine.forked

    async def aclose(self) -> None:
        """Store, staging memory and threads are released. Idempotent."""
        engine = self.runtime.engine
        if engine.usable:
            await engine.submit(self._release).wait()
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
        if engine.usable and not engine.abandoned:
            engine.submit(self._release).result()
        engine.close()


async def _changed(files: CheckpointFiles) -> str | None:
    try:
        return await files.changed()
    except AsyncCheckpointError:
        return None


def _futures_of(core: weakref.ref[Core]) -> Callable[[], list[Future[Any]]]:
    def futures() -> list[Future[Any]]:
        alive = core()
        return [] if alive is None else [pending._job.future for pending in alive.in_flight()]

    return futures


def _end(engine: Any) -> None:
    # A core that was dropped without close(): its saves hold it alive, so none is in flight.
    if not engine.forked:
        engine.begin_close()


def _skipped(
    kind: type[PendingSave], core: Core, location: str, step: int | None, state: SaveState
) -> PendingSave:
    report = SaveReport(
        location,
        step,
        "",
        0,
        0,
        0,
        0,
        0,
        0.0,
        0.0,
        skipped=True,
        notes=("another save was in flight",),
    )
    job: Job[SaveReport] = Job(core.runtime.engine)
    job.future.set_result(report)
    staged: Future[None] = Future()
    staged.set_result(None)
    return kind(job, staged, state, location=location, step=step, skipped=True)


def typed(name: str, value: Any, kind: type[T], default: T | None = None) -> T:
    """The value, which is of that kind; for None the default, or one made without arguments."""
    if value is None:
        return kind() if default is None else default
    if not isinstance(value, kind):
        raise UsageError(f"{name}={value!r}: pass {kind.__name__}(...)", found=value)
    return value


def _check_coordinator(coordinator: object) -> None:
    if coordinator == "single":
        return
    if coordinator != "auto":
        raise UsageError(
            f"coordinator={coordinator!r}: this release saves from one process; pass "
            '"auto" or "single"'
        )
    # A job of several processes that each wrote the whole state to one root would be a race.
    size = os.environ.get("WORLD_SIZE", "1")  # noqa: TID251 - set by torchrun, not a knob of ours
    if size.isdigit() and int(size) > 1:
        raise UsageError(
            f"WORLD_SIZE={size}: this release saves from one process; call it on rank 0 only, "
            'with coordinator="single"'
        )


def checked_metadata(metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A copy of the metadata as JSON makes it."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise UsageError(f"metadata={metadata!r:.80}: pass a dict of JSON values", found=metadata)
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        copy: Mapping[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"metadata is not JSON ({error}); pass dicts, lists, strings, finite numbers, booleans "
            "and None"
        ) from None
    if len(text) > MAX_METADATA_NBYTES:
        raise UsageError(
            f"metadata takes {len(text)} bytes, more than {MAX_METADATA_NBYTES}; save it as leaves"
        )
    return copy


def _metrics(metrics: Mapping[str, float] | None) -> Mapping[str, float]:
    if metrics is None:
        return {}
    result = {}
    for name, value in metrics.items():
        try:
            if not isinstance(name, str):
                raise TypeError("its name is no string")
            result[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"metrics[{name!r}]={value!r:.80}: {error}; pass numbers") from None
    return result


def _globs(include: str | Sequence[str] | None) -> Sequence[str] | None:
    if include is None:
        return None
    globs = [include] if isinstance(include, str) else list(include)
    if not all(isinstance(glob, str) for glob in globs):
        raise UsageError(f"include={include!r}: pass a glob on paths, or several")
    return globs


def guarded(
    progress: Callable[[Progress], None] | None,
) -> Callable[[Progress], None] | None:
    """The callback, which cannot break a save: after its first error, logged, it is left alone."""
    if progress is None:
        return None
    if not callable(progress):
        raise UsageError(f"progress={progress!r}: pass a function of one Progress")
    broken = False

    def guarded(state: Progress) -> None:
        nonlocal broken
        if broken:
            return
        try:
            progress(state)
        except Exception:
            broken = True
            logger.exception("the progress callback failed and is not called again")

    return guarded


def number_of(step: object) -> tuple[str, int]:
    """Name and number of a step."""
    number = step_number(step)
    return str(number), number
