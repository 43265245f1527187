"""Reading from an object store: in ranges, into any buffers, and what is said about damage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncckpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    StoreError,
)
from asyncckpt.options import MIB
from asyncckpt.ports import Entry
from asyncckpt.stores.objects.files import RANGE_MAX_NBYTES, RANGE_NBYTES, ranges
from asyncckpt.stores.objects.requests.tuner import LOOKS
from asyncckpt.testing.checkpoints import PAGE, delete, expect, identity, pattern, record_of, save
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import ROOT, UNRACED, opened
from tests.watch import no_blocking_calls


@pytest.mark.parametrize("start", (0, 1, 12345))
@pytest.mark.parametrize(
    "nbytes", (1, PAGE, 16 * MIB, 18 * MIB, 18 * MIB + 1, 33 * MIB + 7, 1 << 32)
)
def test_ranges_tile_a_run_and_are_no_shorter_than_half(start: int, nbytes: int) -> None:
    spans = ranges(start, start + nbytes)
    assert spans[0][0] == start and spans[-1][1] == start + nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    lengths = [stop - begin for begin, stop in spans]
    assert (len(spans) == 1) == (nbytes <= RANGE_MAX_NBYTES)
    if len(spans) > 1:
        assert max(lengths) <= RANGE_NBYTES
        assert min(lengths[:-1]) >= RANGE_NBYTES // 2


@pytest.mark.parametrize("kind", ("s3fs", "gcsfs", "obstore"))
async def test_a_long_run_is_read_in_ranges_into_any_buffers(sim: Simulator, kind: str) -> None:
    data = pattern(40 * MIB + 3)
    sim.put("bucket", f"{ROOT}/1/data", data.tobytes())
    random = np.random.default_rng(0)
    cuts = np.unique(random.integers(0, data.size - 5, 40)).tolist()
    async with opened(kind, sim, policy=UNRACED) as store:
        files = store.files("1")
        found = np.zeros(data.size - 5, np.uint8)
        buffers = [found[a:b] for a, b in zip([0, *cuts], [*cuts, found.size], strict=True)]
        sim.reset()
        with no_blocking_calls():
            await files.read_into("data", 5, buffers)
        assert np.array_equal(found, data[5:])
        gets = [request for request in sim.requests if request.kind == "get_object"]
        assert len(gets) == 3
        await files.close()


async def test_a_truncated_object_names_file_and_offset(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        sim.put("bucket", f"{ROOT}/1/data", bytes(100))
        files = store.files("1")
        with pytest.raises(CorruptCheckpointError, match="ends at or before byte 100") as caught:
            await files.read_into("data", 90, [np.zeros(20, np.uint8)])
        assert (caught.value.file, caught.value.offset) == ("data", 100)
        assert caught.value.location == f"s3://bucket/{ROOT}/1"


async def test_a_path_that_leads_out_is_corruption(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        files = store.files("1")
        for path in ("../2/checkpoint.json", "/a", "a//b", "a/./b", "a\0"):
            with pytest.raises(CorruptCheckpointError, match="leads out"):
                await files.read(path, max_nbytes=10)
            with pytest.raises(CorruptCheckpointError, match="leads out"):
                await files.read_into(path, 0, [np.zeros(1, np.uint8)])
            with pytest.raises(CorruptCheckpointError, match="leads out"):
                await files.entries(path, max_entries=10)


async def test_one_object_is_a_checkpoint_too(sim: Simulator) -> None:
    """A safetensors file, for example."""
    async with opened("obstore", sim) as store:
        sim.put("bucket", f"{ROOT}/model.safetensors", b"content")
        files = store.files("model.safetensors")
        assert await files.entries(max_entries=5) == [Entry("", 7, False)]
        assert await files.read("", max_nbytes=7) == b"content"
        buffer = np.zeros(3, np.uint8)
        await files.read_into("", 2, [buffer])
        assert buffer.tobytes() == b"nte"
        with pytest.raises(CheckpointNotFoundError):
            await store.files("nothing").entries(max_entries=5)
        await files.close()
        with pytest.raises(ClosedError):
            await files.read("", max_nbytes=7)


async def test_readers_are_told_what_has_become_of_the_record(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        files = store.files("1")
        assert await files.changed() is None
        await files.read("checkpoint.json", max_nbytes=1000)
        assert await files.changed() is None
        await save(store, "1", "b", 2, overwrite=True)
        assert await files.changed() == "replaced"
        await delete(store, "1")
        assert await files.changed() == "deleted"


async def test_contents_of_fixed_names_that_are_damaged_are_never_returned(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        sim.delete("bucket", f"{ROOT}/1/default/small")
        await expect(store, "1", 1)
        key = f"{ROOT}/1/.asyncckpt-{identity('a')}-fixed-0"
        whole = sim.get("bucket", key)
        assert whole == b"small 1"
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1
            sim.put("bucket", key, bytes(damaged))
            with pytest.raises(CorruptCheckpointError, match="fixed-0"):
                await store.files("1").read("default/small", max_nbytes=10)
        for length in (0, len(whole) - 1):
            sim.put("bucket", key, whole[:length])
            with pytest.raises(CorruptCheckpointError):
                await store.files("1").read("default/small", max_nbytes=10)
        sim.delete("bucket", key)
        with pytest.raises(CorruptCheckpointError, match="missing or damaged"):
            await store.files("1").read("default/small", max_nbytes=10)
        with pytest.raises(CheckpointNotFoundError):
            await store.files("1").read("default/none", max_nbytes=10)


async def test_errors_of_the_store_name_the_object(sim: Simulator) -> None:
    async with opened("obstore", sim, bucket="none") as store:
        with pytest.raises(StoreError, match="no such bucket"):
            await store.names()
        with pytest.raises(StoreError, match=r"s3://none/run/1/checkpoint\.json"):
            await store.files("1").read("checkpoint.json", max_nbytes=10)
    async with opened("obstore", sim) as store:
        sim.faults.append(Fault(kind="get_object", number=0, status=403))
        with pytest.raises(StoreError, match="s3:GetObject") as caught:
            await store.files("1").read_into("data", 0, [np.zeros(1, np.uint8)])
        assert caught.value.location == f"s3://bucket/{ROOT}/1/data"


async def test_sizes_fit_the_budget_and_stay(sim: Simulator) -> None:
    for kind in ("s3fs", "gcsfs", "obstore"):
        async with opened(kind, sim) as store:
            budget = 256 * MIB
            sizes = store.sizes(2 << 30, budget_nbytes=budget)
            copies = 1 + store.capabilities.client_copies
            assert sizes.window_nbytes % PAGE == 0
            assert sizes.data_file_nbytes >= sizes.window_nbytes
            assert (
                sizes.concurrency + 1
            ) * sizes.window_nbytes * copies <= budget + copies * 8 * MIB
            assert store.sizes(2 << 30, budget_nbytes=budget) == sizes
            asked = store.sizes(2 << 30, budget_nbytes=4 * budget, concurrency=3)
            assert asked.concurrency <= 3


async def test_reads_in_flight_are_as_asked_for_or_as_many_as_pay_off(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        files = store.files("1")
        assert files.reads(None) == 32
        tuner = store._requests.controllers["get"].tuner
        tuner.observe(32, 1e9)
        assert files.reads(None) == 48
        for _ in range(LOOKS):
            tuner.observe(48, 1e9)  # sixteen more, and nothing is gained
        assert files.reads(None) == 32
        assert files.reads(40) == 40
        assert files.reads(None) == 32


async def test_a_checkpoint_without_fixed_names_is_one(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        await attempt.publish(record_of(identity("a")))
        assert await store.names() == ["1"]
        await delete(store, "1")
        assert await store.names() == []
