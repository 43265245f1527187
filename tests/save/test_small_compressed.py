"""Small chunks are compressed together, whatever is between them and wherever files end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, LeafOptions, SaveOptions
from asyncckpt.options import KIB, MIB, SLOT_NBYTES
from asyncckpt.save import stage
from asyncckpt.save.serialize import Compressed, Compressor
from tests.simulator import simulator

Tree = dict[str, np.ndarray[Any, Any]]

WHERE = ("disk", "s3fs", "obstore")


@contextlib.asynccontextmanager
async def opened(where: str, tmp_path: Path, options: SaveOptions) -> AsyncIterator[Checkpointer]:
    if where == "disk":
        async with asyncckpt.Checkpointer(tmp_path / "run", save_options=options) as ckpt:
            yield ckpt
        return
    client = "fsspec" if where == "s3fs" else where
    with simulator() as sim:
        storage = sim.s3_options() | {"client": client}
        async with asyncckpt.Checkpointer(
            "s3://bucket/run", save_options=options, storage_options=storage
        ) as ckpt:
            yield ckpt


@functools.cache
def mixed(seed: int, count: int) -> Tree:
    """Leaves from nothing to some MiB, most of them small, half of what they hold the same.

    Tests copy what they change.
    """
    rng = np.random.default_rng(seed)
    sizes = (2 ** rng.uniform(0, 22, count) * (rng.random(count) < 0.95)).astype(int)
    return {
        f"{n:03d}": np.where(rng.random(size) < 0.5, 7, rng.integers(0, 99, size)).astype(kind)
        for n, (size, kind) in enumerate(
            zip(sizes // 4, rng.choice(["u1", "f4", "i2"], count), strict=True)
        )
    }


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each call of a worker compresses."""
    made: list[int] = []
    compress = Compressor.compress

    def counted(self: Compressor, slots: Any, starts: Sequence[int], *rest: Any) -> Any:
        made.append(len(starts))
        found: list[Compressed] = compress(self, slots, starts, *rest)
        return found

    monkeypatch.setattr(Compressor, "compress", counted)
    return made


@pytest.mark.parametrize("where", WHERE)
async def test_leaves_of_a_few_kilobytes_share_slots_and_calls(
    where: str, tmp_path: Path, calls: list[int]
) -> None:
    tree = {f"{n:04d}": np.arange(n, n + 512, dtype=np.int64) for n in range(1500)}
    options = SaveOptions(compression="zstd", host_memory_nbytes=64 * MIB)
    async with opened(where, tmp_path, options) as ckpt:
        report = await ckpt.save(1, tree)
        assert (sum(calls), len(calls)) == (1500, 6)
        assert report.stored_nbytes < 0.5 * report.nbytes
        found = await ckpt.restore(1)
        assert all(np.array_equal(found[name], values) for name, values in tree.items())
        assert (await ckpt.verify(1)).ok


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("together", [1, 8 * KIB, 1 * MIB])
async def test_any_mixture_of_sizes_and_levels_comes_back(
    where: str, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]
) -> None:
    monkeypatch.setattr(stage, "GROUPED_NBYTES", together)
    options = SaveOptions(
        compression="zstd",
        chunk_nbytes=256 * KIB,
        target_data_file_nbytes=SLOT_NBYTES,
        leaf_options=lambda path, _: LeafOptions(
            compression="none" if path.endswith("3") else None,
            compression_level=9 if path.endswith("5") else None,
        ),
    )
    async with opened(where, tmp_path, options) as ckpt:
        for seed in range(2):
            tree = mixed(seed, 80)
            await ckpt.save(seed, tree)
            found = await ckpt.restore(seed)
            into = {name: np.full_like(values, 1) for name, values in tree.items()}
            await ckpt.restore_into(into, step=seed)
            for name, values in tree.items():
                assert np.array_equal(found[name], values), (seed, name)
                assert np.array_equal(into[name], values), (seed, name)
            assert (await ckpt.verify(seed)).ok
    assert max(calls) > 1 or together == 1


async def test_each_is_checked_by_itself(tmp_path: Path) -> None:
    """A bit that flips in one of them is told with its name, and nothing of the others."""
    tree = {f"{n:03d}": np.arange(n, n + 1024, dtype=np.int64) for n in range(200)}
    async with opened("disk", tmp_path, SaveOptions(compression="zstd")) as ckpt:
        await ckpt.save(0, tree)
        (data,) = (
            path
            for path in (tmp_path / "run" / "0" / "default" / "d").iterdir()
            if not path.name.endswith("-index")
        )
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 4
        data.write_bytes(content)
        report = await ckpt.verify(0)
        (damage,) = report.damages
        with pytest.raises(asyncckpt.CorruptCheckpointError) as caught:
            await ckpt.restore(0)
        assert caught.value.path == damage.leaf
        rest = [name for name in tree if name != damage.leaf]
        found = await ckpt.restore(0, include=rest)
        assert all(np.array_equal(found[name], tree[name]) for name in rest)


async def test_start_save_waits_for_no_compression_while_memory_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress, go = Compressor.compress, threading.Event()

    def held(*arguments: Any) -> Any:
        assert go.wait(60)
        return compress(*arguments)

    monkeypatch.setattr(Compressor, "compress", held)
    large = np.random.default_rng(0).integers(0, 9, 20 * MIB, np.uint8)
    saved = mixed(0, 60) | {"large": large}
    tree = {name: values.copy() for name, values in saved.items()}
    options = SaveOptions(compression="zstd", chunk_nbytes=6 * MIB, host_memory_nbytes=256 * MIB)
    try:
        async with (
            asyncio.timeout(60),
            asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt,
        ):
            pending = await ckpt.start_save(1, tree)
            for values in tree.values():
                values[...] = 1
            go.set()
            await pending
            restored = await ckpt.restore(1)
    finally:
        go.set()
    assert restored.keys() == saved.keys()
    assert all(np.array_equal(restored[name], saved[name]) for name in saved)
