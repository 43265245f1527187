"""Decoding chunks of zarr: what TensorStore encodes in every way is in tests/elsewhere."""

from __future__ import annotations

import bz2
import gzip
import itertools
import random
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UnsupportedFormatError
from asyncckpt.format.codecs import ZSTD, Bytes, ChunkError, Codec
from asyncckpt.format.crc import crc32c
from asyncckpt.format.foreign.zarr_codecs import make_codec
from asyncckpt.format.zarr import Chain, Shards

Pack = Callable[[bytes], bytes]

PACK: dict[str, Pack] = {
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "crc32c": lambda data: data + crc32c(data).to_bytes(4, "little"),
}


def codec(*packing: str, nbytes: int = 1, **more: object) -> Codec:
    return make_codec(Chain(packing=packing, **more), (nbytes,), "uint8", fill=b"\0")  # type: ignore[arg-type]


def parts(data: bytes, *cuts: int) -> list[Bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole = np.frombuffer(data, np.uint8)
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


def decode(chunk: Codec, data: bytes, nbytes: int, *cuts: int) -> bytes:
    assert chunk.decode is not None
    return chunk.decode(parts(data, *cuts), nbytes).tobytes()


packings = st.lists(st.sampled_from(sorted(PACK)), min_size=1, max_size=3)


@given(st.binary(max_size=5000), packings, st.lists(st.integers(0, 6000), max_size=3))
def test_what_was_packed_comes_back_however_it_is_cut(
    data: bytes, packing: list[str], cuts: list[int]
) -> None:
    chunk = codec(*packing, nbytes=len(data))
    stored = data
    for name in packing:
        stored = PACK[name](stored)
    if chunk.crc32c:
        stored = stored[:-4]  # which the pipeline checks
    if chunk.decode is None:
        assert stored == data
        return
    assert decode(chunk, stored, len(data), *cuts) == data


@pytest.mark.parametrize("name", ["zstd", "gzip", "zlib", "bz2"])
def test_more_or_fewer_bytes_than_the_chunk_has_are_refused(name: str) -> None:
    packed = PACK[name](b"x" * 1000)
    for nbytes in (999, 1001):
        with pytest.raises(ChunkError, match="bytes"):
            decode(codec(name), packed, nbytes)


@pytest.mark.parametrize("name", ["gzip", "zlib", "bz2", "zstd"])
def test_every_truncation_and_what_follows_the_end_is_refused(name: str) -> None:
    packed = PACK[name](bytes(range(50)))
    for length in range(len(packed)):
        with pytest.raises(ChunkError):
            decode(codec(name), packed[:length], 50)
    message = "does not decode" if name == "zstd" else "bytes follow the end"
    for cuts in ((), (len(packed),)):
        with pytest.raises(ChunkError, match=message):
            decode(codec(name), packed + b"x", 50, *cuts)


@pytest.mark.parametrize("declared", [True, False], ids=["of known size", "of unknown size"])
@pytest.mark.parametrize("chain", [(), ("gzip",), ("zstd",), ("zstd", "zlib"), "turned"], ids=str)
def test_zstd_is_as_strict_about_its_end_beside_other_codecs(
    chain: tuple[str, ...] | str, declared: bool
) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=declared, write_checksum=True)
    outer = () if chain == "turned" else chain
    if chain == "turned":
        chunk = make_codec(
            Chain(order=(1, 0), big_endian=True, packing=("zstd",)), (5, 5), "int16", fill=b""
        )
    else:
        chunk = codec("zstd", *outer)
    frame = compressor.compress(bytes(50))

    def decoded(stored: bytes) -> bytes:
        for name in outer:
            stored = PACK[name](stored)
        return decode(chunk, stored, 50)

    assert decoded(frame) == bytes(50)
    assert decoded(compressor.compress(bytes(30)) + compressor.compress(bytes(20))) == bytes(50)
    assert decoded(frame + compressor.compress(b"")) == bytes(50)
    for length in range(len(frame)):
        with pytest.raises(ChunkError, match="zstd"):
            decoded(frame[:length])
    for more in (b"x", frame, frame[:-1], bytes(4)):
        with pytest.raises(ChunkError, match="zstd"):
            decoded(frame + more)


@pytest.mark.parametrize("declared", [True, False], ids=["of known size", "of unknown size"])
def test_zstd_around_other_codecs_ends_where_its_frame_does(declared: bool) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=declared, write_checksum=True)
    frame = compressor.compress(PACK["gzip"](bytes(50)))
    chunk = codec("gzip", "zstd")
    assert decode(chunk, frame, 50) == bytes(50)
    for damaged in (*(frame[:length] for length in range(len(frame))), frame + b"x", frame + frame):
        with pytest.raises(ChunkError, match="its zstd frame"):
            decode(chunk, damaged, 50)


@pytest.mark.parametrize("declared", [True, False], ids=["of known size", "of unknown size"])
@pytest.mark.parametrize("cuts", [(), (1, 30, 31), (70_000,)], ids=len)
def test_zstd_fills_given_memory_and_refuses_every_other_chunk(
    cuts: tuple[int, ...], declared: bool
) -> None:
    data = random.Random(1).randbytes(100_000)
    compressor = zstandard.ZstdCompressor(write_content_size=declared, write_checksum=True)
    frame, nothing, more = map(compressor.compress, (data, b"", b"more"))
    skippable = b"\x50\x2a\x4d\x18" + bytes((3, 0, 0, 0)) + b"any"
    into = ZSTD.decode_into
    assert into is not None
    halves = compressor.compress(data[:50_000]) + compressor.compress(data[50_000:])
    for whole in (frame, halves, frame + nothing, skippable + frame + skippable):
        out = np.zeros(len(data), np.uint8)
        into(parts(whole, *cuts), out)
        assert out.tobytes() == data
    cut_off = [
        frame[:length] for length in (*range(25), 50_000, *range(len(frame) - 9, len(frame)))
    ]
    followed = [
        frame + end for end in (b"x", frame[:1], frame[:9], frame[:-1], more, skippable[:6])
    ]
    flipped = [frame[:at] + bytes((frame[at] ^ 1,)) + frame[at + 1 :] for at in (0, 50_000, -1)]
    flipped[-1] = frame[:-1] + bytes((frame[-1] ^ 1,))  # of the frame's checksum
    other = [compressor.compress(data[:-1]), compressor.compress(data + b"x")]
    bomb = [compressor.compress(bytes(1 << 26))]
    for damaged in (*cut_off, *followed, *flipped, *other, *bomb):
        surrounded = np.zeros(len(data) + 20, np.uint8)
        with pytest.raises(ChunkError, match="the zstd frame"):
            into(parts(damaged, *cuts), surrounded[10:-10])
        assert not surrounded[:10].any() and not surrounded[-10:].any()


@pytest.mark.parametrize("name", ["zstd", "gzip", "zlib", "bz2"])
def test_a_bomb_takes_no_more_memory_than_its_chunk(name: str) -> None:
    packed = PACK[name](bytes(1 << 26))
    tracemalloc.start()
    try:
        with pytest.raises(ChunkError):
            decode(codec(name), packed, 1 << 20)
        with pytest.raises(ChunkError):
            decode(codec(name, "gzip"), gzip.compress(packed), 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["zstd", "gzip", "zlib", "bz2"])
def test_what_was_never_packed_is_refused(name: str) -> None:
    for data in (b"", b"plain text, not packed at all"):
        with pytest.raises(ChunkError):
            decode(codec(name), data, 10)


def test_a_checksum_inside_of_the_packing_is_checked() -> None:
    data = PACK["crc32c"](b"0123456789")
    assert decode(codec("crc32c", "gzip"), PACK["gzip"](data), 10) == b"0123456789"
    with pytest.raises(ChunkError, match="a CRC-32C is"):
        decode(codec("crc32c", "gzip"), PACK["gzip"](b"1" + data[1:]), 10)
    with pytest.raises(ChunkError, match="hold no checksum"):
        decode(codec("crc32c", "gzip"), PACK["gzip"](b"12"), 10)


def test_chunks_that_are_stored_as_they_are_need_no_decoding() -> None:
    plain, checked = codec(), codec("crc32c")
    assert (plain.decode, plain.crc32c, plain.name) == (None, False, "")
    assert (checked.decode, checked.crc32c, checked.name) == (None, True, "")


def test_codecs_are_called_what_people_call_them() -> None:
    assert codec("zstd", "crc32c").name == "zstd"
    chain = Chain(order=(1, 0), big_endian=True, packing=("gzip", "crc32c"))
    assert make_codec(chain, (2, 3), "int16", fill=b"\0\0").name == "transpose+big endian+gzip"


@pytest.mark.parametrize("dtype", ["int16", "float64", "complex64"])
def test_elements_are_put_into_c_order_and_little_endian(dtype: str) -> None:
    value = np.arange(24).reshape(2, 3, 4).astype(dtype)
    chain = Chain(order=(2, 0, 1), big_endian=True)
    chunk = make_codec(chain, value.shape, dtype, fill=bytes(value.itemsize))
    stored = value.transpose(2, 0, 1).astype(value.dtype.newbyteorder(">")).tobytes()
    assert decode(chunk, stored, value.nbytes, 5) == value.tobytes()
    with pytest.raises(ChunkError, match="it holds"):
        decode(chunk, stored[:-1], value.nbytes)


def test_shards_are_decoded_whole() -> None:
    value = np.arange(16, dtype=np.int32).reshape(2, 8)
    shards = Shards((4, 2), Chain(packing=("zlib",)), index_crc32c=False)
    chunk = make_codec(Chain(order=(1, 0), shards=shards), (2, 8), "int32", fill=b"\7\0\0\0")
    first = PACK["zlib"](np.ascontiguousarray(value.T[:4]).tobytes())
    index = np.array([[0, len(first)], [-1, -1]], np.int64).tobytes()
    expected = value.copy()
    expected[:, 4:] = 7
    assert decode(chunk, first + index, 64) == expected.tobytes()
    with pytest.raises(ChunkError, match="its index alone needs 32"):
        decode(chunk, index[1:], 64)
    wrong = np.array([[0, len(first) - 1], [-1, -1]], np.int64).tobytes()
    with pytest.raises(ChunkError, match="cut off"):
        decode(chunk, first + wrong, 64)
    with pytest.raises(ChunkError, match="it holds 8 bytes, the chunk has 32"):
        plain = Shards((4, 2), Chain(), index_crc32c=False)
        whole = make_codec(Chain(order=(1, 0), shards=plain), (2, 8), "int32", fill=b"")
        index = np.array([[0, 8], [-1, -1]], np.int64).tobytes()
        decode(whole, bytes(8) + index, 64)


@pytest.mark.parametrize("index_crc32c", [True, False])
@pytest.mark.parametrize("packing", [("crc32c",), ()])
def test_a_shard_is_verified_if_its_chunks_and_its_index_have_checksums(
    packing: tuple[str, ...], index_crc32c: bool
) -> None:
    shards = Shards((2,), Chain(packing=packing), index_crc32c=index_crc32c)
    chunk = make_codec(Chain(shards=shards), (4,), "uint8", fill=b"\0")
    assert chunk.verifies == (bool(packing) and index_crc32c)


def test_a_chunk_that_must_be_in_its_shard_and_is_not_is_damage() -> None:
    """Of an array of 7 by 6 in shards of 4 by 4, chunks inside of every shard must be stored."""
    chain = Chain(shards=Shards((1, 2), Chain(), index_crc32c=False))
    entries = np.full((8, 2), -1, np.int64)
    entries[:6] = [(2 * n, 2) for n in range(6)]
    stored = bytes(range(12))
    for last, sizes in ((None, None), (None, (3, 4)), ("in", (4, 4)), ("in", (4, 2))):
        chunk = make_codec(chain, (4, 4), "uint8", fill=b"\7", stored=sizes)
        assert not chunk.verifies
        if last is None:
            found = decode(chunk, stored + entries.tobytes(), 16)
            assert found == stored + b"\7" * 4
            continue
        with pytest.raises(ChunkError, match="chunk 6 of the shard is missing"):
            decode(chunk, stored + entries.tobytes(), 16)


def test_packings_that_nobody_unpacks_are_named() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"w/\.zarray: chunks packed with blosc"):
        make_codec(Chain(packing=("blosc",)), (1,), "int8", fill=b"\0", file="w/.zarray")


def test_packings_are_unpacked_by_who_knows_them() -> None:
    def unpack(stored: Bytes, limit: int) -> Bytes:
        return np.full(limit, 7, np.uint8)

    chunk = make_codec(Chain(packing=("blosc",)), (3,), "uint8", fill=b"", more={"blosc": unpack})
    assert decode(chunk, b"", 3) == b"\7\7\7"
