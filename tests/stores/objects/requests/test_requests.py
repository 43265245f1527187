"""What every request of a store keeps to: names, tries, permits, and what its answer tells."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.flow.shield import forget_frames
from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.clients.client import Kind, RequestError
from asyncckpt.stores.objects.requests.requests import Sent
from tests.stores.objects.hasty import HASTY
from tests.stores.objects.scripted import (
    AT_ONCE,
    SHORT,
    Clock,
    Fails,
    Hang,
    Step,
    assert_at_rest,
    name,
    requests,
)

# ------------------------------------------------------------------------------------- data objects


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


@pytest.mark.parametrize("part", [False, True])
async def test_an_error_that_is_kept_keeps_no_body(part: bool) -> None:
    store, client = requests(Fails("forbidden"))
    owner = np.full(4, 7, np.uint8)
    gone = weakref.ref(owner)
    with pytest.raises(RequestError) as caught:
        if part:
            await store.put_part("key", "upload", 0, 0, owner)
        else:
            await store.put(name, owner)
    forget_frames(caught.value)
    client.requests.clear()
    del owner
    gc.collect()
    assert gone() is None, gc.get_referrers(gone())


async def test_a_body_whose_first_try_failed_is_free_when_it_is_stored() -> None:
    """Without the garbage collector, which a process that only waits never runs."""
    store, client = requests(Fails("unavailable"))
    owner = np.full(4, 7, np.uint8)
    gone = weakref.ref(owner)
    gc.disable()
    try:
        await store.put(name, owner)
        del owner
        assert gone() is None
    finally:
        gc.enable()
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


async def test_a_conflict_is_tried_again_but_not_by_a_conditional_completion() -> None:
    store, client = requests(Fails("conflict"), Fails("conflict"))
    assert await store.create("record", b"mine")
    assert len(client.requests) == 3
    upload, _ = await store.begin_parts("big", create=True)
    client.script = [Fails("conflict")]
    with pytest.raises(RequestError) as caught:
        await store.complete_parts("big", upload, ["tag"], create=True)
    assert caught.value.kind == "conflict"
    assert client.requests[-1:] == ["complete big"]


@pytest.mark.parametrize("kind", ["exists", "conflict"])
async def test_without_a_condition_what_contradicts_one_is_trouble_of_the_server(
    kind: Kind,
) -> None:
    store, client = requests(Fails(kind))
    await store.replace("manifest", b"body")
    assert client.objects == {"manifest": b"body"}
    store, client = requests(*[Fails(kind)] * 4)
    with pytest.raises(RequestError) as caught:
        await store.put(name, b"body")
    assert (caught.value.kind, len(client.requests)) == ("unavailable", 4)


async def test_a_look_that_fails_before_another_try_is_raised_as_it_is() -> None:
    store, _ = requests(Fails("connection"))

    async def look() -> bool:
        raise RequestError("unavailable", "the look failed")

    with pytest.raises(RequestError) as caught:
        await store.create("record", b"mine", again=look)
    assert caught.value.detail == "the look failed"


# -------------------------------------------------------------------------------------------- tries


@pytest.mark.parametrize("kind", ["throttled", "unavailable", "timeout", "connection", "short"])
async def test_what_may_pass_is_tried_again_whatever_the_request(kind: Kind) -> None:
    store, client = requests()
    await store.replace("key", b"value")
    upload, _ = await store.begin_parts("big")
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


async def test_the_last_error_says_how_often_and_how_long_it_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch)
    store, client = requests(*[Fails("unavailable")] * 9)
    with pytest.raises(RequestError) as caught:
        await store.size("key")
    assert caught.value.kind == "unavailable"
    assert caught.value.detail == "by script (tried 4 times in 0.0 s)"
    assert len(client.requests) == 4


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


# ------------------------------------------------------------------------------------ whole objects


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
    with pytest.raises(RequestError, match="5 bytes were requested and 52 arrived") as caught:
        await store.get("key", 4, 9)
    assert caught.value.kind == "invalid"


# -------------------------------------------------------------------------------------------- parts


async def test_a_completion_whose_answer_was_lost_is_found_by_its_object() -> None:
    store, client = requests()
    upload, _ = await store.begin_parts("big")
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
    upload, _ = await store.begin_parts("big")
    client.script = [Hang()]
    assert await store.put_part("big", upload, 0, 0, b"part") == ("tag 0", False)


# -------------------------------------------------------------------------------- streams, and rest


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
    assert store.controllers["put"].traffic.streams == 3
    store.fix_streams("put", 200)
    assert store.limiter.ceiling == 200
    store.fix_streams("put", None)
    assert store.limiter.ceiling == AT_ONCE.ceiling


async def test_only_answered_requests_are_measured() -> None:
    store, client = requests(Fails("unavailable"), Hang(), policy=SHORT)
    client.objects["key"] = b"value"
    await store.get("key", 0, 1 * MIB)
    assert store.controllers["get"].estimate.count == 1
    assert store.controllers["get"].estimate.latency_s > 0
    await store.replace("other", b"x" * KIB)
    assert store.controllers["put"].estimate.count == 1


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
