"""The stages of one save wired together: overlapping, each bounded by the one after it.

::

    stage ──► serialize ──► upload ──► commit
      │ windows in plan order   │ several writes at a time
      └ slots of the budget ◄───┘ free when written

Compressed chunks are packed into windows of their own. The index is written while the last windows
are on their way; an object store may give a file another name meanwhile, and then the index is
written again.
"""

# Rule 1: the stages share nothing but queues of slots; a slow stage makes the one before it wait.
# Rule 2: queues are unbounded; what bounds them is the budget, whose slots their items hold.
# Rule 3: every slot is released after the last thread is done with it, whatever happens.

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.entries import WrittenFile
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.planning.held import HeldBox
from asyncckpt.ports import Sizes
from asyncckpt.save.commit import DATABASE, Commit, Committable
from asyncckpt.save.index import NO_CHUNKS, InlineChunks, Payload
from asyncckpt.save.serialize import (
    Compressed,
    Compressor,
    WindowChecksums,
    WindowSums,
    seal_small,
)
from asyncckpt.save.stage import StagedChunks, StagedWindow, Staging
from asyncckpt.save.upload import ChunkPacker, DataFiles, FileWindow


@dataclass(eq=False, repr=False)
class Pipeline:
    """Stage, serialize and upload of one save, and the index of what they have written.

    Attributes:
        staging: copies leaves into slots, for as long as all stages run.
        commit: writes the index, or passes this process' entries on.
        files: where the bytes go.
        sizes: sizes of files and windows, and writes in flight.
        reference: hold immutable leaves instead of copying them.
        staged: called when every leaf may be mutated.
    """

    staging: Staging
    commit: Commit
    files: DataFiles
    sizes: Sizes
    reference: bool
    staged: Callable[[], None]

    def __post_init__(self) -> None:
        self._plan = plan = self.staging.plan
        self._compute = self.staging.compute
        self._recorder = self.staging.recorder
        self._inline = NO_CHUNKS
        self._parts: list[tuple[HeldBox, bytes]] = []
        self._checked_crc: dict[int, int] = {}  # of those that are not written as they are
        self._extents = ChunkIndex(
            file=plan.row_file.copy(),
            offset=plan.row_offset.copy(),
            nbytes=plan.row_payload + CRC_NBYTES,
            crc32c=np.zeros(len(plan.row_payload), np.uint32),
        )
        self._checksums = WindowChecksums(self._extents.crc32c, self.files.crcs)
        self._chunks: asyncio.Queue[StagedChunks | None] = asyncio.Queue()
        self._final: asyncio.Queue[FileWindow | StagedWindow | None] = asyncio.Queue()
        self._unfolded = len(plan.windows)
        self._folded = asyncio.Event()  # all windows are
        if not plan.windows:
            self._folded.set()
        self._turn: asyncio.Event | None = None  # the window taken last by an upload is folded
        self._packer: ChunkPacker | None = None
        packing = 0  # windows that compressed chunks make, at most
        if plan.compressed:
            pool = self.staging.window_pool
            nbytes = int(plan.row_payload[list(plan.compressed)].sum())
            packing = max(1, -(-nbytes // pool.slot_nbytes))
            self._packer = ChunkPacker(
                self.files,
                self.sizes.data_file_nbytes,
                pool,
                self._compute,
                emit=self._final.put_nowait,
            )
        self._packing = min(self.sizes.concurrency, packing)  # slots that are full at a time
        self._streams = min(self.sizes.concurrency, len(plan.windows) + packing)

    async def run(self) -> Committable:
        """Make all files of the save durable, but not the record.

        Every leaf was copied before `staged` was called.

        Cancellation: waits for copies and writes that are running, then frees all slots.

        Raises:
            StagingError: names the leaf.
            StoreError: names the file.
        """
        try:
            async with self._data() as uploads:
                if uploads and self.files.positional and self.commit.after_data:
                    await asyncio.wait(uploads)
                return await self._put_index(uploads)
        finally:
            if self._packer is not None:
                self._packer.release()

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
                if self.files.positional and self._plan.windows:
                    # Creating a file and its blocks takes about as long as copying a window.
                    group.create_task(self.files.open(0))
                if self._packer is not None:
                    compressing = group.create_task(self._compress(self._packer))
                await self._stage()
                if self._packer is not None:
                    await compressing
                for _ in uploads:
                    self._final.put_nowait(None)
                await self._folded.wait()
                yield uploads
        finally:
            self.staging.release()

    async def _put_index(self, uploads: Sequence[asyncio.Task[None]]) -> Committable:
        """Write the index, and write it again if a file was sent under another name since.

        Such a file may be sealed during or after the write of the index. The record refers to the
        index of the last call, which has the final names.
        """
        files, running = self.files, set(uploads)
        while True:
            renames = files.renames
            made = await self._indexed()
            while files.renames == renames:
                if not running:
                    return made
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    async def _indexed(self) -> Committable:
        """Write the index of places and checksums as they are now."""
        rows: list[WrittenFile] = []
        for file, (nbytes, crc) in enumerate(zip(self.files.nbytes, self.files.crcs, strict=True)):
            path = self.files.path(file).removeprefix(f"{DATABASE}/")
            rows.append(WrittenFile(path, nbytes, crc))
        checked, crcs = self.commit.checked, self._extents.crc32c.copy()
        crcs[list(self._checked_crc)] = list(self._checked_crc.values())
        timeline = self._recorder.timeline()
        payload = Payload(
            self._extents, self._inline, rows, self._parts, checked, crcs[checked], timeline
        )
        with self._recorder.span("index"):
            return await self.commit.put_index(payload)

    # -- stage

    async def _stage(self) -> None:
        staging = self.staging
        inline = await staging.inline() if self._plan.inline else None
        self._parts = await staging.parts()
        await self._check_replicas()
        held = self.reference and await staging.hold_immutable()
        if held:
            self.staged()
        if self._packer is not None:
            # After mutable leaves were copied: their copies are kept, and what is kept counts.
            await self._packer.reserve(self._packing + 1, beside=staging.most_nbytes)
        if staging.grow:
            # While the caller waits and memory lasts, nothing is done but copying; checksums and
            # writes follow as soon as either ends.
            await staging.windows(self._final.put_nowait)
        else:
            await staging.windows(self._emit, self._checksums.seal)
        if self._packer is not None:
            await staging.chunks(self._chunks.put_nowait)
        self._chunks.put_nowait(None)
        staging.forget()
        if not held:
            self.staged()
        if inline is not None:
            await self._trail(inline)

    async def _check_replicas(self) -> None:
        """Compute the checksums of replicas that this process does not write, or compresses."""
        plan, checked = self._plan, self.commit.checked
        if not checked.size:
            return
        process = self._recorder.process
        elsewhere = (plan.row_writer[checked] != process) | np.isin(checked, plan.compressed)
        self._checked_crc = await self.staging.checksums(checked[elsewhere].tolist())

    # -- serialize

    async def _trail(self, data: bytearray) -> None:
        """Compute the checksums of inline values, now that the caller no longer waits."""
        start = time.perf_counter()
        rows = list(self._plan.inline)
        nbytes = self._extents.nbytes[rows]
        ends = [0, *np.cumsum(nbytes).tolist()]
        self._extents.crc32c[rows] = await self._compute.run(seal_small, data, ends)
        self._inline = InlineChunks(data, nbytes)
        self._recorder.add("serialize", start, len(data))

    async def _seal(self, item: StagedWindow) -> FileWindow:
        """Compute the checksums of a window that was only copied, and fold it in its turn.

        Windows are taken in plan order, so that the one before always comes to its end.
        """
        before, turn = self._turn, asyncio.Event()
        self._turn = turn
        start = time.perf_counter()
        slot = item.slot
        sums = await self.staging.use([slot], self._checksums.seal, item.window, slot.buffer)
        self._recorder.add("serialize", start, item.window.nbytes)
        if before is not None:
            await before.wait()
        turn.set()
        return self._fold(item, sums)

    def _emit(self, item: StagedWindow) -> None:
        """Hand a window that was sealed when it was copied to the uploads."""
        assert item.sums is not None
        self._final.put_nowait(self._fold(item, item.sums))

    def _fold(self, item: StagedWindow, sums: WindowSums) -> FileWindow:
        """Return a sealed window with its bytes final; called in plan order."""
        window, slot = item.window, item.slot
        self._checksums.fold(window, slot.buffer, sums)
        self._unfolded -= 1
        if not self._unfolded:
            self._folded.set()
        return FileWindow(
            window.file,
            window.offset,
            window.nbytes,
            slot,
            window.nbytes,
            self.staging.written,
        )

    async def _compress(self, packer: ChunkPacker) -> None:
        """Compress staged chunks, several at a time, and pack them in plan order."""
        compressor = Compressor()
        plan, arrays = self._plan, self._plan.arrays
        running: deque[tuple[StagedChunks, asyncio.Task[list[Compressed]]]] = deque()
        async with asyncio.TaskGroup() as group:
            while (item := await self._chunks.get()) is not None:
                zstd = [arrays.of(plan.row_array[row]).layout.zstd_level or 0 for row in item.rows]
                call = self._compressed(compressor, item, zstd)
                running.append((item, group.create_task(call)))
                # The queue may be empty because the budget is used up: then nothing more comes
                # before the oldest has been written and its memory released.
                while running and (len(running) > self._compute.count or self._chunks.empty()):
                    await self._place(packer, *running.popleft())
            while running:
                await self._place(packer, *running.popleft())
        packer.finish()

    async def _compressed(
        self, compressor: Compressor, item: StagedChunks, zstd: Sequence[int]
    ) -> list[Compressed]:
        with self._recorder.span("serialize", sum(item.nbytes)):
            return await self.staging.use(
                item.slots, compressor.compress, item.slots, item.starts, item.nbytes, zstd
            )

    async def _place(
        self,
        packer: ChunkPacker,
        chunks: StagedChunks,
        task: asyncio.Task[list[Compressed]],
    ) -> None:
        made = await task
        self.staging.give(chunks.slots)
        with self._recorder.span("serialize", sum(stored.nbytes for stored in made)):
            places = await packer.write(made)
        extents = self._extents
        for row, place, stored in zip(chunks.rows, places, made, strict=True):
            extents.file[row], extents.offset[row] = place
            extents.nbytes[row], extents.crc32c[row] = stored.nbytes, stored.crc
        self.files.written(sum(chunks.nbytes) + len(made) * CRC_NBYTES)
        # These bytes stand for the compressor's output, which is gone only now.
        self.staging.give((), chunks.extra_nbytes)

    # -- upload

    async def _upload(self) -> None:
        """Write windows one after the other, until the queue ends."""
        while (item := await self._final.get()) is not None:
            # Each upload seals at most one window ahead of its write: after `start_save`,
            # checksums take only the processor time that the device leaves.
            window = item if isinstance(item, FileWindow) else await self._seal(item)
            with self._recorder.span("upload", window.nbytes):
                await self.files.write(window)
            # A view in this frame would keep a client from sending the buffer as it is.
            del item, window
