"""Upload: stored bytes to durable data files."""

# Rule 1: a slot is free when the write of it has returned; the flush of its file needs no memory.
# Rule 2: a file is sealed once, after its last write; a failed seal ends the attempt.
# Rule 3: what an object store was given to send, and may still be sending, is not used again.

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncckpt.flow.buffers import Slot, SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.format.crc import combine, crc32c
from asyncckpt.options import PAGE_NBYTES
from asyncckpt.ports import Attempt, DataFile
from asyncckpt.stages.serialize import TRAILER_NBYTES, Compressed


def data_file_path(save_id: str, index: int) -> str:
    """Path of a data file relative to the OCDBT database; no other attempt can make the same."""
    return f"d/{save_id}-{index}"


@dataclass(slots=True, eq=False)
class Filled:
    """A slot whose bytes are final: one window of a data file.

    Attributes:
        file: number of the file.
        offset: where the window begins in it.
        nbytes: its length.
        slot: where it is.
        counted: bytes that are told as progress once it is written.
    """

    file: int
    offset: int
    nbytes: int
    slot: Slot
    counted: int = 0


@dataclass(slots=True, eq=False)
class _Open:
    path: str
    nbytes: int
    left: int
    file: DataFile | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WindowUpload:
    """Writes windows of files, in any order, and seals each file after its last one.

    Args:
        attempt: where the files go.
        window_nbytes: size of a window, for stores that make one request of each; None where
            writes go to places of a file, whole pages at a time.
        written: called with `Filled.counted` of every window that is written.
        renamed: called when a file has got another path than was announced.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        window_nbytes: int | None,
        written: Callable[[int], None],
        renamed: Callable[[], None] = lambda: None,
    ) -> None:
        self._attempt = attempt
        self._window_nbytes = window_nbytes
        self._written = written
        self._renamed = renamed
        self._files: dict[int, _Open] = {}

    def announce(self, file: int, path: str, nbytes: int, windows: int) -> None:
        """The file will have this path, length and number of windows."""
        self._files[file] = _Open(path, nbytes, windows)

    def path(self, file: int) -> str:
        """Where the file is, once it is sealed."""
        opened = self._files[file]
        return opened.path if opened.file is None else opened.file.path

    async def write(
        self, item: Filled, done: Callable[[Slot, BaseException | None, bool], None]
    ) -> None:
        """The window is in its file; the file is sealed with its last one.

        `done` was called with the slot, with the error if there was one, and with whether the
        slot may be used again. Cancellation: waits for the write, as `DataFile.write` does.
        """
        opened = self._files[item.file]
        try:
            file = await self._open(opened)
            if self._window_nbytes is None:
                # Whole pages keep the write direct; `seal` cuts the file to its length.
                padded = -(-item.nbytes // PAGE_NBYTES) * PAGE_NBYTES
                reusable = await file.write(item.offset, item.slot.buffer[:padded])
            else:
                reusable = await file.write(item.offset, item.slot.body(item.nbytes))
        except BaseException as error:
            done(item.slot, error, self._window_nbytes is None)
            raise
        done(item.slot, None, reusable)
        self._written(item.counted)
        opened.left -= 1
        if opened.left == 0:
            await file.seal(opened.nbytes)
            if file.path != opened.path:
                self._renamed()

    async def _open(self, opened: _Open) -> DataFile:
        async with opened.lock:
            if opened.file is None:
                opened.file = await self._attempt.create(
                    opened.path, nbytes=opened.nbytes, window_nbytes=self._window_nbytes
                )
        return opened.file


class Placed(NamedTuple):
    """A compressed chunk, and where it goes.

    Attributes:
        file: number of the file.
        offset: where it begins in it.
        stored: its bytes.
        raw_nbytes: length of what was compressed.
    """

    file: int
    offset: int
    stored: Compressed
    raw_nbytes: int


class ChunkAppender:
    """Appends compressed chunks to data files in plan order, sealing each at its target size."""

    def __init__(
        self,
        attempt: Attempt,
        path: Callable[[int], str],
        first_file: int,
        target_nbytes: int,
        *,
        written: Callable[[int], None],
    ) -> None:
        self._attempt = attempt
        self._path = path
        self._first = first_file
        self._target = target_nbytes
        self._file: DataFile | None = None
        self._written = written
        self.file_nbytes: list[int] = []
        self.file_crcs: list[int] = []

    def place(self, nbytes: int) -> tuple[int, int]:
        """File index and offset of the next chunk; final at once."""
        if not self.file_nbytes or self.file_nbytes[-1] >= self._target:
            self.file_nbytes.append(0)
            self.file_crcs.append(0)
        offset = self.file_nbytes[-1]
        self.file_nbytes[-1] += nbytes
        return self._first + len(self.file_nbytes) - 1, offset

    async def write(self, placed: Sequence[Placed]) -> None:
        """The chunks, which follow each other, are in their files."""
        for file, run in _by_file(placed):
            offset = run[0].offset
            raw_nbytes = sum(chunk.raw_nbytes for chunk in run)
            if offset == 0:
                await self.finish(file - 1)
                self._file = await self._attempt.create(
                    self._path(file), nbytes=min(self._target, raw_nbytes)
                )
            assert self._file is not None
            blocks = _blocks(run)
            if len(run) > 1:
                blocks = [b"".join(blocks)]  # small ones: a write costs more than a copy
            for block in blocks:
                await self._file.write(offset, np.frombuffer(block, np.uint8))
                offset += len(block)
            index = file - self._first
            self.file_crcs[index] = _with_chunks(self.file_crcs[index], run)
            self._written(raw_nbytes + len(run) * TRAILER_NBYTES)

    async def finish(self, file: int | None = None) -> None:
        """The open file, if any, is sealed."""
        if self._file is not None:
            index = len(self.file_nbytes) - 1 if file is None else file - self._first
            open_file, self._file = self._file, None
            await open_file.seal(self.file_nbytes[index])


class ChunkPacker:
    """Packs compressed chunks, in plan order, into slots that each become a file of one request.

    For stores that take no writes at places of a file. A chunk that is larger than a slot gets a
    file of its own, in several windows.

    Args:
        path: path of a file by its number.
        first_file: number of the first one.
        target_nbytes: size at which a file ends.
        pool: where slots come from.
        compute: threads that copy.
        emit: takes a slot that is full, after its file was announced.
        announce: as `WindowUpload.announce`.
        written: called with the uncompressed bytes of every chunk.
    """

    # The slots are taken before the first chunk is staged and kept until the last one is written:
    # whoever needed one while chunks that wait for it hold the rest of the budget would wait
    # for ever.

    def __init__(
        self,
        path: Callable[[int], str],
        first_file: int,
        target_nbytes: int,
        pool: SlotPool,
        compute: Workers,
        *,
        emit: Callable[[Filled], None],
        announce: Callable[[int, str, int, int], None],
        written: Callable[[int], None],
    ) -> None:
        self._path = path
        self._first = first_file
        self._target = min(target_nbytes, pool.slot_nbytes)
        self._pool = pool
        self._compute = compute
        self._emit = emit
        self._announce = announce
        self._written = written
        self._ready: asyncio.Queue[Slot | None] = asyncio.Queue()
        self._reserved: set[Slot] = set()
        self._kept = 0
        self._slot: Slot | None = None
        self._file = -1
        self.file_nbytes: list[int] = []
        self.file_crcs: list[int] = []

    async def reserve(self, count: int, *, beside: int = 0) -> int:
        """`count` slots are at hand, or as many as half of what is not kept makes.

        `beside` units of the budget stay free, unless a single slot needs them. Returns the units.
        """
        budget = self._pool.budget
        free = budget.capacity - budget.standing
        count = max(1, min(count, min(free // 2, free - beside) // self._pool.units))
        self._reserved.update(await self._pool.take(count))
        self._keep(count)
        for slot in self._reserved:
            self._ready.put_nowait(slot)
        return count * self._pool.units

    def release(self) -> None:
        """All slots have gone back, and the parts of the budget whose replacement nobody needed."""
        self._keep(-self._kept)
        self._pool.give(self._reserved)
        self._reserved.clear()
        while not self._ready.empty():
            if self._ready.get_nowait() is None:
                self._pool.forgo()

    def _keep(self, count: int) -> None:
        self._kept += count
        self._pool.stand(count)

    def done(self, slot: Slot, error: BaseException | None, reusable: bool) -> None:
        """A slot that was emitted has been written."""
        if error is None and reusable and slot.restore():
            self._ready.put_nowait(slot)
            return
        self._reserved.discard(slot)
        if error is None:
            self._ready.put_nowait(None)
        else:
            self._keep(-1)  # what is discarded stands by itself
        self._pool.discard([slot], keep=error is None)

    def place(self, nbytes: int) -> tuple[int, int]:
        """File index and offset of the next chunk; final at once."""
        files = self.file_nbytes
        if not files or files[-1] + nbytes > self._target:
            files.append(0)
            self.file_crcs.append(0)
        offset = files[-1]
        files[-1] += nbytes
        return self._first + len(files) - 1, offset

    async def write(self, placed: Sequence[Placed]) -> None:
        """The chunks, which follow each other, are in slots."""
        for file, run in _by_file(placed):
            index = file - self._first
            offset = run[0].offset
            if offset == 0:
                await self.finish()
                self._file = file
            nbytes = sum(chunk.stored.nbytes for chunk in run)
            size = self._pool.slot_nbytes
            if offset + nbytes > size:
                self._announce(file, self._path(file), nbytes, -(-nbytes // size))
            parts = _blocks(run)
            while parts:
                if self._slot is None:
                    self._slot = await self._next()
                start = offset % size
                parts, end = await self._compute.run(_fill, self._slot, start, parts)
                offset += end - start
                if end == size and self.file_nbytes[index] > size:
                    self._emit(Filled(file, offset - end, end, self._slot))
                    self._slot = None
            self.file_crcs[index] = _with_chunks(self.file_crcs[index], run)
            self._written(sum(chunk.raw_nbytes + TRAILER_NBYTES for chunk in run))

    async def _next(self) -> Slot:
        slot = await self._ready.get()
        if slot is None:
            slot = await self._pool.replacement()
            self._reserved.add(slot)
        return slot

    async def finish(self) -> None:
        """What was packed is on its way."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        nbytes = self.file_nbytes[self._file - self._first]
        size = self._pool.slot_nbytes
        if nbytes <= size:
            self._announce(self._file, self._path(self._file), nbytes, 1)
        start = (nbytes - 1) // size * size
        self._emit(Filled(self._file, start, nbytes - start, slot))


def _fill(slot: Slot, start: int, blocks: list[bytes]) -> tuple[list[bytes], int]:
    """The blocks, or their beginning, are in the slot from `start` on; the rest, and the end."""
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
    """The CRC of a file to which these chunks were appended."""
    for _, _, stored, _ in run:
        file_crc = combine(file_crc, stored.crc, stored.nbytes - TRAILER_NBYTES)
        file_crc = crc32c(stored.blocks[-1], file_crc)
    return file_crc
