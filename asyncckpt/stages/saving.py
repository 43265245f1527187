"""One save: its stages wired together, overlapping, each bounded by the one after it.

::

    stage ──► serialize ──► upload ──► commit
      │ windows in plan order   │ several writes at a time
      └ slots of the budget ◄───┘ free when written
"""

# Rule 1: the stages share nothing but queues of slots; a slow stage makes the one before it wait.
# Rule 2: whatever happens, the attempt ends in exactly one of publish and abort, and every slot is
#   given back after the last thread has let go of it.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncckpt.flow.buffers import SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.save import SavePlan
from asyncckpt.ports import ArrayAdapter, Attempt, Source
from asyncckpt.stages.serialize import (
    TRAILER_NBYTES,
    Compressor,
    StoredChunks,
    WindowChecksums,
    trailed,
)
from asyncckpt.stages.stage import StagedChunk, StagedWindow, Staging
from asyncckpt.stages.upload import ChunkAppender, WindowUpload, data_file_path


@dataclass(slots=True, eq=False)
class Payload:
    """What the data stages of a save leave for the commit.

    Attributes:
        chunks: place and checksum of every row; inline rows have file -1.
        inline: stored bytes of every inline array, in the order of `plan.inline`.
        files: (path relative to the database, bytes, CRC-32C) of every data file.
    """

    chunks: StoredChunks
    inline: list[bytes]
    files: list[tuple[str, int, int]]


@dataclass(slots=True, eq=False)
class Clock:
    """Seconds during which each stage was busy; stages overlap."""

    busy_s: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, since: float) -> None:
        """Time since `since` (perf_counter) belongs to `stage`."""
        self.busy_s[stage] = self.busy_s.get(stage, 0.0) + time.perf_counter() - since


class DataStages:
    """Stage, serialize and upload of one save, up to durable data files."""

    def __init__(
        self,
        plan: SavePlan,
        sources: Sequence[Source],
        adapters: Sequence[ArrayAdapter],
        paths: Sequence[str],
        *,
        save_id: str,
        database: str,
        attempt: Attempt,
        pool: SlotPool,
        compute: Workers,
        concurrency: int,
        data_file_nbytes: int,
        stall_first: bool,
        reference: bool,
        staged: Callable[[], None],
        progress: Callable[[str, int], None],
    ) -> None:
        self._plan = plan
        self._save_id = save_id
        self._database = database
        self._attempt = attempt
        self._pool = pool
        self._compute = compute
        self._concurrency = concurrency
        self._data_file_nbytes = data_file_nbytes
        self._stall_first = stall_first
        self._reference = reference
        self._staged = staged
        self._progress = progress
        self._staging = Staging(plan, sources, adapters, paths, pool, compute, grow=stall_first)
        self.clock = Clock()
        rows = len(plan.row_payload)
        self._chunks = StoredChunks(
            file=plan.row_file.copy(),
            offset=plan.row_offset.copy(),
            nbytes=plan.row_payload + TRAILER_NBYTES,
            crc=np.zeros(rows, np.uint32),
        )

    @property
    def referenced_nbytes(self) -> int:
        """Bytes of leaves that were held instead of copied."""
        return self._staging.referenced_nbytes

    async def run(self) -> Payload:
        """All data files are durable, and every leaf was copied before `staged` was called.

        Cancellation: waits for copies and writes that are running, then frees all slots.

        Raises:
            StagingError: names the leaf.
            StoreError: names the file.
        """
        plan = self._plan
        paths = [
            f"{self._database}/{data_file_path(self._save_id, i)}"
            for i in range(len(plan.file_nbytes))
        ]
        checksums = WindowChecksums(self._chunks.crc, len(paths))
        appender = ChunkAppender(
            self._attempt,
            lambda i: f"{self._database}/{data_file_path(self._save_id, i)}",
            len(paths),
            self._data_file_nbytes,
            written=lambda n: self._progress("upload", n),
        )
        # Unbounded queues: what bounds them is the budget, whose slots their items hold.
        windows: asyncio.Queue[StagedWindow | None] = asyncio.Queue()
        chunks: asyncio.Queue[StagedChunk | None] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serialize(windows, checksums, paths))
                group.create_task(self._compress(chunks, appender))
                inline = await self._stage(windows, chunks)
        finally:
            self._staging.release()
        files = [
            (data_file_path(self._save_id, i), nbytes, crc)
            for i, (nbytes, crc) in enumerate(
                [
                    *zip(plan.file_nbytes, checksums.file_crcs, strict=True),
                    *zip(appender.file_nbytes, appender.file_crcs, strict=True),
                ]
            )
        ]
        return Payload(self._chunks, inline, files)

    async def _stage(
        self,
        windows: asyncio.Queue[StagedWindow | None],
        chunks: asyncio.Queue[StagedChunk | None],
    ) -> list[bytes]:
        start = time.perf_counter()
        plan = self._plan
        inline = await self._staging.inline()
        held = self._reference and await self._staging.hold_immutable()
        if held:
            self._staged()
        early: list[StagedWindow] = []

        def flush() -> None:
            for item in early:
                windows.put_nowait(item)
            early.clear()

        # While the caller waits and memory lasts, copying has the processors and the memory
        # bandwidth to itself; checksums and writes follow as soon as either ends.
        emit = early.append if self._stall_first and not held else windows.put_nowait
        await self._staging.windows(emit, flush)
        flush()
        windows.put_nowait(None)
        await self._staging.chunks(chunks.put_nowait)
        chunks.put_nowait(None)
        self.clock.add("stage", start)
        self._staging.forget()
        if not held:
            self._staged()
        start = time.perf_counter()
        stored: list[bytes] = []
        for first in range(0, len(inline), INLINE_VALUES):
            values, crcs = await self._compute.run(
                _trail_all, inline[first : first + INLINE_VALUES]
            )
            stored += values
            arrays = plan.inline[first : first + INLINE_VALUES]
            self._chunks.crc[plan.first_row[list(arrays)]] = crcs
        self.clock.add("serialize", start)
        return stored

    async def _serialize(
        self,
        windows: asyncio.Queue[StagedWindow | None],
        checksums: WindowChecksums,
        paths: Sequence[str],
    ) -> None:
        upload = WindowUpload(
            self._attempt,
            paths,
            self._plan.file_nbytes,
            self._plan.windows,
            written=lambda n: self._progress("upload", n),
        )
        begun = time.perf_counter()
        sealed: asyncio.Queue[StagedWindow | None] = asyncio.Queue()

        async def stream() -> None:
            while (item := await sealed.get()) is not None:
                await upload.write(item, self._written_or_failed)

        async with asyncio.TaskGroup() as group:
            streams = min(self._concurrency, len(self._plan.windows))
            for _ in range(streams):
                group.create_task(stream())
            while (item := await windows.get()) is not None:
                start = time.perf_counter()
                await self._staging.use([item.slot], checksums.seal, item.window, item.slot.buffer)
                self.clock.add("serialize", start)
                sealed.put_nowait(item)
            for _ in range(streams):
                sealed.put_nowait(None)
        if self._plan.windows:
            self.clock.add("upload", begun)

    def _written_or_failed(self, item: StagedWindow, error: BaseException | None) -> None:
        self._staging.give([item.slot], error=error)

    async def _compress(
        self, chunks: asyncio.Queue[StagedChunk | None], appender: ChunkAppender
    ) -> None:
        compressor = Compressor()
        running: list[tuple[StagedChunk, asyncio.Task[tuple[list[bytes], int, int]]]] = []

        async def oldest() -> None:
            chunk, task = running.pop(0)
            blocks, nbytes, crc = await task
            self._staging.give(chunk.slots)
            file, offset = appender.place(nbytes)
            row = chunk.row
            self._chunks.file[row] = file
            self._chunks.offset[row] = offset
            self._chunks.nbytes[row] = nbytes
            self._chunks.crc[row] = crc
            await appender.write(file, offset, blocks, crc, chunk)
            self._staging.give((), chunk.units)

        async with asyncio.TaskGroup() as group:
            while (item := await chunks.get()) is not None:
                level = self._plan.arrays.of(self._plan.row_array[item.row]).zstd_level
                assert level is not None
                call = self._staging.use(
                    item.slots, compressor.compress, item.slots, item.nbytes, level
                )
                running.append((item, group.create_task(call)))
                # The queue may be empty because the budget is taken: then the oldest must drain.
                while running and (len(running) > self._compute.count or chunks.empty()):
                    await oldest()
            while running:
                await oldest()
        await appender.finish()


INLINE_VALUES = 4096
"""Small values checksummed by one call of a worker, about a millisecond of work."""


def _trail_all(values: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    pairs = [trailed(value) for value in values]
    return [stored for stored, _ in pairs], [crc for _, crc in pairs]
