"""Flax, optax and equinox go on in a new process where they were, bit by bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import asyncckpt
from asyncckpt import blocking
from tests.states import jax_runs
from tests.states.resuming import Outcome, interrupted, uninterrupted


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return interrupted(jax_runs.__name__, jax_runs.RUNS, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", jax_runs.RUNS)
def test_a_run_resumed_in_a_new_process_is_the_one_that_never_stopped(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    expected = uninterrupted(jax_runs.RUNS[name])
    assert len(set(expected.losses)) > 1
    assert outcomes[name].losses == expected.losses
    assert outcomes[name].leaves == expected.leaves


def paths(location: Path) -> set[str]:
    return {leaf.path for leaf in blocking.inspect(location).leaves}


def test_every_variable_of_an_nnx_module_is_saved(tmp_path: Path) -> None:
    model, optimizer = jax_runs.nnx_fresh(0)
    tree = {"model": model, "opt": optimizer}
    report = blocking.save(tmp_path / "modules", tree)
    assert report.leaf_count == len(jax.tree.leaves(nnx.state((model, optimizer))))
    assert {"model/middle/1/kernel/value", "model/heads/labels/bias/value"} <= paths(
        tmp_path / "modules"
    )


@nnx.dataclass
class Block(nnx.Module):
    """A module that is a dataclass too, and has more state than its fields."""

    inner: nnx.Linear

    def __post_init__(self) -> None:
        self.extra = nnx.Param(jnp.arange(3.0))


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Moments:
    """A dataclass registered without names, one of whose children is no field."""

    mean: jax.Array
    label: str = "a"

    def __post_init__(self) -> None:
        self.count = jnp.zeros(())

    def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], str]:
        return (self.mean, self.count), self.label

    @classmethod
    def tree_unflatten(cls, label: str, children: Any) -> Moments:
        made = cls(children[0], label)
        made.count = children[1]
        return made


def test_a_registered_dataclass_is_saved_by_what_it_is_registered_as(tmp_path: Path) -> None:
    def tree(fill: float) -> dict[str, Any]:
        block = Block(nnx.Linear(2, 2, rngs=nnx.Rngs(int(fill))))
        block.extra[...] = jnp.full(3, fill)
        moments = Moments(jnp.full(2, fill))
        moments.count = jnp.float32(fill)
        return {"block": block, "moments": moments}

    blocking.save(tmp_path / "x", tree(3.0))
    restored = blocking.restore(tmp_path / "x", like=tree(4.0))
    expected = jax_runs.leaves(tree(3.0))
    assert len(expected) == 5
    found = jax_runs.leaves(restored)
    assert {path: jax_runs.content(leaf) for path, leaf in found.items()} == {
        path: jax_runs.content(leaf) for path, leaf in expected.items()
    }


def test_functions_in_an_equinox_module_are_named_and_filtered_ones_come_from_like(
    tmp_path: Path,
) -> None:
    model, _ = jax_runs.classifier(0)
    with pytest.raises(asyncckpt.UnsupportedLeafError, match=r"mlp/activation: .*code is not"):
        blocking.save(tmp_path / "whole", model)
    arrays = eqx.filter(model, eqx.is_array)
    blocking.save(tmp_path / "arrays", arrays)
    assert not any("name" in path or "clip" in path for path in paths(tmp_path / "arrays"))
    fresh = eqx.filter(jax_runs.classifier(1)[0], eqx.is_array)
    restored = blocking.restore(tmp_path / "arrays", like=fresh)
    assert isinstance(restored, jax_runs.Classifier)
    assert restored.name == "classifier"
    assert eqx.tree_equal(restored, arrays)
