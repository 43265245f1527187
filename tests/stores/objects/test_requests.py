"""What every request of a store keeps to: names, tries, deadlines, permits, second reads."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.flow.retry import Patience
from asyncckpt.flow.threads import Workers
from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.client import Kind, ObjectClient, RequestError
from asyncckpt.stores.objects.opening import open_client
from asyncckpt.stores.objects.policy import HASTY, RequestPolicy
from asyncckpt.stores.objects.requests import Requests, Sent
from asyncckpt.testing.objectstore import Fault, Gate, Simulator, simulator
from tests.stores.objects.scripted import Fails, Hang, ScriptedClient, Step

AT_ONCE = replace(HASTY, patience=Patience(tries=4, backoff_s=1e-6, backoff_cap_s=1e-6))
SHORT = replace(AT_ONCE, timeout_s=0.02, hedge_cold_s=60.0)
"""Deadlines that a request without an answer reaches at once."""


def requests(*script: Step, policy: RequestPolicy = AT_ONCE) -> tuple[Requests, ScriptedClient]:
    client = ScriptedClient(*script)
    typed: ObjectClient = client
    return Requests(typed, policy=policy, rng=random.Random(0)), client


def name(number: int) -> str:
    return f"d/file-0.r{number}"


def assert_at_rest(store: Requests, client: ScriptedClient) -> None:
    assert (store.limiter.in_flight, store.limiter.waiting) == (0, 0)
    assert all(hedges.in_flight == 0 for hedges in store.hedges.values())
    assert client.running == 0
    assert client.ended == len(client.requests)


# ------------------------------------------------------------------------------------ data objects


async def test_a_body_is_stored_under_the_first_name() -> None:
    store, client = requests()
    assert await store.put(name, b"body") == Sent(name(0), True, ())
    assert client.objects == {name(0): b"body"}
    assert_at_rest(store, client)


async def test_every_try_of_a_data_object_has_another_name() -> None:
    store, client = requests(Fails("unavailable"), Fails("connection", applied=True))
    sent = await store.put(name, b"body")
    assert sent == Sent(name(2), True, (name(0), name(1)))
    assert client.objects == {name(1): b"body", name(2): b"body"}
    assert_at_rest(store, client)


async def test_a_try_that_was_refused_for_its_rate_left_nothing() -> None:
    store, _ = requests(Fails("throttled"), Fails("unavailable"))
    assert (await store.put(name, b"body")).orphans == (name(1),)


@pytest.mark.parametrize("step", [Hang(applied=True), Fails("timeout")])
async def test_a_body_that_may_still_be_on_its_way_is_not_reusable(step: Step) -> None:
    store, client = requests(step, policy=SHORT)
    sent = await store.put(name, b"body")
    assert sent == Sent(name(1), False, (name(0),))
    assert_at_rest(store, client)


# ------------------------------------------------------------------------------- conditional create


async def test_the_creators_own_answer_is_told_from_something_that_was_there() -> None:
    store, client = requests()
    assert await store.create("record", b"mine")
    assert not await store.create("record", b"other")
    assert client.objects["record"] == b"mine"


async def test_a_create_whose_answer_was_lost_finds_what_it_left() -> None:
    store, client = requests(Fails("connection", applied=True))
    assert not await store.create("record", b"mine")
    assert client.objects["record"] == b"mine"
    assert len(client.requests) == 2


async def test_a_conflict_is_tried_again_by_a_create_alone() -> None:
    store, client = requests(Fails("conflict"), Fails("conflict"))
    assert await store.create("record", b"mine")
    store, client = requests(Fails("conflict"))
    with pytest.raises(RequestError) as caught:
        await store.replace("manifest", b"body")
    assert caught.value.kind == "conflict"
    assert len(client.requests) == 1


# ------------------------------------------------------------------------------------------- tries


@pytest.mark.parametrize("kind", ["throttled", "unavailable", "timeout", "connection", "short"])
async def test_what_may_pass_is_tried_again_whatever_the_request(kind: Kind) -> None:
    store, client = requests()
    await store.replace("key", b"value")
    upload = await store.begin_parts("big")
    calls: list[Any] = [
        lambda: store.put(name, b"body"),
        lambda: store.create("new", b"body"),
        lambda: store.replace("key", b"value"),
        lambda: store.get("key", 0, 5),
        lambda: store.read("key", max_nbytes=100),
        lambda: store.size("key"),
        lambda: store.list("", recursive=True, limit=10),
        lambda: store.delete(["nothing"]),
        lambda: store.begin_parts("big"),
        lambda: store.put_part("big", upload, 0, 0, b"part"),
        lambda: store.pending_parts(""),
        lambda: store.complete_parts("big", upload, ["tag 0"]),
        lambda: store.abort_parts("big", upload),
    ]
    for call in calls:
        client.script = [Fails(kind), Fails(kind)]
        before = len(client.requests)
        await call()
        assert len(client.requests) - before == 3
        assert_at_rest(store, client)


@pytest.mark.parametrize(
    "kind", ["missing", "no_bucket", "credentials", "forbidden", "endpoint", "quota", "invalid"]
)
async def test_what_will_not_pass_is_raised_as_it_is(kind: Kind) -> None:
    store, client = requests(Fails(kind))
    with pytest.raises(RequestError) as caught:
        await store.put(name, b"body")
    assert (caught.value.kind, caught.value.detail) == (kind, "by script")
    assert len(client.requests) == 1
    assert_at_rest(store, client)


async def test_the_last_error_says_how_often_and_how_long_it_was_tried() -> None:
    store, client = requests(*[Fails("unavailable")] * 9)
    with pytest.raises(RequestError) as caught:
        await store.size("key")
    assert caught.value.kind == "unavailable"
    assert caught.value.detail == "by script (tried 4 times in 0.0 s)"
    assert len(client.requests) == 4


async def test_a_throttled_request_waits_without_a_permit() -> None:
    policy = replace(AT_ONCE, ceiling=1)
    store, client = requests(Fails("throttled", retry_after_s=0.05), policy=policy)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(store.replace("a", b"1"))
        while not client.ended:
            await asyncio.sleep(0)
        await store.replace("b", b"2")  # in the only permit there is
        assert not first.done()
    assert client.requests == ["put a", "put b", "put a"]


async def test_refusals_halve_the_window_and_successes_widen_it_again() -> None:
    store, _ = requests(*[Fails("throttled")] * 8, policy=replace(AT_ONCE, ceiling=16))
    async with asyncio.TaskGroup() as group:
        for number in range(16):
            group.create_task(store.replace(str(number), b"x"))
    assert store.limiter.cuts == 1
    assert store.limiter.limit in (8, 9)  # the tries that followed were a round of successes
    for _ in range(12):
        async with asyncio.TaskGroup() as group:
            for number in range(16):
                group.create_task(store.replace(str(number), b"x"))
    assert store.limiter.limit == 16


# --------------------------------------------------------------------------------------- deadlines


def test_a_deadline_grows_with_the_body() -> None:
    policy = RequestPolicy()
    assert policy.deadline_s(0) == policy.deadline_s(1 * MIB) == 60.0
    assert policy.deadline_s(64 * MIB) == 256.0


async def test_after_a_try_that_ran_out_of_time_the_next_gets_twice_as_long() -> None:
    store, client = requests(*[Hang()] * 4, policy=SHORT)
    begun = time.monotonic()
    with pytest.raises(RequestError) as caught:
        await store.size("key")
    assert time.monotonic() - begun >= 0.02 + 0.04 + 0.08 + 0.16
    assert caught.value.kind == "timeout"
    assert caught.value.detail.startswith("no answer within 0.16 s (tried 4 times in 0.")
    assert_at_rest(store, client)


async def test_time_in_line_does_not_count_against_a_request() -> None:
    policy = replace(SHORT, timeout_s=0.1, ceiling=1, patience=Patience(tries=1))
    store, client = requests(policy=policy)
    held = await store.limiter.acquire()
    task = asyncio.create_task(store.size("key"))
    await asyncio.sleep(0.15)
    client.objects["key"] = b"12"
    held.release()
    assert await task == 2


# ------------------------------------------------------------------------------------ cancellation


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_request_has_ended_and_holds_nothing(times: int) -> None:
    store, client = requests(Hang(), Hang(), Hang(), Hang(), policy=HASTY)
    client.objects["key"] = b"value"
    calls = [
        store.put(name, b"body"),
        store.get("key", 0, 5),
        store.size("key"),
        store.put_part("big", "upload", 0, 0, b"part"),
    ]
    tasks = [asyncio.create_task(call) for call in calls]
    while len(client.requests) < 4:
        await asyncio.sleep(0)
    for _ in range(times):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert_at_rest(store, client)


async def test_a_request_cancelled_between_its_tries_holds_nothing() -> None:
    store, client = requests(Fails("throttled", retry_after_s=5.0))
    task = asyncio.create_task(store.put(name, b"body"))
    while not client.ended:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_at_rest(store, client)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_request_cancelled_at_any_turn_of_the_loop_leaves_nothing(times: int) -> None:
    policy = replace(HASTY, ceiling=2, hedge_cold_s=0.0, patience=AT_ONCE.patience)
    cut = 0
    for turn in range(400):
        store, client = requests(policy=policy)
        client.objects["key"] = b"value"
        upload = await client.begin_parts("big")
        client.script = [Fails("throttled"), Fails("connection"), Fails("unavailable")]

        async def work(store: Requests = store, upload: str = upload) -> None:
            await store.get("key", 0, 5)
            sent = await store.put(name, b"body")
            await store.create("record", sent.key.encode())
            await store.put_part("big", upload, 0, 0, b"part")
            await store.complete_parts("big", upload, ["tag 0"])

        task = asyncio.create_task(work())
        for _ in range(turn):
            await asyncio.sleep(0)
        if task.done():
            break
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_at_rest(store, client)
        cut += 1
    assert 10 <= cut < 400


async def test_a_slow_data_object_is_raced_by_one_of_another_name() -> None:
    store, client = requests(Hang(applied=True), policy=replace(HASTY, hedge_cold_s=0.01))
    sent = await store.put(name, b"body")
    # What the first request was sending may still be on its way.
    assert sent == (name(1), False, (name(0),))
    assert client.requests == [f"put {name(0)}", f"put {name(1)}"]
    assert store.hedges["put"].spent == 1
    assert_at_rest(store, client)


async def test_of_a_race_the_one_that_succeeds_counts() -> None:
    event = asyncio.Event()
    policy = replace(HASTY, hedge_cold_s=0.01)
    store, client = requests(event, Fails("unavailable", applied=True), None, policy=policy)
    task = asyncio.create_task(store.put(name, b"body"))
    while len(client.requests) < 2:
        await asyncio.sleep(0.001)
    event.set()
    sent = await task
    assert (sent.key, sent.orphans) == (name(0), (name(1),))
    assert not sent.reusable
    assert_at_rest(store, client)


async def test_a_client_that_copies_what_it_sends_is_not_made_to_copy_twice() -> None:
    event = asyncio.Event()
    store, client = requests(event, policy=replace(HASTY, hedge_cold_s=0.01))
    client.traits = replace(client.traits, put_copies=1)
    task = asyncio.create_task(store.put(name, b"body"))
    await asyncio.sleep(0.05)
    event.set()
    assert await task == (name(0), True, ())
    assert store.hedges["put"].spent == 0


# ------------------------------------------------------------------------------------------- reads


async def test_a_slow_read_is_raced_by_a_second_one() -> None:
    store, client = requests(Hang(), policy=replace(HASTY, hedge_cold_s=0.01))
    client.objects["key"] = b"value"
    assert await store.get("key", 0, 5) == b"value"
    assert client.requests == ["get key 0-5"] * 2
    assert store.hedges["get"].spent == 1
    assert_at_rest(store, client)


async def test_a_read_is_not_raced_while_the_window_is_full() -> None:
    event = asyncio.Event()
    policy = replace(HASTY, hedge_cold_s=0.01, ceiling=1)
    store, client = requests(event, policy=policy)
    client.objects["key"] = b"value"
    task = asyncio.create_task(store.get("key", 0, 5))
    await asyncio.sleep(0.05)
    assert client.requests == ["get key 0-5"]
    event.set()
    assert await task == b"value"
    assert_at_rest(store, client)


async def test_reads_that_are_all_slow_are_not_all_raced() -> None:
    store, client = requests(*[asyncio.Event() for _ in range(16)], policy=HASTY)
    client.objects["key"] = b"value"
    events = [step for step in client.script if isinstance(step, asyncio.Event)]
    tasks = [asyncio.create_task(store.get("key", 0, 5)) for _ in range(16)]
    while len(client.requests) < 17:  # one second read has been made
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(client.requests) == 17
    for event in events:
        event.set()
    await asyncio.gather(*tasks)
    assert_at_rest(store, client)


async def test_a_small_object_is_read_without_asking_for_its_size() -> None:
    store, client = requests()
    client.objects = {"empty": b"", "small": b"x" * 100}
    assert await store.read("small", max_nbytes=1000) == b"x" * 100
    assert await store.read("empty", max_nbytes=1000) == b""
    assert client.requests == ["get small 0-1001", "get empty 0-1001"]
    with pytest.raises(RequestError, match="missing"):
        await store.read("nothing", max_nbytes=1000)


@pytest.mark.parametrize("nbytes", [7, 8, 9, 23, 24, 25, 26, 40])
async def test_reading_whole_objects_is_bounded(nbytes: int) -> None:
    store, client = requests(policy=replace(HASTY, first_read_nbytes=8, next_read_nbytes=16))
    client.objects["key"] = value = bytes(range(nbytes))
    assert await store.read("key", max_nbytes=25) == (value if nbytes <= 25 else None)
    assert len(client.requests) <= 3


async def test_an_answer_longer_than_what_was_asked_for_is_refused() -> None:
    store, client = requests()

    async def whole(key: str, start: int, stop: int) -> bytes:
        return b"the whole object, because the server knows no ranges"

    client.get = whole  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="5 bytes were asked for and 52 came") as caught:
        await store.get("key", 4, 9)
    assert caught.value.kind == "invalid"


# ----------------------------------------------------------------------------------------- parts


async def test_a_completion_whose_answer_was_lost_is_found_by_its_object() -> None:
    store, client = requests()
    upload = await store.begin_parts("big")
    tag, reusable = await store.put_part("big", upload, 0, 0, b"part")
    assert reusable
    client.script = [Fails("connection", applied=True)]
    await store.complete_parts("big", upload, [tag])
    assert client.objects["big"] == b"part"
    assert client.requests[-3:] == ["complete big", "complete big", "size big"]


async def test_an_upload_that_is_gone_from_the_beginning_is_missing() -> None:
    store, client = requests()
    with pytest.raises(RequestError) as caught:
        await store.complete_parts("big", "no such", ["tag"])
    assert caught.value.kind == "missing"
    client.script = [Fails("unavailable")]
    with pytest.raises(RequestError) as caught:
        await store.complete_parts("big", "no such", ["tag"])
    assert caught.value.kind == "missing"


async def test_a_part_that_may_still_be_on_its_way_is_not_reusable() -> None:
    store, client = requests(policy=SHORT)
    upload = await store.begin_parts("big")
    client.script = [Hang()]
    assert await store.put_part("big", upload, 0, 0, b"part") == ("tag 0", False)


# ------------------------------------------------------------------------------- streams, and rest


async def test_streams_that_are_asked_for_bound_the_transfers_and_nothing_else() -> None:
    store, client = requests()
    store.fix_streams("put", 3)
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(store.replace(str(number), b"x"))
    assert client.peak == 3
    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(store.list("", recursive=True, limit=1))
    assert client.peak == 10
    assert store.traffic("put", streams=3).streams == 3
    store.fix_streams("put", 200)
    assert store.limiter.ceiling == 200
    store.fix_streams("put", None)
    assert store.limiter.ceiling == AT_ONCE.ceiling


async def test_only_answered_requests_are_measured() -> None:
    store, client = requests(Fails("unavailable"), Hang(), policy=SHORT)
    client.objects["key"] = b"value"
    await store.get("key", 0, 1 * MIB)
    assert store.link.get.count == 1
    assert store.link.get.latency_s > 0
    await store.replace("other", b"x" * KIB)
    assert store.link.put.count == 1


async def test_nothing_but_places_and_measures_is_shown() -> None:
    store, client = requests()
    assert store.location("a/b") == "script://bucket/run/a/b"
    assert store.location("") == "script://bucket/run"
    assert repr(store).startswith("Requests('script://bucket/run', Limiter(0 of 64 requests")
    await store.delete([])
    assert client.requests == []
    await store.close()
    assert client.closed == 1


FAILURES = st.one_of(
    st.none(),
    st.builds(
        Fails,
        st.sampled_from(["throttled", "unavailable", "connection", "short", "forbidden"]),
        applied=st.booleans(),
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FAILURES, max_size=24), st.integers(1, 6), st.integers(1, 4))
def test_whatever_fails_names_differ_and_what_was_acknowledged_is_there(
    script: list[Step], count: int, ceiling: int
) -> None:
    async def run() -> None:
        store, client = requests(*script, policy=replace(AT_ONCE, ceiling=ceiling))

        async def put(number: int) -> Sent | RequestError:
            try:
                return await store.put(lambda n: f"{number}.r{n}", b"%d" % number)
            except RequestError as error:
                return error

        results = await asyncio.gather(*(put(number) for number in range(count)))
        assert len(set(client.requests)) == len(client.requests) <= 4 * count
        known: set[str] = set()
        for number, result in enumerate(results):
            if isinstance(result, Sent):
                assert client.objects[result.key] == b"%d" % number
                known |= {result.key, *result.orphans}
        refused = {number for number, r in enumerate(results) if isinstance(r, RequestError)}
        # Whatever else landed is known to whoever asked.
        for key in client.objects:
            assert key in known or int(key.partition(".")[0]) in refused or _throttled(script)
        assert_at_rest(store, client)

    asyncio.run(run())


def _throttled(script: list[Step]) -> bool:
    # A server that carries out what it refuses does not exist; here it may be drawn.
    return any(isinstance(s, Fails) and s.kind == "throttled" and s.applied for s in script)


# --------------------------------------------------------------------- real clients, on a simulator


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@asynccontextmanager
async def opened(
    sim: Simulator, library: str, *, policy: RequestPolicy = HASTY
) -> AsyncIterator[Requests]:
    sim.faults.clear()
    sim.clear()
    workers = Workers(2, "asyncckpt-test")
    if library == "gcsfs":
        url, options = "gs://bucket/run", {**sim.gcs_options()}
    elif library == "obstore":
        url, options = "s3://bucket/run", {"client": sim.obstore_s3("bucket")}
    else:
        url, options = "s3://bucket/run", {"client": "fsspec", **sim.s3_options()}
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
    # On a busy machine any request may look slow, and would be raced.
    async with opened(sim, library, policy=replace(HASTY, hedge_cold_s=30.0)) as store:
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
    async with opened(sim, library) as store:
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
    async with opened(sim, library, policy=replace(HASTY, hedge_cold_s=0.05)) as store:
        sim.put("bucket", "run/key", b"value" * 1000)
        gate = Gate()
        sim.faults.append(Fault(kind="get_object", gate=gate))
        try:
            assert bytes(await store.get("key", 0, 5000)) == b"value" * 1000
        finally:
            gate.release()
        assert store.hedges["get"].spent == 1


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
    policy = replace(HASTY, timeout_s=0.1, patience=Patience(tries=2, backoff_s=0.001))
    async with opened(sim, library, policy=policy) as store:
        sim.faults.append(Fault(number=0, hang=True))
        with pytest.raises(RequestError) as caught:
            await store.put(name, b"body")
        assert caught.value.kind == "timeout"
        sim.faults.clear()
