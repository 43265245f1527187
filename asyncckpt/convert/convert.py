"""Conversion: a checkpoint of any format becomes one of ours, or safetensors files.

::

    reading runtime                        writing runtime
    files ──► chunks, decoded, cached ──► boxes ──► windows ──► files ──► rename
"""

# Rule 1: whoever reads and whoever writes have their own threads and slots: a thread that writes
#   waits for one that reads, never for one of its own pool.
# Rule 2: everything that can be refused is refused before the first byte is written.

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.checkpointer.arguments import checked_metadata, guarded, typed
from asyncckpt.checkpointer.destination import Destination, Target, multipart_options
from asyncckpt.checkpointer.origin import open_origin, options_of, shares
from asyncckpt.checkpointer.reader import LeafReader
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.checkpointer.saves import DATABASE
from asyncckpt.checkpointer.stored import capture_stored
from asyncckpt.checkpointer.to_checkpoint import write_checkpoint
from asyncckpt.checkpointer.to_files import write_files
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    DeadlineExceededError,
    SaveAbortedError,
    UsageError,
)
from asyncckpt.flow.engine import Job
from asyncckpt.options import GIB, SaveOptions
from asyncckpt.ports import CheckpointFiles
from asyncckpt.reports import ConvertReport, Progress, nbytes_text
from asyncckpt.stages.elsewhere import MAX_ENTRIES

LARGEST_CHUNK_NBYTES = 1 * GIB
"""Chunks of a source are kept as they are up to this size, where others would cost more reads."""

logger = logging.getLogger("asyncckpt")


class Conversion:
    """One conversion: `submit` it, wait for the job, then close.

    Args:
        source: path of a checkpoint, of a file, or of the root of a run (its newest step).
        destination: where and what to write.
        metadata: added to that of the source.
        options: as for saving; `host_memory_nbytes` is for reading and writing together.
        storage_options: options of the file system, for those of the two that are URLs.
        progress: called with a `Progress` as the conversion goes.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        destination: Destination,
        *,
        metadata: Mapping[str, Any] | None,
        options: SaveOptions | None,
        storage_options: Mapping[str, Any] | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source = source
        self._destination = destination
        self._source_options, options_of_destination = options_of(
            (source, destination.location), storage_options
        )
        # Nobody mutates what is read from a checkpoint: there is nothing to hold or to wait for.
        options = dataclasses.replace(typed("options", options, SaveOptions), snapshot="copy")
        if destination.format == "safetensors" and options.compression is not None:
            raise UsageError(
                f"{destination.location}: safetensors files are not compressed; leave "
                "compression out"
            )
        if destination.format == "safetensors":  # of any size, as one object
            options_of_destination = multipart_options(destination.location, options_of_destination)
        packing = options.compression is not None or options.leaf_options is not None
        reading, self._cache_nbytes, writing = shares(options.host_memory_nbytes, packing=packing)
        self._reading = Runtime("asyncckpt-read", host_memory_nbytes=reading)
        self._writing = Runtime("asyncckpt-write", host_memory_nbytes=writing)
        store, name = self._writing.one(
            destination.location,
            direct_io=options.direct_io,
            storage_options=options_of_destination,
        )
        self._target = Target(
            destination=destination,
            runtime=self._writing,
            store=store,
            name=name,
            options=options,
            metadata=checked_metadata(metadata),
            # A chunk and what it is packed into are held at once.
            largest_nbytes=writing // 2 if packing else LARGEST_CHUNK_NBYTES,
            progress=guarded(progress),
        )

    def submit(self) -> Job[ConvertReport]:
        """The conversion is on its way."""
        return self._writing.engine.submit(self._run)

    async def aclose(self) -> None:
        """All files are closed and all threads have ended. Idempotent."""
        try:
            await self._writing.aclose()
        finally:
            await self._reading.aclose()

    def close(self) -> None:
        """As `aclose`, blocking."""
        try:
            self._writing.close()
        finally:
            self._reading.close()

    # -- on the writing engine

    async def _run(self) -> ConvertReport:
        begun = time.perf_counter()
        deadline_s = self._target.options.deadline_s
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                return await self._convert(begun)
        except (TimeoutError, SaveAbortedError):
            if not deadline.expired():
                raise
            raise DeadlineExceededError(
                f"{self._destination.location}: the conversion did not finish within {deadline_s} "
                "s and was aborted; nothing of it is left. Raise SaveOptions.deadline_s",
                location=os.fspath(self._destination.location),
            ) from None

    async def _convert(self, begun: float) -> ConvertReport:
        await self._refuse_existing()
        origin = await self._reading.engine.submit(
            lambda: open_origin(
                self._reading,
                self._source,
                storage_options=self._source_options,
                cache_nbytes=self._cache_nbytes,
            )
        ).wait()
        await self._sweep()
        reader = origin.reader
        taken = await self._writing.engine.compute.run(capture_stored, reader)
        write = write_files if self._destination.format == "safetensors" else write_checkpoint
        report = await write(self._target, origin, taken)
        leaves = [leaf for leaf in taken.array_leaf if reader.unverified(leaf)]
        return dataclasses.replace(
            report,
            read_nbytes=reader.read_nbytes,
            total_s=time.perf_counter() - begun,
            unverified=tuple(taken.paths[leaf] for leaf in leaves),
            notes=(*report.notes, *self._notes(reader, len(leaves), len(taken.array_leaf))),
        )

    async def _refuse_existing(self) -> None:
        if self._destination.overwrite:
            return
        files = self._target.store.files(self._target.name)
        try:
            taken = await self._is_taken(files)
        except CheckpointNotFoundError:
            return
        finally:
            await files.close()
        if taken:
            raise CheckpointExistsError(
                f"{files.location}: something stands here already; pass overwrite=True "
                "(--overwrite) to replace it, or choose another name",
                location=files.location,
            )

    async def _is_taken(self, files: CheckpointFiles) -> bool:
        names = {entry.name for entry in await files.entries(max_entries=MAX_ENTRIES)}
        others = {name for name in names if not name.startswith(".asyncckpt-")}
        if files.capabilities.proves_dead or others - {DATABASE}:
            return bool(names)
        if not others:
            return False
        # Attempts that ended early leave their data below the very name, on object stores.
        below = await files.entries(DATABASE, max_entries=MAX_ENTRIES)
        return any(entry.name != "d" for entry in below)

    async def _sweep(self) -> None:
        """What a conversion or save that died has left beside the destination is gone."""
        store = self._target.store
        try:
            await store.sweep()
        except AsyncCheckpointError as error:
            logger.warning("%s could not be swept: %s", store.url, error)

    def _notes(self, reader: LeafReader, unverified: int, arrays: int) -> list[str]:
        notes = []
        opened = reader.opened
        if unverified:
            notes.append(
                f"{unverified} of {arrays} arrays have no checksum in this {opened.format} "
                "checkpoint and could not be verified"
            )
        large = max((storage.chunk_nbytes for storage in opened.storages), default=0)
        if large > self._cache_nbytes:
            notes.append(
                f"its largest chunk takes {nbytes_text(large)} and was decoded alone, beyond the "
                f"{nbytes_text(self._cache_nbytes)} kept for reading"
            )
        return notes
