from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt import errors
from asyncckpt.adapters.python import (
    array_from_scalar,
    scalar_from_array,
    scalar_kind,
    unsupported,
)
from asyncckpt.spec import DTYPES


class Phase(enum.IntEnum):
    TRAIN = 1


class Metres(float):
    pass


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (Phase.TRAIN, "member.value"),
        (Metres(1), "subclass of float: store float(value)"),
        ({1}, "sorted(value)"),
        (bytearray(b"x"), "bytes(value)"),
        (print, "code is not stored; take it out"),
        (len, "or save only the arrays, as eqx.filter(tree, eqx.is_array)"),
        (int, "classes are not stored"),
        (torch.bfloat16, "register_state_dict_post_hook(), and back with"),
        (torch.device("cpu"), "store str(value)"),
        (torch.Generator(), "store get_state()"),
        (np.random.default_rng(), "store bit_generator.state"),
        (object(), "state_dict() and load_state_dict()"),
    ],
)
def test_other_leaves_are_refused_with_a_way_out(leaf: Any, advice: str) -> None:
    assert scalar_kind(type(leaf)) is None
    error = unsupported("a/b", leaf)
    assert str(error).startswith("a/b: a leaf of type ")
    assert advice in str(error)
    assert error.path == "a/b"


@pytest.mark.parametrize(
    "name", [n for n in DTYPES if n.endswith(("int2", "int4", "int8", "int64"))]
)
def test_an_int_goes_into_an_array_that_holds_it(name: str) -> None:
    bits = int(name.lstrip("uint"))
    low, high = (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for value in (low, 1, high):
        array = array_from_scalar("p", value, name)
        assert array.dtype == DTYPES[name]
        assert scalar_from_array("p", array, "int") == value
    for value in (low - 1, high + 1):
        with pytest.raises(errors.DtypeMismatchError, match=f"p: .* does not fit {name}"):
            array_from_scalar("p", value, name)


def test_floats_are_rounded_and_overflow_is_an_error() -> None:
    assert array_from_scalar("p", 0.1, "float32") == np.float32(0.1)
    assert array_from_scalar("p", 0.1, "bfloat16").dtype == DTYPES["bfloat16"]
    assert np.isinf(array_from_scalar("p", float("inf"), "float16"))
    assert np.isnan(array_from_scalar("p", float("nan"), "float32"))
    for value, name in (
        (1e30, "float16"),
        (1e30, "float8_e4m3fn"),
        (float("inf"), "float8_e4m3fn"),
        (0.0, "float8_e8m0fnu"),
        (7.0, "float4_e2m1fn"),
        (float("nan"), "float4_e2m1fn"),
    ):
        with pytest.raises(errors.DtypeMismatchError, match="does not fit"):
            array_from_scalar("p", value, name)
    with pytest.raises(errors.DtypeMismatchError, match="does not fit"):
        array_from_scalar("p", 1e300j, "complex64")


@pytest.mark.parametrize(
    ("value", "name"), [(1, "float32"), (1.0, "int32"), (True, "int8"), (1, "bool"), ("a", "int8")]
)
def test_numeric_classes_do_not_mix(value: Any, name: str) -> None:
    with pytest.raises(errors.DtypeMismatchError, match=r"^p: the checkpoint holds the "):
        array_from_scalar("p", value, name)


def test_rank_0_arrays_become_scalars_of_their_class() -> None:
    for name, kind, value in (
        ("bool", "bool", True),
        ("int32", "int", 7),
        ("bfloat16", "float", 0.5),
        ("complex64", "complex", 1j),
    ):
        found = scalar_from_array("p", np.asarray(value).astype(DTYPES[name]), kind)  # type: ignore[arg-type]
        assert type(found).__name__ == kind
        assert found == value
    with pytest.raises(errors.DtypeMismatchError, match="wants a Python int"):
        scalar_from_array("p", np.zeros(1, np.int32), "int")
    with pytest.raises(errors.DtypeMismatchError, match="wants a Python int"):
        scalar_from_array("p", np.zeros((), np.float32), "int")
