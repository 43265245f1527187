"""The cache of decoded chunks: bounded, shared by threads, without chunks that were read."""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import pytest

from asyncckpt.convert.reader import Block, Blocks

NBYTES = 8


class Loads:
    """Rows of eight bytes each; `group` rows are loaded together."""

    def __init__(self, group: int = 1) -> None:
        self.group_size = group
        self.loaded: list[list[int]] = []
        self.errors: dict[int, BaseException] = {}
        self.gate = threading.Event()
        self.gate.set()

    def group(self, row: int, present: Container[int]) -> tuple[list[int], int]:
        rows = [r for r in range(row, row + self.group_size) if r == row or r not in present]
        return rows, NBYTES * len(rows)

    def load(self, rows: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        self.loaded.append(list(rows))
        assert self.gate.wait(30)
        for row in rows:
            if row in self.errors:
                raise self.errors[row]
        return [np.full(NBYTES, row, np.uint8) for row in rows]


def value(block: Block, row: int) -> int:
    return int(block.loaded.result()[row][0])


def test_a_block_is_loaded_once_and_goes_when_all_of_it_was_read() -> None:
    loads = Loads(group=2)
    blocks = Blocks(100, loads.group, loads.load)
    for row in (0, 1):
        block = blocks.take(row)
        assert value(block, row) == row
        blocks.release(block, NBYTES)
    assert loads.loaded == [[0, 1]]
    blocks.release(blocks.take(1), NBYTES)
    assert loads.loaded == [[0, 1], [1, 2]]


def test_room_is_made_by_what_was_used_longest_ago() -> None:
    loads = Loads()
    blocks = Blocks(3 * NBYTES, loads.group, loads.load)
    for row in (0, 1, 2, 0, 3):
        blocks.release(blocks.take(row), 1)
    blocks.release(blocks.take(0), 1)
    assert [rows[0] for rows in loads.loaded] == [0, 1, 2, 3]
    blocks.release(blocks.take(1), 1)
    assert [rows[0] for rows in loads.loaded] == [0, 1, 2, 3, 1]
    assert blocks.peak_nbytes == 3 * NBYTES


def test_a_block_beyond_the_bound_is_loaded_alone() -> None:
    loads = Loads()
    blocks = Blocks(NBYTES // 2, loads.group, loads.load)
    first = blocks.take(0)
    thread = threading.Thread(target=lambda: blocks.release(blocks.take(1), NBYTES))
    thread.start()
    blocks.release(first, 1)
    thread.join(30)
    assert loads.loaded == [[0], [1]]
    assert blocks.peak_nbytes == NBYTES


def test_threads_wait_for_one_load_of_the_same_row() -> None:
    loads = Loads()
    loads.gate.clear()
    blocks = Blocks(100, loads.group, loads.load)
    found: list[int] = []

    def read() -> None:
        block = blocks.take(7)
        found.append(value(block, 7))
        blocks.release(block, 0)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    loads.gate.set()
    for thread in threads:
        thread.join(30)
    assert found == [7] * 4 and loads.loaded == [[7]]


def test_a_failed_load_fails_for_all_and_is_tried_again() -> None:
    loads = Loads()
    loads.errors[3] = OSError("gone")
    blocks = Blocks(NBYTES, loads.group, loads.load)
    with pytest.raises(OSError, match="gone"):
        blocks.take(3)
    loads.errors.clear()
    blocks.release(blocks.take(3), NBYTES)
    assert loads.loaded == [[3], [3]]
    blocks.release(blocks.take(4), NBYTES)
    assert blocks.peak_nbytes == NBYTES


def test_many_threads_within_a_small_bound_read_everything() -> None:
    loads = Loads(group=3)
    blocks = Blocks(6 * NBYTES, loads.group, loads.load)
    wrong: list[int] = []

    def read(first: int) -> None:
        for row in range(first, 200, 4):
            block = blocks.take(row)
            if value(block, row) != row:
                wrong.append(row)
            blocks.release(block, NBYTES)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert blocks.peak_nbytes <= 6 * NBYTES
