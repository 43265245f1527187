"""Staging buffers, reused for the life of a `Checkpointer`."""

# Rule 1: a slot returns to the pool only when nothing reads or writes it any more. A slot that a
#   client may still be sending is discarded, and its budget is released with its memory. If it
#   returned earlier, the client would send the next window's bytes under this one's name.
#   (test_a_slot_that_a_client_still_holds_is_discarded_until_it_lets_go)
# Rule 2: memory is first touched in worker threads, as that costs as much as a disk write. A small
#   state touches only what it fills.
# Rule 3: the pools of a budget together hold no more memory than the budget: a pool that grows
#   frees idle slots of the others. A granted slot is in use, not idle, even before its task pops
#   it; otherwise two tasks would get one slot.
#   (test_pools_of_one_budget_hold_no_more_memory_than_it,
#   test_those_who_are_granted_slots_at_once_find_them_idle)
# Rule 4: a request acquires all its bytes of the budget in one step, before any of its memory is
#   allocated or waited for.

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from asyncckpt.errors import ResourceError
from asyncckpt.flow.budget import Account, ByteBudget
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import PAGE_NBYTES, SLOT_NBYTES
from asyncckpt.ports import Bytes

HUGE_PAGE_NBYTES = 2 << 20
"""Alignment of mappings, so that the kernel can back all of them with huge pages."""

# Windows has neither; saving is refused there, but inspection imports this module.
_PRIVATE_ANONYMOUS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_NOT_IN_CHILDREN = getattr(mmap, "MADV_DONTFORK", None)
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
"""`MADV_WIPEONFORK`, which Python does not name and Linux has since 4.14."""

PIPELINE_SLOTS = 24
"""Slots that keep copying, checksumming and writing busy at once. A save whose caller awaits it
allocates no more: fresh pages cost more than waiting for used ones."""

COLLECT_AFTER_S = 0.5
"""Delay before the garbage collector first runs for discarded slots whose memory is still held:
clients drop a body within milliseconds."""

COLLECT_AT_LEAST_EVERY_S = 30.0
"""Longest interval between collections while a client still holds a slot."""


class AnonymousMemory:
    """Private anonymous mappings with huge pages, empty in forked children."""

    def allocate(self, nbytes: int) -> Bytes:
        """Return a zeroed, page-aligned buffer with untouched pages. Blocking.

        Its memory is freed when its last view is dropped.
        """
        mapping, start = map_pages(nbytes, forked=False)
        return np.frombuffer(mapping, np.uint8)[start : start + nbytes]


def map_pages(nbytes: int, *, forked: bool = True) -> tuple[mmap.mmap, int]:
    """Return an untouched private mapping, and the huge-page offset of `nbytes` in it.

    It is unmapped when its last view is dropped. Forked children share it only with `forked`.
    """
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=_PRIVATE_ANONYMOUS)
    advise(mapping, _HUGE_PAGES)
    # The last resort leaves a hole: a child that drops the mapping unmaps what it has mapped
    # there. (test_a_forked_child_that_drops_slots_keeps_its_own_memory)
    if not forked and not advise(mapping, _WIPE_ON_FORK):
        advise(mapping, _NOT_IN_CHILDREN)
    return mapping, -np.frombuffer(mapping, np.uint8).ctypes.data % HUGE_PAGE_NBYTES


def advise(mapping: mmap.mmap, advice: int | None, *span: int) -> bool:
    """Give the kernel advice on a mapping or a part of it, and return whether it took it.

    Kernels may lack huge pages, for example, and return no locked memory.
    """
    if advice is None:  # not on this system
        return False
    try:
        mapping.madvise(advice, *span)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def allocating(nbytes: int) -> Iterator[None]:
    """Raise `ResourceError` if the system refuses memory."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise ResourceError(
            f"{nbytes} bytes of host memory could not be allocated ({error}); lower "
            "host_memory_nbytes, restore fewer leaves with include=, or raise the limit of the "
            "process or container",
            expected=nbytes,
        ) from error


class Slot:
    """One staging buffer of a pool, with one holder."""

    __slots__ = ("buffer", "pool")

    def __init__(self, pool: SlotPool, buffer: Bytes) -> None:
        self.pool = pool
        self.buffer = buffer

    def body(self, nbytes: int) -> Bytes:
        """Return the first `nbytes` of the slot for a client to send, without a copy."""
        return self.buffer[:nbytes]

    def forget(self) -> object:
        """Drop the slot's memory; return the object that all views of it keep alive."""
        owner: Any = self.buffer
        self.buffer = _EMPTY
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        return owner.obj if isinstance(owner, memoryview) else owner


_EMPTY: Bytes = np.zeros(0, np.uint8)


def spans(slots: Iterable[Slot], start: int, nbytes: int) -> Iterator[Bytes]:
    """Yield views, slot by slot, of `nbytes` from byte `start` of consecutive slots."""
    for slot in slots:
        if nbytes == 0:
            return
        part = slot.buffer[start : start + nbytes]
        start = max(0, start - slot.buffer.nbytes)
        nbytes -= len(part)
        if len(part):
            yield part


class SlotPool(Account):
    """Slots of a `ByteBudget`, allocated at first use and kept.

    It belongs to one event loop; `memory` is used from worker threads.

    Args:
        budget: counts all slots in use.
        workers: threads that allocate.
        memory: allocator of the slots.
        slot_nbytes: size of a slot.
        held_nbytes: bytes of the budget per slot in use, above its size if clients copy bodies.
        pipeline_slots: see `PIPELINE_SLOTS`.

    Attributes:
        discarded: number of discarded slots whose memory is still held.
    """

    def __init__(
        self,
        budget: ByteBudget,
        workers: Workers,
        memory: AnonymousMemory,
        *,
        slot_nbytes: int = SLOT_NBYTES,
        held_nbytes: int | None = None,
        pipeline_slots: int = PIPELINE_SLOTS,
    ) -> None:
        super().__init__()
        self.budget = budget
        self.slot_nbytes = slot_nbytes
        self.held_nbytes = min(held_nbytes or slot_nbytes, budget.capacity)
        self._pipeline_slots = pipeline_slots
        self._workers = workers
        self._memory = memory
        self._free: list[Slot] = []
        self._allocated = 0
        self.discarded = 0
        self._collection: asyncio.TimerHandle | None = None
        self._arrived = asyncio.Event()
        self._closed = False
        budget.accounts.append(self)

    @property
    def capacity(self) -> int:
        """Slots that the whole budget allows."""
        return self.budget.capacity // self.held_nbytes

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of host memory that the pool holds."""
        return self._allocated * self.slot_nbytes

    @property
    def idle_nbytes(self) -> int:
        """Bytes of slots without a grant, including those being allocated."""
        return max(0, self._allocated - self.in_use // self.held_nbytes) * self.slot_nbytes

    def evict(self, nbytes: int) -> None:
        """Free idle slots of at least `nbytes`, or all."""
        self._shrink(-(-min(nbytes, self.idle_nbytes) // self.slot_nbytes))

    async def take(self, count: int = 1, *, grow: bool = True, extra: int = 0) -> list[Slot]:
        """Take `count` slots; return each with `release` or `discard`.

        Args:
            count: number of slots.
            grow: allocate up to the whole budget; otherwise wait for used slots instead of
                allocating more than `pipeline_slots`.
            extra: more bytes of the budget, for memory allocated elsewhere; return them with
                `budget.release`.

        Cancellation: nothing is held.
        """
        count = min(count, self.capacity)
        held = count * self.held_nbytes
        extra = min(extra, self.budget.capacity - held)
        limit = None if grow else max(self._allocated, self._pipeline_slots) * self.held_nbytes
        await self.budget.acquire(held + extra, limit=limit, account=self, extra=extra)
        slots: list[Slot] = []
        try:
            self.budget.evict(self)
            while len(slots) < count:
                if self._free:
                    slots.append(self._free.pop())
                elif self._allocated < self.capacity:
                    await self._add()
                else:
                    self._arrived.clear()
                    await self._arrived.wait()
        except BaseException:
            self._free.extend(slots)
            self.budget.release(held, account=self)
            self.budget.release(extra)
            raise
        return slots

    async def acquire(self, nbytes: int) -> None:
        """Take bytes of the budget for memory allocated elsewhere, freeing idle slots if needed.

        Return them with `budget.release`. Cancellation: nothing is held.
        """
        await self.take(0, extra=nbytes)

    def keep(self, count: int) -> None:
        """Mark `count` more slots in use as kept (`ByteBudget.keep`); negative: fewer."""
        self.budget.keep(count * self.held_nbytes, account=self)

    def take_ready(self, most: int) -> list[Slot]:
        """Take up to `most` free slots without waiting; none if others wait."""
        slots: list[Slot] = []
        while (
            len(slots) < most
            and self._free
            and self.budget.try_acquire(self.held_nbytes, account=self)
        ):
            slots.append(self._free.pop())
        self.budget.evict(self)  # the client's copies are in use now too
        return slots

    def release(self, slots: Iterable[Slot], error: BaseException | None = None) -> None:
        """Return the slots to the pool.

        After a `ThreadAbandonedError` they are quarantined until the abandoned thread returns, as
        it may still read or write them.
        """
        stuck = error.future if isinstance(error, ThreadAbandonedError) else None
        for slot in slots:
            if stuck is not None and not stuck.done():
                self._quarantine(slot, stuck)
            else:
                self._return(slot)

    def discard(self, slots: Iterable[Slot], *, keep: bool = False) -> None:
        """Drop slots that a client may still be sending.

        Their bytes of the budget are released when the last view is dropped. With `keep` the
        caller keeps them for a `replacement` of each slot, and the memory that the client holds
        exceeds the budget.
        """

        def gone() -> None:
            self.discarded -= 1
            if keep:
                self.unbudgeted_nbytes -= self.slot_nbytes
            else:
                self.budget.keep(-self.held_nbytes)
                self.budget.release(self.held_nbytes)

        collected = _in_loop(gone)
        for slot in slots:
            self.discarded += 1
            self._allocated -= 1
            if keep:
                self.unbudgeted_nbytes += self.slot_nbytes
            else:
                self.in_use -= self.held_nbytes
                self.budget.keep(self.held_nbytes)
            owner = slot.forget()
            weakref.finalize(owner, collected).atexit = False
            del owner
        self._collect_within(COLLECT_AFTER_S)

    def _collect_within(self, after_s: float) -> None:
        """Schedule a collection within `after_s`."""
        loop = asyncio.get_running_loop()
        if self._collection is not None:
            if self._collection.when() <= loop.time() + after_s:
                return
            self._collection.cancel()
        self._collection = loop.call_later(after_s, self._collect, after_s)

    def _collect(self, after_s: float) -> None:
        """Collect garbage cycles that may hold discarded slots, at growing intervals.

        Cycles keep errors alive, and with them the bodies of failed requests. A process that waits
        for staging memory makes no garbage, so its collector would never run.
        """
        self._collection = None
        if self.discarded > 0:
            # The engine is ending, or no thread can start now.
            with contextlib.suppress(RuntimeError, ResourceError):
                self._workers.submit(gc.collect)
            self._collect_within(min(2 * after_s, COLLECT_AT_LEAST_EVERY_S))

    async def replacement(self) -> Slot:
        """Return a slot in place of one discarded with `keep`. Cancellation: nothing is held."""
        try:
            return await self._new()
        except BaseException:
            self.cancel_replacement()
            raise

    def cancel_replacement(self) -> None:
        """Release the budget of a slot discarded with `keep`, instead of replacing it."""
        self.budget.release(self.held_nbytes, account=self)

    async def prepare(self, count: int) -> None:
        """Allocate and touch slots until there are `count` or the budget is used up."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers.count):
                group.create_task(self._grow_to(min(count, self.capacity)))

    def close(self) -> None:
        """Free the pool's memory; that of slots in use is freed when they are released."""
        self._closed = True
        self._shrink(len(self._free))
        if self in self.budget.accounts:
            self.budget.accounts.remove(self)

    def _shrink(self, count: int) -> None:
        """Free up to `count` free slots."""
        for _ in range(min(count, len(self._free))):
            self._free.pop()
            self._allocated -= 1

    def _return(self, slot: Slot) -> None:
        self._free.append(slot)
        self.budget.release(self.held_nbytes, account=self)
        if self._closed:
            self._shrink(1)

    async def _grow_to(self, count: int) -> None:
        budget = self.budget
        while self._allocated < count:
            if budget.in_use + self.idle_nbytes + self.slot_nbytes > budget.capacity:
                return  # bytes in use leave no room for idle slots
            await self._add(touched=True)
            budget.evict(self)  # for bytes granted to others meanwhile

    async def _add(self, *, touched: bool = False) -> None:
        try:
            self._free.append(await self._new(touched=touched))
        finally:
            self._arrived.set()  # after a failure, too: those who wait may then allocate the slot

    async def _new(self, *, touched: bool = False) -> Slot:
        self._allocated += 1
        self.budget.evict(self)
        try:
            return Slot(self, await self._workers.run(self._allocate, touched))
        except BaseException:
            self._allocated -= 1
            raise

    def _allocate(self, touched: bool) -> Bytes:
        with allocating(self.slot_nbytes):
            buffer = self._memory.allocate(self.slot_nbytes)
            if touched:
                buffer[::PAGE_NBYTES] = 0  # numpy releases the interpreter lock
            return buffer

    def _quarantine(self, slot: Slot, user: Future[Any]) -> None:
        # Its bytes of the budget stay in use, because the thread may still write to it.
        self.keep(1)

        def ended() -> None:
            self.keep(-1)
            self._return(slot)

        user.add_done_callback(_in_loop(ended))


def _in_loop(call: Callable[[], None]) -> Callable[..., None]:
    """Return a function that any thread may call to make the call in this thread's event loop."""
    loop = asyncio.get_running_loop()

    def from_any_thread(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(call)

    return from_any_thread
