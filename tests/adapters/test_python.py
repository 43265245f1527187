from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt import errors
from asyncckpt.adapters.python import (
    KINDS,
    scalar_from_array,
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
    assert type(leaf) not in KINDS
    error = unsupported("a/b", leaf)
    assert str(error).startswith("a/b: a leaf of type ")
    assert advice in str(error)
    assert error.path == "a/b"


def test_rank_0_arrays_become_scalars_of_their_class() -> None:
    for name, kind, value in (
        ("bool", "bool", True),
        ("int32", "int", 7),
        ("bfloat16", "float", 0.5),
        ("complex64", "complex", 1j),
    ):
        found = scalar_from_array("p", np.asarray(value).astype(DTYPES[name]), kind)
        assert type(found).__name__ == kind
        assert found == value
    with pytest.raises(errors.DtypeMismatchError, match="wants a Python int"):
        scalar_from_array("p", np.zeros(1, np.int32), "int")
    with pytest.raises(errors.DtypeMismatchError, match="wants a Python int"):
        scalar_from_array("p", np.zeros((), np.float32), "int")
