"""Staging buffers: touched, kept, and used again for the life of a `Checkpointer`."""

# Rule 1: a slot goes back to the pool only when nothing reads or writes it any more; one that
#   somebody may still be sending is discarded, and its budget comes back with its memory.
# Rule 2: memory is touched in worker threads: the first touch costs as much as a disk write.
# Rule 3: pools of one budget together hold no more memory than it: what grows takes from the idle.

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from asyncckpt.flow.budget import ByteBudget, Share
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import Bytes, HostMemory

HUGE_PAGE_NBYTES = 2 << 20
"""Mappings start at a multiple of this, else the kernel cannot back their ends by huge pages."""

PIPELINE_SLOTS = 24
"""Slots that keep copying, checksumming and writing busy at once. A save that its caller waits for
anyway does not touch new memory beyond these: fresh pages cost more than waiting for used ones."""


COLLECT_AFTER_S = 0.5
"""When the garbage collector is run for slots that were discarded and did not come back: clients
let go of what they were sending within milliseconds."""

COLLECT_AT_LEAST_EVERY_S = 30.0
"""How often it is run, in the end, while a client holds on to a slot."""


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


class ByteArrayMemory:
    """`bytearray`s, for clients that send nothing else. They are not aligned to pages."""

    name = "bytearray"

    def allocate(self, nbytes: int) -> Bytes:
        """A view of a `bytearray` of this size, every page of it touched. Blocking."""
        owner = UploadBytes()
        # `bytearray(nbytes)` would clear its memory under the interpreter lock, half a second per
        # GiB; resizing leaves it as it is, and numpy releases the lock while it writes.
        _resize(owner, nbytes)
        buffer = np.frombuffer(owner, np.uint8)
        buffer.fill(0)
        return buffer

    def free(self, buffer: Bytes) -> None:
        """The memory goes with its last view."""


class UploadBytes(bytearray):
    """A `bytearray` whose end can be heard of."""

    __slots__ = ("__weakref__",)


_resize = ctypes.pythonapi.PyByteArray_Resize
_resize.argtypes = [ctypes.py_object, ctypes.c_ssize_t]
_resize.restype = ctypes.c_int


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
    """One staging buffer, in use by one holder.

    Attributes:
        pool: where it goes back to.
        buffer: its memory; empty between `body` and its return to the pool.
    """

    __slots__ = ("_sent", "buffer", "pool")

    def __init__(self, pool: SlotPool, buffer: Bytes) -> None:
        self.pool = pool
        self.buffer = buffer
        self._sent: UploadBytes | None = None

    def body(self, nbytes: int) -> Bytes | bytearray:
        """The first `nbytes` of the slot for a client to send; nothing else may use it meanwhile.

        It is the memory itself, also as a `bytearray`, which cannot be sliced without a copy:
        those are shortened in place, unless a view of the buffer is alive.
        """
        owner = _owner(self.buffer)
        if not isinstance(owner, UploadBytes):
            return self.buffer[:nbytes]
        self.buffer = _EMPTY
        try:
            _resize(owner, nbytes)
        except BufferError:
            self.buffer = np.frombuffer(owner, np.uint8)
            return bytearray(self.buffer[:nbytes])
        self._sent = owner
        return owner

    def restore(self) -> bool:
        """Whether the slot has its whole buffer, because no client holds what `body` gave."""
        if self._sent is None:
            return True
        try:
            # A size that differs from the present one: only then are exports looked at.
            for nbytes in (self.pool.slot_nbytes - 1, self.pool.slot_nbytes):
                _resize(self._sent, nbytes)
        except BufferError:
            return False
        self.buffer, self._sent = np.frombuffer(self._sent, np.uint8), None
        return True

    def forget(self) -> object:
        """What owns the slot's memory, to which the slot holds no reference any more."""
        owner = self._sent or _owner(self.buffer)
        self.buffer, self._sent = _EMPTY, None
        return owner


_EMPTY: Bytes = np.zeros(0, np.uint8)


def _owner(buffer: Bytes) -> object:
    """The object that lives as long as anything refers to the memory of the buffer."""
    owner: Any = buffer
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner.obj if isinstance(owner, memoryview) else owner


def spans(slots: Iterable[Slot], start: int, nbytes: int) -> Iterator[Bytes]:
    """The memory of `nbytes` bytes from byte `start` of consecutive slots on, slot by slot."""
    for slot in slots:
        if nbytes == 0:
            return
        part = slot.buffer[start : start + nbytes]
        start = max(0, start - slot.buffer.nbytes)
        nbytes -= len(part)
        if len(part):
            yield part


class SlotPool:
    """Slots of a `ByteBudget`, allocated at first use and kept.

    It belongs to one event loop; `memory` is used from worker threads.

    Args:
        budget: what all slots in use are counted in.
        workers: threads that allocate.
        memory: where the slots come from.
        slot_nbytes: size of a slot.
        units: units of the budget that a slot in use takes; more than its size where clients copy
            what they send.
        pipeline_slots: see `PIPELINE_SLOTS`.
        siblings: pools of the same budget, this one included: one list, which all of them share.
    """

    def __init__(
        self,
        budget: ByteBudget,
        workers: Workers,
        memory: HostMemory,
        *,
        slot_nbytes: int = SLOT_NBYTES,
        units: int = 1,
        pipeline_slots: int = PIPELINE_SLOTS,
        siblings: list[SlotPool] | None = None,
    ) -> None:
        self.budget = budget
        self.slot_nbytes = slot_nbytes
        self.units = min(units, budget.capacity)
        self._pipeline_slots = pipeline_slots
        self._workers = workers
        self._memory = memory
        self._free: list[Slot] = []
        self._allocated = 0
        self._share = Share()
        self._quarantined: set[Slot] = set()
        self._discarded = 0
        self._look: asyncio.TimerHandle | None = None
        self._arrivals: list[asyncio.Future[None]] = []
        self._siblings = [] if siblings is None else siblings
        self._siblings.append(self)
        self._closed = False

    def __repr__(self) -> str:
        return f"SlotPool({self._allocated} allocated, {len(self._free)} free, {self.budget!r})"

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of host memory that the pool holds."""
        return self._allocated * self.slot_nbytes

    @property
    def capacity(self) -> int:
        """Slots that the whole budget makes."""
        return self.budget.capacity // self.units

    @property
    def discarded(self) -> int:
        """Slots whose memory somebody else still holds."""
        return self._discarded

    async def take(self, count: int = 1, *, grow: bool = True, extra: int = 0) -> list[Slot]:
        """`count` slots belong to the caller, until each goes to `give` or `discard`.

        Args:
            count: slots with a buffer.
            grow: allocate up to the whole budget; without it, new memory beyond
                `pipeline_slots` is not touched as long as used slots come back.
            extra: further units of the budget, for memory that is allocated elsewhere; they go
                back through `budget.release`.

        Cancellation: nothing is held.
        """
        count = min(count, self.capacity)
        extra = min(extra, self.budget.capacity - count * self.units)
        limit = None if grow else max(self._allocated, self._pipeline_slots) * self.units
        await self.budget.acquire(
            count * self.units + extra, limit=limit, share=self._share, beside=extra
        )
        slots: list[Slot] = []
        self.make_way()
        try:
            while len(slots) < count:
                if self._free:
                    slots.append(self._free.pop())
                elif self._allocated < self.capacity:
                    await self._add(1)
                else:
                    await self._arrival()
        except BaseException:
            self._free.extend(slots)
            self.budget.release(count * self.units, share=self._share)
            self.budget.release(extra)
            raise
        return slots

    async def acquire(self, units: int) -> None:
        """Units of the budget belong to the caller, for memory that is allocated elsewhere.

        Idle slots are gone as far as both together exceed the budget. The units go back through
        `budget.release`. Cancellation: nothing is held.
        """
        await self.budget.acquire(units)
        self.make_way()

    def make_way(self) -> None:
        """Idle slots of all pools are gone, as far as they and what is in use exceed the budget."""
        for pool in [*(p for p in self._siblings if p is not self), self]:
            over = self._over()
            if over > 0:
                pool.shrink(min(-(-over // pool.slot_nbytes), pool._idle))

    @property
    def _idle(self) -> int:
        """Slots, also those on their way, that nobody was granted."""
        return max(0, self._allocated - self._share.in_use // self.units)

    def _over(self) -> int:
        """Bytes by which what is in use and all idle slots exceed the budget."""
        idle = sum(pool._idle * pool.slot_nbytes for pool in self._siblings)
        return idle + (self.budget.in_use - self.budget.capacity) * SLOT_NBYTES

    def stand(self, count: int) -> None:
        """`count` more slots in use are kept, as `ByteBudget.stand` says; fewer, if negative."""
        self.budget.stand(count * self.units, share=self._share)

    def take_ready(self, most: int) -> list[Slot]:
        """Up to `most` slots that are touched and free at once; none if anybody waits in line."""
        slots: list[Slot] = []
        while (
            len(slots) < most
            and self._free
            and self.budget.try_acquire(self.units, share=self._share)
        ):
            slots.append(self._free.pop())
        self.make_way()  # what the client copies is in use now, too
        return slots

    def give(self, slots: Iterable[Slot], error: BaseException | None = None) -> None:
        """The slots are free.

        Where their last use ended with `ThreadAbandonedError`, they are quarantined until the
        abandoned thread has ended after all: it may still read or write them. Where a client
        turns out to hold what it was given to send, they are discarded.
        """
        stuck = error.future if isinstance(error, ThreadAbandonedError) else None
        for slot in slots:
            if stuck is not None and not stuck.done():
                self._quarantine(slot, stuck)
            elif not slot.restore():
                self.discard([slot])
            else:
                self._return(slot)

    def discard(self, slots: Iterable[Slot], *, keep: bool = False) -> None:
        """The slots are not used again: somebody may still be sending what is in them.

        Their part of the budget comes back when their memory is gone, with its last holder. With
        `keep` it stays with the caller, who asks for a `replacement` of each, and the budget is
        exceeded by what the holder holds.
        """
        loop = asyncio.get_running_loop()

        def gone() -> None:
            self._discarded -= 1
            if not keep:
                self.budget.stand(-self.units)
                self.budget.release(self.units)

        def collected() -> None:
            # Called wherever the last reference is dropped, in any thread.
            if not loop.is_closed():
                loop.call_soon_threadsafe(gone)

        for slot in slots:
            self._discarded += 1
            self._allocated -= 1
            if not keep:
                self._share.in_use -= self.units
                self.budget.stand(self.units)
            owner = slot.forget()
            weakref.finalize(owner, collected).atexit = False
            del owner
        self._look_after(COLLECT_AFTER_S)

    def _look_after(self, after_s: float) -> None:
        """So much later at the latest, what is still discarded is looked for."""
        loop = asyncio.get_running_loop()
        if self._look is not None and self._look.when() > loop.time() + after_s:
            self._look.cancel()
            self._look = None
        if self._look is None:
            self._look = loop.call_later(after_s, self._look_again, after_s)

    def _look_again(self, after_s: float) -> None:
        """Cycles of garbage that hold discarded slots are collected, ever more rarely.

        Errors are kept in cycles, and with them the bodies of the requests that failed; a process
        that waits for staging memory makes no garbage, and its collector would never run.
        """
        self._look = None
        if self._discarded > 0:
            with contextlib.suppress(RuntimeError):  # the engine is ending
                self._workers.submit(gc.collect)
            self._look_after(min(2 * after_s, COLLECT_AT_LEAST_EVERY_S))

    async def replacement(self) -> Slot:
        """A slot in place of one that was discarded with `keep`. Cancellation: there is none."""
        self._allocated += 1
        self.make_way()
        try:
            (buffer,) = await self._workers.run(self._allocate, 1)
        except BaseException:
            self._allocated -= 1
            self.forgo()
            raise
        return Slot(self, buffer)

    def forgo(self) -> None:
        """Nobody asks for a replacement of a slot that was discarded with `keep`."""
        self.budget.release(self.units, share=self._share)

    async def prepare(self, count: int) -> None:
        """At least `count` slots (or the whole budget) are allocated and touched."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers.count):
                group.create_task(self._grow_to(min(count, self.capacity)))

    def close(self) -> None:
        """The pool's memory is returned. Slots in use keep theirs until they are given back."""
        self._closed = True
        self.shrink(len(self._free))
        if self in self._siblings:
            self._siblings.remove(self)

    def shrink(self, count: int) -> None:
        """Up to `count` idle slots are gone."""
        for _ in range(max(0, min(count, len(self._free)))):
            self._memory.free(self._free.pop().buffer)
            self._allocated -= 1

    def _return(self, slot: Slot) -> None:
        self._free.append(slot)
        self.budget.release(self.units, share=self._share)
        if self._closed:
            self.shrink(1)

    async def _grow_to(self, count: int) -> None:
        while self._allocated < count:
            self._make_room(self.slot_nbytes)
            if self._over() + self.slot_nbytes > 0:
                return  # what is in use leaves no room for slots that are not
            await self._add(1)
            self.make_way()  # for what others were granted meanwhile

    def _make_room(self, nbytes: int) -> None:
        """Idle slots of other pools are gone, as far as the budget's memory is all allocated."""
        limit = self.budget.capacity * SLOT_NBYTES
        for pool in self._siblings:
            held = sum((p._allocated + p._discarded) * p.slot_nbytes for p in self._siblings)
            over = held + nbytes - limit
            if over > 0 and pool is not self:
                pool.shrink(-(-over // pool.slot_nbytes))

    async def _add(self, count: int) -> None:
        self._make_room(count * self.slot_nbytes)
        self._allocated += count
        try:
            buffers = await self._workers.run(self._allocate, count)
        except BaseException:
            self._allocated -= count
            raise
        else:
            self._free.extend(Slot(self, buffer) for buffer in buffers)
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
        self.stand(1)

        def ended() -> None:
            self._quarantined.discard(slot)
            self.stand(-1)
            self._return(slot)

        def from_thread(_: Future[Any]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended)

        user.add_done_callback(from_thread)
