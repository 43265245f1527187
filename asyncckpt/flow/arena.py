"""Memory for restored arrays, in shared mappings of huge pages, returned array by array."""

# Rule 1: an array keeps no memory but its own pages. Neighbours share a mapping, which lives as
#   long as any of them, so the pages of an array are returned when its last view is gone, not when
#   the mapping is. Without this, one array of 1 MiB kept from a restore keeps 64 MiB.
#   (test_an_array_that_is_kept_keeps_no_more_than_an_eighth_besides_itself)
# Rule 2: the pages of two arrays never overlap: what is returned belongs to nothing else.
# Rule 3: the last view of an array may be dropped in any thread, and by the garbage collector
#   inside any call, also of `Recycled`: its lock is reentrant, and what it protects is right again
#   after every statement.

from __future__ import annotations

import mmap
import os
import threading
import weakref

import numpy as np

from asyncckpt.flow.budget import Account, ByteBudget
from asyncckpt.flow.buffers import HUGE_PAGE_NBYTES, allocating, map_pages
from asyncckpt.ports import Bytes

SLAB_NBYTES = 64 << 20
"""Size of shared mappings, so that nearly all pages are huge: the first touch of a 4 KiB page costs
five times as much per byte."""

ALIGNMENT_NBYTES = mmap.PAGESIZE
"""Arrays start on pages, as these are returned; zero-copy adoption by JAX needs 64 bytes."""

SMALL_NBYTES = 64 << 10
"""Smaller arrays come from the allocator, which packs and reuses them; of larger ones the last
page wastes at most a sixteenth."""

_RETURN = getattr(mmap, "MADV_DONTNEED", None) if mmap.PAGESIZE < SMALL_NBYTES else None


Pages = tuple[mmap.mmap, int]
"""A run of pages: its mapping, and where it begins there."""


class Recycled(Account):
    """Pages of arrays that were dropped, kept for the next restore.

    The first touch of fresh pages can cost more than reading their contents from a disk, above all
    in virtual machines. They are idle memory of the budget, which makes way for everything else.

    Args:
        budget: limits these pages and the memory of all other accounts together.
    """

    def __init__(self, budget: ByteBudget) -> None:
        super().__init__()
        self._budget = budget
        self._pages: dict[int, list[Pages]] = {}  # by size
        self._idle_nbytes = 0
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        budget.accounts.insert(0, self)  # makes way before staging memory does

    def __repr__(self) -> str:
        return f"Recycled({self._idle_nbytes} bytes)"

    @property
    def idle_nbytes(self) -> int:
        """Bytes that are kept."""
        return self._idle_nbytes

    def take(self, nbytes: int) -> Pages | None:
        """Return kept pages of exactly this size, if there are any. From any thread."""
        with self._lock:
            pages = self._pages.get(nbytes)
            if not pages:
                return None
            self._idle_nbytes -= nbytes
            return pages.pop()

    def put(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Keep pages that nothing uses any more, or return them to the system. From any thread."""
        if os.getpid() == self._pid:  # another thread may have held the lock in a forked child
            with self._lock:
                if not self._closed and self._budget.has_room(nbytes):
                    self._idle_nbytes += nbytes
                    self._pages.setdefault(nbytes, []).append((mapping, start))
                    return
        _return(mapping, start, nbytes)

    def free_idle(self, nbytes: int) -> None:
        """Return pages of `nbytes` to the system, or all of them. From any thread."""
        with self._lock:
            for size, pages in list(self._pages.items()):
                while pages and nbytes > 0:
                    self._idle_nbytes -= size
                    _return(*pages.pop(), size)
                    nbytes -= size

    def close(self) -> None:
        """Return all pages to the system, and keep none from now on. Idempotent."""
        with self._lock:
            self._closed = True
            self.free_idle(self._idle_nbytes)
        if self in self._budget.accounts:
            self._budget.accounts.remove(self)


def _dropped(
    owner: weakref.ref[Recycled] | None, mapping: mmap.mmap, start: int, nbytes: int
) -> None:
    """Keep the pages of an array whose last view is gone, or return them to the system."""
    recycled = None if owner is None else owner()
    if recycled is None:
        _return(mapping, start, nbytes)
    else:
        recycled.put(mapping, start, nbytes)


def _return(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    """Return pages to the system."""
    if _RETURN is not None:
        mapping.madvise(_RETURN, start, nbytes)


class Arena:
    """A source of buffers in mappings that they share; used by one thread at a time.

    Args:
        total_nbytes: bytes that will be taken, so that the last mapping is no larger than needed.
        recycled: where pages come from, if it has some, and go to when they are dropped.
    """

    def __init__(self, total_nbytes: int, recycled: Recycled | None = None) -> None:
        self._left = total_nbytes
        self._recycled = recycled
        # Arrays may outlive it, and must not keep it and the budget.
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
        # Kept alive by the views of the array, and by nothing else.
        owner = buffer.base
        if _RETURN is not None and owner is not None:
            weakref.finalize(owner, _dropped, self._owner, mapping, start, padded).atexit = False
        return buffer

    def close(self) -> None:
        """Let kept pages of other sizes make way for as many fresh ones that were taken.

        Not earlier: what is kept for a later buffer would make way for an earlier one.
        """
        if self._recycled is not None:
            self._recycled.free_idle(self._fresh_nbytes)

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
        if huge < pages and hasattr(mmap, "MADV_NOHUGEPAGE"):
            # Touching one byte of a huge page takes all of it.
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE, self._used + huge, self._end - huge)
