"""Casts before storing: what they may lose and what they refuse."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.checkpoint.casts import check_values_fit, may_lose
from asyncckpt.errors import DtypeMismatchError
from asyncckpt.restore.place import cast_values, numeric_class
from asyncckpt.spec import DTYPES

NUMBERS = [
    *(0.0, -0.0, 1.5, -128.5, 127.5, 255.5, 1e9, -1e19, 1e300),
    *(float("nan"), float("inf"), -float("inf")),
]


@st.composite
def casts(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], str, str]:
    """Values near the ends of both dtypes, the dtype they have, and the one to cast to."""
    source, stored = draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(sorted(DTYPES)))
    if numeric_class(source) == "int":
        bits = [draw(st.integers(0, 64)) for _ in range(draw(st.integers(0, 4)))]
        numbers = [sign * (2**n + by) for n in bits for sign in (1, -1) for by in (-1, 0)]
        low, high = (int(cast_end(source, end)) for end in (min, max))
        values = np.array([n for n in numbers if low <= n <= high], dtype=object)
    else:
        values = np.array(draw(st.lists(st.sampled_from(NUMBERS), max_size=4)), np.float64)
        if numeric_class(source) == "complex" and draw(st.booleans()):
            values = values + 1j
    with np.errstate(all="ignore"):
        return values.astype(DTYPES[source]), source, stored


def cast_end(dtype: str, end: Any) -> int:
    info = ml_dtypes.iinfo(DTYPES[dtype])  # type: ignore[no-untyped-call]
    return int(end(info.min, info.max))


@given(casts())
def test_a_save_refuses_what_a_restore_refuses_but_for_infinities_of_floats(
    cast: tuple[np.ndarray[Any, Any], str, str],
) -> None:
    values, source, stored = cast
    refused = False
    if may_lose(source, stored):
        try:
            check_values_fit("w", values, source, stored)
        except DtypeMismatchError as error:
            assert (error.path, error.stage) == ("w", "stage")
            assert (error.expected, error.found) == (stored, source)
            refused = True
    try:
        out = cast_values("w", values, stored)
    except DtypeMismatchError:
        narrowing = {numeric_class(source), numeric_class(stored)} <= {"float", "complex"}
        if narrowing and not (values.imag != 0).any():
            # Dtypes without infinities would hold NaNs, or their largest value.
            infinity = np.float32("inf").astype(DTYPES[stored])
            assert refused == (not np.isinf(infinity))
        elif not (narrowing and numeric_class(stored) == "complex"):
            assert refused
    else:
        assert not refused
        if numeric_class(stored) in ("bool", "int"):
            assert out.tolist() == values.real.tolist()


@pytest.mark.parametrize(
    ("value", "source", "stored", "text"),
    [
        (2**40, "int64", "int32", "1099511627776 does not fit into int32"),
        (-1, "int8", "uint64", "-1 does not fit into uint64"),
        (2**63, "uint64", "int64", "9223372036854775808 does not fit into int64"),
        (8, "int8", "int4", "8 does not fit into int4"),
        (1e300, "float64", "uint8", r"1e\+300 does not fit into uint8"),
        (2.0**63, "float64", "int64", r"9.2\S+e\+18 does not fit into int64"),
        (float("nan"), "bfloat16", "int32", "nan does not fit into int32"),
        (float("-inf"), "float16", "int64", "-inf does not fit into int64"),
        (70_000, "int32", "float16", "70000 does not fit into float16"),
        (1 + 2j, "complex64", "float32", "an imaginary part does not fit into float32"),
        (False, "bool", "float8_e8m0fnu", "False does not fit into float8_e8m0fnu"),
        (0, "uint8", "float8_e8m0fnu", "0 does not fit into float8_e8m0fnu"),
        (-1.0, "float32", "float8_e8m0fnu", "-1.0 does not fit into float8_e8m0fnu"),
        (float("inf"), "float16", "float8_e8m0fnu", "inf does not fit into float8_e8m0fnu"),
        (2, "int8", "int2", "2 does not fit into int2"),
        (2.7, "float64", "int8", "2.7 does not fit into int8"),
        (0.5, "float8_e4m3fn", "int4", "0.5 does not fit into int4"),
        (0.5, "float8_e8m0fnu", "int8", "0.5 does not fit into int8"),
        (1.5, "float4_e2m1fn", "uint8", "1.5 does not fit into uint8"),
        (-0.25, "bfloat16", "bool", "-0.25 does not fit into bool"),
        (1.5, "complex64", "int64", "1.5 does not fit into int64"),
        (2.0, "float32", "bool", "2.0 does not fit into bool"),
        (-1, "int8", "bool", "-1 does not fit into bool"),
        (float("inf"), "float32", "bool", "inf does not fit into bool"),
        (6.5, "float32", "float4_e2m1fn", "6.5 does not fit into float4_e2m1fn"),
        (-7, "int8", "float4_e2m1fn", "-7 does not fit into float4_e2m1fn"),
        (float("nan"), "bfloat16", "float4_e2m1fn", "nan does not fit into float4_e2m1fn"),
        (0.0, "float4_e2m1fn", "float8_e8m0fnu", "0.0 does not fit into float8_e8m0fnu"),
        (500.0, "float32", "float8_e4m3fn", "500.0 does not fit into float8_e4m3fn"),
        (float("inf"), "bfloat16", "float8_e4m3fnuz", "inf does not fit into float8_e4m3fnuz"),
    ],
)
def test_a_lost_value_is_told(value: Any, source: str, stored: str, text: str) -> None:
    assert may_lose(source, stored)
    values = np.ones((3, 4), DTYPES[source])
    check_values_fit("a/b", values, source, stored)
    values[1, 2] = value
    with pytest.raises(DtypeMismatchError, match=rf"^a/b: .*{text}.* store it as {source}, or"):
        check_values_fit("a/b", values, source, stored)


def test_values_are_looked_at_in_place() -> None:
    values = np.ones((1 << 20, 2), np.float32)[:, 0]
    check_values_fit("w", values, "float32", "int8")
    tracemalloc.start()
    try:
        check_values_fit("w", values, "float32", "int8")
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()
