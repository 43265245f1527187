"""Decode: stored chunks to elements of a target, checked before anybody sees them."""

# Rule 1: a checksum that fails ends the restore; values are handed over only after all have passed.
# Rule 2: nothing allocates by what a chunk claims; sizes come from the record's shapes.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import zstandard

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.crc import crc32c
from asyncckpt.ports import Bytes
from asyncckpt.stages.serialize import TRAILER_NBYTES


class ChunkError(CorruptCheckpointError):
    """A chunk is not what was saved; the leaf is named by whoever knows it."""


def check(data: Bytes | memoryview, expected: int, crc: int = 0) -> None:
    """The payload is what the chunk index says.

    Args:
        data: the payload, or its last part.
        expected: CRC-32C of the whole payload.
        crc: CRC-32C of the parts before.

    Raises:
        ChunkError: it is not.
    """
    found = crc32c(data, crc)
    if found != expected:
        raise ChunkError(
            f"CRC-32C is {found:08x}, the chunk index says {expected:08x}",
            expected=expected,
            found=found,
        )


class _Parts:
    """A readable stream over consecutive buffers."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = [memoryview(part) for part in parts]

    def read(self, nbytes: int) -> bytes:
        """At most `nbytes` more bytes; empty at the end."""
        while self._parts and not self._parts[0]:
            self._parts.pop(0)
        if not self._parts:
            return b""
        part = self._parts[0]
        self._parts[0] = part[nbytes:]
        return bytes(part[:nbytes])


def decompress(parts: Sequence[Bytes], nbytes: int) -> Bytes:
    """The chunk's elements as `nbytes` bytes, from a zstd frame spread over `parts`. Blocking.

    Raises:
        ChunkError: the frame is damaged or holds another number of bytes.
    """
    out = np.empty(nbytes, np.uint8)
    view = memoryview(out)
    filled = 0
    try:
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


def trailer_matches(trailer: Bytes | memoryview, crc: int) -> bool:
    """Whether the four bytes behind a payload are its checksum."""
    return int.from_bytes(bytes(trailer[:TRAILER_NBYTES]), "little") == crc


def flat_target(array: npt.NDArray[Any]) -> Bytes | None:
    """The memory of a C-contiguous writable array as bytes, or None."""
    if not array.flags.c_contiguous or not array.flags.writeable:
        return None
    return array.reshape(-1).view(np.uint8)
