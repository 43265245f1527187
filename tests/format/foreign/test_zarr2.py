"""zarr v2 metadata, within limits."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import AsyncCheckpointError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import zarr
from asyncckpt.format.foreign.zarr2 import decode_metadata
from asyncckpt.format.zarr import Chain, ChunkKeys, ZarrArray
from asyncckpt.spec import DTYPES, ArraySpec

GOOD: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [4, 6],
    "chunks": [2, 6],
    "dtype": "<f4",
    "compressor": {"id": "zstd", "level": 1},
    "fill_value": None,
    "filters": None,
    "order": "C",
    "dimension_separator": ".",
}


def decode(**changes: object) -> ZarrArray:
    document = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return decode_metadata(json.dumps(document).encode(), file="a/.zarray")


def test_a_document_says_what_it_says() -> None:
    assert decode() == ZarrArray(
        ArraySpec((4, 6), "float32"),
        (2, 6),
        Chain(packing=("zstd",)),
        bytes(4),
        ChunkKeys(prefix=False, separator="."),
    )
    assert decode(compressor=None).chain == Chain()
    assert decode(filters=[], dimension_separator=..., extra=1) == decode()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_its_names(dtype: str) -> None:
    kind = DTYPES[dtype]
    if kind.isbuiltin == 2:
        assert decode(dtype=dtype).spec.dtype == dtype
        return
    little = decode(dtype=np.dtype(kind).str)
    assert little.spec.dtype == dtype and not little.chain.big_endian
    if kind.itemsize > 1:
        big = decode(dtype=kind.newbyteorder(">").str)
        assert big.spec.dtype == dtype and big.chain.big_endian


def test_fortran_order_turns_all_dimensions() -> None:
    assert decode(order="F").chain.order == (1, 0)
    assert decode(order="F", shape=[4], chunks=[2]).chain.order == ()


def test_keys_have_no_prefix() -> None:
    assert decode().keys.all(b"a/", (1, 2)) == [b"a/0.0", b"a/0.1"]
    assert decode(dimension_separator="/").keys.all(b"", (2, 1)) == [b"0/0", b"1/0"]
    assert decode(shape=[], chunks=[]).keys.all(b"a/", ()) == [b"a/0"]


@pytest.mark.parametrize(
    ("dtype", "value", "wanted"),
    [
        ("<f4", None, bytes(4)),
        ("<f4", "NaN", np.float32("nan").tobytes()),
        (">i4", 258, np.int32(258).tobytes()),
        ("bfloat16", 1.0, np.array(1, ml_dtypes.bfloat16).tobytes()),
        ("<c8", [1.0, "Infinity"], np.complex64(complex(1, np.inf)).tobytes()),
        ("|b1", True, b"\1"),
    ],
)
def test_fill_values_become_bytes(dtype: str, value: object, wanted: bytes) -> None:
    assert decode(dtype=dtype, fill_value=value).fill_value == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": ...},
        {"chunks": ...},
        {"dtype": ...},
        {"order": ...},
        {"shape": [4, -1]},
        {"shape": [4]},
        {"chunks": [2, 0]},
        {"chunks": [2, True]},
        {"shape": [1] * 33, "chunks": [1] * 33},
        {"shape": [2**45, 8]},
        {"chunks": [2**30, 2**12]},
        {"compressor": "zstd"},
        {"fill_value": "zero"},
    ],
)
def test_hostile_or_damaged_documents_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"a/\.zarray: the zarr metadata is damaged"):
        decode(**changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"zarr_format": 3}, "zarr_format"),
        ({"zarr_format": True}, "zarr_format"),
        ({"dtype": "|O"}, "dtype"),
        ({"dtype": "|S5"}, "dtype"),
        ({"dtype": "<M8[s]"}, "dtype"),
        ({"dtype": [["a", "<f4"]]}, "dtype"),
        ({"dtype": "=f4"}, "dtype"),
        ({"compressor": {"id": "lz4"}}, "compressor"),
        ({"compressor": {}}, "compressor"),
        ({"filters": [{"id": "delta"}]}, "filters"),
        ({"order": "A"}, "order"),
        ({"dimension_separator": "x"}, "dimension_separator"),
    ],
)
def test_what_is_not_read_here_is_named(changes: dict[str, object], what: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=what) as caught:
        decode(**changes)
    assert caught.value.file == "a/.zarray"


def test_limits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr, "MAX_CHUNKS", 1)
    with pytest.raises(CorruptCheckpointError, match="claims 2 chunks, the limit is 1"):
        decode_metadata(json.dumps(GOOD).encode(), file="x")


@given(st.integers(0, len(json.dumps(GOOD)) - 1), st.integers(0, 255))
def test_a_changed_byte_is_an_array_or_an_error(at: int, byte: int) -> None:
    data = bytearray(json.dumps(GOOD).encode())
    data[at] = byte
    try:
        array = decode_metadata(bytes(data), file="a/.zarray")
    except AsyncCheckpointError:
        return
    assert array.grid.chunk_size > 0
