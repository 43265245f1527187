"""Memory for restored arrays: shared mappings of huge pages, freed array by array."""

# Rule 1: an array keeps only its own pages alive. Neighbours share a mapping, which lives as long
#   as any of them, so an array's pages are returned when its last view is dropped. Otherwise, one
#   array of 1 MiB kept from a restore would keep 64 MiB.
#   (test_an_array_that_is_kept_keeps_no_more_than_an_eighth_besides_itself)
# Rule 2: the pages of two arrays never overlap, so no other array uses returned pages.
# Rule 3: the last view of an array may be dropped in any thread, and by the garbage collector
#   inside any call, even one of `Recycled`. So its lock is reentrant, and the state that it
#   protects is consistent after every statement.

from __future__ import annotations

import mmap
import os
import threading
import weakref

import numpy as np

from asyncckpt.flow.budget import Account, ByteBudget
from asyncckpt.flow.buffers import HUGE_PAGE_NBYTES, advise, allocating, map_pages
from asyncckpt.ports import Bytes

SLAB_NBYTES = 64 << 20
"""Size of shared mappings. Nearly all of their pages are huge: the first touch of a 4 KiB page
costs five times as much per byte."""

ALIGNMENT_NBYTES = mmap.PAGESIZE
"""Arrays start on pages, the unit of returning memory; JAX adopts memory aligned to 64 bytes."""

SMALL_NBYTES = 64 << 10
"""Smaller arrays come from the allocator, which packs and reuses them. The last page of a larger
array wastes at most a sixteenth."""

_RETURN = getattr(mmap, "MADV_DONTNEED", None) if mmap.PAGESIZE < SMALL_NBYTES else None
_SMALL_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)

Pages = tuple[mmap.mmap, int]
"""A run of pages: its mapping and its offset there."""


class Recycled(Account):
    """Pages of dropped arrays, kept for the next restore as idle memory of the budget.

    The first touch of fresh pages can cost more than reading their contents from a disk, above all
    in virtual machines.
    """

    def __init__(self, budget: ByteBudget) -> None:
        super().__init__()
        self._budget = budget
        self._pages: dict[int, list[Pages]] = {}  # by size
        self._idle_nbytes = 0
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        budget.accounts.insert(0, self)  # freed before idle staging memory

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the kept pages."""
        return self._idle_nbytes

    def take(self, nbytes: int) -> Pages | None:
        """Return kept pages of exactly this size, if any. From any thread."""
        with self._lock:
            pages = self._pages.get(nbytes)
            if not pages:
                return None
            self._idle_nbytes -= nbytes
            return pages.pop()

    def put(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Keep unused pages, or return them to the system. From any thread."""
        if os.getpid() == self._pid:  # in a forked child, the lock may be held for ever
            with self._lock:
                if not self._closed and self._budget.has_room(nbytes):
                    self._idle_nbytes += nbytes
                    self._pages.setdefault(nbytes, []).append((mapping, start))
                    return
        advise(mapping, _RETURN, start, nbytes)

    def evict(self, nbytes: int) -> None:
        """Return pages of at least `nbytes` to the system, or all. From any thread."""
        with self._lock:
            for size, pages in list(self._pages.items()):
                while pages and nbytes > 0:
                    self._idle_nbytes -= size
                    mapping, start = pages.pop()
                    advise(mapping, _RETURN, start, size)
                    nbytes -= size

    def close(self) -> None:
        """Return all pages to the system and keep no more. Idempotent."""
        with self._lock:
            self._closed = True
            self.evict(self._idle_nbytes)
        if self in self._budget.accounts:
            self._budget.accounts.remove(self)


def _dropped(
    owner: weakref.ref[Recycled] | None, mapping: mmap.mmap, start: int, nbytes: int
) -> None:
    """Keep the pages of a dropped array, or return them to the system."""
    recycled = None if owner is None else owner()
    if recycled is None:
        advise(mapping, _RETURN, start, nbytes)
    else:
        recycled.put(mapping, start, nbytes)


class Arena:
    """A source of buffers in shared mappings; used by one thread at a time.

    Args:
        total_nbytes: bytes that will be taken, so that the last mapping is no larger than needed.
        recycled: pages to use first; dropped arrays return theirs to it.
    """

    def __init__(self, total_nbytes: int, recycled: Recycled | None = None) -> None:
        self._left = total_nbytes
        self._recycled = recycled
        # Arrays may outlive `recycled` and must not keep it, and its budget, alive.
        self._owner = None if recycled is None else weakref.ref(recycled)
        self._mapping: mmap.mmap | None = None
        self._used = self._end = 0
        self._fresh_nbytes = 0

    def take(self, nbytes: int) -> Bytes:
        """Return an uninitialised buffer; page-aligned unless it is small.

        Raises:
            ResourceError: the memory cannot be allocated.
        """
        with allocating(nbytes):
            if nbytes < SMALL_NBYTES:
                return np.empty(nbytes, np.uint8)
            padded = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            self._left -= nbytes
            pages = None if self._recycled is None else self._recycled.take(padded)
            mapping, start = self._fresh(padded) if pages is None else pages
            part = memoryview(mapping)[start : start + nbytes]
            buffer = np.frombuffer(part, np.uint8)
        # Only the views of the array keep this alive.
        owner = buffer.base
        if _RETURN is not None and owner is not None:
            weakref.finalize(owner, _dropped, self._owner, mapping, start, padded).atexit = False
        return buffer

    def close(self) -> None:
        """Free as many recycled bytes as were taken fresh.

        Not earlier, because an earlier buffer would then free the pages that fit a later one.
        """
        if self._recycled is not None:
            self._recycled.evict(self._fresh_nbytes)

    def _fresh(self, nbytes: int) -> Pages:
        if self._mapping is None or self._used + nbytes > self._end:
            self._map(max(nbytes, min(SLAB_NBYTES, nbytes + self._left)))
        mapping, start = self._mapping, self._used
        assert mapping is not None
        self._used += nbytes
        self._fresh_nbytes += nbytes
        return mapping, start

    def _map(self, nbytes: int) -> None:
        pages = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self._mapping, self._used = map_pages(pages)
        self._end = self._used + pages
        huge = pages // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        if huge < pages:
            # Touching one byte of a huge page takes all of it.
            advise(self._mapping, _SMALL_PAGES, self._used + huge)
