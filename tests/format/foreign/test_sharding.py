"""Indices of shards."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.format.codecs import Bytes, ChunkError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.foreign.zarr_codecs import decode_shard_index
from asyncckpt.format.zarr import Chain, Shards

PLAIN = Shards((2, 3), Chain(), index_crc32c=False)
CHECKED = Shards((2, 3), Chain())
MISSING = (1 << 64) - 1


def index(*entries: tuple[int, int], order: str = "little") -> bytes:
    return b"".join(n.to_bytes(8, order) for entry in entries for n in entry)  # type: ignore[arg-type]


def shard(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("at_start", [False, True])
def test_the_index_stands_at_the_end_or_at_the_start(at_start: bool) -> None:
    shards = Shards((2, 3), Chain(), index_crc32c=False, index_at_start=at_start)
    table = index(*((n, n + 1) for n in range(4)))
    data = table + bytes(9) if at_start else bytes(9) + table
    assert decode_shard_index(shard(data), shards, (4, 6)) == [(n, n + 1) for n in range(4)]


def test_a_shard_shorter_than_its_index_is_refused() -> None:
    with pytest.raises(ChunkError, match="67 bytes, its index alone needs 68"):
        decode_shard_index(shard(bytes(67)), CHECKED, (4, 6))


@pytest.mark.parametrize("big", [False, True])
def test_entries_are_offset_and_length_and_all_bits_for_nothing(big: bool) -> None:
    shards = Shards((2, 3), Chain(), index_crc32c=False, index_big_endian=big)
    data = index((5, 10), (MISSING, MISSING), (0, 0), order="big" if big else "little")
    assert decode_shard_index(shard(data), shards, (2, 9)) == [(5, 10), None, (0, 0)]


def test_the_checksum_behind_an_index_is_checked() -> None:
    data = index((0, 4))
    crc = crc32c(data).to_bytes(4, "little")
    assert decode_shard_index(shard(data + crc), CHECKED, (2, 3)) == [(0, 4)]
    for bit in range(8 * 20):
        bad = bytearray(data + crc)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkError, match="the CRC-32C of the shard's index"):
            decode_shard_index(shard(bytes(bad)), CHECKED, (2, 3))


@pytest.mark.parametrize(
    "entry",
    [(0, 33), (33, 0), (5, 28), (MISSING, 0), (0, MISSING), (MISSING - 1, 2), (1 << 63, 1 << 63)],
)
def test_chunks_outside_of_their_shard_are_refused(entry: tuple[int, int]) -> None:
    with pytest.raises(ChunkError, match="places chunk 1 at"):
        decode_shard_index(shard(index((0, 10), entry)), PLAIN, (2, 6))
