"""Memory for restored arrays: huge pages, shared by neighbours."""

from __future__ import annotations

import numpy as np

from asyncckpt.flow.buffers import HUGE_PAGE_NBYTES, map_anonymous
from asyncckpt.ports import Bytes

SLAB_NBYTES = 64 << 20
"""Arrays share mappings of this size, so that nearly all of their pages are huge: the first touch
of a 4 KiB page costs five times as much per byte. A mapping lives as long as any array in it."""

ALIGNMENT_NBYTES = 4096
"""Arrays start on pages: direct reads and zero-copy adoption by JAX (64 bytes) ask for no more."""

SMALL_NBYTES = 64 << 10
"""Smaller arrays come from the allocator, which packs and reuses them."""


class Arena:
    """Hands out buffers of mappings that they share; used by one thread at a time.

    Args:
        total_nbytes: bytes that will be asked for, so that the last mapping is not larger than
            what is left.
    """

    def __init__(self, total_nbytes: int) -> None:
        self._left = total_nbytes
        self._slab: Bytes | None = None
        self._used = 0

    def take(self, nbytes: int) -> Bytes:
        """An uninitialised buffer; page-aligned unless it is small."""
        if nbytes < SMALL_NBYTES:
            return np.empty(nbytes, np.uint8)
        padded = -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        if self._slab is None or self._used + padded > self._slab.nbytes:
            size = max(padded, min(SLAB_NBYTES, self._left))
            self._slab = map_anonymous(-(-size // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES)
            self._used = 0
        start = self._used
        self._used += padded
        self._left -= nbytes
        return self._slab[start : start + nbytes]
