"""Placing alone: host memory becomes the leaves that were asked for."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from asyncckpt.adapters.python import scalar_from_array
from asyncckpt.adapters.sharded_array import ShardedArray
from asyncckpt.adapters.tensor_boxes import TensorBoxes
from asyncckpt.errors import DtypeMismatchError, RestoreError, ShapeMismatchError
from asyncckpt.restore.match import match
from asyncckpt.restore.place import Placement, array_from_scalar, cast_values
from asyncckpt.spec import DTYPES, Box
from tests.restore.loader import Loader
from tests.restore.opened import opened, request


def placed(tree: Any, wanted: Any, parts: list[Any], **how: Any) -> tuple[Any, Any]:
    """The first leaf, and whether it wrote to memory of the caller."""
    checkpoint = opened(tree, **how)
    leaf = match(checkpoint, wanted).leaves[0]
    placement = Placement(checkpoint, wanted)
    return placement.place(leaf, parts), placement.writes(leaf)


def test_without_a_target_memory_is_handed_over() -> None:
    values = np.ones(3)
    found, writes = placed({"a": values}, request("saved"), [values])
    assert found is values and not writes
    assert placed({"a": 5}, request("saved"), []) == (5, False)
    text = np.frombuffer(b"text", np.uint8)
    extra: Any = {0: {"python": "bytes"}}
    assert placed({"a": text}, request("saved"), [text], extra=extra) == (b"text", False)


def test_a_target_is_filled_and_converted() -> None:
    target, values = np.zeros(3, np.float32), np.array([1.0, 2.0, 3.0])
    found, writes = placed({"a": values}, request("into", {"a": target}, cast=True), [values])
    assert found is target and writes and target.tolist() == [1, 2, 3]
    scalar = np.zeros((), np.int16)
    found, writes = placed({"a": 7}, request("into", {"a": scalar}), [])
    assert found is scalar and writes and scalar == 7
    found, writes = placed({"a": 7}, request("into", {"a": 0}), [])
    assert (found, writes) == (7, False)
    found, writes = placed({"a": values}, request("like", {"a": target}, cast=True), [values])
    assert found is not target and not writes and found.dtype == np.float32


@pytest.mark.parametrize(
    "like",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), ">f4"),
        torch.zeros(2, 3),
        jax.ShapeDtypeStruct((2, 3), np.float32),  # type: ignore[no-untyped-call]
        ShardedArray.tiles((2, 3), (2, 1), dtype="float32"),
        TensorBoxes((2, 3), (Box((1, 0), (1, 3)),), (torch.zeros(1, 3),)),
    ],
)
def test_values_of_another_shape_or_dtype_are_refused(like: Any) -> None:
    wanted = request("like", {"a": {"b": like}})
    checkpoint = opened({"a": {"b": np.zeros((2, 3), np.float32)}})
    leaf = match(checkpoint, wanted).leaves[0]
    assert leaf.target is not None
    boxes = leaf.target.boxes or (Box.whole((2, 3)),)
    good = [np.zeros(box.shape, np.float32) for box in boxes]
    placement = Placement(checkpoint, wanted)
    with pytest.raises(ShapeMismatchError, match=r"^a/b: .*\(3, \d\).*\(\d, 3\)"):
        placement.place(leaf, [*good[:-1], good[-1].T])
    with pytest.raises(DtypeMismatchError, match=r"^a/b: .*int32.*float32"):
        placement.place(leaf, [*good[:-1], good[-1].view(np.int32)])
    placement.place(leaf, good)


def test_what_a_state_dict_lacks_comes_as_its_object_takes_it() -> None:
    values = np.ones(2)
    tree = {"o": {"moment": values}}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    found, _ = placed(tree, request("into", {"o": Loader()}), [values])
    assert type(found) is np.ndarray
    wanted = request("into", {"o": optimizer})
    tree = {"o": optimizer.state_dict() | {"moment": values}}
    checkpoint = opened(tree)
    leaf = next(leaf for leaf in match(checkpoint, wanted).leaves if leaf.path == "o/moment")
    assert type(Placement(checkpoint, wanted).place(leaf, [values])) is torch.Tensor


def test_what_a_framework_cannot_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    values = np.ones(3, np.float32)
    wanted = request("like", {"a": {"b": jax.ShapeDtypeStruct((3,), np.float32)}})  # type: ignore[no-untyped-call]
    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(RestoreError, match=r"^a/b: .* JaxRuntimeError: RESOURCE_EXH") as caught:
        placed({"a": {"b": values}}, wanted, [values])
    error = caught.value
    assert (error.path, error.stage) == ("a/b", "place")
    assert error.location is not None and error.location in str(error)


def batch(tree: dict[str, Any], like: dict[str, Any], **how: Any) -> list[Any]:
    """The leaves, placed together."""
    checkpoint, wanted = opened(tree), request("like", like, **how)
    leaves = match(checkpoint, wanted).leaves
    return Placement(checkpoint, wanted).place_all(leaves, [[part] for part in tree.values()])


def test_arrays_of_jax_are_made_at_once_and_all_others_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = {name: np.arange(3, dtype=np.float32) + n for n, name in enumerate("abcde")}
    device = jax.devices()[0]
    like: dict[str, Any] = {
        "a": jax.numpy.zeros(3, np.float32),
        "b": jax.device_put(np.zeros(3, np.float32), device),
        "c": jax.ShapeDtypeStruct((3,), np.float32),  # type: ignore[no-untyped-call]
        "d": np.zeros(3, np.float32),
        "e": jax.numpy.zeros(3, np.float16),
    }
    calls: list[int] = []
    put = jax.device_put

    def counted(values: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(values) if isinstance(values, list) else 0)
        return put(values, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", counted)
    made = batch(tree, like, cast=True)
    assert sum(calls) == 4 and 0 not in calls
    for (name, values), leaf in zip(tree.items(), made, strict=True):
        assert type(leaf) is (np.ndarray if name == "d" else type(like["a"]))
        assert leaf.dtype == like[name].dtype and leaf.tolist() == values.tolist()
    assert [leaf.committed for leaf in made[:3]] == [False, True, False]


def test_the_leaf_that_cannot_be_made_at_once_with_others_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = {name: np.full(n, n, np.int32) for n, name in enumerate("abc", 3)}
    like: dict[str, Any] = {name: jax.numpy.zeros(n, np.int32) for n, name in enumerate("abc", 3)}
    put, refused = jax.device_put, [4]

    def refusing(values: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(values, list) or values.size in refused:
            raise MemoryError("full")
        return put(values, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", refusing)
    with pytest.raises(RestoreError, match=r"^b: .* MemoryError: full"):
        batch(tree, like)
    refused.clear()  # there is room for one at a time
    assert [leaf.tolist() for leaf in batch(tree, like)] == [
        values.tolist() for values in tree.values()
    ]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.0, -2.0], "int8", [1, -2]),
        ([1.0, 2.5], "int8", None),
        ([300], "int8", None),
        ([float("nan")], "int8", None),
        ([1e39], "float32", None),
        ([float("inf")], "float32", [float("inf")]),
        ([1 + 0j], "float32", [1]),
        ([1 + 1j], "float32", None),
        ([complex("inf+1e300j")], "complex64", None),
        ([complex("1e300+nanj")], "complex64", None),
        ([complex("1-infj")], "complex64", [complex("1-infj")]),
        ([1, 0], "bool", [True, False]),
        ([2, 0], "bool", None),
        ([0.5], "bool", None),
    ],
)
def test_casts_lose_precision_and_no_value(values: Any, dtype: str, expected: Any) -> None:
    array = np.array(values)
    if expected is None:
        with pytest.raises(DtypeMismatchError, match=f"^a/b: .* does not fit into {dtype}"):
            cast_values("a/b", array, dtype)
    else:
        assert cast_values("a/b", array, dtype).tolist() == expected


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
        with pytest.raises(DtypeMismatchError, match=f"p: .* does not fit into {name}; "):
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
        with pytest.raises(DtypeMismatchError, match="does not fit into"):
            array_from_scalar("p", value, name)
    with pytest.raises(DtypeMismatchError, match="does not fit into"):
        array_from_scalar("p", 1e300j, "complex64")


@pytest.mark.parametrize(
    ("value", "name"), [(1, "float32"), (1.0, "int32"), (True, "int8"), (1, "bool"), ("a", "int8")]
)
def test_numeric_classes_do_not_mix(value: Any, name: str) -> None:
    with pytest.raises(DtypeMismatchError, match=r"^p: the checkpoint holds the "):
        array_from_scalar("p", value, name)
