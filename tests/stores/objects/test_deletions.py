"""Deletions of many objects: what is gone is not deleted again, because some stores count that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncckpt import Checkpointer, KeepLast
from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.clients.fsspec_client import DELETES, each
from asyncckpt.testing.checkpoints import identity
from tests.objects.stores import place
from tests.simulator import Fault, Simulator, simulator
from tests.simulator.state import Refused
from tests.stores.objects.scripted import requests
from tests.stores.objects.stores import UNRACED, age, opened

KEYS = tuple(f"{n:03d}" for n in range(3 * DELETES))


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as running:
        yield running


async def test_after_an_error_no_other_deletion_begins_and_what_is_left_is_told() -> None:
    deleted: list[str] = []

    async def delete(key: str) -> None:
        if key == "040":
            raise RequestError("throttled", "not so fast")
        deleted.append(key)

    with pytest.raises(RequestError, match="not so fast") as caught:
        await each(delete, KEYS)
    assert caught.value.left is not None
    assert "040" in caught.value.left
    assert sorted([*deleted, *caught.value.left]) == list(KEYS)
    assert len(deleted) < len(KEYS)
    await each(delete, [key for key in caught.value.left if key != "040"])
    assert len(set(deleted)) == len(deleted) == len(KEYS) - 1
    await each(delete, [])


async def test_the_next_try_deletes_what_the_last_one_has_left() -> None:
    store, client = requests()
    asked: list[tuple[str, ...]] = []

    async def delete(keys: Any) -> None:
        asked.append(tuple(keys))
        if len(asked) < 3:
            error = RequestError("unavailable", "later")
            error.left = None if len(asked) == 1 else keys[2:]
            raise error

    client.delete = delete  # type: ignore[method-assign]
    await store.delete(["a", "b", "c", "d"])
    assert asked == [("a", "b", "c", "d"), ("a", "b", "c", "d"), ("c", "d")]
    await store.delete([])
    assert len(asked) == 3


@pytest.mark.parametrize("kind", ("gcsfs", "s3fs", "obstore"))
async def test_a_deletion_that_is_refused_in_the_middle_ends_well(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim, root=f"deletions-{kind}", policy=UNRACED) as store:
        requests_ = store._requests
        for key in KEYS:
            await requests_.replace(key, b"x")
        sim.reset()
        number = 3 if kind == "gcsfs" else 1
        fault = Fault(when=lambda r: r.kind.startswith("delete"), number=number, status=503)
        sim.faults.append(fault)
        await requests_.delete(KEYS)
        sim.faults.clear()
        assert fault.happened
        assert await requests_.list("", recursive=True, limit=1000) == []
        single = [r.key for r in sim.requests if r.kind == "delete_object" and r.status < 300]
        assert len(set(single)) == len(single)


async def test_a_deletion_goes_on_for_as_long_as_something_is_deleted() -> None:
    store, client = requests()
    asked = 0

    async def delete(keys: Any) -> None:
        nonlocal asked
        asked += 1
        error = RequestError("throttled", "not so fast")
        error.left = keys[1:] if asked % 3 == 0 else keys
        if error.left:
            raise error

    client.delete = delete  # type: ignore[method-assign]
    await store.delete(KEYS)
    assert asked == 3 * len(KEYS)

    async def none(keys: Any) -> None:
        nonlocal asked
        asked += 1
        error = RequestError("throttled", "not so fast")
        error.left = keys
        raise error

    asked, client.delete = 0, none  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="not so fast"):
        await store.delete(KEYS)
    assert asked == store.policy.retry.tries


def throttle(sim: Simulator, monkeypatch: pytest.MonkeyPatch, times: int) -> Counter[str]:
    """The first deletions of every object are refused, each by itself; returns how many were."""
    refused: Counter[str] = Counter()
    delete = sim.state.delete

    def throttled(bucket: str, key: str, *args: Any) -> Any:
        if refused[key] < times:
            refused[key] += 1
            raise Refused("SlowDown")
        return delete(bucket, key, *args)

    monkeypatch.setattr(sim.state, "delete", throttled)
    return refused


@pytest.mark.parametrize("kind", ("gcsfs", "s3fs", "obstore"))
async def test_objects_that_are_refused_one_by_one_are_deleted_in_the_end(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One answer of S3 to the deletion of many objects says of each whether it is gone."""
    async with opened(kind, sim, root=f"refused-{kind}") as store:
        requests_ = store._requests
        for key in KEYS:
            await requests_.replace(key, b"x")
        refused = throttle(sim, monkeypatch, 2)
        await requests_.delete(KEYS)
        assert len(refused) == len(KEYS)
        assert await requests_.list("", recursive=True, limit=1000) == []


@pytest.mark.parametrize("kind", ("gcsfs", "s3fs", "obstore"))
async def test_retention_deletion_and_gc_survive_a_store_that_throttles_deletions(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async with place(kind) as at:
        store = at.store()
        async with Checkpointer(store, keep=KeepLast(1)) as ckpt:  # type: ignore[arg-type]
            throttle(at.sim, monkeypatch, 2)
            for step in range(3):
                report = await ckpt.save(step, {"w": np.arange(5000)})
                assert report.notes == ()
                assert report.deleted_steps == ((step - 1,) if step else ())
            await ckpt.wait()
            assert at.keys("0/") == at.keys("1/") == []
            await ckpt.delete(2)
            assert await ckpt.steps() == at.keys("2/") == []
            dead = f"3/default/d/{identity('dead')}-0"
            at.sim.put("bucket", f"{at.root}/{dead}", b"leftover")
            age(at.sim)
            collected = await ckpt._session.call(lambda: store.collect(COLLECT_MIN_S)).wait()
            assert dead in collected
            assert at.keys("3/") == []
