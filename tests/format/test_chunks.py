"""The chunk index."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.chunks import (
    ChunkIndex,
    decode_chunk_index,
    encode_chunk_index,
    index_nbytes,
)
from asyncckpt.format.crc import crc32c

rows = st.lists(
    st.tuples(
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**62 - 1),
        st.integers(0, 2**62 - 1),
        st.integers(0, 2**32 - 1),
    ),
    max_size=20,
)


def index_of(table: list[tuple[int, int, int, int]]) -> ChunkIndex:
    columns = list(zip(*table, strict=True)) or [(), (), (), ()]
    return ChunkIndex(
        *(np.array(column, np.int64) for column in columns[:3]), np.array(columns[3], np.uint32)
    )


def columns_of(index: ChunkIndex) -> list[list[int]]:
    return [getattr(index, name).tolist() for name in index.__slots__]


@given(rows)
def test_indices_round_trip(table: list[tuple[int, int, int, int]]) -> None:
    index = index_of(table)
    data = encode_chunk_index(index)
    assert len(data) == index_nbytes(len(table))
    assert columns_of(decode_chunk_index(data, file="i")) == columns_of(index)


SMALL = index_of([(0, 0, 100, 7), (1, 50, 50, 2**32 - 1)])


def test_every_flipped_bit_and_truncation_is_found() -> None:
    data = encode_chunk_index(SMALL)
    for row in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[row] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match=r"i, byte .*the chunk index"):
                decode_chunk_index(bytes(bad), file="i")
        with pytest.raises(CorruptCheckpointError):
            decode_chunk_index(data[:row], file="i")


def resealed(data: bytearray) -> bytes:
    return bytes(data[:-4]) + crc32c(bytes(data[:-4])).to_bytes(4, "little")


def test_a_newer_version_is_named() -> None:
    data = bytearray(encode_chunk_index(SMALL))
    data[4] = 2
    with pytest.raises(UnsupportedFormatError, match="version 2, this release reads 1"):
        decode_chunk_index(resealed(data), file="i")


def test_a_row_count_that_does_not_fit_is_refused_before_allocation() -> None:
    data = bytearray(encode_chunk_index(SMALL))
    data[8:16] = (2**60).to_bytes(8, "little")
    with pytest.raises(CorruptCheckpointError, match=f"{2**60} rows take"):
        decode_chunk_index(resealed(data), file="i")


def test_rows_beyond_int64_are_refused() -> None:
    data = bytearray(encode_chunk_index(SMALL))
    data[24:32] = b"\xff" * 8
    with pytest.raises(CorruptCheckpointError, match="passes"):
        decode_chunk_index(resealed(data), file="i")


def test_extents_inside_their_files_are_valid() -> None:
    SMALL.validate([100, 100], file="i")
    index_of([]).validate([], file="i")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((0, 1, 100, 0), r"row 2 is 1\+100 of file 0, which has 100 bytes"),
        ((0, 101, 4, 0), "which has 100 bytes"),
        ((0, 2**61, 2**61, 0), "which has 100 bytes"),
        ((2, 0, 10, 0), "but there are 2 files"),
        ((0, 10, 3, 0), r"10\+3 of file 0"),
    ],
)
def test_extents_outside_their_files_are_named(row: tuple[int, ...], reason: str) -> None:
    index = index_of([(0, 0, 100, 7), (1, 50, 50, 9), row])  # type: ignore[list-item]
    with pytest.raises(CorruptCheckpointError, match=reason):
        index.validate([100, 100], file="i")


def test_a_hundred_thousand_rows_take_milliseconds() -> None:
    count = 100_000
    index = ChunkIndex(
        np.zeros(count, np.int64), np.arange(count), np.full(count, 64), np.zeros(count, np.uint32)
    )
    begin = time.process_time()
    decoded = decode_chunk_index(encode_chunk_index(index), file="i")
    decoded.validate([count + 64], file="i")
    assert time.process_time() - begin < 0.2  # measured 4 ms
    assert columns_of(decoded) == columns_of(index)
