"""States of real frameworks: saved, the source overwritten at once, restored in fresh objects."""

# Every save here is a `start_save` whose source is overwritten as soon as it has returned: what
# comes back must be what was there at the call.

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
import pytest
import torch
from torch import nn

from asyncckpt import blocking
from asyncckpt.reports import SaveReport


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path, of dicts, sequences and namedtuples."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        return {path: tree}
    found: dict[str, Any] = {}
    for key, child in items:
        found |= leaves(child, f"{path}/{key}")
    return found


def content(leaf: Any) -> tuple[Any, ...]:
    """What must be equal: type, dtype, shape and every bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(leaf)), *content(jax.random.key_data(leaf)))
    if isinstance(leaf, torch.Tensor):
        array = leaf.detach().contiguous().view(torch.uint8 if leaf.ndim else leaf.dtype).numpy()
        return "torch", str(leaf.dtype), tuple(leaf.shape), array.tobytes()
    if isinstance(leaf, jax.Array):
        # Not of the leaf itself: NumPy's view of it would keep its buffer from being donated.
        return ("jax", *content(np.asarray(leaf.copy())))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), repr(leaf)


def contents(tree: Any) -> dict[str, tuple[Any, ...]]:
    """`content` of every leaf."""
    return {path: content(leaf) for path, leaf in leaves(tree).items()}


def save_and_overwrite(root: Path, state: Any, overwrite: Callable[[], object]) -> SaveReport:
    """The state is step 0, and was overwritten as soon as `start_save` had returned."""
    with blocking.Checkpointer(root) as ckpt:
        pending = ckpt.start_save(0, state)
        overwrite()
        return pending.result()


# ---------------------------------------------------------------------------------------- JAX


def jax_batch(step: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng([7, step])
    return jnp.asarray(rng.normal(size=(8, 5)), jnp.float32), jnp.asarray(rng.integers(3, size=8))


def layers_of(seed: int) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "w": jax.random.normal(first, (5, 3)),
        "b": jax.random.normal(second, (3,)).astype(jnp.bfloat16),
    }


CHAIN = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(1e-2, 50), mu_dtype=jnp.bfloat16),
    optax.ema(0.9),
)


@partial(jax.jit, donate_argnums=(0, 1))
def optax_step(
    layers: dict[str, jax.Array], state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[dict[str, jax.Array], optax.OptState, jax.Array]:
    def loss_of(layers: dict[str, jax.Array]) -> jax.Array:
        logits = images @ layers["w"] + layers["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(layers)
    updates, state = CHAIN.update(gradients, state, layers)
    return optax.apply_updates(layers, updates), state, loss


def test_optax_state_of_namedtuples_returns_in_its_types_after_donation(tmp_path: Path) -> None:
    layers = layers_of(0)
    state = CHAIN.init(layers)
    for step in range(3):
        layers, state, _ = optax_step(layers, state, *jax_batch(step))
    expected = contents((layers, state))
    with blocking.Checkpointer(tmp_path) as ckpt:
        pending = ckpt.start_save(2, (layers, state))
        buffer = layers["w"].unsafe_buffer_pointer()
        layers, state, loss = optax_step(layers, state, *jax_batch(3))
        assert layers["w"].unsafe_buffer_pointer() == buffer  # written over
        pending.result()
        fresh = layers_of(1)
        like = (fresh, CHAIN.init(fresh))
        restored_layers, restored_state = ckpt.restore(like=like)
    assert contents((restored_layers, restored_state)) == expected
    assert jax.tree.structure(restored_state) == jax.tree.structure(state)
    # A step from the restored state is the step that was made from the saved one.
    *after, again = optax_step(restored_layers, restored_state, *jax_batch(3))
    assert content(again) == content(loss)
    assert contents(after) == contents([layers, state])


class Small(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return flax.linen.Dense(3)(flax.linen.relu(flax.linen.Dense(4)(x)))


def flax_state(seed: int) -> flax.training.train_state.TrainState:
    model = Small()
    parameters = model.init(jax.random.key(seed), jnp.zeros((1, 5)))["params"]
    return flax.training.train_state.TrainState.create(
        apply_fn=model.apply, params=parameters, tx=optax.sgd(0.1, momentum=0.9)
    )


@partial(jax.jit, donate_argnums=0)
def flax_step(
    state: flax.training.train_state.TrainState, images: jax.Array, labels: jax.Array
) -> flax.training.train_state.TrainState:
    def loss_of(parameters: Any) -> jax.Array:
        logits = state.apply_fn({"params": parameters}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return state.apply_gradients(grads=jax.grad(loss_of)(state.params))


@pytest.mark.parametrize("steps", [0, 2], ids=["int step", "int32 step"])
def test_flax_train_state_returns_into_a_fresh_one_whose_step_is_an_int(
    tmp_path: Path, steps: int
) -> None:
    state = flax_state(0)
    for step in range(steps):
        state = flax_step(state, *jax_batch(step))
    kept = (state.params, state.opt_state)
    expected = contents(kept)
    with blocking.Checkpointer(tmp_path) as ckpt:
        pending = ckpt.start_save(steps, state)
        state = flax_step(state, *jax_batch(steps))
        pending.result()
        fresh = flax_state(1)
        assert type(fresh.step) is int
        restored = ckpt.restore(like=fresh)
    assert type(restored) is type(fresh)
    assert type(restored.step) is int
    assert restored.step == steps
    assert restored.apply_fn == fresh.apply_fn
    assert restored.tx is fresh.tx
    assert contents((restored.params, restored.opt_state)) == expected
    after = flax_step(restored, *jax_batch(steps))
    assert contents((after.params, after.opt_state)) == contents((state.params, state.opt_state))


def test_flax_train_state_of_a_fresh_run_returns_into_one_whose_step_is_an_array(
    tmp_path: Path,
) -> None:
    blocking.save(tmp_path / "fresh", flax_state(0))
    like = flax_step(flax_state(1), *jax_batch(0))
    restored = blocking.restore(tmp_path / "fresh", like=like)
    assert content(restored.step) == content(jnp.int32(0))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys_draw_what_the_saved_ones_would_have_drawn(
    tmp_path: Path, implementation: str
) -> None:
    def state(seed: int) -> dict[str, jax.Array]:
        key = jax.random.key(seed, impl=implementation)
        return {"one": key, "many": jax.random.split(key, (2, 3)), "raw": jax.random.PRNGKey(seed)}

    saved = state(3)
    drawn = jax.random.normal(saved["one"], (4,))
    expected = contents(saved)

    def delete() -> None:
        for key in saved.values():
            key.delete()

    save_and_overwrite(tmp_path, saved, delete)
    restored = blocking.restore(tmp_path / "0", like=state(4))
    assert contents(restored) == expected
    assert contents(blocking.restore(tmp_path / "0", leaves="jax")) == expected
    assert content(jax.random.normal(restored["one"], (4,))) == content(drawn)


# -------------------------------------------------------------------------------------- PyTorch


class Network(nn.Module):
    """A module with parameters, persistent buffers, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(()))
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        logits: torch.Tensor = self.last(hidden) * self.scale
        return logits


def torch_run(seed: int, amsgrad: bool = False) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Network()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=amsgrad)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[2])
    return {"model": model, "opt": optimizer, "sched": scheduler}


def torch_steps(state: dict[str, Any], steps: range) -> None:
    for step in steps:
        rng = np.random.default_rng([7, step])
        images = torch.from_numpy(rng.normal(size=(8, 5)).astype(np.float32))
        labels = torch.from_numpy(rng.integers(3, size=8))
        state["opt"].zero_grad()
        nn.functional.cross_entropy(state["model"](images), labels).backward()
        state["opt"].step()
        state["sched"].step()


def state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() for name, value in state.items()}


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fresh_adamw_and_scheduler_go_on_where_the_saved_ones_were(
    tmp_path: Path, amsgrad: bool
) -> None:
    state = torch_run(0, amsgrad)
    torch_steps(state, range(4))
    expected = contents(state_dicts(state))
    save_and_overwrite(tmp_path, state, lambda: torch_steps(state, range(4, 8)))
    fresh = torch_run(1, amsgrad)
    report = blocking.restore_into(tmp_path / "0", fresh)
    assert report.missing == report.unexpected == ()
    assert contents(state_dicts(fresh)) == expected
    assert fresh["opt"].param_groups[0]["params"][0] is fresh["model"].first.weight
    torch_steps(fresh, range(4, 8))
    assert contents(state_dicts(fresh)) == contents(state_dicts(state))


def test_used_adamw_takes_the_saved_state_and_forgets_its_own(tmp_path: Path) -> None:
    state = torch_run(0)
    torch_steps(state, range(3))
    expected = contents(state_dicts(state))
    save_and_overwrite(tmp_path, state, lambda: torch_steps(state, range(3, 4)))
    used = torch_run(1)
    torch_steps(used, range(10, 17))
    blocking.restore_into(tmp_path / "0", used)
    assert contents(state_dicts(used)) == expected


def test_module_buffers_return_and_those_not_persistent_stay(tmp_path: Path) -> None:
    state = torch_run(0)
    torch_steps(state, range(3))
    model = state["model"]
    expected = {name: content(buffer) for name, buffer in model.state_dict().items()}
    assert content(model.norm.num_batches_tracked) == content(torch.tensor(3))

    def overwrite() -> None:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()

    save_and_overwrite(tmp_path, {"model": model}, overwrite)
    fresh = torch_run(1)["model"]
    scratch, mean = content(fresh.scratch), fresh.norm.running_mean
    blocking.restore_into(tmp_path / "0", {"model": fresh})
    assert {name: content(buffer) for name, buffer in fresh.state_dict().items()} == expected
    assert content(fresh.scratch) == scratch
    assert fresh.norm.running_mean is mean
    assert "model/scratch" not in {leaf.path for leaf in blocking.inspect(tmp_path / "0").leaves}


class Tied(nn.Module):
    """A language model's embedding and head, which are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_saved_once_and_return_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    expected = content(model.embedding.weight)
    report = save_and_overwrite(
        tmp_path, {"model": model}, lambda: nn.init.zeros_(model.head.weight)
    )
    assert report.leaf_count == 2
    assert report.array_count == 1
    assert report.nbytes == 11 * 4 * 4
    info = blocking.inspect(tmp_path / "0")
    assert info["model/head.weight"].tied_to == "model/embedding.weight"
    fresh = Tied()
    blocking.restore_into(tmp_path / "0", {"model": fresh})
    assert fresh.head.weight is fresh.embedding.weight
    assert content(fresh.head.weight) == expected
    restored = blocking.restore(tmp_path / "0", leaves="torch")["model"]
    assert restored["head.weight"].data_ptr() == restored["embedding.weight"].data_ptr()
    assert content(restored["head.weight"]) == expected


# ------------------------------------------------------------------------- random number states


def test_torch_generator_draws_what_the_saved_one_would_have_drawn(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = {"torch": generator.get_state()}
    expected = contents(state)
    drawn = torch.rand(4, generator=generator)
    save_and_overwrite(tmp_path, state, state["torch"].zero_)
    fresh = {"torch": torch.Generator().get_state()}
    blocking.restore_into(tmp_path / "0", fresh)
    assert contents(fresh) == expected
    other = torch.Generator()
    other.set_state(fresh["torch"])
    assert content(torch.rand(4, generator=other)) == content(drawn)


@pytest.mark.parametrize(
    "kind", [np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64]
)
def test_numpy_generator_draws_what_the_saved_one_would_have_drawn(
    tmp_path: Path, kind: Callable[[int], np.random.BitGenerator]
) -> None:
    rng = np.random.Generator(kind(5))
    rng.integers(10, size=3, dtype=np.int32)
    state: Any = copy.deepcopy(dict(rng.bit_generator.state))
    expected = contents(state)
    drawn: npt.NDArray[np.float64] = rng.normal(size=4)

    def overwrite() -> None:
        state["has_uint32"] = 99
        for name, value in state["state"].items():
            state["state"][name] = 0
            if isinstance(value, np.ndarray):
                value[:] = 0

    save_and_overwrite(tmp_path, {"rng": state}, overwrite)
    restored = blocking.restore(tmp_path / "0")["rng"]
    assert contents(restored) == expected
    other = np.random.Generator(kind(0))
    other.bit_generator.state = restored
    assert content(other.normal(size=4)) == content(drawn)


def test_ints_of_more_than_64_bits_return_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    state = rng.bit_generator.state["state"]
    assert max(state["state"].bit_length(), state["inc"].bit_length()) > 64
    blocking.save(tmp_path / "rng", state)
    like = np.random.default_rng(6).bit_generator.state["state"]
    assert blocking.restore(tmp_path / "rng", like=like) == state


def test_python_random_state_returns_exactly(tmp_path: Path) -> None:
    rng = random.Random(5)
    rng.random()
    state = rng.getstate()
    drawn = rng.random()
    save_and_overwrite(tmp_path, {"rng": state}, lambda: rng.seed(0))
    restored = blocking.restore(tmp_path / "0", like={"rng": random.Random(6).getstate()})["rng"]
    assert restored == state
    rng.setstate(restored)
    assert rng.random() == drawn


# ----------------------------------------------------------------------------------- parts of one


def test_include_returns_no_containers_of_what_it_leaves_out(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "foreach": None, "extra": {}}]
    tree = {"opt": {"groups": groups, "state": {}}, "best": [1.0, 2], "pair": (1, None), "n": None}
    blocking.save(tmp_path / "x", tree)

    def included(pattern: str) -> object:
        return blocking.restore(tmp_path / "x", include=pattern)

    assert included("best") == {"best": [1.0, 2], "n": None}
    assert included("opt") == {"opt": tree["opt"], "n": None}
    assert included("best/1") == {"best": [None, 2], "n": None}
    assert included("pair") == {"pair": (1, None), "n": None}
