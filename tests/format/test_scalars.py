"""Scalars as JSON."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.scalars import Scalar, decode_scalar, encode_scalar

every_text = st.text(st.characters(), max_size=20)  # lone surrogates included
scalars = (
    st.booleans()
    | st.integers()
    | st.integers(-(2**2000), 2**2000)
    | st.floats()
    | st.complex_numbers()
    | every_text
    | st.binary()
)


def bits(value: Scalar) -> object:
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value


@given(scalars)
def test_scalars_round_trip_bit_by_bit_through_json(value: Scalar) -> None:
    kind, document = encode_scalar(value)
    again = decode_scalar(kind, json.loads(json.dumps(document, ensure_ascii=False)))
    assert type(again) is type(value)
    assert bits(again) == bits(value)


def test_lone_surrogates_round_trip_also_where_json_would_join_them() -> None:
    for value in ("\ud800", "a\udfff", "\ud83d\ude00"):
        kind, document = encode_scalar(value)
        json.dumps(document, ensure_ascii=False).encode()
        assert decode_scalar(kind, document) == value


def test_nan_payloads_survive() -> None:
    value = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_BEEF))[0]
    assert encode_scalar(value) == ("float", "7ff800000000beef")
    assert struct.pack(">d", decode_scalar("float", "7ff800000000beef")).hex().endswith("beef")
    assert math.copysign(1, decode_scalar(*encode_scalar(-0.0))) == -1  # type: ignore[arg-type]


def test_subclasses_count_as_their_base() -> None:
    assert encode_scalar(np.float64(1.0)) == encode_scalar(1.0)
    assert encode_scalar(np.str_("x")) == ("str", "x")


def test_integers_up_to_the_limit_round_trip_and_longer_ones_are_refused() -> None:
    for value in (10**4300 - 1, -(10**4300) + 1):
        assert decode_scalar(*encode_scalar(value)) == value
    with pytest.raises(UnsupportedLeafError, match="more than 4300 digits"):
        encode_scalar(10**4300)


@pytest.mark.parametrize("value", [None, [], np.float32(1), object()])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"a {type(value).__name__} is not a scalar"):
        encode_scalar(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 5),
        ("int", ""),
        ("int", "-0"),
        ("int", "+1"),
        ("int", "01"),
        ("int", "1_0"),
        ("int", "٣"),
        ("int", "9" * 4302),
        ("float", 1.0),
        ("float", "3FF0000000000000"),
        ("float", "3ff"),
        ("complex", ["3ff0000000000000"]),
        ("complex", "3ff0000000000000"),
        ("bool", 1),
        ("bool", "true"),
        ("str", 5),
        ("str", {"utf8": 5}),
        ("str", {"utf8": "/w==", "more": 1}),
        ("str", {"utf8": "/w=="}),
        ("bytes", "é"),
        ("bytes", "a"),
        ("bytes", None),
        ("array", "x"),
    ],
)
def test_what_is_no_scalar_is_a_value_error(kind: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"is no|is not|invalid|codec can't"):
        decode_scalar(kind, value)  # type: ignore[arg-type]
