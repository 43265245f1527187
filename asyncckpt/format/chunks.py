"""The chunk index: the location and CRC-32C of every chunk, one row per chunk.

Rows are in canonical order: arrays in the order of the commit record, the cells of each in C order.
A tied array, which shares the chunks of another, has no rows. The CRC of every chunk is stored
apart from the chunk, so that exchanged and stale chunks are detected too.

Layout, all little endian: magic ``ACKI`` and version `uint32`; row count `uint64`; then by column
data file `uint32`, offset `uint64`, length `uint64`, CRC `uint32`; then the CRC-32C `uint32` of all
bytes before it. The length includes the chunk's trailer of 4 bytes, as in the B+tree. The CRC is
that of the encoded payload, and equals the trailer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt, unsupported
from asyncckpt.format.zarr3 import CRC_NBYTES

MAGIC = b"ACKI"
VERSION = 1
ROW_NBYTES = 4 + 8 + 8 + 4
_HEAD = struct.Struct("<4sIQ")
_COLUMNS = ("<u4", "<u8", "<u8", "<u4")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkIndex:
    """One row per chunk.

    Attributes:
        file: index into the files of the commit record, `int64`.
        offset: start of the stored chunk in its file, `int64`.
        nbytes: length of the stored chunk with its 4-byte trailer, `int64`.
        crc32c: CRC-32C of the stored chunk without its trailer, `uint32`.
    """

    file: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    crc32c: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return self.file.size

    def validate(self, file_nbytes: Sequence[int], *, file: str) -> None:
        """Check that every row is a range inside its file, long enough for a trailer.

        `file_nbytes` are the sizes of the files of the commit record; `file` is named in errors.

        Raises:
            CorruptCheckpointError: a row is not; names the first one.
        """
        count = len(file_nbytes)
        inside = self.file < count
        sizes = np.array([*file_nbytes, 0], np.int64)[np.minimum(self.file, count)]
        # Decoded numbers are below 2^62, so that the sum does not overflow.
        good = inside & (self.nbytes >= CRC_NBYTES) & (self.offset + self.nbytes <= sizes)
        if good.all():
            return
        row = int(np.argmin(good))
        where = f"{self.offset[row]}+{self.nbytes[row]} of file {self.file[row]}"
        size = f"which has {sizes[row]} bytes" if inside[row] else f"but there are {count} files"
        raise corrupt("the chunk index", f"row {row} is {where}, {size}", file=file)


def index_nbytes(rows: int) -> int:
    """Return the size of an encoded index."""
    return _HEAD.size + rows * ROW_NBYTES + CRC_NBYTES


def encode_chunk_index(index: ChunkIndex) -> bytes:
    """Encode the index."""
    body = _HEAD.pack(MAGIC, VERSION, len(index))
    for name, kind in zip(index.__slots__, _COLUMNS, strict=True):
        body += getattr(index, name).astype(kind).tobytes()
    return body + crc32c(body).to_bytes(CRC_NBYTES, "little")


def decode_chunk_index(data: bytes, *, file: str) -> ChunkIndex:
    """Decode an index without validating its extents; `file` is named in errors.

    Raises:
        CorruptCheckpointError: the index is damaged.
        UnsupportedFormatError: it is intact, but of a newer version.
    """

    def fault(reason: str, offset: int = 0) -> CorruptCheckpointError:
        return corrupt("the chunk index", reason, file=file, offset=offset)

    if len(data) < index_nbytes(0):
        raise fault(f"{len(data)} bytes are fewer than the {index_nbytes(0)} of an empty index")
    magic, version, rows = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise fault(f"it starts with {magic.hex()} instead of {MAGIC.hex()}")
    stored = int.from_bytes(data[-CRC_NBYTES:], "little")
    crc = crc32c(memoryview(data)[:-CRC_NBYTES])
    if stored != crc:
        raise fault(
            f"its CRC-32C is {crc:08x}, the stored one {stored:08x}", len(data) - CRC_NBYTES
        )
    if version != VERSION:
        raise unsupported(
            f"the chunk index has version {version}, this release reads {VERSION}; restore with a "
            "newer release",
            file=file,
            expected=VERSION,
            found=version,
        )
    if len(data) != index_nbytes(rows):
        raise fault(f"{rows} rows take {index_nbytes(rows)} bytes, there are {len(data)}", 8)
    columns: list[npt.NDArray[np.int64]] = []
    offset = _HEAD.size
    for kind in _COLUMNS:
        column = np.frombuffer(data, kind, rows, offset)
        offset += column.nbytes
        if rows and int(column.max()) >= 1 << 62:
            raise fault("an offset or length passes 2^62")
        columns.append(column.astype(np.int64))
    file_index, starts, sizes, crcs = columns
    return ChunkIndex(file_index, starts, sizes, crcs.astype(np.uint32))
