"""What processes of a JAX job do in tests: train states on meshes over all of them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import asyncckpt
from asyncckpt import Checkpointer, SaveOptions
from tests.processes.values import Array, array, same, shuffled
from tests.processes.worker import Worker

SHARDED: dict[str, tuple[tuple[int, ...], str, P]] = {
    "rows": ((64, 6), "bfloat16", P("x")),
    "columns": ((5, 64), "float32", P(None, "y")),
    "tiles": ((64, 48), "float32", P("x", "y")),
    "turned": ((512, 1024), "float32", P("y", "x")),
    "both": ((16, 3), "int32", P(("x", "y"))),
    "replicated": ((33, 7), "float32", P()),
    "large": ((300, 2001), "float32", P()),
    "empty": ((0, 4), "float32", P("x")),
}
"""Shape, dtype and spec of every leaf over the mesh."""


class Adam(NamedTuple):
    """State of an optimizer: local counts beside sharded moments."""

    count: Any
    mu: Any
    nu: Any


def mesh(kind: str) -> Mesh:
    """A mesh over all processes, or over this one's devices."""
    if kind == "local":
        return Mesh(np.array(jax.local_devices()).reshape(1, -1), ("x", "y"))
    devices = np.array(jax.devices()).reshape(2, -1)
    match kind:
        case "turned":
            devices = devices.T
        case "flat":
            devices = devices.reshape(-1, 1)
    return Mesh(devices, ("x", "y"))


def spread(data: Array, where: NamedSharding) -> jax.Array:
    """The global array; each process puts its own shards on its devices."""
    return jax.make_array_from_callback(
        data.shape, where, lambda index: data[index], dtype=data.dtype
    )


def expected(prefix: str, seed: int) -> dict[str, Array]:
    """The values of the sharded leaves."""
    return {
        name: array(f"{prefix}/{name}", shape, dtype, seed=seed)
        for name, (shape, dtype, _) in SHARDED.items()
    }


def sharded(prefix: str, where: Mesh, seed: int) -> dict[str, jax.Array]:
    """The sharded leaves on a mesh."""
    return {
        name: spread(data, NamedSharding(where, SHARDED[name][2]))
        for name, data in expected(prefix, seed).items()
    }


def on_one(kind: str, seed: int) -> jax.Array:
    """An array on the devices of one process, which the other sees and holds nothing of."""
    process = {"mesh": 0, "local": jax.process_index()}.get(kind, 1)
    devices = [device for device in jax.devices() if device.process_index == process]
    data = array("stage", (6, 1000), seed=seed)
    return spread(data, NamedSharding(Mesh(np.array(devices), ("x",)), P("x")))


def state(worker: Worker, kind: str, seed: int) -> dict[str, Any]:
    """A train state with leaves of every kind, in an order of this process's own."""
    where = mesh(kind)
    count = jnp.asarray(seed, jnp.int32)
    tree = {
        "params": sharded("params", where, seed),
        "stage": on_one(kind, seed),
        "opt": (Adam(count, sharded("mu", where, seed), sharded("nu", where, seed)), None),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.PRNGKey(seed), 3),
        "ema": jnp.arange(5.0) + seed,
        "seen": array("seen", (1000,), "int64", seed=seed),
        "step": 100 + seed,
        "lr": 0.1 / (seed + 1),
        "run": "llama",
        "done": bool(seed % 2),
    }
    return shuffled(worker, tree)  # type: ignore[no-any-return]


def wrong(tree: Any, kind: str, seed: int, worker: Worker) -> list[str]:
    """Paths of the leaves that have not the values, types or shardings of `state`."""
    wanted = state(worker, kind, seed)
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    target = jax.tree_util.tree_flatten_with_path(wanted)[0]
    assert [path for path, _ in found] == [path for path, _ in target]
    return [
        jax.tree_util.keystr(path)
        for (path, leaf), (_, other) in zip(found, target, strict=True)
        if not equal(leaf, other)
    ]


def equal(leaf: Any, other: Any) -> bool:
    """Whether two leaves have the same type, sharding and bits on the devices of this process."""
    if not isinstance(other, jax.Array):
        return same(leaf, other)
    if type(leaf) is not type(other) or leaf.dtype != other.dtype or leaf.shape != other.shape:
        return False
    if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
        return equal(jax.random.key_data(leaf), jax.random.key_data(other))
    if leaf.sharding != other.sharding or leaf.committed != other.committed:
        return False
    pairs = zip(leaf.addressable_shards, other.addressable_shards, strict=True)
    return all(
        a.index == b.index and same(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs
    )


# --------------------------------------------------------------------------------------- calls


async def save_twice(worker: Worker, root: str) -> list[tuple[str, bool, int, int]]:
    """Save two states; what the reports say."""
    told = []
    async with Checkpointer(root) as ckpt:
        for seed in (1, 2):
            report = await ckpt.save(seed, state(worker, "mesh", seed))
            told.append((report.save_id, report.plan_cached, report.nbytes, report.stored_nbytes))
        assert await ckpt.latest_step() == 2
    return told


async def restore(
    worker: Worker, root: str, step: int, kind: str, coordinator: str = "auto"
) -> list[str]:
    """Restore as another state on a mesh; the paths of wrong leaves."""
    like = state(worker, kind, 9)
    async with Checkpointer(root, coordinator=coordinator) as ckpt:
        tree = await ckpt.restore(step, like=like)
    return wrong(tree, kind, step, worker)


async def restore_abstract(worker: Worker, root: str, step: int, kind: str) -> list[str]:
    """Restore onto `jax.ShapeDtypeStruct`s."""

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    like = jax.tree.map(abstract, state(worker, kind, 9))
    tree = await asyncckpt.restore(f"{root}/{step}", like=like)
    found = tree["params"]
    data = sharded("params", mesh(kind), step)
    return [name for name in data if not equal(found[name], data[name])]


async def save_alone(worker: Worker, root: str, seed: int) -> None:
    """Save the state of this process's devices, without the others."""
    async with Checkpointer(root, coordinator="single") as ckpt:
        await ckpt.save(seed, state(worker, "local", seed))


@functools.partial(jax.jit, donate_argnums=0)
def advanced(tree: Any) -> Any:
    """A step of training that reuses the memory of what it gets."""
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), tree)


async def save_and_donate(worker: Worker, root: str) -> list[str]:
    """Start saves, and donate what is saved before they have ended."""
    tree = {"params": sharded("params", mesh("mesh"), 0), "count": jnp.zeros((), jnp.int32)}
    tree["host"] = array("host", (100_000,))
    names = [name for name in tree["params"] if name != "empty"]
    async with Checkpointer(root) as ckpt:
        pending = []
        for step in range(3):
            pending.append(await ckpt.start_save(step, tree))
            donated = tree["params"]
            tree["params"] = advanced(donated)
            tree["count"] = tree["count"] + 1
            tree["host"] += 1
            assert all(donated[name].is_deleted() for name in names)
        for save in pending:
            await save
        back = await ckpt.restore(2, like=tree)
    params = sharded("params", mesh("mesh"), 0)
    for _ in range(2):
        params = advanced(params)
    bad = [name for name in params if not equal(back["params"][name], params[name])]
    if int(back["count"]) != 2:
        bad.append("count")
    if not same(back["host"], array("host", (100_000,)) + np.float32(1) + np.float32(1)):
        bad.append("host")
    return bad


async def restore_what_was_donated(worker: Worker, root: str) -> list[tuple[bool, bool]]:
    """Fill a tree whose arrays are donated or abstract, and one of which is on one process."""
    tree = {"stage": on_one("mesh", 1), "params": sharded("params", mesh("mesh"), 1)["rows"]}
    where = tree["stage"].sharding
    async with Checkpointer(root) as ckpt:
        await ckpt.save(1, tree)
        abstract = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in tree.items()
        }
        for leaf in tree.values():
            leaf.delete()
        for target in (tree, abstract):
            report = await ckpt.restore_into(target, step=1)
            assert sorted(report.replaced) == ["params", "stage"]
    return [
        (leaf.sharding == where, equal(leaf, on_one("mesh", 1)))
        for leaf in (tree["stage"], abstract["stage"])
    ]


async def save_same_but_for(worker: Worker, root: str) -> Any:
    """Save trees that are not the same; JAX's trees are the same on all processes."""
    tree = {"params": sharded("params", mesh("mesh"), 0), "step": 1}
    if worker.index == 1:
        tree["more"] = jnp.ones(3)
    async with Checkpointer(root, save_options=SaveOptions(arrival_s=10)) as ckpt:
        await ckpt.save(1, tree)
