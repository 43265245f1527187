"""Memory of restored arrays: aligned, disjoint, and no more of it than was asked for."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import ResourceError
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


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [100 << 10, 1 << 20, 5 << 20])
def test_an_array_that_is_kept_keeps_no_more_than_an_eighth_besides_itself(nbytes: int) -> None:
    """Of 320 MiB of restored arrays every tenth is kept: in five mappings, and most huge pages."""
    count = (320 << 20) // nbytes
    before = resident_nbytes()
    arena = Arena(count * nbytes)
    arrays = [arena.take(nbytes).view(np.uint32).reshape(2, -1) for _ in range(count)]
    del arena
    for number, array in enumerate(arrays):
        array.fill(number)
    assert resident_nbytes() - before > 300 << 20
    arrays = arrays[::10]
    kept = sum(array.nbytes for array in arrays)
    assert resident_nbytes() - before < 1.125 * kept + (1 << 20)
    assert [int(array[0, 0]) for array in arrays] == list(range(0, count, 10))
    assert all((array == array[0, 0]).all() for array in arrays)


def test_one_small_array_takes_no_huge_page() -> None:
    before = resident_nbytes()
    arrays = []
    for _ in range(20):
        arrays.append(Arena(100 << 10).take(100 << 10))
        arrays[-1].fill(1)
    assert resident_nbytes() - before < 1.125 * 20 * (100 << 10) + (1 << 20)


@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 50])
def test_memory_that_the_system_refuses_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(ResourceError, match=f"{nbytes} bytes of host memory could not be") as e:
        Arena(nbytes).take(nbytes)
    assert e.value.expected == nbytes
