"""Codecs between the stored bytes of a chunk and its elements.

Chunks of asyncckpt are `RAW` or `ZSTD`; readers of foreign formats make other codecs.
"""

# Rule 1: a codec never trusts a size from a chunk: the size comes from the array's metadata, and
#   decoding stops beyond it.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zstandard

from asyncckpt.errors import CorruptCheckpointError

Bytes = npt.NDArray[np.uint8]

Decode = Callable[[Sequence[Bytes], int], Bytes]
"""Buffers of stored bytes and the size of the payload in bytes -> the payload."""

DecodeInto = Callable[[Sequence[Bytes], Bytes], None]
"""Buffers of stored bytes and memory of the payload's size -> None; fills the memory."""

INTO_NBYTES = 512 << 10
"""Payloads of this size or more are decoded into their destinations where possible. For smaller
ones, a zstd stream costs more than fresh memory and a copy."""

_AFTER = b"end"
_FRAME = zstandard.ZstdCompressor().compress(_AFTER)
"""Read after a chunk: its content appears only if the chunk ends where a frame ends. Without it,
zstd would accept a truncated frame."""


class ChunkError(CorruptCheckpointError):
    """A chunk differs from the saved one; callers that know the leaf add its name."""


def check_nbytes(payload: Bytes, nbytes: int) -> None:
    """Raise `ChunkError` unless the payload of a chunk has this size."""
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
        name: its common name; empty if the stored bytes are the payload.
        crc32c: whether the CRC-32C of the stored bytes follows them, as 4 bytes little endian.
        checked: whether `decode` verifies checksums inside the stored bytes, as in shards.
        decode: returns the payload of the stored bytes without that trailer; raises `ChunkError` if
            they are damaged or give another number of bytes. Blocking; None if the stored bytes are
            the payload.
        decode_into: like `decode`, into given memory, which is undefined after an error; None for
            codecs that only make new arrays.
    """

    name: str
    crc32c: bool
    decode: Decode | None = None
    checked: bool = False
    decode_into: DecodeInto | None = None

    @property
    def verifies(self) -> bool:
        """Whether every byte of a chunk is covered by a checksum."""
        return self.crc32c or self.checked

    @property
    def trailer_nbytes(self) -> int:
        """Bytes of the checksum after the stored bytes."""
        return 4 if self.crc32c else 0


class _Parts:
    """Readable stream over consecutive buffers, without copying."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self.parts = [memoryview(part) for part in parts]

    def read(self, _: int) -> memoryview:
        """Return the next buffer that is not empty; an empty one at the end."""
        while self.parts:
            if part := self.parts.pop(0):
                return part
        return memoryview(b"")


def decompress_zstd(parts: Sequence[Bytes], nbytes: int) -> Bytes:
    """Decompress the zstd frames in `parts`, whose content has `nbytes` bytes. Blocking.

    Raises:
        ChunkError: a frame is damaged, or the content has another size.
    """
    # A stream also accepts further frames without content, and decides what is damaged.
    with contextlib.suppress(zstandard.ZstdError):
        if len(parts) == 1 and zstandard.frame_content_size(memoryview(parts[0])) == nbytes:
            return _decompress_at_once(parts[0], nbytes)
    out = np.empty(nbytes, np.uint8)
    decompress_zstd_into(parts, out)
    return out


def decompress_zstd_into(parts: Sequence[Bytes], out: Bytes) -> None:
    """Decompress the zstd frames in `parts` into `out`. Blocking.

    zstd writes directly to `out` if a frame declares its size and lies in one part; otherwise it
    copies from a window of its own.

    Raises:
        ChunkError: a frame is damaged, or the content has another size.
    """
    view, filled, after = memoryview(out), 0, b""
    source = _Parts(parts)
    try:
        with zstandard.ZstdDecompressor().stream_reader(cast(Any, source)) as reader:
            while filled < len(view) and (count := reader.readinto(view[filled:])):
                filled += count
            if filled == len(view):
                source.parts.append(memoryview(_FRAME))
                after = reader.read(len(_AFTER) + 1)
    except zstandard.ZstdError as error:
        raise ChunkError(f"the zstd frame does not decode: {error}") from None
    if after != _AFTER:
        found = "more" if filled == len(view) else filled
        raise ChunkError(
            f"the zstd frame holds {found} bytes, the chunk has {len(view)}",
            expected=len(view),
            found=filled,
        )


def decompress_within(frame: bytes | memoryview | Bytes, most: int) -> bytes:
    """Return the content of one zstd frame, of at most `most` bytes. Blocking.

    Raises:
        ValueError: the frame is damaged, larger, followed by bytes, or needs a window of more than
            128 MiB.
    """
    view = memoryview(frame)
    try:
        nbytes = zstandard.frame_content_size(view)
        if nbytes < 0:  # not declared: count in a stream, whose end zstd does not check
            with zstandard.ZstdDecompressor().stream_reader(view) as reader:
                nbytes = reader.seek(most + 1)
        if nbytes > most:
            raise ValueError(f"it decompresses to more than {most} bytes")
        context = zstandard.ZstdDecompressor()
        data = context.decompress(view, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"its zstd frame cannot be decompressed ({error})") from None
    if len(data) < nbytes:
        raise ValueError("its zstd frame is followed by another")
    return data


_idle: list[zstandard.ZstdDecompressor] = []
"""Unused contexts: a new one costs as much as decompressing 10 KiB. There is at most one for each
thread that decompressed at the same time."""


def _decompress_at_once(frame: Bytes, nbytes: int) -> Bytes:
    """Return the content of a frame that declares this size; zstd enforces the size."""
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
"""Uncompressed chunks of asyncckpt."""

ZSTD = Codec("zstd", crc32c=True, decode=decompress_zstd, decode_into=decompress_zstd_into)
"""Compressed chunks of asyncckpt."""

PLAIN = Codec("", crc32c=False)
"""Bytes without a checksum, as in safetensors."""
