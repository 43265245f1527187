"""Memory of restored arrays: aligned, disjoint, and no more of it than was asked for."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.flow.arena import ALIGNMENT_NBYTES, SLAB_NBYTES, SMALL_NBYTES, Arena


@given(st.lists(st.integers(0, 3 << 20), max_size=40))
def test_buffers_are_disjoint_and_large_ones_aligned(sizes: list[int]) -> None:
    arena = Arena(sum(sizes))
    buffers = [arena.take(nbytes) for nbytes in sizes]
    spans = sorted((b.ctypes.data, b.ctypes.data + b.nbytes) for b in buffers if b.nbytes)
    assert [b.nbytes for b in buffers] == sizes
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    for buffer in buffers:
        assert buffer.flags.writeable
        if buffer.nbytes >= SMALL_NBYTES:
            assert buffer.ctypes.data % ALIGNMENT_NBYTES == 0


def test_an_array_larger_than_a_slab_has_a_mapping_of_its_own() -> None:
    arena = Arena(SLAB_NBYTES * 2 + 5)
    large = arena.take(SLAB_NBYTES * 2)
    assert large.nbytes == SLAB_NBYTES * 2
    assert arena.take(5).nbytes == 5


def test_a_buffer_keeps_its_memory_when_the_arena_is_gone() -> None:
    arena = Arena(1 << 20)
    buffer = arena.take(1 << 20)
    del arena
    buffer[:] = 7
    assert np.all(buffer == 7)
