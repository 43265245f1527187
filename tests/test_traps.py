"""Traps that others fell into, one test each, where no other file has it (see promises.toml)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import blocking
from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.stores.local import datafile
from tests.script import Script


class _Disk(OSError):
    pass


def _failing_write(*_: Any) -> None:
    raise _Disk(5, "input/output error")


async def test_a_workers_error_is_never_reported_as_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytorch#191391: with several writer threads the error of one was lost.
    tree = {str(n): np.zeros(1 << 20, np.float32) for n in range(8)}
    calls = 0
    pwrite = datafile.os.pwrite

    def third_fails(fd: int, data: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(5, "input/output error")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(datafile.os, "pwrite", third_fails)
    with pytest.raises(asyncckpt.StoreError, match="EIO"):
        await asyncckpt.save(tmp_path / "x", tree)
    monkeypatch.undo()
    assert calls >= 3
    assert not (tmp_path / "x").exists()


async def test_a_failed_staging_is_never_reported_as_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(self: Any, source: Any, shard: int, box: Any, out: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(NumpyAdapter, "fetch", fetch)
    swapped = np.arange(100_000, dtype=">f8")  # the other byte order goes through fetch
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(asyncckpt.StagingError, match=r"^a/b: .*the device is gone"):
            await ckpt.start_save(1, {"a": {"b": swapped}})
        assert await ckpt.steps() == []


@pytest.mark.parametrize("second", ["dtype", "shape", "path", "tie", "chunk", "compression"])
async def test_a_change_of_the_schema_is_never_served_from_the_plan_cache(
    tmp_path: Path, second: str
) -> None:
    # veScale's key lacked shapes and dtypes; a cached plan kept the old dtype.
    base = np.arange(4096, dtype=np.float32)
    first: dict[str, Any] = {"a": base, "b": base + 1}
    options = asyncckpt.SaveOptions()
    changed: dict[str, Any] = {
        "dtype": {"a": base.astype(np.int64), "b": base + 1},
        "shape": {"a": base.reshape(64, 64), "b": base + 1},
        "path": {"a": base, "c": base + 1},
        "tie": {"a": base, "b": base},
    }.get(second, first)
    if second == "chunk":
        options = asyncckpt.SaveOptions(chunk_nbytes=4096)
    if second == "compression":
        options = asyncckpt.SaveOptions(compression="zstd")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        assert not (await ckpt.save(0, first)).plan_cached
        assert (await ckpt.save(1, first)).plan_cached
        report = await ckpt.save(2, changed, options=options)
        assert not report.plan_cached
        restored = await ckpt.restore(2)
        assert restored.keys() == changed.keys()
        for key, value in changed.items():
            assert restored[key].dtype == value.dtype
            np.testing.assert_array_equal(restored[key], value)
        assert (await ckpt.save(3, first)).plan_cached


async def test_a_save_after_a_failed_one_is_not_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # orbax#605: a later save waited forever.
    tree = {"a": np.zeros(1 << 18, np.float32)}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr(datafile.os, "pwrite", _failing_write)
        with pytest.raises(asyncckpt.StoreError):
            await (await ckpt.start_save(1, tree))
        monkeypatch.undo()
        async with asyncio.timeout(60):
            await ckpt.save(2, tree)
        assert await ckpt.steps() == [2]


def test_a_float_is_not_cast_into_an_int_target_silently(tmp_path: Path) -> None:
    blocking.save(tmp_path / "x", {"a": np.array([1.5, 2.5])})
    target = {"a": np.zeros(2, np.int64)}
    with pytest.raises(asyncckpt.DtypeMismatchError, match=r"float64.*int64.*cast=True"):
        blocking.restore_into(tmp_path / "x", target)
    np.testing.assert_array_equal(target["a"], 0)


def test_two_views_of_one_array_are_both_saved(tmp_path: Path) -> None:
    # Two replicas in one process: others dropped every copy.
    weight = torch.arange(1000.0)
    report = blocking.save(tmp_path / "x", {"a": weight, "b": weight, "part": weight[:10]})
    assert report.array_count == 2
    restored = blocking.restore(tmp_path / "x")
    for key, expected in (("a", weight), ("b", weight), ("part", weight[:10])):
        np.testing.assert_array_equal(restored[key], expected.numpy())


def test_bfloat16_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    values = torch.arange(-300, 300).to(torch.bfloat16)
    blocking.save(tmp_path / "x", {"a": values})
    restored = blocking.restore(tmp_path / "x", leaves="torch")["a"]
    assert restored.dtype is torch.bfloat16
    assert torch.equal(restored, values)


def test_zero_size_arrays_keep_shape_and_dtype(tmp_path: Path) -> None:
    tree = {"a": np.zeros((0, 3), np.int8), "b": torch.zeros(4, 0), "c": np.zeros((2, 0, 5), bool)}
    blocking.save(tmp_path / "x", tree)
    restored = blocking.restore(tmp_path / "x")
    assert {key: value.shape for key, value in restored.items()} == {
        "a": (0, 3),
        "b": (4, 0),
        "c": (2, 0, 5),
    }


async def test_a_buffer_is_not_used_again_before_it_was_written(tmp_path: Path) -> None:
    # veScale: buffers were reused before the copy had finished.
    options = asyncckpt.SaveOptions(host_memory_nbytes=64 << 20, direct_io=False)
    tree = {str(n): np.full(5 << 20, n, np.uint8) for n in range(24)}  # twice the budget
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        script = Script(ckpt)
        first, third = script.hold("write", 1), script.hold("write", 3)
        saving = asyncio.create_task(ckpt.save(1, tree))
        await first.reached()
        await third.reached()
        # Everything that can be written without these two is; their memory is still theirs.
        while script.count("write") < 9:
            await ckpt.latest_step()
        third.go()
        first.go()
        await saving
        restored = await ckpt.restore(1)
        assert all((restored[key] == int(key)).all() for key in tree)


async def test_nothing_refers_to_data_before_they_are_durable(tmp_path: Path) -> None:
    # veScale: metadata was written before the data had landed. Index and manifest may be, because
    # the attempt that they are in is no checkpoint before its record is published.
    options = asyncckpt.SaveOptions(target_data_file_nbytes=8 << 20)
    tree = {str(n): np.full(6 << 20, n, np.uint8) for n in range(5)} | {"n": 1}
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        script = Script(ckpt)
        held = script.hold("seal", 2)
        pending = await ckpt.start_save(1, tree)
        await held.reached()
        while script.count("write") < 5:
            await ckpt.latest_step()
        for _ in range(20):
            assert await ckpt.latest_step() is None
        published = script.count("publish")
        held.go()
        assert published == 0
        await pending
        kinds = [o.kind for o in script.store.log]
        last_data = max(n for n, o in enumerate(script.store.log) if o.kind == "seal")
        assert kinds.index("publish") > last_data
        assert script.count("publish") == 1
