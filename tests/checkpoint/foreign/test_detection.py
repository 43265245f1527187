"""What a place is taken for, and what is said where it is no checkpoint."""

from __future__ import annotations

import gzip
import logging
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from tests.checkpoint.foreign import orbax_writers

VALUES = {"w": np.arange(6.0).reshape(2, 3)}


async def test_the_format_of_each_place_is_in_its_info(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "ours", VALUES)
    safetensors.numpy.save_file(VALUES, tmp_path / "one.safetensors")
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", VALUES)
    with warnings.catch_warnings(action="ignore"):  # torch's own, without a process group
        dcp.save({"w": torch.from_numpy(VALUES["w"])}, checkpoint_id=tmp_path / "dcp")
    places = {
        "ours": "asyncckpt",
        "one.safetensors": "safetensors",
        "orbax": "orbax",
        "dcp": "dcp",
    }
    for place, form in places.items():
        info = await asyncckpt.inspect(tmp_path / place)
        assert (info.format, info["w"].shape) == (form, (2, 3))


@pytest.mark.filterwarnings("ignore:.*no checksum")
@pytest.mark.parametrize("name", ["state", "old_jax"])
async def test_weights_beside_the_directory_of_a_checkpoint_are_read(
    tmp_path: Path, name: str
) -> None:
    safetensors.numpy.save_file(VALUES, tmp_path / "model.safetensors")
    ocp.PyTreeCheckpointer().save(tmp_path / name, {"w": np.zeros((2, 3))})
    assert np.array_equal((await asyncckpt.restore(tmp_path))["w"], VALUES["w"])


@pytest.mark.filterwarnings("ignore:.*no checksum")
@pytest.mark.parametrize("kind", ["ours", "orbax", "dcp"])
async def test_weights_in_the_directory_of_a_checkpoint_are_not_taken_for_it(
    tmp_path: Path, kind: str
) -> None:
    place, old = tmp_path / "x", {"w": np.zeros((2, 3)), "more": np.ones(1)}
    place.mkdir()
    if kind == "ours":
        await asyncckpt.save(place, VALUES)
    elif kind == "dcp":
        with warnings.catch_warnings(action="ignore"):  # torch's own, without a process group
            dcp.save({"w": torch.from_numpy(VALUES["w"])}, checkpoint_id=place)
    else:
        ocp.PyTreeCheckpointer().save(place, VALUES, force=True)
    weights = place / "model.safetensors"
    safetensors.numpy.save_file(old, weights)
    info = await asyncckpt.inspect(place)
    assert info.format == {"ours": "asyncckpt"}.get(kind, kind)
    (found,) = [leaf for leaf in info.leaves if leaf.path.endswith("w")]
    restored = await asyncckpt.restore(place)
    for part in found.path.split("/"):
        restored = restored[part]
    assert np.array_equal(restored, VALUES["w"])
    assert np.array_equal((await asyncckpt.restore(weights))["w"], old["w"])


async def test_a_directory_with_a_damaged_record_is_ours_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "x"
    await asyncckpt.save(place, VALUES)
    record = place / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-1])
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="commit record"):
        await asyncckpt.restore(place)


async def test_the_root_of_a_run_is_told_from_its_steps(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        await ckpt.save(3, VALUES)
        await ckpt.save(20, VALUES)
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match="its newest step is 20"):
        await asyncckpt.restore(tmp_path / "run")


def test_the_step_of_another_library_is_restored_by_its_number(tmp_path: Path) -> None:
    orbax_writers.manager(tmp_path / "run", VALUES)
    with asyncckpt.blocking.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.steps() == []  # a step is listed if it has a commit record of ours
        with pytest.warns(asyncckpt.RestoreWarning, match="no checksum"):
            restored = ckpt.restore(12)
    assert np.array_equal(restored["w"], VALUES["w"])


async def test_a_run_that_another_library_began_does_not_look_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orbax_writers.manager(tmp_path, VALUES)
    (tmp_path / "30").mkdir()
    said = r"1, 12 are steps of Orbax, which asyncckpt reads, as by restore\(12\)"
    caplog.set_level(logging.WARNING, "asyncckpt")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for _ in range(2):
            assert await ckpt.latest_step() is None
        (record,) = caplog.records
        assert re.search(said, record.getMessage())
        for verb, call in ("restore", ckpt.restore), ("inspect", ckpt.inspect):
            with pytest.raises(asyncckpt.CheckpointNotFoundError, match=f"to {verb}: {said}"):
                await call()
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match="12 is a step of Orbax"):
            await ckpt.delete(12)
        await ckpt.save(2, VALUES)
        assert await ckpt.latest_step() == 2
        assert (await asyncckpt.convert(tmp_path, tmp_path / "copy")).source == str(tmp_path / "2")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("options", [orbax_writers.PADDED, orbax_writers.PREFIXED])
async def test_a_run_of_orbax_does_not_look_new_whatever_its_steps_are_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    newest = orbax_writers.manager(tmp_path, VALUES, **options)
    first = newest.name.replace("12", "01" if options is orbax_writers.PADDED else "1")
    (tmp_path / newest.name.replace("12", "30")).mkdir()
    shutil.copytree(newest, tmp_path / f"{newest.name}.orbax-checkpoint-tmp-31")
    said = f": {first}, {newest.name} are steps of Orbax, which asyncckpt reads, as by restore("
    said += f"{str(newest)!r}), but"
    caplog.set_level(logging.WARNING, "asyncckpt")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for _ in range(2):
            assert await ckpt.latest_step() is None
        (record,) = caplog.records
        assert f"no step to continue from{said}" in record.getMessage()
        for verb, call in ("restore", ckpt.restore), ("inspect", ckpt.inspect):
            match = re.escape(f"to {verb}{said}")
            with pytest.raises(asyncckpt.CheckpointNotFoundError, match=match):
                await call()
        match = rf"none{re.escape(said)}.*; did you mean {re.escape(str(newest))}\?$"
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match=match):
            await ckpt.restore(12)
        await ckpt.save(2, VALUES)
        assert (await ckpt.steps(), await ckpt.latest_step()) == ([2], 2)
    assert len(caplog.records) == 1
    with pytest.warns(asyncckpt.RestoreWarning, match="no checksum"):
        restored = await asyncckpt.restore(newest)
    assert np.array_equal(restored["w"], VALUES["w"])


@pytest.mark.parametrize("options", [{}, orbax_writers.PADDED, orbax_writers.PREFIXED])
@pytest.mark.parametrize("beside", [None, "best"])
async def test_the_root_of_a_run_of_orbax_is_told_from_its_steps(
    tmp_path: Path, options: dict[str, Any], beside: str | None
) -> None:
    newest = orbax_writers.manager(tmp_path, VALUES, **options)
    if beside is not None:
        orbax_writers.pytree(tmp_path / beside, VALUES)
    match = f"root of a run, not a checkpoint; its newest step is {newest.name}: pass {newest}"
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match=match):
        await asyncckpt.restore(tmp_path)


@pytest.mark.filterwarnings("ignore:.*no checksum")
async def test_items_with_a_number_and_checkpoints_without_one_are_one_tree(tmp_path: Path) -> None:
    saved = {"layer_1": VALUES, "layer_12": VALUES}
    with orbax_writers.as_orbax_likes_it(), ocp.CheckpointManager(tmp_path / "run") as checkpoints:
        items = {name: ocp.args.PyTreeSave(tree) for name, tree in saved.items()}
        checkpoints.save(1, args=ocp.args.Composite(**items))
    for name in ("opt", "params"):
        orbax_writers.pytree(tmp_path / "apart" / name, VALUES)
    assert (await asyncckpt.restore(tmp_path / "run" / "1")).keys() == saved.keys()
    assert (await asyncckpt.restore(tmp_path / "apart")).keys() == {"opt", "params"}
    (tmp_path / "run" / "1" / "_CHECKPOINT_METADATA").unlink()  # as older releases
    assert (await asyncckpt.restore(tmp_path / "run" / "1")).keys() == saved.keys()


async def test_a_run_whose_only_step_is_not_finished_is_said_to_have_none(tmp_path: Path) -> None:
    orbax_writers.pytree(tmp_path / "c", VALUES).rename(tmp_path / "7.orbax-checkpoint-tmp")
    match = "no checkpoint here: Orbax has begun 7, and finished no step"
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match=match):
        await asyncckpt.restore(tmp_path)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        assert await ckpt.latest_step() is None


async def test_leftovers_of_own_steps_are_not_of_another_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(3, VALUES)
        (tmp_path / "3" / "checkpoint.json").unlink()
        assert await ckpt.latest_step() is None
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match="check that latest_step"):
            await ckpt.restore()
    assert not caplog.records


@pytest.mark.parametrize("other", ["ckpt_1", "00000001", "1.orbax-checkpoint-tmp-1", "1"])
async def test_a_run_beside_steps_of_another_library_is_a_run(tmp_path: Path, other: str) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(3, VALUES)
        (tmp_path / other).mkdir()
        (tmp_path / other / "_CHECKPOINT_METADATA").write_text("{}")
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match="its newest step is 3"):
            await asyncckpt.restore(tmp_path)


@pytest.mark.parametrize("other", ["final.safetensors", "state"])
async def test_a_run_with_another_checkpoint_in_its_root_is_a_run(
    tmp_path: Path, other: str
) -> None:
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        await ckpt.save(3, VALUES)
    await asyncckpt.convert(tmp_path / "run" / "3", tmp_path / "run" / other)
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        await ckpt.save(20, VALUES)
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match="its newest step is 20"):
        await asyncckpt.restore(tmp_path / "run")
    report = await asyncckpt.convert(tmp_path / "run", tmp_path / "copy")
    assert report.source == str(tmp_path / "run" / "20")


async def test_a_directory_of_checkpoints_is_told_from_them(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "state", VALUES)
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match=f"pass {tmp_path / 'state'}"):
        await asyncckpt.restore(tmp_path)


async def test_the_error_for_a_missing_step_names_those_with_another_name(tmp_path: Path) -> None:
    for name in ("ckpt_2", "ckpt_12", "00000007", "2.orbax-checkpoint-tmp-1"):
        (tmp_path / name).mkdir()
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step, name in (2, "ckpt_2"), (7, "00000007"):
            match = rf"did you mean .*{name}\?$"
            with pytest.raises(asyncckpt.CheckpointNotFoundError, match=match):
                await ckpt.restore(step)
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match=r"the steps are none$"):
            await ckpt.restore(1)


@pytest.mark.parametrize("what", ["empty", "links", "other"])
async def test_what_is_there_instead_is_said(tmp_path: Path, what: str) -> None:
    place = tmp_path / what
    place.mkdir()
    expected = "empty, or holds links"
    if what == "links":
        safetensors.numpy.save_file(VALUES, tmp_path / "one.safetensors")
        (place / "model.safetensors").symlink_to(tmp_path / "one.safetensors")
    if what == "other":
        (place / "notes.txt").write_text("nothing")
        expected = "there is notes.txt"
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match=expected):
        await asyncckpt.restore(place)


async def test_a_file_of_torch_save_is_refused_with_advice(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="weights_only=True"):
        await asyncckpt.restore(tmp_path / "model.pt")


async def test_a_checkpoint_that_vanishes_was_deleted_and_is_not_damaged(tmp_path: Path) -> None:
    place = tmp_path / "x"
    await asyncckpt.save(place, VALUES)
    shutil.rmtree(place)
    with pytest.raises(asyncckpt.CheckpointNotFoundError):
        await asyncckpt.restore(place)


def numpy_file(path: Path) -> None:
    np.save(path, VALUES["w"])


def numpy_archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **VALUES)


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "w.npy": (numpy_file, r"a NumPy array \(.npy\), .* load it with numpy.load"),
    "w.npz": (numpy_archive, r"an archive of NumPy arrays \(.npz\), .* load it with numpy.load"),
    "named.safetensors": (numpy_archive, "an archive of NumPy arrays"),
    "w.pkl": (lambda path: path.write_bytes(pickle.dumps(VALUES)), "a pickle, which may execute"),
    "w.h5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "an HDF5 file"),
    "w.gguf": (lambda path: path.write_bytes(b"GGUF\3\0\0\0" + bytes(99)), "a GGUF file"),
    "w.gz": (lambda path: path.write_bytes(gzip.compress(b"x")), "a file compressed with gzip"),
    "w.zip": (lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"), "a zip archive"),
    "notes.md": (lambda path: path.write_text("# Notes\nünïcode " * 40), "a text file"),
    "config.json": (lambda path: path.write_text('{"a": 1}'), "a text file"),
    "nothing": (lambda path: path.write_bytes(b""), "an empty file"),
    "noise": (lambda path: path.write_bytes(b"\xff\0\1\2" * 9), "a file of unknown kind"),
}


@pytest.mark.parametrize("name", FILES)
async def test_a_file_that_is_no_checkpoint_is_said_to_be_what_it_is(
    tmp_path: Path, name: str
) -> None:
    make, kind = FILES[name]
    make(tmp_path / name)
    for look in (asyncckpt.restore, asyncckpt.inspect):
        with pytest.raises(asyncckpt.UnsupportedFormatError, match=f"this is {kind}") as caught:
            await look(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.location == str(tmp_path / name)
