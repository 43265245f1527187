"""Decode: stored chunks to elements of a target, checked before anybody sees them.

What touches the bytes of chunks runs in worker threads.
"""

# Rule 1: a checksum that fails ends the restore; values are handed over only after all have passed.
# Rule 2: nothing allocates by what a chunk claims; sizes come from the record's shapes.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import AsyncCheckpointError, CorruptCheckpointError
from asyncckpt.format.codecs import ChunkError, Codec
from asyncckpt.format.crc import crc32c
from asyncckpt.planning.restore import Part, ReadBatch, RestorePlan, intersection
from asyncckpt.ports import Bytes
from asyncckpt.spec import DTYPES, Box, ChunkGrid
from asyncckpt.stages.opened import Extents, OpenCheckpoint
from asyncckpt.stages.payload import scatter
from asyncckpt.stages.serialize import TRAILER_NBYTES

TAIL_NBYTES = 1 << 20
"""Longest padding that is read along behind a payload that goes straight into its target."""

GIL_COPY_NBYTES = 64 << 10
"""Copies up to this size, a few microseconds, are made without letting go of the GIL."""


def trailer_matches(trailer: Bytes | memoryview, crc: int) -> bool:
    """Whether the four bytes behind a payload are its checksum."""
    return int.from_bytes(bytes(trailer[:TRAILER_NBYTES]), "little") == crc


def flat_target(array: npt.NDArray[Any]) -> Bytes | None:
    """The memory of a C-contiguous writable array as bytes, or None."""
    if not array.flags.c_contiguous or not array.flags.writeable:
        return None
    return array.reshape(-1).view(np.uint8)


def is_direct(batch: ReadBatch) -> bool:
    """Whether a batch is one chunk that goes straight into its target."""
    part = batch.parts[0]
    if len(batch.parts) > 1 or part.direct < 0:
        return False
    return batch.nbytes - part.nbytes <= TAIL_NBYTES


@dataclass(slots=True, eq=False)
class Destination:
    """Host memory for one wanted box of one array.

    Attributes:
        path: path of the leaf, for errors.
        array: index of the stored array.
        box: the wanted part; None for all of it.
        values: memory of the box's shape, in the stored dtype; None to read and check only.
        flat: the same memory as one run of bytes, or None.
    """

    path: str
    array: int
    box: Box | None
    values: npt.NDArray[Any] | None
    flat: Bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadTables:
    """What is looked up per chunk or kind of array; one serves all reads of an open checkpoint.

    Attributes:
        opened: the checkpoint.
        extents: where its chunks stand.
        offset: `extents.offset`, as Python ints.
        nbytes: `extents.nbytes`, likewise.
        crc: `extents.crc32c`, likewise, or None.
        grids: chunk grid per storage.
        codecs: codec per storage.
        any_encoded: whether any chunk must be decoded.
    """

    opened: OpenCheckpoint
    extents: Extents
    offset: list[int]
    nbytes: list[int]
    crc: list[int] | None
    grids: list[ChunkGrid]
    codecs: list[Codec]
    any_encoded: bool

    @classmethod
    def of(cls, opened: OpenCheckpoint, extents: Extents) -> ReadTables:
        """The tables of an open checkpoint."""
        codecs = [storage.codec for storage in opened.storages]
        return cls(
            opened=opened,
            extents=extents,
            offset=extents.offset.tolist(),
            nbytes=extents.nbytes.tolist(),
            crc=None if extents.crc32c is None else extents.crc32c.tolist(),
            grids=[storage.grid for storage in opened.storages],
            codecs=codecs,
            any_encoded=any(codec.decode is not None for codec in codecs),
        )


class Decode:
    """The decode stage of one restore.

    Args:
        tables: of the checkpoint.
        plan: of the restore.
        destinations: by number of the request in the plan.
    """

    def __init__(
        self, tables: ReadTables, plan: RestorePlan, destinations: Sequence[Destination]
    ) -> None:
        self._any_encoded = tables.any_encoded
        self._opened = tables.opened
        self._extents = tables.extents
        self._offset = tables.offset
        self._nbytes = tables.nbytes
        self._crc = tables.crc
        self._grids = tables.grids
        self._codecs = tables.codecs
        self._plan = plan
        self._destinations = destinations

    def codec(self, part: Part) -> Codec:
        """How the chunk of a part is stored."""
        return self._codecs[self._opened.arrays.spec[self._destinations[part.request].array]]

    def encoded_parts(self, batch: ReadBatch) -> list[Part]:
        """The parts of a batch whose chunks must be decoded."""
        if not self._any_encoded:
            return []
        return [part for part in batch.parts if self.codec(part).decode is not None]

    def payload_nbytes(self, part: Part) -> int:
        """Bytes of the elements of its chunk."""
        return self._opened.storage(self._destinations[part.request].array).chunk_nbytes

    def without_extent(self) -> None:
        """Chunks that stand in the metadata, and those that were never stored."""
        values = self._extents.values
        inline = self._plan.inline
        for part in inline:
            data = values.get(part.row)
            if data is None:
                self._fill(part)
                continue
            batch = ReadBatch(-1, 0, len(data), inline)
            self._scatter(part, self._payload(batch, part, np.frombuffer(data, np.uint8)), 0)

    def _fill(self, part: Part) -> None:
        destination = self._destinations[part.request]
        if destination.values is None:
            return
        storage = self._opened.storage(destination.array)
        element = np.frombuffer(storage.fill or bytes(storage.spec.itemsize), np.uint8)
        dtype = DTYPES[storage.spec.dtype]
        _, within = intersection(
            storage.grid,
            part.row - self._opened.first_rows[destination.array],
            destination.box or Box.whole(storage.spec.shape),
        )
        destination.values[within] = element.view(dtype)[0]

    def direct(self, batches: Sequence[ReadBatch], buffers: Sequence[Bytes]) -> None:
        """What one call has read is right: of every batch its bytes, and those behind them.

        The bytes of direct batches are in their targets already.

        Raises:
            CorruptCheckpointError: names leaf, file and offset; so do all others here.
        """
        for batch, data, rest in zip(batches, buffers[::2], buffers[1::2], strict=True):
            if not is_direct(batch):
                self.small(batch, data)
                continue
            part = batch.parts[0]
            tail = rest[: batch.nbytes - data.nbytes]
            trailer = tail[tail.nbytes - self.codec(part).trailer_nbytes :]
            if self._crc is None and not trailer.nbytes:
                continue
            crc = crc32c(tail[: tail.nbytes - trailer.nbytes], crc32c(data))
            self.expect(batch, part.row, crc, trailer)

    def piece(self, batch: ReadBatch, data: Bytes, start: int, crc: int) -> int:
        """The piece of a large chunk that begins at `start` is where it belongs, unchecked.

        Returns the checksum of everything up to its end; `crc` is that up to its begin.
        """
        for part in batch.parts:
            self._scatter(part, data, start)
        if self._crc is None and not self.codec(batch.parts[0]).crc32c:
            return 0
        return crc32c(data, crc)

    def encoded(self, batch: ReadBatch, stored: list[Bytes]) -> None:
        """A chunk that lies in several buffers was checked, decoded, and is where it belongs."""
        part = batch.parts[0]
        codec = self.codec(part)
        parts = list(stored)
        if len(parts[-1]) < codec.trailer_nbytes:
            parts = [np.concatenate(parts)]
        end = parts[-1].nbytes - codec.trailer_nbytes
        trailer, parts[-1] = parts[-1][end:], parts[-1][:end]
        if self._crc is not None or codec.crc32c:
            crc = 0
            for stored_part in parts:
                crc = crc32c(stored_part, crc)
            self.expect(batch, part.row, crc, trailer)
        assert codec.decode is not None
        try:
            payload = codec.decode(parts, self.payload_nbytes(part))
        except ChunkError as error:
            raise self._damaged(batch, part.row, str(error)) from None
        for each in batch.parts:
            self._scatter(each, payload, 0)

    def small(self, batch: ReadBatch, data: Bytes) -> None:
        """The chunks of a batch, which are all in `data`, were checked and are in their targets."""
        # The loop that decides what a small leaf costs: no object per part, few lookups.
        if self._crc is None:
            self._small_foreign(batch, data)
            return
        crcs, destinations, counts = self._crc, self._destinations, self._plan.counts
        rows, requests = batch.parts.column(0), batch.parts.column(1)
        starts, stops = self._check_trailers(batch, data, rows)
        view = memoryview(data)
        crc, start, stop = 0, 0, 0
        decoded: Bytes | None = None
        last = -1
        for number, (row, request) in enumerate(zip(rows, requests, strict=True)):
            destination = destinations[request]
            if row != last:
                last, start, stop = row, starts[number], stops[number]
                crc = crc32c(view[start:stop])
                if crc != crcs[row]:
                    self.expect(batch, row, crc, data[stop : stop + TRAILER_NBYTES])
                decoded = None
                if self._any_encoded:
                    decoded = self._decoded(batch, batch.parts[number], data[start:stop])
            # Where one chunk is all that is wanted; others may have as many bytes by chance.
            flat = destination.flat if counts[request] == 1 else None
            if flat is not None and decoded is None and len(flat) == stop - start:
                # Between memoryviews: NumPy lets go of the GIL for each of a thousand small
                # copies, and waits for it.
                if stop - start <= GIL_COPY_NBYTES:
                    memoryview(flat)[:] = view[start:stop]
                else:
                    flat[:] = data[start:stop]
            elif flat is not None and decoded is not None and len(flat) == len(decoded):
                flat[:] = decoded
            else:
                payload = data[start:stop] if decoded is None else decoded
                self._scatter(batch.parts[number], payload, 0)

    def _check_trailers(
        self, batch: ReadBatch, data: Bytes, rows: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Where the payload of each row starts and stops; what trails it is what the index says."""
        extents, numbers = self._extents, np.array(rows, np.int64)
        assert extents.crc32c is not None
        starts = extents.offset[numbers] - batch.offset
        stops = starts + extents.nbytes[numbers] - TRAILER_NBYTES
        trailers = data[stops[:, None] + np.arange(TRAILER_NBYTES)].view("<u4").reshape(-1)
        bad = np.flatnonzero(trailers != extents.crc32c[numbers])
        if len(bad):
            row, start, stop = rows[bad[0]], int(starts[bad[0]]), int(stops[bad[0]])
            crc = crc32c(data[start:stop])
            self.expect(batch, row, crc, data[stop : stop + TRAILER_NBYTES])
        return starts.tolist(), stops.tolist()

    def _decoded(self, batch: ReadBatch, part: Part, stored: Bytes) -> Bytes | None:
        """The elements of a checked chunk that is encoded; None of others."""
        decode = self.codec(part).decode
        if decode is None:
            return None
        try:
            return decode([stored], self.payload_nbytes(part))
        except ChunkError as error:
            raise self._damaged(batch, part.row, str(error)) from None

    def _small_foreign(self, batch: ReadBatch, data: Bytes) -> None:
        payload: Bytes | None = None
        last = -1
        for part in batch.parts:
            if part.row != last:
                start = self._offset[part.row] - batch.offset
                payload = self._payload(batch, part, data[start : start + self._nbytes[part.row]])
                last = part.row
            assert payload is not None
            self._scatter(part, payload, 0)

    def _payload(self, batch: ReadBatch, part: Part, stored: Bytes) -> Bytes:
        """The checked elements of a stored chunk of which no checksum is kept elsewhere."""
        codec = self.codec(part)
        end = stored.nbytes - codec.trailer_nbytes
        if end < 0:
            raise self._damaged(batch, part.row, f"{stored.nbytes} bytes hold no checksum")
        data = stored[:end]
        if codec.crc32c and not trailer_matches(stored[end:], crc32c(data)):
            raise self._damaged(batch, part.row, "the checksum behind the chunk differs")
        if codec.decode is None:
            self.check_length(batch, part, end)
            return data
        try:
            return codec.decode([data], self.payload_nbytes(part))
        except ChunkError as error:
            raise self._damaged(batch, part.row, str(error)) from None

    def check_length(self, batch: ReadBatch, part: Part, nbytes: int) -> None:
        """A chunk that is not encoded is as long as its elements."""
        expected = self.payload_nbytes(part)
        if nbytes != expected:
            reason = f"it has {nbytes} bytes, the array needs {expected}"
            raise self._damaged(batch, part.row, reason)

    def _scatter(self, part: Part, payload: Bytes, start: int) -> None:
        destination = self._destinations[part.request]
        if destination.values is None:
            return
        opened = self._opened
        array = destination.array
        kind = opened.arrays.spec[array]
        grid = self._grids[kind]
        cell = np.unravel_index(part.row - opened.first_rows[array], grid.counts or (1,))
        scatter(
            payload,
            opened.storages[kind].spec,
            grid,
            tuple(int(i) for i in cell) if grid.shape else (),
            start,
            destination.values,
            destination.box or Box.whole(grid.shape),
        )

    def expect(self, batch: ReadBatch, row: int, crc: int, trailer: Bytes) -> None:
        """The checksum of a chunk's bytes is what the index says, and what stands behind them."""
        if self._crc is not None and crc != self._crc[row]:
            raise self._damaged(
                batch, row, f"CRC-32C is {crc:08x}, the chunk index says {self._crc[row]:08x}"
            )
        if trailer.nbytes and not trailer_matches(trailer, crc):
            raise self._damaged(batch, row, "the checksum behind the chunk differs from its bytes")

    def _damaged(self, batch: ReadBatch, row: int, reason: str) -> AsyncCheckpointError:
        opened = self._opened
        path = next(self._destinations[p.request].path for p in batch.parts if p.row == row)
        if batch.file < 0:
            return CorruptCheckpointError(
                f"{path}: {opened.location}: a chunk in the metadata is damaged: {reason}; "
                "use another checkpoint, or leave this path out with include=",
                path=path,
                stage="decode",
                location=opened.location,
            )
        file = opened.stored_files[batch.file].path
        offset = self._offset[row]
        return CorruptCheckpointError(
            f"{path}: {opened.location}: the chunk at byte {offset} of {file} is damaged: "
            f"{reason}; restore an older step, or leave this path out with include=",
            path=path,
            stage="decode",
            location=opened.location,
            file=file,
            offset=offset,
        )
