"""Deletions of many objects: what is gone is not deleted again, because some stores count that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.clients.fsspec_client import DELETES, each
from tests.simulator import Fault, Simulator, simulator
from tests.stores.objects.scripted import requests
from tests.stores.objects.stores import opened

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
    async with opened(kind, sim, root=f"deletions-{kind}") as store:
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
