"""What time does to a request: deadlines, waits, cancellations, and races of two."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from asyncckpt.options import MIB
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.requests.estimate import LARGE_NBYTES
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.objects.requests.sending import SILENT_S
from tests.stores.objects.hasty import HASTY
from tests.stores.objects.scripted import (
    AT_ONCE,
    SHORT,
    TURNS,
    Clock,
    Fails,
    Hang,
    assert_at_rest,
    name,
    requests,
)

SOON = replace(HASTY, hedge_cold_s=0.01)
"""A request is raced after 10 ms …"""

LATE_S = 1.0
"""… and not yet given up now."""

# ---------------------------------------------------------------------------------------- deadlines


def test_a_deadline_grows_with_the_body() -> None:
    policy = RequestPolicy()
    assert policy.deadline_s(0) == policy.deadline_s(1 * MIB) == 60.0
    assert policy.deadline_s(64 * MIB) == 256.0


async def test_after_a_try_that_ran_out_of_time_the_next_gets_twice_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    store, client = requests(*[Hang()] * 4, policy=SHORT)
    task = asyncio.create_task(store.size("key"))
    for number, deadline_s in enumerate((0.02, 0.04, 0.08, 0.16)):
        await clock.advance(0.9 * deadline_s)
        assert (len(client.requests), client.ended) == (number + 1, number)
        await clock.advance(0.2 * deadline_s)
        assert client.ended == number + 1
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.kind == "timeout"
    assert caught.value.detail == "no answer within 0.16 s (tried 4 times in 0.3 s)"
    assert_at_rest(store, client)


async def test_a_network_that_is_away_at_the_start_is_waited_for_as_at_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start-up blip of two seconds used to be fatal, because nothing had been answered yet."""
    clock = Clock(monkeypatch)
    store, client = requests(*[Fails("connection")] * 8, policy=RequestPolicy())
    task = asyncio.create_task(store.size("key"))
    for _ in range(8):
        await clock.advance(21.0)
    with pytest.raises(RequestError) as caught:
        await task
    assert caught.value.kind == "missing"  # of the answer that came at last
    assert len(client.requests) == 9


async def test_cleaning_up_ends_where_the_store_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    store, client = requests(*[None] * 3, *[Hang()] * 4)

    async def clean_up() -> None:
        async with store.cleaning_up(120.0):
            for number in range(9):
                await asyncio.sleep(4.0)
                await store.delete([f"{number}"])

    task = asyncio.create_task(clean_up())
    for _ in range(3):  # as long as the store answers, there is time
        await clock.advance(4.0)
    assert client.ended == 3
    await clock.advance(4.0)
    assert not task.done()
    await clock.advance(2 * SILENT_S)
    with pytest.raises(TimeoutError):
        await task
    # The next one is over soon, unless the store answers.
    task = asyncio.create_task(clean_up())
    await clock.advance(SILENT_S / 10)
    with pytest.raises(TimeoutError):
        await task
    assert_at_rest(store, client)
    client.script[:] = [None, *[Hang()] * 3]
    await store.delete(["key"])
    task = asyncio.create_task(clean_up())
    await clock.advance(SILENT_S / 2)
    assert not task.done()
    await clock.advance(2 * SILENT_S)
    with pytest.raises(TimeoutError):
        await task


@pytest.mark.parametrize(("nbytes", "tries"), [(0, 3), (64 * MIB, 2)])
async def test_a_silent_store_is_asked_for_as_long_as_it_was_said_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, tries: int
) -> None:
    """The time that tries get grows, and not the time in which they may begin."""
    clock = Clock(monkeypatch)
    policy = replace(RequestPolicy(), retry=replace(AT_ONCE.retry, tries=10, total_s=300.0))
    store, client = requests(*[Hang()] * 10, policy=policy)
    begun_s: list[float] = []
    passed_s = 0.0
    task = asyncio.create_task(store.replace("key", bytes(nbytes)))
    while not task.done():
        await clock.advance(1.0)
        if len(client.requests) > len(begun_s):
            begun_s.append(passed_s)
        passed_s += 1.0
    with pytest.raises(RequestError, match=f"tried {tries} times"):
        await task
    assert len(begun_s) == tries
    assert begun_s[-1] <= max(300.0, 2.0 * policy.deadline_s(nbytes))
    assert_at_rest(store, client)


async def test_time_in_line_does_not_count_against_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    store, client = requests(policy=replace(SHORT, ceiling=1, retry=RetryPolicy(tries=1)))
    client.objects["key"] = b"12"
    held = await store.limiter.acquire()
    task = asyncio.create_task(store.size("key"))
    await clock.advance(60.0)
    assert (store.limiter.waiting, client.requests, task.done()) == (1, [], False)
    held.release()
    assert await task == 2
    assert_at_rest(store, client)


# -------------------------------------------------------------------------------------------- waits


async def test_a_throttled_request_waits_without_a_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    policy = replace(AT_ONCE, ceiling=1)
    store, client = requests(Fails("throttled", retry_after_s=60.0), policy=policy)
    first = asyncio.create_task(store.replace("a", b"1"))
    await clock.advance(0.0)
    second = asyncio.create_task(store.replace("b", b"2"))  # in the only permit there is
    await clock.advance(59.0)
    assert (first.done(), second.done()) == (False, True)
    await clock.advance(2.0)
    assert first.done()
    await first
    assert client.requests == ["put a", "put b", "put a"]


# ------------------------------------------------------------------------------------- cancellation


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


async def test_a_body_on_its_way_lands_before_it_is_removed() -> None:
    """A service keeps what it has received, though nobody waits for the answer any more."""
    received = asyncio.Event()
    store, client = requests(received, policy=replace(HASTY, ceiling=1))
    sending, queued = (asyncio.create_task(store.replace(key, b"body")) for key in "ab")
    while not client.requests:
        await asyncio.sleep(0)
    for task in (sending, queued):
        task.cancel()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert queued.done() and not sending.done()
    received.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert client.objects == {"a": b"body"} and client.requests == ["put a"]
    assert_at_rest(store, client)


async def test_a_body_that_nobody_wants_is_not_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    answered = asyncio.Event()
    store, client = requests(answered, policy=SOON)
    sending = asyncio.create_task(store.put(name, b"body"))
    await clock.advance(0.5 * SOON.hedge_cold_s)
    sending.cancel()
    await clock.advance(SOON.hedge_cold_s)
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert client.objects == {name(0): b"body"} and client.requests == [f"put {name(0)}"]
    assert_at_rest(store, client)


async def test_a_cancelled_read_is_not_waited_for() -> None:
    store, client = requests(Hang(), policy=HASTY)
    reading = asyncio.create_task(store.get("key", 0, 5))
    while not client.requests:
        await asyncio.sleep(0)
    reading.cancel()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert reading.cancelled()
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


@pytest.mark.parametrize("hedge_cold_s", [0.0, 60.0])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_request_cancelled_at_any_turn_of_the_loop_leaves_nothing(
    times: int, hedge_cold_s: float
) -> None:
    policy = replace(HASTY, ceiling=2, hedge_cold_s=hedge_cold_s, retry=AT_ONCE.retry)
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


# ---------------------------------------------------------------------------- races of data objects


async def test_a_slow_data_object_is_raced_by_one_of_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    store, client = requests(Hang(applied=True), policy=SOON)
    task = asyncio.create_task(store.put(name, b"body"))
    await clock.advance(0.9 * SOON.hedge_cold_s)
    assert client.requests == [f"put {name(0)}"]
    await clock.advance(0.2 * SOON.hedge_cold_s)
    # What the first request was sending may still be on its way.
    assert await task == (name(1), False, (name(0),))
    assert client.requests == [f"put {name(0)}", f"put {name(1)}"]
    assert_at_rest(store, client)


async def test_a_loop_that_was_busy_before_a_transfer_has_not_made_it_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    store, client = requests(policy=SOON)
    task = asyncio.create_task(store.put(name, b"body"))
    while not store.limiter.in_flight:
        await asyncio.sleep(0)
    clock.jump(LATE_S)
    assert await task == (name(0), True, ())
    assert client.requests == [f"put {name(0)}"]


@pytest.mark.parametrize("others", [0, 5])
async def test_the_last_large_objects_are_raced_earlier_than_those_among_many(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    clock = Clock(monkeypatch)
    body = bytes(LARGE_NBYTES)
    events = [asyncio.Event() for _ in range(others)]
    store, client = requests(*events, Hang(), policy=replace(SOON, streams=8))
    for _ in range(64):
        store.controllers["put"].estimate.observe(LARGE_NBYTES, 1.0)
    rest = [asyncio.create_task(store.replace(f"{number}", b"body")) for number in range(others)]
    await asyncio.sleep(0)
    task = asyncio.create_task(store.put(lambda this: f"large.{this}", body))
    await clock.advance(1.1)
    assert ("put large.1" in client.requests) == (not others)
    await clock.advance(0.5)
    assert (await task).key == "large.1"
    for event in events:
        event.set()
    await asyncio.gather(*rest)
    assert_at_rest(store, client)


async def test_of_a_race_the_one_that_succeeds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    event = asyncio.Event()
    store, client = requests(event, Fails("unavailable", applied=True), None, policy=SOON)
    task = asyncio.create_task(store.put(name, b"body"))
    await clock.advance(LATE_S)
    assert (len(client.requests), client.ended) == (2, 1)
    event.set()
    sent = await task
    assert (sent.key, sent.orphans) == (name(0), (name(1),))
    assert not sent.reusable
    assert_at_rest(store, client)


async def test_a_client_that_copies_what_it_sends_is_not_made_to_copy_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    event = asyncio.Event()
    store, client = requests(event, policy=SOON)
    client.traits = replace(client.traits, put_copies=1)
    task = asyncio.create_task(store.put(name, b"body"))
    await clock.advance(LATE_S)
    assert client.requests == [f"put {name(0)}"]
    event.set()
    assert await task == (name(0), True, ())
    assert client.requests == [f"put {name(0)}"]


# ----------------------------------------------------------------------------------- races of reads


async def test_a_slow_read_is_raced_by_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    store, client = requests(Hang(), policy=SOON)
    client.objects["key"] = b"value"
    task = asyncio.create_task(store.get("key", 0, 5))
    await clock.advance(0.9 * SOON.hedge_cold_s)
    assert client.requests == ["get key 0-5"]
    await clock.advance(0.2 * SOON.hedge_cold_s)
    assert await task == b"value"
    assert client.requests == ["get key 0-5"] * 2
    assert_at_rest(store, client)


async def test_a_slow_read_among_the_first_is_raced_once_the_others_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is slow is not known when it begins: it would be raced after six seconds."""
    clock = Clock(monkeypatch)
    events = [asyncio.Event() for _ in range(24)]
    store, client = requests(*events, Hang(), policy=RequestPolicy())
    client.objects["key"] = bytes(LARGE_NBYTES)
    reads = [asyncio.create_task(store.get("key", 0, LARGE_NBYTES)) for _ in range(25)]
    await clock.advance(0.3)
    for event in events:
        event.set()
    await clock.advance(0.01)
    assert len(client.requests) == 25
    await clock.advance(0.3)
    assert len(client.requests) == 26
    await asyncio.gather(*reads)
    assert_at_rest(store, client)


async def test_a_read_is_not_raced_while_the_window_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    event = asyncio.Event()
    store, client = requests(event, policy=replace(SOON, ceiling=1))
    client.objects["key"] = b"value"
    task = asyncio.create_task(store.get("key", 0, 5))
    await clock.advance(LATE_S)
    assert client.requests == ["get key 0-5"]
    event.set()
    assert await task == b"value"
    assert_at_rest(store, client)


async def test_reads_that_are_all_slow_are_not_all_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    events = [asyncio.Event() for _ in range(16)]
    store, client = requests(*events, policy=SOON)
    client.objects["key"] = b"value"
    tasks = [asyncio.create_task(store.get("key", 0, 5)) for _ in events]
    await clock.advance(0.9 * SOON.hedge_cold_s)
    assert len(client.requests) == 16
    await clock.advance(LATE_S)
    assert len(client.requests) == 17  # one second read has been made
    for event in events:
        event.set()
    assert await asyncio.gather(*tasks) == [b"value"] * 16
    assert_at_rest(store, client)
