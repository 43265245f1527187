"""Training in JAX by four processes, one of which is killed during a save, and then by two.

    python examples/jax_multiprocess.py [--root DIR] [--quick]

Each process has two CPU devices. Weights and moments are sharded over a mesh of all devices, so no
process has the whole state. All processes make the same calls of a `Checkpointer`, which
coordinates them through jax.distributed. `job.py` starts the processes.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import digits
import jax
import jax.numpy as jnp
import job
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import asyncckpt

DEVICES = 2
"""CPU devices of each process."""

OPTIMIZER = optax.adam(1e-3)

State = dict[str, Any]


def initial(hidden: int) -> State:
    """Return the state before the first step."""
    layers = []
    sizes = [(64, hidden), (hidden, hidden), (hidden, 10)]
    for number, (fan_in, fan_out) in enumerate(sizes):
        weights = jax.random.normal(jax.random.key(number), (fan_in, fan_out))
        layers.append({"w": weights * (2 / fan_in) ** 0.5, "b": jnp.zeros(fan_out)})
    return {"layers": layers, "optimizer": OPTIMIZER.init(layers), "dropout": jax.random.key(3)}


def shardings(state: Any, mesh: Mesh) -> Any:
    """Return a sharding for each leaf: matrices are sharded in both dimensions, vectors in one."""
    axes = ("data", "model")
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, PartitionSpec(*axes[2 - leaf.ndim :])), state
    )


def forward(layers: Any, images: jax.Array, dropout: jax.Array | None) -> jax.Array:
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


def train_step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
    """Return the state after one step, and the loss before it."""
    dropout, used = jax.random.split(state["dropout"])

    def loss_of(layers: Any) -> jax.Array:
        logits = forward(layers, images, used)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["layers"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    layers = optax.apply_updates(state["layers"], updates)
    return {"layers": layers, "optimizer": optimizer, "dropout": dropout}, loss


class Trainer:
    """The compiled functions of a training run, on a mesh of the devices of all processes."""

    def __init__(self, hidden: int) -> None:
        devices = np.array(jax.devices()).reshape(-1, DEVICES)
        mesh = Mesh(devices, ("data", "model"))
        whole = NamedSharding(mesh, PartitionSpec())
        first = functools.partial(initial, hidden)
        spread = shardings(jax.eval_shape(first), mesh)
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        self._gather = jax.jit(lambda tree: tree, out_shardings=whole)
        self._logits = jax.jit(lambda layers, x: forward(layers, x, None), out_shardings=whole)
        self.initial = jax.jit(first, out_shardings=spread)
        # The buffers of the old state are donated: `start_save` has copied them when it returns.
        self._step = jax.jit(train_step, donate_argnums=0, out_shardings=(spread, whole))

    def step(self, state: State, batch: digits.Digits) -> tuple[State, float]:
        """Return the state after one step, and the loss before it; rows are divided by process."""
        parts = [
            jax.make_array_from_callback(rows.shape, self._rows, rows.__getitem__) for rows in batch
        ]
        state, loss = self._step(state, *parts)
        return state, float(loss)

    def sha256(self, state: State, losses: Any) -> str:
        """Return the digest of all saved values; every process gathers the whole state for it."""
        whole = self._gather({**state, "dropout": jax.random.key_data(state["dropout"])})
        return digits.sha256([jax.tree.map(np.asarray, whole), losses])

    def accuracy(self, state: State, held_out: digits.Digits) -> float:
        """Return the share of digits that the network recognizes."""
        logits = np.asarray(self._logits(state["layers"], held_out.images))
        return float((logits.argmax(1) == held_out.labels).mean())


async def train(part: job.Part) -> None:
    """Train to the last step; on return, all checkpoints are durable."""
    data, held_out = digits.load()
    trainer = Trainer(part.hidden)
    state = trainer.initial()
    losses = np.full(part.steps, np.nan)  # a local leaf: every process has the same one
    start = 0
    async with asyncckpt.Checkpointer(part.root) as ckpt:
        latest = await ckpt.latest_step()
        if latest is not None:
            saved = await ckpt.restore(like={"state": state, "losses": losses})
            state, losses = saved["state"], saved["losses"]
            start = latest + 1
            part.write(restored=latest, sha256=trainer.sha256(state, losses))
        for step in range(start, part.steps):
            state, losses[step] = trainer.step(state, data.batch(0, step))
            part.write(step=step, loss=losses[step])
            if part.saves(step):
                await ckpt.start_save(step, {"state": state, "losses": losses})
                part.write(saved=step, sha256=trainer.sha256(state, losses))
    part.write(accuracy=trainer.accuracy(state, held_out))


def run(part: job.Part) -> None:
    """Join the job of this part, and train."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(f"localhost:{part.port}", part.count, part.process)
    asyncio.run(train(part))


if __name__ == "__main__":
    sys.exit(job.main(__file__, run, "Train in JAX on four processes, then on two."))
