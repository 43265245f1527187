"""Indices of shards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.format.codecs import ChunkError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.sharding import chunk_count, decode_index, index_range, places
from asyncckpt.format.zarr import Chain, Shards

PLAIN = Shards((2, 3), Chain(), index_crc32c=False)
CHECKED = Shards((2, 3), Chain())
MISSING = (1 << 64) - 1


def index(*entries: tuple[int, int], order: str = "little") -> bytes:
    return b"".join(n.to_bytes(8, order) for entry in entries for n in entry)  # type: ignore[arg-type]


def test_the_index_stands_at_the_end_or_at_the_start() -> None:
    assert chunk_count(PLAIN, (4, 6)) == 4
    assert index_range(PLAIN, (4, 6), 100) == (36, 64)
    assert index_range(CHECKED, (4, 6), 100) == (32, 68)
    assert index_range(Shards((2, 3), Chain(), index_at_start=True), (4, 6), 100) == (0, 68)


def test_a_shard_shorter_than_its_index_is_refused() -> None:
    assert index_range(CHECKED, (4, 6), 68) == (0, 68)
    with pytest.raises(ChunkError, match="67 bytes, its index alone needs 68"):
        index_range(CHECKED, (4, 6), 67)


@pytest.mark.parametrize("big", [False, True])
def test_entries_are_offset_and_length_and_all_bits_for_nothing(big: bool) -> None:
    shards = Shards((2, 3), Chain(), index_crc32c=False, index_big_endian=big)
    data = index((5, 10), (MISSING, MISSING), (0, 0), order="big" if big else "little")
    offsets, lengths = decode_index(data, shards, 15)
    assert offsets.tolist() == [5, -1, 0]
    assert lengths.tolist() == [10, 0, 0]


def test_the_checksum_behind_an_index_is_checked() -> None:
    data = index((0, 4))
    crc = crc32c(data).to_bytes(4, "little")
    assert decode_index(data + crc, CHECKED, 4)[1].tolist() == [4]
    for bit in range(8 * 20):
        bad = bytearray(data + crc)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkError, match="the CRC-32C of the shard's index"):
            decode_index(bytes(bad), CHECKED, 4)


@pytest.mark.parametrize(
    "entry",
    [(0, 11), (11, 0), (5, 6), (MISSING, 0), (0, MISSING), (MISSING - 1, 2), (1 << 63, 1 << 63)],
)
def test_chunks_outside_of_their_shard_are_refused(entry: tuple[int, int]) -> None:
    with pytest.raises(ChunkError, match="places chunk 1 at"):
        decode_index(index((0, 10), entry), PLAIN, 10)


dimensions = st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3))


@given(st.lists(dimensions, max_size=3))
def test_every_chunk_has_the_place_that_dividing_gives(
    sizes: list[tuple[int, int, int]],
) -> None:
    shape = tuple(n for n, _, _ in sizes)
    inner = tuple(c for _, c, _ in sizes)
    outer = tuple(c * each for _, c, each in sizes)
    shard, entry = places(shape, outer, inner)
    cells = list(np.ndindex(*(-(-n // c) for n, c in zip(shape, inner, strict=True))))
    assert len(shard) == len(entry) == len(cells)
    counts = [-(-n // o) for n, o in zip(shape, outer, strict=True)]
    for row, cell in enumerate(cells):
        each = [o // c for o, c in zip(outer, inner, strict=True)]
        in_grid = [i // k for i, k in zip(cell, each, strict=True)]
        in_shard = [i % k for i, k in zip(cell, each, strict=True)]
        assert shard[row] == (np.ravel_multi_index(in_grid, counts) if cell else 0)
        assert entry[row] == (np.ravel_multi_index(in_shard, each) if cell else 0)
        assert entry[row] < math.prod(each)
