"""Checkpoints of other libraries, made by them, become ours; and ours are restored by Orbax."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import asyncckpt
from asyncckpt import SaveOptions, ShardedArray, blocking
from asyncckpt.errors import UsageError
from asyncckpt.options import MIB
from asyncckpt.tree import flatten
from tests.checkpoint.foreign.orbax_writers import WRITERS, as_orbax_likes_it, manager, pytree
from tests.convert.trees import numbers, same, saved

SMALL = SaveOptions(host_memory_nbytes=64 * MIB)

pytestmark = pytest.mark.filterwarnings("ignore::asyncckpt.RestoreWarning")


def orbax_restored(path: Path) -> Any:
    """The tree that Orbax restores without a target."""
    with as_orbax_likes_it(), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path / "default")


def by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path, whatever the containers are."""
    taken = flatten(tree)
    return dict(zip(taken.structure.paths(), taken.leaves, strict=True))


def dcp_saved(path: Path, tree: Any) -> Path:
    """The path at which torch has saved the tree."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tree, checkpoint_id=path)
    return path


def plain(leaf: Any) -> Any:
    """A leaf as NumPy and Python have it."""
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)
    return leaf


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        a, b = plain(found[path]), plain(value)
        if isinstance(b, (int, float, str, type(None))):
            assert a == b, path
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), path
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.fixture(scope="module", params=WRITERS)
def orbax(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict[str, Any]]]:
    write, tree_of = WRITERS[request.param]
    tree = tree_of()
    yield write(tmp_path_factory.mktemp("orbax") / "checkpoint", tree), tree


async def test_orbax_becomes_ours_and_orbax_restores_that(
    orbax: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, tree = orbax
    report = await asyncckpt.convert(path, tmp_path / "ours", options=SMALL)
    assert (report.source_format, report.format, report.orbax) == ("orbax", "asyncckpt", True)
    assert blocking.verify(tmp_path / "ours").ok
    ours = blocking.restore(tmp_path / "ours")
    assert same(ours, blocking.restore(path))
    assert_equal(by_path(ours), by_path(tree))
    assert_equal(by_path(orbax_restored(tmp_path / "ours")), by_path(tree))
    assert (await asyncckpt.diff(path, tmp_path / "ours")).equal


async def test_orbax_becomes_safetensors_and_comes_back(tmp_path: Path) -> None:
    write, tree_of = WRITERS["zarr2"]
    path = write(tmp_path / "a", tree_of())
    cast = SaveOptions(
        leaf_options=lambda _, spec: (
            asyncckpt.LeafOptions(dtype="int8") if spec.dtype == "int4" else None
        )
    )
    await asyncckpt.convert(path, tmp_path / "x.safetensors", options=cast)
    tensors = load_file(tmp_path / "x.safetensors")
    source = blocking.restore(path)
    assert np.array_equal(tensors["large"].numpy(), source["large"])
    assert tensors["jax.int4"].dtype == torch.int8
    source["jax"]["int4"] = source["jax"]["int4"].astype(np.int8)
    assert same(blocking.restore(tmp_path / "x.safetensors"), source)


async def test_the_newest_step_of_a_manager_stands_for_its_run(tmp_path: Path) -> None:
    manager(tmp_path / "run", {"w": numbers(5)})
    report = await asyncckpt.convert(tmp_path / "run", tmp_path / "ours" / "12")
    assert report.source == str(tmp_path / "run" / "12")
    with blocking.Checkpointer(tmp_path / "ours") as run:
        assert run.steps() == [12]
        assert np.array_equal(run.restore()["w"], numbers(5))


async def test_a_chunk_larger_than_the_budget_is_decoded_alone(tmp_path: Path) -> None:
    # Orbax makes one compressed chunk of what one process holds.
    values = numbers(3000, 8000)
    pytree(tmp_path / "a", {"w": values, "b": numbers(3)}, use_ocdbt=True, use_zarr3=True)
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b", options=SMALL)
    assert blocking.inspect(tmp_path / "b")["w"].chunk_count > 1
    assert np.array_equal(blocking.restore(tmp_path / "b")["w"], values)
    assert any("91.6 MiB and was decoded alone" in note for note in report.notes)
    assert report.read_nbytes <= sum(f.nbytes for f in blocking.inspect(tmp_path / "a").files)


async def test_what_claims_much_and_stores_nothing_is_refused(tmp_path: Path) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/a/", "path": "w/"},
        "metadata": {
            "shape": [1 << 33],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 29]}},
        },
    }
    await ts.open(spec, create=True)
    for destination in ("b", "b.safetensors"):
        with pytest.raises(asyncckpt.UnsupportedFormatError, match="implied fill values"):
            await asyncckpt.convert(tmp_path / "a", tmp_path / destination)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


async def test_one_chunk_that_is_not_stored_does_not_count_for_all(tmp_path: Path) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/a/", "path": "w/"},
        "metadata": {
            "shape": [20 * MIB],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4 * MIB]}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1}},
            ],
        },
    }
    array = await ts.open(spec, create=True)
    await array[: 16 * MIB].write(1.0)  # 64 MiB that take a few KiB, then a chunk that is absent
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b")
    assert report.nbytes == 80 * MIB
    restored = by_path(blocking.restore(tmp_path / "b"))["w"]
    assert (restored[: 16 * MIB] == 1).all() and not restored[16 * MIB :].any()


async def test_a_plain_database_becomes_ours(tmp_path: Path) -> None:
    values = numbers(500, 300)
    for driver, name in (("zarr3", "deep/w"), ("zarr", "v")):
        spec = {
            "driver": driver,
            "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/a/", "path": f"{name}/"},
        }
        array = await ts.open(spec, create=True, dtype=ts.float32, shape=values.shape)
        await array.write(values)
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b")
    assert report.source_format == "ocdbt" and report.leaf_count == 2
    found = by_path(blocking.restore(tmp_path / "b"))
    assert all(np.array_equal(value, values) for value in found.values())
    assert (await asyncckpt.diff(tmp_path / "a", tmp_path / "b")).equal


async def test_dcp_becomes_ours(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "opt": optimizer.state_dict(),
        "half": torch.arange(70_000).reshape(7, -1).to(torch.bfloat16),
        "step": 7,
        "names": ["a", {"b": 1.5}],
    }
    dcp_saved(tmp_path / "a", tree)
    report = await asyncckpt.convert(tmp_path / "a", tmp_path / "b", options=SMALL)
    assert (report.source_format, report.orbax) == ("dcp", True)
    found = blocking.restore(tmp_path / "b", leaves="torch")
    assert same(blocking.restore(tmp_path / "b"), blocking.restore(tmp_path / "a"))
    assert torch.equal(found["model"]["weight"], model.weight)
    assert torch.equal(found["half"], tree["half"])
    assert found["step"] == 7
    again = torch.nn.Linear(300, 50)
    blocking.restore_into(tmp_path / "b", {"model": again}, strict=False)
    assert torch.equal(again.weight, model.weight)
    assert (await asyncckpt.diff(tmp_path / "a", tmp_path / "b")).equal


async def test_dcp_becomes_safetensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 5)
    dcp_saved(tmp_path / "a", {"model": model.state_dict()})
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    assert torch.equal(tensors["model.weight"], model.weight)


async def test_an_export_of_pieces_is_restored_by_orbax(tmp_path: Path) -> None:
    values = numbers(10_000, 30)
    cuts = [(0, 3001), (3001, 5000), (5000, 8001), (8001, 10_000)]
    rows = ShardedArray(values.shape, values.dtype, [((a, 0), values[a:b]) for a, b in cuts])
    columns = ShardedArray(
        values.shape[::-1], values.dtype, [((0, a), values[a:b].T) for a, b in cuts]
    )
    tree = {"rows": rows, "deep": {"columns": columns}, "n": 3, "name": "x"}
    saved(tmp_path / "a", tree, options=SMALL)
    assert len(blocking.inspect(tmp_path / "a")["rows"].pieces) == 4
    assert not (tmp_path / "a" / "default" / "_METADATA").exists()
    report = await asyncckpt.export(tmp_path / "a", tmp_path / "b", options=SMALL)
    assert report.orbax and report.notes == ()
    restored = orbax_restored(tmp_path / "b")
    assert np.array_equal(restored["rows"], values)
    assert np.array_equal(restored["deep"]["columns"], values.T)
    assert (restored["n"], restored["name"]) == (3, "x")
    assert (await asyncckpt.diff(tmp_path / "a", tmp_path / "b")).equal


async def test_typed_keys_stay_keys_for_orbax_and_for_us(tmp_path: Path) -> None:
    keys = {"one": jax.random.key(3), "many": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    saved(tmp_path / "a", keys)
    await asyncckpt.export(tmp_path / "a", tmp_path / "b")
    await asyncckpt.convert(tmp_path / "a", tmp_path / "x.safetensors")
    for found in (
        blocking.restore(tmp_path / "b", leaves="jax"),
        blocking.restore(tmp_path / "x.safetensors", leaves="jax"),
        orbax_restored(tmp_path / "b"),
    ):
        for name, key in keys.items():
            assert found[name].dtype == key.dtype
            assert np.array_equal(jax.random.key_data(found[name]), jax.random.key_data(key))


async def test_a_truncated_foreign_file_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    dcp_saved(tmp_path / "a", {"w": torch.arange(500_000)})
    file = tmp_path / "a" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1_000_000])
    with pytest.raises(asyncckpt.CorruptCheckpointError):
        await asyncckpt.convert(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_document_that_is_too_deep_inside_the_metadata_is_refused(tmp_path: Path) -> None:
    corpus = Path(__file__).parents[1] / "checkpoint/foreign/corpus/orbax/json-item"
    source = shutil.copytree(corpus, tmp_path / "a")
    document: Any = 1
    for _ in range(256):
        document = {"in": document}
    (source / "meta/metadata").write_text(json.dumps(document))
    assert blocking.inspect(source).metadata == {"meta": document}
    with pytest.raises(UsageError, match="metadata is nested deeper than 256; save it as leaves"):
        blocking.convert(source, tmp_path / "b", to="asyncckpt")
    assert not (tmp_path / "b").exists()
