from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from asyncckpt.planning.table import Table


class Pair(NamedTuple):
    number: int
    even: bool


def pairs(first: int, stop: int) -> Table[Pair]:
    numbers = np.arange(10)
    return Table(Pair, (numbers, numbers % 2 == 0), first, stop)


def test_a_table_is_the_sequence_of_its_rows() -> None:
    expected = [Pair(i, i % 2 == 0) for i in range(3, 7)]
    table = pairs(3, 7)
    assert list(table) == list(table) == expected
    assert [table[i] for i in range(-4, 4)] == expected + expected
    assert len(table) == 4
    assert Pair(4, True) in table


def test_rows_hold_plain_python_values() -> None:
    for row in (*pairs(0, 2), pairs(0, 2)[1]):
        assert (type(row), type(row.number), type(row.even)) == (Pair, int, bool)


def test_there_is_no_row_outside_a_table() -> None:
    for index in (4, -5):
        with pytest.raises(IndexError):
            pairs(3, 7)[index]
    assert list(pairs(5, 5)) == []
