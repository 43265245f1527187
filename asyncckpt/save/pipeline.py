"""Pipeline of the overlapping stages of one save, each bounded by the next one.

::

    stage ──► serialize ──► upload ──► commit
      │ windows in plan order   │ several concurrent writes
      └ slots of the budget ◄───┘ released once written

Compressed chunks are packed into windows of their own. The index is written while the last windows
are being written; if an object store renames a file meanwhile, the index is written again.
"""

# Rule 1: the stages share only queues of slots; a slow stage makes the one before it wait.
# Rule 2: queues are bounded only by the budget, whose slots their items hold.
# Rule 3: every slot is released after its last use by a thread, also after errors.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from asyncckpt.errors import AsyncCheckpointError, ResourceError, SaveError
from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.planning.held import HeldBox
from asyncckpt.ports import Sizes
from asyncckpt.reports import FileInfo
from asyncckpt.save.commit import DATABASE, Commit, Committable
from asyncckpt.save.index import Payload
from asyncckpt.save.serialize import Compressed, Compressor, WindowChecksums, seal_small
from asyncckpt.save.stage import StagedChunks, StagedWindow, Staging
from asyncckpt.save.upload import ChunkPacker, DataFiles, FileWindow


@dataclass(eq=False, repr=False)
class Pipeline:
    """Stage, serialize and upload of one save, followed by the index.

    Attributes:
        sizes: sizes of files and windows, and the number of concurrent writes.
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
        self._inline: bytes | bytearray = b""
        self._parts: list[tuple[HeldBox, bytes]] = []
        self._checked_crc: dict[int, int] = {}  # of replicas compressed, or not written, here
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
        self._folded = asyncio.Event()  # set once all windows are folded
        if not plan.windows:
            self._folded.set()
        self._turn: asyncio.Event | None = None  # set once the window claimed last is folded
        self._packer: ChunkPacker | None = None
        packing = 0  # at most as many windows of compressed chunks
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
        self._packing = min(self.sizes.concurrency, packing)  # slots being written
        self._streams = min(self.sizes.concurrency, len(plan.windows) + packing)

    async def run(self) -> Committable:
        """Make all files of the save durable except the record.

        All leaves are copied or held before `staged` is called.

        Cancellation: waits for running copies and writes, then releases all slots.

        Raises:
            StagingError: names the leaf.
            StoreError: names the file.
        """
        try:
            async with asyncio.TaskGroup() as group:
                uploads = [group.create_task(self._upload()) for _ in range(self._streams)]
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
                if uploads and self.files.positional and self.commit.after_data:
                    await asyncio.wait(uploads)
                return await self._put_index(uploads)
        finally:
            try:
                self.staging.release_all()
            finally:
                if self._packer is not None:
                    self._packer.release()

    async def _put_index(self, uploads: Sequence[asyncio.Task[None]]) -> Committable:
        """Write the index, and again whenever an upload still running has renamed its file.

        The record refers to the last index, which has the final names.
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
        """Write the index of the current places and checksums."""
        rows: list[FileInfo] = []
        for file, (nbytes, crc) in enumerate(zip(self.files.nbytes, self.files.crcs, strict=True)):
            path = self.files.path(file).removeprefix(f"{DATABASE}/")
            rows.append(FileInfo(path, nbytes, crc))
        crcs = self._extents.crc32c.copy()
        crcs[list(self._checked_crc)] = list(self._checked_crc.values())
        checked, timeline = crcs[self.commit.checked], self._recorder.timeline()
        payload = Payload(self._extents, self._inline, rows, self._parts, checked, timeline)
        with self._recorder.span("index"):
            return await self.commit.put_index(payload)

    # -- stage

    async def _stage(self) -> None:
        staging, plan, run = self.staging, self._plan, self._compute.run
        held = not self.reference and await staging.offload()
        await staging.computed(map(plan.row_array.item, plan.inline))
        inline = await run(staging.inline) if plan.inline else None
        await staging.computed(part.array for part in plan.parts)
        self._parts = await run(staging.parts) if plan.parts else []
        await self._check_replicas()
        held = held or (self.reference and await staging.hold_immutable())
        if held:
            self.staged()
        if self._packer is not None:
            # After copying mutable leaves, because their kept copies count against the budget.
            await self._packer.reserve(self._packing + 1, spare_nbytes=staging.most_nbytes)
        # While the caller waits and memory lasts, only copy; checksums and writes follow.
        seal = None if staging.grow else self._checksums.seal
        await staging.windows(self._final.put_nowait, seal)
        if self._packer is not None:
            await staging.chunks(self._chunks.put_nowait)
        self._chunks.put_nowait(None)
        staging.forget()
        if not held:
            self.staged()
        if inline is not None:
            await self._trail(inline)

    async def _check_replicas(self) -> None:
        """Compute the checksums of replicas that this process compresses or does not write."""
        plan, checked = self._plan, self.commit.checked
        if not checked.size:
            return
        foreign = plan.row_writer[checked] != self._recorder.process
        rows = checked[foreign | np.isin(checked, plan.compressed)]
        self._checked_crc = await self.staging.checksums(rows.tolist())

    # -- serialize

    async def _trail(self, data: bytearray) -> None:
        """Append the checksums of inline values, after the caller has been released."""
        rows = list(self._plan.inline)
        ends = [0, *np.cumsum(self._extents.nbytes[rows]).tolist()]
        with self._recorder.span("serialize", len(data)):
            self._extents.crc32c[rows] = await self._compute.run(seal_small, data, ends)
        self._inline = data

    async def _seal(self, item: StagedWindow) -> FileWindow:
        """Checksum a window, if staging has only copied it, and fold it after the previous window.

        On return its bytes are final. Windows are claimed in plan order, so the previous window
        always finishes.
        """
        window, slot, sums = item.window, item.slot, item.sums
        before, turn = self._turn, asyncio.Event()
        self._turn = turn
        if sums is None:
            with self._recorder.span("serialize", window.nbytes):
                sums = await self.staging.use([slot], self._checksums.seal, window, slot.buffer)
        if before is not None:
            await before.wait()
        turn.set()
        self._checksums.fold(window, slot.buffer, sums)
        self._unfolded -= 1
        if not self._unfolded:
            self._folded.set()
        nbytes, written = window.nbytes, self.staging.written
        return FileWindow(window.file, window.offset, nbytes, slot, nbytes, written)

    async def _compress(self, packer: ChunkPacker) -> None:
        """Compress staged chunks concurrently, and pack them in plan order."""
        compressor = Compressor()
        plan, arrays = self._plan, self._plan.arrays
        running: deque[tuple[StagedChunks, asyncio.Task[list[Compressed]]]] = deque()
        async with asyncio.TaskGroup() as group:
            while (item := await self._chunks.get()) is not None:
                zstd = [arrays.of(plan.row_array[row]).layout.zstd_level or 0 for row in item.rows]
                call = self._compressed(compressor, item, zstd)
                running.append((item, group.create_task(call)))
                # If the queue is empty because the budget is used up, the next chunks come only
                # after the oldest ones have been written and their memory released.
                while running and (len(running) > self._compute.count or self._chunks.empty()):
                    await self._place(packer, *running.popleft())
            while running:
                await self._place(packer, *running.popleft())
        packer.finish()

    async def _compressed(
        self, compressor: Compressor, item: StagedChunks, zstd: Sequence[int]
    ) -> list[Compressed]:
        with self._recorder.span("serialize", sum(item.nbytes)):
            try:
                return await self.staging.use(
                    item.slots, compressor.compress, item.slots, item.starts, item.nbytes, zstd
                )
            except (MemoryError, zstandard.ZstdError) as error:
                raise self._not_compressed(item, error) from error

    def _not_compressed(self, item: StagedChunks, error: Exception) -> AsyncCheckpointError:
        array = int(self._plan.row_array[item.rows[0]])
        path = self.staging.path(int(self._plan.arrays.leaf[array]))
        text = (
            f"{path}: compressing {sum(item.nbytes)} bytes, beginning with this leaf, failed: "
            f"{type(error).__name__}: {error}; the save was aborted, earlier checkpoints are intact"
        )
        # zstd reports a failed allocation only by this text.
        if isinstance(error, MemoryError) or "Allocation error" in str(error):
            return ResourceError(
                f"{text}. Use a lower compression_level, whose contexts take less memory, lower "
                "host_memory_nbytes, or raise the limit of the process or container",
                path=path,
                stage="serialize",
            )
        return SaveError(text, path=path, stage="serialize")

    async def _place(
        self, packer: ChunkPacker, chunks: StagedChunks, task: asyncio.Task[list[Compressed]]
    ) -> None:
        made = await task
        self.staging.release(chunks.slots)
        with self._recorder.span("serialize", sum(stored.nbytes for stored in made)):
            places = await packer.write(made)
        extents = self._extents
        for row, place, stored in zip(chunks.rows, places, made, strict=True):
            extents.file[row], extents.offset[row] = place
            extents.nbytes[row], extents.crc32c[row] = stored.nbytes, stored.crc
        self.files.written(sum(chunks.nbytes) + len(made) * CRC_NBYTES)
        # Accounts for the compressor's output, which is freed only now.
        self.staging.release((), chunks.extra_nbytes)

    # -- upload

    async def _upload(self) -> None:
        """Write windows until the queue ends."""
        while (item := await self._final.get()) is not None:
            # Each upload seals only the window that it writes next, so that after `start_save`
            # checksums take only the processor time that the writes leave.
            window = item if isinstance(item, FileWindow) else await self._seal(item)
            with self._recorder.span("upload", window.nbytes):
                await self.files.write(window)
            # A view left in this frame would force a client to copy the buffer.
            del item, window
