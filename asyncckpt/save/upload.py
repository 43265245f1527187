"""Upload: stored bytes to durable data files.

`DataFiles` writes windows: on local disk at their offsets, to an object store with one request
each. `ChunkPacker` first packs compressed chunks, whose sizes are not planned, into windows.
"""

# Rule 1: a slot is free once its write has returned; flushing the file needs no memory.
# Rule 2: a file is sealed once, after its last write; a failed seal ends the attempt.
# Rule 3: a buffer that an object store's client may still be sending is not reused.

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.format.crc import combine, crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import PAGE_NBYTES
from asyncckpt.ports import DataFile
from asyncckpt.save.commit import DATABASE, Opened
from asyncckpt.save.serialize import Compressed

Done = Callable[[Slot, BaseException | None, bool], None]
"""Called when a write has ended: with its slot, its error, and whether the slot may be reused."""


@dataclass(frozen=True, slots=True, eq=False)
class FileWindow:
    """A window of a data file whose bytes are final.

    Attributes:
        counted_nbytes: bytes reported as progress once it is written.
        done: called once with the slot.
    """

    file: int
    offset: int
    nbytes: int
    slot: Slot
    counted_nbytes: int
    done: Done


@dataclass(slots=True, eq=False)
class _Open:
    path: str
    file: DataFile | None = None
    written_nbytes: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False, repr=False)
class DataFiles:
    """Data files of one attempt, written window by window and sealed at their full length.

    Attributes:
        stem: prefix of the file names; contains the save id.
        nbytes: length of each file: final before its last window is written, and without
            positional writes before the first.
        window_nbytes: size of all windows of a file except the last.
        written: called with the progress in bytes after each write.
        positional: the store has `StoreCapabilities.positional_writes`; otherwise each window is
            one request, whose body is the slot itself.
        renames: number of files that the store has sent again under another name.
    """

    attempt: Opened
    stem: str
    nbytes: list[int]
    window_nbytes: int
    written: Callable[[int], None]
    _: KW_ONLY
    positional: bool

    def __post_init__(self) -> None:
        self.crcs = [0] * len(self.nbytes)
        self._files: dict[int, _Open] = {}
        self.renames = 0

    def path(self, file: int) -> str:
        """Return the file's path, which is final once it is sealed."""
        opened = self._files.get(file)
        # Unique to this attempt.
        return f"{DATABASE}/d/{self.stem}-{file}" if opened is None else opened.path

    async def open(self, file: int) -> _Open:
        """Create a file once; concurrent callers wait for the first."""
        opened, nbytes = self._files.get(file), self.nbytes[file]
        if opened is None:
            opened = self._files[file] = _Open(self.path(file))
        async with opened.lock:
            if opened.file is None:
                attempt = await self.attempt()
                opened.file = await attempt.create(
                    opened.path, nbytes=nbytes, window_nbytes=self.window_nbytes
                )
        return opened

    async def write(self, window: FileWindow) -> None:
        """Write a window, and seal its file after the last one.

        Windows may be written concurrently and in any order. `window.done` is always called.

        Cancellation: waits for the write, as `DataFile.write` does.
        """
        try:
            opened = await self.open(window.file)
            assert opened.file is not None
            nbytes = window.nbytes
            if self.positional:
                # Whole pages keep the writes direct; `seal` truncates the file to its length.
                nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
            # No view of the slot stays in this frame, so its memory is freed with the client's.
            reusable = await opened.file.write(window.offset, window.slot.body(nbytes))
        except BaseException as error:
            # An object store's client may still be sending it.
            window.done(window.slot, error, self.positional)
            raise
        window.done(window.slot, None, reusable)
        self.written(window.counted_nbytes)
        opened.written_nbytes += window.nbytes
        if opened.written_nbytes == self.nbytes[window.file]:
            await opened.file.seal(opened.written_nbytes)
            if opened.file.path != opened.path:
                opened.path = opened.file.path
                self.renames += 1


class ChunkPacker:
    """Packing of compressed chunks into windows of data files that follow the planned ones.

    A file ends before the chunk that would exceed its size; a larger chunk gets its own file.

    Args:
        target_nbytes: largest size of a file; without positional writes, files also fit one slot,
            so that their length is known when they are opened.
        emit: receives each full window, and the last one of each file.
    """

    # Invariant: the slots are taken before the first chunk is staged and kept until the last one
    # is written. A slot taken later could wait for budget held by staged chunks that wait for it.

    def __init__(
        self,
        files: DataFiles,
        target_nbytes: int,
        pool: SlotPool,
        compute: Workers,
        *,
        emit: Callable[[FileWindow], None],
    ) -> None:
        self._files = files
        self._target_nbytes = target_nbytes
        if not files.positional:
            self._target_nbytes = min(target_nbytes, pool.slot_nbytes)
        self._planned = len(files.nbytes)
        self._pool = pool
        self._compute = compute
        self._emit = emit
        self._ready: asyncio.Queue[Slot | None] = asyncio.Queue()  # None: needs a replacement
        self._reserved: set[Slot] = set()
        self._kept = 0
        self._slot: Slot | None = None  # the last file's bytes that are not emitted yet

    async def reserve(self, count: int, *, spare_nbytes: int = 0) -> None:
        """Take up to `count` slots, at least one, within half of the budget that is not kept.

        Leaves `spare_nbytes` of the budget free, unless that leaves no slot.
        """
        budget = self._pool.budget
        free = budget.capacity - budget.kept
        count = max(1, min(count, min(free // 2, free - spare_nbytes) // self._pool.held_nbytes))
        self._reserved.update(await self._pool.take(count))
        self._keep(count)
        for slot in self._reserved:
            self._ready.put_nowait(slot)

    def release(self) -> None:
        """Release all slots, and the budget of discarded ones that were not replaced."""
        self._keep(-self._kept)
        self._pool.release(self._reserved)
        self._reserved.clear()
        while not self._ready.empty():
            if self._ready.get_nowait() is None:
                self._pool.cancel_replacement()

    def _keep(self, count: int) -> None:
        self._kept += count
        self._pool.keep(count)

    def done(self, slot: Slot, error: BaseException | None, reusable: bool) -> None:
        """Take back an emitted slot; discard it if it may not be reused."""
        if error is None and reusable:
            self._ready.put_nowait(slot)
            return
        self._reserved.discard(slot)
        if reusable:
            self._keep(-1)
            self._pool.release([slot], error)
            return
        if error is None:
            self._ready.put_nowait(None)
        else:
            self._keep(-1)  # the pool counts a discarded slot
        self._pool.discard([slot], keep=error is None)

    async def write(self, chunks: Sequence[Compressed]) -> list[tuple[int, int]]:
        """Pack the next chunks; return the final file number and offset of each."""
        lengths, crcs = self._files.nbytes, self._files.crcs
        places: list[tuple[int, int]] = []
        for chunk in chunks:
            if len(lengths) == self._planned or lengths[-1] + chunk.nbytes > self._target_nbytes:
                lengths.append(0)
                crcs.append(0)
            places.append((len(lengths) - 1, lengths[-1]))
            lengths[-1] += chunk.nbytes
        placed = zip(places, chunks, strict=True)
        for file, run in itertools.groupby(placed, key=lambda one: one[0][0]):
            ((_, offset), *_), stored = zip(*run, strict=True)
            if offset == 0:
                self._finish(file - 1)
            blocks = [block for chunk in stored for block in chunk.blocks]
            if len(stored) > 1:
                # An extra copy of small chunks costs less than a call for each.
                blocks = [b"".join(blocks)]
            await self._write(file, offset, blocks)
            for chunk in stored:
                crc = combine(crcs[file], chunk.crc, chunk.nbytes - CRC_NBYTES)
                crcs[file] = crc32c(chunk.blocks[-1], crc)
        return places

    async def _write(self, file: int, offset: int, blocks: list[bytes]) -> None:
        """Copy the blocks into slots; emit full slots except the last one of the file."""
        size = self._pool.slot_nbytes
        while blocks:
            start = offset % size
            if start == 0 and self._slot is not None:
                self._emit_slot(file, offset - size, size)
            if self._slot is None:
                self._slot = await self._ready.get()
            if self._slot is None:
                self._slot = await self._pool.replacement()
                self._reserved.add(self._slot)
            blocks, end = await self._compute.run(_fill, self._slot, start, blocks)
            offset += end - start

    def finish(self) -> None:
        """Emit the last window of the last file, if any."""
        self._finish(len(self._files.nbytes) - 1)

    def _finish(self, file: int) -> None:
        """Emit the last window of a file, whose length is final."""
        if self._slot is not None:
            nbytes, size = self._files.nbytes[file], self._pool.slot_nbytes
            start = (nbytes - 1) // size * size
            self._emit_slot(file, start, nbytes - start)

    def _emit_slot(self, file: int, offset: int, nbytes: int) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None
        # Slots are reused: bytes of another checkpoint must not be written.
        slot.buffer[nbytes : -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES] = 0
        # Progress was reported when the chunks were packed.
        self._emit(FileWindow(file, offset, nbytes, slot, 0, self.done))


def _fill(slot: Slot, start: int, blocks: list[bytes]) -> tuple[list[bytes], int]:
    """Copy blocks into the slot from `start` on; return the remaining blocks and the end."""
    for number, block in enumerate(blocks):
        room = slot.buffer.size - start
        data = np.frombuffer(block, np.uint8)
        np.copyto(slot.buffer[start : start + min(room, data.size)], data[:room])
        start += min(room, data.size)
        if data.size > room:
            return [block[room:], *blocks[number + 1 :]], start
    return [], start
