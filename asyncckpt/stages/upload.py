"""Upload: stored bytes to durable data files."""

# Rule 1: a slot is free when the write of it has returned; the flush of its file needs no memory.
# Rule 2: a file is sealed once, after its last write; a failed seal ends the attempt.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from asyncckpt.format.crc import combine, crc32c
from asyncckpt.options import PAGE_NBYTES
from asyncckpt.planning.save import Window
from asyncckpt.ports import Attempt, DataFile
from asyncckpt.stages.serialize import TRAILER_NBYTES
from asyncckpt.stages.stage import StagedChunk, StagedWindow


def data_file_path(save_id: str, index: int) -> str:
    """Path of a data file relative to the OCDBT database; no other attempt can make the same."""
    return f"d/{save_id}-{index}"


class WindowUpload:
    """Writes the planned windows, in any order, and seals each file after its last one."""

    def __init__(
        self,
        attempt: Attempt,
        paths: Sequence[str],
        file_nbytes: Sequence[int],
        windows: Sequence[Window],
        *,
        written: Callable[[int], None],
    ) -> None:
        self._attempt = attempt
        self._paths = paths
        self._file_nbytes = file_nbytes
        self._left = [0] * len(file_nbytes)
        for window in windows:
            self._left[window.file] += 1
        self._files: dict[int, DataFile] = {}
        self._open = asyncio.Lock()
        self._written = written

    async def write(
        self, item: StagedWindow, done: Callable[[StagedWindow, BaseException | None], None]
    ) -> None:
        """The window is in its file, and `done` was called; the file is sealed with its last one.

        Cancellation: waits for the write.
        """
        window = item.window
        try:
            file = await self._file(window.file)
            # Whole pages keep the write direct; `seal` cuts the file to its length.
            padded = -(-window.nbytes // PAGE_NBYTES) * PAGE_NBYTES
            await file.write(window.offset, item.slot.buffer[:padded])
        except BaseException as error:
            done(item, error)
            raise
        done(item, None)
        self._written(window.nbytes)
        self._left[window.file] -= 1
        if self._left[window.file] == 0:
            await self._files[window.file].seal(self._file_nbytes[window.file])

    async def _file(self, index: int) -> DataFile:
        async with self._open:
            if index not in self._files:
                self._files[index] = await self._attempt.create(
                    self._paths[index], nbytes=self._file_nbytes[index]
                )
        return self._files[index]


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

    async def write(
        self, file: int, offset: int, blocks: Sequence[bytes], crc: int, raw: StagedChunk
    ) -> None:
        """The chunk's blocks (its trailer last) are in their file; `crc` is that of its payload."""
        if offset == 0:
            await self.finish(file - 1)
            self._file = await self._attempt.create(
                self._path(file), nbytes=min(self._target, raw.nbytes)
            )
        assert self._file is not None
        for block in blocks:
            await self._file.write(offset, np.frombuffer(block, np.uint8))
            offset += len(block)
        index = file - self._first
        payload_nbytes = sum(map(len, blocks)) - TRAILER_NBYTES
        whole = combine(self.file_crcs[index], crc, payload_nbytes)
        self.file_crcs[index] = crc32c(blocks[-1], whole)
        self._written(raw.nbytes + TRAILER_NBYTES)

    async def finish(self, file: int | None = None) -> None:
        """The open file, if any, is sealed."""
        if self._file is not None:
            index = len(self.file_nbytes) - 1 if file is None else file - self._first
            open_file, self._file = self._file, None
            await open_file.seal(self.file_nbytes[index])
