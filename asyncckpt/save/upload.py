"""Upload: stored bytes to durable data files.

`DataFiles` writes windows: on local disk at their places, to an object store by one request each.
Compressed chunks, whose size is not planned, are appended to files on local disk (`ChunkAppender`),
and packed into windows for an object store (`ChunkPacker`).
"""

# Rule 1: a slot is free when the write of it has returned; the flush of its file needs no memory.
# Rule 2: a file is sealed once, after its last write; a failed seal ends the attempt.
# Rule 3: a buffer that an object store's client may still be sending is not reused.

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
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
"""Called with a slot whose write has ended, its error, and whether the slot may be reused."""


@dataclass(frozen=True, slots=True, eq=False)
class FileWindow:
    """A window of a data file whose bytes are final.

    Attributes:
        file: number of the file.
        offset: where the window begins in it.
        nbytes: its length.
        slot: where the bytes are.
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
    left: int  # windows that are not written yet
    path: str
    file: DataFile | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False, repr=False)
class DataFiles:
    """Data files of one attempt, written window by window and sealed after the last window.

    Attributes:
        attempt: returns where the files go, once that is open.
        stem: prefix of the names of the files, which contains the attempt's save id.
        nbytes: length of each file; that of one with windows is final before the first is written.
        crcs: CRC-32C of each file.
        window_nbytes: size of all windows of a file but the last.
        written: called with the bytes of progress of every window that is written.
        positional: the store has `StoreCapabilities.positional_writes`; otherwise each window of a
            file is one request, whose body is the slot itself.
        renames: number of files that a store has sent again under another name.
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
        """Create a file, once: further callers wait for the first."""
        opened, nbytes = self._files.get(file), self.nbytes[file]
        if opened is None:
            opened = self._files[file] = _Open(-(-nbytes // self.window_nbytes), self.path(file))
        async with opened.lock:
            if opened.file is None:
                attempt = await self.attempt()
                opened.file = await attempt.create(
                    opened.path,
                    nbytes=nbytes,
                    window_nbytes=None if self.positional else self.window_nbytes,
                )
        return opened

    async def write(self, window: FileWindow) -> None:
        """Write a window; with the last one of its file, seal the file.

        Windows come in any order and several at a time. On return `window.done` was called.

        Cancellation: waits for the write, as `DataFile.write` does.
        """
        try:
            opened = await self.open(window.file)
            assert opened.file is not None
            nbytes = window.nbytes
            if self.positional:
                # Whole pages, which keeps the writes direct; `seal` cuts the file to its length.
                nbytes = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
            # No view of the slot stays in this frame: its memory is freed with the client's.
            reusable = await opened.file.write(window.offset, window.slot.body(nbytes))
        except BaseException as error:
            # The client of an object store may still be sending it.
            window.done(window.slot, error, self.positional)
            raise
        window.done(window.slot, None, reusable)
        self.written(window.counted_nbytes)
        opened.left -= 1
        if opened.left == 0:
            await opened.file.seal(self.nbytes[window.file])
            if opened.file.path != opened.path:
                opened.path = opened.file.path
                self.renames += 1


class CompressedFiles(abc.ABC):
    """Files of compressed chunks, which follow those of windows, and each other in plan order.

    Args:
        files: data files of the attempt.
        target_nbytes: size at which a file ends.
    """

    def __init__(self, files: DataFiles, target_nbytes: int) -> None:
        self._files = files
        self._target_nbytes = target_nbytes
        self._planned = len(files.nbytes)
        self._file = -1  # the one that was begun last

    async def write(self, chunks: Sequence[Compressed]) -> list[tuple[int, int]]:
        """Write the next chunks; return file number and offset of each, which are final."""
        lengths, crcs = self._files.nbytes, self._files.crcs
        places: list[tuple[int, int]] = []
        for chunk in chunks:
            if len(lengths) == self._planned or not self._fits(lengths[-1], chunk.nbytes):
                lengths.append(0)
                crcs.append(0)
            places.append((len(lengths) - 1, lengths[-1]))
            lengths[-1] += chunk.nbytes
        placed = zip(places, chunks, strict=True)
        for file, run in itertools.groupby(placed, key=lambda one: one[0][0]):
            ((_, offset), *_), stored = zip(*run, strict=True)
            if offset == 0:
                await self.finish()
                self._file = file
            await self._write(offset, stored)
            for chunk in stored:
                crc = combine(crcs[file], chunk.crc, chunk.nbytes - CRC_NBYTES)
                crcs[file] = crc32c(chunk.blocks[-1], crc)
        return places

    @abc.abstractmethod
    def _fits(self, file_nbytes: int, nbytes: int) -> bool:
        """Return whether a file of this length has room for a chunk."""

    @abc.abstractmethod
    async def _write(self, offset: int, chunks: Sequence[Compressed]) -> None:
        """Write chunks that follow each other in the file that was begun last."""

    @abc.abstractmethod
    async def finish(self) -> None:
        """Write the rest of the file that was begun last, if any."""


class ChunkAppender(CompressedFiles):
    """Appends compressed chunks to the data files of an attempt."""

    def __init__(self, files: DataFiles, target_nbytes: int) -> None:
        super().__init__(files, target_nbytes)
        self._open: DataFile | None = None

    def _fits(self, file_nbytes: int, nbytes: int) -> bool:
        return file_nbytes < self._target_nbytes

    async def _write(self, offset: int, chunks: Sequence[Compressed]) -> None:
        if self._open is None:
            path = self._files.path(self._file)
            nbytes = min(self._target_nbytes, sum(chunk.nbytes for chunk in chunks))
            attempt = await self._files.attempt()
            self._open = await attempt.create(path, nbytes=nbytes)
        blocks = _blocks(chunks)
        if len(chunks) > 1:
            blocks = [b"".join(blocks)]  # small ones: a write costs more than a copy
        for block in blocks:
            await self._open.write(offset, np.frombuffer(block, np.uint8))
            offset += len(block)

    async def finish(self) -> None:
        """Seal the open file, if any."""
        if self._open is not None:
            open_file, self._open = self._open, None
            await open_file.seal(self._files.nbytes[self._file])


class ChunkPacker(CompressedFiles):
    """Packs compressed chunks into slots that each become a file of one request.

    For stores without positional writes. A chunk that is larger than a slot gets a file of its
    own, in several windows.

    Args:
        files: data files of the attempt.
        target_nbytes: size at which a file ends, if that is below the size of a slot.
        pool: where slots come from.
        compute: threads that copy.
        emit: takes a window that is full.
    """

    # Invariant: the slots are taken before the first chunk is staged and kept until the last one
    # is written. Taken later, a slot would wait for budget held by staged chunks, which wait for
    # that very slot.

    def __init__(
        self,
        files: DataFiles,
        target_nbytes: int,
        pool: SlotPool,
        compute: Workers,
        *,
        emit: Callable[[FileWindow], None],
    ) -> None:
        super().__init__(files, min(target_nbytes, pool.slot_nbytes))
        self._pool = pool
        self._compute = compute
        self._emit = emit
        self._ready: asyncio.Queue[Slot | None] = asyncio.Queue()  # None: to be replaced
        self._reserved: set[Slot] = set()
        self._kept = 0
        self._slot: Slot | None = None

    async def reserve(self, count: int, *, beside: int = 0) -> None:
        """Take `count` slots, or fewer that fit half of the budget that is not kept.

        Leaves `beside` bytes of the budget free, unless a single slot needs them.
        """
        budget = self._pool.budget
        free = budget.capacity - budget.kept
        count = max(1, min(count, min(free // 2, free - beside) // self._pool.held_nbytes))
        self._reserved.update(await self._pool.take(count))
        self._keep(count)
        for slot in self._reserved:
            self._ready.put_nowait(slot)

    def release(self) -> None:
        """Return all slots, and the budget of discarded ones that were not replaced."""
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
        """Take back a slot that was emitted; discard it where it may not be reused."""
        if error is None and reusable:
            self._ready.put_nowait(slot)
            return
        self._reserved.discard(slot)
        if error is None:
            self._ready.put_nowait(None)
        else:
            self._keep(-1)  # a discarded slot is counted by the pool
        self._pool.discard([slot], keep=error is None)

    def _fits(self, file_nbytes: int, nbytes: int) -> bool:
        return file_nbytes + nbytes <= self._target_nbytes

    async def _write(self, offset: int, chunks: Sequence[Compressed]) -> None:
        """Copy the chunks into slots, and emit those that are full."""
        size = self._pool.slot_nbytes
        blocks = _blocks(chunks)
        while blocks:
            if self._slot is None:
                self._slot = await self._next()
            start = offset % size
            blocks, end = await self._compute.run(_fill, self._slot, start, blocks)
            offset += end - start
            if end == size and self._files.nbytes[self._file] > size:
                # A file of several slots holds a single chunk: its length is final.
                self._emit_slot(offset - end, end)

    async def _next(self) -> Slot:
        slot = await self._ready.get()
        if slot is None:
            slot = await self._pool.replacement()
            self._reserved.add(slot)
        return slot

    async def finish(self) -> None:
        """Emit the slot that is not full yet, if any."""
        if self._slot is not None:
            nbytes, size = self._files.nbytes[self._file], self._pool.slot_nbytes
            start = (nbytes - 1) // size * size
            self._emit_slot(start, nbytes - start)

    def _emit_slot(self, offset: int, nbytes: int) -> None:
        slot, self._slot = self._slot, None
        assert slot is not None
        # Its bytes were counted when the chunks were packed.
        self._emit(FileWindow(self._file, offset, nbytes, slot, 0, self.done))


def _fill(slot: Slot, start: int, blocks: list[bytes]) -> tuple[list[bytes], int]:
    """Copy blocks into the slot from `start` on; return those that did not fit, and the end."""
    for number, block in enumerate(blocks):
        room = slot.buffer.size - start
        data = np.frombuffer(block, np.uint8)
        np.copyto(slot.buffer[start : start + min(room, data.size)], data[:room])
        start += min(room, data.size)
        if data.size > room:
            return [block[room:], *blocks[number + 1 :]], start
    return [], start


def _blocks(chunks: Iterable[Compressed]) -> list[bytes]:
    return [block for chunk in chunks for block in chunk.blocks]
