"""zarr v3 metadata, within limits, and chunk keys."""

from __future__ import annotations

import functools
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import AsyncCheckpointError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import zarr
from asyncckpt.format.zarr import Chain, ChunkKeys, Shards, ZarrArray
from asyncckpt.format.zarr3 import (
    chunk_keys,
    decode_metadata,
    encode_metadata,
    metadata_key,
)
from asyncckpt.spec import DTYPES, ArraySpec, ChunkGrid


@st.composite
def arrays(draw: st.DrawFn) -> tuple[ArraySpec, tuple[int, ...], int | None]:
    shape = tuple(draw(st.lists(st.integers(0, 300), max_size=5)))
    # At most 80 chunks along each axis: fewer than the 2**32 that an array may have.
    chunk_shape = tuple(draw(st.integers(max(1, -(-n // 80)), 99)) for n in shape)
    spec = ArraySpec(shape, draw(st.sampled_from(sorted(DTYPES))))
    return spec, chunk_shape, draw(st.none() | st.integers(-7, 22))


@given(arrays())
def test_metadata_round_trips(array: tuple[ArraySpec, tuple[int, ...], int | None]) -> None:
    spec, chunk_shape, level = array
    decoded = decode_metadata(encode_metadata(spec, chunk_shape, level), file="a/zarr.json")
    packing = ("crc32c",) if level is None else ("zstd", "crc32c")
    fill = bytes(spec.itemsize)
    chain = Chain(packing=packing)
    assert decoded == ZarrArray(spec, chunk_shape, chain, fill, ChunkKeys())
    assert decoded.grid == ChunkGrid(spec.shape, chunk_shape)


GOOD: dict[str, Any] = json.loads(encode_metadata(ArraySpec((4, 6), "float32"), (2, 6), 3))


def decode(**changes: object) -> ZarrArray:
    document = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return decode_metadata(json.dumps(document).encode(), file="a/zarr.json")


@pytest.mark.parametrize(
    ("dtype", "value", "wanted"),
    [
        ("float32", 1.5, np.float32(1.5).tobytes()),
        ("float32", 2, np.float32(2).tobytes()),
        ("float32", "NaN", np.float32("nan").tobytes()),
        ("float64", "-Infinity", np.float64("-inf").tobytes()),
        ("float64", "0x7ff8000000000001", (0x7FF8000000000001).to_bytes(8, "little")),
        ("bfloat16", "0x3f80", b"\x80\x3f"),
        ("complex64", [1, "NaN"], np.float32(1).tobytes() + np.float32("nan").tobytes()),
        ("bool", True, b"\1"),
        ("int8", -3, b"\xfd"),
        ("uint64", 2**64 - 1, b"\xff" * 8),
    ],
)
def test_fill_values_become_bytes(dtype: str, value: object, wanted: bytes) -> None:
    assert decode(data_type=dtype, fill_value=value).fill_value == wanted


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", None),
        ("float32", "nan"),
        ("float32", True),
        ("float32", "0x" + "f" * 9),
        ("bool", 0),
        ("int8", 128),
        ("int4", 8),
        ("uint8", -1),
        ("int32", 1.0),
        ("complex64", 1.0),
        ("complex64", [1.0]),
    ],
)
def test_impossible_fill_values_are_refused(dtype: str, value: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="fill value"):
        decode(data_type=dtype, fill_value=value)


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}


def sharding(codecs: list[object], **more: object) -> dict[str, object]:
    configuration = {"chunk_shape": [1, 3], "codecs": codecs, "index_codecs": [LITTLE], **more}
    return {"name": "sharding_indexed", "configuration": configuration}


def grid(*chunk_shape: object) -> dict[str, object]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": None},
        {"shape": [4, -1]},
        {"shape": [4, True]},
        {"shape": [4, 6.0]},
        {"shape": [4, 2**63]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 33, "chunk_grid": grid(*[1] * 33)},
        {"shape": [4]},
        {"shape": [2**45, 8]},
        {"chunk_grid": grid(2**30, 2**12)},
        {"chunk_grid": grid(0, 6)},
        {"chunk_grid": grid(2)},
        {"chunk_grid": {"name": "regular"}},
        {"chunk_grid": {"name": "regular", "configuration": []}},
        {"chunk_grid": 5},
        {"codecs": None},
        {"codecs": [5]},
        {"codecs": [LITTLE] * 17},
        {"codecs": [LITTLE, {"name": "zstd"}]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [0, 0]}}, LITTLE]},
        {"codecs": [{"name": "transpose", "configuration": {"order": [1]}}, LITTLE]},
        {"codecs": [{"name": "transpose"}, LITTLE]},
        {"codecs": [{"name": "sharding_indexed", "configuration": {}}]},
        {"codecs": [sharding([LITTLE], chunk_shape=[2, 5])]},
        {"codecs": [sharding([LITTLE], chunk_shape=[2])]},
        {"codecs": [sharding([LITTLE], chunk_shape=[0, 6])]},
        {"codecs": [functools.reduce(lambda inner, _: sharding([inner]), range(17), LITTLE)]},
    ],
)
def test_hostile_or_damaged_documents_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"a/zarr\.json: the zarr metadata is damaged"):
        decode(**changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"zarr_format": 2}, "zarr_format"),
        ({"zarr_format": ...}, "zarr_format"),
        ({"node_type": "table"}, "node_type"),
        ({"data_type": "float6_e2m3fn"}, "data_type"),
        ({"data_type": {"name": "struct"}}, "data_type"),
        ({"chunk_grid": {"name": "rectilinear", "configuration": {}}}, "chunk_grid"),
        ({"chunk_key_encoding": {"name": "v3"}}, "chunk_key_encoding"),
        (
            {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "-"}}},
            "chunk_key_encoding",
        ),
        ({"codecs": []}, "codecs"),
        ({"codecs": [GZIP]}, "codecs"),
        ({"codecs": [LITTLE, {"name": "lz4"}]}, "codecs"),
        ({"codecs": [LITTLE, LITTLE]}, "codecs"),
        ({"codecs": [LITTLE, TRANSPOSE]}, "codecs"),
        ({"codecs": [sharding([LITTLE]), GZIP]}, "nothing after sharding_indexed"),
        ({"codecs": [sharding([LITTLE], index_location="middle")]}, "index_location"),
        ({"codecs": [sharding([LITTLE], index_codecs=[LITTLE, GZIP])]}, "index_codecs"),
        ({"codecs": [{"name": "bytes"}]}, "endian"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]}, "endian"),
        ({"surprise": {}}, "surprise"),
        ({"storage_transformers": [{"name": "x"}]}, "storage_transformers"),
    ],
)
def test_what_is_not_read_here_is_named(changes: dict[str, object], what: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=what):
        decode(**changes)


@pytest.mark.parametrize(
    ("encoding", "keys"),
    [
        ("default", [b"a/c/0/0", b"a/c/0/1", b"a/c/1/0", b"a/c/1/1"]),
        ({"name": "default", "configuration": {"separator": "."}}, [b"a/c.0.0", b"a/c.0.1"]),
        ("v2", [b"a/0.0", b"a/0.1"]),
        ({"name": "v2", "configuration": {"separator": "/"}}, [b"a/0/0", b"a/0/1"]),
    ],
)
def test_chunks_have_the_keys_of_their_encoding(encoding: object, keys: list[bytes]) -> None:
    array = decode(chunk_key_encoding=encoding)
    assert array.keys.all(b"a/", (2, 2))[: len(keys)] == keys
    assert array.keys.all(b"", ()) == [b"c" if array.keys.prefix else b"0"]
    assert array.keys.all(b"", (0, 3)) == []
    assert array.keys.all(b"", (2,))[-1] == keys[1].replace(b"a/", b"").replace(b"0", b"", 1)[
        1 - array.keys.prefix :
    ].replace(array.keys.separator.encode() * 2, array.keys.separator.encode())


def test_an_array_without_elements_has_no_chunk_keys_however_long_its_other_axes() -> None:
    tracemalloc.start()
    try:
        assert ChunkKeys().all(b"w/", (0, 1 << 18)) == ChunkKeys().all(b"w/", (1 << 18, 0)) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_empty_array_is_read_if_numpy_can_hold_it() -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": [1, 1]}}
    assert decode(shape=[0, 1 << 44], chunk_grid=grid).spec.shape == (0, 1 << 44)
    with pytest.raises(CorruptCheckpointError, match=f"claims {1 << 64} bytes in total"):
        decode(shape=[0, 1 << 62], chunk_grid=grid)


def test_the_order_of_the_elements_is_what_all_transposes_make_of_it() -> None:
    turn = {"name": "transpose", "configuration": {"order": [2, 0, 1]}}
    swap = {"name": "transpose", "configuration": {"order": [1, 0, 2]}}
    array = decode(shape=[4, 6, 8], chunk_grid=grid(2, 3, 4), codecs=[turn, swap, LITTLE])
    elements = np.zeros((2, 3, 4)).transpose(2, 0, 1).transpose(1, 0, 2)
    assert elements.shape == tuple((2, 3, 4)[n] for n in array.chain.order)
    assert decode(codecs=[TRANSPOSE, TRANSPOSE, LITTLE]).chain.order == ()


def test_shards_are_described_in_the_order_in_which_they_are_stored() -> None:
    codec = sharding([LITTLE, GZIP], chunk_shape=[3, 1], index_location="start")
    chain = decode(codecs=[TRANSPOSE, codec]).chain
    assert chain.order == (1, 0)
    assert chain.shards == Shards(
        (3, 1), Chain(packing=("gzip",)), index_crc32c=False, index_at_start=True
    )


def test_members_that_need_not_be_understood_are_passed_over() -> None:
    array = decode(surprise={"must_understand": False}, attributes={"a": 1}, dimension_names=None)
    assert array == decode()


def test_arrays_without_a_checksum_say_so() -> None:
    assert not decode(codecs=[LITTLE]).chain.crc32c
    assert not decode(codecs=[LITTLE, {"name": "crc32c"}, GZIP]).chain.crc32c
    assert decode(codecs=[LITTLE, GZIP, {"name": "crc32c"}]).chain.crc32c


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="is not"):
        decode_metadata(data, file="a/zarr.json")


def test_a_group_is_no_array() -> None:
    assert decode_metadata(b'{"zarr_format":3,"node_type":"group"}', file="a/zarr.json") is None


def test_a_large_document_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(CorruptCheckpointError, match="it has 1048577 bytes"):
        decode_metadata(b"[" * (zarr.MAX_DOCUMENT_NBYTES + 1), file="x")


def test_more_chunks_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr, "MAX_CHUNKS", 1)
    with pytest.raises(CorruptCheckpointError, match="claims 2 chunks, the limit is 1"):
        decode_metadata(json.dumps(GOOD).encode(), file="a/zarr.json")


@given(st.integers(0, len(json.dumps(GOOD)) - 1), st.integers(0, 255))
def test_a_changed_byte_is_an_array_or_an_error(at: int, byte: int) -> None:
    data = bytearray(json.dumps(GOOD).encode())
    data[at] = byte
    try:
        array = decode_metadata(bytes(data), file="a/zarr.json")
    except AsyncCheckpointError:
        return
    assert array.grid.chunk_size > 0


def test_every_truncation_is_refused() -> None:
    data = json.dumps(GOOD).encode()
    for length in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode_metadata(data[:length], file="a/zarr.json")


@given(st.text(max_size=5), st.lists(st.integers(0, 12), max_size=4))
def test_chunk_keys_are_the_keys_of_all_cells_in_c_order(name: str, counts: list[int]) -> None:
    expected = ["/".join((name, "c", *map(str, cell))).encode() for cell in np.ndindex(*counts)]
    assert chunk_keys(name, counts) == expected


def test_keys_are_those_of_the_default_encoding() -> None:
    assert metadata_key("p.w") == b"p.w/zarr.json"
    assert chunk_keys("p.w", (1, 2)) == [b"p.w/c/0/0", b"p.w/c/0/1"]
    assert chunk_keys("p.é", ()) == ["p.é/c".encode()]
