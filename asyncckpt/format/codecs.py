"""Codecs between the stored bytes of a chunk and its elements.

Our own chunks are `RAW` or `ZSTD`; readers of foreign formats make further codecs.
"""

# Rule 1: a codec never allocates what a chunk claims to need: the size comes from the array's
#   metadata, and decoding stops beyond it.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zstandard

from asyncckpt.errors import CorruptCheckpointError

Bytes = npt.NDArray[np.uint8]

Decode = Callable[[Sequence[Bytes], int], Bytes]
"""Stored bytes, spread over buffers, and the size of the payload in bytes -> the payload."""


class ChunkError(CorruptCheckpointError):
    """A chunk differs from what was saved; callers that know the leaf add its name."""


def check_nbytes(payload: Bytes, nbytes: int) -> None:
    """Raise `ChunkError` unless the payload of a chunk has its size."""
    if payload.nbytes != nbytes:
        raise ChunkError(
            f"it holds {payload.nbytes} bytes, the chunk has {nbytes}",
            expected=nbytes,
            found=payload.nbytes,
        )


@dataclass(frozen=True, slots=True)
class Codec:
    """Transformation of a chunk's stored bytes into its payload.

    The payload is the chunk's elements in C order, little endian, at full chunk shape.

    Attributes:
        name: its common name; empty for chunks that are stored as they are.
        crc32c: whether the CRC-32C of the stored bytes follows them, as 4 bytes little endian.
        checked: whether `decode` verifies checksums inside the stored bytes, as shards have them.
        decode: returns the payload of the stored bytes without that trailer, and raises
            `ChunkError` if they are damaged or give another number of bytes. Blocking; None if the
            stored bytes are the payload.
    """

    name: str
    crc32c: bool
    decode: Decode | None = None
    checked: bool = False

    @property
    def verifies(self) -> bool:
        """Whether every byte of a chunk is covered by a checksum."""
        return self.crc32c or self.checked

    @property
    def trailer_nbytes(self) -> int:
        """Bytes that follow the stored ones."""
        return 4 if self.crc32c else 0


class _Parts:
    """A readable stream over consecutive buffers."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = [memoryview(part) for part in parts]

    def read(self, nbytes: int) -> bytes:
        """Return at most `nbytes` more bytes; none at the end."""
        while self._parts and not self._parts[0]:
            self._parts.pop(0)
        if not self._parts:
            return b""
        part = self._parts[0]
        self._parts[0] = part[nbytes:]
        return bytes(part[:nbytes])


def decompress_zstd(parts: Sequence[Bytes], nbytes: int) -> Bytes:
    """Return the chunk's elements as `nbytes` bytes, from a zstd frame in `parts`. Blocking.

    Raises:
        ChunkError: the frame is damaged or holds another number of bytes.
    """
    try:
        if len(parts) == 1 and zstandard.frame_content_size(memoryview(parts[0])) == nbytes:
            return _decompress_at_once(parts[0], nbytes)
        out = np.empty(nbytes, np.uint8)
        view = memoryview(out)
        filled = 0
        with zstandard.ZstdDecompressor().stream_reader(cast(Any, _Parts(parts))) as reader:
            while filled < nbytes:
                count = reader.readinto(view[filled:])
                if not count:
                    break
                filled += count
            extra = reader.read(1)
    except zstandard.ZstdError as error:
        raise ChunkError(f"the zstd frame does not decode: {error}") from None
    if filled != nbytes or extra:
        raise ChunkError(
            f"the zstd frame holds {'more' if extra else filled} bytes, the chunk has {nbytes}",
            expected=nbytes,
            found=filled,
        )
    return out


_idle: list[zstandard.ZstdDecompressor] = []
"""Unused contexts: a new one costs as much as decompressing 10 KiB. There are never more than
threads that decompressed at the same time."""


def _decompress_at_once(frame: Bytes, nbytes: int) -> Bytes:
    """Return the content of a frame that declares this size, which zstd then enforces."""
    try:
        context = _idle.pop()
    except IndexError:
        context = zstandard.ZstdDecompressor()
    try:
        data = context.decompress(memoryview(frame), max_output_size=nbytes, allow_extra_data=False)
    finally:
        _idle.append(context)
    return np.frombuffer(data, np.uint8)


RAW = Codec("", crc32c=True)
"""Our uncompressed chunks."""

ZSTD = Codec("zstd", crc32c=True, decode=decompress_zstd)
"""Our compressed chunks."""

PLAIN = Codec("", crc32c=False)
"""Bytes without any checksum, as in safetensors."""
