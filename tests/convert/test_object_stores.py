"""Conversion to and from object stores: every format, whole objects only, and nothing left over."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load, save_file

import asyncckpt
from asyncckpt import LeafOptions, SaveOptions, blocking
from asyncckpt.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    StoreError,
    UsageError,
)
from asyncckpt.stores.objects.clients import opening
from asyncckpt.stores.objects.clients.opening import open_client
from tests.convert.trees import everything, numbers, same, saved
from tests.simulator import Fault, Gate, Simulator, simulator
from tests.stores.objects.stores import session

KINDS = ["obstore", "s3fs", "gcsfs"]
"""Client libraries; `auto` is the default for s3://."""

pytestmark = pytest.mark.filterwarnings("ignore:.*could not be verified")
SMALL = SaveOptions(host_memory_nbytes=64 << 20)


@pytest.fixture(scope="module")
def shared() -> Iterator[Simulator]:
    with simulator() as sim:
        # Objects that obstore keeps for the rest of the process are made before the leak check.
        options = sim.s3_options(client="obstore")
        asyncckpt.blocking.save("s3://bucket/first", {"x": 1}, storage_options=options)
        yield sim


@pytest.fixture
def sim(shared: Simulator) -> Iterator[Simulator]:
    yield shared
    shared.faults.clear()
    shared.clear()


class Place(NamedTuple):
    """A unique prefix, its URL, and options."""

    root: str
    url: str
    options: dict[str, Any]

    def objects(self, sim: Simulator) -> dict[str, bytes]:
        base = f"{self.root}/"
        keys = [key for key in sim.stored() if key.startswith(base)]
        return {key.removeprefix(base): sim.get("bucket", key) for key in keys}


def place(sim: Simulator, kind: str) -> Place:
    root = uuid.uuid4().hex
    if kind == "memory":
        return Place(root, f"memory://{root}", {})
    if kind == "gcsfs":
        return Place(root, f"gs://bucket/{root}", sim.gcs_options())
    options: dict[str, Any] = {
        "obstore": {"client": "obstore"},
        "s3fs": {"client": "fsspec", "session": session()},
        "auto": {},
    }[kind]
    return Place(root, f"s3://bucket/{root}", sim.s3_options(**options))


@pytest.fixture
def here(sim: Simulator) -> Place:
    return place(sim, "s3fs")


def plain() -> dict[str, Any]:
    """Trees that fit into one window, and that take several."""
    return {"w": numbers(3000, 1000), "b": numbers(7, dtype="float16"), "n": 3}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "a", plain(), metadata={"seed": 1})


# -------------------------------------------------------------------------------------- all ways


@pytest.mark.parametrize("kind", [*KINDS, "auto", "memory"])
async def test_ours_goes_to_a_safetensors_object_and_back(
    sim: Simulator, kind: str, source: Path, leak_check: None
) -> None:
    there = place(sim, kind)
    url = f"{there.url}/deep/x.safetensors"
    report = await asyncckpt.convert(source, url, options=SMALL, storage_options=there.options)
    assert (report.location, report.format, report.file_count) == (url, "safetensors", 1)
    if kind != "memory":
        (data,) = there.objects(sim).values()
        assert report.stored_nbytes == len(data)
        assert np.array_equal(load(data)["w"], plain()["w"])
        assert sim.uploads == []
        in_parts = any(entry.kind == "put_part" for entry in sim.requests)
        assert in_parts == (kind != "obstore")  # nothing else is asked for: s3fs, which can
    back = f"{there.url}/run/4"
    report = await asyncckpt.convert(url, back, options=SMALL, storage_options=there.options)
    assert (report.step, report.source_format) == (4, "safetensors")
    assert same(await asyncckpt.restore(back, storage_options=there.options), plain())
    info = await asyncckpt.inspect(back, storage_options=there.options)
    assert info.metadata == {"seed": 1}
    assert (await asyncckpt.diff(source, back, storage_options=there.options)).equal


@pytest.mark.parametrize("kind", ["obstore", "gcsfs"])
async def test_leaves_of_every_kind_survive_both_ways(
    sim: Simulator, kind: str, tmp_path: Path
) -> None:
    there = place(sim, kind)
    tree = everything()
    local = saved(tmp_path / "a", tree)
    copy = f"{there.url}/copy"
    report = await asyncckpt.convert(local, copy, options=SMALL, storage_options=there.options)
    assert report.location == copy
    await asyncckpt.convert(copy, tmp_path / "b", options=SMALL, storage_options=there.options)
    assert same(blocking.restore(tmp_path / "b"), blocking.restore(local))


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("obstore", "set"), ("gcsfs", "set"), ("gcsfs", "model.safetensors.index.json")],
)
async def test_a_set_has_its_index_last(
    sim: Simulator, kind: str, prefix: str, source: Path
) -> None:
    there = place(sim, kind)
    url = f"{there.url}/{prefix}"
    report = await asyncckpt.convert(
        source, url, to="safetensors", max_file_nbytes=1000, storage_options=there.options
    )
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = "model.safetensors.index.json"
    found = there.objects(sim)
    assert sorted(found) == sorted(f"{prefix}/{name}" for name in [*names, index])
    assert report.file_count == 3
    assert report.stored_nbytes == sum(map(len, found.values()))
    assert set(json.loads(found[f"{prefix}/{index}"])["weight_map"].values()) == set(names)
    stored = sim.stored()
    written = [key for key in sorted(stored, key=lambda key: stored[key].generation)]
    assert written[-1] == f"{there.root}/{prefix}/{index}"
    assert same(await asyncckpt.restore(url, storage_options=there.options), plain())


async def test_the_newest_step_of_a_run_at_a_url_is_converted(
    sim: Simulator, here: Place, tmp_path: Path
) -> None:
    async with asyncckpt.Checkpointer(here.url, storage_options=here.options) as run:
        for step in (3, 20):
            await run.save(step, {"x": step})
    report = await asyncckpt.convert(here.url, tmp_path / "b", storage_options=here.options)
    assert report.source == f"{here.url}/20"
    assert blocking.restore(tmp_path / "b") == {"x": 20}


async def test_pieces_become_one_array_for_orbax(sim: Simulator, here: Place) -> None:
    values = numbers(9000, 40)
    edges = [0, 2500, 4001, 9000]
    shards = [((a, 0), values[a:b]) for a, b in itertools.pairwise(edges)]
    uneven = asyncckpt.ShardedArray(values.shape, values.dtype, shards)
    await asyncckpt.save(f"{here.url}/a", {"w": uneven}, storage_options=here.options)
    report = await asyncckpt.export(f"{here.url}/a", f"{here.url}/b", storage_options=here.options)
    assert report.orbax
    assert "b/default/_METADATA" in here.objects(sim)
    restored = await asyncckpt.restore(f"{here.url}/b", storage_options=here.options)
    assert np.array_equal(restored["w"], values)


async def test_a_cast_to_a_wider_dtype_keeps_chunks_within_the_limit_of_the_store(
    sim: Simulator, here: Place, tmp_path: Path
) -> None:
    values = numbers(8192, 1024, dtype="float16")
    columns = SaveOptions(leaf_options=lambda *_: LeafOptions(chunk_shape=(8192, 64)))
    local = saved(tmp_path / "a", {"w": values}, options=columns)
    options = dataclasses.replace(SMALL, leaf_options=lambda *_: LeafOptions(dtype="float32"))
    url = f"{here.url}/b"
    await asyncckpt.convert(local, url, options=options, storage_options=here.options)
    found = await asyncckpt.restore(url, storage_options=here.options)
    assert np.array_equal(found["w"], values.astype(np.float32))


async def test_nothing_blocks_the_loop(
    here: Place, source: Path, no_blocking: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In particular not opening a client, which imports libraries."""
    threads: list[threading.Thread] = []

    def opened(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return open_client(*arguments, **options)

    monkeypatch.setattr(opening, "open_client", opened)
    for name in ("b", "b.safetensors"):
        url = f"{here.url}/{name}"
        await asyncckpt.convert(source, url, options=SMALL, storage_options=here.options)
        assert (await asyncckpt.diff(source, url, storage_options=here.options)).equal
    assert await asyncckpt.collect_garbage(here.url, storage_options=here.options) == []
    assert len(threads) >= 5 and threading.current_thread() not in threads
    assert not no_blocking


# ------------------------------------------------------------------------------- what is there


@pytest.mark.parametrize("kind", KINDS)
async def test_what_stands_there_is_replaced_when_asked_only(
    sim: Simulator, kind: str, source: Path, tmp_path: Path
) -> None:
    there = place(sim, kind)
    url = f"{there.url}/x.safetensors"
    sim.put("bucket", f"{there.root}/x.safetensors", b"mine")
    with pytest.raises(CheckpointExistsError, match=r"something (stands|already exists) here"):
        await asyncckpt.convert(source, url, storage_options=there.options)
    assert list(there.objects(sim).values()) == [b"mine"]
    small = saved(tmp_path / "small", {"w": numbers(3)})
    for origin in (source, small):  # several requests, and one
        await asyncckpt.convert(origin, url, overwrite=True, storage_options=there.options)
        (data,) = there.objects(sim).values()
        assert np.array_equal(load(data)["w"], blocking.restore(origin)["w"])


@pytest.mark.parametrize("nbytes", [1000, 12_000_000])
async def test_an_object_that_comes_meanwhile_is_not_replaced(
    sim: Simulator, here: Place, tmp_path: Path, nbytes: int
) -> None:
    small = saved(tmp_path / "a", {"w": np.zeros(nbytes, np.uint8)})
    key = f"{here.root}/x.safetensors"

    def come(_: object) -> None:
        sim.put("bucket", key, b"mine")

    kind = "put_object" if nbytes < 8 << 20 else "put_part"
    sim.faults.append(Fault(kind=kind, key=key, number=1, hook=come))
    with pytest.raises(CheckpointExistsError, match=r"exists here already|meanwhile"):
        await asyncckpt.convert(small, f"{here.url}/x.safetensors", storage_options=here.options)
    assert here.objects(sim) == {"x.safetensors": b"mine"} and sim.uploads == []


async def test_a_set_replaces_a_set_and_nothing_else(
    sim: Simulator, here: Place, source: Path
) -> None:
    arguments: dict[str, Any] = {"to": "safetensors", "storage_options": here.options}
    await asyncckpt.convert(source, f"{here.url}/set", max_file_nbytes=1000, **arguments)
    assert len(here.objects(sim)) == 3
    with pytest.raises(CheckpointExistsError, match=r"something (stands|already exists) here"):
        await asyncckpt.convert(source, f"{here.url}/set", **arguments)
    await asyncckpt.convert(source, f"{here.url}/set", overwrite=True, **arguments)
    assert list(here.objects(sim)) == ["set/model.safetensors"]
    await asyncckpt.save(f"{here.url}/ours", {"x": 1}, storage_options=here.options)
    before = here.objects(sim)
    with pytest.raises(CheckpointExistsError, match="other than a directory of safetensors files"):
        await asyncckpt.convert(source, f"{here.url}/ours", overwrite=True, **arguments)
    assert here.objects(sim) == before and sim.uploads == []


async def test_what_a_save_that_died_has_left_is_not_in_the_way(
    sim: Simulator, here: Place, source: Path
) -> None:
    save_id = uuid.uuid4().hex
    for path in (f".asyncckpt-{save_id}-fixed-0", f"default/d/{save_id}-0"):
        sim.put("bucket", f"{here.root}/b/{path}", b"dead")
    await asyncckpt.convert(source, f"{here.url}/b", storage_options=here.options)
    assert (await asyncckpt.verify(f"{here.url}/b", storage_options=here.options)).ok
    for path in ("default/_METADATA", "params/.zarray"):
        sim.put("bucket", f"{here.root}/{path[:3]}/{path}", b"theirs")
        with pytest.raises(CheckpointExistsError):
            await asyncckpt.convert(source, f"{here.url}/{path[:3]}", storage_options=here.options)


# ----------------------------------------------------------------------------- failures, the end


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("s3fs", "put_part"),
        ("s3fs", "complete_upload"),
        ("obstore", "put_object"),
        ("gcsfs", "put_part"),
    ],
)
async def test_a_refused_request_leaves_nothing(
    sim: Simulator, kind: str, fault: str, source: Path, leak_check: None
) -> None:
    there = place(sim, kind)
    sim.faults.append(Fault(kind=fault, key=f"{there.root}/x*", number=1, status=403))
    with pytest.raises(StoreError, match="may not do that"):
        await asyncckpt.convert(
            source, f"{there.url}/x.safetensors", options=SMALL, storage_options=there.options
        )
    assert there.objects(sim) == {} and sim.uploads == []


async def test_a_lost_answer_is_no_failure(sim: Simulator, here: Place, tmp_path: Path) -> None:
    small = saved(tmp_path / "a", {"w": numbers(30)})
    sim.faults.append(
        Fault(kind="put_object", key=f"{here.root}/x*", number=1, reset=True, applied=True)
    )
    await asyncckpt.convert(small, f"{here.url}/x.safetensors", storage_options=here.options)
    (data,) = here.objects(sim).values()
    assert np.array_equal(load(data)["w"], numbers(30))


async def test_cancelling_leaves_nothing(
    sim: Simulator, here: Place, source: Path, leak_check: None
) -> None:
    gate = Gate()
    sim.faults.append(Fault(kind="put_part", key=f"{here.root}/x*", number=2, gate=gate))
    task = asyncio.create_task(
        asyncckpt.convert(
            source, f"{here.url}/x.safetensors", options=SMALL, storage_options=here.options
        )
    )
    await gate.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.release()  # only now: the cancellation must not come after the last part
    assert here.objects(sim) == {} and sim.uploads == []


async def test_a_damaged_source_leaves_nothing(sim: Simulator, here: Place) -> None:
    await asyncckpt.save(f"{here.url}/a", plain(), storage_options=here.options)
    keys = [key for key in sim.stored() if key.startswith(f"{here.root}/a/default/d/")]
    key = max(keys, key=lambda key: len(sim.get("bucket", key)))
    data = bytearray(sim.get("bucket", key))
    data[-100] ^= 1
    sim.put("bucket", key, bytes(data))
    before = here.objects(sim)
    for name in ("b", "b.safetensors"):
        with pytest.raises(CorruptCheckpointError, match="is damaged"):
            await asyncckpt.convert(
                f"{here.url}/a", f"{here.url}/{name}", storage_options=here.options
            )
        assert here.objects(sim) == before and sim.uploads == []


async def test_options_apply_to_the_urls_among_two_locations(tmp_path: Path, source: Path) -> None:
    with pytest.raises(UsageError, match="leave them out for local paths"):
        await asyncckpt.diff(source, source, storage_options={"key": "x"})
    with pytest.raises(UsageError, match="leave them out for local paths"):
        await asyncckpt.convert(source, tmp_path / "b", storage_options={"key": "x"})
    assert list(tmp_path.iterdir()) == []


async def test_a_file_of_another_program_is_read_from_a_url(
    sim: Simulator, here: Place, tmp_path: Path
) -> None:
    save_file({"w": numbers(100, 7)}, tmp_path / "m.safetensors")
    sim.put("bucket", f"{here.root}/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    url = f"{here.url}/m.safetensors"
    report = await asyncckpt.diff(url, tmp_path / "m.safetensors", storage_options=here.options)
    assert report.equal and report.leaf_count == 1
