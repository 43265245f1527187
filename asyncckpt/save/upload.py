"""Upload: stored bytes to durable data files.

`DataFiles` writes windows: on local disk at their places, to an object store by one request each.
Compressed chunks, whose size is not planned, are appended to files on local disk (`ChunkAppender`),
and packed into windows for an object store (`ChunkPacker`).
"""

# Rule 1: a slot is free when the write of it has returned; the flush of its file needs no memory.
# Rule 2: a file is sealed once, after its last write; a failed seal ends the attempt.
# Rule 3: a buffer that an object store's client may still be sending is not reused.

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np

from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.format.crc import combine, crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import PAGE_NBYTES
from asyncckpt.ports import AttemptFiles, DataFile
from asyncckpt.save.commit import DATABASE
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
        file_nbytes: length of the whole file.
        slot: where the bytes are.
        counted_nbytes: bytes reported as progress once it is written.
        done: called once with the slot.
    """

    file: int
    offset: int
    nbytes: int
    file_nbytes: int
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
        attempt: where the files go.
        stem: prefix of the names of the files, which contains the attempt's save id.
        window_nbytes: size of all windows of a file but the last.
        written: called with the bytes of progress of every window that is written.
        positional: the store has `StoreCapabilities.positional_writes`; otherwise each window of a
            file is one request, whose body is the slot itself.
        renames: number of files that a store has sent again under another name.
        renamed: called after each.
    """

    attempt: AttemptFiles
    stem: str
    window_nbytes: int
    written: Callable[[int], None]
    _: KW_ONLY
    positional: bool

    def __post_init__(self) -> None:
        self._files: dict[int, _Open] = {}
        self.renames = 0
        self.renamed: Callable[[], None] | None = None

    def path(self, file: int) -> str:
        """Return the file's path, which is final once it is sealed."""
        opened = self._files.get(file)
        # Unique to this attempt.
        return f"{DATABASE}/d/{self.stem}-{file}" if opened is None else opened.path

    async def open(self, file: int, nbytes: int) -> _Open:
        """Create a file of this length, once: further callers wait for the first."""
        opened = self._files.get(file)
        if opened is None:
            opened = self._files[file] = _Open(-(-nbytes // self.window_nbytes), self.path(file))
        async with opened.lock:
            if opened.file is None:
                opened.file = await self.attempt.create(
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
            opened = await self.open(window.file, window.file_nbytes)
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
            await opened.file.seal(window.file_nbytes)
            if opened.file.path != opened.path:
                opened.path = opened.file.path
                self.renames += 1
                if self.renamed is not None:
                    self.renamed()


class Placed(NamedTuple):
    """A compressed chunk, and where it goes.

    Attributes:
        file: number of the file.
        offset: where it begins in it.
        stored: its bytes.
        raw_nbytes: its length before compression.
    """

    file: int
    offset: int
    stored: Compressed
    raw_nbytes: int


@dataclass(eq=False, repr=False)
class ChunkAppender:
    """Appends compressed chunks to data files in plan order, sealing each at its target size."""

    files: DataFiles
    first_file: int
    target_nbytes: int

    def __post_init__(self) -> None:
        self._file: DataFile | None = None
        self._index = 0  # of the open file
        self.file_nbytes: list[int] = []
        self.file_crcs: list[int] = []

    def place(self, nbytes: int) -> tuple[int, int]:
        """Return file number and offset of the next chunk; both are final."""
        if not self.file_nbytes or self.file_nbytes[-1] >= self.target_nbytes:
            self.file_nbytes.append(0)
            self.file_crcs.append(0)
        offset = self.file_nbytes[-1]
        self.file_nbytes[-1] += nbytes
        return self.first_file + len(self.file_nbytes) - 1, offset

    async def write(self, placed: Sequence[Placed]) -> None:
        """Write consecutive chunks; several in one file by one write."""
        for file, run in _by_file(placed):
            offset = run[0].offset
            if offset == 0:
                await self.finish()
                self._index = file - self.first_file
                nbytes = min(self.target_nbytes, sum(chunk.raw_nbytes for chunk in run))
                self._file = await self.files.attempt.create(self.files.path(file), nbytes=nbytes)
            assert self._file is not None
            blocks = _blocks(run)
            if len(run) > 1:
                blocks = [b"".join(blocks)]  # small ones: a write costs more than a copy
            for block in blocks:
                await self._file.write(offset, np.frombuffer(block, np.uint8))
                offset += len(block)
            self.file_crcs[self._index] = _with_chunks(self.file_crcs[self._index], run)

    async def finish(self) -> None:
        """Seal the open file, if any."""
        if self._file is not None:
            open_file, self._file = self._file, None
            await open_file.seal(self.file_nbytes[self._index])


@dataclass(eq=False, repr=False)
class ChunkPacker:
    """Packs compressed chunks, in plan order, into slots that each become a file of one request.

    For stores without positional writes. A chunk that is larger than a slot gets a file of its
    own, in several windows.

    Attributes:
        first_file: number of the first file.
        target_nbytes: size at which a file ends.
        pool: where slots come from.
        compute: threads that copy.
        emit: takes a window that is full.
    """

    # Invariant: the slots are taken before the first chunk is staged and kept until the last one
    # is written. Taken later, a slot would wait for budget held by staged chunks, which wait for
    # that very slot.

    first_file: int
    target_nbytes: int
    pool: SlotPool
    compute: Workers
    _: KW_ONLY
    emit: Callable[[FileWindow], None]

    def __post_init__(self) -> None:
        self._target = min(self.target_nbytes, self.pool.slot_nbytes)
        self._ready: asyncio.Queue[Slot | None] = asyncio.Queue()  # None: to be replaced
        self._reserved: set[Slot] = set()
        self._kept = 0
        self._slot: Slot | None = None
        self._file = -1
        self.file_nbytes: list[int] = []
        self.file_crcs: list[int] = []

    async def reserve(self, count: int, *, beside: int = 0) -> None:
        """Take `count` slots, or fewer that fit half of the budget that is not kept.

        Leaves `beside` bytes of the budget free, unless a single slot needs them.
        """
        budget = self.pool.budget
        free = budget.capacity - budget.kept
        count = max(1, min(count, min(free // 2, free - beside) // self.pool.held_nbytes))
        self._reserved.update(await self.pool.take(count))
        self._keep(count)
        for slot in self._reserved:
            self._ready.put_nowait(slot)

    def release(self) -> None:
        """Return all slots, and the budget of discarded ones that were not replaced."""
        self._keep(-self._kept)
        self.pool.release(self._reserved)
        self._reserved.clear()
        while not self._ready.empty():
            if self._ready.get_nowait() is None:
                self.pool.cancel_replacement()

    def _keep(self, count: int) -> None:
        self._kept += count
        self.pool.keep(count)

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
        self.pool.discard([slot], keep=error is None)

    def place(self, nbytes: int) -> tuple[int, int]:
        """Return file number and offset of the next chunk; both are final."""
        files = self.file_nbytes
        if not files or files[-1] + nbytes > self._target:
            files.append(0)
            self.file_crcs.append(0)
        offset = files[-1]
        files[-1] += nbytes
        return self.first_file + len(files) - 1, offset

    async def write(self, placed: Sequence[Placed]) -> None:
        """Copy consecutive chunks into slots, and emit those that are full."""
        for file, run in _by_file(placed):
            index = file - self.first_file
            offset = run[0].offset
            if offset == 0:
                await self.finish()
                self._file = file
            size = self.pool.slot_nbytes
            parts = _blocks(run)
            while parts:
                if self._slot is None:
                    self._slot = await self._next()
                start = offset % size
                parts, end = await self.compute.run(_fill, self._slot, start, parts)
                offset += end - start
                if end == size and self.file_nbytes[index] > size:
                    # A file of several slots holds a single chunk: its length is final.
                    self._emit_slot(file, offset - end, end, self._slot)
                    self._slot = None
            self.file_crcs[index] = _with_chunks(self.file_crcs[index], run)

    async def _next(self) -> Slot:
        slot = await self._ready.get()
        if slot is None:
            slot = await self.pool.replacement()
            self._reserved.add(slot)
        return slot

    async def finish(self) -> None:
        """Emit the slot that is not full yet, if any."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        nbytes = self.file_nbytes[self._file - self.first_file]
        size = self.pool.slot_nbytes
        start = (nbytes - 1) // size * size
        self._emit_slot(self._file, start, nbytes - start, slot)

    def _emit_slot(self, file: int, offset: int, nbytes: int, slot: Slot) -> None:
        file_nbytes = self.file_nbytes[file - self.first_file]
        # Its bytes were counted when the chunks were packed.
        self.emit(FileWindow(file, offset, nbytes, file_nbytes, slot, 0, self.done))


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


def _by_file(placed: Iterable[Placed]) -> Iterator[tuple[int, list[Placed]]]:
    for file, run in itertools.groupby(placed, key=lambda chunk: chunk.file):
        yield file, list(run)


def _blocks(run: Iterable[Placed]) -> list[bytes]:
    return [block for chunk in run for block in chunk.stored.blocks]


def _with_chunks(file_crc: int, run: Iterable[Placed]) -> int:
    """Return the CRC of a file to which these chunks were appended."""
    for _, _, stored, _ in run:
        file_crc = combine(file_crc, stored.crc, stored.nbytes - CRC_NBYTES)
        file_crc = crc32c(stored.blocks[-1], file_crc)
    return file_crc
