"""The fault-injecting store does exactly what its script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncckpt.errors import StoreError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import PAGE, pattern
from asyncckpt.testing.faults import Fault, FaultStore, Gate, Operation
from tests.stores.checkpoints import expect, save

SAVE = ["begin", "create", "write", "seal", "put", "publish"]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FaultStore]:
    workers = Workers(2, "test-io")
    inner = LocalStore(tmp_path, workers)
    yield FaultStore(inner)
    await inner.close()
    workers.shutdown()


async def test_operations_are_counted_by_kind_and_in_all(store: FaultStore) -> None:
    await save(store, "1", "a")
    assert [operation.kind for operation in store.log] == SAVE
    assert store.counts["write"] == 1
    assert store.counts["any"] == len(SAVE)
    assert store.log[4] == Operation("put", "default/small")


@pytest.mark.parametrize("number", range(1, len(SAVE) + 1))
@pytest.mark.parametrize("applied", [False, True])
async def test_any_operation_can_fail(store: FaultStore, number: int, applied: bool) -> None:
    error = StoreError("scripted")
    store.script.append(Fault("any", number, error=error, applied=applied))
    with pytest.raises(StoreError) as caught:
        await save(store, "1", "a")
    assert caught.value is error
    assert store.log[-1].kind == SAVE[number - 1]
    assert (await store.names() == ["1"]) == (applied and number == len(SAVE))


async def test_an_operation_can_be_held(store: FaultStore) -> None:
    gate = Gate()
    store.script.append(Fault("seal", gate=gate))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(save(store, "1", "a"))
        await gate.reached.wait()
        assert store.log[-1] == Operation("seal", "default/d/data")
        assert not task.done()
        assert await store.names() == []
        gate.release.set()
    await expect(store, "1")


async def test_only_the_numbered_operation_fails(store: FaultStore) -> None:
    store.script.append(Fault("put", 2, error=StoreError("second")))
    await save(store, "1", "a")
    with pytest.raises(StoreError, match="second"):
        await save(store, "2", "b")
    await save(store, "3", "c")
    assert sorted(await store.names()) == ["1", "3"]


SHARED = ["begin", "join", "create", "write", "seal", "put", "pass_on", "taken", "settle", "leave"]


async def share(store: FaultStore) -> None:
    """One process begins an attempt; another writes in it and ends its share."""
    attempt = await store.begin("1", "a", shared=True)
    try:
        other = await store.join("1", "a", process=1, timeout_s=20.0)
        try:
            file = await other.create("default/d/data", nbytes=PAGE)
            await file.write(0, pattern(PAGE))
            await file.seal(PAGE)
            await other.put("default/small", b"x")
            await other.pass_on("entries-1", b"x")
            assert await attempt.taken("entries-1", max_nbytes=1) == b"x"
            await other.settle()
            await other.leave()
        finally:
            await other.abort()
    finally:
        await attempt.abort()


async def test_shared_attempts_are_counted_too(store: FaultStore) -> None:
    await share(store)
    assert [operation.kind for operation in store.log] == [*SHARED, "abort", "abort"]
    assert store.log[SHARED.index("join")] == Operation("join", "1")
    assert store.log[SHARED.index("taken")] == Operation("taken", "entries-1")


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("applied", [False, True])
async def test_any_operation_of_a_shared_attempt_can_fail(
    store: FaultStore, kind: str, applied: bool, tmp_path: Path
) -> None:
    store.script.append(Fault(kind, error=StoreError("scripted"), applied=applied))
    with pytest.raises(StoreError, match="scripted"):
        await share(store)
    assert await store.names() == []
    await store.close()
    assert list(tmp_path.rglob("*")) == []
