"""How a checkpoint is saved: options of leaves, progress, reports, what is remembered."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import zstandard

import asyncckpt
from asyncckpt.errors import (
    CheckpointExistsError,
    ResourceError,
    SaveError,
    StagingError,
    UsageError,
)
from asyncckpt.options import KIB, MIB
from asyncckpt.reports import Progress
from asyncckpt.save.serialize import Compressor
from asyncckpt.spec import ArraySpec
from tests.script import Script


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal((500, 400)),
        "small": {str(i): rng.standard_normal(50) for i in range(10)},
        "step": seed,
    }


async def test_leaf_options_set_chunks_dtype_and_compression_of_single_leaves(
    tmp_path: Path,
) -> None:
    seen: dict[str, ArraySpec] = {}

    def options(path: str, spec: ArraySpec) -> asyncckpt.LeafOptions | None:
        seen[path] = spec
        if path == "shape":
            return asyncckpt.LeafOptions(chunk_shape=(100, 33))
        if path == "size":
            return asyncckpt.LeafOptions(chunk_nbytes=64 * KIB)
        if path == "half":
            return asyncckpt.LeafOptions(dtype="bfloat16")
        if path == "zip":
            return asyncckpt.LeafOptions(compression="zstd", compression_level=9)
        return None

    values = np.arange(100_000, dtype=np.float32).reshape(400, 250)
    state = dict.fromkeys(("shape", "size", "half", "zip", "plain"), values)
    state = {key: value.copy() for key, value in state.items()} | {"n": 1}
    await asyncckpt.save(tmp_path / "x", state, options=asyncckpt.SaveOptions(leaf_options=options))
    assert seen == dict.fromkeys(state.keys() - {"n"}, ArraySpec((400, 250), "float32"))
    info = await asyncckpt.inspect(tmp_path / "x")
    assert info["shape"].chunk_shape == (100, 33) and info["shape"].chunk_count == 4 * 8
    assert info["size"].chunk_count == 7 and info["plain"].chunk_count == 1
    assert info["half"].dtype == "bfloat16" and info["half"].nbytes == values.nbytes // 2
    assert info["zip"].compression == "zstd" and info["plain"].compression is None
    assert info["zip"].stored_nbytes < info["plain"].stored_nbytes
    restored = await asyncckpt.restore(tmp_path / "x")
    for key in ("shape", "size", "zip", "plain"):
        assert restored[key].tobytes() == values.tobytes()
    assert restored["half"].tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
    assert (await asyncckpt.verify(tmp_path / "x")).ok


async def test_a_leaf_may_be_left_out_of_compression(tmp_path: Path) -> None:
    await asyncckpt.save(
        tmp_path / "x",
        {"a": np.zeros(9999), "b": np.zeros(9999)},
        options=asyncckpt.SaveOptions(
            compression="zstd",
            leaf_options=lambda path, _: asyncckpt.LeafOptions(
                compression="none" if path == "a" else None
            ),
        ),
    )
    info = await asyncckpt.inspect(tmp_path / "x")
    assert (info["a"].compression, info["b"].compression) == (None, "zstd")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (asyncckpt.LeafOptions(chunk_shape=(3,)), r"a: .*has rank 1, .*\[4,5\] has rank 2"),
        (
            asyncckpt.LeafOptions(chunk_shape=(4, 1 << 61)),
            r"a: .* restores accept at most 1099511627776 bytes",
        ),
        ("zstd", "a: leaf_options returned 'zstd'; return a LeafOptions or None"),
    ],
)
async def test_leaf_options_that_do_not_fit_their_leaf_are_refused(
    tmp_path: Path, answer: Any, text: str
) -> None:
    options = asyncckpt.SaveOptions(leaf_options=lambda path, spec: answer)
    with pytest.raises(UsageError, match=text) as caught:
        await asyncckpt.save(tmp_path / "x", {"a": np.zeros((4, 5))}, options=options)
    assert caught.value.path == "a"
    assert list(tmp_path.iterdir()) == []


async def test_progress_grows_to_the_whole(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for call, last in (
            (lambda p: ckpt.save(1, tree(), progress=p), "upload"),
            (lambda p: ckpt.restore(1, progress=p), "fetch"),
            (lambda p: ckpt.restore_into({**tree(), "step": 0}, progress=p), "fetch"),
            (lambda p: ckpt.verify(1, progress=p), "verify"),
        ):
            seen: list[Progress] = []
            await call(seen.append)
            assert seen[-1].stage == last
            done = [state.done_nbytes for state in seen]
            assert done == sorted(done) and 0 < done[-1] <= seen[-1].total_nbytes
            assert seen[-1].fraction > 0.9
            assert len({state.total_nbytes for state in seen}) == 1


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("small", "nbytes"),
    [
        ({f"w{i}": np.full(100, i, np.float64) for i in range(50)}, 50 * 800),
        ({"w": np.zeros(3 * MIB), "b": np.zeros(10)}, 24 * MIB + 80),
        ({"step": 1, "name": "run"}, 8),
        ({}, 0),
    ],
)
async def test_the_progress_of_a_save_ends_with_everything_done_also_of_small_leaves(
    tmp_path: Path, small: Any, nbytes: int, compression: Any
) -> None:
    seen: list[Progress] = []
    options = asyncckpt.SaveOptions(compression=compression)
    await asyncckpt.save(tmp_path / "x", small, progress=seen.append, options=options)
    assert seen[-1].done_nbytes == seen[-1].total_nbytes
    assert nbytes <= seen[-1].total_nbytes <= nbytes + 64 * 1024


@pytest.mark.filterwarnings("ignore:.*the progress callback raised")
@pytest.mark.parametrize("state", [{"w": np.zeros(100)}, {"step": 1}])
async def test_a_progress_callback_that_raises_leaves_a_note_for_small_leaves_too(
    tmp_path: Path, state: Any
) -> None:
    def broken(state: Progress) -> None:
        raise ZeroDivisionError("in the callback")

    report = await asyncckpt.save(tmp_path / "x", state, progress=broken)
    assert "the progress callback raised ZeroDivisionError" in report.notes[0]


@pytest.mark.filterwarnings("ignore:.*the progress callback raised")
@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, asyncio.CancelledError])
async def test_a_progress_callback_that_raises_is_logged_once_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def broken(state: Progress) -> None:
        raise kind("in the callback")

    state = {"a": np.zeros(3 * MIB), "b": np.zeros(3 * MIB), "step": 1}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for call in (
            lambda: ckpt.save(1, state, progress=broken),
            lambda: ckpt.restore(1, progress=broken),
            lambda: ckpt.restore_into(state, progress=broken),
            lambda: ckpt.verify(1, progress=broken),
        ):
            caplog.clear()
            with caplog.at_level(logging.ERROR, "asyncckpt"):
                await call()
            assert caplog.text.count("the progress callback failed") == 1
        assert await ckpt.steps() == [1]


@pytest.mark.filterwarnings("ignore:.*the progress callback raised")
async def test_a_progress_callback_that_raises_is_a_note_of_the_report(tmp_path: Path) -> None:
    def broken(state: Progress) -> None:
        raise ZeroDivisionError("in the callback")

    state = {"a": np.zeros(3 * MIB), "step": 1}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        saved = await ckpt.save(1, state, progress=broken)
        restored = await ckpt.restore_into(state, progress=broken)
        assert (await ckpt.save(2, state)).notes == ()
    for report in (saved, restored):
        (note,) = report.notes
        assert note == (
            "the progress callback raised ZeroDivisionError: in the callback; it was not called "
            "again"
        )


async def test_reports_add_up(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        first = await ckpt.save(1, tree(1))
        second = await ckpt.save(2, tree(2))
        assert (first.leaf_count, first.array_count) == (12, 11)
        assert first.nbytes == 500 * 400 * 8 + 10 * 400
        on_disk = sum(p.stat().st_size for p in (tmp_path / "1").rglob("*") if p.is_file())
        assert first.stored_nbytes == on_disk
        assert first.file_count == sum(p.is_file() for p in (tmp_path / "1").rglob("*"))
        assert (first.plan_cached, second.plan_cached) == (False, True)
        assert first.orbax and first.notes == ()
        assert first.peak_staged_nbytes >= 8 * MIB
        assert set(first.stage_s) >= {"stage", "serialize", "upload"}
        assert str(first).startswith(f"saved {tmp_path / '1'}: 12 leaves, 1.5 MiB in ")
        restored = await ckpt.restore_into({**tree(2), "step": 2})
        assert restored.step == 2 and restored.nbytes == first.nbytes
        assert str(restored).startswith(f"restored {tmp_path / '2'}: 12 leaves")
        verified = await ckpt.verify(2)
        assert verified.ok and bool(verified) and verified.leaf_count == 12
        on_disk = sum(p.stat().st_size for p in (tmp_path / "2").rglob("*") if p.is_file())
        record = (tmp_path / "2" / "checkpoint.json").stat().st_size
        assert verified.read_nbytes == on_disk - record


async def test_a_tree_that_orbax_cannot_hold_says_so(tmp_path: Path) -> None:
    report = await asyncckpt.save(tmp_path / "x", {"big": 1 << 100, "w": np.zeros(3)})
    assert not report.orbax
    assert "big: Orbax cannot hold this int" in report.notes[0]
    assert (await asyncckpt.restore(tmp_path / "x"))["big"] == 1 << 100


async def test_what_was_staged_is_not_kept_alive_by_the_save(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        write = Script(ckpt).hold("write")
        state = {"n": np.ones(200_000), "t": torch.ones(200_000), "j": jnp.ones(200_000)}
        gone = [weakref.ref(leaf) for leaf in state.values()]
        pending = await ckpt.start_save(1, state)
        await write.reached()
        state.clear()
        gc.collect()
        assert [ref() is None for ref in gone] == [True, True, True]
        write.go()
        await pending
        restored = await ckpt.restore(1)
        assert all((restored[key] == 1).all() for key in "ntj")


async def test_prepare_allocates_what_the_first_save_needs(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        state = {"a": np.zeros(40 * MIB, np.uint8), "b": np.zeros(40 * MIB, np.uint8), "n": 1}
        nbytes = await ckpt.prepare(state)
        assert 80 * MIB <= nbytes <= 112 * MIB
        await (await ckpt.start_save(1, state))
        assert ckpt._session.runtime.pool.allocated_nbytes == nbytes


async def test_prepare_stops_at_the_budget(tmp_path: Path) -> None:
    options = asyncckpt.SaveOptions(host_memory_nbytes=64 * MIB)
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        assert await ckpt.prepare({"a": np.zeros(200 * MIB, np.uint8)}) == 64 * MIB


@pytest.mark.parametrize("private", [False, True])
async def test_modes_follow_the_umask_or_are_private(tmp_path: Path, private: bool) -> None:
    old = os.umask(0o022)
    try:
        options = asyncckpt.SaveOptions(private=private)
        await asyncckpt.save(tmp_path / "x", tree(), options=options)
    finally:
        os.umask(old)
    for path in [tmp_path / "x", *(tmp_path / "x").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (
            (0o700 if private else 0o755) if path.is_dir() else 0o600 if private else 0o644
        )


async def test_a_leaf_that_cannot_be_copied_is_named_and_the_save_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncckpt.adapters.torch import TorchAdapter

    def fetch(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(TorchAdapter, "fetch", fetch)
    state = {"ok": np.ones(9), "layer": {"w": torch.ones(50_000, dtype=torch.complex64).conj()}}
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for call in (lambda: ckpt.save(1, state), lambda: ckpt.start_save(1, state)):
            with pytest.raises(
                StagingError, match=r"layer/w: copying complex64\[50000\] .*device lost"
            ) as caught:
                await call()
            assert (caught.value.path, caught.value.stage) == ("layer/w", "stage")
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert await ckpt.steps() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no more"), ResourceError),
        (zstandard.ZstdError("zstd compress error: Allocation error : full"), ResourceError),
        (zstandard.ZstdError("zstd compress error: Context broken"), SaveError),
    ],
)
async def test_a_leaf_that_cannot_be_compressed_is_named_and_the_save_is_undone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[asyncckpt.AsyncCheckpointError],
) -> None:
    compress = Compressor.compress

    def failing(self: Compressor, slots: Any, starts: Any, nbytes: Any, levels: Any) -> Any:
        if sum(nbytes) == 8 * MIB:
            raise error
        return compress(self, slots, starts, nbytes, levels)

    monkeypatch.setattr(Compressor, "compress", failing)
    state = {"ok": np.ones(4 * MIB, np.uint8), "layer": {"w": np.ones(MIB)}}
    options = asyncckpt.SaveOptions(compression="zstd")
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        match = rf"^layer/w: compressing 8388608 bytes.* {type(error).__name__}: .*intact"
        with pytest.raises(kind, match=match) as caught:
            await ckpt.save(1, state)
        assert (caught.value.path, caught.value.stage) == ("layer/w", "serialize")
        assert caught.value.__cause__ is error
        assert await ckpt.steps() == []
    assert list(tmp_path.iterdir()) == []


async def test_saves_and_restores_share_one_budget_and_may_overlap(tmp_path: Path) -> None:
    options = asyncckpt.SaveOptions(host_memory_nbytes=64 * MIB)
    state = {"a": np.arange(5 * MIB), "b": np.arange(3 * MIB)}
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        await ckpt.save(0, state)
        async with asyncio.TaskGroup() as group:
            saves = [group.create_task(ckpt.save(step, state)) for step in (1, 2)]
            restores = [group.create_task(ckpt.restore(0)) for _ in range(2)]
        assert [task.result().step for task in saves] == [1, 2]
        for task in restores:
            assert all(task.result()[key].tobytes() == state[key].tobytes() for key in state)
        budget = ckpt._session.runtime.budget
        assert budget.peak <= budget.capacity and budget.in_use == 0
        assert ckpt._session.runtime.pool.allocated_nbytes <= 64 * MIB


async def test_an_int_that_outgrows_64_bits_is_not_served_from_the_plan_cache(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step, counter in enumerate((2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**63 - 1)):
            report = await ckpt.save(step, {"counter": counter, "w": np.zeros(3)})
            assert report.orbax == (-(2**63) <= counter < 2**63)
            assert (await ckpt.restore(step))["counter"] == counter


async def test_a_one_shot_save_moves_no_directory_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        await ckpt.save(3, tree())
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text("print()")
    monkeypatch.chdir(tmp_path / "project")
    before = sorted(tmp_path.rglob("*"))
    for location, text in (
        (".", r"not a checkpoint \(it has train.py\) exists here and was left untouched; choose"),
        (tmp_path, r"not a checkpoint \(it has project, run\) exists here"),
        ("../run", r"the root of a run \(it has step 3\) exists here .*Checkpointer\('.*/run'\)"),
    ):
        with pytest.raises(CheckpointExistsError, match=text):
            await asyncckpt.save(location, tree())
        assert sorted(tmp_path.rglob("*")) == before
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        assert await ckpt.steps() == [3]


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", ".metadata"])
async def test_a_step_of_another_library_is_replaced_only_on_request(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / name).write_text("{}")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(CheckpointExistsError, match=f"of another library .it has {name}"):
            await ckpt.save(3, tree())
        assert (tmp_path / "3" / name).exists()
        await ckpt.save(3, tree(), overwrite=True)
        assert await ckpt.steps() == [3]


async def test_a_tree_of_nothing_but_empty_arrays_is_saved(tmp_path: Path) -> None:
    tree = {"a": np.zeros((0, 3), np.int8), "b": {"c": np.zeros((4, 0))}}
    await asyncckpt.save(tmp_path / "x", tree)
    restored = await asyncckpt.restore(tmp_path / "x")
    assert restored["a"].shape == (0, 3) and restored["b"]["c"].shape == (4, 0)
    assert (await asyncckpt.verify(tmp_path / "x")).ok
