"""Contents of fixed names that a save kept more than once, or a deletion did not remove."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest

from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.fixed import encode_fixed, load_objects
from asyncckpt.stores.objects.layout import fixed_path
from asyncckpt.stores.objects.store import COLLECT_MIN_S, ObjectStore
from asyncckpt.testing.conformance import expect, fill, identity, save, save_id_of
from asyncckpt.testing.objectstore import Fault, Simulator
from tests.stores.objects.scripted import requests
from tests.stores.objects.stores import KINDS, ROOT, names, opened, whole

FOREVER = 1 << 30


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(1, "asyncckpt-test")
    yield workers
    workers.shutdown()


# ----------------------------------------------------------------------------- kept more than once


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (9, 10), (10, 9)], ids=str)
async def test_what_a_save_kept_last_counts_whatever_is_answered_last(
    workers: Workers, numbers: tuple[int, int]
) -> None:
    """Answers come in the opposite order of the requests."""
    save_id = identity("a")
    paths = [fixed_path(save_id, number) for number in numbers]
    gate = asyncio.Event()
    store, client = requests(gate)
    for number, path in zip(numbers, paths, strict=True):
        files = {"default/manifest.ocdbt": b"%d" % number, f"only-{number}": b"x"}
        client.objects[f"1/{path}"] = encode_fixed(save_id, files)
    context = Context(store, workers, save_id_of)
    loading = asyncio.create_task(load_objects(context, "1", paths))
    while not client.ended:
        await asyncio.sleep(0)
    gate.set()
    found = await loading
    assert found.pop("default/manifest.ocdbt") == b"%d" % max(numbers)
    assert found == {f"only-{number}": b"x" for number in numbers}


# ------------------------------------------------------------------------- deletions without an end


def age(sim: Simulator) -> None:
    """Everything that is there is old enough to be collected."""
    objects = sim.buckets["bucket"].objects
    for key, item in list(objects.items()):
        modified_s = item.modified_s - COLLECT_MIN_S - 3600
        objects[key] = dataclasses.replace(item, modified_s=modified_s)


async def delete_half(sim: Simulator, store: ObjectStore, name: str) -> None:
    """The record is gone, and nothing else is."""
    sim.faults.append(
        Fault(
            kind=("delete_object", "delete_objects"),
            when=lambda request: "commit_success" not in request.key,  # which go before the record
            number=2,
            times=FOREVER,
            status=403,
        )
    )
    with pytest.raises(AsyncCheckpointError):
        await store.delete(name)
    sim.faults.clear()
    assert f"{name}/checkpoint.json" not in names(sim)
    assert f"{name}/default/small" in names(sim)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_of_a_deletion_is_collected_with_its_fixed_names(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store:
        await save(store, "1", "a", 1)
        await delete_half(sim, store, "1")
        sim.put("bucket", f"{ROOT}/1/notes.txt", b"a person's")
        left = names(sim)
        assert await store.collect(COLLECT_MIN_S) == []  # too young
        age(sim)
        found = await store.collect(COLLECT_MIN_S, dry_run=True)
        assert names(sim) == left
        assert await store.collect(COLLECT_MIN_S) == found
        assert found == sorted(set(left) - {"1/notes.txt"})
        assert "1/default/small" in found
        assert names(sim) == ["1/notes.txt"]


async def test_a_deletion_is_collected_by_the_next_one_if_it_ends_early(sim: Simulator) -> None:
    """The fixed names go before what tells that they are ours."""
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        await delete_half(sim, store, "1")
        age(sim)
        kinds = ("delete_object", "delete_objects")
        # The first one is of the object that tells the store's time.
        sim.faults.append(Fault(kind=kinds, number=3, times=FOREVER, status=403))
        with pytest.raises(AsyncCheckpointError):
            await store.collect(COLLECT_MIN_S)
        sim.faults.clear()
        assert "1/default/small" not in names(sim)
        assert await store.collect(COLLECT_MIN_S) != []
        assert names(sim) == []


async def test_fixed_names_of_a_save_that_stands_are_not_collected(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        await delete_half(sim, store, "1")
        await save(store, "1", "b", 1)  # whose fixed names are the same
        age(sim)
        found = await store.collect(COLLECT_MIN_S)
        assert found and all(identity("a") in key for key in found)
        await whole(sim, store, "1", 1)
        await expect(store, "1", 1)


async def test_fixed_names_that_another_program_has_written_are_not_collected(
    sim: Simulator,
) -> None:
    """An attempt that never won has kept contents of such names, too."""
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("dead"))
        await fill(attempt, identity("dead"), 1)
        await attempt.put("default/_METADATA", b"the same everywhere")
        sim.put("bucket", f"{ROOT}/1/default/small", b"another program's")
        sim.put("bucket", f"{ROOT}/1/default/_METADATA", b"the same everywhere")
        age(sim)
        found = await store.collect(COLLECT_MIN_S)
        assert found and all(identity("dead") in key for key in found)
        assert names(sim) == ["1/default/_METADATA", "1/default/small"]
