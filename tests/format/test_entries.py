"""Entries of a process: encoded, decoded, and refused where they are damaged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format import entries as module
from asyncckpt.format.crc import crc32c
from asyncckpt.format.entries import Entries, Parts, decode_entries, encode_entries
from asyncckpt.reports import FileInfo
from asyncckpt.spec import Box


def some(
    chunks: int = 3, values: dict[int, bytes] | None = None, facts: dict[str, Any] | None = None
) -> Entries:
    return Entries(
        save_id="0" * 32,
        process=2,
        digest="ab" * 32,
        files=[FileInfo("d/x-2-0", 4096, 7), FileInfo("d/x-2-1", 10, 2**32 - 1)],
        chunk=np.arange(10, 10 + chunks),
        file=np.arange(chunks) % 2,
        offset=np.arange(chunks) * 2**40,
        nbytes=np.arange(chunks) + 4,
        crc=np.arange(chunks).astype(np.uint32) + 2**31,
        values={5: b"value", 6: b""} if values is None else values,
        parts=Parts.of([(3, Box((1, 2), (2, 3)), bytes(range(24)), 9), (4, Box((), ()), b"", 8)]),
        checked=np.array([1, 99]),
        checked_crc=np.array([3, 4], np.uint32),
        scalar=np.array([5]),
        scalar_crc=np.array([8], np.uint32),
        facts={"host": "a"} if facts is None else facts,
    )


@given(
    st.integers(0, 50),
    st.dictionaries(st.integers(0, 2**62), st.binary(max_size=40), max_size=5),
)
def test_what_is_encoded_is_decoded(chunks: int, values: dict[int, bytes]) -> None:
    encoded = encode_entries(some(chunks, values))
    decoded = decode_entries(encoded, file="entries")
    assert encode_entries(decoded) == encoded
    assert decoded.chunk.tolist() == list(range(10, 10 + chunks))
    assert decoded.values == values
    assert decoded.parts.box.tolist() == [[[1, 2], [2, 3]], [[0, 0], [1, 1]]]
    assert decoded.parts.values.tobytes() == bytes(range(24))


@pytest.mark.parametrize("value", ["1,2,3," * 100_000, [7] * 400_000], ids=["text", "numbers"])
def test_facts_may_hold_many_values(value: Any) -> None:
    encoded = encode_entries(some(facts={"scalars": value}))
    assert decode_entries(encoded, file="entries").facts == {"scalars": value}


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    encoded = bytearray(encode_entries(some()))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptCheckpointError, match="entries"):
        decode_entries(bytes(encoded), file="entries")


@given(st.integers(0, 10_000))
def test_a_cut_file_is_noticed(length: int) -> None:
    encoded = encode_entries(some())
    with pytest.raises(CorruptCheckpointError):
        decode_entries(encoded[: length % len(encoded)], file="entries")


def forged(change: Any) -> bytes:
    """Return entries whose header was changed, with valid checksums."""
    data = encode_entries(some())
    head = module._HEAD
    magic, version, nbytes = head.unpack_from(data)
    header = json.loads(data[head.size : head.size + nbytes])
    change(header)
    text = json.dumps(header).encode()
    body = head.pack(magic, version, len(text)) + text + data[head.size + nbytes : -4]
    return body + crc32c(body).to_bytes(4, "little")


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("counts"),
        lambda h: h["counts"].pop("part"),
        lambda h: h["counts"].__setitem__("written", -1),
        lambda h: h["counts"].__setitem__("written", 2**40),
        lambda h: h["counts"].__setitem__("written", 2**32),
        lambda h: h["counts"].__setitem__("written", 2),
        lambda h: h["counts"].__setitem__("other", 0),
        lambda h: h.__setitem__("files", []),
        lambda h: h["files"][0].__setitem__(0, "../../etc/passwd"),
        lambda h: h["files"][0].__setitem__(1, -4),
        lambda h: h.__setitem__("process", None),
        lambda h: h.__setitem__("save_id", 3),
        lambda h: h.__setitem__("facts", []),
        lambda h: h.clear(),
    ],
)
def test_a_forged_header_is_refused(change: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match="entries"):
        decode_entries(forged(change), file="entries")


@pytest.mark.parametrize("text", [b"[" * 200_000, b"[]", b"\xff", b"{"])
def test_a_header_that_is_no_object_is_refused(text: bytes) -> None:
    body = module._HEAD.pack(module.MAGIC, module.VERSION, len(text)) + text
    with pytest.raises(CorruptCheckpointError, match="entries"):
        decode_entries(body + crc32c(body).to_bytes(4, "little"), file="entries")


@pytest.mark.parametrize(
    ("box", "nbytes"),
    [
        ([0], [4]),
        ([0, 1, 2], [4]),  # half a shape
        ([0] * 2 * 33, [4]),  # more dimensions than a checkpoint's arrays have
        ([0, 1], [5]),  # more values than there are
        ([0, 1], [3]),  # fewer
        ([0, 1, 0, 1, 0, 1], [2**63 - 1, 2**63 - 1, 6]),  # in 64 bits, their sum is 4
    ],
)
def test_parts_without_a_valid_place_are_refused(box: list[int], nbytes: list[int]) -> None:
    def columns(box: list[int], nbytes: list[int]) -> dict[str, np.ndarray]:
        return {
            "part_array": np.full(len(nbytes), 3),
            "part_nbytes": np.array(nbytes),
            "part_crc": np.full(len(nbytes), 9, np.uint32),
            "part_box": np.array(box),
            "part_values": np.frombuffer(b"abcd", np.uint8),
        }

    assert module._parts(columns([0, 1], [4])).box.tolist() == [[[0], [1]]]
    with pytest.raises(ValueError):
        module._parts(columns(box, nbytes))


def test_another_version_is_refused() -> None:
    data = encode_entries(some())
    other = data[:4] + (9).to_bytes(4, "little") + data[8:-4]
    with pytest.raises(CorruptCheckpointError, match="version 9"):
        decode_entries(other + crc32c(other).to_bytes(4, "little"), file="entries")
