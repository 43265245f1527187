"""The stages of one save wired together: overlapping, each bounded by the one after it.

::

    stage ──► serialize ──► upload ──► commit
      │ windows in plan order   │ several writes at a time
      └ slots of the budget ◄───┘ free when written

`LocalPipeline` and `ObjectPipeline` differ in two things. Where compressed chunks go: appended to
a data file, or packed into windows that are sent whole. And when the index is written: after all
data are durable, or, because it costs a round trip, while the last windows are on their way.
"""

# Rule 1: the stages share nothing but queues of slots; a slow stage makes the one before it wait.
# Rule 2: queues are unbounded; what bounds them is the budget, whose slots their items hold.
# Rule 3: every slot is given back after the last thread has let go of it, whatever happens.

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from asyncckpt.flow.buffers import SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.planning.save import HeldBox, SavePlan
from asyncckpt.planning.table import Column
from asyncckpt.ports import AttemptFiles, Sizes
from asyncckpt.save.commit import DATABASE, Commit, Committable
from asyncckpt.save.contribution import Contribution
from asyncckpt.save.index import Payload
from asyncckpt.save.serialize import (
    Compressed,
    Compressor,
    Extents,
    SmallChunks,
    WindowChecksums,
)
from asyncckpt.save.stage import StagedChunks, StagedWindow, Staging
from asyncckpt.save.upload import (
    ChunkAppender,
    ChunkPacker,
    DataFiles,
    FileWindow,
    Placed,
    PositionalFiles,
    SealedFiles,
)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the stages of one save work on, and with.

    Attributes:
        plan: places of all chunks.
        staging: copies leaves into slots.
        commit: writes the index, or passes on what it is made of.
        checked: rows whose checksums are compared with those of other processes.
        attempt: where the files go.
        stem: what the names of its files begin with; the save id is a part of it.
        sizes: sizes of files and windows, and writes in flight.
        window_pool: slots of windows.
        compute: threads that checksum and compress.
        stall_first: copying has priority, because the caller waits for it.
        reference: hold immutable leaves instead of copying them.
        process: number of this process.
        staged: called when every leaf may be mutated.
        written: called with bytes of progress.
    """

    plan: SavePlan
    staging: Staging
    commit: Commit | Contribution
    checked: Column
    attempt: AttemptFiles
    stem: str
    sizes: Sizes
    window_pool: SlotPool
    compute: Workers
    stall_first: bool
    reference: bool
    staged: Callable[[], None]
    written: Callable[[int], None]
    process: int = 0


class Pipeline(ABC):
    """Stage, serialize and upload of one save, and the index of what they have written.

    Args:
        work: the save.
        files: where windows go.
        sink: where compressed chunks go; None if nothing is compressed.
        streams: writes in flight.

    Attributes:
        busy_s: seconds during which each stage was busy; stages overlap.
    """

    def __init__(
        self,
        work: Work,
        files: DataFiles,
        sink: ChunkAppender | ChunkPacker | None,
        streams: int,
    ) -> None:
        plan = work.plan
        self._work = work
        self._plan = plan
        self._staging = work.staging
        self._files = files
        self._sink = sink
        self._streams = streams
        self.busy_s: dict[str, float] = {}
        self._inline: Iterable[bytes | memoryview] = ()
        self._parts: list[tuple[HeldBox, bytes]] = []
        self._checked_crc: dict[int, int] = {}  # of those that are not written as they are
        self._extents = Extents(
            file=plan.row_file.copy(),
            offset=plan.row_offset.copy(),
            nbytes=plan.row_payload + CRC_NBYTES,
            crc=np.zeros(len(plan.row_payload), np.uint32),
        )
        self._checksums = WindowChecksums(self._extents.crc, len(plan.file_nbytes))
        self._windows: asyncio.Queue[StagedWindow | None] = asyncio.Queue()
        self._chunks: asyncio.Queue[StagedChunks | None] = asyncio.Queue()
        self._final: asyncio.Queue[FileWindow | None] = asyncio.Queue()

    @abstractmethod
    async def run(self) -> Committable:
        """Make all files of the save durable, but not the record.

        Every leaf was copied before `staged` was called.

        Cancellation: waits for copies and writes that are running, then frees all slots.

        Raises:
            StagingError: names the leaf.
            StoreError: names the file.
        """

    @asynccontextmanager
    async def _data(self) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
        """Run the data stages; the block begins when all bytes and checksums are final.

        Yields the uploads that may still be running. After the block all data are durable.
        """
        try:
            async with asyncio.TaskGroup() as group:
                uploads: list[asyncio.Task[None]] = []
                while len(uploads) < self._streams:
                    uploads.append(group.create_task(self._upload()))
                sealing = group.create_task(self._seal())
                if self._sink is not None:
                    compressing = group.create_task(self._compress(self._sink))
                await self._stage()
                await sealing
                if self._sink is not None:
                    await compressing
                for _ in uploads:
                    self._final.put_nowait(None)
                yield uploads
        finally:
            self._staging.release()

    def _payload(self) -> Payload:
        """Return places and checksums as they are now."""
        files = [*zip(self._plan.file_nbytes, self._checksums.file_crcs, strict=True)]
        if self._sink is not None:
            files += zip(self._sink.file_nbytes, self._sink.file_crcs, strict=True)
        rows: list[tuple[str, int, int]] = []
        for file, (nbytes, crc) in enumerate(files):
            rows.append((self._files.path(file).removeprefix(f"{DATABASE}/"), nbytes, crc))
        checked = self._work.checked
        crcs = self._extents.crc[checked]
        for number, row in enumerate(checked.tolist()):
            crcs[number] = self._checked_crc.get(row, crcs[number])
        return Payload(
            self._extents,
            self._inline,
            rows,
            self._parts,
            checked,
            crcs,
        )

    # -- stage

    async def _stage(self) -> None:
        start = time.perf_counter()
        staging = self._staging
        inline = await staging.inline() if self._plan.inline else None
        self._parts = await staging.parts()
        await self._check_replicas()
        held = self._work.reference and await staging.hold_immutable()
        if held:
            self._work.staged()
        if self._sink is not None:
            await self._reserve()
        early: list[StagedWindow] = []

        def flush() -> None:
            for item in early:
                self._windows.put_nowait(item)
            early.clear()

        # While the caller waits and memory lasts, copying has the processors and the memory
        # bandwidth to itself; checksums and writes follow as soon as either ends. When memory
        # ends, `flush` starts the writes that free it: without it, nobody would.
        emit = early.append if self._work.stall_first and not held else self._windows.put_nowait
        await staging.windows(emit, flush)
        if early:
            flush()
        self._windows.put_nowait(None)
        if self._sink is not None:
            await staging.chunks(self._chunks.put_nowait)
        self._chunks.put_nowait(None)
        self._add_busy("stage", start)
        staging.forget()
        if not held:
            self._work.staged()
        if inline is not None:
            await self._trail(inline)

    async def _check_replicas(self) -> None:
        """Compute the checksums of replicas that this process does not write, or compresses."""
        plan, checked = self._plan, self._work.checked
        if not checked.size:
            return
        elsewhere = (plan.row_writer[checked] != self._work.process) | np.isin(
            checked, plan.compressed
        )
        rows = checked[elsewhere].tolist()
        self._checked_crc = dict(zip(rows, await self._staging.checksums(rows), strict=True))

    async def _reserve(self) -> None:  # noqa: B027 - only one kind of pipeline packs chunks
        """Take the memory that chunks are packed into, before any chunk is staged."""

    # -- serialize

    async def _trail(self, data: bytearray) -> None:
        """Compute the checksums of inline values, for which no caller waits any more."""
        start = time.perf_counter()
        rows = self._plan.first_row[list(self._plan.inline)]
        ends = np.cumsum(self._extents.nbytes[rows])
        self._inline = chunks = SmallChunks(data, [0, *ends.tolist()])
        self._extents.crc[rows] = await self._work.compute.run(chunks.seal)
        self._add_busy("serialize", start)

    async def _seal(self) -> None:
        """Compute the checksums of windows in plan order, and hand them to the uploads."""
        staging, nbytes = self._staging, self._plan.file_nbytes
        while (item := await self._windows.get()) is not None:
            start = time.perf_counter()
            window, slot = item.window, item.slot
            await staging.use([slot], self._checksums.seal, window, slot.buffer)
            self._add_busy("serialize", start)
            self._final.put_nowait(
                FileWindow(
                    window.file,
                    window.offset,
                    window.nbytes,
                    nbytes[window.file],
                    slot,
                    window.nbytes,
                    staging.written,
                )
            )
            # A view in this frame would keep a client from sending the buffer as it is.
            del item, slot

    async def _compress(self, sink: ChunkAppender | ChunkPacker) -> None:
        """Compress staged chunks, several at a time, and hand them to the sink in plan order."""
        staging = self._staging
        compressor = Compressor()
        plan, arrays = self._plan, self._plan.arrays
        running: deque[tuple[StagedChunks, asyncio.Task[list[Compressed]]]] = deque()
        async with asyncio.TaskGroup() as group:
            while (item := await self._chunks.get()) is not None:
                zstd = [arrays.of(plan.row_array[row]).zstd_level or 0 for row in item.rows]
                call = staging.use(
                    item.slots, compressor.compress, item.slots, item.starts, item.nbytes, zstd
                )
                running.append((item, group.create_task(call)))
                # The queue may be empty because the budget is taken: then nothing more comes
                # before the oldest has been written and has given its memory back.
                while running and (len(running) > self._work.compute.count or self._chunks.empty()):
                    await self._place(sink, *running.popleft())
            while running:
                await self._place(sink, *running.popleft())
        await sink.finish()

    async def _place(
        self,
        sink: ChunkAppender | ChunkPacker,
        chunks: StagedChunks,
        task: asyncio.Task[list[Compressed]],
    ) -> None:
        made = await task
        self._staging.give(chunks.slots)
        extents = self._extents
        placed: list[Placed] = []
        for row, raw_nbytes, stored in zip(chunks.rows, chunks.nbytes, made, strict=True):
            file, offset = sink.place(stored.nbytes)
            extents.file[row], extents.offset[row] = file, offset
            extents.nbytes[row], extents.crc[row] = stored.nbytes, stored.crc
            placed.append(Placed(file, offset, stored, raw_nbytes))
        await sink.write(placed)
        # Only now is the compressor's output gone, for which these units stand.
        self._staging.give((), chunks.units)

    # -- upload

    async def _upload(self) -> None:
        """Write windows one after the other, until the queue ends."""
        start = time.perf_counter()
        while (window := await self._final.get()) is not None:
            await self._files.write(window)
            del window
        # All streams begin and end together: the last one counts for all of them.
        self.busy_s["upload"] = time.perf_counter() - start

    def _add_busy(self, stage: str, since: float) -> None:
        self.busy_s[stage] = self.busy_s.get(stage, 0.0) + time.perf_counter() - since


class LocalPipeline(Pipeline):
    """Positional writes into files; the index follows when all data are durable."""

    def __init__(self, work: Work) -> None:
        plan, sizes = work.plan, work.sizes
        files = PositionalFiles(work.attempt, work.stem, sizes.window_nbytes, work.written)
        sink = None
        if plan.compressed:
            sink = ChunkAppender(
                files, len(plan.file_nbytes), sizes.data_file_nbytes, written=work.written
            )
        super().__init__(work, files, sink, min(sizes.concurrency, len(plan.windows)))

    async def run(self) -> Committable:
        """Write all data, then the index."""
        async with self._data():
            pass
        return await self._work.commit.put_index(self._payload())


class ObjectPipeline(Pipeline):
    """Sealed files, one request per window; the index goes out with the last of them."""

    def __init__(self, work: Work) -> None:
        plan, sizes, pool = work.plan, work.sizes, work.window_pool
        files = SealedFiles(work.attempt, work.stem, sizes.window_nbytes, work.written)
        self._packer: ChunkPacker | None = None
        self._packing = 0  # windows that compressed chunks make, at most
        if plan.compressed:
            nbytes = int(plan.row_payload[list(plan.compressed)].sum())
            self._packing = max(1, -(-nbytes // pool.slot_nbytes))
            self._packer = ChunkPacker(
                len(plan.file_nbytes),
                sizes.data_file_nbytes,
                pool,
                work.compute,
                emit=lambda window: self._final.put_nowait(window),
                written=work.written,
            )
        windows = len(plan.windows) + self._packing
        super().__init__(work, files, self._packer, min(sizes.concurrency, windows))

    async def run(self) -> Committable:
        """Write the data, and the index while the last of them are on their way."""
        try:
            async with self._data() as uploads:
                return await self._put_index(uploads)
        finally:
            if self._packer is not None:
                self._packer.release()

    async def _reserve(self) -> None:
        # After mutable leaves were copied: their copies are kept, and what is kept counts.
        if self._packer is not None:
            streams = min(self._work.sizes.concurrency, self._packing)
            await self._packer.reserve(streams + 1, beside=self._staging.most_units)

    async def _put_index(self, uploads: Sequence[asyncio.Task[None]]) -> Committable:
        """Write the index; again whenever a file had to be sent under another name since.

        Such a file may be sealed while the index is on its way, or after it: the index of the
        last call, made of the final names, is the one that the record refers to.
        """
        files = self._files
        changed = asyncio.Event()
        files.renamed = changed.set
        for task in uploads:
            task.add_done_callback(lambda _: changed.set())
        while True:
            renames = files.renames
            made = await self._work.commit.put_index(self._payload())
            while files.renames == renames:
                if all([task.done() for task in uploads]):
                    return made
                changed.clear()  # nothing is awaited between the look and this
                await changed.wait()
