"""Memory of restored arrays: aligned, disjoint, and no more than requested."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import ResourceError
from asyncckpt.flow.arena import ALIGNMENT_NBYTES, SLAB_NBYTES, SMALL_NBYTES, Arena, Recycled
from asyncckpt.flow.budget import Account, ByteBudget


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
    """One in ten arrays of 320 MiB is kept: in all five mappings and most huge pages."""
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


def test_a_kernel_that_takes_no_advice_provides_memory_all_the_same(
    monkeypatch: pytest.MonkeyPatch, budget: ByteBudget
) -> None:
    class Unadvised(mmap.mmap):
        """A mapping of a kernel without huge pages, in a process that has locked its memory."""

        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Unadvised)
    recycled = Recycled(budget)
    array = Arena(100 << 10, recycled).take(100 << 10)
    array.fill(1)
    del array
    recycled.evict(1)
    assert recycled.idle_nbytes == 0


# --------------------------------------------------------------------------------------- recycled


def address(buffer: Any) -> int:
    return int(buffer.ctypes.data)


@pytest.fixture
def budget() -> ByteBudget:
    return ByteBudget(64 << 20)


def test_pages_of_dropped_arrays_are_used_again(budget: ByteBudget) -> None:
    recycled = Recycled(budget)
    sizes = [1 << 20, 3 << 20, (1 << 20) - 5]
    arena = Arena(sum(sizes), recycled)
    arrays = [arena.take(nbytes).view(np.int8) for nbytes in sizes]
    places = sorted(map(address, arrays))
    part = arrays[0][100:200]
    del arrays, arena
    # The first is still in use by its part.
    assert recycled.idle_nbytes == 4 << 20
    again = [Arena(0, recycled).take(nbytes) for nbytes in sizes]
    assert recycled.idle_nbytes == 0
    assert len(set(places) & set(map(address, again))) == 2
    assert not any(np.shares_memory(part, array) for array in again)
    del part
    assert recycled.idle_nbytes == 1 << 20
    assert np.all(Arena(0, recycled).take(1 << 20) == 0), "returned to the system, or never touched"


def test_no_more_pages_are_kept_than_the_budget_has_room_for(budget: ByteBudget) -> None:
    recycled = Recycled(budget)
    arena = Arena(128 << 20, recycled)
    arrays = [arena.take(1 << 20) for _ in range(128)]
    assert budget.try_acquire(16 << 20)
    del arrays
    assert recycled.idle_nbytes == 48 << 20
    assert budget.try_acquire(40 << 20)
    budget.evict()
    assert recycled.idle_nbytes == 8 << 20


def test_kept_pages_make_way_before_staging_memory(budget: ByteBudget) -> None:
    class Idle(Account):
        idle_nbytes = 32 << 20

        def evict(self, nbytes: int) -> None:
            self.idle_nbytes -= nbytes

    idle = Idle()
    budget.accounts.append(idle)
    recycled = Recycled(budget)
    arena = Arena(32 << 20, recycled)
    arrays = [arena.take(1 << 20) for _ in range(32)]
    del arrays
    assert (recycled.idle_nbytes, idle.idle_nbytes) == (32 << 20, 32 << 20)
    assert budget.try_acquire(40 << 20)
    budget.evict()
    assert (recycled.idle_nbytes, idle.idle_nbytes) == (0, 24 << 20)


def test_fresh_pages_replace_kept_ones_of_other_sizes(budget: ByteBudget) -> None:
    """A state of another shape does not add to the pages kept from the last one."""
    recycled = Recycled(budget)
    for nbytes in (1 << 20, 2 << 20, 1 << 20):
        arena = Arena(16 << 20, recycled)
        arrays = [arena.take(nbytes) for _ in range((16 << 20) // nbytes)]
        arena.close()
        assert recycled.idle_nbytes == 0
        del arrays, arena
        assert recycled.idle_nbytes == 16 << 20


def test_one_buffer_without_kept_pages_takes_none_from_later_ones(budget: ByteBudget) -> None:
    recycled = Recycled(budget)
    sizes = [1 << 20, 2 << 20, 3 << 20, 1 << 20]
    arena = Arena(sum(sizes), recycled)
    arrays = [arena.take(nbytes) for nbytes in sizes]
    places = set(map(address, arrays))
    in_use = arrays.pop()
    del arrays
    arena = Arena(sum(sizes), recycled)
    # The first takes the kept megabyte, so the second gets none.
    again = [arena.take(nbytes) for nbytes in (1 << 20, 1 << 20, 2 << 20, 3 << 20)]
    arena.close()
    assert len(places & set(map(address, again))) == 3 and recycled.idle_nbytes == 0
    assert not any(np.shares_memory(in_use, array) for array in again)


def test_pages_that_are_not_kept_return_to_the_system(budget: ByteBudget) -> None:
    recycled = Recycled(budget)
    before = resident_nbytes()
    arena = Arena(48 << 20, recycled)
    arrays = [arena.take(16 << 20) for _ in range(3)]
    for number in range(3):
        arrays[number].fill(1)
    arrays.pop()
    assert resident_nbytes() - before > 47 << 20, "kept"
    recycled.close()
    assert resident_nbytes() - before < 33 << 20
    arrays.pop()
    assert resident_nbytes() - before < 17 << 20
    assert recycled.idle_nbytes == 0 and recycled not in budget.accounts
    assert np.all(arrays[0] == 1)


def test_arrays_do_not_keep_the_budget(budget: ByteBudget) -> None:
    recycled = Recycled(budget)
    array = Arena(1 << 20, recycled).take(1 << 20)
    gone = weakref.ref(recycled)
    budget.accounts.clear()
    del recycled
    assert gone() is None
    array.fill(1)
    del array


def test_a_forked_child_returns_its_pages_even_if_the_lock_was_held() -> None:
    child = """
import os, sys, threading
from asyncckpt.flow.arena import Arena, Recycled
from asyncckpt.flow.budget import ByteBudget

recycled = Recycled(ByteBudget(1 << 24))
array = Arena(1 << 20, recycled).take(1 << 20)
held, go = threading.Event(), threading.Event()

def hold():
    with recycled._lock:
        held.set()
        go.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
pid = os.fork()
if not pid:
    del array
    os._exit(7 if recycled.idle_nbytes == 0 else 1)
go.set()
thread.join()
del array
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 7 or recycled.idle_nbytes != 1 << 20)
"""
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)


def test_arrays_may_be_dropped_in_every_thread_and_by_the_collector(budget: ByteBudget) -> None:
    """Nothing is lost or used twice while four threads take and drop arrays in cycles."""
    recycled = Recycled(budget)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(300):
            array = Arena(64 << 10, recycled).take(64 << 10)
            array.fill(number)
            cycle: list[Any] = [array]
            cycle.append(cycle)
            if turn % 10 == 0:
                gc.collect(0)
            if not np.all(array == number):
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    pages = [recycled.take(64 << 10) for _ in range(recycled.idle_nbytes >> 16)]
    assert len({(id(mapping), start) for mapping, start in filter(None, pages)}) == len(pages)
    assert recycled.idle_nbytes == 0 and recycled.take(64 << 10) is None
