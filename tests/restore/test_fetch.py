"""Fetching alone: what is in flight, what it holds, and what an error or a cancellation leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
)
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import StoreCapabilities
from asyncckpt.reports import FileInfo
from asyncckpt.restore.fetch import Fetch
from asyncckpt.restore.plan import plan_reads
from tests.restore.opened import LOCATION, destinations, opened, packed

SLOT = 64 << 10
GAP = 100

VALUES = {f"{n:02d}": np.arange(n, 5_000 + n, dtype=np.int32) for n in range(12)}
"""Twelve leaves of 20 kB, with gaps between them where a test wants a read for each."""


class Files:
    """One data file in memory, whose reads a test can hold or fail."""

    location = LOCATION

    def __init__(self, data: bytes, concurrency: Callable[[], int], **capabilities: Any) -> None:
        self.capabilities = StoreCapabilities(**{"read_gap_nbytes": GAP, **capabilities})
        self._concurrency = concurrency
        self.data = np.frombuffer(data, np.uint8)
        self.on_read: Callable[[int], Any] | None = None
        self.in_flight = self.most = self.calls = 0

    def reads(self, wanted: int | None) -> int:
        return self._concurrency()

    async def read_into(self, path: str, offset: int, buffers: Sequence[Any], **_: Any) -> None:
        number, self.calls = self.calls, self.calls + 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0)
            if self.on_read is not None:
                await self.on_read(number)
            for buffer in buffers:
                buffer[:] = self.data[offset : offset + len(buffer)]
                offset += len(buffer)
        finally:
            self.in_flight -= 1


class Fetched:
    """A fetch of `VALUES` into new arrays, and what it has told."""

    def __init__(
        self,
        workers: Workers,
        values: dict[str, Any] = VALUES,
        *,
        concurrency: Callable[[], int] = lambda: 4,
        slots: int = 6,
        spread: bool = True,
        strided: bool = False,
        damaged: int | None = None,
        **capabilities: Any,
    ) -> None:
        values = dict(sorted(values.items()))  # as they are stored
        data, extents = packed([value.tobytes() for value in values.values() if value.size])
        if spread:
            # A kilobyte before each chunk: too far to be read along.
            ends = (extents.offset + extents.nbytes).tolist()
            starts = extents.offset.tolist()
            data = b"".join(bytes(1024) + data[a:b] for a, b in zip(starts, ends, strict=True))
            extents = replace(extents, offset=extents.offset + 1024 * np.arange(1, len(ends) + 1))
        if damaged is not None:
            at = int(extents.offset[damaged])
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        self.files = Files(data, concurrency, **capabilities)
        checkpoint = replace(
            opened(values), files=self.files, stored_files=(FileInfo("d/0", len(data), None),)
        )
        self.found = {key: np.full_like(value, -1) for key, value in values.items()}
        if strided:  # nothing is read straight into such memory
            self.found = {k: np.repeat(v, 2, axis=-1)[..., ::2] for k, v in self.found.items()}
        wanted = destinations(self.found)
        reads = plan_reads(checkpoint, extents, wanted, slot_nbytes=SLOT, direct_nbytes=SLOT)
        self.pool = SlotPool(ByteBudget(slots * SLOT), workers, AnonymousMemory(), slot_nbytes=SLOT)
        self.arrived: list[int] = []
        self.moved: list[int] = []
        self.fetch = Fetch(
            reads,
            self.pool,
            workers,
            own_memory=False,
            arrived=self.arrived.extend,
            progress=self.moved.append,
        )

    def check_complete(self, values: dict[str, Any] = VALUES) -> None:
        for key, value in values.items():
            assert np.array_equal(self.found[key], value)
        chunks = np.bincount(self.arrived, minlength=len(values)).tolist()
        assert chunks == self.fetch.reads.plan.counts
        assert sum(self.moved) == self.fetch.read_nbytes >= sum(v.nbytes for v in values.values())
        assert self.pool.budget.in_use == 0


@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("spread", [False, True], ids=["together", "apart"])
async def test_every_value_arrives_once_and_the_budget_comes_back(
    workers: Workers, spread: bool, copies: int
) -> None:
    fetched = Fetched(workers, spread=spread, read_copies=copies, read_gap_nbytes=GAP)
    await fetched.fetch.run()
    fetched.check_complete()
    assert fetched.files.calls == (len(VALUES) if spread else fetched.files.calls)


async def test_neighbours_are_read_by_one_call(workers: Workers) -> None:
    apart, together = Fetched(workers), Fetched(workers, spread=False)
    for fetched in (apart, together):
        await fetched.fetch.run()
    assert together.files.calls < apart.files.calls == len(VALUES)


async def test_chunks_larger_than_the_budget_pass_through_it_piece_by_piece(
    workers: Workers,
) -> None:
    values = {"big": np.arange(SLOT, dtype=np.int64), "empty": np.zeros((0, 3)), "s": np.ones(3)}
    values["rows"] = np.asfortranarray(np.arange(60_000.0).reshape(200, 300))
    fetched = Fetched(workers, values, slots=1, strided=True)
    await fetched.fetch.run()
    fetched.check_complete(values)
    assert fetched.pool.budget.peak == SLOT


async def test_what_is_in_flight_follows_the_store_as_it_learns(workers: Workers) -> None:
    allowed = 2
    fetched = Fetched(workers, concurrency=lambda: allowed, slots=12)
    seen: list[int] = []

    async def on_read(number: int) -> None:
        nonlocal allowed
        seen.append(fetched.files.in_flight)
        allowed = 2 if number < 4 else 5
        await asyncio.sleep(0.002)

    fetched.files.on_read = on_read
    await fetched.fetch.run()
    fetched.check_complete()
    assert max(seen[:4]) == 2 and 2 < fetched.files.most <= 5


async def test_a_small_budget_limits_what_is_in_flight(workers: Workers) -> None:
    fetched = Fetched(workers, concurrency=lambda: 8, slots=3)
    await fetched.fetch.run()
    fetched.check_complete()
    assert fetched.pool.budget.peak == 3 * SLOT


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (CheckpointNotFoundError("gone"), "d/0 is missing, the checkpoint's metadata lists it"),
        (StoreError("disk on fire"), "disk on fire"),
    ],
)
async def test_a_read_that_fails_ends_all_others(
    workers: Workers, raised: Exception, expected: str
) -> None:
    fetched = Fetched(workers)

    async def on_read(number: int) -> None:
        if number == 5:
            while len(fetched.arrived) < 4:
                await asyncio.sleep(0.001)
            raise raised
        await asyncio.sleep(0 if number < 4 else 60)

    fetched.files.on_read = on_read
    async with asyncio.timeout(30):
        with pytest.raises(AsyncCheckpointError) as caught:
            await fetched.fetch.run()
    error = caught.value
    assert expected in str(error)
    if isinstance(raised, CheckpointNotFoundError):
        assert error.path == "05" and str(error).startswith("05: /run/1: d/0 is missing")
    assert fetched.files.in_flight == fetched.pool.budget.in_use == 0
    assert sorted(fetched.arrived) == [0, 1, 2, 3]


async def test_an_error_of_the_store_that_knows_no_leaf_gets_its_name(workers: Workers) -> None:
    fetched = Fetched(workers)

    async def on_read(number: int) -> None:
        if number == 3:
            raise CorruptCheckpointError("shorter than it was", file="d/0")

    fetched.files.on_read = on_read
    with pytest.raises(AsyncCheckpointError) as caught:
        await fetched.fetch.run()
    error = caught.value
    assert isinstance(error, CorruptCheckpointError)
    assert error.path == "03" and str(error) == "03: shorter than it was"


async def test_a_flipped_bit_never_arrives(workers: Workers) -> None:
    fetched = Fetched(workers, damaged=7)
    with pytest.raises(AsyncCheckpointError) as caught:
        await fetched.fetch.run()
    error = caught.value
    assert str(error).startswith("07: /run/1: the chunk at byte ")
    assert 7 not in fetched.arrived and fetched.pool.budget.in_use == 0


async def test_a_cancelled_fetch_leaves_no_read_behind(workers: Workers) -> None:
    fetched = Fetched(workers)
    held = asyncio.Event()

    async def on_read(number: int) -> None:
        if number == 2:
            held.set()
        await asyncio.sleep(60)

    fetched.files.on_read = on_read
    running = asyncio.create_task(fetched.fetch.run())
    await held.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fetched.files.in_flight == fetched.pool.budget.in_use == 0
    assert fetched.arrived == []
