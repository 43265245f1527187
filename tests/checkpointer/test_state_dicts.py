"""State dicts from a format that turns keys into text and leaves out empty containers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from asyncckpt.checkpointer.state_dicts import as_it_was
from asyncckpt.format.dcp import nest


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
    assert as_it_was(through_dcp(state), copy.deepcopy(state)) == state


@pytest.mark.parametrize("present", [{}, OrderedDict()])
def test_the_state_of_a_fresh_optimizer_has_integer_keys(present: dict[Any, Any]) -> None:
    state = STATES["an optimizer"]
    fresh = {"state": present, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    assert as_it_was(through_dcp(state), fresh) == state


def test_more_state_than_is_present_has_keys_of_the_same_kind() -> None:
    saved = {"a": {"0": 1, "1": 2}, "b": {"0": 1, "1": 2}, "c": {"x": 1, "1": 2}}
    present = {"a": {0: 5}, "b": {"0": 5}, "c": {}}
    assert as_it_was(saved, present) == {"a": {0: 1, 1: 2}, "b": saved["b"], "c": saved["c"]}


def test_what_was_not_saved_does_not_stay() -> None:
    state = STATES["an optimizer without state"]
    present = {**STATES["an optimizer"], "other": 1}
    assert as_it_was(through_dcp(state), present) == state


def test_a_state_that_is_no_dict_stays_as_it_is() -> None:
    assert as_it_was([1, {"0": 2}], None) == [1, {"0": 2}]
    assert as_it_was({"0": 2}, None) == {"0": 2}


def test_torch_gives_the_same_state_dict_back() -> None:
    state = STATES["an optimizer"]
    flat, paths = flatten_state_dict(state)
    assert unflatten_state_dict(flat, paths) == through_dcp(state)
