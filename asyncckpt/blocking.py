"""The facade for ordinary loops: the names of `asyncckpt`, without `await`.

Every call hands its work to the same engine as the async facade and waits for the result in the
calling thread; it may be used inside a running event loop (a notebook), which then blocks as for
any other synchronous call. Ctrl-C aborts the call's work, waits for its clean-up and raises
`KeyboardInterrupt`; a second Ctrl-C abandons the clean-up.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from asyncckpt.checkpointer.api import Leaves, ProgressCallback
from asyncckpt.checkpointer.arguments import number_of
from asyncckpt.checkpointer.collecting import COLLECT_MIN_S, Collection
from asyncckpt.checkpointer.comparison import Comparison
from asyncckpt.checkpointer.conversion import Conversion
from asyncckpt.checkpointer.core import Core
from asyncckpt.checkpointer.destination import (
    Destination,
    Format,
    destination_of,
    export_destination,
)
from asyncckpt.checkpointer.finish import finish_into, finish_tree
from asyncckpt.checkpointer.pending import BlockingPendingSave
from asyncckpt.checkpointer.prepare import tree_nbytes
from asyncckpt.options import RestoreOptions, SaveOptions
from asyncckpt.planning.tuning import MAX_NBYTES, MAX_S, STATE_NBYTES, TuneReport
from asyncckpt.reports import (
    CheckpointInfo,
    ConvertReport,
    DiffReport,
    RestoreReport,
    SaveReport,
    VerifyReport,
)
from asyncckpt.retention import Retention

PendingSave = BlockingPendingSave

__all__ = [
    "Checkpointer",
    "PendingSave",
    "collect_garbage",
    "convert",
    "diff",
    "export",
    "inspect",
    "restore",
    "restore_into",
    "save",
    "tune",
    "verify",
]


class Checkpointer:
    """The checkpoints of one training run; `asyncckpt.Checkpointer` for callers without a loop.

    Arguments, results and errors of all methods are those of `asyncckpt.Checkpointer`. Leaving a
    `with` block waits for saves in flight and raises what failed; without it, `close` does.
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
        return f"blocking.Checkpointer{self._core!r}"

    def __enter__(self) -> Self:
        try:
            self._core.call(self._core.open).result()
        except BaseException:
            self._core.close()  # without __enter__ there is no __exit__
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"a save failed, too: {type(failure).__name__}: {failure}")

    def save(
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
        """The tree is committed as `step` and durable."""
        name, number = number_of(step)
        pending: BlockingPendingSave = self._core.begin_save(
            BlockingPendingSave,
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
        return pending._own_result()

    def start_save(
        self,
        step: int,
        tree: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = False,
        options: SaveOptions | None = None,
        progress: ProgressCallback | None = None,
    ) -> BlockingPendingSave:
        """Every leaf was copied and may be mutated, donated or freed; the save goes on."""
        name, number = number_of(step)
        pending: BlockingPendingSave = self._core.begin_save(
            BlockingPendingSave,
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
        pending._await_staged()
        return pending

    def restore(
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
        """The tree of a step, of the newest one with None."""
        number = None if step is None else number_of(step)[1]
        return _restore(self._core, number, like, leaves, include, strict, cast, options, progress)

    def restore_into(
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
        """Mutable arrays of `target` hold the checkpoint's values, and objects its state dicts."""
        number = None if step is None else number_of(step)[1]
        return _restore_into(self._core, number, target, include, strict, cast, options, progress)

    def prepare(self, tree: Any) -> int:
        """Staging memory for this tree is allocated and touched; returns its bytes."""
        nbytes = tree_nbytes(tree)
        return self._core.call(lambda: self._core.prepare(nbytes)).result()

    def steps(self) -> list[int]:
        """All steps with a valid commit record, ascending."""
        return self._core.call(self._core.steps).result()

    def latest_step(self) -> int | None:
        """The highest step with a valid commit record, or None."""
        return self._core.call(self._core.latest_step).result()

    def inspect(self, step: int | None = None) -> CheckpointInfo:
        """What a step holds (the newest with None), from its metadata alone."""
        number = None if step is None else number_of(step)[1]
        return self._core.call(lambda: self._core.inspect(number)).result()

    def verify(
        self, step: int | None = None, *, progress: ProgressCallback | None = None
    ) -> VerifyReport:
        """Every byte of a step (the newest with None) was read and checked."""
        number = None if step is None else number_of(step)[1]
        return self._core.call(lambda: self._core.verify(number, progress)).result()

    def delete(self, step: int) -> None:
        """The step is gone: first its visibility, durably, then its bytes."""
        name, _ = number_of(step)
        self._core.call(lambda: self._core.delete(name)).result()

    def delete_after(self, step: int) -> list[int]:
        """All steps above `step` are gone, highest first; returns them.

        Saves in flight are waited for, and go too where they are above.
        """
        _, number = number_of(step)
        return self._core.call(lambda: self._core.delete_after(number)).result()

    def wait(self) -> None:
        """No save is in flight; the failure of one that nobody has heard of is raised, once."""
        self._core.wait_blocking()
        self._core.raise_unseen()

    def close(self) -> None:
        """Saves in flight have ended and all threads too. Idempotent.

        Ctrl-C aborts the saves in flight.
        """
        core = self._core
        if core.forked():
            return
        with core.heard():
            try:
                core.wait_blocking()
            except KeyboardInterrupt:
                for pending in core.in_flight():
                    pending._job.abort()
                raise
            finally:
                core.close()


def save(
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
    """The tree is committed at `location` and durable. As `asyncckpt.save`."""
    core = Core(
        location,
        one_shot=True,
        save_options=options,
        storage_options=storage_options,
        coordinator=coordinator,
    )
    try:
        pending: BlockingPendingSave = core.begin_save(
            BlockingPendingSave,
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
        return pending._own_result()
    finally:
        core.close()


def restore(
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
    """The tree saved at `location`. As `asyncckpt.restore`."""
    core = Core(
        location,
        one_shot=True,
        restore_options=options,
        storage_options=storage_options,
        coordinator=coordinator,
    )
    try:
        return _restore(core, None, like, leaves, include, strict, cast, options, progress)
    finally:
        core.close()


def restore_into(
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
    """`target` holds what was saved at `location`. As `asyncckpt.restore_into`."""
    core = Core(
        location,
        one_shot=True,
        restore_options=options,
        storage_options=storage_options,
        coordinator=coordinator,
    )
    try:
        return _restore_into(core, None, target, include, strict, cast, options, progress)
    finally:
        core.close()


def inspect(
    location: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    """What the checkpoint at `location` holds, from its metadata alone."""
    core = Core(location, one_shot=True, storage_options=storage_options, coordinator="single")
    try:
        return core.call(lambda: core.inspect(None)).result()
    finally:
        core.close()


def verify(
    location: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Every byte of the checkpoint at `location` was read and checked."""
    core = Core(location, one_shot=True, storage_options=storage_options, coordinator="single")
    try:
        return core.call(lambda: core.verify(None, progress)).result()
    finally:
        core.close()


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Format | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_file_nbytes: int | None = None,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> ConvertReport:
    """What `source` holds is at `destination` too, in another format. As `asyncckpt.convert`."""
    target = destination_of(
        destination, to, orbax=False, overwrite=overwrite, max_file_nbytes=max_file_nbytes
    )
    return _convert(source, target, metadata, options, storage_options, progress)


def export(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["orbax"] = "orbax",
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> ConvertReport:
    """What `source` holds is where Orbax can restore it. As `asyncckpt.export`."""
    target = export_destination(destination, to, overwrite=overwrite)
    return _convert(source, target, metadata, options, storage_options, progress)


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    bitwise: bool = False,
    options: RestoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> DiffReport:
    """How two checkpoints of any formats differ. As `asyncckpt.diff`."""
    work = Comparison(
        first,
        second,
        bitwise=bitwise,
        options=options,
        storage_options=storage_options,
        progress=progress,
    )
    try:
        return work.submit().result()
    finally:
        work.close()


def collect_garbage(
    root: str | os.PathLike[str],
    *,
    older_than_s: float = COLLECT_MIN_S,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """What saves that never ended left below `root` is gone. As `asyncckpt.collect_garbage`."""
    work = Collection(
        root, older_than_s=older_than_s, dry_run=dry_run, storage_options=storage_options
    )
    try:
        return work.submit().result()
    finally:
        work.close()


def tune(
    url: str,
    *,
    max_nbytes: int = MAX_NBYTES,
    max_s: float = MAX_S,
    state_nbytes: int = STATE_NBYTES,
    host_memory_nbytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> TuneReport:
    """What an object store carries is known. As `asyncckpt.tune`."""
    # Not before it is needed: who saves to local disk imports nothing of object stores.
    from asyncckpt.checkpointer.tuning import Tuning

    work = Tuning(
        url,
        max_nbytes=max_nbytes,
        max_s=max_s,
        state_nbytes=state_nbytes,
        host_memory_nbytes=host_memory_nbytes,
        storage_options=storage_options,
        progress=progress,
    )
    try:
        return work.submit().result()
    finally:
        work.close()


def _convert(
    source: str | os.PathLike[str],
    destination: Destination,
    metadata: Mapping[str, Any] | None,
    options: SaveOptions | None,
    storage_options: Mapping[str, Any] | None,
    progress: ProgressCallback | None,
) -> ConvertReport:
    work = Conversion(
        source,
        destination,
        metadata=metadata,
        options=options,
        storage_options=storage_options,
        progress=progress,
    )
    try:
        return work.submit().result()
    finally:
        work.close()


def _restore(
    core: Core,
    step: int | None,
    like: Any,
    leaves: str,
    include: str | Sequence[str] | None,
    strict: bool,
    cast: bool,
    options: RestoreOptions | None,
    progress: ProgressCallback | None,
) -> Any:
    mode: Literal["saved", "like"] = "saved" if like is None else "like"
    request, flat, adapters = core.restore_request(
        mode,
        like,
        leaves=leaves,
        include=include,
        strict=strict,
        cast=cast,
        options=options,
        progress=progress,
    )
    outcome = core.call(lambda: core.restore(step, request)).result()
    return finish_tree(outcome, flat, adapters)


def _restore_into(
    core: Core,
    step: int | None,
    target: Any,
    include: str | Sequence[str] | None,
    strict: bool,
    cast: bool,
    options: RestoreOptions | None,
    progress: ProgressCallback | None,
) -> RestoreReport:
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
    outcome = core.call(lambda: core.restore(step, request)).result()
    assert flat is not None
    return finish_into(outcome, flat, adapters)
