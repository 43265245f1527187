"""Rebuilding alone: restored leaves become trees, and objects get their state."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest

from asyncckpt.adapters import adapters_for_loaded_frameworks
from asyncckpt.errors import RestoreError, RestoreWarning
from asyncckpt.reports import RestoreReport
from asyncckpt.restore.rebuild import finish_into, finish_tree, warn_of
from asyncckpt.restore.restore import RestoreOutcome
from asyncckpt.tree import PerProcess, Structure, flatten
from asyncckpt.tree.per_process import MOST_PROCESSES, TYPE_NAME
from asyncckpt.tree.structure import Node
from tests.restore.opened import LOCATION, request


class Point(NamedTuple):
    x: Any
    y: Any


class Module:
    """An object with a state dict, which may refuse one."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.state: dict[str, Any] = {"w": 0, "b": 0}
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise KeyError("w")
        self.state = dict(state)


class Holder:
    """Where an immutable leaf is, in place of a dict or list."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.container: Any = {}
        self.refuses = refuses

    def put(self, value: Any) -> None:
        if self.refuses:
            raise TypeError("read only")
        self.container["value"] = value


def outcome(tree: Any, mode: str, like: Any = None, **changed: Any) -> RestoreOutcome:
    """Return what a restore of everything in `tree` hands over."""
    flat = flatten(tree)
    arguments: dict[str, Any] = {
        "request": request(mode, like, **changed.pop("how", {})),
        "structure": flat.structure,
        "form": "asyncckpt",
        "savers": 1,
        "saved": dict(enumerate(flat.leaves)),
        "wanted": dict(enumerate(flat.leaves)),
        "replaced": [],
        "written": list,
        "report": RestoreReport(LOCATION, 1, len(flat.leaves), 0, 0, 0.0),
    }
    return RestoreOutcome(**{**arguments, **changed})


def tree_of(made: RestoreOutcome, like: Any = None) -> Any:
    flat = None if like is None else flatten(like)
    return finish_tree(flat, adapters_for_loaded_frameworks(), made)[0]


def into(made: RestoreOutcome, target: Any) -> RestoreReport:
    return finish_into(flatten(target), made)[1]


def test_without_a_target_the_saved_containers_come_back_plain() -> None:
    saved = {"p": Point(1, [2, {}]), 3: (4, None)}
    assert tree_of(outcome(saved, "saved")) == {"p": {"x": 1, "y": [2, {}]}, 3: (4, None)}


def test_with_a_target_its_containers_hold_the_leaves_and_its_own_where_none_came() -> None:
    like = Point(10, {"a": 20})
    made = outcome(like, "like", like, wanted={0: 1})
    assert tree_of(made, like) == Point(1, {"a": 20})


def test_all_values_are_a_list_of_bounded_length_whatever_the_record_claims() -> None:
    node = Node("registered", (1,), (0,), TYPE_NAME)
    made = outcome({"r": 7}, "like", structure=Structure((node,), 1), saved={0: 7}, savers=1 << 32)
    values = tree_of(made, PerProcess.all)
    assert len(values) == MOST_PROCESSES and values[:3] == [None, 7, None]


def test_what_is_no_value_per_process_is_no_list_of_them() -> None:
    """With `strict=False`, the checkpoint may have something else there."""
    made = outcome({"rng": {"a": 1}}, "like", how={"strict": False}, saved={}, wanted={})
    assert tree_of(made, {"rng": PerProcess.all}) == {"rng": PerProcess.all}


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ((), {"a": {"b": 1, "c": 2}, "l": [3, {"d": 4}], "never": {}}),
        ((1,), {"a": {"c": 2}, "l": [3, {"d": 4}], "never": {}}),
        ((1, 2), {"l": [3, {"d": 4}], "never": {}}),
        ((4,), {"a": {"b": 1, "c": 2}, "l": [3, None], "never": {}}),
        ((3, 4), {"a": {"b": 1, "c": 2}, "never": {}}),
    ],
)
def test_of_a_part_nothing_is_left_that_was_not_asked_for(absent: Any, expected: Any) -> None:
    saved = {"a": {"b": 1, "c": 2}, "l": [3, {"d": 4}], "never": {}}
    restored = {n: leaf for n, leaf in enumerate(flatten(saved).leaves) if leaf not in absent}
    made = outcome(saved, "saved", saved=restored, how={"include": ["some"]})
    assert tree_of(made) == expected


def test_notes_become_warnings_that_name_the_callers_line() -> None:
    report = RestoreReport(LOCATION, 1, 1, 0, 0, 0.0, notes=("one thing", "another"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of(report)
    assert [str(one.message) for one in caught] == [
        f"{LOCATION}: one thing",
        f"{LOCATION}: another",
    ]
    assert {(one.category, one.filename) for one in caught} == {(RestoreWarning, __file__)}


def test_notes_become_warnings_in_code_without_a_module() -> None:
    report = RestoreReport(LOCATION, 1, 1, 0, 0, 0.0, notes=("one thing",))
    with pytest.warns(RestoreWarning, match="one thing"):
        exec("warn_of(report)", {"warn_of": warn_of, "report": report})


def test_objects_get_their_state_and_immutable_leaves_are_replaced() -> None:
    module, holder = Module(), Holder()
    made = outcome(
        {"m": {"w": 1, "b": 2}, "n": 3}, "into", {"m": module, "n": 0}, replaced=[("n", holder, 3)]
    )
    report = into(made, {"m": module, "n": 0})
    assert module.state == {"w": 1, "b": 2}
    assert holder.container == {"value": 3}
    assert report.replaced == ("n",)


@pytest.mark.parametrize("refusing", ["object", "container"])
def test_a_refusal_says_what_has_been_written(refusing: str) -> None:
    first, second = Module(), Module(refuses=refusing == "object")
    target = {"a": first, "b": second, "n": 0}
    state = {"w": 1, "b": 2}
    made = outcome(
        {"a": state, "b": state, "n": 3},
        "into",
        target,
        written=lambda: ["deep/w"],
        replaced=[("n", Holder(refuses=refusing == "container"), 3)],
    )
    with pytest.raises(RestoreError) as caught:
        into(made, target)
    error = caught.value
    if refusing == "object":
        assert str(error).startswith("b: Module.load_state_dict refused the restored state: KeyErr")
        assert error.path == "b" and error.written == ("deep/w", "a", "b")
    else:
        assert str(error).startswith("n: this dict refused the restored leaf: TypeError: read only")
        assert error.path == "n" and error.written == ("deep/w", "a", "b")
    assert error.location == LOCATION
    assert "targets have been written" in error.__notes__[0]


def test_an_object_of_which_nothing_was_asked_for_keeps_its_state() -> None:
    first, second = Module(), Module()
    target = {"a": first, "b": second}
    state = {"w": 1, "b": 2}
    made = outcome(
        {"a": state, "b": state}, "into", target, saved={0: 1, 1: 2}, how={"include": ["a"]}
    )
    into(made, target)
    assert sum(first.state.values()) == 3 and second.state == {"w": 0, "b": 0}
