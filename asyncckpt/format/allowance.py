"""How much memory decoded objects may take, and what they take."""

from __future__ import annotations

from typing import Final

# What objects take in CPython on 64 bits, headers of the garbage collector included.
INT_NBYTES: Final = 32
FLOAT_NBYTES: Final = 24
TUPLE_NBYTES: Final = 40
LIST_NBYTES: Final = 72
DICT_NBYTES: Final = 64
FILLED_NBYTES: Final = 112
"""What a dict takes with its first entry."""
TEXT_NBYTES: Final = 56
ITEM_NBYTES: Final = 9
ENTRY_NBYTES: Final = 56


class Allowance:
    """Bytes of memory that decoded objects may take.

    Attributes:
        left: bytes that are left of it.
    """

    __slots__ = ("left",)

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def take(self, nbytes: int) -> None:
        """`nbytes` less are left.

        Raises:
            MemoryError: there were not as many.
        """
        self.left -= nbytes
        if self.left < 0:
            raise MemoryError

    def give(self, nbytes: int) -> None:
        """`nbytes` that were taken are free again."""
        self.left += nbytes
