"""Real client libraries work with the simulator."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import obstore
import pytest
import tensorstore as ts
from gcsfs import GCSFileSystem
from obstore.exceptions import AlreadyExistsError
from s3fs import S3FileSystem

from tests.simulator import Simulator, simulator

MIB = 1024**2
OFF = {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
GCS_CHILD = """
import numpy as np, tensorstore as ts
kvstore = {"driver": "ocdbt", "base": {"driver": "gcs", "bucket": "bucket", "path": "ck/"}}
spec = {"driver": "zarr3", "kvstore": kvstore}
written = np.arange(250_000.0).reshape(500, 500)
store = ts.open(spec, create=True, dtype=ts.float64, shape=written.shape).result()
store[...] = written
assert (ts.open(spec, open=True).result().read().result() == written).all()
"""


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Simulator:
    running.clear()
    return running


@pytest.fixture
async def s3(sim: Simulator) -> AsyncIterator[S3FileSystem]:
    fs = S3FileSystem(**sim.s3_options(), **OFF)
    session = await fs.set_session()
    yield fs
    await session.close()


@pytest.fixture
async def gcs(sim: Simulator) -> AsyncIterator[GCSFileSystem]:
    fs = GCSFileSystem(**sim.gcs_options(), **OFF)
    await fs._set_session()
    yield fs
    await fs.session.close()


async def round_trip(fs: Any, sim: Simulator) -> None:
    """What every fsspec file system does with small objects."""
    await fs._pipe_file("bucket/a/x", b"0123456789")
    await fs._pipe_file("bucket/a/b/ü &+%", bytearray(b"other"))
    assert await fs._cat_file("bucket/a/x") == b"0123456789"
    assert await fs._cat_file("bucket/a/x", start=3, end=7) == b"3456"
    assert await fs._cat_ranges(["bucket/a/x"] * 2, [0, 8], [2, 99], on_error="raise") == [
        b"01",
        b"89",
    ]
    assert await fs._cat_file("bucket/a/b/ü &+%") == b"other"
    assert (await fs._info("bucket/a/x"))["size"] == 10
    with pytest.raises(FileNotFoundError):
        await fs._info("bucket/a/nothing")
    with pytest.raises(FileNotFoundError):
        await fs._cat_file("bucket/a/nothing", start=0, end=1)
    listed = await fs._ls("bucket/a", detail=True)
    assert sorted((entry["name"], entry["type"]) for entry in listed) == [
        ("bucket/a/b", "directory"),
        ("bucket/a/x", "file"),
    ]
    found = await fs._find("bucket/a", detail=True)
    assert {name: entry["size"] for name, entry in found.items()} == {
        "bucket/a/b/ü &+%": 5,
        "bucket/a/x": 10,
    }
    with pytest.raises(FileExistsError):
        await fs._pipe_file("bucket/a/x", b"late", mode="create")
    await fs._pipe_file("bucket/a/new", b"first", mode="create")
    await fs._cp_file("bucket/a/new", "bucket/a/copy")
    await fs._rm_file("bucket/a/x")
    assert sim.objects() == {"a/b/ü &+%": b"other", "a/copy": b"first", "a/new": b"first"}
    await fs._rm("bucket/a", recursive=True)
    assert sim.objects() == {}


async def test_s3fs_works(s3: S3FileSystem, sim: Simulator) -> None:
    await round_trip(s3, sim)


async def test_gcsfs_works(gcs: GCSFileSystem, sim: Simulator) -> None:
    await round_trip(gcs, sim)


async def test_s3fs_sends_large_objects_in_parts(s3: S3FileSystem, sim: Simulator) -> None:
    data = os.urandom(12 * MIB)
    await s3._pipe_file("bucket/large", data, chunksize=5 * MIB)
    assert sim.get("bucket", "large") == data
    assert sim.stats().by_kind["put_part"] == 3
    assert await s3._cat_file("bucket/large", start=0, end=len(data)) == data
    assert sim.uploads == []


async def test_gcsfs_sends_large_objects_in_chunks(gcs: GCSFileSystem, sim: Simulator) -> None:
    data = os.urandom(3 * MIB + 5)
    await gcs._pipe_file("bucket/large", data, chunksize=MIB, consistency="size", mode="create")
    assert sim.get("bucket", "large") == data
    assert [r.kind for r in sim.requests] == ["create_upload", *["put_part"] * 3, "complete_upload"]
    assert sim.uploads == []


@pytest.mark.parametrize("service", ["s3", "gcs"])
async def test_obstore_works(sim: Simulator, service: str) -> None:
    make = sim.obstore_s3 if service == "s3" else sim.obstore_gcs
    store = make("bucket", "p")
    await obstore.put_async(store, "x/ü &+", b"0123456789", mode="create")
    with pytest.raises(AlreadyExistsError):
        await obstore.put_async(store, "x/ü &+", b"late", mode="create")
    large = np.frombuffer(os.urandom(12 * MIB), np.uint8)
    await obstore.put_async(store, "large", memoryview(large), chunk_size=5 * MIB)
    assert sim.get("bucket", "p/large") == large.tobytes()
    assert sim.stats().by_kind["put_part"] == 3
    answer = await obstore.get_async(store, "large")
    assert bytes(await answer.bytes_async()) == large.tobytes()
    some = await obstore.get_range_async(store, "x/ü &+", start=3, end=7)
    assert bytes(some) == b"3456"
    with pytest.raises(FileNotFoundError):
        await obstore.get_range_async(store, "none", start=0, end=1)
    assert (await obstore.head_async(store, "large"))["size"] == large.size
    paths = [meta["path"] for meta in await obstore.list(store).collect_async()]
    assert paths == ["large", "x/ü &+"]
    level = await obstore.list_with_delimiter_async(store)
    assert list(level["common_prefixes"]) == ["x"]
    await obstore.delete_async(store, ["large", "x/ü &+"])
    assert sim.objects() == {}


async def test_of_many_creators_one_succeeds(sim: Simulator) -> None:
    stores = [sim.obstore_s3("bucket") for _ in range(8)]

    async def create(number: int) -> bool:
        try:
            await obstore.put_async(stores[number], "one", b"%d" % number, mode="create")
        except AlreadyExistsError:
            return False
        return True

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(create(number)) for number in range(8)]
    winners = [number for number, task in enumerate(tasks) if task.result()]
    assert len(winners) == 1
    assert sim.objects() == {"one": b"%d" % winners[0]}


def test_tensorstore_writes_and_reads_ocdbt_on_s3(sim: Simulator) -> None:
    base = sim.tensorstore_s3("bucket", "ck/")
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base}}
    written = np.arange(250_000.0).reshape(500, 500)
    store = ts.open(spec, create=True, dtype=ts.float64, shape=written.shape).result()
    store[...] = written
    assert (ts.open(spec, open=True).result().read().result() == written).all()
    assert "ck/manifest.ocdbt" in sim.objects()


def test_tensorstore_writes_and_reads_ocdbt_on_gcs(sim: Simulator) -> None:
    named = {
        "TENSORSTORE_GCS_HTTP_URL": sim.gcs_endpoint,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }
    command = [sys.executable, "-c", GCS_CHILD]
    subprocess.run(command, env={**os.environ, **named}, check=True, timeout=120)
    assert "ck/manifest.ocdbt" in sim.objects()
    assert {r.service for r in sim.requests} == {"gcs"}
