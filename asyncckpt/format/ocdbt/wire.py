"""Varints, columns of varints, and the frame around manifests and nodes.

A frame is: magic `uint32` big endian; length of the whole frame `uint64` little endian; format
version varint 0; compression varint (0 none, 1 zstd); body; CRC-32C `uint32` little endian of all
bytes before it.
"""

# Rule 1: every count from a file is compared with the remaining bytes before any allocation.

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.codecs import decompress_within
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt, unsupported

if TYPE_CHECKING:
    from typing_extensions import Buffer

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE
FRAME_HEADER = 4 + 8 + 1 + 1
"""Bytes before the body of an uncompressed frame."""
FRAME_TRAILER = 4
"""Bytes after the body."""
FRAME_OVERHEAD = FRAME_HEADER + FRAME_TRAILER

MAX_BODY_NBYTES = 1 << 28
"""Largest decompressed body; Orbax configures nodes of up to 100 MB."""

_VARINT_NBYTES = 10  # 64 bits in groups of 7
INT64_MAX = (1 << 63) - 1


def encode_varint(value: int) -> bytes:
    """Return the unsigned LEB128 of one integer below 2^64."""
    out = bytearray()
    while value >= 128:
        out.append((value & 127) | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_sizes(values: I64) -> I64:
    """Return the size of the varint of each (non-negative) value."""
    sizes = np.ones(values.shape, np.int64)
    largest = int(values.max()) if values.size else 0
    bound = 1 << 7
    while bound <= largest:
        sizes += values >= bound
        bound <<= 7
    return sizes


def encode_varints(values: I64) -> bytes:
    """Return the unsigned LEB128 of every (non-negative) value, concatenated."""
    if not values.size:
        return b""
    if int(values.max()) < 128:
        return values.astype(np.uint8).tobytes()
    sizes = varint_sizes(values)
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]), np.uint8)
    starts = ends - sizes
    rest = values
    while starts.size:
        last = sizes == 1
        out[starts] = (rest & 127) | np.where(last, 0, 128)
        more = ~last
        rest, starts, sizes = rest[more] >> 7, starts[more] + 1, sizes[more] - 1
    return out.tobytes()


class Reader:
    """Cursor over the body of a frame; every failure is a `CorruptCheckpointError`.

    `offset` is the start of the body in `file`. Without `moves`, the body was decompressed, and
    `offset` is the start of its frame.
    """

    __slots__ = ("_data", "_file", "_moves", "_offset", "_what", "pos")

    def __init__(self, data: bytes, *, what: str, file: str, offset: int, moves: bool) -> None:
        self._data = data
        self._what = what
        self._file = file
        self._offset = offset
        self._moves = moves
        self.pos = 0

    @property
    def remaining(self) -> int:
        """Number of unread bytes."""
        return len(self._data) - self.pos

    def fault(self, reason: str) -> CorruptCheckpointError:
        """Return the error for damage at the cursor."""
        offset = self._offset + self.pos if self._moves else self._offset
        return corrupt(self._what, reason, file=self._file, offset=offset)

    def need(self, count: int, what: str, *, nbytes_each: int = 1) -> None:
        """Raise unless the remaining bytes suffice for this many items."""
        if count * nbytes_each > self.remaining:
            raise self.fault(
                f"{count} {what} need more than the {self.remaining} bytes that remain"
            )

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes."""
        self.need(count, "bytes")
        start = self.pos
        self.pos += count
        return self._data[start : self.pos]

    def uint8(self) -> int:
        """Read one byte."""
        return self.take(1)[0]

    def varint(self, *, below: int = 1 << 64) -> int:
        """Read one varint below `below`."""
        value = 0
        for shift in range(0, 7 * _VARINT_NBYTES, 7):
            byte = self.uint8()
            value |= (byte & 127) << shift
            if byte < 128:
                if value >= below:
                    raise self.fault(f"the number {value} is not below {below}")
                return value
        raise self.fault("a varint is longer than 64 bits")

    def count(self, what: str, *, nbytes_each: int) -> int:
        """Read a count of items, each of which takes at least `nbytes_each` remaining bytes."""
        count = self.varint()
        self.need(count, what, nbytes_each=nbytes_each)
        return count

    def varints(self, count: int, *, below: int = INT64_MAX) -> I64:
        """Read the next `count` varints, each below `below`."""
        self.need(count, "numbers")
        if not count:
            return np.empty(0, np.int64)
        window = np.frombuffer(
            self._data, np.uint8, min(self.remaining, count * _VARINT_NBYTES), self.pos
        )
        head = window[:count]
        if int(head.max()) < 128:
            values = head.astype(np.uint64)
            used = count
        else:
            ends = np.flatnonzero(window < 128)[:count]
            if ends.size < count:
                raise self.fault(f"the last of {count} numbers is cut off or longer than 64 bits")
            used = int(ends[-1]) + 1
            values = self._long_varints(window, ends)
        if int(values.max()) >= below:
            raise self.fault(f"the number {int(values.max())} is not below {below}")
        self.pos += used
        return values.astype(np.int64)

    def _long_varints(self, window: npt.NDArray[np.uint8], ends: npt.NDArray[np.intp]) -> U64:
        starts = np.empty_like(ends)
        starts[0] = 0
        starts[1:] = ends[:-1] + 1
        sizes = ends - starts + 1
        longest = int(sizes.max())
        if longest > _VARINT_NBYTES or (
            longest == _VARINT_NBYTES and int(window[ends[sizes == _VARINT_NBYTES]].max()) > 1
        ):
            raise self.fault("a varint is longer than 64 bits")
        values = (window[starts] & 127).astype(np.uint64)
        rows = np.flatnonzero(sizes > 1)
        for place in range(1, longest):
            rows = rows[sizes[rows] > place]
            byte = (window[starts[rows] + place] & 127).astype(np.uint64)
            values[rows] |= byte << np.uint64(7 * place)
        return values

    def end(self) -> None:
        """Raise unless all bytes were read."""
        if self.remaining:
            raise self.fault(f"{self.remaining} bytes follow the end of the structure")


def frame(magic: int, *body: Buffer) -> bytearray:
    """Return the uncompressed frame around the parts of a body, copying each part once."""
    data = bytearray().join((bytes(FRAME_HEADER), *body, bytes(FRAME_TRAILER)))
    data[:12] = magic.to_bytes(4, "big") + len(data).to_bytes(8, "little")
    data[-4:] = crc32c(memoryview(data)[:-4]).to_bytes(4, "little")
    return data


def unframe(
    data: bytes, magic: int, *, what: str, file: str, offset: int, max_nbytes: int
) -> Reader:
    """Check the whole frame at `offset` of `file`, and return a reader of its body.

    Raises:
        CorruptCheckpointError: the frame is damaged, or its body exceeds `max_nbytes`.
        UnsupportedFormatError: the frame is intact, but of a newer format version.
    """
    size = len(data)

    def fault(reason: str, at: int) -> CorruptCheckpointError:
        return corrupt(what, reason, file=file, offset=offset + at)

    if size < FRAME_OVERHEAD:
        raise fault(f"{size} bytes are fewer than the {FRAME_OVERHEAD} of an empty frame", 0)
    if data[:4] != magic.to_bytes(4, "big"):
        raise fault(f"it starts with {data[:4].hex()} instead of {magic:08x}", 0)
    length = int.from_bytes(data[4:12], "little")
    if length != size:
        raise fault(f"its header says {length} bytes, there are {size}", 4)
    stored = int.from_bytes(data[-4:], "little")
    crc = crc32c(memoryview(data)[:-4])
    if stored != crc:
        raise fault(f"its CRC-32C is {crc:08x}, the stored one {stored:08x}", size - 4)
    # Varints, of which all that this release reads take one byte.
    version, compression = data[12:FRAME_HEADER]
    if version:
        raise unsupported(
            f"{what} has OCDBT format version {version}, this release reads version 0; read it "
            "with a newer release",
            file=file,
            offset=offset,
            expected=0,
            found=version,
        )
    body = data[FRAME_HEADER:-FRAME_TRAILER]
    if compression == 0:
        if len(body) > max_nbytes:
            reason = f"its body of {len(body)} bytes passes the limit {max_nbytes}"
            raise fault(reason, FRAME_HEADER)
        return Reader(body, what=what, file=file, offset=offset + FRAME_HEADER, moves=True)
    if compression != 1:
        raise fault(f"compression method {compression} is unknown", FRAME_HEADER - 1)
    try:
        body = decompress_within(body, max_nbytes)
    except ValueError as error:
        raise fault(str(error), FRAME_HEADER) from None
    return Reader(body, what=what, file=file, offset=offset, moves=False)
