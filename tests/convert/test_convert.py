"""Conversion to an asyncckpt checkpoint: all contents, in one array per leaf."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DeadlineExceededError,
    LeafOptions,
    SaveOptions,
    ShardedArray,
    StoreError,
    UnsupportedLeafError,
    UsageError,
    blocking,
)
from asyncckpt.options import MIB
from asyncckpt.spec import ArraySpec
from tests.convert.trees import everything, listed, numbers, same, saved

SMALL = SaveOptions(host_memory_nbytes=64 * MIB)


def record_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "checkpoint.json").read_bytes())


async def test_everything_comes_through(tmp_path: Path) -> None:
    saved(tmp_path / "a", everything(), metadata={"seed": [7]})
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b", metadata={"by": "me"})
    first, second = record_of(tmp_path / "a"), record_of(tmp_path / "b")
    for part in ("tree", "leaves"):
        assert first[part] == second[part]
    assert first["arrays"]["tied"] == second["arrays"]["tied"]
    assert second["metadata"] == {"seed": [7], "by": "me"}
    assert same(blocking.restore(tmp_path / "a"), blocking.restore(tmp_path / "b"))
    assert blocking.verify(tmp_path / "b").ok
    assert (report.source_format, report.format, report.step) == ("asyncckpt", "asyncckpt", None)
    assert report.leaf_count == len(first["leaves"]["kind"])
    assert report.source == str(tmp_path / "a") and report.location == str(tmp_path / "b")
    assert report.unverified == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


async def test_a_bare_leaf_and_an_empty_tree_come_through(tmp_path: Path) -> None:
    for name, tree in (("array", numbers(10)), ("number", 3), ("nothing", {}), ("none", None)):
        saved(tmp_path / name, tree)
        await asyncckpt.convert(tmp_path / name, tmp_path / f"{name}2")
        assert same(blocking.restore(tmp_path / f"{name}2"), tree)


async def test_metrics_and_step_are_carried_into_a_run(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path / "run") as run:
        for step in (3, 12):
            run.save(step, {"x": np.full(3, step)}, metrics={"loss": 1 / step})
    report = await asyncckpt.convert(tmp_path / "run", tmp_path / "copy" / "12")
    assert (report.source, report.step) == (str(tmp_path / "run" / "12"), 12)
    await asyncckpt.convert(tmp_path / "run" / "3", tmp_path / "copy" / "40")
    await asyncckpt.convert(tmp_path / "run" / "3", tmp_path / "single")
    assert record_of(tmp_path / "single")["step"] == 3
    with blocking.Checkpointer(tmp_path / "copy") as copy:
        assert copy.steps() == [12, 40]
        assert copy.inspect(12).metrics == {"loss": 1 / 12}
        assert copy.inspect(40).metrics == {"loss": 1 / 3}
        assert copy.restore(40)["x"].tolist() == [3, 3, 3]


async def test_a_newest_step_whose_record_is_damaged_is_none(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path / "run") as run:
        for step in (1, 2):
            run.save(step, {"x": step})
    record = tmp_path / "run" / "2" / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-1])
    report = await asyncckpt.convert(tmp_path / "run", tmp_path / "b")
    assert report.source == str(tmp_path / "run" / "1")


async def test_leaves_in_pieces_become_one_array(tmp_path: Path) -> None:
    cuts = (0, 3001, 5000, 8001, 10_000)
    values = numbers(10_000, 50)
    rows = ShardedArray(
        values.shape,
        values.dtype,
        [((a, 0), values[a:b]) for a, b in itertools.pairwise(cuts)],
    )
    saved(tmp_path / "a", {"w": rows, "same": rows})
    assert blocking.inspect(tmp_path / "a")["w"].pieces
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b", options=SMALL)
    assert report.orbax
    info = blocking.inspect(tmp_path / "b")
    assert info["w"].pieces == () and info["same"].tied_to == "w"
    restored = blocking.restore(tmp_path / "b")
    assert np.array_equal(restored["w"], values)


@pytest.mark.parametrize("level", [None, 1])
async def test_chunks_that_cross_the_order_of_reading_are_read_once(
    tmp_path: Path, level: int | None
) -> None:
    # 32 MiB in columns: reading it row by row would need all of it at a time.
    values = numbers(2048, 4096)
    columns = SaveOptions(
        compression=None if level is None else "zstd",
        compression_level=level or 3,
        leaf_options=lambda _, __: LeafOptions(chunk_shape=(2048, 256)),
    )
    saved(tmp_path / "a", {"w": values}, options=columns)
    stored = sum(f.nbytes for f in blocking.inspect(tmp_path / "a").files)
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b", options=SMALL)
    assert report.read_nbytes <= stored
    assert blocking.inspect(tmp_path / "b")["w"].chunk_shape == (2048, 2048)
    assert np.array_equal(blocking.restore(tmp_path / "b")["w"], values)


async def test_options_of_saving_apply(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": numbers(100, 100), "b": numbers(10)})

    def half(path: str, spec: ArraySpec) -> LeafOptions | None:
        return LeafOptions(dtype="bfloat16", chunk_shape=(50, 100)) if path == "w" else None

    report = await asyncckpt.convert(
        tmp_path / "a",
        tmp_path / "b",
        options=SaveOptions(compression="zstd", leaf_options=half),
    )
    info = blocking.inspect(tmp_path / "b")
    assert (info["w"].dtype, info["w"].chunk_shape) == ("bfloat16", (50, 100))
    assert info["w"].compression == info["b"].compression == "zstd"
    assert report.nbytes == 40_040


async def test_what_stands_at_the_destination_is_replaced_only_when_asked(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": 1})
    saved(tmp_path / "b", {"x": 2})
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    before = listed(tmp_path)
    for name in ("b", "c"):
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            await asyncckpt.convert(tmp_path / "a", tmp_path / name)
    assert listed(tmp_path) == before
    await asyncckpt.convert(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert blocking.restore(tmp_path / "b") == {"x": 1}


async def test_a_checkpoint_can_be_converted_in_place(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": numbers(1000, 1000)})
    options = SaveOptions(compression="zstd")
    await asyncckpt.convert(tmp_path / "a", tmp_path / "a", overwrite=True, options=options)
    assert blocking.inspect(tmp_path / "a")["x"].compression == "zstd"
    assert np.array_equal(blocking.restore(tmp_path / "a")["x"], numbers(1000, 1000))


async def test_damage_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": numbers(1000, 1000), "y": numbers(5)})
    file = next((tmp_path / "a" / "default" / "d").glob("*-0"))
    data = bytearray(file.read_bytes())
    data[100_000] ^= 1
    file.write_bytes(data)
    for name in ("b", "b.safetensors"):
        with pytest.raises(CorruptCheckpointError, match=r"^x: .* is damaged") as caught:
            await asyncckpt.convert(tmp_path / "a", tmp_path / name)
        assert caught.value.path == "x" and caught.value.file
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


async def test_nothing_at_the_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no checkpoint")
    for name in ("gone", "."):
        with pytest.raises(CheckpointNotFoundError):
            await asyncckpt.convert(tmp_path / name, tmp_path / "b")
    assert listed(tmp_path) == ["file"]


async def test_a_file_above_a_location_is_no_damage(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "c", {"w": np.ones(3)})
    (tmp_path / "file").write_text("text")
    inside = tmp_path / "file" / "x"
    for call in (
        lambda: asyncckpt.convert(tmp_path / "c", inside),
        lambda: asyncckpt.convert(inside, tmp_path / "d"),
        lambda: asyncckpt.restore(inside),
    ):
        with pytest.raises(StoreError, match="a part of the path is a file") as caught:
            await call()
        assert caught.value.location == str(inside) and not caught.value.retryable


async def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": 1})
    before = listed(tmp_path)
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("b", "pass", {"to": "orbax"}),
        ("b.safetensors", "safetensors", {"to": "asyncckpt"}),
        ("b", "max_file_nbytes", {"max_file_nbytes": 5}),
        ("b", "positive", {"to": "safetensors", "max_file_nbytes": 0}),
        ("b", "an int", {"to": "safetensors", "max_file_nbytes": 1.5}),
        ("b.safetensors", "a set of files", {"max_file_nbytes": 1000}),
        ("b.safetensors", "not compressed", {"options": SaveOptions(compression="zstd")}),
        ("b", "JSON", {"metadata": {"x": object()}}),
        ("b", "SaveOptions", {"options": 3}),
        ("b", "a function", {"progress": 3}),
        ("b", "object stores", {"storage_options": {"profile": "x"}}),
    ]
    for name, text, arguments in wrong:
        with pytest.raises(UsageError, match=text):
            await asyncckpt.convert(tmp_path / "a", tmp_path / name, **arguments)
    with pytest.raises(UsageError, match="orbax"):
        await asyncckpt.export(tmp_path / "a", tmp_path / "b", to="dcp")  # type: ignore[arg-type]
    assert listed(tmp_path) == before


async def test_an_export_that_orbax_could_not_restore_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": numbers(3), "deep": {"raw": b"\0"}})
    with pytest.raises(UnsupportedLeafError, match=r"deep/raw: Orbax cannot hold this bytes"):
        await asyncckpt.export(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert not (await asyncckpt.convert(tmp_path / "a", tmp_path / "b")).orbax


async def test_a_deadline_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": numbers(1000, 1000)})
    for name in ("b", "b.safetensors"):
        with pytest.raises(DeadlineExceededError, match="deadline_s"):
            await asyncckpt.convert(
                tmp_path / "a", tmp_path / name, options=SaveOptions(deadline_s=1e-9)
            )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


async def test_cancelling_leaves_nothing(tmp_path: Path, leak_check: None) -> None:
    saved(tmp_path / "a", {"x": numbers(3000, 3000)})
    for name in ("b", "b.safetensors"):
        moving = threading.Event()
        task = asyncio.ensure_future(
            asyncckpt.convert(
                tmp_path / "a",
                tmp_path / name,
                options=SMALL,
                progress=lambda _, moving=moving: moving.set(),
            )
        )
        await asyncio.to_thread(moving.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not (tmp_path / name).exists() or blocking.verify(tmp_path / name)
        assert not (tmp_path / ".asyncckpt").exists()


async def test_progress_reaches_the_end(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": numbers(3000, 3000)})
    for name in ("b", "b.safetensors"):
        seen: list[asyncckpt.Progress] = []
        await asyncckpt.convert(tmp_path / "a", tmp_path / name, progress=seen.append)
        assert seen[-1].done_nbytes == seen[-1].total_nbytes >= 36_000_000
        assert [p.done_nbytes for p in seen] == sorted(p.done_nbytes for p in seen)


async def test_nothing_blocks_the_loop(tmp_path: Path, no_blocking: list[str]) -> None:
    await asyncckpt.save(tmp_path / "a", everything())
    await asyncckpt.convert(tmp_path / "a", tmp_path / "b")
    await asyncckpt.convert(tmp_path / "a", tmp_path / "b.safetensors")
    assert (await asyncckpt.diff(tmp_path / "a", tmp_path / "b")).equal
    assert not no_blocking


def test_the_blocking_functions_do_the_same(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": numbers(100)})
    assert blocking.convert(tmp_path / "a", tmp_path / "b").leaf_count == 1
    assert blocking.export(tmp_path / "a", tmp_path / "c").orbax
    assert blocking.diff(tmp_path / "b", tmp_path / "c").equal
