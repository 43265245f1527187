"""Ranges that fill their buffers as they arrive, whatever becomes of the requests for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from asyncckpt.errors import CorruptCheckpointError, StoreError
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import CACHED_NBYTES, MIB
from asyncckpt.ports import CheckpointFiles, Reading
from asyncckpt.stores.objects.clients.client import RequestError, Take
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from tests.simulator import Fault, Simulator
from tests.stores.objects.scripted import AT_ONCE, ScriptedClient
from tests.stores.objects.stores import ROOT, opened, store_of

SOON = replace(AT_ONCE, hedge_cold_s=0.01, hedge_cold_nbytes_per_s=1e12)
"""A request is raced after 10 ms."""

PIECE = CACHED_NBYTES
DATA = np.random.default_rng(0).integers(0, 256, 4 * PIECE, np.uint8)

Response = Callable[[int, int, Take], Awaitable[None]]


class Streaming(ScriptedClient):
    """Answers each `receive` by the next of its responses; `asked` has their ranges."""

    def __init__(self, *responses: Response) -> None:
        super().__init__()
        self.traits = replace(self.traits, receive_nbytes=MIB)
        self.asked: list[tuple[int, int]] = []
        self._responses = list(responses)

    async def receive(self, key: str, start: int, stop: int, take: Take) -> None:
        self.asked.append((start, stop))
        self.running += 1
        try:
            await self._responses.pop(0)(start, stop, take)
        finally:
            self.running -= 1


async def pieces(start: int, stop: int, take: Take, *, wrong: bool = False) -> None:
    """Pass on these bytes piece by piece; wrong ones in a way that a checksum would find."""
    for at in range(start, stop, PIECE):
        await take([(DATA[at : min(at + PIECE, stop)] ^ wrong).tobytes()])


@asynccontextmanager
async def files_of(
    client: ScriptedClient, policy: RequestPolicy = AT_ONCE, abandon_s: float = 30.0
) -> AsyncIterator[CheckpointFiles]:
    workers = Workers(2, "test-filling", abandon_s=abandon_s)
    try:
        yield store_of(client, workers, policy).files("1")
        assert client.running == 0
    finally:
        workers.shutdown()


class Checks:
    """What a check has seen: every byte once it is there, in order, and never anything else."""

    def __init__(self, buffer: np.ndarray, data: np.ndarray = DATA) -> None:
        self._buffer, self._data = buffer, data
        self._busy = threading.Lock()
        self.seen = 0

    def __call__(self, there: int) -> None:
        assert self._busy.acquire(blocking=False), "two threads fill one buffer"
        assert there > self.seen
        assert np.array_equal(self._buffer[self.seen : there], self._data[self.seen : there])
        self.seen = there
        self._busy.release()


async def test_requests_that_race_write_every_byte_once() -> None:
    """The slow one brings two pieces, and goes on with wrong ones after the hedge has."""
    ahead, caught_up = asyncio.Event(), asyncio.Event()

    async def slow(start: int, stop: int, take: Take) -> None:
        await pieces(0, 2 * PIECE, take)
        await ahead.wait()
        await pieces(2 * PIECE, 3 * PIECE, take, wrong=True)
        caught_up.set()
        await asyncio.Event().wait()

    async def hedge(start: int, stop: int, take: Take) -> None:
        await pieces(start, 3 * PIECE, take)
        ahead.set()
        await caught_up.wait()
        await pieces(3 * PIECE, stop, take)

    client = Streaming(slow, hedge)
    buffer = np.zeros_like(DATA)
    check = Checks(buffer)
    async with files_of(client, SOON) as files:
        await files.read_into("data", 0, [buffer], how=Reading(check=check))
    assert np.array_equal(buffer, DATA)
    assert check.seen == DATA.size
    assert len(client.asked) == 2 and client.asked[1][0] % PIECE == 0


async def test_requests_that_race_never_write_at_a_time() -> None:
    """Both bring all bytes at once; whichever comes second to a piece leaves it out."""
    both = asyncio.Event()

    async def first(start: int, stop: int, take: Take) -> None:
        await both.wait()
        await pieces(start, stop, take)

    async def second(start: int, stop: int, take: Take) -> None:
        both.set()
        await pieces(start, stop, take)

    for _ in range(10):
        both.clear()
        buffer = np.zeros_like(DATA)
        check = Checks(buffer)
        async with files_of(Streaming(first, second), SOON) as files:
            await files.read_into("data", 0, [buffer], how=Reading(check=check))
        assert np.array_equal(buffer, DATA)
        assert check.seen == DATA.size


async def test_a_broken_body_is_resumed_where_it_broke() -> None:
    async def broken(start: int, stop: int, take: Take) -> None:
        await pieces(start, start + PIECE, take)
        raise RequestError("short", "the connection ended")

    client = Streaming(broken, broken, pieces)
    buffer = np.zeros_like(DATA)
    check = Checks(buffer)
    async with files_of(client) as files:
        await files.read_into("data", 0, [buffer], how=Reading(check=check))
    assert np.array_equal(buffer, DATA)
    assert check.seen == DATA.size
    assert client.asked == [(at, DATA.size) for at in (0, PIECE, 2 * PIECE)]


async def test_a_body_that_breaks_after_its_last_byte_is_whole() -> None:
    async def broken(start: int, stop: int, take: Take) -> None:
        await pieces(start, stop, take)
        raise RequestError("connection", "reset")

    client = Streaming(broken)
    buffer = np.zeros_like(DATA)
    async with files_of(client) as files:
        await files.read_into("data", 0, [buffer])
    assert np.array_equal(buffer, DATA)
    assert client.asked == [(0, DATA.size)]


async def test_a_response_longer_than_its_range_is_refused_before_it_is_written() -> None:
    async def whole(start: int, stop: int, take: Take) -> None:
        await take([DATA.tobytes()])

    client = Streaming(whole)
    memory = np.zeros_like(DATA)
    async with files_of(client) as files:
        with pytest.raises(StoreError, match="ignores ranges"):
            await files.read_into("data", PIECE, [memory[:PIECE]])
    assert not memory.any()


async def test_a_check_that_fails_ends_both_requests() -> None:
    """What the hedge could bring is not waited for, and is not taken for right."""
    raced = asyncio.Event()

    async def damaged(start: int, stop: int, take: Take) -> None:
        await raced.wait()
        await pieces(start, stop, take, wrong=True)

    async def hedge(start: int, stop: int, take: Take) -> None:
        raced.set()
        await asyncio.Event().wait()

    def check(there: int) -> None:
        raise CorruptCheckpointError("the checksum differs")

    client = Streaming(damaged, hedge)
    async with asyncio.timeout(30), files_of(client, SOON) as files:
        with pytest.raises(CorruptCheckpointError, match="the checksum differs"):
            await files.read_into("data", 0, [np.zeros_like(DATA)], how=Reading(check=check))
    assert len(client.asked) == 2


@pytest.mark.parametrize("deadline", [False, True], ids=["cancelled", "late"])
async def test_nothing_is_written_after_a_cancelled_read(deadline: bool) -> None:
    """The thread that copies is waited for, also by the next try after a deadline."""
    copying, go_on = threading.Event(), threading.Event()
    buffer = np.zeros_like(DATA)
    inner = Checks(buffer)

    def check(there: int) -> None:
        copying.set()
        if there == PIECE:
            assert go_on.wait(30)
        inner(there)

    late = replace(AT_ONCE, timeout_s=0.05, floor_nbytes_per_s=1e12)
    policy = late if deadline else AT_ONCE
    client = Streaming(pieces, pieces)
    async with files_of(client, policy) as files:
        reading = asyncio.create_task(
            files.read_into("data", 0, [buffer], how=Reading(check=check))
        )
        while not copying.is_set():
            await asyncio.sleep(0.001)
        if deadline:
            await asyncio.sleep(0.1)
        else:
            reading.cancel()
            await asyncio.sleep(0.01)
        assert not reading.done() and len(client.asked) == 1
        go_on.set()
        if deadline:
            await reading
            assert np.array_equal(buffer, DATA)
            assert client.asked == [(0, DATA.size), (PIECE, DATA.size)]
            return
        with pytest.raises(asyncio.CancelledError):
            await reading
        written = buffer.copy()
        assert inner.seen == PIECE and not written[PIECE:].any()
        await asyncio.sleep(0.01)
        assert np.array_equal(buffer, written)


async def test_a_stuck_thread_is_named_and_no_other_request_writes_beside_it() -> None:
    stuck, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    checked: list[int] = []

    def check(there: int) -> None:
        checked.append(there)
        loop.call_soon_threadsafe(stuck.set)
        assert go_on.wait(30)

    async def hedge(start: int, stop: int, take: Take) -> None:
        await stuck.wait()
        await pieces(start, stop, take)

    client = Streaming(pieces, hedge)
    async with files_of(client, SOON, abandon_s=0.05) as files:
        reading = asyncio.create_task(
            files.read_into("data", 0, [np.zeros_like(DATA)], how=Reading(check=check))
        )
        await stuck.wait()
        while len(client.asked) < 2:
            await asyncio.sleep(0.001)
        reading.cancel()
        try:
            with pytest.raises(ThreadAbandonedError, match=r"stuck in _Part\._put"):
                await reading
            assert checked == [PIECE]
        finally:
            go_on.set()


@pytest.mark.parametrize("kind", ["s3fs", "gcsfs", "obstore"])
async def test_truncated_responses_are_asked_for_again_and_checked_in_order(
    sim: Simulator, kind: str
) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5 * MIB, np.uint8)
    sim.put("bucket", f"{ROOT}/1/data", data.tobytes())
    async with opened(kind, sim) as store:
        files = store.files("1")
        for kept in (0, 1000, 3 * MIB, data.size - 1):
            buffer = np.zeros_like(data)
            check = Checks(buffer, data)
            sim.reset()
            sim.faults[:] = [Fault(kind="get_object", number=1, truncate=kept)]
            await files.read_into("data", 0, [buffer], how=Reading(check=check))
            assert np.array_equal(buffer, data)
            assert check.seen == data.size
        await files.close()


async def test_responses_are_received_in_small_memory(sim: Simulator) -> None:
    """Of s3fs, which joins what it receives; what is counted in the budget is enough."""
    async with opened("s3fs", sim) as store:
        capabilities = store.capabilities
        assert capabilities.copied_nbytes(16 * MIB) == capabilities.read_nbytes
        assert capabilities.copied_nbytes(1000) == 1000 * capabilities.read_copies
        largest = 0
        fill = store._requests.client.receive

        async def seen(key: str, start: int, stop: int, take: Take) -> None:
            async def taken(pieces: object) -> None:
                nonlocal largest
                largest = max(largest, sum(map(len, pieces)))  # type: ignore[call-overload]
                await take(pieces)  # type: ignore[arg-type]

            await fill(key, start, stop, taken)

        store._requests.client.receive = seen  # type: ignore[method-assign]
        sim.put("bucket", f"{ROOT}/1/data", bytes(16 * MIB))
        buffer = np.ones(16 * MIB, np.uint8)
        await store.files("1").read_into("data", 0, [buffer])
        assert not buffer.any()
        assert capabilities.read_nbytes is not None
        assert 0 < largest < capabilities.read_nbytes
