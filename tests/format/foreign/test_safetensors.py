"""The header of safetensors files and the index of sets of them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format import fields
from asyncckpt.format.foreign.safetensors import (
    CODES,
    DTYPES,
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    SHARDS_KEY,
    Header,
    check_set,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    header_nbytes,
    holds_parts,
)
from asyncckpt.options import MIB
from asyncckpt.spec import DTYPES as ZARR_DTYPES
from asyncckpt.spec import ITEMSIZES, ArraySpec

FILE = "model.safetensors"


def decode(data: bytes) -> Header:
    """The header of a whole file."""
    nbytes = header_nbytes(data[:LENGTH_NBYTES], len(data), file=FILE)
    start = LENGTH_NBYTES + nbytes
    return decode_header(data[LENGTH_NBYTES:start], len(data), file=FILE)


def file_of(header: object, nbytes: int = 0) -> bytes:
    """A file with this header (JSON, or text as it is) and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(LENGTH_NBYTES, "little") + text + bytes(nbytes)


def tensor(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> Any:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def one(**changes: Any) -> Any:
    """A header of one tensor, with members replaced or added."""
    return {"a": {**tensor(0, 0, shape=[0]), **changes}}


# ------------------------------------------------------------------------------ real writers


def arrays_of(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    header = decode(data)
    return {
        name: np.frombuffer(data, ZARR_DTYPES[spec.dtype], spec.size, header.offsets[name]).reshape(
            spec.shape
        )
        for name, spec in header.specs.items()
    }


ARRAYS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    hnp.arrays(
        st.sampled_from([np.dtype(t) for t in ("f2", "f4", "f8", "i1", "i8", "u4", "?", "c8")]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    max_size=5,
)


@given(
    ARRAYS,
    st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=20), min_size=1, max_size=3),
)
def test_what_safetensors_writes_is_read(
    arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str] | None
) -> None:
    data = safetensors.numpy.save(arrays, metadata)
    found = arrays_of(data)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes()
    assert decode(data).metadata == (metadata or {})


@given(ARRAYS, st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3))
def test_what_is_written_is_read_by_safetensors(
    arrays: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]
) -> None:
    specs = [(n, ArraySpec(a.shape, str(np.dtype(a.dtype)))) for n, a in arrays.items()]
    header, starts = encode_header(specs, metadata)
    assert len(header) % 8 == 0
    data = bytearray(header) + bytearray(sum(spec.nbytes for _, spec in specs))
    for start, (name, spec) in zip(starts, specs, strict=True):
        assert start % spec.itemsize == 0
        data[start : start + spec.nbytes] = arrays[name].tobytes()
    found = safetensors.numpy.load(bytes(data))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes()
    assert decode(bytes(data)).metadata == metadata


@pytest.mark.parametrize("code", CODES.values())
def test_every_dtype_is_that_of_safetensors(code: str) -> None:
    names = {"F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz"}
    names |= {"F8_E5M2": "float8_e5m2", "F8_E5M2FNUZ": "float8_e5m2fnuz", "BF16": "bfloat16"}
    zarr = DTYPES[code]
    dtype = getattr(torch, names.get(code, zarr))
    values = torch.arange(4, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
    (found,) = arrays_of(safetensors.torch.save({"a": values.view(dtype)})).values()
    assert found.dtype == ZARR_DTYPES[zarr]
    assert found.tobytes() == values.numpy().tobytes()


def test_members_of_a_tensor_stand_in_any_order_and_space_between_tokens() -> None:
    text = b' { "a" : {\n"data_offsets":[0,4], "shape" : [ ] ,\t"dtype":"F32" }\r\n}  '
    header = decode(file_of(text, 4))
    assert list(header.specs.values()) == [ArraySpec((), "float32")]


def test_a_name_may_have_any_characters() -> None:
    name = 'a/b "quoted" \\ \u00e4 \U0001f600 \n'
    for text in (
        json.dumps({name: tensor(0, 1)}),
        json.dumps({name: tensor(0, 1)}, ensure_ascii=0),
    ):
        assert list(decode(file_of(text.encode(), 1)).specs) == [name]


def test_an_empty_file_has_no_tensors() -> None:
    assert decode(file_of({})).specs == {}


# ------------------------------------------------------------------------------------ damage

CORRUPT: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "it has 0 bytes"),
    "half a length": (b"\x02\0\0", "it has 3 bytes"),
    "a length beyond the file": (file_of({})[:8] + b"{", "at most 1"),
    "a huge length": (b"\xff" * 8 + b"{}", "at most 2"),
    "an empty header": (bytes(8) + b"{}", "claims a header of 0 bytes"),
    "no object": (file_of(b"[]"), "byte 8: .*it is not a JSON object"),
    "a header that ends": (file_of(b'{"a"'), "is not JSON"),
    "two documents": (file_of(b"{}{}"), "Extra data"),
    "bytes that are no text": (file_of(b'{"\xff\xfe":1}'), "can't decode byte 0xff"),
    "a lone surrogate": (file_of(b'{"\\ud800":1}'), "cannot be named"),
    "a control character": (file_of(b'{"a\x01":1}'), "control character"),
    "an open string": (file_of(b'{"a'), "Unterminated string"),
    "an overlap": (file_of({"a": tensor(0, 4), "b": tensor(2, 6)}, 6), "tensors overlap: 'b'"),
    "one tensor twice": (file_of({"a": tensor(0, 4), "b": tensor(0, 4)}, 4), "tensors overlap"),
    "a gap": (file_of({"a": tensor(0, 4), "b": tensor(5, 6)}, 6), "leave a gap: 'b' begins at"),
    "a gap before": (file_of({"a": tensor(1, 4)}, 4), "leave a gap: 'a' begins at byte 1"),
    "bytes behind": (file_of({"a": tensor(0, 4)}, 5), "continues after them"),
    "a truncated file": (file_of({"a": tensor(0, 4)}, 3), "is truncated"),
    "a wrong size": (file_of({"a": tensor(0, 4, "F32", [2])}, 4), r"4 bytes, float32\[2\] takes 8"),
    "a turned span": (file_of({"a": tensor(4, 0, "U8", [0])}, 4), "not first and last"),
    "a negative offset": (file_of({"a": tensor(-4, 0)}, 4), "not first and last"),
    "one offset": (
        file_of({"a": {"dtype": "U8", "shape": [], "data_offsets": [0]}}, 1),
        "not first",
    ),
    "three offsets": (
        file_of({"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1, 2]}}, 1),
        "not first and last",
    ),
    "a negative extent": (file_of({"a": tensor(0, 4, "U8", [-2, -2])}, 4), "which no array has"),
    "an absurd extent": (file_of({"a": tensor(0, 0, "U8", [0, 1 << 62])}), "which no array has"),
    "an overflowing shape": (
        file_of({"a": tensor(0, 0, "U8", [1 << 32, 1 << 32])}),
        "which no array has",
    ),
    "an absurd rank": (file_of({"a": tensor(0, 1, "U8", [1] * 33)}, 1), "more than 32 dimensions"),
    "a fraction": (file_of(one(shape=[1.0])), "not an integer"),
    "an exponent": (file_of(one(shape=[1e3])), "not an integer"),
    "a long integer": (file_of(one(shape=[10**40])), "which no array has"),
    "a long offset": (file_of(one(data_offsets=[1 << 63, 1 << 63])), "not first and last"),
    "a boolean": (file_of(one(shape=[True])), "not an integer"),
    "a nested shape": (file_of(one(shape=[[1]])), "not an integer"),
    "a shape that is no list": (file_of(one(shape=1)), "'a'.shape is not a list"),
    "a missing dtype": (file_of({"a": {"shape": [], "data_offsets": [0, 0]}}), "'a'.dtype is miss"),
    "a dtype that is no text": (file_of(one(dtype=1)), "tensor 'a'.dtype is not a string"),
    "nothing of a tensor": (file_of({"a": {}}), "tensor 'a'.dtype is missing"),
    "an unknown member": (file_of(one(stride=[1])), "tensor 'a'.'stride' is not a member"),
    "a member twice": (file_of(b'{"a":{"shape":[],"shape":[]}}'), "'shape' occurs twice"),
    "a name twice": (
        file_of(b'{"a":%b,"a":%b}' % ((json.dumps(tensor(0, 0)).encode(),) * 2)),
        "'a' occurs twice",
    ),
    "metadata twice": (
        file_of(b'{"__metadata__":{},"__metadata__":{}}'),
        "'__metadata__' occurs twice",
    ),
    "metadata that is no text": (file_of({"__metadata__": {"a": 1}}), "is not a string"),
    "a tensor that is a list": (file_of({"a": []}), "tensor 'a' is not an object"),
    "depth": (file_of(b'{"a":' * 100_000), "is not JSON|nested deeper"),
    "lists": (file_of(b'{"a":{"shape":' + b"[" * 100_000), "is not JSON"),
}


@pytest.mark.parametrize("what", CORRUPT)
def test_a_damaged_file_says_what_is_wrong_and_where(what: str) -> None:
    data, reason = CORRUPT[what]
    with pytest.raises(CorruptCheckpointError, match=reason) as caught:
        decode(data)
    assert caught.value.file == FILE
    assert caught.value.offset is not None
    assert f"{FILE}, byte {caught.value.offset}: " in str(caught.value)
    assert 0 <= caught.value.offset <= len(data)


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2", "F128", ""])
def test_dtypes_that_cannot_be_restored_are_refused_by_name(code: str) -> None:
    with pytest.raises(
        UnsupportedFormatError, match=f"does not read the dtype '{code}' of tensor 'a'"
    ) as caught:
        decode(file_of({"a": tensor(0, 1, code)}, 1))
    assert caught.value.found == code
    assert caught.value.offset is not None


@given(st.data())
def test_changed_bytes_raise_our_errors_or_give_a_header(data: st.DataObject) -> None:
    arrays = {"a": np.arange(3, dtype=np.float32), "b": np.zeros((2, 2), np.int8)}
    raw = bytearray(safetensors.numpy.save(arrays, {"k": "v"}))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(raw))
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        assert error.file == FILE


def test_a_file_cut_anywhere_is_corrupt() -> None:
    raw = safetensors.numpy.save({"a": np.arange(2, dtype=np.float32)}, {"k": "v"})
    for end in range(len(raw)):
        with pytest.raises(CorruptCheckpointError):
            decode(raw[:end])


def test_the_limit_of_a_header_is_that_of_the_format() -> None:
    length = (MAX_HEADER_NBYTES + 1).to_bytes(8, "little")
    with pytest.raises(CorruptCheckpointError, match=f"at most {MAX_HEADER_NBYTES}"):
        header_nbytes(length, 1 << 40, file=FILE)
    assert header_nbytes((100).to_bytes(8, "little"), 108, file=FILE) == 100


BOMBS = {
    "deep objects": b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
    "deep lists": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "empty lists": b'{"a":{"shape":[' + b"[]," * 300_000,
    "empty objects": b'{"a":{"dtype":' + b'{"b":' * 200_000,
    "members": b'{"__metadata__":{' + b'"a":"",' * 200_000,
    "small tensors": b"{"
    + b",".join(
        b'"%d":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}' % (n, n, n + 1)
        for n in range(20_000)
    )
    + b"!",
    "tensors of many shapes": b"{"
    + b",".join(
        b'"%d":{"dtype":"U8","shape":[0,%d],"data_offsets":[0,0]}' % (n, n + 1000)
        for n in range(20_000)
    )
    + b"!",
    "wide texts": b'{"__metadata__":{'
    + b",".join(b'"%d":"%b"' % (n, ("a" * 4000 + "\U0001f600").encode()) for n in range(200))
    + b"!",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_hostile_header_takes_no_more_memory_than_it_may(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "FREE_VALUES", 1 << 13)
    data = BOMBS[what]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError):
            decode_header(data, 1 << 40, file=FILE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 20 * len(data) + 2 * MIB


# --------------------------------------------------------------------------------------- sets


def test_an_index_is_read_as_it_is_written() -> None:
    weight_map = {"b": "x-00001-of-00002.safetensors", "a": "sub/x-00002-of-00002.safetensors"}
    assert decode_index(encode_index(weight_map, 12), file="i") == weight_map
    assert json.loads(encode_index(weight_map, 12))["metadata"] == {"total_size": 12}


def test_other_members_of_an_index_say_nothing() -> None:
    document = {"metadata": {"total_size": 1.5, "x": [[{}], None, "]"]}, "weight_map": {}, "y": -1}
    assert decode_index(json.dumps(document).encode(), file="i") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "weight_map is missing"),
        (b'{"weight_map":[]}', "is not an object"),
        (b'{"weight_map":{"a":1}}', "is not a string"),
        (b'{"weight_map":{},"weight_map":{}}', "'weight_map' occurs twice"),
        (b'{"weight_map":{"a":"x.safetensors","a":"x.safetensors"}}', "'a' occurs twice"),
        (b'{"weight_map":{"\\ud800":"x.safetensors"}}', "cannot be named"),
        (b'{"weight_map":{"a":"../x.safetensors"}}', "has a part '..'"),
        (b'{"weight_map":{"a":"/etc/x.safetensors"}}', "is absolute"),
        (b'{"weight_map":{"a":"a//x.safetensors"}}', "has an empty part"),
        (b'{"weight_map":{"a":"a\\\\x.safetensors"}}', "has a backslash"),
        (b'{"weight_map":{"a":""}}', "is empty"),
        (b'{"weight_map":{"a":"x.bin"}}', "does not end in .safetensors"),
        (b'{"metadata":' + b"[" * 300 + b"]" * 300 + b"}", "nested deeper than 256"),
        (b'{"metadata":' + b"[" * 300_000 + b"]" * 300_000 + b"}", "values in 600013 bytes"),
        (b'{"metadata":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "is not JSON|nested deeper"),
        (b'{"metadata":}', "is not JSON"),
        (b'{"metadata":[', "is not JSON"),
    ],
)
def test_a_damaged_index_says_what_is_wrong(text: bytes, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason) as caught:
        decode_index(text, file="i")
    assert caught.value.file == "i"
    assert caught.value.offset is not None


def header_of(*names: str) -> Header:
    spec = ArraySpec((), "uint8")
    return Header(dict.fromkeys(names, spec), dict.fromkeys(names, 0), {})


def test_index_and_headers_must_agree() -> None:
    headers = {"x": header_of("a", "b"), "y": header_of("c")}
    good = {"c": "y", "b": "x", "a": "x"}
    check_set(good, headers, file="i")
    for weight_map, reason in (
        ({**good, "d": "x"}, "it places 'd' in x, which does not hold it"),
        ({"a": "x", "b": "x"}, "y holds 'c', which it does not name"),
        ({**good, "c": "x"}, "it places 'c' in x, which does not hold it"),
    ):
        with pytest.raises(CorruptCheckpointError, match=reason):
            check_set(weight_map, headers, file="i")
    with pytest.raises(CorruptCheckpointError, match="y holds 'a', which it places in x"):
        check_set({"a": "x"}, {"x": header_of("a"), "y": header_of("a")}, file="i")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, False),
        ("{}", False),
        ('{"a": {"saved_offsets": [0, 0]}}', False),
        ('{"a": {"saved_offsets": [0]}, "b": {"saved_offsets": [0, 2], "more": null}}', True),
    ],
)
def test_files_of_shards_are_told_from_files_of_tensors(text: str | None, found: bool) -> None:
    assert holds_parts({} if text is None else {SHARDS_KEY: text}, file=FILE) is found


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"saved_offsets": "x"}}', "{}{}"])
def test_damaged_sharding_information_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=SHARDS_KEY):
        holds_parts({SHARDS_KEY: text}, file=FILE)


def test_ml_dtypes_agree_on_the_size_of_every_dtype() -> None:
    for code, dtype in DTYPES.items():
        assert ZARR_DTYPES[dtype].itemsize == ITEMSIZES[dtype], code
    assert ZARR_DTYPES["bfloat16"] == ml_dtypes.bfloat16
