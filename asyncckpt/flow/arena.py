"""Memory for restored arrays, in shared mappings of huge pages, returned array by array."""

# Rule 1: an array keeps no memory but its own pages. Neighbours share a mapping, which lives as
#   long as any of them, so the pages of an array are returned when its last view is gone, not when
#   the mapping is. Without this, one array of 1 MiB kept from a restore keeps 64 MiB.
#   (test_an_array_that_is_kept_keeps_no_more_than_an_eighth_besides_itself)
# Rule 2: the pages of two arrays never overlap: what is returned belongs to nothing else.

from __future__ import annotations

import mmap
import weakref

import numpy as np

from asyncckpt.flow.buffers import HUGE_PAGE_NBYTES, allocating, map_pages
from asyncckpt.ports import Bytes

SLAB_NBYTES = 64 << 20
"""Size of shared mappings, so that nearly all pages are huge: the first touch of a 4 KiB page costs
five times as much per byte."""

ALIGNMENT_NBYTES = mmap.PAGESIZE
"""Arrays start on pages: direct reads and zero-copy adoption by JAX (64 bytes) need no more."""

SMALL_NBYTES = 64 << 10
"""Smaller arrays come from the allocator, which packs and reuses them; of larger ones the last
page wastes at most a sixteenth."""

_RETURN = getattr(mmap, "MADV_DONTNEED", None) if mmap.PAGESIZE < SMALL_NBYTES else None


class Arena:
    """A source of buffers in mappings that they share; used by one thread at a time.

    Args:
        total_nbytes: bytes that will be taken, so that the last mapping is no larger than needed.
    """

    def __init__(self, total_nbytes: int) -> None:
        self._left = total_nbytes
        self._mapping: mmap.mmap | None = None
        self._used = self._end = 0

    def take(self, nbytes: int) -> Bytes:
        """Return an uninitialised buffer; page-aligned unless it is small.

        Raises:
            ResourceError: the memory cannot be allocated.
        """
        with allocating(nbytes):
            if nbytes < SMALL_NBYTES:
                return np.empty(nbytes, np.uint8)
            padded = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
            if self._mapping is None or self._used + padded > self._end:
                self._map(max(padded, min(SLAB_NBYTES, self._left)))
            mapping, start = self._mapping, self._used
            assert mapping is not None
            self._used += padded
            self._left -= nbytes
            part = memoryview(mapping)[start : start + nbytes]
            buffer = np.frombuffer(part, np.uint8)
        # Kept alive by the views of the array, and by nothing else.
        owner = buffer.base
        if _RETURN is not None and owner is not None:
            weakref.finalize(owner, mapping.madvise, _RETURN, start, padded).atexit = False
        return buffer

    def _map(self, nbytes: int) -> None:
        pages = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        self._mapping, self._used = map_pages(pages)
        self._end = self._used + pages
        huge = pages // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        if huge < pages and hasattr(mmap, "MADV_NOHUGEPAGE"):
            # Touching one byte of a huge page takes all of it.
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE, self._used + huge, self._end - huge)
