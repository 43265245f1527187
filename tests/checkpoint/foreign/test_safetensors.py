"""Files that safetensors wrote, and sets of them, read through the same calls as ours."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import asyncckpt
from asyncckpt import blocking
from asyncckpt.checkpoint.foreign import raw

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def unverified() -> Iterator[None]:
    """That nothing in them has a checksum is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not be verified")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of every kind that safetensors.numpy writes."""
    rng = np.random.default_rng(0)
    return {
        "blocks.0.weight": rng.normal(size=(17, 9)).astype(np.float32),
        "blocks.0.bias": rng.normal(size=9),
        "half": rng.normal(size=(3, 1, 4)).astype(np.float16),
        "bfloat16": rng.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        "complex": (rng.normal(size=4) + 1j * rng.normal(size=4)).astype(np.complex64),
        "bool": rng.integers(0, 2, (2, 3)).astype(bool),
        **{
            name: rng.integers(0, 100, (4, 2)).astype(name)
            for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
        },
        "rank 0": np.array(3.25, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "a/b %2F \u00e4": np.arange(3, dtype=np.int32),
        "": np.arange(2, dtype=np.int8),
        "..": np.arange(2, dtype=np.uint8),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


# -------------------------------------------------------------------------------------- one file


@pytest.mark.parametrize("place", ["file", "directory"])
async def test_every_tensor_of_a_file_comes_back(place: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays(), path, {"format": "np", "step": "7"})
    (tmp_path / "config.json").write_text("{}")
    location = path if place == "file" else tmp_path
    assert_same(await asyncckpt.restore(location), arrays())
    info = await asyncckpt.inspect(location)
    assert info.format == "safetensors"
    assert info.metadata == {"format": "np", "step": "7"}
    assert {leaf.path for leaf in info.leaves} > {"blocks.0.weight", "a%2Fb %252F \u00e4", "%"}
    report = await asyncckpt.verify(location)
    assert not report.damages
    assert len(report.unverified) == len(arrays())


async def test_a_file_is_reported_as_unverified(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones(3), "b": np.ones(2)}, path)
    with pytest.warns(asyncckpt.RestoreWarning, match="2 leaves could not be verified|2 of 2"):
        await asyncckpt.restore(path)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float32,
        torch.bool,
        torch.uint16,
    ],
    ids=str,
)
async def test_tensors_of_torch_come_back_as_such(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.arange(12).reshape(3, 4).float().to(dtype)
    path = tmp_path / "t.safetensors"
    safetensors.torch.save_file({"t": tensor}, path)
    found = (await asyncckpt.restore(path, leaves="torch"))["t"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def module(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 2)
    )


async def test_a_module_is_filled_from_a_file(tmp_path: Path) -> None:
    saved, target = module(0), module(1)
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_model(saved, str(path))
    before = {name: value.data_ptr() for name, value in target.state_dict().items()}
    await asyncckpt.restore_into(path, target)
    for name, value in saved.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
        assert target.state_dict()[name].data_ptr() == before[name]


async def test_like_says_the_types(tmp_path: Path) -> None:
    import jax

    path = tmp_path / "m.safetensors"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.numpy.save_file({"a": values, "b": values}, path)
    like = {"a": jax.ShapeDtypeStruct((2, 3), np.float32), "b": torch.empty(2, 3)}
    found = await asyncckpt.restore(path, like=like)
    assert isinstance(found["a"], jax.Array) and np.array_equal(found["a"], values)
    assert isinstance(found["b"], torch.Tensor) and np.array_equal(found["b"].numpy(), values)
    with pytest.raises(asyncckpt.ShapeMismatchError, match=r"^a: the checkpoint holds shape"):
        await asyncckpt.restore(path, like={**like, "a": np.zeros((3, 2), np.float32)})


def test_parts_of_a_file_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(arrays(), path)
    found = blocking.restore(path, include=["blocks.*"])
    assert found.keys() == {"blocks.0.weight", "blocks.0.bias"}


@pytest.mark.parametrize("target_nbytes", [1, 7, 64, 1000])
async def test_tensors_are_the_same_however_they_are_cut(
    target_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "DEFAULT_CHUNK_NBYTES", target_nbytes)
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(arrays(), path)
    assert_same(await asyncckpt.restore(path), arrays())
    target = {name: np.zeros_like(array) for name, array in arrays().items()}
    await asyncckpt.restore_into(path, target)
    assert_same(target, arrays())


# -------------------------------------------------------------------------------------- many files


def write_set(directory: Path, shards: list[dict[str, Any]]) -> None:
    """A set as the Hugging Face Hub has them."""
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        safetensors.numpy.save_file(shard, directory / name, {"format": "pt", "part": str(number)})
        weight_map |= dict.fromkeys(shard, name)
    nbytes = sum(array.nbytes for shard in shards for array in shard.values())
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


async def test_every_tensor_of_a_set_comes_back(tmp_path: Path) -> None:
    names = sorted(arrays())
    shards = [{name: arrays()[name] for name in names[k::3]} for k in range(3)]
    write_set(tmp_path, shards)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not in the index")
    assert_same(await asyncckpt.restore(tmp_path), arrays())
    info = await asyncckpt.inspect(tmp_path)
    assert len(info.files) == 3
    assert info.metadata["format"] == "pt"
    assert info.metadata["part"] == {
        f"model-{number:05}-of-00003.safetensors": str(number) for number in (1, 2, 3)
    }


async def test_a_set_that_torch_wrote_comes_back(tmp_path: Path) -> None:
    state = {name: value for name, value in module(0).state_dict().items() if value.ndim}
    files = {name: 1 + number % 2 for number, name in enumerate(state)}
    writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping=files)
    torch_dcp.save(state, storage_writer=writer, no_dist=True)
    assert {p.name for p in tmp_path.iterdir()} == {
        INDEX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    found = await asyncckpt.restore(tmp_path, leaves="torch")
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name], value)


def write_shard(directory: Path, rank: int, **offsets: list[int]) -> Path:
    """Write the file of a rank as `HuggingFaceStorageWriter(save_distributed=True)` does."""
    path = directory / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
    info = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
    tensors = {name: np.ones((4, 2)) for name in offsets}
    safetensors.numpy.save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(info)})
    return path


async def test_shards_of_ranks_are_not_taken_for_tensors(tmp_path: Path) -> None:
    # The offsets of the first rank are those of whole tensors.
    first, second = (write_shard(tmp_path, rank, a=[4 * rank, 0]) for rank in range(2))
    for location in (first, second, tmp_path):
        with pytest.raises(asyncckpt.UnsupportedFormatError, match="consolidate the files") as got:
            await asyncckpt.restore(location)
        assert "give the path" not in str(got.value)
    first.unlink()
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="are parts of larger ones"):
        await asyncckpt.restore(tmp_path)


async def test_the_only_shards_of_a_single_rank_are_its_tensors(tmp_path: Path) -> None:
    state = {"a": torch.arange(8.0).reshape(4, 2)}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    torch_dcp.save(state, storage_writer=writer, no_dist=True)
    assert [p.name for p in tmp_path.iterdir()] == ["shard-00001-model-00001-of-00001.safetensors"]
    assert torch.equal((await asyncckpt.restore(tmp_path, leaves="torch"))["a"], state["a"])
