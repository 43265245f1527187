"""Staging buffers: page-aligned, touched, kept for the life of a `Checkpointer`."""

# Rule 1: a slot goes back to the pool only when nothing reads or writes it any more.
# Rule 2: memory is touched in worker threads: the first touch costs as much as a disk write.

from __future__ import annotations

import asyncio
import mmap
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import Bytes, HostMemory

HUGE_PAGE_NBYTES = 2 << 20
"""Mappings start at a multiple of this, else the kernel cannot back their ends by huge pages."""

PIPELINE_SLOTS = 24
"""Slots that keep copying, checksumming and writing busy at once. A save that its caller waits for
anyway does not touch new memory beyond these: fresh pages cost more than waiting for used ones."""


class AnonymousMemory:
    """Private anonymous mappings with huge pages, left out of forked children."""

    name = "anonymous"

    def allocate(self, nbytes: int) -> Bytes:
        """A zeroed, page-aligned buffer whose every page has been touched. Blocking."""
        buffer = map_anonymous(nbytes, forked=False)
        buffer.fill(0)  # numpy releases the interpreter lock here; mmap's populate would not
        return buffer

    def free(self, buffer: Bytes) -> None:
        """The mapping goes with its last view."""


def map_anonymous(nbytes: int, *, forked: bool = True) -> Bytes:
    """A private mapping of this size at a huge page's boundary, its pages not touched yet.

    It is unmapped with its last view. With `forked` False, forked children do not have it.
    """
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=_PRIVATE_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE",) if forked else ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            try:
                mapping.madvise(getattr(mmap, advice))
            except OSError:
                pass  # a kernel without it: slower, not wrong
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_NBYTES
    return whole[start : start + nbytes]


if sys.platform == "win32":  # refused at the surface; kept importable for tools that only inspect
    _PRIVATE_ANONYMOUS = 0
else:
    _PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Slot:
    """One staging buffer of `SLOT_NBYTES` bytes, in use by one holder."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer


class SlotPool:
    """Slots of a `ByteBudget`, allocated at first use and kept.

    It belongs to one event loop; `memory` is used from worker threads.
    """

    def __init__(
        self,
        budget: ByteBudget,
        workers: Workers,
        memory: HostMemory,
        *,
        slot_nbytes: int = SLOT_NBYTES,
    ) -> None:
        self.budget = budget
        self.slot_nbytes = slot_nbytes
        self._workers = workers
        self._memory = memory
        self._free: list[Slot] = []
        self._allocated = 0
        self._quarantined: set[Slot] = set()
        self._arrivals: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"SlotPool({self._allocated} allocated, {len(self._free)} free, {self.budget!r})"

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of host memory that the pool holds."""
        return self._allocated * self.slot_nbytes

    async def take(self, count: int = 1, *, grow: bool = True, extra: int = 0) -> list[Slot]:
        """`count` slots belong to the caller, until each goes to `give`.

        Args:
            count: slots with a buffer.
            grow: allocate up to the whole budget; without it, new memory beyond
                `PIPELINE_SLOTS` is not touched as long as used slots come back.
            extra: further units of the budget, for memory that is allocated elsewhere; they go
                back through `budget.release`.

        Cancellation: nothing is held.
        """
        limit = None if grow else max(self._allocated, PIPELINE_SLOTS)
        await self.budget.acquire(count + extra, limit=limit)
        count = min(count, self.budget.capacity)
        extra = min(extra, self.budget.capacity - count)
        slots: list[Slot] = []
        try:
            while len(slots) < count:
                if self._free:
                    slots.append(self._free.pop())
                elif self._allocated < self.budget.capacity:
                    await self._add(1)
                else:
                    await self._arrival()
        except BaseException:
            self._free.extend(slots)
            self.budget.release(count + extra)
            raise
        return slots

    def take_ready(self, most: int) -> list[Slot]:
        """Up to `most` slots that are touched and free at once; none if anybody waits in line."""
        slots: list[Slot] = []
        while len(slots) < most and self._free and self.budget.try_acquire():
            slots.append(self._free.pop())
        return slots

    def give(self, slots: Iterable[Slot], error: BaseException | None = None) -> None:
        """The slots are free.

        Where their last use ended with `ThreadAbandonedError`, they are quarantined until the
        abandoned thread has ended after all: it may still read or write them.
        """
        stuck = error.future if isinstance(error, ThreadAbandonedError) else None
        for slot in slots:
            if stuck is not None and not stuck.done():
                self._quarantine(slot, stuck)
            else:
                self._free.append(slot)
                self.budget.release()

    async def prepare(self, count: int) -> None:
        """At least `count` slots (or the whole budget) are allocated and touched."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers.count):
                group.create_task(self._grow_to(min(count, self.budget.capacity)))

    def close(self) -> None:
        """The pool's memory is returned. Quarantined slots keep theirs until their users end."""
        for slot in self._free:
            self._memory.free(slot.buffer)
        self._allocated -= len(self._free)
        self._free.clear()

    async def _grow_to(self, count: int) -> None:
        while self._allocated < count:
            await self._add(1)

    async def _add(self, count: int) -> None:
        self._allocated += count
        try:
            buffers = await self._workers.run(self._allocate, count)
        except BaseException:
            self._allocated -= count
            raise
        else:
            self._free.extend(map(Slot, buffers))
        finally:
            # Those who wait for a slot that somebody else allocates look again, also after a
            # failure: then the memory is theirs to allocate.
            for waiter in self._arrivals:
                if not waiter.done():
                    waiter.set_result(None)
            self._arrivals.clear()

    async def _arrival(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals.append(waiter)
        await waiter

    def _allocate(self, count: int) -> list[Bytes]:
        return [self._memory.allocate(self.slot_nbytes) for _ in range(count)]

    def _quarantine(self, slot: Slot, user: Future[Any]) -> None:
        # Its unit of the budget stays taken: memory that somebody may still write to is in use.
        loop = asyncio.get_running_loop()
        self._quarantined.add(slot)

        def ended() -> None:
            self._quarantined.discard(slot)
            self._free.append(slot)
            self.budget.release()

        def from_thread(_: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended)

        user.add_done_callback(from_thread)
