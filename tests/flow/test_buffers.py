"""Staging memory: aligned, touched, reused only after its last use."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.errors import ResourceError
from asyncckpt.flow import buffers
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import (
    PIPELINE_SLOTS,
    AnonymousMemory,
    Slot,
    SlotPool,
)
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import MIB, PAGE_NBYTES, SLOT_NBYTES
from asyncckpt.ports import Bytes

SLOT = 64 << 10


class CountingMemory(AnonymousMemory):
    """Ordinary memory that counts allocations, and fails or waits as a test says."""

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
        buffer = np.zeros(nbytes, np.uint8)
        weakref.finalize(buffer, self._free)
        return buffer

    def _free(self) -> None:
        self.freed += 1


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2, "flow-test")
    yield made
    made.shutdown()


@pytest.fixture
def memory() -> CountingMemory:
    return CountingMemory()


def pool_of(capacity: int, workers: Workers, memory: CountingMemory) -> SlotPool:
    return SlotPool(ByteBudget(capacity * SLOT), workers, memory, slot_nbytes=SLOT)


def test_anonymous_memory_is_zeroed_aligned_and_writable() -> None:
    buffer = AnonymousMemory().allocate(3 * MIB)
    assert buffer.nbytes == 3 * MIB
    assert buffer.ctypes.data % PAGE_NBYTES == 0
    assert not buffer.any()
    buffer[-1] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps memory from children")
def test_a_forked_child_that_drops_slots_keeps_its_own_memory() -> None:
    child = """
import os, sys
import numpy as np
from asyncckpt.flow.buffers import AnonymousMemory

slots = [AnonymousMemory().allocate(8 << 20) for _ in range(16)]
for slot in slots:
    slot.fill(1)
pid = os.fork()
if not pid:
    own = [np.full(4 << 20, 7, np.uint8) for _ in range(64)]
    shared = any(slot.any() for slot in slots)
    slots.clear()
    del slot
    os._exit(1 if shared or any((array != 7).any() for array in own) else 7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 7 or not slots[0].all())
"""
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are read from /proc")
@pytest.mark.parametrize("prepared", [False, True])
async def test_only_prepare_touches_memory_that_nothing_was_written_to(
    workers: Workers, prepared: bool
) -> None:
    def resident_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES

    pool = SlotPool(ByteBudget(64 * MIB), workers, AnonymousMemory(), slot_nbytes=8 * MIB)
    before = resident_nbytes()
    if prepared:
        await pool.prepare(8)
    slots = await pool.take(8)
    grown = resident_nbytes() - before
    assert grown > 60 * MIB if prepared else grown < 16 * MIB
    pool.release(slots)
    pool.close()


async def test_memory_is_allocated_at_first_use_and_kept(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(4, workers, memory)
    assert pool.allocated_nbytes == 0
    for _ in range(3):
        slots = await pool.take(2)
        assert len({id(slot.buffer) for slot in slots}) == 2
        pool.release(slots)
    del slots
    assert (memory.allocated, pool.allocated_nbytes, pool.budget.in_use) == (2, 2 * SLOT, 0)
    pool.close()
    assert pool.allocated_nbytes == 0
    await until(lambda: memory.freed == 2)


async def test_a_request_beyond_the_budget_gets_all_of_it(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(3, workers, memory)
    slots = await pool.take(10, extra=4 * SLOT)
    assert (len(slots), pool.budget.in_use) == (3, 3 * SLOT)
    pool.release(slots)
    assert pool.budget.in_use == 0


async def test_extra_bytes_have_no_buffer_and_go_back_through_the_budget(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(4, workers, memory)
    slots = await pool.take(1, extra=2 * SLOT)
    assert (len(slots), memory.allocated, pool.budget.in_use) == (1, 1, 3 * SLOT)
    pool.release(slots)
    pool.budget.release(2 * SLOT)
    assert pool.budget.in_use == 0


async def test_take_ready_touches_no_new_memory(workers: Workers, memory: CountingMemory) -> None:
    pool = pool_of(4, workers, memory)
    assert pool.take_ready(3) == []
    await pool.prepare(2)
    slots = pool.take_ready(3)
    assert (len(slots), memory.allocated) == (2, 2)
    pool.release(slots)


async def test_without_grow_new_memory_is_bounded_by_the_pipeline(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(PIPELINE_SLOTS * 2, workers, memory)
    held = [(await pool.take(1, grow=False))[0] for _ in range(PIPELINE_SLOTS)]
    task = asyncio.create_task(pool.take(1, grow=False))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    pool.release([held.pop()])
    held += await task
    assert memory.allocated == PIPELINE_SLOTS
    pool.release(held)


@pytest.mark.parametrize("kept", [1, 3])
async def test_one_slot_that_comes_back_lets_one_of_those_who_wait_through(
    workers: Workers, kept: int
) -> None:
    """However much is kept elsewhere: that makes no room for new memory of the pool."""
    memory = CountingMemory()
    pool = SlotPool(ByteBudget(10 * SLOT), workers, memory, slot_nbytes=SLOT, pipeline_slots=2)
    await pool.acquire(kept * SLOT)
    pool.budget.keep(kept * SLOT)
    held = await pool.take(2, grow=False)
    waiting = [asyncio.create_task(pool.take(1, grow=False)) for _ in range(4)]
    for number in range(4):
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True] * number + [False] * (4 - number)
        pool.release([held.pop()])
        held += await waiting[number]
    assert memory.allocated == 2
    pool.release(held)


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
    pool.release(kept)
    memory.fail_next = 1
    with pytest.raises(ResourceError):
        await pool.take(3)
    assert (pool.budget.in_use, pool.allocated_nbytes) == (0, SLOT)
    slots = await pool.take(4)
    assert len(slots) == 4
    pool.release(slots)


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
    pool.release(await waiting)
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
    assert await asyncio.to_thread(started.wait, 30)
    workers._abandon_s = 0.05
    task.cancel()
    with pytest.raises(ThreadAbandonedError) as caught:
        await task
    pool.release(slots, caught.value)
    assert pool.budget.in_use == SLOT
    others = await pool.take(1)
    assert others[0] is not slots[0]
    assert not pool.budget.try_acquire(SLOT)
    go.set()
    # Its end makes it usable again.
    back = await pool.take(1)
    assert back == slots
    assert (back[0].buffer == 9).all()
    pool.release([*others, *back])
    assert pool.budget.in_use == 0


async def test_slots_that_do_not_come_back_are_nothing_to_wait_for(workers: Workers) -> None:
    """New memory is touched only if used slots do not come back, as here."""
    budget = ByteBudget(8 * SLOT)
    pool = SlotPool(budget, workers, AnonymousMemory(), slot_nbytes=SLOT, pipeline_slots=2)
    lent = await pool.take(2, grow=False)
    waiting = asyncio.create_task(pool.take(2, grow=False))
    await asyncio.sleep(0)
    assert not waiting.done()
    held = [slot.body(SLOT) for slot in lent]
    async with asyncio.timeout(30):
        pool.discard(lent)  # a client is still sending them
        lent.clear()
        fresh = await waiting
    assert pool.budget.in_use == 4 * SLOT
    held.clear()
    await until(lambda: pool.discarded == 0)
    assert (pool.budget.in_use, pool.budget.kept) == (2 * SLOT, 0)
    pool.release(fresh)
    assert pool.budget.in_use == 0


# ------------------------------------------------------------------------ slots that clients send


def client_pool(capacity: int, workers: Workers, *, held: int = 1) -> SlotPool:
    budget = ByteBudget(capacity * SLOT)
    memory = AnonymousMemory()
    return SlotPool(budget, workers, memory, slot_nbytes=SLOT, held_nbytes=held * SLOT)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_slot_that_a_client_still_holds_is_discarded_until_it_lets_go(
    workers: Workers,
) -> None:
    pool = client_pool(1, workers)
    (slot,) = await pool.take()
    held = memoryview(slot.body(SLOT))
    pool.discard([slot])
    del slot
    assert (pool.discarded, pool.budget.in_use) == (1, SLOT)
    waiting = asyncio.create_task(pool.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    held.release()
    del held
    (fresh,) = await waiting
    assert pool.discarded == 0
    pool.release([fresh])
    assert pool.budget.in_use == 0


async def test_the_memory_of_a_discarded_slot_is_given_back_once(
    workers: Workers, memory: CountingMemory
) -> None:
    pool = pool_of(3, workers, memory)
    slots = await pool.take(3)
    pool.discard(slots[:1])
    pool.discard(slots[1:2], keep=True)
    await until(lambda: memory.freed == 2)
    pool.cancel_replacement()
    pool.release(slots[2:])
    del slots
    pool.close()
    await until(lambda: memory.freed == memory.allocated == 3)
    await until(lambda: not pool.discarded)


async def test_a_discarded_slot_in_a_cycle_of_garbage_comes_back(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles keep errors alive, and tasks that wait for memory make no garbage."""
    monkeypatch.setattr(buffers, "COLLECT_AFTER_S", 0.01)
    pool = client_pool(1, workers)
    (slot,) = await pool.take()
    cycle: list[object] = [slot.body(SLOT)]
    cycle.append(cycle)
    pool.discard([slot])
    del slot, cycle
    gc.disable()
    try:
        async with asyncio.timeout(30):
            (fresh,) = await pool.take()
    finally:
        gc.enable()
    pool.release([fresh])


async def test_memory_discarded_late_is_looked_for_as_soon_as_the_first(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while a client holds an old slot, and collections have become rare."""
    monkeypatch.setattr(buffers, "COLLECT_AFTER_S", 0.01)
    pool = client_pool(2, workers)
    first, late = await pool.take(2)
    held = first.body(SLOT)
    pool.discard([first])
    assert pool._collection is not None
    pool._collection.cancel()
    pool._collect(1000.0)  # the next one follows after half a minute
    cycle: list[object] = [late.body(SLOT)]
    cycle.append(cycle)
    pool.discard([late])
    del first, late, cycle
    gc.disable()
    try:
        async with asyncio.timeout(20):
            (fresh,) = await pool.take()
    finally:
        gc.enable()
    assert pool.discarded == 1
    pool.release([fresh])
    del held


async def test_a_collection_that_no_thread_can_make_is_made_later(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = client_pool(1, workers)
    (slot,) = await pool.take()
    held = slot.body(SLOT)
    pool.discard([slot])

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool._workers = Workers(1, "none")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool._collect(1.0)
    assert pool._collection is not None
    assert pool._collection.when() > asyncio.get_running_loop().time()
    pool._collection.cancel()
    del held


async def test_a_slot_takes_the_bytes_of_what_its_client_copies(workers: Workers) -> None:
    pool = client_pool(6, workers, held=3)
    assert pool.capacity == 2
    slots = await pool.take(2)
    assert pool.budget.in_use == 6 * SLOT
    pool.release(slots)
    assert pool.budget.in_use == 0


async def test_a_replacement_takes_the_part_of_what_was_discarded(workers: Workers) -> None:
    pool = client_pool(1, workers)
    (slot,) = await pool.take()
    held = slot.body(SLOT)
    pool.discard([slot], keep=True)
    fresh = await pool.replacement()
    assert (pool.discarded, pool.budget.in_use) == (1, SLOT)
    del held, slot
    await until(lambda: pool.discarded == 0)
    assert pool.budget.in_use == SLOT
    pool.release([fresh])
    assert pool.budget.in_use == 0


async def test_memory_that_clients_hold_of_replaced_slots_makes_idle_slots_go(
    workers: Workers,
) -> None:
    pools = Pools(8, workers, held=2)
    await pools.use(pools.small, 4)
    slots = await pools.large.take(2)
    bodies = [slot.body(SLOT) for slot in slots]
    pools.large.discard(slots, keep=True)
    del slots
    fresh = [await pools.large.replacement() for _ in bodies]
    assert pools.small.allocated_nbytes == 0
    del bodies
    await until(lambda: pools.large.discarded == 0)
    pools.large.release(fresh)
    await pools.use(pools.small, 4)
    assert pools.small.allocated_nbytes == 4 * SLOT_NBYTES
    assert pools.budget.in_use == 0


async def test_pools_of_one_budget_hold_no_more_memory_than_it(workers: Workers) -> None:
    budget = ByteBudget(4 * SLOT_NBYTES)
    small = SlotPool(budget, workers, CountingMemory(), slot_nbytes=SLOT_NBYTES)
    large = SlotPool(budget, workers, CountingMemory(), slot_nbytes=2 * SLOT_NBYTES)
    for pool, count in ((small, 4), (large, 2), (small, 3), (large, 1)):
        pool.release(await pool.take(count))
        assert small.allocated_nbytes + large.allocated_nbytes <= 4 * SLOT_NBYTES
    large.close()
    assert large.allocated_nbytes == 0


class Pools:
    """Two pools of one budget, and memory elsewhere, which together stay within it."""

    def __init__(
        self, capacity: int, workers: Workers, *, held: int = 2, pipeline_slots: int = 2
    ) -> None:
        self.budget = ByteBudget(capacity * SLOT_NBYTES)
        self.elsewhere = 0
        self.memory = CountingMemory()
        self.small, self.large = (
            SlotPool(
                self.budget,
                workers,
                self.memory,
                slot_nbytes=slots * SLOT_NBYTES,
                held_nbytes=held * SLOT_NBYTES,
                pipeline_slots=pipeline_slots,
            )
            for slots, held in ((1, 1), (2, held))
        )

    async def acquire(self, slots: int) -> None:
        await self.small.acquire(slots * SLOT_NBYTES)
        self.elsewhere += slots
        self.check()

    def release(self, slots: int) -> None:
        self.elsewhere -= slots
        self.budget.release(slots * SLOT_NBYTES)

    async def use(self, pool: SlotPool, count: int, *, extra: int = 0, grow: bool = True) -> None:
        slots = await pool.take(count, extra=extra * SLOT_NBYTES, grow=grow)
        self.elsewhere += extra
        self.check()
        pool.release(slots)
        self.release(extra)
        self.check()

    def check(self) -> None:
        held = self.small.allocated_nbytes + self.large.allocated_nbytes
        assert held + self.elsewhere * SLOT_NBYTES <= self.budget.capacity


async def test_the_limit_of_a_pool_does_not_count_what_others_use(workers: Workers) -> None:
    """A restore during an upload does not wait until nearly all of it has been sent."""
    pools = Pools(16, workers)
    sent = await pools.large.take(5)
    async with asyncio.timeout(10):
        read = await pools.small.take(2, grow=False)
        own = asyncio.create_task(pools.small.take(1, grow=False))
        await asyncio.sleep(0)
        assert not own.done()  # it touches no more than its own two
        pools.small.release([read.pop()])
        read += await own
    pools.large.release(sent)
    pools.small.release(read)
    assert pools.budget.in_use == 0


async def test_idle_slots_and_memory_elsewhere_stay_within_the_budget(workers: Workers) -> None:
    pools = Pools(8, workers)
    await pools.use(pools.small, 8)
    await pools.acquire(3)  # idle slots were evicted
    assert pools.small.allocated_nbytes == 5 * SLOT_NBYTES
    await pools.use(pools.large, 1)  # also for slots of another pool
    assert (pools.small._free != [], pools.large.allocated_nbytes) == (True, 2 * SLOT_NBYTES)
    await pools.use(pools.small, 2, extra=2)
    await pools.use(pools.large, 1, extra=3)
    await pools.use(pools.small, 1, extra=4, grow=False)
    pools.release(3)
    await pools.use(pools.small, 4, extra=4)
    await pools.acquire(8)
    assert (pools.small.allocated_nbytes, pools.large.allocated_nbytes) == (0, 0)
    pools.release(8)
    assert pools.budget.in_use == 0


async def test_what_a_client_copies_makes_idle_slots_go(workers: Workers) -> None:
    """It counts even for a slot that is ready without a wait."""
    pools = Pools(8, workers, held=4)
    await pools.use(pools.large, 1)
    await pools.use(pools.small, 6)
    assert pools.small.allocated_nbytes == 6 * SLOT_NBYTES
    (slot,) = pools.large.take_ready(1)
    pools.elsewhere = 2  # the copy
    pools.check()
    assert pools.small.allocated_nbytes == 4 * SLOT_NBYTES
    pools.large.release([slot])


async def test_slots_are_prepared_only_where_nothing_else_is_in_use(workers: Workers) -> None:
    pools = Pools(8, workers)
    await pools.acquire(5)
    await pools.small.prepare(8)
    pools.check()
    assert pools.small.allocated_nbytes == 3 * SLOT_NBYTES
    await pools.large.prepare(4)
    pools.check()
    pools.release(5)


async def test_memory_taken_while_slots_are_prepared_stays_within_the_budget(
    workers: Workers,
) -> None:
    pools = Pools(4, workers)
    pools.memory.gate = threading.Event()
    preparing = asyncio.create_task(pools.small.prepare(4))
    await asyncio.to_thread(pools.memory.entered.wait, 30)
    await pools.small.acquire(3 * SLOT_NBYTES)
    pools.elsewhere = 3
    pools.memory.gate.set()
    await preparing
    pools.check()
    assert pools.small.allocated_nbytes == SLOT_NBYTES
    pools.release(3)


async def test_those_who_are_granted_slots_at_once_find_them_idle(workers: Workers) -> None:
    """Freeing idle slots spares those that are about to be used."""
    pools = Pools(4, workers, pipeline_slots=4)
    slots = await pools.small.take(4)
    waiting = [asyncio.create_task(pools.small.take(1)) for _ in range(4)]
    await asyncio.sleep(0)
    pools.small.release(slots)
    for task in waiting:
        pools.small.release(await task)
    assert (pools.memory.allocated, pools.memory.freed) == (4, 0)


async def test_a_request_beyond_a_budget_that_slots_do_not_fill_gives_all_of_it_back(
    workers: Workers,
) -> None:
    pool = SlotPool(ByteBudget(10), workers, CountingMemory(), slot_nbytes=1, held_nbytes=3)
    pool.release(await pool.take(10))
    assert pool.budget.in_use == 0


async def test_slots_that_a_closed_pool_discarded_are_looked_for(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool is closed when windows get another size; its budget is the next one's."""
    monkeypatch.setattr(buffers, "COLLECT_AFTER_S", 0.01)
    closed = client_pool(1, workers)
    (slot,) = await closed.take()
    cycle: list[object] = [slot.body(SLOT)]
    cycle.append(cycle)
    closed.discard([slot])
    del slot, cycle
    closed.close()
    after = SlotPool(closed.budget, workers, AnonymousMemory(), slot_nbytes=SLOT)
    gc.disable()
    try:
        async with asyncio.timeout(10):
            (fresh,) = await after.take()
    finally:
        gc.enable()
    assert closed.discarded == 0
    after.release([fresh])


async def test_a_slot_given_back_to_a_closed_pool_is_freed(workers: Workers) -> None:
    memory = CountingMemory()
    pool = pool_of(2, workers, memory)
    slots = await pool.take(2)
    pool.close()
    pool.release(slots)
    del slots
    assert (pool.allocated_nbytes, pool.budget.in_use) == (0, 0)
    await until(lambda: memory.freed == 2)
