"""Opened arrays by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncckpt.adapters.numpy import NumpyAdapter
from asyncckpt.adapters.sources import Sources
from asyncckpt.ports import Source
from asyncckpt.spec import ArraySpec, array_spec


def test_threads_that_ask_for_an_array_at_the_same_time_get_one_source() -> None:
    sources = Sources()
    array = np.arange(3.0)
    sources.append_plain(ArraySpec((3,), "float64"), array)
    others: list[Source] = []

    class Interrupted(dict[int, Source]):
        def get(self, number: Any, default: Any = None) -> Any:
            found = super().get(number)
            if not others:
                others.append(found)
                others[0] = sources[number]  # another thread, between two steps of this one
            return found

    sources.opened = Interrupted()
    assert sources[0].view is array
    assert sources[0] is others[0]
    assert sources.plain == [None]


def test_a_source_is_made_once_and_forgotten_with_all_others() -> None:
    one, other = np.arange(3), np.arange(4.0)
    sources = Sources()
    sources.append_plain(array_spec((3,), "int64"), one)
    sources.append(NumpyAdapter().source("x", other))
    assert len(sources) == 2 and sources.plain == [one, None]
    made = sources[0]
    assert made.leaf is made.view is one and sources[0] is made
    assert sources.plain == [None, None]
    with pytest.raises(IndexError):
        sources[2]
    sources.append_plain(array_spec((3,), "int64"), one)
    sources.forget()
    assert sources.plain == [None, None, None]
    assert all(source.leaf is source.view is None for source in sources)
