"""Staging memory: aligned, touched, reused only when nobody uses it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import PIPELINE_SLOTS, AnonymousMemory, Slot, SlotPool
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import MIB, PAGE_NBYTES
from asyncckpt.ports import Bytes

SLOT = 64 << 10


class CountingMemory:
    """Ordinary memory that counts, and fails or waits where a test says so."""

    name = "counting"

    def __init__(self) -> None:
        self.allocated = 0
        self.freed = 0
        self.fail_next = 0
        self.gate: threading.Event | None = None
        self.entered = threading.Event()

    def allocate(self, nbytes: int) -> Bytes:
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.fail_next:
            self.fail_next -= 1
            raise MemoryError("no more")
        self.allocated += 1
        return np.zeros(nbytes, np.uint8)

    def free(self, buffer: Bytes) -> None:
        self.freed += 1


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2, "asyncckpt-test", abandon_s=0.05)
    yield made
    made.shutdown()


@pytest.fixture
def memory() -> CountingMemory:
    return CountingMemory()


def pool_of(capacity: int, workers: Workers, memory: CountingMemory) -> SlotPool:
    return SlotPool(ByteBudget(capacity), workers, memory, slot_nbytes=SLOT)


def test_anonymous_memory_is_zeroed_aligned_and_writable() -> None:
    buffer = AnonymousMemory().allocate(3 * MIB)
    assert buffer.nbytes == 3 * MIB
    assert buffer.ctypes.data % PAGE_NBYTES == 0
    assert not buffer.any()
    buffer[-1] = 1


async def test_memory_is_allocated_at_first_use_and_kept(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(4, workers, memory)
    assert pool.allocated_nbytes == 0
    for _ in range(3):
        slots = await pool.take(2)
        assert len({id(slot.buffer) for slot in slots}) == 2
        pool.give(slots)
    assert (memory.allocated, pool.allocated_nbytes, pool.budget.in_use) == (2, 2 * SLOT, 0)
    pool.close()
    assert (memory.freed, pool.allocated_nbytes) == (2, 0)


async def test_a_request_beyond_the_budget_gets_all_of_it(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(3, workers, memory)
    slots = await pool.take(10, extra=4)
    assert (len(slots), pool.budget.in_use) == (3, 3)
    pool.give(slots)
    assert pool.budget.in_use == 0


async def test_extra_units_have_no_buffer_and_go_back_through_the_budget(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(4, workers, memory)
    slots = await pool.take(1, extra=2)
    assert (len(slots), memory.allocated, pool.budget.in_use) == (1, 1, 3)
    pool.give(slots)
    pool.budget.release(2)
    assert pool.budget.in_use == 0


async def test_take_ready_touches_no_new_memory(workers: Workers, memory: CountingMemory) -> None:
    pool = pool_of(4, workers, memory)
    assert pool.take_ready(3) == []
    await pool.prepare(2)
    slots = pool.take_ready(3)
    assert (len(slots), memory.allocated) == (2, 2)
    pool.give(slots)


async def test_without_grow_new_memory_is_bounded_by_the_pipeline(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(PIPELINE_SLOTS * 2, workers, memory)
    held = [(await pool.take(1, grow=False))[0] for _ in range(PIPELINE_SLOTS)]
    task = asyncio.create_task(pool.take(1, grow=False))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    pool.give([held.pop()])
    held += await task
    assert memory.allocated == PIPELINE_SLOTS
    pool.give(held)


async def test_prepare_stops_at_the_budget(workers: Workers, memory: CountingMemory) -> None:
    pool = pool_of(3, workers, memory)
    await pool.prepare(100)
    assert (memory.allocated, pool.budget.in_use) == (3, 0)
    await pool.prepare(2)
    assert memory.allocated == 3


async def test_a_failed_allocation_leaves_nothing_taken(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(4, workers, memory)
    kept = await pool.take(1)
    pool.give(kept)
    memory.fail_next = 1
    with pytest.raises(MemoryError):
        await pool.take(3)
    assert (pool.budget.in_use, pool.allocated_nbytes) == (0, SLOT)
    slots = await pool.take(4)
    assert len(slots) == 4
    pool.give(slots)


async def test_a_cancelled_take_leaves_nothing_taken(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(4, workers, memory)
    memory.gate = threading.Event()
    task = asyncio.create_task(pool.take(2))
    await asyncio.to_thread(memory.entered.wait, 30)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    memory.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (pool.budget.in_use, pool.allocated_nbytes) == (0, 0)


async def test_those_who_wait_for_anothers_allocation_take_over_when_it_fails(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(1, workers, memory)
    memory.gate = threading.Event()
    preparing = asyncio.create_task(pool.prepare(1))
    await asyncio.to_thread(memory.entered.wait, 30)
    waiting = asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    memory.fail_next = 1
    memory.gate.set()
    with pytest.raises(BaseExceptionGroup):
        await preparing
    pool.give(await waiting)
    assert pool.budget.in_use == 0


async def test_a_slot_that_an_abandoned_thread_uses_is_quarantined_until_it_ends(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(2, workers, memory)
    slots = await pool.take(1)
    started, go = threading.Event(), threading.Event()

    def stuck(slot: Slot) -> None:
        started.set()
        assert go.wait(30)
        slot.buffer[:] = 9

    task = asyncio.create_task(workers.run(stuck, slots[0]))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(ThreadAbandonedError) as caught:
        await task
    pool.give(slots, caught.value)
    assert pool.budget.in_use == 1
    others = await pool.take(1)
    assert others[0] is not slots[0]
    assert not pool.budget.try_acquire()
    go.set()
    # Its end makes it usable again.
    back = await pool.take(1)
    assert back == slots
    assert (back[0].buffer == 9).all()
    pool.give([*others, *back])
    assert pool.budget.in_use == 0
