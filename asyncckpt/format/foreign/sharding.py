"""The zarr v3 codec `sharding_indexed`: many chunks under one key, and their index.

A shard consists of its chunks in any order and an index: for every chunk, in C order, its offset in
the shard and its length, two `uint64`; for a missing chunk, all their bits are set. The index is at
the end or start of the shard, and a CRC-32C may follow it. Source: zarr-specs v3,
`codecs/sharding-indexed/v1.0`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from asyncckpt.format.codecs import Bytes, ChunkError, Codec, check_nbytes
from asyncckpt.format.crc import crc32c
from asyncckpt.format.zarr import Shards
from asyncckpt.format.zarr3 import CRC_NBYTES

ENTRY_NBYTES = 16
"""Bytes of one entry of the index."""

_MISSING = (1 << 64) - 1


def without_crc32c(data: Bytes, what: str = "a CRC-32C") -> Bytes:
    """Return the bytes without their CRC-32C, after checking it; errors call it `what`.

    Raises:
        ChunkError: the CRC-32C is missing or differs.
    """
    end = data.nbytes - CRC_NBYTES
    if end < 0:
        raise ChunkError(f"{data.nbytes} bytes hold no checksum")
    stored, crc = int.from_bytes(data[end:].tobytes(), "little"), crc32c(data[:end])
    if crc != stored:
        raise ChunkError(
            f"{what} is {crc:08x}, the stored one {stored:08x}", expected=stored, found=crc
        )
    return data[:end]


def decode_index(
    data: Bytes, shards: Shards, shard_shape: Sequence[int]
) -> list[tuple[int, int] | None]:
    """Return offset and length in the shard of every chunk; None for missing chunks.

    Raises:
        ChunkError: the index is cut off, its checksum differs, or a chunk is outside the shard.
    """
    chunks = math.prod(n // c for n, c in zip(shard_shape, shards.chunk_shape, strict=True))
    crc_nbytes = CRC_NBYTES if shards.index_crc32c else 0
    nbytes = chunks * ENTRY_NBYTES + crc_nbytes
    if nbytes > data.nbytes:
        raise ChunkError(
            f"the shard has {data.nbytes} bytes, its index alone needs {nbytes}",
            expected=nbytes,
            found=data.nbytes,
        )
    start = 0 if shards.index_at_start else data.nbytes - nbytes
    index = data[start : start + nbytes]
    if shards.index_crc32c:
        index = without_crc32c(index, "the CRC-32C of the shard's index")
    kind = ">u8" if shards.index_big_endian else "<u8"
    entries = np.frombuffer(index.tobytes(), kind).tolist()
    places: list[tuple[int, int] | None] = []
    for number, (offset, length) in enumerate(zip(entries[::2], entries[1::2], strict=True)):
        if offset == length == _MISSING:
            places.append(None)
            continue
        if offset + length > data.nbytes:
            raise ChunkError(
                f"the shard's index places chunk {number} at {offset}+{length}, the shard has "
                f"{data.nbytes} bytes",
                expected=data.nbytes,
                found=offset,
            )
        places.append((offset, length))
    return places


def unshard(
    data: Bytes,
    shards: Shards,
    codec: Codec,
    *,
    shape: Sequence[int],
    itemsize: int,
    fill: bytes,
    stored: Sequence[int] | None,
) -> Bytes:
    """Return the elements of a whole shard.

    `codec` decodes its chunks. `fill` is one element of missing chunks, empty for zero. `stored` is
    the shape of the corner of the shard that must be stored; None if any chunk may be missing.

    Raises:
        ChunkError: the index or a chunk is damaged, or a required chunk is missing.
    """
    places = decode_index(data, shards, shape)
    chunk_shape = shards.chunk_shape
    chunk_nbytes = math.prod(chunk_shape) * itemsize
    element = f"V{itemsize}"
    out = np.full(shape, np.frombuffer(fill or bytes(itemsize), element)[0])
    axes = [range(0, n, c) for n, c in zip(shape, chunk_shape, strict=True)]
    for number, corner in enumerate(itertools.product(*axes)):
        place = places[number]
        if place is not None:
            payload = data[place[0] : sum(place)]
            if codec.crc32c:
                payload = without_crc32c(payload)
            if codec.decode is not None:
                payload = codec.decode([payload], chunk_nbytes)
            check_nbytes(payload, chunk_nbytes)
            box = tuple(slice(at, at + n) for at, n in zip(corner, chunk_shape, strict=True))
            out[box] = np.ndarray(chunk_shape, element, np.ascontiguousarray(payload))
        elif stored is not None and all(a < n for a, n in zip(corner, stored, strict=True)):
            raise ChunkError(
                f"chunk {number} of the shard is missing, and this checkpoint says that all are "
                "stored",
                expected="a chunk",
                found="nothing",
            )
    return out.reshape(-1).view(np.uint8)
