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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.save import SavePlan
from asyncckpt.ports import ArrayAdapter, Attempt, Sizes, Source
from asyncckpt.stages.serialize import (
    TRAILER_NBYTES,
    Compressed,
    Compressor,
    StoredChunks,
    WindowChecksums,
    trailed,
)
from asyncckpt.stages.stage import StagedChunks, StagedWindow, Staging
from asyncckpt.stages.upload import (
    ChunkAppender,
    ChunkPacker,
    Filled,
    Placed,
    WindowUpload,
    data_file_path,
)

T = TypeVar("T")


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
        sizes: Sizes,
        positional: bool,
        pool: SlotPool,
        window_pool: SlotPool,
        compute: Workers,
        stall_first: bool,
        reference: bool,
        staged: Callable[[], None],
        progress: Callable[[str, int], None],
    ) -> None:
        self._plan = plan
        self._save_id = save_id
        self._database = database
        self._attempt = attempt
        self._sizes = sizes
        self._positional = positional
        self._window_pool = window_pool
        self._compute = compute
        self._stall_first = stall_first
        self._reference = reference
        self._staged = staged
        self._progress = progress
        self._staging = Staging(
            plan, sources, adapters, paths, pool, window_pool, compute, grow=stall_first
        )
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

    async def run(self, index: Callable[[Payload], Coroutine[Any, Any, T]]) -> T:
        """All data files are durable, and so is what `index` has made of their places.

        Every leaf was copied before `staged` was called. On local disk `index` is called when all
        data are durable. On object stores, where it costs a round trip, it is called when the last
        checksum is known, while the last files are still on their way, and again whenever one of
        these had to be sent under another name; the result is that of its last call.

        Cancellation: waits for copies and writes that are running, then frees all slots.

        Raises:
            StagingError: names the leaf.
            StoreError: names the file.
        """
        plan = self._plan
        checksums = WindowChecksums(self._chunks.crc, len(plan.file_nbytes))
        moved = asyncio.Event()
        upload = WindowUpload(
            self._attempt,
            window_nbytes=None if self._positional else self._sizes.window_nbytes,
            written=lambda nbytes: self._progress("upload", nbytes),
            renamed=moved.set,
        )
        for file, nbytes in enumerate(plan.file_nbytes):
            count = -(-nbytes // self._sizes.window_nbytes)
            upload.announce(file, self._path(file), nbytes, count)
        filled: asyncio.Queue[Filled | None] = asyncio.Queue()
        target = self._target(filled, upload)

        def payload() -> Payload:
            return self._payload(checksums, target, upload, inline)

        # Unbounded queues: what bounds them is the budget, whose slots their items hold.
        windows: asyncio.Queue[StagedWindow | None] = asyncio.Queue()
        chunks: asyncio.Queue[StagedChunks | None] = asyncio.Queue()
        held, reserved, sealed, packed = (asyncio.Event() for _ in range(4))
        try:
            async with asyncio.TaskGroup() as group:
                uploads = [
                    group.create_task(self._serialize(windows, checksums, upload, sealed)),
                    group.create_task(
                        self._compress(chunks, target, filled, upload, held, reserved, packed)
                    ),
                ]
                inline = await self._stage(windows, chunks, held, reserved)
                await sealed.wait()
                await packed.wait()
                if not self._positional:
                    # Nothing else of it can be found before the record.
                    return await _latest(payload, index, uploads, moved)
        finally:
            self._staging.release()
        return await index(payload())

    def _path(self, file: int) -> str:
        return f"{self._database}/{data_file_path(self._save_id, file)}"

    def _target(
        self, filled: asyncio.Queue[Filled | None], upload: WindowUpload
    ) -> ChunkAppender | ChunkPacker | None:
        """Where compressed chunks go."""
        if not self._plan.compressed:
            return None
        first = len(self._plan.file_nbytes)
        if self._positional:
            return ChunkAppender(
                self._attempt,
                self._path,
                first,
                self._sizes.data_file_nbytes,
                written=lambda nbytes: self._progress("upload", nbytes),
            )
        return ChunkPacker(
            self._path,
            first,
            self._sizes.data_file_nbytes,
            self._window_pool,
            self._compute,
            emit=filled.put_nowait,
            announce=upload.announce,
            written=lambda nbytes: self._progress("upload", nbytes),
        )

    def _payload(
        self,
        checksums: WindowChecksums,
        target: ChunkAppender | ChunkPacker | None,
        upload: WindowUpload,
        inline: list[bytes],
    ) -> Payload:
        """Places and checksums, as they are now."""
        files = list(zip(self._plan.file_nbytes, checksums.file_crcs, strict=True))
        planned = len(files)
        if target is not None:
            files += zip(target.file_nbytes, target.file_crcs, strict=True)
        prefix = f"{self._database}/"
        rows = []
        for file, (nbytes, crc) in enumerate(files):
            is_window = file < planned or isinstance(target, ChunkPacker)
            path = upload.path(file) if is_window else self._path(file)
            rows.append((path.removeprefix(prefix), nbytes, crc))
        # Whoever encodes them lets go of them one by one; a second call needs them again.
        return Payload(self._chunks, inline if self._positional else list(inline), rows)

    async def _stage(
        self,
        windows: asyncio.Queue[StagedWindow | None],
        chunks: asyncio.Queue[StagedChunks | None],
        copied: asyncio.Event,
        reserved: asyncio.Event,
    ) -> list[bytes]:
        start = time.perf_counter()
        plan = self._plan
        inline = await self._staging.inline()
        held = self._reference and await self._staging.hold_immutable()
        copied.set()
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
        if plan.compressed:
            await reserved.wait()
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
        upload: WindowUpload,
        sealed: asyncio.Event,
    ) -> None:
        begun = time.perf_counter()
        filled: asyncio.Queue[Filled | None] = asyncio.Queue()
        streams = min(self._sizes.concurrency, len(self._plan.windows))
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(_stream(filled, upload, self._written_or_failed))
            while (item := await windows.get()) is not None:
                start = time.perf_counter()
                await self._staging.use([item.slot], checksums.seal, item.window, item.slot.buffer)
                self.clock.add("serialize", start)
                window, slot = item.window, item.slot
                filled.put_nowait(
                    Filled(window.file, window.offset, window.nbytes, slot, window.nbytes)
                )
                # Nothing but the slot may refer to the buffer while it is sent.
                del item, slot
            sealed.set()
            for _ in range(streams):
                filled.put_nowait(None)
        if self._plan.windows:
            self.clock.add("upload", begun)

    def _written_or_failed(self, slot: Slot, error: BaseException | None, reusable: bool) -> None:
        if reusable:
            self._staging.give([slot], error=error)
        else:
            self._staging.discard(slot)

    async def _compress(
        self,
        chunks: asyncio.Queue[StagedChunks | None],
        target: ChunkAppender | ChunkPacker | None,
        filled: asyncio.Queue[Filled | None],
        upload: WindowUpload,
        held: asyncio.Event,
        reserved: asyncio.Event,
        packed: asyncio.Event,
    ) -> None:
        if target is None:
            packed.set()
            return
        if isinstance(target, ChunkAppender):
            reserved.set()
            await self._compress_into(target, chunks)
            packed.set()
            return
        plan = self._plan
        rows = np.isin(plan.row_array, plan.compressed)
        files = -(-int(plan.row_payload[rows].sum()) // self._window_pool.slot_nbytes)
        streams = min(self._sizes.concurrency, max(1, files))
        try:
            await held.wait()  # what is copied is kept, and what is kept counts
            await target.reserve(streams + 1, beside=self._staging.most_units)
            reserved.set()
            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(_stream(filled, upload, target.done))
                await self._compress_into(target, chunks)
                packed.set()
                for _ in range(streams):
                    filled.put_nowait(None)
        finally:
            target.release()

    async def _compress_into(
        self,
        target: ChunkAppender | ChunkPacker,
        chunks: asyncio.Queue[StagedChunks | None],
    ) -> None:
        compressor = Compressor()
        running: list[tuple[StagedChunks, asyncio.Task[list[Compressed]]]] = []

        async def oldest() -> None:
            chunks, task = running.pop(0)
            made = await task
            self._staging.give(chunks.slots)
            placed: list[Placed] = []
            for row, raw_nbytes, stored in zip(chunks.rows, chunks.nbytes, made, strict=True):
                file, offset = target.place(stored.nbytes)
                self._chunks.file[row] = file
                self._chunks.offset[row] = offset
                self._chunks.nbytes[row] = stored.nbytes
                self._chunks.crc[row] = stored.crc
                placed.append(Placed(file, offset, stored, raw_nbytes))
            await target.write(placed)
            self._staging.give((), chunks.units)

        async with asyncio.TaskGroup() as group:
            while (item := await chunks.get()) is not None:
                call = self._staging.use(
                    item.slots,
                    compressor.compress,
                    item.slots,
                    item.starts,
                    item.nbytes,
                    [self._level(row) for row in item.rows],
                )
                running.append((item, group.create_task(call)))
                # The queue may be empty because the budget is taken: then the oldest must drain.
                while running and (len(running) > self._compute.count or chunks.empty()):
                    await oldest()
            while running:
                await oldest()
        await target.finish()

    def _level(self, row: int) -> int:
        level = self._plan.arrays.of(self._plan.row_array[row]).zstd_level
        assert level is not None
        return level


async def _latest(
    payload: Callable[[], Payload],
    index: Callable[[Payload], Coroutine[Any, Any, T]],
    uploads: Sequence[asyncio.Task[None]],
    moved: asyncio.Event,
) -> T:
    """What `index` has made of the payload as it is when all uploads have ended.

    Args:
        payload: the places of everything, as they are now.
        index: makes them durable.
        uploads: tasks that may change a place as long as they run.
        moved: set when they have.
    """
    for task in uploads:
        task.add_done_callback(lambda _: moved.set())
    while True:
        moved.clear()
        now = payload()
        made = await index(now)
        while payload().files == now.files:
            if all(task.done() for task in uploads):
                return made
            await moved.wait()
            moved.clear()


async def _stream(
    filled: asyncio.Queue[Filled | None],
    upload: WindowUpload,
    done: Callable[[Slot, BaseException | None, bool], None],
) -> None:
    """Windows are written one after the other, up to the end of the queue."""
    while (item := await filled.get()) is not None:
        await upload.write(item, done)
        del item


INLINE_VALUES = 4096
"""Small values checksummed by one call of a worker, about a millisecond of work."""


def _trail_all(values: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    pairs = [trailed(value) for value in values]
    return [stored for stored, _ in pairs], [crc for _, crc in pairs]
