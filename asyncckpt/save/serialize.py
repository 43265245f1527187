"""Serialize: checksums and compression, turning staged bytes into stored chunks.

A stored chunk is its encoded payload followed by the payload's CRC-32C, little endian: zarr v3's
`bytes`, optional `zstd`, and `crc32c` codecs.
"""

# Rule 1: checksums are computed on the staged copy, never on the caller's memory.
# Rule 2: the CRC of a file is folded from those of its pieces, never by a second pass.
# Rule 3: windows of a file pass here in order; one thread at 13 GB/s outruns the disks.

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from asyncckpt.flow.buffers import Slot, spans
from asyncckpt.format.crc import combine, crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.planning.save import Window
from asyncckpt.ports import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Place and checksum of every chunk row, filled in as the save goes.

    `nbytes` counts payload and trailer, `crc` covers the payload.
    """

    file: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    crc: npt.NDArray[np.uint32]


class WindowChecksums:
    """Checksums of the planned windows, in order; one per save."""

    def __init__(self, crcs: npt.NDArray[np.uint32], file_count: int) -> None:
        self._crcs = crcs
        self._chunk = 0
        self.file_crcs = [0] * file_count

    def seal(self, window: Window, buffer: Bytes) -> None:
        """Write the trailers of the window's finished chunks into `buffer`. Blocking.

        `buffer` holds the window's payloads, with zeros in between. A chunk may begin in one
        window and end in a later one: windows have to come in plan order.
        """
        data = memoryview(buffer)
        file_crc = self.file_crcs[window.file]
        end = 0
        for piece in window.pieces:
            start = piece.position
            if start > end:
                file_crc = crc32c(data[end:start], file_crc)
            nbytes = piece.stop - piece.start
            end = start + nbytes
            crc = crc32c(data[start:end])
            file_crc = combine(file_crc, crc, nbytes)
            chunk = crc if piece.start == 0 else combine(self._chunk, crc, nbytes)
            self._chunk = chunk
            if piece.last:
                self._crcs[piece.row] = chunk
                trailer = chunk.to_bytes(CRC_NBYTES, "little")
                data[end : end + CRC_NBYTES] = trailer
                file_crc = crc32c(trailer, file_crc)
                end += CRC_NBYTES
        if window.nbytes > end:
            file_crc = crc32c(data[end : window.nbytes], file_crc)
        self.file_crcs[window.file] = file_crc


def trailed(payload: bytes) -> tuple[bytes, int]:
    """Return the stored form of a small payload, and its checksum."""
    crc = crc32c(payload)
    return payload + crc.to_bytes(CRC_NBYTES, "little"), crc


@dataclass(frozen=True, slots=True, eq=False)
class SmallChunks:
    """Stored forms of small payloads, one after the other.

    Attributes:
        data: all of them, each with its trailer.
        ends: where each ends, its trailer included; with a leading 0.
    """

    data: bytearray
    ends: list[int]

    def seal(self) -> npt.NDArray[np.uint32]:
        """Write the trailers; return the checksums of the payloads. Blocking."""
        view = memoryview(self.data)
        crcs = [crc32c(view[a : b - CRC_NBYTES]) for a, b in itertools.pairwise(self.ends)]
        found = np.array(crcs, "<u4")
        at = np.array(self.ends[1:], np.int64)[:, None] + np.arange(-CRC_NBYTES, 0)
        np.frombuffer(self.data, np.uint8)[at] = found.view(np.uint8).reshape(at.shape)
        return found

    def __iter__(self) -> Iterator[memoryview]:
        view = memoryview(self.data)
        return iter([view[a:b] for a, b in itertools.pairwise(self.ends)])


class _Contexts(threading.local):
    """Compression contexts of one thread; they are costly to make and cannot be shared."""

    def __init__(self) -> None:
        self.by_level: dict[int, zstandard.ZstdCompressor] = {}


class Compressed(NamedTuple):
    """A stored chunk that was compressed.

    Attributes:
        blocks: its bytes, the trailer last.
        nbytes: length of all of them.
        crc: CRC-32C of what is before the trailer.
    """

    blocks: list[bytes]
    nbytes: int
    crc: int


class Compressor:
    """zstd compression of staged chunks; one per save, used from several threads."""

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def compress(
        self,
        slots: Sequence[Slot],
        starts: Sequence[int],
        nbytes: Sequence[int],
        levels: Sequence[int],
    ) -> list[Compressed]:
        """Compress the chunks that lie in these slots. Blocking."""
        return [
            self._compress(spans(slots, start, length), length, level)
            for start, length, level in zip(starts, nbytes, levels, strict=True)
        ]

    def _compress(self, parts: Iterable[Bytes], nbytes: int, level: int) -> Compressed:
        contexts = self._contexts.by_level
        context = contexts.get(level)
        if context is None:
            # The frame states its content size, so that readers can bound what they allocate.
            context = zstandard.ZstdCompressor(level=level, write_content_size=True)
            contexts[level] = context
        stream = context.compressobj(size=nbytes)
        blocks = [stream.compress(memoryview(part)) for part in parts]
        blocks.append(stream.flush())
        blocks = [block for block in blocks if block]
        crc = 0
        for block in blocks:
            crc = crc32c(block, crc)
        blocks.append(crc.to_bytes(CRC_NBYTES, "little"))
        return Compressed(blocks, sum(map(len, blocks)), crc)
