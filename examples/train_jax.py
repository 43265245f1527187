"""Training of a small network in JAX, with background saves and resumption.

    python examples/train_jax.py --root /tmp/digits

Run it again with more --steps, and it resumes, even after it was killed. Losses, parameters and
optimizer state equal those of an uninterrupted run, bit by bit.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax

import asyncckpt

# One thread computes every sum in one order, so that a run can be repeated bit by bit.
REPEATABLE = {"xla_cpu_multi_thread_eigen": False}

OPTIMIZER = optax.adam(optax.exponential_decay(1e-3, transition_steps=100, decay_rate=0.7))

Layers = list[dict[str, jax.Array]]


class State(NamedTuple):
    """Everything that a run needs to resume."""

    layers: Layers
    optimizer: optax.OptState
    dropout: jax.Array  # a typed PRNG key


def initial(seed: int, hidden: int) -> State:
    """Return the state before the first step."""
    rng = np.random.default_rng(seed)
    layers: Layers = []
    for fan_in, fan_out in [(64, hidden), (hidden, hidden), (hidden, 10)]:
        weights = rng.normal(scale=(2 / fan_in) ** 0.5, size=(fan_in, fan_out))
        layers.append({"w": jnp.asarray(weights, jnp.float32), "b": jnp.zeros(fan_out)})
    return State(layers, jax.jit(OPTIMIZER.init)(layers), jax.random.key(seed))


def forward(layers: Layers, images: jax.Array, dropout: jax.Array | None) -> jax.Array:
    """Return logits; if a key is given, drop a tenth of the hidden units."""
    x = images
    for number, layer in enumerate(layers):
        x = x @ layer["w"] + layer["b"]
        if number < len(layers) - 1:
            x = jax.nn.relu(x)
            if dropout is not None:
                kept = jax.random.bernoulli(jax.random.fold_in(dropout, number), 0.9, x.shape)
                x = jnp.where(kept, x / 0.9, 0.0)
    return x


# The buffers of the old state are donated: XLA reuses them for the new one. That is safe once
# `start_save` has returned, because everything has been copied by then.
@partial(jax.jit, donate_argnums=0, compiler_options=REPEATABLE)
def train_step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    """Return the state after one step, and the loss before it."""
    dropout, used = jax.random.split(state.dropout)

    def loss_of(layers: Layers) -> jax.Array:
        logits = forward(layers, images, used)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.layers)
    updates, optimizer = OPTIMIZER.update(gradients, state.optimizer)
    return State(optax.apply_updates(state.layers, updates), optimizer, dropout), loss


@jax.jit
def accuracy(layers: Layers, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the share of digits that the network recognizes."""
    return jnp.mean(jnp.argmax(forward(layers, images, None), axis=1) == labels)


async def train(options: argparse.Namespace, log: digits.RunLog) -> None:
    """Train to the last step; on return, all checkpoints are durable."""
    data, held_out = digits.load()
    state = initial(options.seed, options.hidden)
    async with asyncckpt.Checkpointer(options.root, keep=asyncckpt.KeepLast(3)) as ckpt:
        latest = await ckpt.latest_step()
        if latest is not None:
            state = await ckpt.restore(like=state)
        start = 0 if latest is None else latest + 1
        log.start(start, options.root)
        await ckpt.prepare(state)  # allocates staging memory now, not in the first save
        pending: asyncckpt.PendingSave | None = None
        for step in range(start, options.steps):
            began = time.perf_counter()
            saving = pending is not None and not pending.done()
            # This blocks the event loop for the whole step; the save in flight does not need it.
            state, loss = jax.block_until_ready(train_step(state, *data.batch(options.seed, step)))
            ended = time.perf_counter()
            log.step(step, loss, ended - began, saving=saving)
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                began = time.perf_counter()
                pending = await ckpt.start_save(step, state, metrics={"loss": float(loss)})
                log.save(step, loss, time.perf_counter() - began)
    last = max(start, options.steps) - 1
    kept: Any = jax.tree.map(jax.device_get, (state.layers, state.optimizer))
    log.end(last, float(accuracy(state.layers, *held_out)), *kept)


if __name__ == "__main__":
    arguments = digits.arguments("Train on the digits of scikit-learn with JAX.", hidden=512)
    with digits.RunLog(arguments.log) as run_log:
        asyncio.run(train(arguments, run_log))
