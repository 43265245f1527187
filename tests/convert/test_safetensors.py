"""Conversion between asyncckpt checkpoints and files of the safetensors library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file as load_torch
from safetensors.torch import load_model
from safetensors.torch import save_file as save_torch

import asyncckpt
from asyncckpt import (
    CheckpointExistsError,
    CorruptCheckpointError,
    LeafOptions,
    SaveOptions,
    UnsupportedFormatError,
    UnsupportedLeafError,
    UsageError,
    blocking,
)
from asyncckpt.convert.safetensors_plan import tensor_names
from asyncckpt.format.foreign import safetensors_tree
from asyncckpt.format.foreign.safetensors import CODES
from asyncckpt.format.foreign.safetensors_tree import PART_CHARS
from asyncckpt.options import MIB
from tests.convert.trees import dtypes, everything, listed, numbers, same, saved

SMALL = SaveOptions(host_memory_nbytes=64 * MIB)
TIED = numbers(3)

pytestmark = pytest.mark.filterwarnings("ignore::asyncckpt.RestoreWarning")


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        return dict(file.metadata())


def rewritten(path: Path, **metadata: str) -> None:
    """The same tensors, with other metadata."""
    save_numpy(load_numpy(path), path, metadata_of(path) | metadata)


# ------------------------------------------------------------------------------- there and back


async def test_tree_and_scalars_survive_the_way_there_and_back(tmp_path: Path) -> None:
    saved(tmp_path / "a", everything(), metadata={"seed": [7], "note": "hello"})
    there = await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    back = await asyncckpt.convert(tmp_path / "x.safetensors", tmp_path / "b")
    first, second = (
        json.loads((tmp_path / name / "checkpoint.json").read_bytes()) for name in ("a", "b")
    )
    for part in ("tree", "leaves", "metadata"):
        assert first[part] == second[part]
    assert same(blocking.restore(tmp_path / "a"), blocking.restore(tmp_path / "b"))
    assert blocking.inspect(tmp_path / "b")["params/tied"].tied_to == "params/w"
    assert (there.format, there.file_count, there.orbax) == ("safetensors", 1, False)
    assert there.stored_nbytes == (tmp_path / "x.safetensors").stat().st_size
    count = there.array_count + 1
    assert (back.source_format, len(back.unverified)) == ("safetensors", count)
    assert any(note.startswith(f"{count} of {count} arrays have no") for note in back.notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "x.safetensors"]


async def test_the_file_itself_restores_as_the_tree(tmp_path: Path) -> None:
    saved(tmp_path / "a", everything())
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    tree = blocking.restore(tmp_path / "x.safetensors")
    assert same(tree, blocking.restore(tmp_path / "a"))
    assert tree["params"]["tied"] is tree["params"]["w"]
    into = {"params": {"w": np.zeros((50, 300), np.float32)}}
    blocking.restore_into(tmp_path / "x.safetensors", into, include="params/w", strict=False)
    assert np.array_equal(into["params"]["w"], numbers(50, 300))


async def test_every_dtype_of_the_format_survives(tmp_path: Path) -> None:
    tree = {name: value for name, value in dtypes().items() if name in CODES}
    saved(tmp_path / "a", tree)
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    for name, tensor in load_torch(tmp_path / "x.safetensors").items():
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == tree[name].tobytes()
        assert tuple(tensor.shape) == tree[name].shape
    assert same(blocking.restore(tmp_path / "x.safetensors"), tree)


async def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    tree = everything()
    saved(tmp_path / "a", tree)
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    tensors = load_torch(tmp_path / "x.safetensors")
    assert tensors.keys() == {
        *("params.w", "params.b", "large", "empty", "one", "opt.mu.0", "opt.nu.0"),
        *("counters.seen", "blob", "a/b", "9.9"),
    }
    assert np.array_equal(tensors["large"].numpy(), tree["large"])
    assert bytes(tensors["blob"].numpy()) == tree["blob"]
    texts = metadata_of(tmp_path / "x.safetensors")
    assert texts["format"] == "pt" and texts["params.tied"] == "params.w"
    told = json.loads(texts["asyncckpt"])
    assert told["version"] == 1 and told["leaves"][0] == "params.w"
    assert {"kind": "int", "value": "7"} in told["leaves"]


async def test_a_state_dict_keeps_its_names_both_ways(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    save_torch(model.state_dict(), tmp_path / "m.safetensors", {"format": "pt", "who": "me"})
    await asyncckpt.convert(tmp_path / "m.safetensors", tmp_path / "a")
    info = blocking.inspect(tmp_path / "a")
    assert [leaf.path for leaf in info.leaves] == sorted(model.state_dict(), key=_natural)
    assert info.metadata == {"format": "pt", "who": "me"}
    blocking.restore_into(tmp_path / "a", torch.nn.Sequential(*model))
    await asyncckpt.convert(tmp_path / "a", tmp_path / "again.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    load_model(other, tmp_path / "again.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert metadata_of(tmp_path / "again.safetensors")["who"] == "me"


def _natural(name: str) -> tuple[int, str]:
    # safetensors writes tensors by falling alignment, then by name.
    return (0 if "num_batches" in name else 1, name)


# ------------------------------------------------------------------------------------------ sets


async def test_a_set_has_an_index_and_comes_back(tmp_path: Path) -> None:
    tree = everything()
    saved(tmp_path / "a", tree)
    report = await asyncckpt.convert(
        tmp_path / "a", tmp_path / "set", to="safetensors", max_file_nbytes=100_000
    )
    names = listed(tmp_path / "set")
    assert report.file_count == len(names) > 3
    assert names[-1] == "model.safetensors.index.json"
    total = len(names) - 1
    assert names[:-1] == [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    index = json.loads((tmp_path / "set" / names[-1]).read_bytes())
    found: dict[str, Any] = {}
    for name, file in index["weight_map"].items():
        found[name] = load_torch(tmp_path / "set" / file)[name]
    assert np.array_equal(found["large"].numpy(), tree["large"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert all(metadata_of(tmp_path / "set" / name)["format"] == "pt" for name in names[:-1])
    await asyncckpt.convert(tmp_path / "set", tmp_path / "b")
    assert same(blocking.restore(tmp_path / "b"), blocking.restore(tmp_path / "a"))
    assert report.stored_nbytes == sum(f.stat().st_size for f in (tmp_path / "set").iterdir())


async def test_a_directory_of_one_file_needs_no_index(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": numbers(5), "n": 3})
    await asyncckpt.convert(tmp_path / "a", tmp_path / "hub", to="safetensors")
    assert listed(tmp_path / "hub") == ["model.safetensors"]
    assert same(blocking.restore(tmp_path / "hub"), {"w": numbers(5), "n": 3})


async def test_a_tree_without_arrays_is_a_file(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"n": [1, 2.5, "x"], "none": None})
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    assert load_numpy(tmp_path / "x.safetensors") == {}
    await asyncckpt.convert(tmp_path / "x.safetensors", tmp_path / "b")
    assert blocking.restore(tmp_path / "b") == {"n": [1, 2.5, "x"], "none": None}


async def test_a_bare_array_is_called_root(tmp_path: Path) -> None:
    saved(tmp_path / "a", numbers(5))
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    assert load_numpy(tmp_path / "x.safetensors")["root"].tolist() == [0, 1, 2, 3, 4]
    assert same(blocking.restore(tmp_path / "x.safetensors"), numbers(5))


async def test_a_tree_that_is_long_in_words_is_told_in_parts(tmp_path: Path) -> None:
    tree = {f"{'long' * 20}{i}": i for i in range(12_000)}
    saved(tmp_path / "a", tree)
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    texts = metadata_of(tmp_path / "x.safetensors")
    assert {"asyncckpt", "asyncckpt.1"} <= texts.keys() and len(texts["asyncckpt"]) == PART_CHARS
    assert blocking.restore(tmp_path / "x.safetensors") == tree


# ------------------------------------------------------------------------------ within the budget


@pytest.mark.parametrize("level", [None, 1])
async def test_columns_are_written_tile_by_tile_and_read_once(
    tmp_path: Path, level: int | None
) -> None:
    # 64 MiB whose chunks would all be needed at a time to go through it row by row.
    values = numbers(4096, 4096)
    columns = SaveOptions(
        compression=None if level is None else "zstd",
        compression_level=level or 3,
        leaf_options=lambda path, _: LeafOptions(chunk_shape=(4096, 300)) if path == "w" else None,
    )
    tree = {"before": numbers(1001, dtype="uint8"), "w": values, "after": numbers(77, 3)}
    saved(tmp_path / "a", tree, options=columns)
    stored = sum(file.nbytes for file in blocking.inspect(tmp_path / "a").files)
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors", options=SMALL)
    assert report.read_nbytes <= stored
    tensors = load_numpy(tmp_path / "x.safetensors")
    assert all(np.array_equal(tensors[name], value) for name, value in tree.items())


async def test_a_cast_is_written_in_the_new_dtype(tmp_path: Path) -> None:
    tree = {"c": numbers(300, 7, dtype="complex128"), "w": numbers(10_000, dtype="float32")}
    saved(tmp_path / "a", tree)
    options = SaveOptions(
        leaf_options=lambda path, _: LeafOptions(dtype="complex64" if path == "c" else "bfloat16")
    )
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors", options=options)
    tensors = load_torch(tmp_path / "x.safetensors")
    assert tensors["w"].dtype == torch.bfloat16 and tensors["c"].dtype == torch.complex64
    assert torch.equal(tensors["w"], torch.arange(10_000).to(torch.bfloat16))
    assert report.nbytes == 20_000 + 2100 * 8


# ------------------------------------------------------------------------------------- bad input


async def test_dtypes_that_the_format_lacks_are_named_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for name, value in dtypes().items():
        if name in CODES:
            continue
        saved(tmp_path / name, {"ok": numbers(3), "deep": {"x": value}})
        text = rf"deep/x: safetensors has no dtype {name}; cast it, for example to \w+"
        with pytest.raises(UnsupportedLeafError, match=text) as caught:
            await asyncckpt.convert(tmp_path / name, tmp_path / "x.safetensors")
        cast = re.search(r"--cast (\w+)=(\w+)", str(caught.value))
        assert cast is not None and cast[1] == name and cast[2] in CODES
        assert not (tmp_path / "x.safetensors").exists()
        assert not (tmp_path / ".asyncckpt").exists()


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a.b": 1, "a": {"b": numbers(2)}}, r"a/b and a\.b would both be the tensor 'a\.b'"),
        ({1: numbers(1), "1": numbers(2)}, r"%31 and 1 would both be the tensor '1'"),
        ({"__metadata__": numbers(2)}, "name '__metadata__' .* is the key of the metadata"),
        ({"k" * 70_000: numbers(2)}, "name 'k{80}' .* has 70000 characters, of which 65536 are"),
        ({"text": "x" * 200_000}, "text: a str of 200000 characters is too large"),
    ],
)
async def test_names_that_the_format_cannot_hold_are_refused(
    tmp_path: Path, tree: dict[Any, Any], text: str
) -> None:
    saved(tmp_path / "a", tree)
    with pytest.raises(UsageError, match=text):
        await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_names_must_be_unicode() -> None:
    with pytest.raises(UsageError, match="is not valid Unicode"):
        tensor_names([("\ud800",)], ["%ED%A0%80"])


async def test_large_metadata_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"x": 1}, metadata={"log": "x" * (2 << 20)})
    with pytest.raises(UsageError, match="metadata takes 2097"):
        await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("tree", "metadata", "what"),
    [
        ({"x": 1}, {"x": [7] * 200_000}, "the tree in the safetensors metadata"),
        ({f"x{i}": "," * 100_000 for i in range(3)}, {}, "the tree in the safetensors metadata"),
        ({"x": 1}, {"x": "," * 100_000}, "the header of x.safetensors"),  # which has it twice
    ],
    ids=["numbers", "leaves", "text"],
)
async def test_more_values_than_readers_allow_are_refused(
    tmp_path: Path, tree: Any, metadata: dict[str, Any], what: str
) -> None:
    saved(tmp_path / "a", tree, metadata=metadata)
    with pytest.raises(UsageError, match=f"readers would refuse {what}: it has .* values in"):
        await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


async def test_a_tree_larger_than_readers_allow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_tree, "SPARE_LEAVES", 10)
    shared = numbers(3)
    trees: dict[int, dict[str, Any]] = {
        12: {"w": [shared, shared], "order": list(range(10))},
        13: {"w": [shared, shared], "order": list(range(11))},
        14: {"w": shared, "empty": [{} for _ in range(12)]},
    }
    for count, tree in trees.items():
        saved(tmp_path / f"{count}", tree)
        file = tmp_path / f"{count}.safetensors"
        if count == 12:
            await asyncckpt.convert(tmp_path / f"{count}", file)
            assert same(blocking.restore(file), tree)
            continue
        with pytest.raises(UsageError, match=f"{count} leaves or containers, .* at most 12; store"):
            await asyncckpt.convert(tmp_path / f"{count}", file)
        assert not file.exists()


@pytest.mark.parametrize(
    ("tree", "metadata"),
    [
        ({"w": numbers(3)}, {"asyncckpt": "a", "asyncckpt.1": "b", "format": "c", "who": "me"}),
        ({"asyncckpt": [TIED, TIED], "format": TIED}, {"format": "c", "who": "me"}),
    ],
)
async def test_no_user_name_takes_the_place_of_a_reserved_key(
    tmp_path: Path, tree: dict[str, Any], metadata: dict[str, Any]
) -> None:
    saved(tmp_path / "a", tree, metadata=metadata)
    file = tmp_path / "x.safetensors"
    await asyncckpt.convert(tmp_path / "a", file)
    texts = metadata_of(file)
    assert (texts["format"], texts["who"]) == ("pt", "me")
    assert json.loads(texts["asyncckpt"])["metadata"] == metadata and "asyncckpt.1" not in texts
    assert same(blocking.restore(file), tree)
    assert blocking.inspect(file).metadata == metadata


async def test_only_what_is_of_the_kind_is_replaced(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": numbers(5)})
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "lora.safetensors").write_text("downloaded")
    (tmp_path / "models" / "notes.md").write_text("mine")
    (tmp_path / "empty").mkdir()
    file, folder = tmp_path / "x.safetensors", tmp_path / "set"
    await asyncckpt.convert(tmp_path / "a", file)
    await asyncckpt.convert(tmp_path / "a", folder, to="safetensors")
    await asyncckpt.convert(tmp_path / "a", tmp_path / "empty", to="safetensors")
    before = listed(tmp_path)
    mixed = (("work", "thesis.tex"), ("models", "notes.md"))
    for place in (file, folder, *(tmp_path / name for name, _ in mixed)):
        with pytest.raises(CheckpointExistsError, match="overwrite"):
            await asyncckpt.convert(tmp_path / "a", place, to="safetensors")
    for name, other in mixed:
        with pytest.raises(CheckpointExistsError, match=rf"exists here \(it has {other}\)"):
            await asyncckpt.convert(
                tmp_path / "a", tmp_path / name, to="safetensors", overwrite=True
            )
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "dir.safetensors" / "x").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="a directory exists here"):
        await asyncckpt.convert(tmp_path / "a", tmp_path / "dir.safetensors", overwrite=True)
    (tmp_path / "cached.safetensors").symlink_to(file)
    with pytest.raises(CheckpointExistsError, match="a symbolic link exists here; move it away"):
        await asyncckpt.convert(tmp_path / "a", tmp_path / "cached.safetensors", overwrite=True)
    (tmp_path / "cached.safetensors").unlink()
    assert listed(tmp_path) == sorted([*before, "dir.safetensors", "dir.safetensors/x"])
    saved(tmp_path / "b", {"w": numbers(9)})
    for place in (file, folder):
        await asyncckpt.convert(tmp_path / "b", place, to="safetensors", overwrite=True)
        assert blocking.restore(place)["w"].shape == (9,)
    assert not (tmp_path / ".asyncckpt").exists()


async def test_safetensors_files_never_replace_a_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": numbers(5)})
    for checkpoint in ("run/1", "models/best.safetensors"):
        saved(tmp_path / checkpoint, {"w": numbers(9)})
    for place, name in (("run/1", "checkpoint.json"), ("models", "best.safetensors")):
        text = rf"{place}: something other than a directory of .* exists here \(it has {name}"
        with pytest.raises(CheckpointExistsError, match=text):
            await asyncckpt.convert(
                tmp_path / "a", tmp_path / place, to="safetensors", overwrite=True
            )
    for checkpoint in ("run/1", "models/best.safetensors"):
        assert blocking.verify(tmp_path / checkpoint).ok


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told[:-1],
        lambda told: "[]",
        lambda told: told.replace('"version":1', '"version":1,"version":1'),
        lambda told: told.replace('"kind":"dict"', '"kind":"set"'),
        lambda told: told.replace('"children":[0', '"children":[1'),
        lambda told: told.replace('"kind":"int","value":"7"', '"kind":"int","value":"x"'),
        lambda told: told.replace('"leaves":', '"leafs":'),
        lambda told: re.sub('"nodes":.*"leaves"', '"leaves"', told),
        lambda told: told.replace('"metadata":{}', '"metadata":[]'),
        lambda told: told.replace('"metrics":{}', '"metrics":{"loss":"1"}'),
        lambda told: told.replace('"extra":{"python":"bytes"}', '"extra":3'),
        lambda told: told + " " * 3 + "{",
    ],
)
async def test_a_damaged_tree_in_the_metadata_is_reported(tmp_path: Path, change: Any) -> None:
    saved(tmp_path / "a", everything())
    file = tmp_path / "x.safetensors"
    await asyncckpt.convert(tmp_path / "a", file)
    told = metadata_of(file)["asyncckpt"]
    assert change(told) != told
    rewritten(file, asyncckpt=change(told))
    with pytest.raises(CorruptCheckpointError, match="the tree in the safetensors metadata"):
        await asyncckpt.convert(file, tmp_path / "b")


async def test_a_tree_of_a_newer_version_is_reported(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": numbers(3)})
    file = tmp_path / "x.safetensors"
    await asyncckpt.convert(tmp_path / "a", file)
    told = metadata_of(file)["asyncckpt"]
    rewritten(file, asyncckpt=told.replace('"version":1', '"version":2'))
    with pytest.raises(UnsupportedFormatError, match="newer release"):
        blocking.restore(file)


async def test_tensors_that_somebody_changed_are_taken_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "a", {"deep": {"w": numbers(3), "b": numbers(2)}, "n": 1})
    file = tmp_path / "x.safetensors"
    await asyncckpt.convert(tmp_path / "a", file)
    save_numpy({"deep.w": numbers(3), "new": numbers(4)}, file, metadata_of(file))
    assert same(blocking.restore(file), {"deep.w": numbers(3), "new": numbers(4)})
    assert "the tensors are not those of the tree in its metadata" in caplog.text


async def test_a_tree_may_not_be_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_tree, "SPARE_LEAVES", 1000)
    leaves = ",".join(['{"kind":"bool","value":true}'] * 1003)
    for count, tree in ((1003, leaves), (1002, leaves.rpartition(",{")[0])):
        told = f'{{"version":1,"nodes":[],"leaves":[{tree}]}}'
        save_numpy({"w": numbers(1)}, tmp_path / "x.safetensors", {"asyncckpt": told})
        text = "more than 1002 items" if count > 1002 else "no nodes, but 1002"
        with pytest.raises(CorruptCheckpointError, match=text):
            blocking.inspect(tmp_path / "x.safetensors")
