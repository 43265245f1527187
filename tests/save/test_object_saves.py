"""Saves to object stores: windows are requests, whatever the client takes, within any budget."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import LeafOptions, SaveOptions
from asyncckpt.options import GIB, KIB, MIB
from tests.simulator import Simulator, simulator
from tests.watch import slot_pools

RANDOM = np.random.default_rng(0)


def noise(nbytes: int) -> np.ndarray[Any, Any]:
    return RANDOM.integers(0, 256, nbytes, np.uint8)


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """Larger than the smallest budget, and not of whole chunks, windows or slots; never changed."""
    return {
        "large": noise(70 * MIB + 13),
        "zeros": np.zeros((300, 1001, 7), np.float32),
        "some": [noise(n) for n in (0, 1, 1000, 5 * KIB, 3 * MIB + 1, 17 * MIB)],
        "small": {"a": np.float32(3), "b": 7, "c": "text", "d": None},
    }


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as running:
        yield running


def where(sim: Simulator, client: str, name: str) -> tuple[str, dict[str, Any]]:
    if client == "memory":
        return f"memory://saves/{name}", {}
    if client == "gcsfs":
        return f"gs://bucket/{name}", sim.gcs_options()
    kind = "fsspec" if client == "s3fs" else "obstore"
    return f"s3://bucket/{name}", {**sim.s3_options(), "client": kind}


CLIENTS = ("memory", "s3fs", "obstore", "gcsfs")


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return set(found) == set(expected) and all(equal(found[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return all(map(equal, found, expected)) and len(found) == len(expected)
    if isinstance(expected, np.ndarray):
        # In blocks: comparing 70 MiB at once would allocate as much.
        one, other = found.reshape(-1), expected.reshape(-1)
        return (found.dtype, found.shape) == (expected.dtype, expected.shape) and all(
            np.array_equal(one[n : n + MIB], other[n : n + MIB]) for n in range(0, one.size, MIB)
        )
    return bool(found == expected)


async def at_rest(runtime: Any) -> None:
    """All memory has come back, that of requests which lost a race a little later."""
    async with asyncio.timeout(30):
        while runtime.budget.in_use:
            await asyncio.sleep(0.01)


def halves(path: str, spec: asyncckpt.ArraySpec) -> LeafOptions | None:
    """Compressed and plain leaves side by side, and one in chunks as large as may be packed."""
    if path == "large":
        return LeafOptions(compression="zstd", chunk_shape=(7 * MIB,))
    return LeafOptions(compression="zstd") if path == "zeros" else None


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "options",
    [
        SaveOptions(host_memory_nbytes=64 * MIB),
        SaveOptions(host_memory_nbytes=64 * MIB, compression="zstd", compression_level=1),
        SaveOptions(host_memory_nbytes=64 * MIB, leaf_options=halves, concurrency=3),
        SaveOptions(host_memory_nbytes=GIB, target_data_file_nbytes=40 * MIB),
    ],
    ids=["plain", "compressed", "mixed", "roomy"],
)
async def test_a_state_larger_than_the_budget_comes_back(
    sim: Simulator,
    tree: dict[str, Any],
    client: str,
    options: SaveOptions,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.id
    root, storage = where(sim, client, name)
    async with asyncckpt.Checkpointer(root, save_options=options, storage_options=storage) as ckpt:
        pool = ckpt._session.runtime
        for step in range(2):
            state = tree | {"some": [noise(step), *tree["some"][1:]]}
            report = await ckpt.save(step, state)
            await at_rest(pool)
            assert report.peak_staged_nbytes <= (options.host_memory_nbytes or 0)
        assert equal(await ckpt.restore(), state)
        assert (await ckpt.verify()).ok
        await at_rest(pool)
        held = sum(each.allocated_nbytes for each in slot_pools(pool.budget))
        assert held <= (options.host_memory_nbytes or 0)
    if client != "memory":
        for stored in sim.objects("bucket"):
            if stored.startswith(f"{name}/"):
                sim.delete("bucket", stored)
    assert not sim.uploads


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
async def test_a_chunk_larger_than_a_request_is_refused(sim: Simulator, client: str) -> None:
    options = SaveOptions(
        host_memory_nbytes=64 * MIB,
        leaf_options=lambda path, spec: LeafOptions(chunk_shape=(30 * MIB,)),
    )
    url, storage = where(sim, client, f"chunk-{client}/final")
    with pytest.raises(asyncckpt.UsageError, match=r"^w: .*writes each object in one request"):
        await asyncckpt.save(url, {"w": noise(30 * MIB)}, options=options, storage_options=storage)
    assert not sim.objects("bucket")


async def test_nothing_of_a_tree_without_arrays_is_missing(sim: Simulator) -> None:
    for client in CLIENTS:
        url, storage = where(sim, client, f"empty-{client}/final")
        await asyncckpt.save(url, {"a": 1, "b": [], "c": "x"}, storage_options=storage)
        assert await asyncckpt.restore(url, storage_options=storage) == {"a": 1, "b": [], "c": "x"}


async def test_a_restore_of_what_is_replaced_meanwhile_is_tried_again(sim: Simulator) -> None:
    root, storage = where(sim, "obstore", "replaced")
    state = {"w": noise(3 * MIB)}
    async with asyncckpt.Checkpointer(root, storage_options=storage) as ckpt:
        await ckpt.save(1, {"w": noise(3 * MIB)})
        files = ckpt._session.root.store.files
        replaced = False

        def files_of(name: str) -> Any:
            opened = files(name)
            read_into = opened.read_into

            async def replace_first(*args: Any, **options: Any) -> None:
                nonlocal replaced
                if not replaced:
                    replaced = True
                    async with asyncckpt.Checkpointer(root, storage_options=storage) as other:
                        await other.save(1, state, overwrite=True)
                await read_into(*args, **options)

            opened.read_into = replace_first  # type: ignore[method-assign]
            return opened

        ckpt._session.root.store.files = files_of  # type: ignore[method-assign]
        assert equal(await ckpt.restore(), state)
        assert replaced


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_one_shot_save_leaves_the_root_of_a_run_alone(sim: Simulator, client: str) -> None:
    url, options = where(sim, client, f"run-of-{client}")
    async with asyncckpt.Checkpointer(url, storage_options=options) as ckpt:
        for step in (3, 20):
            await ckpt.save(step, {"w": np.ones(3)})
    text = rf"the root of a run \(it has step 3, 20\) exists here .*Checkpointer\('{url}'\)"
    with pytest.raises(asyncckpt.CheckpointExistsError, match=text) as caught:
        await asyncckpt.save(url, {"w": np.zeros(3)}, storage_options=options)
    assert caught.value.location == url and caught.value.found == ("3", "20")
    async with asyncckpt.Checkpointer(url, storage_options=options) as ckpt:
        assert await ckpt.steps() == [3, 20]
    await asyncckpt.save(url, {"w": np.zeros(3)}, storage_options=options, overwrite=True)
    assert (await asyncckpt.restore(url, storage_options=options))["w"].sum() == 0


async def test_a_leaf_may_have_larger_chunks_than_the_save() -> None:
    url = f"memory://saves/{uuid.uuid4().hex}"
    options = SaveOptions(
        chunk_nbytes=64 * KIB, leaf_options=lambda path, spec: LeafOptions(chunk_nbytes=256 * KIB)
    )
    await asyncckpt.save(url, {"a": noise(MIB)}, options=options)
    assert (await asyncckpt.inspect(url))["a"].chunk_count == 4
    assert (await asyncckpt.verify(url)).ok
