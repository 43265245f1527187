"""What requests keep to, over real client libraries on a simulator that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy
from asyncckpt.stores.objects.requests.requests import Requests, Sent
from tests.simulator import LOOPBACK, Fault, Gate, Simulator
from tests.stores.objects.hasty import HASTY
from tests.stores.objects.scripted import name
from tests.stores.objects.stores import UNRACED, session


@asynccontextmanager
async def opened(
    sim: Simulator, library: str, *, policy: RequestPolicy = HASTY
) -> AsyncIterator[Requests]:
    workers = Workers(2, "test-clients")
    if library == "gcsfs":
        url, options = "gs://bucket/run", {**sim.gcs_options()}
    elif library == "obstore":
        url, options = "s3://bucket/run", {"client": sim.obstore_s3("bucket")}
    else:
        url, options = "s3://bucket/run", sim.s3_options(client="fsspec", session=session())
    client = open_client(url, storage_options=options, workers=workers)
    store = Requests(client, policy=policy, rng=random.Random(0))
    try:
        yield store
    finally:
        await store.close()
        workers.shutdown()


LIBRARIES = ["s3fs", "gcsfs", "obstore"]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_lost_answers_leave_an_orphan_that_is_named(sim: Simulator, library: str) -> None:
    async with opened(sim, library, policy=UNRACED) as store:
        sim.faults.append(Fault(kind="put_object", reset=True, applied=True))
        sent = await store.put(name, b"body" * 1000)
        assert sent == Sent(name(1), True, (name(0),))
        assert sorted(sim.objects("bucket")) == [f"run/{name(0)}", f"run/{name(1)}"]
        assert bytes(await store.get(sent.key, 0, 1 << 20)) == b"body" * 1000


@pytest.mark.parametrize("library", ["s3fs", "obstore"])
async def test_a_lost_answer_to_a_create_is_not_taken_for_a_creation(
    sim: Simulator, library: str
) -> None:
    async with opened(sim, library) as store:
        sim.faults.append(Fault(kind="put_object", reset=True, applied=True))
        assert not await store.create("record", b"mine")
        assert await store.read("record", max_nbytes=100) == b"mine"


@pytest.mark.parametrize("library", ["gcsfs", "obstore"])
async def test_a_storm_of_refusals_is_outlived_with_a_smaller_window(
    sim: Simulator, library: str
) -> None:
    status, code = (429, "rateLimitExceeded") if library == "gcsfs" else (503, "SlowDown")
    async with opened(sim, library, policy=UNRACED) as store:
        sim.faults.append(Fault(kind="put_object", times=12, status=status, code=code))
        async with asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(store.put(lambda n, at=number: f"{at}.r{n}", b"x" * 4096))
        assert store.limiter.cuts >= 1
        assert store.limiter.limit < store.limiter.ceiling
        assert len(sim.objects("bucket")) == 24
        assert store.limiter.in_flight == 0


@pytest.mark.parametrize("library", ["s3fs", "obstore"])
async def test_a_read_that_is_held_up_is_overtaken(sim: Simulator, library: str) -> None:
    async with opened(
        sim, library, policy=replace(HASTY, hedge_cold_s=0.05, timeout_s=60.0)
    ) as store:
        sim.put("bucket", "run/key", b"value" * 1000)
        gate = Gate()
        sim.faults.append(Fault(kind="get_object", gate=gate))
        try:
            assert bytes(await store.get("key", 0, 5000)) == b"value" * 1000
        finally:
            gate.release()
        assert [request.kind for request in sim.requests].count("get_object") == 2


@pytest.mark.parametrize("library", ["gcsfs", "obstore"])
async def test_an_answer_that_ends_too_early_is_asked_for_again(
    sim: Simulator, library: str
) -> None:
    async with opened(sim, library) as store:
        sim.put("bucket", "run/key", bytes(100_000))
        sim.faults.append(Fault(kind="get_object", truncate=50_000))
        assert bytes(await store.get("key", 0, 100_000)) == bytes(100_000)


@pytest.mark.parametrize("library", ["gcsfs", "obstore"])
async def test_a_store_that_never_answers_is_given_up_in_time(sim: Simulator, library: str) -> None:
    policy = replace(HASTY, timeout_s=0.1, retry=RetryPolicy(tries=2, backoff_s=0.001))
    async with opened(sim, library, policy=policy) as store:
        sim.faults.append(Fault(number=0, hang=True))
        with pytest.raises(RequestError) as caught:
            await store.put(name, b"body")
        assert caught.value.kind == "timeout"
        sim.faults.clear()


async def test_an_object_that_is_changed_too_often_slows_no_other_request(sim: Simulator) -> None:
    """Google's store takes one change of an object per second, and says 429 to more."""
    words = "The object bucket/run/record exceeded the rate limit for object mutation operations"
    async with opened(sim, "gcsfs", policy=UNRACED) as store:
        sim.faults.append(Fault(kind="put_object", status=429, times=2, message=words))
        await store.replace("record", b"1")
        assert [r.status for r in sim.requests] == [429, 429, 200]
        assert (store.limiter.cuts, store.limiter.limit) == (0, store.limiter.ceiling)
        sim.faults[:] = [Fault(kind="put_object", status=429)]
        await store.replace("another", b"1")
        assert store.limiter.cuts == 1


async def test_the_words_of_the_simulator_are_those_that_are_understood() -> None:
    profile = replace(LOOPBACK, object_write_interval_s=3600.0)
    async with Simulator(profile) as sim, opened(sim, "gcsfs") as store:
        await store.replace("record", b"1")
        with pytest.raises(RequestError) as caught:
            await store.replace("record", b"2")
        assert caught.value.concerns_one_object
