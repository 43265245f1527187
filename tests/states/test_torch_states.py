"""PyTorch goes on in a new process where it was, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

import asyncckpt
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


@pytest.mark.parametrize("kind", ["numpy", "jax", "torch"])
def test_arrays_that_a_state_dict_did_not_have_come_as_they_were_saved(
    tmp_path: Path, kind: str
) -> None:
    made = {"numpy": np.arange(3.0), "jax": jnp.arange(3), "torch": torch.arange(3)}
    saved = {"model": torch.nn.Linear(3, 2), "data": Holder(order=made[kind], more=made)}
    blocking.save(tmp_path / "x", saved)
    fresh = Holder(order=None)
    blocking.restore_into(tmp_path / "x", {"model": torch.nn.Linear(3, 2), "data": fresh})
    assert type(fresh.state["order"]) is type(made[kind])
    assert {name: type(leaf) for name, leaf in fresh.state["more"].items()} == {
        name: type(leaf) for name, leaf in made.items()
    }


@pytest.mark.parametrize("leaves", ["numpy", "jax"])
def test_a_fresh_optimizer_gets_tensors_whatever_they_were_saved_as(
    tmp_path: Path, leaves: Any
) -> None:
    state = torch_runs.small(0, torch.optim.AdamW, lambda opt: ExponentialLR(opt, 0.9))
    torch_runs.small_step(state, 0)
    blocking.save(tmp_path / "torch", state)
    elsewhere = blocking.restore(tmp_path / "torch", leaves=leaves)
    blocking.save(tmp_path / "x", elsewhere)
    fresh = torch_runs.small(1, torch.optim.AdamW, lambda opt: ExponentialLR(opt, 0.9))
    blocking.restore_into(tmp_path / "x", fresh)
    assert torch_runs.contents(fresh) == torch_runs.contents(state)


def convolution(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    return {"model": model, "opt": torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)}


def convolution_losses(state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        images = torch.linspace(-1, 1, 150).reshape(2, 3, 5, 5).sin() / (step + 1)
        loss = state["model"](images.to(memory_format=torch.channels_last)).square().mean()
        state["opt"].zero_grad()
        loss.backward()
        state["opt"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_a_fused_optimizer_goes_on_with_weights_that_are_not_contiguous(
    tmp_path: Path, used: bool, hooked: bool
) -> None:
    """Its steps take elements in the order of memory, so moments have the strides of weights."""
    saved, fresh = convolution(0), convolution(1)
    convolution_losses(saved, range(3))
    blocking.save(tmp_path / "x", saved)
    if used:
        convolution_losses(fresh, range(1))
    if hooked:  # its moments are replaced instead of filled
        fresh["opt"].register_load_state_dict_pre_hook(lambda *_: None)
    blocking.restore_into(tmp_path / "x", fresh)
    wanted = convolution_losses(saved, range(3, 6))
    assert convolution_losses(fresh, range(3, 6)) == wanted
    assert contiguous_moments(fresh) == contiguous_moments(saved)


def contiguous_moments(state: dict[str, Any]) -> list[bool]:
    moments = state["opt"].state[state["model"].weight]
    return [moments[name].is_contiguous() for name in ("exp_avg", "exp_avg_sq")]


def test_an_object_of_ones_own_takes_arrays_of_another_size_and_a_module_does_not(
    tmp_path: Path,
) -> None:
    """A replay buffer has grown since it was made; weights of another shape are an error."""
    saved = Holder(seen=np.arange(6.0).reshape(3, 2), mask=torch.ones(3, dtype=torch.bool))
    blocking.save(tmp_path / "buffer", {"buffer": saved})
    fresh = Holder(seen=np.zeros((0, 2)), mask=torch.zeros(2))
    blocking.restore_into(tmp_path / "buffer", {"buffer": fresh})
    np.testing.assert_array_equal(fresh.state["seen"], saved.state["seen"])
    assert torch.equal(fresh.state["mask"], saved.state["mask"])

    blocking.save(tmp_path / "net", {"net": torch.nn.Linear(5, 3)})
    with pytest.raises(asyncckpt.ShapeMismatchError, match="net/weight"):
        blocking.restore_into(tmp_path / "net", {"net": torch.nn.Linear(5, 2)}, strict=False)
