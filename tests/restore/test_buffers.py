"""Destination buffers alone: whose memory is used, what shares it, and what fills it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt import ShardedArray
from asyncckpt.errors import UsageError
from asyncckpt.restore.buffers import allocate, find_twins
from asyncckpt.restore.match import match
from tests.restore.opened import opened, request

TREE = {"a": np.ones((2, 3)), "b": np.zeros(40_000), "empty": np.zeros((0, 4), np.int8)}


def arrays(checkpoint: Any, wanted: Any) -> Any:
    return match(checkpoint, wanted).arrays


def test_memory_of_our_own_has_the_stored_shapes_and_dtypes() -> None:
    checkpoint = opened(TREE)
    buffers = allocate(
        checkpoint, arrays(checkpoint, request("saved")), framework="numpy", in_place=False
    )
    memory = [buffers.take(leaf) for leaf in range(len(TREE))]
    shapes = [[(part.shape, part.dtype.name) for part in parts] for parts in memory]
    assert shapes == [[((2, 3), "float64")], [((40_000,), "float64")], [((0, 4), "int8")]]
    assert buffers.owners == [0, 1, 2] and buffers.chunks_of_leaves([1, 4, 0]) == [1, 4, 0]
    wanted = buffers.destinations
    assert all(values is parts[0] for values, parts in zip(wanted.values, memory, strict=True))
    assert buffers.nbytes == 6 * 8 + 40_000 * 8


@pytest.mark.parametrize("in_place", [True, False])
def test_targets_are_filled_in_place_unless_the_restore_is_atomic(in_place: bool) -> None:
    checkpoint = opened(TREE)
    target = {key: np.zeros_like(value) for key, value in TREE.items()}
    leaves = arrays(checkpoint, request("into", target))
    buffers = allocate(checkpoint, leaves, framework="numpy", in_place=in_place)
    for leaf, key in enumerate(TREE):
        (part,) = buffers.take(leaf)
        assert (part is target[key]) is in_place


def test_a_target_of_another_dtype_is_not_read_into() -> None:
    checkpoint = opened({"a": np.ones(3)})
    leaves = arrays(checkpoint, request("into", {"a": np.zeros(3, np.float32)}, cast=True))
    buffers = allocate(checkpoint, leaves, framework="numpy", in_place=True)
    assert buffers.take(0)[0].dtype == np.float64


@pytest.mark.parametrize(
    ("kinds", "extra", "framework", "together"),
    [
        (("numpy", "numpy"), {}, "numpy", True),
        (("numpy", "torch"), {}, "numpy", True),
        (("jax", "jax"), {}, "numpy", False),
        (("jax", "jax"), {}, "jax", True),
        (("numpy", "numpy"), {1: {"python": "bytes"}}, "numpy", False),
    ],
)
def test_mutable_arrays_that_were_tied_share_memory(
    kinds: tuple[str, str], extra: Any, framework: str, together: bool
) -> None:
    checkpoint = opened({"a": np.ones(8, "u1"), "b": np.ones(8, "u1")}, tied={1: 0}, extra=extra)
    checkpoint.leaves.kind[:] = kinds
    leaves = arrays(checkpoint, request("saved"))
    buffers = allocate(checkpoint, leaves, framework=framework, in_place=False)
    (one,), (other,) = buffers.take(0), buffers.take(1)
    assert (one is other) is together
    # Memory that is shared is filled once, and both leaves wait for its chunks.
    counts = [3] if together else [3, 2]
    assert len(buffers.destinations) == len(counts)
    assert buffers.sharers == ({0: [1]} if together else {})
    assert buffers.chunks_of_leaves(counts) == [3, counts[-1]]


def test_targets_may_overlap_only_where_they_are_one_array() -> None:
    memory = np.zeros(10)
    target = {"a": memory[:6], "b": memory[:6]}
    values = {"a": np.ones(6), "b": np.ones(6)}
    tied = opened(values, tied={1: 0})
    assert find_twins(match(tied, request("into", target)), tied.first_rows) == {}
    apart = opened(values)
    assert find_twins(match(apart, request("into", target)), apart.first_rows) == {1: 0}
    shifted = {"a": memory[:6], "b": memory[1:7]}
    with pytest.raises(UsageError, match="a and b: these targets overlap in memory"):
        find_twins(match(apart, request("into", shifted)), apart.first_rows)
    strided = {"a": memory[0::2], "b": memory[1::2]}
    apart = opened({"a": np.ones(5), "b": np.ones(5)})
    assert find_twins(match(apart, request("into", strided)), apart.first_rows) == {}


def test_a_tensor_and_the_array_that_shares_its_memory_are_one_target() -> None:
    tensor, swapped = torch.zeros(4, 3), np.zeros(3, ">f4")
    checkpoint = opened(
        {"a": np.ones((4, 3), "f4"), "b": np.ones((4, 3), "f4"), "c": np.ones(3, "f4")}
    )
    target = {"a": tensor, "b": tensor.numpy(), "c": swapped}
    matching = match(checkpoint, request("into", target))
    assert find_twins(matching, checkpoint.first_rows) == {1: 0}
    checkpoint = opened({"a": np.ones(3, "f4"), "b": np.ones(3, "f4")})
    matching = match(checkpoint, request("into", {"a": swapped, "b": swapped}))
    assert find_twins(matching, checkpoint.first_rows) == {1: 0}


def test_sharded_targets_are_one_array_only_if_all_of_their_memory_is() -> None:
    parts = [np.zeros(2), np.zeros(2), np.zeros(2)]

    def pair(one: int, other: int) -> ShardedArray:
        return ShardedArray((4,), "float64", [((0,), parts[one]), ((2,), parts[other])])

    checkpoint = opened({"a": np.ones(4), "b": np.ones(4)})
    matching = match(checkpoint, request("into", {"a": pair(0, 1), "b": pair(0, 1)}))
    assert find_twins(matching, checkpoint.first_rows) == {1: 0}
    matching = match(checkpoint, request("into", {"a": pair(0, 1), "b": pair(0, 2)}))
    with pytest.raises(UsageError, match="a and b: these targets overlap in memory"):
        find_twins(matching, checkpoint.first_rows)


def test_targets_without_elements_of_this_process_are_not_one_array() -> None:
    checkpoint = opened({"a": np.ones(3), "b": np.ones(3, np.float32)})
    target = {name: ShardedArray((3,), "float64", []) for name in "ab"}
    matching = match(checkpoint, request("into", target, cast=True))
    assert find_twins(matching, checkpoint.first_rows) == {}


def test_scalars_are_tied_to_nothing() -> None:
    memory = np.zeros(())
    checkpoint = opened({"a": 1.0, "b": 2.0})
    matching = match(checkpoint, request("into", {"a": memory[...], "b": memory[...]}))
    with pytest.raises(UsageError, match="overlap"):
        find_twins(matching, checkpoint.first_rows)
