"""Varints, frames, compression and data-file tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.codecs import decompress_within
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.datafiles import (
    decode_data_files,
    encode_data_files,
)
from asyncckpt.format.ocdbt.wire import (
    NODE_MAGIC,
    Reader,
    encode_varint,
    encode_varints,
    frame,
    unframe,
    varint_sizes,
)

numbers = st.integers(0, 2**63 - 2) | st.integers(0, 300)


def reader(data: bytes) -> Reader:
    return Reader(data, what="the table", file="f", offset=100, moves=True)


@given(st.lists(numbers))
def test_columns_of_varints_round_trip(values: list[int]) -> None:
    column = np.array(values, np.int64)
    data = encode_varints(column)
    assert data == b"".join(map(encode_varint, values))
    assert varint_sizes(column).tolist() == [len(encode_varint(v)) for v in values]
    source = reader(data + b"\xff")
    assert source.varints(len(values)).tolist() == values
    assert source.remaining == 1


@given(st.integers(0, 2**64 - 1))
def test_single_varints_round_trip(value: int) -> None:
    source = reader(encode_varint(value))
    assert source.varint() == value
    source.end()


@given(st.binary(max_size=40), st.integers(0, 50))
def test_any_bytes_are_numbers_or_a_clear_error(data: bytes, count: int) -> None:
    one_by_one, at_once = reader(data), reader(data)
    try:
        values = [one_by_one.varint(below=2**63 - 1) for _ in range(count)]
    except CorruptCheckpointError:
        with pytest.raises(CorruptCheckpointError, match="f, byte 100: the table is damaged"):
            at_once.varints(count)
    else:
        assert at_once.varints(count).tolist() == values
        assert at_once.pos == one_by_one.pos


def test_a_count_is_checked_before_anything_is_made_for_it() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"need more than the 0 bytes that remain"):
        reader(encode_varint(2**60)).count("entries", nbytes_each=3)
    with pytest.raises(CorruptCheckpointError, match=r"numbers need more than the 3 bytes"):
        reader(b"abc").varints(2**60)


@given(st.binary(max_size=200))
def test_frames_round_trip(body: bytes) -> None:
    source = unframe(
        frame(NODE_MAGIC, body), NODE_MAGIC, what="x", file="f", offset=0, max_nbytes=1000
    )
    assert source.take(len(body)) == body
    source.end()


def compressed_frame(body: bytes, *, declare: bool = True, version: int = 0) -> bytes:
    packed = zstandard.ZstdCompressor(write_content_size=declare).compress(body)
    head = NODE_MAGIC.to_bytes(4, "big") + (len(packed) + 18).to_bytes(8, "little")
    data = head + bytes([version, 1]) + packed
    return data + crc32c(data).to_bytes(4, "little")


@pytest.mark.parametrize("declare", [True, False])
def test_compressed_frames_are_read_within_the_limit(declare: bool) -> None:
    body = bytes(range(256)) * 40
    data = compressed_frame(body, declare=declare)
    source = unframe(data, NODE_MAGIC, what="x", file="f", offset=0, max_nbytes=len(body))
    assert source.take(len(body)) == body
    with pytest.raises(CorruptCheckpointError, match="decompresses to"):
        unframe(data, NODE_MAGIC, what="x", file="f", offset=0, max_nbytes=len(body) - 1)


@pytest.mark.parametrize("declare", [True, False])
def test_a_decompression_bomb_is_refused(declare: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=declare).compress(bytes(1 << 26))
    with pytest.raises(ValueError, match="decompresses to"):
        decompress_within(packed, 1 << 16)


@pytest.mark.parametrize("declare", [True, False])
def test_damaged_zstd_is_one_kind_of_error(declare: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=declare).compress(b"abc" * 100)
    for cut in range(len(packed)):
        with pytest.raises(ValueError, match="zstd frame"):
            decompress_within(packed[:cut], 1000)
    for more in (b"\0", packed):
        with pytest.raises(ValueError, match="zstd"):
            decompress_within(packed + more, 1000)


def test_a_newer_format_version_is_named() -> None:
    with pytest.raises(UnsupportedFormatError, match="version 3, this release reads version 0"):
        unframe(
            compressed_frame(b"x", version=3),
            NODE_MAGIC, what="the node", file="f", offset=0, max_nbytes=10,
        )  # fmt: skip


paths = st.lists(
    st.lists(st.sampled_from(["d", "data", "0", "é", "a b"]), min_size=1, max_size=4).map("/".join),
    max_size=8,
)


@given(paths)
def test_data_file_tables_round_trip(names: list[str]) -> None:
    data = encode_data_files(names)
    assert [file.path for file in decode_data_files(reader(data))] == names
    assert len(data) <= len(encode_varint(len(names))) + sum(
        n + 2 * len(encode_varint(n)) + 1 for n in (len(name.encode()) for name in names)
    )
    based = decode_data_files(reader(data), base_path="p/")
    assert [file.path for file in based] == ["p/" + name for name in names]


def table(*rows: tuple[int, bytes, int]) -> bytes:
    """A table of (shared, suffix, base length) rows."""
    columns = itertools.chain(
        [len(rows)], [r[0] for r in rows[1:]], [len(r[1]) for r in rows], [r[2] for r in rows]
    )
    return b"".join(map(encode_varint, columns)) + b"".join(r[1] for r in rows)


def test_base_paths_are_kept_apart() -> None:
    data = table((0, b"p0/d/x", 3), (3, b"d/y", 3), (0, b"q/z", 2))
    files = decode_data_files(reader(data), base_path="up/")
    assert [(f.base_path, f.path.removeprefix(f.base_path)) for f in files] == [
        ("up/p0/", "d/x"),
        ("up/p0/", "d/y"),
        ("up/q/", "z"),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (table((0, b"../x", 0)), r"has a part '\.\.'"),
        (table((0, b"/etc/passwd", 0)), "is absolute"),
        (table((0, b"a\\b", 0)), "has a backslash"),
        (table((0, b"a\0b", 0)), "has a control character"),
        (table((0, b"a//b", 0)), "has an empty part"),
        (table((0, b"\xff", 0)), "is not UTF-8"),
        (table((0, b"d/x", 0), (9, b"y", 0)), "shares 9 bytes with one of 3"),
        (table((0, b"d/x", 4)), "base path of 4 bytes is longer"),
        (table((0, b"p/x", 2), (3, b"y", 0)), "shares more than its base path"),
        (encode_varint(1 << 40), "data files need more than"),
        (encode_varint(1) + encode_varint(5000) + b"\0" + b"x" * 5000, "is not below 4097"),
    ],
)
def test_unsafe_or_damaged_data_file_tables_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason):
        decode_data_files(reader(data))


def test_a_table_of_few_bytes_cannot_stand_for_gigabytes() -> None:
    count = 1 << 16
    columns = [np.full(count - 1, 4000), np.r_[4000, np.full(count - 1, 1)], np.zeros(count)]
    data = encode_varint(count) + b"".join(encode_varints(c.astype(np.int64)) for c in columns)
    with pytest.raises(CorruptCheckpointError, match="paths pass"):
        decode_data_files(reader(data + b"a" * (4000 + count)))
