"""Verification that every byte of a checkpoint is as it was saved."""

from __future__ import annotations

import contextlib
import posixpath
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncckpt.arguments import ProgressCallback
from asyncckpt.checkpoint.foreign.listing import concurrently
from asyncckpt.checkpoint.metadata import OpenCheckpoint, read_index
from asyncckpt.checkpoint.open import open_any
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UnsupportedFormatError,
)
from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.format.record_values import CommitRecord
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.planning.table import Column
from asyncckpt.ports import Bytes, CheckpointFiles
from asyncckpt.reports import Damage, Progress, VerifyReport
from asyncckpt.runtime import Runtime
from asyncckpt.verify.foreign import raise_unless_damage, verify_foreign
from asyncckpt.verify.tree_check import check_database

DAMAGES_MAX = 1000
"""Most damages listed."""


async def verify_checkpoint(
    runtime: Runtime, files: CheckpointFiles, step: int | None, progress: ProgressCallback | None
) -> VerifyReport:
    """Read every byte and check it against record, chunk index and B+tree.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: its record is damaged, so it is not a checkpoint.
        UnsupportedFormatError: it is of a newer version.
        StoreError: a file cannot be read now, which does not mean that its bytes are damaged.
    """
    begun = time.perf_counter()
    compute = runtime.engine.compute
    opened = await open_any(files, compute)
    if opened.record is None:
        return await verify_foreign(runtime, opened, step, progress, begun)
    return await _Verify(runtime, opened, opened.record, progress).run(step, begun)


@dataclass(eq=False, repr=False)
class _Verify:
    """The verification of an asyncckpt checkpoint."""

    runtime: Runtime
    opened: OpenCheckpoint
    record: CommitRecord
    progress: ProgressCallback | None

    def __post_init__(self) -> None:
        self._damages: list[Damage] = []
        self._read_nbytes = 0
        self._total_nbytes = sum(file.nbytes for file in self.record.files)
        self._kept: dict[str, bytearray] = {}
        self._sizes: dict[str, int] = {}
        none = np.empty(0, np.int64)
        self._index = ChunkIndex(none, none, none, np.empty(0, np.uint32))  # until it is read

    async def run(self, step: int | None, begun: float) -> VerifyReport:
        opened, record = self.opened, self.record
        try:
            opened.structure()
        except CorruptCheckpointError as error:
            self._damage(None, RECORD_NAME, None, str(error))
        index_file = record.files[record.chunk_index.file].path
        try:
            self._index = await read_index(opened.files, record, self.runtime.engine.compute)
        except (CorruptCheckpointError, UnsupportedFormatError, CheckpointNotFoundError) as error:
            self._damage(None, index_file, getattr(error, "offset", None), str(error))
        self._kept = {index_file: bytearray(), record.manifest_path: bytearray()}
        await self._files()
        if not self._damages:
            kept = {path: bytes(data) for path, data in self._kept.items()}
            for problem in await self.runtime.engine.compute.run(
                check_database, record, opened.first_rows, self._index, kept
            ):
                self._damage(None, index_file, None, problem)
        return VerifyReport(
            location=opened.location,
            step=step,
            damages=tuple(self._damages[:DAMAGES_MAX]),
            leaf_count=len(record.leaves.kind),
            read_nbytes=self._read_nbytes,
            total_s=time.perf_counter() - begun,
        )

    async def _files(self) -> None:
        files, index = self.record.files, self._index
        rows: list[list[int]] = [[] for _ in files]
        by_offset = np.lexsort((index.offset, index.file))
        for row, file in zip(by_offset.tolist(), index.file[by_offset].tolist(), strict=True):
            rows[file].append(row)
        for directory in {posixpath.dirname(file.path) for file in files}:
            # Reading the files reports what is wrong with their directory.
            with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
                for entry in await self.opened.files.entries(directory, max_entries=MAX_ENTRIES):
                    self._sizes[posixpath.join(directory, entry.name)] = entry.nbytes
        await concurrently(
            self.opened.files, lambda number: self._file(number, rows[number]), range(len(files))
        )
        order = {file.path: number for number, file in enumerate(files)}
        self._damages.sort(key=lambda damage: order.get(damage.file, -1))

    async def _file(self, number: int, rows: Sequence[int]) -> None:
        entry = self.record.files[number]
        pool = self.runtime.pool
        checker = _FileChecker(rows, self._index)
        offset = 0
        unread: list[tuple[int, int, str]] = []  # begin and end of a range, and the reason
        size = self._sizes.get(entry.path, entry.nbytes)
        copies = self.opened.files.capabilities.copied_nbytes(pool.slot_nbytes)
        copies = min(copies, pool.budget.capacity - pool.held_nbytes)
        slots = await pool.take(1, grow=False, extra=copies)
        try:
            while offset < entry.nbytes:
                # The chunks before the end of a truncated file may be intact.
                end = min(size, entry.nbytes) if offset < size else entry.nbytes
                nbytes = min(pool.slot_nbytes, end - offset)
                data = slots[0].buffer[:nbytes]
                try:
                    await self.opened.files.read_into(entry.path, offset, [data])
                except StoreError as error:
                    raise_unless_damage(error)
                    unread.append((offset, offset + nbytes, str(error)))
                    checker.skip(nbytes)
                else:
                    await self.runtime.engine.compute.run(checker.feed, data)
                    if entry.path in self._kept:
                        self._kept[entry.path] += data.tobytes()
                    self._read_nbytes += nbytes
                offset += nbytes
                if self.progress is not None:
                    self.progress(Progress("verify", self._read_nbytes, self._total_nbytes))
            if size > entry.nbytes:
                raise CorruptCheckpointError(
                    f"it is longer than the {entry.nbytes} bytes of the record"
                )
        except (CheckpointNotFoundError, CorruptCheckpointError) as error:
            unread.append((offset, entry.nbytes, str(error)))
        finally:
            pool.release(slots, sys.exception())
            pool.budget.release(copies)
        for row in checker.bad:
            if len(self._damages) > DAMAGES_MAX:
                break
            place = entry.path, int(self._index.offset[row])
            for path in self._leaves_of([row]):
                self._damage(path, *place, "the chunk's CRC-32C differs")
        starts = self._index.offset[rows]
        stops = starts + self._index.nbytes[rows]
        for begin, end, reason in unread:
            lost = np.asarray(rows)[(starts < end) & (stops > begin)]
            leaves: Sequence[str | None] = self._leaves_of(lost)
            for leaf in leaves or [None]:
                self._damage(leaf, entry.path, begin, reason)
        if checker.crc != entry.crc32c and not checker.bad and not unread:
            self._damage(
                None,
                entry.path,
                None,
                f"its CRC-32C is {checker.crc:08x}, the record says {entry.crc32c:08x}; no chunk "
                "of a leaf is damaged",
            )

    def _leaves_of(self, rows: Sequence[int] | Column) -> list[str]:
        """Return the paths of the leaves of these chunks, tied leaves included."""
        if not len(rows):
            return []
        paths, leaf, starts, stops = self._owners
        wanted = np.sort(np.asarray(rows))
        held = np.searchsorted(wanted, starts) < np.searchsorted(wanted, stops)
        return [paths[number] for number in np.unique(leaf[held]).tolist()]

    @cached_property
    def _owners(self) -> tuple[Sequence[str], Column, Column, Column]:
        """Paths of all leaves (none if the tree is damaged), and three facts of each piece.

        These are the number of its leaf, its first chunk, and one past its last chunk.
        """
        opened = self.opened
        try:
            paths = opened.structure().paths()
        except CorruptCheckpointError:
            paths = []
        leaf, first, count = [], [], []
        for number, pieces in enumerate(opened.leaf_pieces() if paths else ()):
            for piece in pieces:
                leaf.append(number)
                first.append(opened.first_rows[piece.array])
                count.append(opened.storage(piece.array).grid.chunk_count)
        starts = np.array(first, np.int64)
        return paths, np.array(leaf, np.int64), starts, starts + np.array(count, np.int64)

    def _damage(self, leaf: str | None, file: str, offset: int | None, reason: str) -> None:
        if len(self._damages) <= DAMAGES_MAX:
            self._damages.append(Damage(leaf, file, offset, reason))


class _FileChecker:
    """Checksums of one file and of its chunks, fed from start to end.

    Attributes:
        crc: checksum of all data so far.
        bad: rows of damaged chunks.
    """

    # Data may end within a chunk or its trailer: `_crc` is the checksum of the current chunk up to
    # `_position`, and `_trailer` holds the bytes of its trailer so far.

    def __init__(self, rows: Sequence[int], index: ChunkIndex) -> None:
        self._rows = rows
        self._index = index
        self._next = 0
        self._crc = 0
        self._position = 0
        self._trailer = b""
        self.crc = 0
        self.bad: list[int] = []

    def skip(self, nbytes: int) -> None:
        """Pass over the next bytes, and over the chunks that they are a part of."""
        self._position += nbytes
        self._crc, self._trailer = 0, b""
        while self._next < len(self._rows):
            if self._index.offset[self._rows[self._next]] >= self._position:
                break
            self._next += 1

    def feed(self, data: Bytes) -> None:
        """Check the next bytes of the file. Blocking."""
        self.crc = crc32c(data, self.crc)
        view = memoryview(data)
        begin, end = self._position, self._position + len(view)
        while self._next < len(self._rows):
            row = self._rows[self._next]
            start = int(self._index.offset[row])
            stop = start + int(self._index.nbytes[row])
            payload_stop = stop - CRC_NBYTES
            if start >= end:
                break
            low, high = max(start, begin), min(payload_stop, end)
            if low < high:
                self._crc = crc32c(view[low - begin : high - begin], self._crc)
            low, high = max(payload_stop, begin), min(stop, end)
            if low < high:
                self._trailer += bytes(view[low - begin : high - begin])
            if stop > end:
                break
            expected = int(self._index.crc32c[row])
            if self._crc != expected or int.from_bytes(self._trailer, "little") != expected:
                self.bad.append(row)
            self._next, self._crc, self._trailer = self._next + 1, 0, b""
        self._position = end
