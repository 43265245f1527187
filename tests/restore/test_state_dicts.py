"""What a checkpoint does not keep of a state dict: kinds of containers, keys, empty containers."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from asyncckpt.format.foreign.foreign_tree import nest
from asyncckpt.restore.state_dicts import with_present_classes, with_present_keys


def through_dcp(state: dict[str, Any]) -> Any:
    """What is left of a state dict after torch has flattened it and we have nested it."""
    flat, paths = flatten_state_dict(state)
    return nest([paths[key] for key in flat], list(flat.values()))


ONE = torch.ones(1)

STATES: dict[str, dict[str, Any]] = {
    "an optimizer": {
        "state": {0: {"step": ONE, "exp_avg": ONE}, 1: {"step": ONE}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "foreach": None}],
    },
    "an optimizer without state": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    "keys that are text": {"layers": {"0": ONE, "1": {"a": 1}}, "x": 2},
    "both kinds of keys": {"a": {1: ONE, "b": ONE}, "c": {"2": 1, "d": 2}},
    "empty containers": {"a": {}, "b": [ONE, {}, ONE], "c": {"d": {}, "e": 1, "f": []}},
    "lists within lists": {"a": [[ONE, {"b": {3: 1}}], [ONE]], "e": [{5: ONE}]},
    "negative keys": {"a": {-1: ONE, 0: ONE}},
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_dict_comes_back_as_it_was(what: str) -> None:
    state = STATES[what]
    assert with_present_keys(through_dcp(state), copy.deepcopy(state)) == state


@pytest.mark.parametrize("present", [{}, OrderedDict()])
def test_the_state_of_a_fresh_optimizer_has_integer_keys(present: dict[Any, Any]) -> None:
    state = STATES["an optimizer"]
    fresh = {"state": present, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    assert with_present_keys(through_dcp(state), fresh) == state


def test_more_state_than_is_present_has_keys_of_the_same_kind() -> None:
    saved = {"a": {"0": 1, "1": 2}, "b": {"0": 1, "1": 2}, "c": {"x": 1, "1": 2}}
    present = {"a": {0: 5}, "b": {"0": 5}, "c": {}}
    assert with_present_keys(saved, present) == {
        "a": {0: 1, 1: 2},
        "b": saved["b"],
        "c": saved["c"],
    }


def test_what_was_not_saved_does_not_stay() -> None:
    state = STATES["an optimizer without state"]
    present = {**STATES["an optimizer"], "other": 1}
    assert with_present_keys(through_dcp(state), present) == state


def test_an_emptied_list_of_a_class_of_its_own_stays_a_list() -> None:
    class Ring(list[int]):
        pass

    assert with_present_keys({"n": 1}, {"n": 0, "ring": Ring([1]), "seen": Counter()}) == {
        "n": 1,
        "ring": [],
        "seen": {},
    }


def test_a_state_that_is_no_dict_stays_as_it_is() -> None:
    assert with_present_keys([1, {"0": 2}], None) == [1, {"0": 2}]
    assert with_present_keys({"0": 2}, None) == {"0": 2}


def test_torch_gives_the_same_state_dict_back() -> None:
    state = STATES["an optimizer"]
    flat, paths = flatten_state_dict(state)
    assert unflatten_state_dict(flat, paths) == through_dcp(state)


def test_containers_are_of_the_kinds_that_the_present_state_dict_has() -> None:
    factory = defaultdict[str, Any](list, a=[1])
    present = {
        "milestones": Counter({4: 1}),
        "schedulers": [{"steps": Counter()}],
        "seen": factory,
        "order": OrderedDict(a=1),
        "plain": {},
    }
    saved = {
        "milestones": {4: 2, 8: 1},
        "schedulers": [{"steps": {3: 1}}, {"steps": {5: 1}}],
        "seen": {"b": [2]},
        "order": {"b": 1, "a": 2},
        "plain": {1: 2},
        "new": {3: 4},
    }
    before = copy.deepcopy(present)
    result = with_present_classes(saved, present)
    assert result == saved and present == before
    assert type(result["milestones"]) is type(result["schedulers"][0]["steps"]) is Counter
    assert type(result["seen"]) is defaultdict and result["seen"]["more"] == []
    assert type(result["order"]) is OrderedDict and list(result["order"]) == ["b", "a"]
    # What has no counterpart stays plain.
    assert type(result["schedulers"][1]["steps"]) is type(result["new"]) is dict


def test_a_list_of_a_class_of_its_own_stays_one() -> None:
    class Ring(list[int]):
        limit = 0

    present = Ring([1, 2])
    present.limit = 5
    result = with_present_classes({"ring": [7, 8, 9]}, {"ring": present})["ring"]
    assert (type(result), result, result.limit, present) == (Ring, [7, 8, 9], 5, [1, 2])
    assert with_present_classes([1, (2, 3)], [0, (5,)]) == [1, (2, 3)]


def test_attributes_of_the_present_state_dict_are_kept() -> None:
    present = torch.nn.BatchNorm1d(2).state_dict()
    result = with_present_classes(dict.fromkeys(present, 5), present)
    assert result._metadata == present._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]
    assert set(result.values()) == {5} and present["weight"].tolist() == [1, 1]


def test_a_dict_whose_items_are_attributes_gives_no_present_value() -> None:
    class Attributes(dict[str, Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.__dict__ = self

    result = with_present_classes({"lr": 0.5}, Attributes(lr=1.0, other=2))
    assert result == {"lr": 0.5} and vars(result).get("lr", 0.5) == 0.5


def test_a_dict_that_cannot_be_made_is_a_plain_one() -> None:
    class Frozen(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise TypeError("frozen")

    present = Frozen(a=1)
    result = with_present_classes({"a": 2}, present)
    assert (type(result), result, present) == (dict, {"a": 2}, {"a": 1})
