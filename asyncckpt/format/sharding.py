"""The zarr v3 codec `sharding_indexed`: many chunks behind one key, and the index of them.

A shard is its chunks in any order and an index: for every chunk of the shard, in C order, where it
begins in the shard and how long it is, two `uint64`; all bits set for a chunk that is not stored.
The index stands at the end of the shard or at its start, and may have a CRC-32C behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from asyncckpt.format.codecs import ChunkError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.zarr import CRC_NBYTES, Shards

I64 = npt.NDArray[np.int64]

ENTRY_NBYTES = 16
"""Bytes of the index per chunk."""

_MISSING = (1 << 64) - 1


def chunk_count(shards: Shards, shard_shape: Sequence[int]) -> int:
    """Chunks in one shard."""
    return math.prod(n // c for n, c in zip(shard_shape, shards.chunk_shape, strict=True))


def index_range(shards: Shards, shard_shape: Sequence[int], nbytes: int) -> tuple[int, int]:
    """Where the index stands in a shard of `nbytes`: its first byte, and its length.

    Raises:
        ChunkError: the shard is shorter than its index.
    """
    length = chunk_count(shards, shard_shape) * ENTRY_NBYTES
    length += CRC_NBYTES if shards.index_crc32c else 0
    if length > nbytes:
        raise ChunkError(
            f"the shard has {nbytes} bytes, its index alone needs {length}",
            expected=length,
            found=nbytes,
        )
    return (0 if shards.index_at_start else nbytes - length), length


def decode_index(data: bytes, shards: Shards, nbytes: int) -> tuple[I64, I64]:
    """Offset in the shard and length of every chunk; -1 and 0 of those that are not stored.

    Args:
        data: the index.
        shards: how the shard is stored.
        nbytes: length of the shard.

    Raises:
        ChunkError: the checksum differs, or a chunk is outside the shard.
    """
    if shards.index_crc32c:
        stored = int.from_bytes(data[-CRC_NBYTES:], "little")
        data = data[:-CRC_NBYTES]
        crc = crc32c(data)
        if crc != stored:
            raise ChunkError(
                f"the CRC-32C of the shard's index is {crc:08x}, the stored one {stored:08x}",
                expected=stored,
                found=crc,
            )
    entries = np.frombuffer(data, ">u8" if shards.index_big_endian else "<u8").reshape(-1, 2)
    present = (entries != _MISSING).any(axis=1)
    offset = np.where(present, entries[:, 0], 0)
    length = np.where(present, entries[:, 1], 0)
    bad = np.flatnonzero((offset > nbytes) | (length > nbytes - np.minimum(offset, nbytes)))
    if len(bad):
        first = int(bad[0])
        raise ChunkError(
            f"the shard's index places chunk {first} at {offset[first]}+{length[first]}, the shard "
            f"has {nbytes} bytes",
            expected=nbytes,
            found=int(offset[first]),
        )
    starts = offset.astype(np.int64)
    starts[~present] = -1
    return starts, length.astype(np.int64)


def places(
    shape: Sequence[int], shard_shape: Sequence[int], chunk_shape: Sequence[int]
) -> tuple[I64, I64]:
    """For every chunk of an array in C order, its shard, and its entry in the index of that.

    Shards are numbered in C order too. Chunks of the last shards that are outside the array have
    entries, but are no chunks of the array.
    """
    shard = np.zeros((), np.int64)
    entry = np.zeros((), np.int64)
    for n, outer, inner in zip(shape, shard_shape, chunk_shape, strict=True):
        cells = np.arange(-(-n // inner))
        each = outer // inner
        shard = shard[..., None] * -(-n // outer) + cells // each
        entry = entry[..., None] * each + cells % each
    return shard.reshape(-1), entry.reshape(-1)
