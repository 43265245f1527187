"""Opened arrays by column."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncckpt.adapters.sources import Sources
from asyncckpt.ports import Source
from asyncckpt.spec import ArraySpec


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
