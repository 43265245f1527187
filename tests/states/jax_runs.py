"""Training runs of flax, optax and equinox whose whole state is a tree of JAX arrays."""

# The buffers of a state are donated to the next step, so that XLA writes over them.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

from asyncckpt import blocking
from tests.states.resuming import Run, batch

# Compiled in a third of the time: what is compared is one compiled step with itself.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
jit = partial(jax.jit, donate_argnums=0, compiler_options=QUICKLY)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def content(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(leaf)), *content(jax.random.key_data(leaf)))
    if isinstance(leaf, jax.Array):
        return "jax", str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf).__name__, repr(leaf)


def leaves(state: Any) -> dict[str, Any]:
    entries = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in entries}


def resume(ckpt: blocking.Checkpointer, step: int, fresh: Any) -> Any:
    return ckpt.restore(step, like=fresh)


def run(fresh: Callable[[int], Any], step: Callable[[Any, Any, Any], Any]) -> Run:
    return Run(fresh, lambda state, n: step(state, *batch(n)), leaves, content, resume)


# ------------------------------------------------------------------------------------ flax linen


class Dense(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flax.linen.BatchNorm(use_running_average=False)(flax.linen.Dense(4)(x))
        x = flax.linen.Dropout(0.3, deterministic=False)(flax.linen.relu(x))
        return flax.linen.Dense(3, param_dtype=jnp.bfloat16)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    dropout: jax.Array


DENSE = Dense()
linen_init = jax.jit(DENSE.init, compiler_options=QUICKLY)
LINEN_OPTIMIZER = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 5))


def linen_fresh(seed: int) -> TrainState:
    init, dropout = jax.random.split(jax.random.key(seed))
    variables = linen_init({"params": init, "dropout": init}, jnp.zeros((2, 5)))
    return TrainState.create(
        apply_fn=DENSE.apply,
        params=variables["params"],
        tx=LINEN_OPTIMIZER,
        batch_stats=variables["batch_stats"],
        dropout=dropout,
    ).replace(step=jnp.int32(0))


@jit
def linen_step(state: TrainState, x: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    dropout, used = jax.random.split(state.dropout)

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(
            variables, x, mutable=["batch_stats"], rngs={"dropout": used}
        )
        return cross_entropy(logits, labels), changed["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats, dropout=dropout), loss


# -------------------------------------------------------------------------------------- flax nnx


class Network(nnx.Module):
    """Layers as attributes, in a list and in a dict; statistics and streams of random numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.middle = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)])
        self.heads = nnx.Dict({"labels": nnx.Linear(4, 3, rngs=rngs)})

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        for layer in self.middle:
            x = nnx.relu(layer(x))
        return self.heads["labels"](x)


NNX_OPTIMIZER = optax.adamw(1e-2)


def nnx_fresh(seed: int) -> tuple[Network, nnx.Optimizer[Network]]:
    model = Network(nnx.Rngs(seed, dropout=seed + 10))
    return model, nnx.Optimizer(model, NNX_OPTIMIZER, wrt=nnx.Param)


def nnx_update(
    model: Network, optimizer: nnx.Optimizer[Network], x: jax.Array, labels: jax.Array
) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(x), labels))(model)
    optimizer.update(model, grads)
    return loss


# From shapes alone: this module is imported by every process that collects tests.
GRAPH, _ = nnx.split(nnx.eval_shape(lambda: nnx_fresh(0)))


@jit
def nnx_state_step(state: nnx.State, x: jax.Array, labels: jax.Array) -> Any:
    model, optimizer = nnx.merge(GRAPH, state)
    loss = nnx_update(model, optimizer, x, labels)
    return nnx.state((model, optimizer)), loss


def nnx_module_step(state: Any, x: Any, labels: Any) -> Any:
    new, loss = nnx_state_step(nnx.state(state), x, labels)
    nnx.update(state, new)
    return state, loss


# ----------------------------------------------------------------------------------------- optax


class Layers(NamedTuple):
    first: dict[str, jax.Array]
    last: dict[str, jax.Array]


def layers(seed: int) -> Layers:
    first, last = jax.random.split(jax.random.key(seed))
    return Layers(
        {"w": jax.random.normal(first, (5, 4)), "b": jnp.zeros(4)},
        {"w": jax.random.normal(last, (4, 3)), "b": jnp.zeros(3)},
    )


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def decaying_rate() -> optax.GradientTransformation:
    """Adam whose learning rate is part of its state, where the run changes it."""
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2, b1=0.8)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(grads, state, params)
        rate = state.hyperparams["learning_rate"] * 0.9
        return updates, state._replace(hyperparams={**state.hyperparams, "learning_rate": rate})

    return optax.GradientTransformation(inner.init, update)


OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 50), mu_dtype=jnp.bfloat16),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_noise(0.01, 0.55, key=3),
        optax.scale_by_adam(),
        optax.ema(0.9),
        optax.scale_by_schedule(optax.linear_schedule(-1e-2, -1e-3, 5)),
    ),
    "multi_transform": optax.multi_transform(
        {"decayed": optax.adamw(1e-2), "plain": optax.sgd(1e-2, momentum=0.9)},
        lambda params: jax.tree.map(lambda leaf: "decayed" if leaf.ndim > 1 else "plain", params),
    ),
    "inject_hyperparams": decaying_rate(),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), is_matrix),
        optax.masked(optax.scale_by_rms(), is_matrix),
        optax.scale(-1e-2),
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2).gradient_transformation(),
}


def optax_run(optimizer: optax.GradientTransformation) -> Run:
    averaging = optax.ema(0.9)

    def fresh(seed: int) -> dict[str, Any]:
        params = layers(seed)
        return {"params": params, "opt": optimizer.init(params), "ema": averaging.init(params)}

    @jit
    def step(state: dict[str, Any], x: jax.Array, labels: jax.Array) -> Any:
        def loss_of(params: Layers) -> jax.Array:
            hidden = jax.nn.relu(x @ params.first["w"] + params.first["b"])
            return cross_entropy(hidden @ params.last["w"] + params.last["b"], labels)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        _, ema = averaging.update(params, state["ema"])
        return {"params": params, "opt": opt, "ema": ema}, loss

    return run(fresh, step)


# --------------------------------------------------------------------------------------- equinox


class Classifier(eqx.Module):
    """Arrays, functions and numbers that are no state, and statistics kept beside the module."""

    mlp: eqx.nn.MLP
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    scale: jax.Array
    name: str = eqx.field(static=True)
    clip: float = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        self.mlp = eqx.nn.MLP(5, 3, 4, 2, activation=jax.nn.gelu, key=key)
        self.norm = eqx.nn.BatchNorm(5, "batch", mode="ema")
        self.dropout = eqx.nn.Dropout(0.3)
        self.scale = jnp.ones((), jnp.bfloat16)
        self.name, self.clip = "classifier", 5.0

    def __call__(self, x: jax.Array, state: eqx.nn.State, key: jax.Array) -> Any:
        x, state = self.norm(x, state)
        logits = self.mlp(self.dropout(x, key=key)) * self.scale
        return jnp.clip(logits, -self.clip, self.clip), state


EQUINOX_OPTIMIZER = optax.adamw(1e-2)


def classifier(seed: int) -> tuple[Classifier, eqx.nn.State]:
    made: tuple[Classifier, eqx.nn.State] = eqx.nn.make_with_state(Classifier)(jax.random.key(seed))
    return made


STATIC = eqx.filter(
    eqx.filter_eval_shape(classifier, 0)[0],
    lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    inverse=True,
)


def equinox_fresh(seed: int) -> dict[str, Any]:
    model, statistics = classifier(seed)
    arrays = eqx.filter(model, eqx.is_array)
    return {
        "model": arrays,
        "statistics": statistics,
        "opt": EQUINOX_OPTIMIZER.init(arrays),
        "key": jax.random.key(seed, impl="rbg"),
    }


@jit
def equinox_step(state: dict[str, Any], x: jax.Array, labels: jax.Array) -> Any:
    key, used = jax.random.split(state["key"])
    keys = jax.random.split(used, len(x))

    def loss_of(arrays: Classifier) -> tuple[jax.Array, eqx.nn.State]:
        model = eqx.combine(arrays, STATIC)
        over_batch = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
        logits, statistics = over_batch(x, state["statistics"], keys)
        return cross_entropy(logits, labels), statistics

    (loss, statistics), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(state["model"])
    updates, opt = EQUINOX_OPTIMIZER.update(grads, state["opt"], state["model"])
    model = eqx.apply_updates(state["model"], updates)
    return {"model": model, "statistics": statistics, "opt": opt, "key": key}, loss


# ------------------------------------------------------------------------------------------ keys


def keys_fresh(seed: int) -> dict[str, jax.Array]:
    return {
        "threefry": jax.random.key(seed),
        "rbg": jax.random.key(seed, impl="rbg"),
        "many": jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), (2, 3)),
        "raw": jax.random.PRNGKey(seed),
    }


@jit
def keys_step(state: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> Any:
    drawn = jnp.zeros(())
    after = {}
    for name, key in state.items():
        one = key if name != "many" else key[0, 1]
        drawn += jax.random.normal(one)
        used = jax.random.split(one)[0]
        after[name] = used if name != "many" else key.at[0, 1].set(used)
    return after, drawn


RUNS: dict[str, Run] = {
    "TrainState": run(linen_fresh, linen_step),
    "nnx state": run(lambda seed: nnx.state(nnx_fresh(seed)), nnx_state_step),
    "nnx modules": run(nnx_fresh, nnx_module_step),
    "equinox": run(equinox_fresh, equinox_step),
    "keys": run(keys_fresh, keys_step),
    **{f"optax {name}": optax_run(optimizer) for name, optimizer in OPTIMIZERS.items()},
}
