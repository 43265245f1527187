"""Sources of conversions and comparisons: checkpoints of any format, read by a separate engine."""

# Rule 1: reading has a separate runtime, so that a thread that writes or compares waits for a
#   thread that reads, and never for one of its own pool.

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from asyncckpt.arguments import Location
from asyncckpt.checkpoint.metadata import OpenCheckpoint, open_checkpoint, refuse_implied
from asyncckpt.checkpoint.open import Verb, check_unchanged, open_any
from asyncckpt.convert.reader import LeafReader
from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.format.record import RECORD_NAME, STEP_NAME
from asyncckpt.log import logger
from asyncckpt.options import default_budget_nbytes
from asyncckpt.ports import CheckpointFiles, Store
from asyncckpt.runtime import Runtime
from asyncckpt.stores.objects.clients.urls import is_url, parse_url

R = TypeVar("R")


class Runtimes:
    """Two runtimes of a conversion or comparison: one reads, the other writes or compares."""

    def __init__(self, verb: Verb, *, reading_nbytes: int, working_nbytes: int) -> None:
        self._verb = verb
        self._sources: list[CheckpointFiles] = []
        self._reading = Runtime("asyncckpt-read", host_memory_nbytes=reading_nbytes)
        self.working = Runtime(f"asyncckpt-{verb}", host_memory_nbytes=working_nbytes)

    async def run(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run the work on the working engine, then close all files and end all threads.

        Raises:
            CheckpointNotFoundError: a source was deleted or replaced during the work.
        """
        try:
            return await self.working.engine.submit(work).wait()
        except CorruptCheckpointError as damage:
            for files in self._sources:
                if files.location == damage.location:
                    check = partial(check_unchanged, files, self._verb, damage)
                    await self._reading.engine.submit(check).wait()
            raise
        finally:
            await uninterrupted(self.aclose())

    async def aclose(self) -> None:
        """Close all files and end all threads. Idempotent."""
        try:
            await self.working.aclose()
        finally:
            await self._reading.aclose()

    async def open(
        self, location: Location, storage_options: Mapping[str, Any] | None, cache_nbytes: int
    ) -> LeafReader:
        """Open the checkpoint at a location, or the newest step of a run there.

        `cache_nbytes` limits the decoded chunks that the reader may keep.

        Raises:
            CheckpointNotFoundError: there is neither.
        """
        runtime = self._reading

        async def opening() -> LeafReader:
            given: Any = {"direct_io": "auto", "storage_options": storage_options}
            if is_bucket(location):
                opened = await self._newest(runtime.store(location, **given))
            else:
                store, name = runtime.one(location, **given)
                try:
                    self._sources.append(files := store.files(name))
                    opened = await open_any(files, runtime.engine.compute)
                except CheckpointNotFoundError as missing:
                    if missing.found in ("deleted", "replaced"):
                        raise
                    opened = await self._newest(runtime.store(location, **given), missing)
            # Report arrays that cannot be read before reading any.
            wanted = [piece.array for pieces in opened.leaf_pieces() for piece in pieces]
            extents = await opened.read_extents(opened, wanted)
            refuse_implied(opened, extents, wanted)
            return LeafReader(runtime, opened, extents, cache_nbytes=cache_nbytes)

        return await runtime.engine.submit(opening).wait()

    async def _newest(
        self, store: Store, missing: CheckpointNotFoundError | None = None
    ) -> OpenCheckpoint:
        """Open the newest step.

        Raises:
            CheckpointNotFoundError: there is none; `missing` if given.
        """
        names = [name for name in await store.names() if STEP_NAME.fullmatch(name)]
        names.sort(key=int, reverse=True)
        # A run that has asyncckpt steps ignores those of other libraries.
        for opener, name in itertools.product((open_checkpoint, open_any), names):
            try:
                self._sources.append(files := store.files(name))
                return await opener(files, self._reading.engine.compute)
            except CheckpointNotFoundError:
                continue
            except CorruptCheckpointError as damage:
                # Without a valid record it is not a step; any other damage is an error.
                if damage.file != RECORD_NAME:
                    raise
                if opener is open_checkpoint:
                    logger.warning("%s; it is skipped, as if it did not exist", damage)
        raise missing or CheckpointNotFoundError(
            f"{store.url}: there is no checkpoint here", location=store.url
        )


def options_of(
    locations: Sequence[object], storage_options: Mapping[str, Any] | None
) -> list[Mapping[str, Any] | None]:
    """Return the storage options of each location; None for paths.

    Raises:
        UsageError: there are options, but no URL.
    """
    if storage_options and not any(map(is_url, locations)):
        raise UsageError("storage_options apply to object stores; leave them out for local paths")
    return [storage_options if is_url(location) else None for location in locations]


def is_bucket(location: object) -> bool:
    """Return whether a URL names a whole bucket, which may be a root but not a checkpoint."""
    return is_url(location) and not parse_url(str(location)).parts


def shares(host_memory_nbytes: int | None, *, packing: bool = False) -> tuple[int, int, int]:
    """Return the shares of a byte budget for reading, decoded chunks, and writing.

    With `packing`, a whole chunk is in memory both before and after it is packed.
    """
    nbytes = default_budget_nbytes() if host_memory_nbytes is None else host_memory_nbytes
    eighth = nbytes // 8
    return (eighth, 3 * eighth, 4 * eighth) if packing else (2 * eighth, 4 * eighth, 2 * eighth)
