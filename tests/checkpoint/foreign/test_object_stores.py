"""Checkpoints of other libraries on object stores, and other libraries reading ours there.

Orbax, `torch.distributed.checkpoint` and TensorStore write to the simulator by their own clients.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save as safetensors_bytes
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import asyncckpt
from asyncckpt import blocking
from tests.checkpoint.foreign.orbax_at_gcs import tree
from tests.convert.trees import same
from tests.simulator import LOOPBACK, Fault, Gate, Simulator, simulator

SCRIPT = Path(__file__).with_name("orbax_at_gcs.py")
ORBAX = ["zarr2", "zarr3", "directories", "standard", "manager/12", "manager/12/default"]
OURS = {"w": tree()["w"], "n": 5}

pytestmark = pytest.mark.filterwarnings("ignore:.*could not be verified")


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


def options(sim: Simulator, scheme: str) -> dict[str, Any]:
    return sim.gcs_options() if scheme == "gs" else sim.s3_options()


@pytest.fixture(scope="module")
def ours(sim: Simulator) -> str:
    """A step of ours on GCS."""
    with blocking.Checkpointer("gs://bucket/ours", storage_options=sim.gcs_options()) as run:
        run.save(7, OURS, metadata={"seed": 1})
    return "gs://bucket/ours/7"


@pytest.fixture(scope="module")
def orbax(sim: Simulator, ours: str) -> dict[str, Any]:
    """Orbax has written below bucket/orbax, and says what it found in ours."""
    command = [sys.executable, str(SCRIPT), sim.gcs_endpoint, "bucket", ours]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ----------------------------------------------------------------------------------------- Orbax


@pytest.mark.parametrize(
    ("scheme", "name"), [*(("gs", name) for name in ORBAX), ("s3", "zarr2"), ("s3", "manager/12")]
)
async def test_what_orbax_wrote_is_restored_inspected_and_verified(
    sim: Simulator, orbax: dict[str, Any], name: str, scheme: str
) -> None:
    url, storage = f"{scheme}://bucket/orbax/{name}", options(sim, scheme)
    expected = {key: value for key, value in tree().items() if key != "text" or name != "standard"}
    found = await asyncckpt.restore(url, storage_options=storage)
    assert same(dict(sorted(found.items())), dict(sorted(expected.items())))
    info = await asyncckpt.inspect(url, storage_options=storage)
    assert (info.format, info.location) == ("orbax", url)
    assert "commit_success.txt" not in {leaf.path for leaf in info.leaves}
    report = await asyncckpt.verify(url, storage_options=storage)
    assert report.ok and report.leaf_count == len(expected)


async def test_the_newest_step_of_an_orbax_run_becomes_ours(
    sim: Simulator, orbax: dict[str, Any]
) -> None:
    storage = sim.gcs_options()
    report = await asyncckpt.convert(
        "gs://bucket/orbax/manager", "gs://bucket/new/12", storage_options=storage
    )
    assert (report.source, report.source_format) == ("gs://bucket/orbax/manager/12", "orbax")
    assert (await asyncckpt.verify("gs://bucket/new/12", storage_options=storage)).ok
    again = await asyncckpt.diff(
        "gs://bucket/orbax/manager", "gs://bucket/new/12", storage_options=storage
    )
    assert again.equal


async def test_chunks_that_are_not_stored_cost_few_round_trips(tmp_path: Path) -> None:
    metadata = {"shape": [400], "chunks": [4], "dtype": "<f4", "compressor": None}
    spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/w/", "metadata": metadata}
    array = ts.open(spec, create=True).result()
    array[:4].write(np.ones(4, np.float32)).result()
    entry = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
    document = {"tree_metadata": {"('w',)": entry}, "use_ocdbt": False}
    (tmp_path / "_METADATA").write_text(json.dumps(document))
    with simulator(replace(LOOPBACK, get_latency_s=0.02)) as sim:
        for name in ("_METADATA", "w/.zarray", "w/0"):
            sim.put("bucket", f"sparse/{name}", (tmp_path / name).read_bytes())
        found = await asyncckpt.restore("s3://bucket/sparse", storage_options=sim.s3_options())
        assert found["w"].sum() == 4
        assert sim.stats().max_in_flight > 8


@pytest.mark.usefixtures("unraced")
async def test_a_part_reads_a_part(sim: Simulator, orbax: dict[str, Any]) -> None:
    before = len(sim.requests)
    found = await asyncckpt.restore(
        "gs://bucket/orbax/zarr3", include="deep", storage_options=sim.gcs_options()
    )
    assert list(found) == ["deep"]
    read = sum(entry.nbytes for entry in sim.requests[before:] if entry.kind == "get_object")
    assert read < tree()["w"].nbytes


def test_orbax_restores_ours_through_its_own_clients(orbax: dict[str, Any], ours: str) -> None:
    assert orbax == {ours: {"w": float(OURS["w"].sum(dtype=np.float64)), "n": 5}}


# ----------------------------------------------------------------------------------- TensorStore


def ocdbt(sim: Simulator, path: str, array: str) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": sim.tensorstore_s3("bucket", path), "path": array}


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
async def test_a_database_that_tensorstore_wrote_to_s3_is_read(sim: Simulator, driver: str) -> None:
    path = f"database-{driver}/"
    values = np.arange(6000, dtype=np.int32).reshape(60, 100)
    shapes = {
        "zarr": {"chunks": [16, 100], "shape": [60, 100], "dtype": "<i4", "compressor": None},
        "zarr3": {"shape": [60, 100], "data_type": "int32"},
    }
    spec = {"driver": driver, "kvstore": ocdbt(sim, path, "a/b/"), "metadata": shapes[driver]}
    array = await ts.open(spec, create=True)
    await array.write(values)
    for scheme in ("s3", "gs"):
        url, storage = f"{scheme}://bucket/{path}", options(sim, scheme)
        found = await asyncckpt.restore(url, storage_options=storage)
        assert same(found, {"a": {"b": values}})
        assert (await asyncckpt.inspect(url, storage_options=storage)).format == "ocdbt"
        assert (await asyncckpt.verify(url, storage_options=storage)).ok


async def test_tensorstore_reads_ours_from_s3(sim: Simulator) -> None:
    large = np.arange(5_000_000, dtype=np.float32)
    saved = {"params": {"w": tree()["w"], "large": large, "small": np.arange(3)}}
    await asyncckpt.save("s3://bucket/for/tensorstore", saved, storage_options=sim.s3_options())
    for name in saved["params"]:
        kvstore = ocdbt(sim, "for/tensorstore/default/", f"params.{name}/")
        array = await ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True)
        assert np.array_equal(await array.read(), saved["params"][name])


async def test_the_lazy_handle_names_the_url(sim: Simulator, ours: str) -> None:
    info = await asyncckpt.inspect(ours, storage_options=sim.gcs_options())
    spec = info["w"].tensorstore_spec()
    assert spec["kvstore"]["base"] == f"{ours}/default/"
    base = sim.tensorstore_s3("bucket", "ours/7/default/")
    array = await ts.open({**spec, "kvstore": {**spec["kvstore"], "base": base}}, open=True)
    assert np.array_equal(await array[3, :2].read(), OURS["w"][3, :2])


# ------------------------------------------------------------------------- DCP and safetensors


def s3(sim: Simulator) -> dict[str, Any]:
    return {**sim.s3_options(), "use_listings_cache": False}


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_what_dcp_wrote_through_s3fs_is_restored(sim: Simulator, scheme: str) -> None:
    model = torch.nn.Linear(40, 30)
    state = {"model": model.state_dict(), "step": 7, "name": "x"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        writer = FsspecWriter(f"s3://bucket/dcp-{scheme}", **s3(sim))
        await asyncio.to_thread(dcp.save, state, storage_writer=writer, no_dist=True)
    url, storage = f"{scheme}://bucket/dcp-{scheme}", options(sim, scheme)
    found = await asyncckpt.restore(url, leaves="torch", storage_options=storage)
    assert found["step"] == 7 and found["name"] == "x"
    assert torch.equal(found["model"]["weight"], model.weight)
    fresh = torch.nn.Linear(40, 30)
    await asyncckpt.restore_into(url, {"model": fresh}, include="model", storage_options=storage)
    assert torch.equal(fresh.bias, model.bias)
    assert (await asyncckpt.inspect(url, storage_options=storage)).format == "dcp"
    assert (await asyncckpt.verify(url, storage_options=storage)).ok


@pytest.mark.parametrize("scheme", ["s3", "gs", "memory"])
async def test_safetensors_files_are_read_as_one_and_as_a_set(sim: Simulator, scheme: str) -> None:
    storage = {} if scheme == "memory" else options(sim, scheme)
    first, second = {"a": np.arange(5000.0)}, {"b": np.ones((3, 4), np.int8)}
    index = {"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    files = {
        "set/1.safetensors": safetensors_bytes(first),
        "set/2.safetensors": safetensors_bytes(second),
        "set/model.safetensors.index.json": json.dumps(index).encode(),
        "one.safetensors": safetensors_bytes({**first, **second}),
    }
    for path, data in files.items():
        if scheme == "memory":
            fsspec.filesystem("memory").pipe_file(f"/st/{path}", data)
        else:
            sim.put("bucket", f"st-{scheme}/{path}", data)
    root = "memory://st" if scheme == "memory" else f"{scheme}://bucket/st-{scheme}"
    for name in ("set", "set/", "one.safetensors"):
        found = await asyncckpt.restore(f"{root}/{name}", storage_options=storage)
        assert same(found, {**first, **second})
    part = await asyncckpt.restore(f"{root}/set", include="b", storage_options=storage)
    assert same(part, second)


@pytest.mark.usefixtures("unraced")
async def test_the_heads_of_a_set_take_one_read_each_and_all_at_once(sim: Simulator) -> None:
    names = [f"{number}.safetensors" for number in range(20)]
    index = {"metadata": {}, "weight_map": {name: name for name in names}}
    for name in names:
        sim.put("bucket", f"heads/{name}", safetensors_bytes({name: np.arange(50_000.0)}))
    sim.put("bucket", "heads/model.safetensors.index.json", json.dumps(index).encode())
    gate = Gate()
    sim.faults.append(Fault(kind="get_object", key="heads/0.*", number=1, gate=gate))
    sim.reset()
    task = asyncio.create_task(
        asyncckpt.inspect("s3://bucket/heads", storage_options=sim.s3_options())
    )
    await gate.reached.wait()
    while len(heads := reads_of(sim, "heads/")) < len(names):  # none waits for the first one
        await asyncio.sleep(0.001)
    gate.release()
    assert len((await task).leaves) == len(names)
    sim.faults.clear()
    assert sorted(heads) == sorted(f"heads/{name}" for name in names)
    assert sorted(reads_of(sim, "heads/")) == sorted(heads)


def reads_of(sim: Simulator, prefix: str) -> list[str]:
    return [
        entry.key
        for entry in list(sim.requests)
        if entry.kind == "get_object"
        and entry.key.startswith(prefix)
        and entry.key.endswith(".safetensors")
    ]


# ---------------------------------------------------------------------------------- bad input


async def test_what_is_no_checkpoint_is_named(sim: Simulator) -> None:
    sim.put("bucket", "junk/a/readme.md", b"hello")
    sim.put("bucket", "pickle/x.pt", b"PK\x03\x04" + bytes(100))
    sim.put("bucket", "steps/100/default/x", b"")
    storage = sim.s3_options()
    for url, text in (
        ("s3://bucket/junk", "no checkpoint.json, and nothing that Orbax"),
        ("s3://bucket/steps", "newest step is 100: pass s3://bucket/steps/100"),
        ("s3://bucket/nothing", "nothing is stored there"),
    ):
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match=text):
            await asyncckpt.restore(url, storage_options=storage)
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="this is a zip archive"):
        await asyncckpt.restore("s3://bucket/pickle/x.pt", storage_options=storage)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_a_truncated_object_of_another_library_is_damage(sim: Simulator, scheme: str) -> None:
    data = safetensors_bytes({"a": np.arange(5000.0)})
    sim.put("bucket", f"short-{scheme}.safetensors", data[:-8])
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="short-"):
        await asyncckpt.restore(
            f"{scheme}://bucket/short-{scheme}.safetensors", storage_options=options(sim, scheme)
        )


@pytest.mark.usefixtures("unraced")
async def test_an_object_that_vanishes_in_the_middle_is_no_corruption(sim: Simulator) -> None:
    storage = sim.s3_options()
    await asyncckpt.save("s3://bucket/gone/3", {"w": tree()["w"]}, storage_options=storage)
    gate = Gate()
    sim.faults.append(Fault(kind="get_object", key="gone/3/default/d/*", number=1, gate=gate))
    task = asyncio.create_task(asyncckpt.restore("s3://bucket/gone/3", storage_options=storage))
    await gate.reached.wait()
    async with asyncckpt.Checkpointer("s3://bucket/gone", storage_options=storage) as run:
        await run.delete(3)
    gate.release()
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match="deleted while being read"):
        await task
    sim.faults.clear()
