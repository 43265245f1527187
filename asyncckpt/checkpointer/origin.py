"""A checkpoint of any format, found at a location and opened for reading box by box."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.checkpointer.core import STEP
from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.options import default_budget_nbytes
from asyncckpt.ports import Store
from asyncckpt.stages.elsewhere import open_any
from asyncckpt.stages.opened import RECORD, OpenCheckpoint, extents_of, refuse_implied


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
    store, name = runtime.one(location, direct_io="auto", storage_options=storage_options)
    files = store.files(name)
    try:
        opened = await open_any(files)
    except CheckpointNotFoundError:
        await store.close()
        store = runtime.store(location, direct_io="auto", storage_options=storage_options)
        newest = await _newest(store)
        if newest is None:
            await store.close()
            raise
        name, opened = newest
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
    if step is None and STEP.fullmatch(name):
        step = int(name)
    return Origin(opened, reader, step, store)


async def _newest(store: Store) -> tuple[str, OpenCheckpoint] | None:
    """Name and content of the highest step that is a checkpoint."""
    names = [name for name in await store.names() if STEP.fullmatch(name)]
    for name in sorted(names, key=int, reverse=True):
        files = store.files(name)
        try:
            return name, await open_any(files)
        except CheckpointNotFoundError:
            continue
        except CorruptCheckpointError as error:
            # What has no valid record is no step; damage elsewhere must not be passed over.
            if error.file != RECORD:
                raise
    return None


def shares(host_memory_nbytes: int | None, *, packing: bool = False) -> tuple[int, int, int]:
    """Of a byte budget: what reading stages, what decoded chunks take, and what writing stages.

    With `packing` each chunk that is written is held whole, and what it becomes too.
    """
    nbytes = default_budget_nbytes() if host_memory_nbytes is None else host_memory_nbytes
    eighth = nbytes // 8
    return (eighth, 3 * eighth, 4 * eighth) if packing else (2 * eighth, 4 * eighth, 2 * eighth)
