"""PyTorch goes on in a new process where it was, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt import blocking
from tests.states import torch_runs
from tests.states.resuming import Outcome, interrupted, uninterrupted


@pytest.fixture(autouse=True, scope="module")
def _global_generators() -> Iterator[None]:
    """The runs seed and use the generators of the whole process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return interrupted(torch_runs.__name__, torch_runs.RUNS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", torch_runs.RUNS)
def test_a_run_resumed_in_a_new_process_is_the_one_that_never_stopped(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    expected = uninterrupted(torch_runs.RUNS[name])
    assert len(set(expected.losses)) > 1
    assert outcomes[name].losses == expected.losses
    assert outcomes[name].leaves == expected.leaves


def test_objects_that_include_leaves_out_keep_their_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = {"model": torch.nn.Linear(3, 2), "other": torch.nn.Linear(3, 2)}
    blocking.save(tmp_path / "x", saved)
    target = {"model": torch.nn.Linear(3, 2), "other": torch.nn.Linear(3, 2)}
    kept = target["other"].weight.clone()
    blocking.restore_into(tmp_path / "x", target, include="model")
    assert torch.equal(target["model"].weight, saved["model"].weight)
    assert torch.equal(target["other"].weight, kept)


class Holder:
    """An object whose state dict holds anything."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_dict_takes_scalars_of_another_type_than_it_has(tmp_path: Path) -> None:
    """A learning rate of 1 may have become 0.5, then a tensor, and a best loss is None at first."""
    saved = Holder(lr=0.5, best=0.1, rate=torch.tensor(2.0), patience=3, name="a")
    blocking.save(tmp_path / "x", {"sched": saved})
    fresh = Holder(lr=1, best=None, rate=1, patience=0.0, name=None)
    blocking.restore_into(tmp_path / "x", {"sched": fresh})
    assert fresh.state == saved.state
    assert {name: type(value) for name, value in fresh.state.items()} == {
        name: type(value) for name, value in saved.state.items()
    }
