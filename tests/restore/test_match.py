"""Matching alone: what goes where, and everything that does not fit in one error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncckpt.errors import DtypeMismatchError, MismatchError, TreeMismatchError, UsageError
from asyncckpt.restore.match import LeafRestore, match
from asyncckpt.restore.request import enclosing
from tests.restore.loader import Loader
from tests.restore.opened import LOCATION, opened, request

TREE = {"w": np.ones((2, 3)), "n": 5, "deep": {"v": np.zeros(4, np.int32), "s": "x"}}


def found(leaves: Any) -> list[tuple[int, str, int, int, Any]]:
    return [(leaf.number, leaf.path, leaf.saved, leaf.array, leaf.scalar) for leaf in leaves]


def test_without_a_target_every_saved_leaf_is_restored() -> None:
    matching = match(opened(TREE), request("saved"))
    assert found(matching.leaves) == [
        (0, "w", 0, 0, None),
        (2, "deep/v", 2, 1, None),
        (1, "n", 1, -1, 5),
        (3, "deep/s", 3, -1, "x"),
    ]
    assert len(matching.arrays) == 2
    assert (matching.wanted, matching.matched, matching.missing, matching.unexpected) == (
        (4, 4, (), ())
    )
    some = match(opened(TREE), request("saved", include=["deep"]))
    assert [leaf.path for leaf in some.leaves] == ["deep/v", "deep/s"]


def test_included_leaves_that_the_checkpoint_lacks_are_missing() -> None:
    like = {**TREE, "deep": {**TREE["deep"], "new": 1}, "other": 2}
    with pytest.raises(TreeMismatchError, match="deep/new: the target has this leaf"):
        match(opened(TREE), request("like", like, include=["deep/**"]))
    loose = match(opened(TREE), request("like", like, include=["deep"], strict=False))
    assert (loose.missing, loose.unexpected) == (["deep/new"], [])
    assert (loose.wanted, loose.matched) == (3, 2)
    kept = match(opened(TREE), request("like", like, include=["deep/v", "w"]))
    assert (kept.missing, kept.wanted, kept.matched) == ([], 2, 2)


def test_included_objects_that_the_checkpoint_lacks_are_missing() -> None:
    target = {"w": np.zeros((2, 3)), "o": Loader(a=0), "empty": Loader()}
    with pytest.raises(TreeMismatchError, match="o: the target has an object with a state dict"):
        match(opened(TREE), request("into", target, include=["*"]))
    loose = match(opened(TREE), request("into", target, include=["*"], strict=False))
    assert loose.missing == ["o", "empty"]
    assert match(opened(TREE), request("into", target, include=["w"])).missing == []


def test_leaves_are_matched_by_path_whatever_their_order() -> None:
    like = {"deep": {"s": "", "v": np.ones(4, np.int32)}, "n": 0, "w": np.zeros((2, 3))}
    matching = match(opened(TREE), request("like", like))
    assert found(matching.leaves) == [
        (1, "deep/v", 2, 1, None),
        (3, "w", 0, 0, None),
        (0, "deep/s", 3, -1, "x"),
        (2, "n", 1, -1, 5),
    ]
    assert all(leaf.want is not None and leaf.want.path == leaf.path for leaf in matching.leaves)


def test_descriptions_of_leaves_are_frozen() -> None:
    (leaf, *_) = match(opened(TREE), request("saved")).leaves
    with pytest.raises(AttributeError):
        leaf.scalar = 1  # type: ignore[misc]
    assert leaf == LeafRestore(0, "w", 0, 0, (), opened(TREE).storages[0].spec)


def test_a_scalar_goes_into_a_rank_0_array_of_the_targets_dtype() -> None:
    (leaf,) = match(opened({"n": 5}), request("like", {"n": np.zeros((), np.int16)})).leaves
    assert leaf.spec is None and leaf.scalar.dtype == np.int16 and leaf.scalar == 5
    with pytest.raises(DtypeMismatchError, match="n: 500 of the checkpoint does not fit into int8"):
        match(opened({"n": 500}), request("like", {"n": np.zeros((), np.int8)}))


@pytest.mark.parametrize(
    ("value", "like", "found"),
    [(0, math.inf, 0.0), (2.0, 1, 2), (True, 0, 1), (3, 1j, 3 + 0j), (1.5, 1, None), (2, "", None),
     (math.inf, 1, None), (math.nan, 1, None), (1j, 1.0, None), (2**70, 0.5, float(2**70))],
)  # fmt: skip
def test_casts_give_a_number_of_another_kind_if_it_is_equal(
    value: Any, like: Any, found: Any
) -> None:
    with pytest.raises(DtypeMismatchError, match=r"n: the checkpoint holds .* the target wants"):
        match(opened({"n": value}), request("like", {"n": like}))
    if found is None:
        with pytest.raises(DtypeMismatchError, match="the target wants"):
            match(opened({"n": value}), request("like", {"n": like}, cast=True))
        return
    (leaf,) = match(opened({"n": value}), request("like", {"n": like}, cast=True)).leaves
    assert (type(leaf.scalar), leaf.scalar) == (type(found), found)
    array = np.asarray(found)
    (leaf,) = match(opened({"n": value}), request("like", {"n": array}, cast=True)).leaves
    assert (leaf.scalar.dtype, leaf.scalar) == (array.dtype, found)


def test_everything_that_does_not_fit_is_in_one_error() -> None:
    like = {"w": np.zeros((2, 3), "f4"), "n": "text", "deep": {"v": np.zeros(5, "i4")}, "new": 1}
    with pytest.raises(MismatchError) as caught:
        match(opened(TREE), request("like", like))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{LOCATION}: 5 leaves do not fit the target; nothing was read.")
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "w", "n", "deep/v", "new", "deep/s",
    ]  # fmt: skip


def test_immutable_leaves_know_what_holds_them() -> None:
    target = {"w": np.zeros((2, 3)), "n": 0, "deep": {"v": np.zeros(4, np.int32), "s": ""}}
    leaves = match(opened(TREE), request("into", target)).leaves
    holders = {leaf.path: leaf.want.holder for leaf in leaves if leaf.want is not None}
    assert holders["w"] is holders["deep/v"] is None
    assert holders["n"] == (target, "n", False)
    assert holders["deep/s"] == (target["deep"], "s", False)


def test_what_an_objects_present_state_lacks_is_given_to_it() -> None:
    tree = {"o": {"lr": 1, "moment": np.ones(2)}, "w": np.ones(1)}
    target = {"o": Loader(lr=0.5), "w": np.zeros(1)}
    leaves = match(opened(tree), request("into", target)).leaves
    # A rate of another type is given as it was saved, and so is what is not there yet.
    assert [(leaf.path, leaf.want is None) for leaf in leaves] == [
        ("w", False),
        ("o/moment", True),
        ("o/lr", True),
    ]


def test_an_object_is_missing_where_the_checkpoint_has_neither_leaf_nor_container() -> None:
    tree = {"a": 1, "b": {}, "c": [2], "d": {"x": 1}, "e": None}
    target = {key: Loader(x=1) for key in "abcdef"}
    with pytest.raises(TreeMismatchError, match=r"^f: the target has an object with a state dict"):
        match(opened(tree), request("into", target))
    lenient = match(opened(tree), request("into", target, strict=False))
    assert lenient.missing == ["f"]


def test_include_may_not_take_a_part_of_an_objects_state() -> None:
    tree = {"o": {"a": 1, "b": 2}}
    with pytest.raises(UsageError, match=r"o: include='o/a' selects 1 of the 2 leaves"):
        match(opened(tree), request("into", {"o": Loader(a=0, b=0)}, include=["o/a"]))


def test_enclosing_paths_are_found_by_parts() -> None:
    assert enclosing("a/b/c", {"a/b"}) == "a/b"
    assert enclosing("a/b", {"a/b"}) == "a/b"
    assert enclosing("a/bc", {"a/b"}) is None
    assert enclosing("a", {""}) == enclosing("", {""}) == ""
    assert enclosing("", {"a"}) is None
