"""A checkpoint opened for reading: its record, checked, and its chunk index."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.format.chunks import ChunkIndex, decode_chunk_index
from asyncckpt.format.crc import crc32c
from asyncckpt.format.record import RECORD_NAME, CommitRecord, decode_record
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import MAX_RECORD_NBYTES
from asyncckpt.planning.restore import StoredArrays
from asyncckpt.ports import CheckpointFiles
from asyncckpt.spec import ArraySpec, ChunkGrid

RECORD = RECORD_NAME

RECORD_TAIL_NBYTES = 12
"""The checksum that ends a record: a quote, 8 digits, a quote, a brace and a line feed."""

logger = logging.getLogger("asyncckpt")


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """One checkpoint's metadata, decoded and checked.

    Attributes:
        files: access to its files.
        record: its commit record.
        specs: shape and stored dtype of every array, by array index.
        grids: chunk grid of every array.
        first_rows: first chunk row of every array; tied arrays share them.
        row_count: chunk rows in all.
    """

    files: CheckpointFiles
    record: CommitRecord
    specs: tuple[ArraySpec, ...]
    grids: tuple[ChunkGrid, ...]
    first_rows: tuple[int, ...]
    row_count: int

    @property
    def location(self) -> str:
        """Path or URL of the checkpoint."""
        return self.files.location

    def stored(self) -> StoredArrays:
        """What the restore planner needs to know of the arrays."""
        record = self.record
        return StoredArrays(
            [
                (stored.grid, stored.spec.itemsize, stored.zstd_level is not None)
                for stored in record.specs
            ],
            np.array(record.arrays.spec, np.int64),
            np.array(self.first_rows, np.int64),
        )


def is_record(data: bytes) -> bool:
    """Whether these bytes are a commit record whose checksum holds; they are not decoded."""
    tail = data[-RECORD_TAIL_NBYTES:]
    if len(tail) < RECORD_TAIL_NBYTES or not data.startswith(b'{"format":"asyncckpt",'):
        return False
    found = crc32c(memoryview(data)[:-RECORD_TAIL_NBYTES])
    return tail == b'"%08x"}\n' % found


async def open_checkpoint(files: CheckpointFiles) -> OpenCheckpoint:
    """The checkpoint's record has been read and is valid.

    Raises:
        CheckpointNotFoundError: there is no record.
        CorruptCheckpointError: it is damaged.
        UnsupportedFormatError: it is of a newer version.
    """
    data = await files.read(RECORD, max_nbytes=MAX_RECORD_NBYTES)
    record = decode_record(data, location=files.location)
    return resolve(files, record)


def resolve(files: CheckpointFiles, record: CommitRecord) -> OpenCheckpoint:
    """The record's tables, joined."""
    specs = []
    grids = []
    for stored in record.specs:
        specs.append(stored.spec)
        grids.append(stored.grid)
    counts = [grid.chunk_count for grid in grids]
    first_rows: list[int] = []
    rows = 0
    tied = record.arrays.tied
    for index, spec in enumerate(record.arrays.spec):
        if index in tied:
            first_rows.append(first_rows[tied[index]])
        else:
            first_rows.append(rows)
            rows += counts[spec]
    return OpenCheckpoint(
        files,
        record,
        tuple(specs[i] for i in record.arrays.spec),
        tuple(grids[i] for i in record.arrays.spec),
        tuple(first_rows),
        rows,
    )


async def read_index(opened: OpenCheckpoint) -> ChunkIndex:
    """Where every chunk stands and what its checksum is.

    Raises:
        CorruptCheckpointError: the index is damaged or does not fit the record.
    """
    record = opened.record
    place = record.chunk_index
    path = record.files[place.file].path
    data = np.empty(place.nbytes, np.uint8)
    try:
        await opened.files.read_into(path, place.offset, [data])
    except CheckpointNotFoundError as error:
        raise missing(opened, path) from error
    # Without its own trailing CRC: over both, the CRC would be one constant for every index.
    found = crc32c(data[:-CRC_NBYTES])
    if found != place.crc32c:
        raise CorruptCheckpointError(
            f"{opened.location}: the chunk index in {path} is damaged: its CRC-32C is "
            f"{found:08x}, the record says {place.crc32c:08x}; restore an older step",
            file=path,
            offset=place.offset,
            location=opened.location,
            expected=place.crc32c,
            found=found,
        )
    try:
        index = decode_chunk_index(data.tobytes(), file=path)
        record.validate_index(index)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{opened.location}: {error}",
            file=path,
            offset=place.offset,
            location=opened.location,
        ) from None
    return index


def missing(opened: OpenCheckpoint, path: str) -> CorruptCheckpointError:
    """The error for a file that the record lists and the store lacks."""
    return CorruptCheckpointError(
        f"{opened.location}: {path} is missing, the commit record lists it; restore an older step",
        file=path,
        location=opened.location,
        expected="a file",
        found="nothing",
    )
