"""Looking at a checkpoint: what it holds, and whether every byte of it is as it was saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from asyncckpt.checkpointer.match import saved_arrays
from asyncckpt.checkpointer.restores import read_structure
from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UnsupportedFormatError,
)
from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.record import decode_scalar
from asyncckpt.ports import Bytes, CheckpointFiles
from asyncckpt.reports import (
    CheckpointInfo,
    Damage,
    FileInfo,
    LeafInfo,
    Progress,
    VerifyReport,
)
from asyncckpt.stages.opened import RECORD, OpenCheckpoint, open_checkpoint, read_index
from asyncckpt.stages.serialize import TRAILER_NBYTES
from asyncckpt.stages.tree_check import check_database
from asyncckpt.tree import unflatten

DAMAGES_MAX = 1000
"""Damages listed; a checkpoint with more is lost anyway."""


async def info_of(opened: OpenCheckpoint, step: int | None) -> CheckpointInfo:
    """What a checkpoint holds."""
    record = opened.record
    structure = read_structure(opened)
    paths = structure.paths()
    arrays = saved_arrays(opened, paths)
    index = await read_index(opened) if record.arrays.name else None
    leaves: list[LeafInfo] = []
    first: dict[int, str] = {}
    for leaf, path in enumerate(paths):
        kind, array = record.leaves.kind[leaf], arrays[leaf]
        if array < 0:
            value = decode_scalar(kind, record.leaves.value[leaf])
            leaves.append(LeafInfo(path, kind, value=value, location=opened.location))
            continue
        tied_to = first.get(record.arrays.tied.get(array, -1))
        first[array] = path
        leaves.append(_array_info(opened, index, path, kind, array, tied_to))
    return CheckpointInfo(
        location=opened.location,
        step=step,
        save_id=record.save_id,
        created_ns=record.created_ns,
        library=record.library,
        leaves=tuple(leaves),
        files=tuple(FileInfo(file.path, file.nbytes, file.crc32c) for file in record.files),
        metadata=record.metadata,
        metrics=record.metrics,
        tree=unflatten(structure, leaves),
    )


def _array_info(
    opened: OpenCheckpoint,
    index: ChunkIndex | None,
    path: str,
    kind: str,
    array: int,
    tied_to: str | None,
) -> LeafInfo:
    record = opened.record
    spec, grid = opened.specs[array], opened.grids[array]
    start = opened.first_rows[array]
    count = grid.chunk_count
    stored = 0 if index is None else int(index.nbytes[start : start + count].sum())
    level = record.specs[record.arrays.spec[array]].zstd_level
    return LeafInfo(
        path=path,
        kind="array",
        framework=kind,
        shape=spec.shape,
        dtype=spec.dtype,
        chunk_shape=grid.chunk_shape,
        chunk_count=count,
        nbytes=spec.nbytes,
        stored_nbytes=stored,
        compression=None if level is None else "zstd",
        array=record.arrays.name[array],
        tied_to=tied_to,
        location=f"{opened.location}/{record.database}",
    )


async def verify_checkpoint(
    runtime: Runtime,
    files: CheckpointFiles,
    step: int | None,
    progress: Callable[[Progress], None] | None,
) -> VerifyReport:
    """Every byte was read and checked against record, chunk index and B+tree.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: its record is damaged, so that it is none.
        UnsupportedFormatError: it is of a newer version.
    """
    begun = time.perf_counter()
    opened = await open_checkpoint(files)
    return await _Verify(runtime, opened, progress).run(step, begun)


class _Verify:
    def __init__(
        self,
        runtime: Runtime,
        opened: OpenCheckpoint,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._runtime = runtime
        self._opened = opened
        self._progress = progress
        self._damages: list[Damage] = []
        self._read_nbytes = 0
        self._total_nbytes = sum(file.nbytes for file in opened.record.files)
        self._kept: dict[int, bytearray] = {}

    async def run(self, step: int | None, begun: float) -> VerifyReport:
        opened = self._opened
        record = opened.record
        leaf_count = len(record.leaves.kind)
        try:
            read_structure(opened)
        except CorruptCheckpointError as error:
            self._damage(None, RECORD, None, str(error))
        index: ChunkIndex | None = None
        index_file = record.files[record.chunk_index.file].path
        try:
            index = await read_index(opened)
        except (CorruptCheckpointError, UnsupportedFormatError, CheckpointNotFoundError) as error:
            self._damage(None, index_file, getattr(error, "offset", None), str(error))
        rows = self._rows_by_file(index)
        self._kept[record.chunk_index.file] = bytearray()
        for number, file in enumerate(record.files):
            if file.path == f"{record.database}/manifest.ocdbt":
                self._kept[number] = bytearray()
        for number in range(len(record.files)):
            await self._file(number, rows.get(number, []), index)
        if index is not None and not self._damages:
            for problem in await self._runtime.engine.compute.run(
                check_database, opened, index, {n: bytes(b) for n, b in self._kept.items()}
            ):
                self._damage(None, index_file, None, problem)
        return VerifyReport(
            location=opened.location,
            step=step,
            damages=tuple(self._damages[:DAMAGES_MAX]),
            leaf_count=leaf_count,
            read_nbytes=self._read_nbytes,
            total_s=time.perf_counter() - begun,
        )

    def _rows_by_file(self, index: ChunkIndex | None) -> dict[int, list[int]]:
        if index is None:
            return {}
        order = np.lexsort((index.offset, index.file))
        result: dict[int, list[int]] = {}
        for row in order.tolist():
            result.setdefault(int(index.file[row]), []).append(row)
        return result

    async def _file(self, number: int, rows: Sequence[int], index: ChunkIndex | None) -> None:
        entry = self._opened.record.files[number]
        pool = self._runtime.pool
        checker = _FileChecker(rows, index)
        offset = 0
        slots = await pool.take(1, grow=False)
        try:
            while offset < entry.nbytes:
                nbytes = min(pool.slot_nbytes, entry.nbytes - offset)
                data = slots[0].buffer[:nbytes]
                await self._opened.files.read_into(entry.path, offset, [data], direct=True)
                await self._runtime.engine.compute.run(checker.feed, data)
                if number in self._kept:
                    self._kept[number] += data.tobytes()
                offset += nbytes
                self._read_nbytes += nbytes
                if self._progress is not None:
                    self._progress(Progress("verify", self._read_nbytes, self._total_nbytes))
            await self._end_of(entry.path, entry.nbytes)
        except (CheckpointNotFoundError, CorruptCheckpointError, StoreError) as error:
            self._lost(entry.path, offset, rows, index, error)
            return
        finally:
            pool.give(slots)
        for row in checker.bad:
            for leaf in self._leaves_of([row]):
                assert index is not None
                self._damage(
                    leaf, entry.path, int(index.offset[row]), "the chunk's CRC-32C differs"
                )
        if checker.crc != entry.crc32c and not checker.bad:
            self._damage(
                None,
                entry.path,
                None,
                f"its CRC-32C is {checker.crc:08x}, the record says {entry.crc32c:08x}; no chunk "
                "of a leaf is concerned",
            )

    async def _end_of(self, path: str, nbytes: int) -> None:
        """Nothing follows the last byte that the record lists."""
        extra = np.empty(1, np.uint8)
        try:
            await self._opened.files.read_into(path, nbytes, [extra])
        except CorruptCheckpointError:
            return
        raise CorruptCheckpointError(f"it is longer than the {nbytes} bytes of the record")

    def _lost(
        self,
        path: str,
        offset: int,
        rows: Sequence[int],
        index: ChunkIndex | None,
        error: Exception,
    ) -> None:
        leaves: Sequence[str | None] = self._leaves_of(
            [] if index is None else [r for r in rows if index.offset[r] + index.nbytes[r] > offset]
        )
        for leaf in leaves or [None]:
            self._damage(leaf, path, offset, str(error))

    def _leaves_of(self, rows: Sequence[int]) -> list[str]:
        """Paths of the leaves that these chunks belong to, tied ones included."""
        opened = self._opened
        if not rows:
            return []
        try:
            paths = read_structure(opened).paths()
        except CorruptCheckpointError:
            return []
        arrays = saved_arrays(opened, paths)
        wanted = np.sort(np.asarray(rows))
        found = []
        for leaf, array in enumerate(arrays):
            if array < 0:
                continue
            start = opened.first_rows[array]
            stop = start + opened.grids[array].chunk_count
            if np.searchsorted(wanted, start) < np.searchsorted(wanted, stop):
                found.append(paths[leaf])
        return found

    def _damage(self, leaf: str | None, file: str, offset: int | None, reason: str) -> None:
        if len(self._damages) <= DAMAGES_MAX:
            self._damages.append(Damage(leaf, file, offset, reason))


class _FileChecker:
    """Checksums of one file and of the chunks in it, fed from its start to its end."""

    def __init__(self, rows: Sequence[int], index: ChunkIndex | None) -> None:
        self._rows = list(rows)
        self._index = index
        self._next = 0
        self._crc = 0
        self._position = 0
        self._trailer = b""
        self.crc = 0
        self.bad: list[int] = []

    def feed(self, data: Bytes) -> None:
        """The next bytes of the file. Blocking."""
        self.crc = crc32c(data, self.crc)
        view = memoryview(data)
        begin, end = self._position, self._position + len(view)
        while self._next < len(self._rows) and self._index is not None:
            row = self._rows[self._next]
            start = int(self._index.offset[row])
            stop = start + int(self._index.nbytes[row])
            payload_stop = stop - TRAILER_NBYTES
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
