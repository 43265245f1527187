"""The async facade: `Checkpointer` for the steps of a run, functions for single checkpoints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from asyncckpt.checkpointer.arguments import number_of
from asyncckpt.checkpointer.core import Core
from asyncckpt.checkpointer.finish import finish_into, finish_tree
from asyncckpt.checkpointer.pending import PendingSave
from asyncckpt.checkpointer.prepare import tree_nbytes
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.options import RestoreOptions, SaveOptions
from asyncckpt.reports import (
    CheckpointInfo,
    Progress,
    RestoreReport,
    SaveReport,
    VerifyReport,
)
from asyncckpt.retention import Retention

ProgressCallback = Callable[[Progress], None]
Leaves = Literal["numpy", "jax", "torch"]


class Checkpointer:
    """The checkpoints of one training run, by step, below one root.

    May be used from several event loops and threads. Leaving an `async with` block waits for saves
    in flight and raises what failed; without the block, `close` does.

    Args:
        root: directory of the run; it need not exist.
        keep: which steps stay after each save: `KeepLast(n)`, `KeepEvery(k)`,
            `KeepBest(n, metric)`, several of them with ``|``, or any `Retention`; None: all.
        save_options: defaults of every save, and the byte budget.
        restore_options: defaults of every restore.
        storage_options: options of the file system for URLs.
        coordinator: ``"auto"`` or ``"single"``: this release saves from one process.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        save_options: SaveOptions | None = None,
        restore_options: RestoreOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        coordinator: object = "auto",
    ) -> None:
        self._core = Core(
            root,
            keep=keep,
            save_options=save_options,
            restore_options=restore_options,
            storage_options=storage_options,
            coordinator=coordinator,
        )

    def __repr__(self) -> str:
        return f"Checkpointer{self._core!r}"

    async def __aenter__(self) -> Self:
        try:
            await self._core.call(self._core.open).wait()
        except BaseException:
            # Without __aenter__ there is no __aexit__.
            await uninterrupted(self._core.aclose())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        except Exception as failure:
            if error is None:
                raise
            # The body's exception is what the caller must see; the save's is context.
            error.add_note(f"a save failed, too: {type(failure).__name__}: {failure}")

    async def save(
        self,
        step: int,
        tree: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        options: SaveOptions | None = None,
        progress: ProgressCallback | None = None,
    ) -> SaveReport:
        """The tree is committed as `step` and durable.

        Until this returns, the leaves must not be mutated.

        Args:
            step: a non-negative integer.
            tree: nested containers of arrays and scalars.
            metadata: JSON values kept in the record.
            metrics: numbers by name, for retention and listings.
            overwrite: replace a checkpoint of this step atomically.
            options: instead of the `Checkpointer`'s.
            progress: called on the engine's thread with a `Progress` as the save goes.

        Cancellation: aborts the save, waits for its clean-up, then raises; a save whose
        publication had begun is committed nevertheless.

        Raises:
            CheckpointExistsError: the step exists; nothing was written.
            UnsupportedLeafError: names the path of a leaf that cannot be saved.
            SaveError, StoreError: names leaf, stage or file; nothing is left of the attempt.
        """
        name, number = number_of(step)
        pending: PendingSave = self._core.begin_save(
            PendingSave,
            name,
            number,
            tree,
            metadata=metadata,
            metrics=metrics,
            overwrite=overwrite,
            options=options,
            progress=progress,
            stall_first=False,
        )
        return await pending._wait_owned()

    async def start_save(
        self,
        step: int,
        tree: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        options: SaveOptions | None = None,
        progress: ProgressCallback | None = None,
    ) -> PendingSave:
        """Every leaf was copied and may be mutated, donated or freed; the save goes on.

        Arguments and errors: as `save`. What fails later is raised by awaiting the result, or
        else once by the next save, `wait`, `close` or the end of the block.

        Cancellation: aborts the save, waits for its clean-up, then raises.
        """
        name, number = number_of(step)
        pending: PendingSave = self._core.begin_save(
            PendingSave,
            name,
            number,
            tree,
            metadata=metadata,
            metrics=metrics,
            overwrite=overwrite,
            options=options,
            progress=progress,
            stall_first=True,
        )
        await pending._wait_staged()
        return pending

    async def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        leaves: Leaves = "numpy",
        include: str | Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        options: RestoreOptions | None = None,
        progress: ProgressCallback | None = None,
    ) -> Any:
        """The tree of a step, of the newest one with None.

        Args:
            step: the step; None for the newest valid one.
            like: a tree whose types, dtypes and containers the result has; arrays, abstract
                arrays (`jax.ShapeDtypeStruct`, meta tensors) or scalars.
            leaves: without `like`: ``"numpy"``, ``"jax"`` or ``"torch"`` arrays.
            include: globs on paths; other leaves are left out (with `like`: kept as they are).
            strict: leaves that only one side has are errors.
            cast: convert dtypes; values out of range stay errors.
            options: instead of the `Checkpointer`'s.
            progress: called on the engine's thread with a `Progress`.

        Cancellation: waits until no thread writes to host memory any more, then raises.

        Raises:
            CheckpointNotFoundError: there is no such step, or none at all.
            MismatchError: lists every leaf that does not fit; nothing was read.
            CorruptCheckpointError: names leaf, file and offset; nothing is returned.
        """
        number = None if step is None else number_of(step)[1]
        mode: Literal["saved", "like"] = "saved" if like is None else "like"
        request, flat, adapters = self._core.restore_request(
            mode,
            like,
            leaves=leaves,
            include=include,
            strict=strict,
            cast=cast,
            options=options,
            progress=progress,
        )
        outcome = await self._core.call(lambda: self._core.restore(number, request)).wait()
        return finish_tree(outcome, flat, adapters)

    async def restore_into(
        self,
        target: Any,
        *,
        step: int | None = None,
        include: str | Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        options: RestoreOptions | None = None,
        progress: ProgressCallback | None = None,
    ) -> RestoreReport:
        """Mutable arrays of `target` hold the checkpoint's values, and objects its state dicts.

        Arguments, cancellation and errors: as `restore`; in addition:

        Raises:
            MismatchError: an immutable leaf of a plain tree differs (with `strict`).
            UsageError: two targets overlap in memory, or `include` selects a part of an object's
                state dict.
            RestoreError: an object refused its state dict.
            AsyncCheckpointError: `written` lists the targets whose contents are now undefined.
        """
        number = None if step is None else number_of(step)[1]
        request, flat, adapters = self._core.restore_request(
            "into",
            target,
            leaves="numpy",
            include=include,
            strict=strict,
            cast=cast,
            options=options,
            progress=progress,
        )
        outcome = await self._core.call(lambda: self._core.restore(number, request)).wait()
        assert flat is not None
        return finish_into(outcome, flat, adapters)

    async def prepare(self, tree: Any) -> int:
        """Staging memory for this tree (or as much as the budget has) is allocated and touched.

        Returns its bytes. The first save then stalls no longer than the following ones.
        """
        nbytes = tree_nbytes(tree)
        return await self._core.call(lambda: self._core.prepare(nbytes)).wait()

    async def steps(self) -> list[int]:
        """All steps with a valid commit record, ascending."""
        return await self._core.call(self._core.steps).wait()

    async def latest_step(self) -> int | None:
        """The highest step with a valid commit record, or None."""
        return await self._core.call(self._core.latest_step).wait()

    async def inspect(self, step: int | None = None) -> CheckpointInfo:
        """What a step holds (the newest with None), from its metadata alone."""
        number = None if step is None else number_of(step)[1]
        return await self._core.call(lambda: self._core.inspect(number)).wait()

    async def verify(
        self, step: int | None = None, *, progress: ProgressCallback | None = None
    ) -> VerifyReport:
        """Every byte of a step (the newest with None) was read and checked."""
        number = None if step is None else number_of(step)[1]
        return await self._core.call(lambda: self._core.verify(number, progress)).wait()

    async def delete(self, step: int) -> None:
        """The step is gone: first its visibility, durably, then its bytes.

        Raises:
            CheckpointNotFoundError: there was none.
        """
        name, _ = number_of(step)
        await self._core.call(lambda: self._core.delete(name)).wait()

    async def delete_after(self, step: int) -> list[int]:
        """All steps above `step` are gone, highest first; returns them (an abandoned branch).

        Saves in flight are waited for, and go too where they are above.
        """
        _, number = number_of(step)
        return await self._core.call(lambda: self._core.delete_after(number)).wait()

    async def wait(self) -> None:
        """No save is in flight.

        Cancellation: stops the waiting; the saves go on.

        Raises:
            …: the failure of a save that nobody has heard of, once.
        """
        await self._idle()
        self._core.raise_unseen()

    async def close(self) -> None:
        """Saves in flight have ended and all threads too. Idempotent.

        Cancellation: aborts the saves in flight, waits for their clean-up, closes, then raises.

        Raises:
            …: the failure of a save that nobody has heard of, once; or the store's, which could
                not be closed.
        """
        core = self._core
        if core.forked():
            return
        with core.heard():
            try:
                await self._idle()
            except asyncio.CancelledError:
                for pending in core.in_flight():
                    pending.cancel()
                    await uninterrupted(pending._settled())
                raise
            finally:
                await uninterrupted(core.aclose())

    async def _idle(self) -> None:
        """As `wait`; how the saves ended is not looked at."""
        for pending in self._core.in_flight():
            waiter = asyncio.wrap_future(pending._job.future)
            try:
                await asyncio.wait((waiter,))
            except asyncio.CancelledError:
                waiter.cancel()
                raise
            waiter.exception()


async def save(
    location: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
    coordinator: object = "auto",
) -> SaveReport:
    """The tree is committed at `location` and durable. Arguments, errors: `Checkpointer.save`."""
    core = Core(
        location,
        one_shot=True,
        save_options=options,
        storage_options=storage_options,
        coordinator=coordinator,
    )
    try:
        pending: PendingSave = core.begin_save(
            PendingSave,
            core.name,
            None,
            tree,
            metadata=metadata,
            metrics=None,
            overwrite=overwrite,
            options=options,
            progress=progress,
            stall_first=False,
        )
        return await pending._wait_owned()
    finally:
        await uninterrupted(core.aclose())


async def restore(
    location: str | os.PathLike[str],
    *,
    like: Any = None,
    leaves: Leaves = "numpy",
    include: str | Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
    coordinator: object = "auto",
) -> Any:
    """The tree saved at `location`. Arguments, errors: `Checkpointer.restore`."""
    core = Core(
        location,
        one_shot=True,
        restore_options=options,
        storage_options=storage_options,
        coordinator=coordinator,
    )
    try:
        request, flat, adapters = core.restore_request(
            "saved" if like is None else "like",
            like,
            leaves=leaves,
            include=include,
            strict=strict,
            cast=cast,
            options=options,
            progress=progress,
        )
        outcome = await core.call(lambda: core.restore(None, request)).wait()
        return finish_tree(outcome, flat, adapters)
    finally:
        await uninterrupted(core.aclose())


async def restore_into(
    location: str | os.PathLike[str],
    target: Any,
    *,
    include: str | Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
    coordinator: object = "auto",
) -> RestoreReport:
    """`target` holds what was saved at `location`. Errors: `Checkpointer.restore_into`."""
    core = Core(
        location,
        one_shot=True,
        restore_options=options,
        storage_options=storage_options,
        coordinator=coordinator,
    )
    try:
        request, flat, adapters = core.restore_request(
            "into",
            target,
            leaves="numpy",
            include=include,
            strict=strict,
            cast=cast,
            options=options,
            progress=progress,
        )
        outcome = await core.call(lambda: core.restore(None, request)).wait()
        assert flat is not None
        return finish_into(outcome, flat, adapters)
    finally:
        await uninterrupted(core.aclose())


async def inspect(
    location: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    """What the checkpoint at `location` holds, from its metadata alone."""
    core = Core(location, one_shot=True, storage_options=storage_options, coordinator="single")
    try:
        return await core.call(lambda: core.inspect(None)).wait()
    finally:
        await uninterrupted(core.aclose())


async def verify(
    location: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Every byte of the checkpoint at `location` was read and checked."""
    core = Core(location, one_shot=True, storage_options=storage_options, coordinator="single")
    try:
        return await core.call(lambda: core.verify(None, progress)).wait()
    finally:
        await uninterrupted(core.aclose())
