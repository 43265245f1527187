"""Saves and restores of one `Checkpointer` share its budget: no more memory, and no deadlock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import asyncckpt
from asyncckpt import RestoreOptions, SaveOptions, ShardedArray
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import SlotPool
from asyncckpt.options import MIB, SLOT_NBYTES
from asyncckpt.restore.fetch import Fetch
from asyncckpt.runtime import Runtime
from asyncckpt.save.stage import Staging
from asyncckpt.testing.faults import Fault, Gate
from tests.script import Held, Script
from tests.watch import slot_pools

BUDGET = 64 * MIB


def noise(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


# ----------------------------------------------------------------------------- waiting for memory


@pytest.mark.parametrize("place", ["disk", "memory"])
async def test_a_background_save_and_a_restore_do_not_wait_for_each_other(
    tmp_path: Path, place: str
) -> None:
    """The restore needs more than the save leaves until it is done: then it waits, alone.

    On disk the save keeps copies of what is mutable, in memory the files that it packs.
    """
    root = f"memory://{tmp_path}" if place == "memory" else tmp_path
    packed = SaveOptions(compression="zstd", compression_level=1, target_data_file_nbytes=32 * MIB)
    old = {"w": noise(32 * MIB)}
    async with asyncckpt.Checkpointer(root, save_options=packed) as ckpt:
        await ckpt.save(1, old)
    if place == "disk":
        new = {"a": noise(30 * MIB), "b": jnp.ones(16 * MIB, jnp.float32)}
        options = SaveOptions(host_memory_nbytes=BUDGET, snapshot="reference")
    else:
        new = {"a": noise(64 * MIB)}
        options = SaveOptions(
            host_memory_nbytes=BUDGET, compression="zstd", compression_level=1, concurrency=4
        )
    async with asyncio.timeout(30), asyncckpt.Checkpointer(root, save_options=options) as ckpt:
        script = Script(ckpt)
        gate = Gate()
        script.store.script.append(Fault("write", 0, gate=gate))
        budget = ckpt._session.runtime.budget
        saving = asyncio.create_task(ckpt.save(2, new))
        await until(lambda: budget.kept > 0 and budget.waiting > 0)
        restoring = asyncio.create_task(ckpt.restore(1))
        await until(lambda: budget.waiting > 1)
        Held(ckpt._session, gate).go()
        await saving
        np.testing.assert_array_equal((await restoring)["w"], old["w"])
        assert (budget.in_use, budget.kept, budget.waiting) == (0, 0, 0)


# ----------------------------------------------------------------------------- memory in use


class Watch:
    """Slots in use and idle in the pools of one checkpointer, at any moment."""

    def __init__(self, ckpt: asyncckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime: Runtime = ckpt._session.runtime
        self.looks = 0
        self.most_nbytes = 0
        self.elsewhere_nbytes = 0
        self._asking = 0
        acquire = ByteBudget.acquire

        async def asked(budget: ByteBudget, *args: Any, **kwargs: Any) -> None:
            self._asking += 1
            try:
                await acquire(budget, *args, **kwargs)
            finally:
                self._asking -= 1

        monkeypatch.setattr(ByteBudget, "acquire", asked)

    def look(self) -> None:
        """Not while granted slots may not have been taken yet."""
        if self._asking:
            return
        pools = slot_pools(self.runtime.budget)
        idle = sum(len(pool._free) * pool.slot_nbytes for pool in pools)
        idle += self.runtime.recycled.idle_nbytes
        lent = sum((pool._allocated - len(pool._free)) * pool.held_nbytes for pool in pools)
        in_use = self.runtime.budget.in_use
        self.looks += 1
        self.elsewhere_nbytes = max(self.elsewhere_nbytes, in_use - lent)
        self.most_nbytes = max(self.most_nbytes, in_use + idle)


@pytest.mark.parametrize(("compression", "nbytes"), [(None, 48 * MIB), ("zstd", 24 * MIB)])
async def test_idle_windows_of_a_save_make_way_for_what_a_restore_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Any, nbytes: int
) -> None:
    root = f"memory://{tmp_path}"
    large = SaveOptions(
        compression=compression,
        compression_level=1,
        target_data_file_nbytes=64 * MIB,
        leaf_options=lambda _, spec: asyncckpt.LeafOptions(chunk_shape=spec.shape),
    )
    state = {"a": noise(nbytes)}
    async with asyncckpt.Checkpointer(root, save_options=large) as ckpt:
        await ckpt.save(1, state)
    options = SaveOptions(host_memory_nbytes=BUDGET)
    async with asyncio.timeout(30), asyncckpt.Checkpointer(root, save_options=options) as ckpt:
        await (await ckpt.start_save(2, {"b": noise(32 * MIB)}))
        pools = slot_pools(ckpt._session.runtime.budget)
        assert sum(pool.allocated_nbytes for pool in pools) >= BUDGET // 2
        watch = Watch(ckpt, monkeypatch)
        read = Fetch._read

        async def looked_at(fetch: Fetch, *args: Any) -> None:
            watch.look()
            await read(fetch, *args)

        monkeypatch.setattr(Fetch, "_read", looked_at)
        target = {"a": np.zeros(nbytes, np.uint8)}
        await ckpt.restore_into(target, step=1, options=RestoreOptions(concurrency=1))
    np.testing.assert_array_equal(target["a"], state["a"])
    assert watch.looks and watch.elsewhere_nbytes >= 24 * MIB
    assert watch.most_nbytes <= BUDGET


async def test_idle_slots_of_a_save_make_way_for_the_copies_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SaveOptions(host_memory_nbytes=BUDGET)
    async with asyncio.timeout(30), asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        await (await ckpt.start_save(1, {"a": np.zeros(BUDGET, np.uint8)}))
        assert ckpt._session.runtime.pool.allocated_nbytes == BUDGET
        watch = Watch(ckpt, monkeypatch)
        copy = Staging._copy_mutable

        def looked_at(staging: Staging, *args: Any) -> None:
            watch.look()
            copy(staging, *args)

        monkeypatch.setattr(Staging, "_copy_mutable", looked_at)
        own = SaveOptions(snapshot="reference")
        await (await ckpt.start_save(2, {"a": np.zeros(24 * MIB, np.uint8)}, options=own))
    assert (watch.looks, watch.elsewhere_nbytes) == (1, 24 * MIB)
    assert watch.most_nbytes <= BUDGET


async def test_one_budget_serves_pools_that_are_made_anew(tmp_path: Path) -> None:
    """Windows of another size are another pool; the first one's memory goes."""
    options = SaveOptions(host_memory_nbytes=BUDGET)
    async with asyncckpt.Checkpointer(f"memory://{tmp_path}", save_options=options) as ckpt:
        pools: set[SlotPool] = set()
        for step, size in enumerate((8 * MIB, 9 * MIB, 8 * MIB)):
            own = SaveOptions(target_data_file_nbytes=size)
            await ckpt.save(step, {"a": noise(20 * MIB)}, options=own)
            pools |= set(slot_pools(ckpt._session.runtime.budget))
            assert sum(pool.allocated_nbytes for pool in pools) <= BUDGET
        assert len(pools) == 4
        assert len(slot_pools(ckpt._session.runtime.budget)) == 2


# --------------------------------------------------------------------- chunks beyond the budget


def uneven(rows: int, columns: int) -> ShardedArray:
    """Two shards whose sides have no common divisors: each is one chunk, whatever its size."""
    halves = [np.broadcast_to(np.float32(value), (rows, columns)) for value in (1, 2)]
    return ShardedArray(
        (2 * rows, columns), np.float32, [((0, 0), halves[0]), ((rows, 0), halves[1])]
    )


@pytest.mark.parametrize("place", ["disk", "memory"])
async def test_shards_that_do_not_fit_the_budget_compressed_are_refused(
    tmp_path: Path, place: str
) -> None:
    """They cannot be cut, and are held whole while compressed: nothing is left behind."""
    root = f"memory://{tmp_path}" if place == "memory" else tmp_path
    state = {"layer": {"w": uneven(5791, 5801)}, "b": np.zeros(4)}
    options = SaveOptions(host_memory_nbytes=BUDGET, compression="zstd", compression_level=1)
    async with asyncio.timeout(30), asyncckpt.Checkpointer(root, save_options=options) as ckpt:
        with pytest.raises(asyncckpt.UsageError) as caught:
            await ckpt.save(1, state)
        error = caught.value
        nbytes = 5791 * 5801 * 4
        # In whole slots, half of what the windows leave: the other half holds the compressed form.
        budget = 3 * SLOT_NBYTES if place == "disk" else 2 * SLOT_NBYTES
        assert (error.path, error.expected, error.found) == ("layer/w", budget, nbytes)
        assert f"layer/w: its chunk_shape or its shards make chunks of {nbytes} bytes" in str(error)
        assert 'LeafOptions(compression="none")' in str(error)
        assert await ckpt.steps() == []
        assert ckpt._session.runtime.budget.in_use == 0


async def test_a_compressed_chunk_beyond_the_budget_is_restored_with_a_note(tmp_path: Path) -> None:
    state = {"large": np.ones(9 << 20), "small": np.ones(9)}
    options = SaveOptions(chunk_nbytes=72 * MIB, compression="zstd", host_memory_nbytes=1 << 30)
    await asyncckpt.save(tmp_path / "a", state, options=options)
    budget = RestoreOptions(host_memory_nbytes=BUDGET)
    with pytest.warns(
        asyncckpt.RestoreWarning, match="72.0 MiB and was restored alone, .* budget of 64.0 MiB"
    ):
        restored = await asyncckpt.restore(tmp_path / "a", options=budget)
    assert (restored["large"] == 1).all()
    # Warnings are errors: there is none without the chunk.
    await asyncckpt.restore(tmp_path / "a", include="small", options=budget)
