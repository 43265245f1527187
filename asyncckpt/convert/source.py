"""A checkpoint of any format, found at a location and opened for reading box by box."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError
from asyncckpt.format.record import STEP_NAME
from asyncckpt.options import default_budget_nbytes
from asyncckpt.ports import Store
from asyncckpt.stages.elsewhere import open_any
from asyncckpt.stages.opened import RECORD, OpenCheckpoint, extents_of, refuse_implied
from asyncckpt.stores.objects.urls import is_url, parse_url


@dataclass(slots=True, eq=False)
class Origin:
    """One side of a conversion or comparison. Made, used and closed on its runtime's engine.

    Attributes:
        opened: the checkpoint.
        reader: reads its leaves.
        step: the step that its record or its name tells, or None.
    """

    opened: OpenCheckpoint
    reader: LeafReader
    step: int | None
    _store: Store

    async def close(self) -> None:
        """Its files are closed. Idempotent."""
        await self.opened.files.close()
        await self._store.close()


async def open_origin(
    runtime: Runtime,
    location: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None,
    cache_nbytes: int,
) -> Origin:
    """The checkpoint at a location, or the newest one of the run whose root it is.

    Raises:
        CheckpointNotFoundError: it is neither.
        CorruptCheckpointError, UnsupportedFormatError: as for restoring.
    """
    if _is_bucket(location):
        store = runtime.store(location, direct_io="auto", storage_options=storage_options)
        name, opened = await _newest(store)
    else:
        store, name = runtime.one(location, direct_io="auto", storage_options=storage_options)
        try:
            opened = await open_any(store.files(name))
        except CheckpointNotFoundError as error:
            await store.close()
            if isinstance(location, tuple):  # a store and a name in it
                raise
            store = runtime.store(location, direct_io="auto", storage_options=storage_options)
            name, opened = await _newest(store, error)
        except BaseException:
            await store.close()
            raise
    try:
        # Naming the arrays makes readers say at once which of them they cannot read.
        wanted = [piece.array for pieces in opened.leaf_pieces() for piece in pieces]
        extents = await extents_of(opened, None if opened.record else wanted)
        reader = LeafReader(runtime, opened, extents, cache_nbytes=cache_nbytes)
        refuse_implied(opened, extents, wanted)
    except BaseException:
        await store.close()
        raise
    step = None if opened.record is None else opened.record.step
    if step is None and STEP_NAME.fullmatch(name):
        step = int(name)
    return Origin(opened, reader, step, store)


def options_of(
    locations: Sequence[object], storage_options: Mapping[str, Any] | None
) -> list[Mapping[str, Any] | None]:
    """Per location the options that apply to it: those given, to every URL.

    Raises:
        UsageError: there are options, and no URL.
    """
    if storage_options and not any(map(is_url, locations)):
        raise UsageError("storage_options apply to object stores; leave them out for local paths")
    return [storage_options if is_url(location) else None for location in locations]


def _is_bucket(location: object) -> bool:
    """Whether a URL names a whole bucket, which may be a root and is no checkpoint."""
    if not is_url(location):
        return False
    return not parse_url(str(location)).parts


async def _newest(
    store: Store, error: CheckpointNotFoundError | None = None
) -> tuple[str, OpenCheckpoint]:
    """Name and content of the highest step that is a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none; `error`, if given. The store is closed.
    """
    try:
        names = [name for name in await store.names() if STEP_NAME.fullmatch(name)]
        for name in sorted(names, key=int, reverse=True):
            files = store.files(name)
            try:
                return name, await open_any(files)
            except CheckpointNotFoundError:
                continue
            except CorruptCheckpointError as damage:
                # What has no valid record is no step; damage elsewhere must not be passed over.
                if damage.file != RECORD:
                    raise
        raise error or CheckpointNotFoundError(
            f"{store.url}: there is no checkpoint here", location=store.url
        )
    except BaseException:
        await store.close()
        raise


def shares(host_memory_nbytes: int | None, *, packing: bool = False) -> tuple[int, int, int]:
    """Of a byte budget: what reading stages, what decoded chunks take, and what writing stages.

    With `packing` each chunk that is written is held whole, and what it becomes too.
    """
    nbytes = default_budget_nbytes() if host_memory_nbytes is None else host_memory_nbytes
    eighth = nbytes // 8
    return (eighth, 3 * eighth, 4 * eighth) if packing else (2 * eighth, 4 * eighth, 2 * eighth)
