"""Serialize: checksums and compression, turning staged bytes into stored chunks.

A stored chunk is its encoded payload followed by the payload's CRC-32C, little endian: zarr v3's
`bytes`, optional `zstd`, and `crc32c` codecs.
"""

# Rule 1: checksums are computed on the staged copy, never on the caller's memory.
# Rule 2: the CRC of a file is combined from the CRCs of its pieces. Only short pieces, whose bytes
#   are still in the cache, are checksummed twice, which costs less than combining.
# Rule 3: windows are sealed in any order, by several threads, but folded in plan order, because the
#   trailer of a chunk that spans windows depends on all of them.
# Rule 4: bytes of a window outside of chunks are zeroed: slots are reused, and bytes of another
#   checkpoint must not leak into this one.

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from asyncckpt.flow.buffers import Slot, spans
from asyncckpt.format.crc import combine, crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import CACHED_NBYTES, KIB
from asyncckpt.planning.pack import Window
from asyncckpt.ports import Bytes


class WindowSums(NamedTuple):
    """CRC-32C of the parts of one window, independent of earlier windows.

    Attributes:
        head: CRC of the payload that continues a chunk of an earlier window, if any.
        rest: CRC of everything after that payload and its trailer.
        tail: CRC of the payload that begins in this window and continues in later ones, if any.
    """

    head: int
    rest: int
    tail: int


Filling = Iterator[int]
"""A copy of a window that goes on step by step; yields the position up to which it is filled."""

SHORT_NBYTES = 32 * KIB
"""Payloads below this size are checksummed twice; combining costs as much as another 64 KiB."""


class WindowChecksums:
    """Checksums of the planned windows; one per save.

    Args:
        crcs: receives the checksums of the chunks.
        file_crcs: receives the checksums of the files; initially zeros.
    """

    def __init__(self, crcs: npt.NDArray[np.uint32], file_crcs: list[int]) -> None:
        self._crcs = crcs
        self._file_crcs = file_crcs
        self._chunk = 0  # CRC of the current chunk up to the end of the window folded last

    def seal(self, window: Window, buffer: Bytes, filling: Filling | None = None) -> WindowSums:
        """Checksum the payloads of a window, and write their trailers. Blocking.

        The payloads and the zeros between them are in `buffer`, or arrive there with `filling`.
        `fold` writes the trailer of a chunk that began in an earlier window. Called in any order,
        from any thread.
        """
        data = memoryview(buffer)
        head = rest = tail = 0
        done = end = 0  # `rest` covers the bytes before `done`; the bytes before `end` are final
        filled = window.nbytes if filling is None else 0
        for piece in window.pieces:
            at = piece.position
            start, end = at, at + piece.stop - piece.start
            crc = 0
            while start < end:
                if filled <= start:
                    assert filling is not None
                    filled = next(filling)
                    continue
                stop = min(end, filled)
                crc = crc32c(data[start:stop], crc)
                start = stop
            if piece.start:
                head = crc
                done = end = end + CRC_NBYTES if piece.last else end
                continue
            if end - at >= SHORT_NBYTES:
                rest = combine(crc32c(data[done:at], rest), crc, end - at)
                done = end
            if piece.last:
                self._crcs[piece.row] = crc
                data[end : end + CRC_NBYTES] = crc.to_bytes(CRC_NBYTES, "little")
                end += CRC_NBYTES
            else:
                tail = crc
            if end - done >= CACHED_NBYTES:
                rest, done = crc32c(data[done:end], rest), end
        for _ in filling or ():
            pass
        return WindowSums(head, crc32c(data[done : window.nbytes], rest), tail)

    def fold(self, window: Window, buffer: Bytes, sums: WindowSums) -> None:
        """Add a sealed window, in plan order; on return all its bytes are final.

        Takes about 10 µs, regardless of the number of chunks.
        """
        file_crc, end = self._file_crcs[window.file], 0
        if window.pieces:
            first, last = window.pieces[0], window.pieces[-1]
            if first.start:
                end = first.stop - first.start
                self._chunk = combine(self._chunk, sums.head, end)
                file_crc = combine(file_crc, sums.head, end)
                if first.last:
                    self._crcs[first.row] = self._chunk
                    trailer = self._chunk.to_bytes(CRC_NBYTES, "little")
                    memoryview(buffer)[end : end + CRC_NBYTES] = trailer
                    file_crc = crc32c(trailer, file_crc)
                    end += CRC_NBYTES
            if not last.start and not last.last:
                self._chunk = sums.tail
        self._file_crcs[window.file] = combine(file_crc, sums.rest, window.nbytes - end)


def seal_small(data: bytearray, ends: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Write the trailers of consecutive small payloads, and return the checksums. Blocking.

    `ends` holds 0 and the end of each payload, including the room for its trailer.
    """
    view = memoryview(data)
    crcs = [crc32c(view[a : b - CRC_NBYTES]) for a, b in itertools.pairwise(ends)]
    found = np.array(crcs, "<u4")
    at = np.array(ends[1:], np.int64)[:, None] + np.arange(-CRC_NBYTES, 0)
    np.frombuffer(data, np.uint8)[at] = found.view(np.uint8).reshape(at.shape)
    return found


class Compressed(NamedTuple):
    """A compressed stored chunk.

    Attributes:
        blocks: its bytes, the trailer last.
        nbytes: total length.
        crc: CRC-32C of the bytes before the trailer.
    """

    blocks: list[bytes]
    nbytes: int
    crc: int


class Compressor:
    """zstd compression of staged chunks; one per save, used from several threads."""

    def __init__(self) -> None:
        # By thread and level: contexts are expensive to make, and not thread-safe.
        self._contexts: dict[tuple[int, int], zstandard.ZstdCompressor] = {}

    def compress(
        self,
        slots: Sequence[Slot],
        starts: Sequence[int],
        nbytes: Sequence[int],
        levels: Sequence[int],
    ) -> list[Compressed]:
        """Compress the chunks that lie in these slots. Blocking."""
        places = zip(starts, nbytes, levels, strict=True)
        if len(starts) == 1 or len(set(levels)) > 1:
            return [self._compress(spans(slots, at, n), n, level) for at, n, level in places]
        # One call for all small chunks of a slot: taking the interpreter lock again may wait.
        buffer = memoryview(slots[0].buffer)
        frames = self._context(levels[0]).multi_compress_to_buffer(
            [buffer[at : at + n] for at, n, _ in places]
        )
        return [_with_trailer([frames[number].tobytes()]) for number in range(len(frames))]

    def _compress(self, parts: Iterable[Bytes], nbytes: int, level: int) -> Compressed:
        stream = self._context(level).compressobj(size=nbytes)
        blocks = [stream.compress(memoryview(part)) for part in parts]
        blocks.append(stream.flush())
        return _with_trailer([block for block in blocks if block])

    def _context(self, level: int) -> zstandard.ZstdCompressor:
        key = threading.get_ident(), level
        context = self._contexts.get(key)
        if context is None:
            # The frame states its content size, so that readers can bound what they allocate.
            context = zstandard.ZstdCompressor(level=level, write_content_size=True)
            self._contexts[key] = context
        return context


def _with_trailer(blocks: list[bytes]) -> Compressed:
    crc = 0
    for block in blocks:
        crc = crc32c(block, crc)
    blocks.append(crc.to_bytes(CRC_NBYTES, "little"))
    return Compressed(blocks, sum(map(len, blocks)), crc)
