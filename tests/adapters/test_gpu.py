"""Whole saves and restores of states on a real GPU; skipped where there is none."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncckpt import LeafOptions, SaveOptions, blocking
from asyncckpt.adapters.jax import JaxAdapter
from asyncckpt.spec import ArraySpec, Box
from benchmarks.measure import resident_nbytes
from tests.adapters.fetching import fetch_box

pytestmark = pytest.mark.gpu

with_torch = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
with_jax = pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a GPU")


def options(**more: Any) -> SaveOptions:
    def of_leaf(path: str, _: ArraySpec) -> LeafOptions | None:
        if path == "cast":
            return LeafOptions(dtype="bfloat16")
        return LeafOptions(chunk_shape=(2, 300)) if path == "padded" else None

    return SaveOptions(leaf_options=of_leaf, **more)


def noise(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "long": noise(3, 5_000_001),  # spans windows, and is cut inside elements
        "odd": noise(777, 333) > 0,
        "cast": noise(500, 400),
        "padded": noise(5, 700),
        "small": noise(3, 5),
        "scalar": noise(1)[0] + np.zeros((), np.float32),
        "empty": noise(0, 3),
    }


@with_torch
@pytest.mark.parametrize("snapshot", ["copy", "reference"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_state_of_torch_round_trips(tmp_path: Path, compression: Any, snapshot: Any) -> None:
    made = {name: torch.from_numpy(np.array(array)).cuda() for name, array in arrays().items()}
    made["turned"] = torch.from_numpy(noise(300, 200)).cuda().T
    made["every other"] = torch.from_numpy(noise(600, 100)).cuda()[::2]
    expected = {name: leaf.cpu() for name, leaf in made.items()}
    expected["cast"] = expected["cast"].bfloat16().float()
    saving = options(compression=compression, snapshot=snapshot)
    with blocking.Checkpointer(tmp_path, save_options=saving) as ckpt:
        for step in range(3):
            pending = ckpt.start_save(step, made)
            for leaf in made.values():
                leaf.zero_()  # on the default stream, right after
            pending.result()
            ckpt.restore_into(made, cast=True)
            for name, leaf in made.items():
                assert torch.equal(leaf.cpu(), expected[name]), name
        like = ckpt.restore(like=made, cast=True)
        for name, leaf in like.items():
            assert leaf.is_cuda and torch.equal(leaf.cpu(), expected[name]), name
    assert blocking.verify(tmp_path / "2").ok


@with_torch
def test_sharded_parameters_round_trip(tmp_path: Path) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 40)).cuda()
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.rand(8, 700, device="cuda")).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        wanted = [one.full_tensor().cpu() for one in model.parameters()]
        with blocking.Checkpointer(tmp_path, coordinator="single") as ckpt:
            ckpt.save(1, state)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            ckpt.restore_into(state)
        found = [one.full_tensor().cpu() for one in model.parameters()]
        assert all(map(torch.equal, found, wanted))
    finally:
        dist.destroy_process_group()


@with_jax
@pytest.mark.parametrize("budget_nbytes", [64 << 20, 1 << 30])  # it streams, or is moved at once
@pytest.mark.parametrize("reference", [False, True])
def test_a_state_of_jax_round_trips_and_may_be_donated_at_once(
    tmp_path: Path, reference: bool, budget_nbytes: int
) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state: dict[str, Any] = {name: jnp.asarray(array) for name, array in arrays().items()}
    state["sharded"] = jax.device_put(noise(64, 900), where)
    state["packed"] = jnp.arange(12, dtype=jnp.int4)
    state["half"] = jnp.asarray(noise(300, 7), jnp.bfloat16)
    state["key"] = jax.random.split(jax.random.key(5), 4)
    expected = {name: np.array(_data(leaf)) for name, leaf in state.items()}
    expected["cast"] = np.asarray(jnp.asarray(expected["cast"], jnp.bfloat16), np.float32)
    donated = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    snapshot = "reference" if reference else "copy"
    saving = options(snapshot=snapshot, host_memory_nbytes=budget_nbytes)
    with blocking.Checkpointer(tmp_path, save_options=saving) as ckpt:
        pending = ckpt.start_save(1, state)
        if not reference:
            donated({name: leaf for name, leaf in state.items() if name != "key"})
        pending.result()
        restored = ckpt.restore(like=state, cast=True)
    for name, leaf in restored.items():
        np.testing.assert_array_equal(np.asarray(_data(leaf)), expected[name], err_msg=name)
        assert leaf.sharding == state[name].sharding
    assert blocking.verify(tmp_path / "1").ok


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@with_jax
def test_no_host_copy_stays_on_an_array_that_was_fetched() -> None:
    nbytes = 64 << 20
    leaves = [jnp.zeros(nbytes, jnp.uint8) + number for number in range(4)]
    out, adapter = np.zeros(nbytes, np.uint8), JaxAdapter()
    fetch_box(adapter, adapter.source("p", leaves[0]), Box.whole((nbytes,)), out)
    gc.collect()
    before = resident_nbytes()
    for number, leaf in enumerate(leaves):
        fetch_box(adapter, adapter.source("p", leaf), Box.whole((nbytes,)), out)
        assert (out == number).all()
    gc.collect()
    assert resident_nbytes() - before < 2 * nbytes
