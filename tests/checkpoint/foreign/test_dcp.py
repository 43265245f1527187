"""Checkpoints that torch.distributed.checkpoint wrote, read through the same calls as ours."""

from __future__ import annotations

import copyreg
import json
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as sharded_tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties

import asyncckpt
from asyncckpt import blocking
from asyncckpt.checkpoint.foreign import archives, raw
from asyncckpt.checkpoint.foreign.dcp import open_dcp
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import StoreCapabilities
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.tree import flatten
from tests.children import REPOSITORY, TIMEOUT_S

DATA = "__0_0.distcp"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What torch says about saving on one process, and that it writes no checksums, is known."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not be verified")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of every dtype that is restored, and of every layout."""
    torch.manual_seed(0)
    numbers = torch.arange(24).reshape(4, 6)
    dtypes = (
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32),
        *(torch.int32, torch.uint64, torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
        *(torch.float8_e5m2, torch.float8_e5m2fnuz, torch.bfloat16, torch.float16),
        *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e8m0fnu),
    )
    return {
        **{str(dtype).removeprefix("torch."): numbers.to(dtype) for dtype in dtypes},
        "turned": torch.rand(5, 7).t(),
        "turned twice": torch.rand(2, 3, 4).permute(2, 0, 1),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.rand(10, 10)[2:5, 3:7],
        "expanded": torch.rand(3, 1).expand(3, 4),
        "conjugate": torch.rand(3, 4, dtype=torch.complex64).t().conj(),
        "negative": torch.rand(3, 4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.rand(2)),
        "rank 0": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "of one": torch.rand(1, 4, 1).permute(2, 1, 0),
    }


VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": 3,
    "long": -(2**125),
    "float": 0.1,
    "inf": float("-inf"),
    "complex": 1 - 2j,
    "text": "h\u00e9 \U0001f600",
    "empty text": "",
    "bytes": b"abc\xff\x00",
    "no bytes": b"",
    "many bytes": bytes(range(256)) * 20,
    "pair": (0.9, 0.999),
    "nested": ([1, {"a": (2, None)}], b"x"),
    "numbers": list(range(300)),
    "empty list": [],
    "size": torch.Size([2, 3]),
    "dict": {"a": {"b": 1}},
}


def bits(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


# ------------------------------------------------------------------------------------ one process


async def test_tensors_of_every_dtype_and_layout_come_back(tmp_path: Path) -> None:
    path = save({"t": tensors()}, tmp_path / "c")
    assert_same((await asyncckpt.restore(path, leaves="torch"))["t"], tensors())
    report = await asyncckpt.verify(path)
    assert not report.damages
    assert len(report.unverified) == len(tensors())


@pytest.mark.parametrize("target_nbytes", [1, 30, 64, 1000])
async def test_tensors_are_the_same_however_they_are_cut(
    target_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "DEFAULT_CHUNK_NBYTES", target_nbytes)
    path = save({"t": tensors()}, tmp_path / "c")
    assert_same((await asyncckpt.restore(path, leaves="torch"))["t"], tensors())
    target = {name: torch.zeros_like(t).resolve_conj() for name, t in tensors().items()}
    await asyncckpt.restore_into(path, {"t": target})
    assert_same(target, tensors())


async def test_other_values_come_back_as_they_were(tmp_path: Path) -> None:
    path = save({"v": VALUES}, tmp_path / "c")
    found = (await asyncckpt.restore(path))["v"]
    assert found == VALUES
    assert {name: type(value) for name, value in found.items()} == {
        **{name: type(value) for name, value in VALUES.items()},
        "size": tuple,
    }


async def test_lists_and_keys_are_as_torch_gives_them_back(tmp_path: Path) -> None:
    ones = torch.ones(2)
    state = {
        "list": [ones, {"x": ones, "y": 1}, [ones]],
        "numbers": {1: ones, 10: ones, 2: ones},
        "dots": {"a.b": ones},
        "gap": [ones, {}, ones],
    }
    found = await asyncckpt.restore(save(state, tmp_path / "c"))
    assert list(found["numbers"]) == ["1", "10", "2"]
    assert found["list"][1]["y"] == 1 and len(found["list"]) == 3 and len(found["list"][2]) == 1
    assert found["dots"].keys() == {"a.b"}
    # torch drops the empty dict; what remains keeps its index.
    assert found["gap"].keys() == {0, 2}
    like = await asyncckpt.restore(tmp_path / "c", like=state)
    assert like["numbers"].keys() == {1, 10, 2} and like["gap"][1] == {}


@pytest.mark.parametrize(
    "options",
    [
        {"single_file_per_rank": False},
        {"thread_count": 3},
        {"sync_files": False, "per_thread_copy_ahead": 0},
    ],
    ids=str,
)
async def test_however_it_is_spread_over_files(options: dict[str, Any], tmp_path: Path) -> None:
    state = {"t": tensors(), "v": {"lr": 0.1, "name": "x"}}
    writer = FileSystemWriter(tmp_path / "c", **options)
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = await asyncckpt.restore(tmp_path / "c", leaves="torch")
    assert_same(found["t"], tensors())
    assert found["v"] == {"lr": 0.1, "name": "x"}


async def test_a_state_dict_that_was_not_flattened_keeps_its_keys(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"a.b": torch.ones(2), "c": {"d": [1, 2.5]}}
    found = await asyncckpt.restore(save(state, tmp_path / "c", planner=planner))
    assert found.keys() == {"a.b", "c"}
    assert found["c"] == {"d": [1, 2.5]}


async def test_inspect_tells_shapes_and_values(tmp_path: Path) -> None:
    path = save({"w": torch.ones(4, 2), "lr": 0.5}, tmp_path / "c")
    info = await asyncckpt.inspect(path)
    assert (info.format, info.library) == ("dcp", "torch.distributed.checkpoint")
    (w, lr) = info.leaves
    assert (w.path, w.shape, w.dtype, w.stored_nbytes) == ("w", (4, 2), "float32", 32)
    assert (lr.path, lr.kind, lr.value) == ("lr", "float", 0.5)


# ----------------------------------------------------------------------------------------- training


def training(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train(run: tuple[torch.nn.Module, torch.optim.Optimizer, Any], steps: int) -> list[float]:
    model, optimizer, schedule = run
    losses = []
    for step in range(steps):
        data = torch.linspace(-1, 1 + step, 12).reshape(3, 4)
        loss = model(data).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def parts(run: tuple[torch.nn.Module, torch.optim.Optimizer, Any]) -> dict[str, Any]:
    return dict(zip(("model", "optimizer", "schedule"), run, strict=True))


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    first = training(0)
    train(first, 3)
    state = {name: part.state_dict() for name, part in parts(first).items()}
    path = save(state, tmp_path / "c")
    expected = train(first, 4)
    fresh, used = training(1), training(2)
    train(used, 1)
    for run in (fresh, used):
        blocking.restore_into(path, parts(run))
        assert train(run, 4) == expected


def test_an_optimizer_without_state_is_restored(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    saved, target = (torch.optim.SGD([parameter], lr=lr) for lr in (0.5, 0.1))
    path = save({"optimizer": saved.state_dict()}, tmp_path / "c")
    blocking.restore_into(path, {"optimizer": target})
    assert target.state_dict() == saved.state_dict()


# ------------------------------------------------------------------------------- what is not read


class Settings:
    """An object of the program that saved."""


async def test_arrays_and_scalars_of_numpy_come_back_from_pickled_values(tmp_path: Path) -> None:
    arrays = {
        "ints": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "big": np.arange(4, dtype=">i2"),
        "empty": np.zeros((0, 3), np.complex64),
        "bool": np.array([True, False]),
        "rank 0": np.array(2.5, np.float16),
        "float": np.float64(0.25),
        "uint": np.uint8(7),
        "large": np.arange(5000.0),
    }
    state = {"w": torch.ones(2), "a": arrays, "rng": np.random.RandomState(0).get_state()}
    path = save(state, tmp_path / "c")
    found = await asyncckpt.restore(path)
    assert found["a"].keys() == arrays.keys()
    for name, array in arrays.items():
        assert found["a"][name].dtype == array.dtype.newbyteorder("="), name
        np.testing.assert_array_equal(found["a"][name], array)
    drawn = np.random.RandomState(1)
    drawn.set_state(found["rng"])
    assert drawn.random() == np.random.RandomState(0).random()
    assert (await asyncckpt.verify(path)).ok
    await asyncckpt.convert(path, tmp_path / "d")
    assert (await asyncckpt.diff(path, tmp_path / "d")).equal


async def test_tensors_in_pickled_values_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    inner = {
        "betas": (torch.tensor(0.9), torch.tensor(0.99, dtype=torch.bfloat16)),
        "views": (base, base.t(), base[1], torch.zeros(0, 3), torch.ones(3).to(torch.uint16)),
        "conj": (torch.tensor([1 + 2j, 3 - 1j]).conj(), 7, np.ones(2)),
    }
    state = {"w": torch.ones(2), "x": inner}
    path = save(state, tmp_path / "c")
    found = (await asyncckpt.restore(path, leaves="torch"))["x"]
    for name, value in inner.items():
        assert type(found[name]) is tuple
        tensors = {f"{n}": t for n, t in enumerate(value) if isinstance(t, torch.Tensor)}
        assert_same({key: found[name][int(key)] for key in tensors}, tensors)
    assert found["conj"][1] == 7
    await asyncckpt.convert(path, tmp_path / "d")
    assert (await asyncckpt.diff(path, tmp_path / "d")).equal


async def test_dtypes_and_devices_come_back_as_their_names(tmp_path: Path) -> None:
    state = {"d": torch.bfloat16, "at": (torch.device("cpu"), torch.device("cuda", 1))}
    found = await asyncckpt.restore(save(state, tmp_path / "c"))
    assert found == {"d": "torch.bfloat16", "at": ("cpu", "cuda:1")}


async def test_one_error_lists_all_that_cannot_be_read(tmp_path: Path) -> None:
    state = {"s": {1, 2}, "w": torch.ones(2), "o": Settings(), "names": np.array(["a", "b"])}
    path = save(state, tmp_path / "c")
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="3 leaves cannot be read") as caught:
        await asyncckpt.restore(path)
    for name, found in (("s", "set"), ("o", "Settings"), ("names", "the dtype 'U1'")):
        assert re.search(f"the archive of '{name}' has .*{found}", str(caught.value))


async def test_who_leaves_out_what_cannot_be_read_gets_the_rest(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0), "settings": Settings(), "set": {1}}
    path = save(state, tmp_path / "c")
    assert (await asyncckpt.restore(path, include=["w"]))["w"].tolist() == [0, 1, 2]
    for name, found in (("settings", "Settings"), ("set", "__builtin__.set")):
        with pytest.raises(asyncckpt.UnsupportedFormatError, match=found) as caught:
            await asyncckpt.restore(path, include=[name])
        assert caught.value.file == DATA
        assert f"the archive of '{name}'" in str(caught.value)
    info = await asyncckpt.inspect(path)
    assert {leaf.path: leaf.compression for leaf in info.leaves} == {
        "w": None,
        "settings": "unreadable",
        "set": "unreadable",
    }
    target = np.zeros(3, np.float32)
    with pytest.raises(asyncckpt.UnsupportedFormatError):
        await asyncckpt.restore(path)
    await asyncckpt.restore_into(path, {"w": target}, strict=False, include=["w"])
    assert target.tolist() == [0, 1, 2]


def damaged(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray((path / DATA).read_bytes())
    change(data)
    (path / DATA).write_bytes(data)


async def test_damage_concerns_the_leaf_that_it_hits(tmp_path: Path) -> None:
    path = save({name: torch.full((400,), float(name)) for name in "123"}, tmp_path / "c")

    def hit(data: bytearray) -> None:
        head = data.index(b"PK\x03\x04", data.index(b"archive/.data/serialization_id"))
        data[head : head + 4] = b"PKxx"

    damaged(path, hit)
    found = await asyncckpt.restore(path, include=["1", "3"])
    assert (found["1"] == 1).all() and (found["3"] == 3).all()
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="the archive of '2'") as caught:
        await asyncckpt.restore(path)
    assert caught.value.file == DATA
    report = await asyncckpt.verify(path)
    assert [damage.leaf for damage in report.damages] == ["2"]
    assert report.damages[0].file == DATA


async def test_of_a_truncated_file_the_whole_archives_are_read(tmp_path: Path) -> None:
    path = save({name: torch.full((400,), float(name)) for name in "123"}, tmp_path / "c")
    damaged(path, lambda data: data.__delitem__(slice(-100, None)))
    assert (await asyncckpt.restore(path, include=["1", "2"])).keys() == {"1", "2"}
    with pytest.raises(asyncckpt.CorruptCheckpointError, match=r"archive of '3' ends at byte \d+"):
        await asyncckpt.restore(path)
    report = await asyncckpt.verify(path)
    assert [damage.leaf for damage in report.damages] == ["3"]


@pytest.mark.parametrize("cut", [0, 100, 6000])
async def test_extents_are_inside_their_files(cut: int, tmp_path: Path) -> None:
    """Leaves that are refused have none: nothing checks extents again before they are read."""
    path = save(tensors(), tmp_path / "c")
    damaged(path, lambda data: data.__delitem__(slice(len(data) - cut, None)))
    workers = Workers(2, "test")
    try:
        checkpoint = await open_dcp(LocalFiles(str(path), workers, StoreCapabilities()))
        extents = await checkpoint.read_extents(checkpoint, None)
    finally:
        workers.shutdown()
    sizes = np.array([file.nbytes for file in checkpoint.stored_files])[extents.file]
    stored = extents.file >= 0
    assert set(np.flatnonzero(~stored).tolist()) == extents.values.keys()
    assert (extents.offset >= 0).all() and (extents.nbytes >= 0).all()
    assert (extents.offset + extents.nbytes <= sizes)[stored].all()


async def test_neighbouring_heads_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"{n}": torch.full((4,), float(n)) for n in range(200)}
    path = save({**state, "large": torch.zeros(1 << 18)}, tmp_path / "c")
    reads: list[int] = []
    read = archives.Archives.read

    async def counted(self: archives.Archives) -> None:
        files = self._listing.files
        read_into = files.read_into

        async def counting(file: str, offset: int, parts: Any, **how: Any) -> None:
            reads.append(sum(part.nbytes for part in parts))
            await read_into(file, offset, parts, **how)

        with monkeypatch.context() as patch:
            patch.setattr(files, "read_into", counting)
            await read(self)

    monkeypatch.setattr(archives.Archives, "read", counted)
    assert_same(
        await asyncckpt.restore(path, leaves="torch", include=[f"{n}" for n in range(200)]), state
    )
    assert 0 < len(reads) <= 3
    assert sum(reads) < 400_000


# --------------------------------------------------------------------------------- four processes


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of sharded tensors and of a module trained with FSDP, by four processes."""
    directory = tmp_path_factory.mktemp("four_ranks")
    command = [sys.executable, "-m", "tests.checkpoint.foreign.dcp_writer", str(directory)]
    child = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert child.returncode == 0, child.stderr
    return directory


async def test_sharded_tensors_come_back_whole(four_ranks: Path) -> None:
    found = flatten(await asyncckpt.restore(four_ranks / "ckpt"))
    arrays = {
        path: leaf
        for path, leaf in zip(found.paths, found.leaves, strict=True)
        if isinstance(leaf, np.ndarray)
    }
    whole = dict(np.load(four_ranks / "whole.npz"))
    assert arrays.keys() == whole.keys()
    assert len(whole) > 20
    for path, array in whole.items():
        assert arrays[path].shape == array.shape, path
        assert arrays[path].astype(np.float32).tobytes() == array.tobytes(), path


async def test_what_ranks_agree_on_comes_back_once(four_ranks: Path) -> None:
    found = await asyncckpt.restore(four_ranks / "ckpt")
    assert found["run"] == {
        "epoch": 3,
        "name": "four ranks",
        "losses": [0.5, 0.25],
        "seed": None,
    }
    (group,) = found["optimizer"]["param_groups"]
    assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.999))


async def test_shards_are_pieces_and_parts_of_them_are_read_alone(four_ranks: Path) -> None:
    info = await asyncckpt.inspect(four_ranks / "ckpt")
    pieces = {leaf.path: [offset for offset, *_ in leaf.pieces] for leaf in info.leaves}
    assert pieces["tensors/uneven"] == [(0, 0), (3, 0), (6, 0), (9, 0)]
    assert pieces["tensors/tiles"] == [(0, 0), (0, 4), (3, 0), (3, 4)]
    assert pieces["tensors/replicated"] == []
    report = await asyncckpt.restore_into(
        four_ranks / "ckpt",
        {"tensors": {"uneven": np.zeros((10, 3), np.float32)}},
        include=["tensors/uneven"],
    )
    assert report.read_nbytes == 10 * 3 * 4


async def test_a_module_trained_by_ranks_is_filled_on_one(four_ranks: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    await asyncckpt.restore_into(four_ranks / "ckpt", {"model": model}, include=["model"])
    whole = np.load(four_ranks / "whole.npz")
    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == whole[f"model/{name}"].tobytes()


# ------------------------------------------------------------------------------ newer versions

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.filterwarnings("ignore:.*newer version of torch:asyncckpt.RestoreWarning")
def test_what_torch_2_15_wrote_is_read_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    """Its `TensorProperties` have six items."""
    expected = json.loads((GOLDEN / "dcp-torch-2.15.json").read_text())
    path = GOLDEN / "dcp-torch-2.15"
    flat = flatten(blocking.restore(path))
    found = dict(zip(flat.structure.paths(), flat.leaves, strict=True))
    nothing = {name for name, leaf in expected.items() if leaf.get("value", 0) is None}
    assert found.keys() == expected.keys() - nothing
    for name, leaf in found.items():
        if "value" in expected[name]:
            assert leaf == expected[name]["value"] and type(leaf) is type(expected[name]["value"])
            continue
        assert f"torch.{leaf.dtype}" == expected[name]["dtype"]
        assert list(leaf.shape) == expected[name]["shape"]
        assert leaf.reshape(-1).tolist() == expected[name]["values"]
    assert "newer version of torch.distributed.checkpoint" in caplog.text
    assert "TensorProperties.5" in caplog.text
    assert (blocking.verify(path)).damages == ()


def test_what_torch_2_2_wrote_is_read(tmp_path: Path) -> None:
    """Its `TensorProperties` are those of sharded tensors, and later fields are absent."""
    state = {"t": tensors(), "n": 5}
    path = save(state, tmp_path / "c")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = sharded_tensor.TensorProperties(**vars(entry.properties))
    for info in metadata.storage_data.values():
        vars(info).pop("transform_descriptors", None)
    del metadata.storage_meta, metadata.version
    pickled = pickle.dumps(metadata, 4)
    assert b"MEM_FORMAT_ENCODING" in pickled and b"_MEM_FORMAT_ENCODING" not in pickled
    (path / ".metadata").write_bytes(pickled)
    theirs = {"t": {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}, "n": 0}
    dcp.load(theirs, checkpoint_id=path, no_dist=True)
    assert_same(theirs["t"], tensors())  # type: ignore[arg-type]
    ours = blocking.restore(path, leaves="torch")
    assert_same(ours["t"], tensors())
    assert ours["n"] == 5


def test_what_python_3_11_0_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pickles members of enums by name, with `getattr`."""

    def by_name(member: Any, _: int) -> tuple[Any, ...]:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    path = save({"t": tensors()}, tmp_path / "c")
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert_same(blocking.restore(path, leaves="torch")["t"], tensors())


class NewerPickler(pickle.Pickler):
    """Adds two items to the state of `TensorProperties`."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorProperties):
            return NotImplemented
        state = (*obj.__getstate__(), "further", ("items",))  # type: ignore[misc]
        return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def rewrite(path: Path, metadata: object) -> None:
    with path.open("wb") as file:
        NewerPickler(file, 4).dump(metadata)


@pytest.mark.filterwarnings("ignore:.*newer version of torch:asyncckpt.RestoreWarning")
def test_keys_that_are_not_valid_unicode_are_read(tmp_path: Path) -> None:
    """torch saves them; savers of ours refuse them, and paths show them escaped."""
    path = save({"a": torch.arange(4), "n": 5}, tmp_path / "c")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    key = "a\ud800"
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata.pop("a")
    metadata.planner_data = {key: (key,), "n": ("in", "\udfff")}
    metadata.storage_data = {
        replace(index, fqn=key) if index.fqn == "a" else index: info
        for index, info in metadata.storage_data.items()
    }
    rewrite(path / ".metadata", metadata)
    assert [leaf.path for leaf in blocking.inspect(path).leaves] == ["a%ED%A0%80", "in/%ED%BF%BF"]
    found = blocking.restore(path)
    assert found[key].tolist() == [0, 1, 2, 3] and found["in"] == {"\udfff": 5}


@pytest.mark.filterwarnings("ignore:.*newer version of torch:asyncckpt.RestoreWarning")
def test_further_fields_are_ignored_where_they_are_unused(tmp_path: Path) -> None:
    path = save({"w": torch.arange(4)}, tmp_path / "c")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.new_field = None
    rewrite(path / ".metadata", metadata)
    with pytest.warns(asyncckpt.RestoreWarning, match="Metadata.new_field, TensorProperties.5, "):
        assert blocking.restore(path)["w"].tolist() == [0, 1, 2, 3]
    metadata.new_field = "compressed"
    rewrite(path / ".metadata", metadata)
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="the field 'new_field' of Metadata"):
        blocking.restore(path)
