"""Decoded chunks that threads share, bounded in bytes."""

# Rule 1: a thread that waits for room holds no block, so that whoever holds the room can let go.
# Rule 2: a block larger than the bound is loaded when no other is there, alone.

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy.typing as npt

Values = npt.NDArray[Any]


class Block:
    """Rows that are loaded and dropped together.

    Attributes:
        rows: the chunks.
        nbytes: bytes they take decoded.
        values: the elements of each row, once loaded.
    """

    __slots__ = ("error", "left", "nbytes", "rows", "users", "values")

    def __init__(self, rows: Sequence[int], nbytes: int) -> None:
        self.rows = rows
        self.nbytes = nbytes
        self.values: dict[int, Values] | None = None
        self.error: BaseException | None = None
        self.users = 1
        self.left = 0


class Blocks:
    """A cache for readers that need every element about once.

    A block goes when all its elements were handed over, or when room is needed and it is the one
    used longest ago. All methods block and may be called from any thread.

    Args:
        capacity_nbytes: bytes of all blocks together.
        group: the rows to load for one that is needed, it first, without those that are there, and
            their bytes.
        load: the elements of some rows.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        group: Callable[[int, Container[int]], tuple[Sequence[int], int]],
        load: Callable[[Sequence[int]], Sequence[Values]],
    ) -> None:
        self._capacity = capacity_nbytes
        self._group = group
        self._load = load
        self._changed = threading.Condition()
        self._blocks: OrderedDict[Block, None] = OrderedDict()
        self._of_row: dict[int, Block] = {}
        self._used = 0
        self.peak_nbytes = 0

    def take(self, row: int) -> Block:
        """The block with this row, which stays until `give`.

        Raises:
            AsyncCheckpointError: loading it failed, in this thread or another one.
        """
        with self._changed:
            block = self._present_or_new(row)
            if block.values is not None:
                return block
            if block.users > 1:
                return self._loaded(block)
        try:
            values = self._load(block.rows)
        except BaseException as error:
            with self._changed:
                block.error = error
                self._drop(block)
            raise
        with self._changed:
            block.left = sum(part.size for part in values)
            block.values = dict(zip(block.rows, values, strict=True))
            self._changed.notify_all()
        return block

    def give(self, block: Block, elements: int) -> None:
        """The block's taker is done with it, having read so many elements."""
        with self._changed:
            block.users -= 1
            block.left -= elements
            if block.users:
                return
            if block.left <= 0:
                self._drop(block)
            self._changed.notify_all()

    def _present_or_new(self, row: int) -> Block:
        while True:
            block = self._of_row.get(row)
            if block is not None:
                block.users += 1
                self._blocks.move_to_end(block)
                return block
            rows, nbytes = self._group(row, self._of_row)
            if self._make_room(nbytes):
                return self._new(rows, nbytes)
            self._changed.wait()

    def _new(self, rows: Sequence[int], nbytes: int) -> Block:
        block = Block(rows, nbytes)
        self._blocks[block] = None
        self._of_row.update(dict.fromkeys(rows, block))
        self._used += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._used)
        return block

    def _loaded(self, block: Block) -> Block:
        while block.values is None:
            if block.error is not None:
                raise block.error
            self._changed.wait()
        return block

    def _make_room(self, nbytes: int) -> bool:
        if self._used + nbytes > self._capacity:
            idle = [block for block in self._blocks if not block.users]
            for block in idle:
                self._drop(block)
                if self._used + nbytes <= self._capacity:
                    break
        return self._used + nbytes <= self._capacity or not self._blocks

    def _drop(self, block: Block) -> None:
        if block in self._blocks:
            del self._blocks[block]
            self._used -= block.nbytes
            for row in block.rows:
                del self._of_row[row]
        self._changed.notify_all()
