"""Small leaves that come in parts from several processes: sorted, compared, and put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.errors import UsageError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.entries import Parts
from asyncckpt.save.merge import BoxesOfParts
from asyncckpt.spec import ArraySpec, Box


def layout_of(shapes: list[tuple[int, ...]], offset: int = 0) -> Any:
    """Return as much of a layout as naming the arrays takes; each begins at an offset."""
    parts = [
        SimpleNamespace(
            spec=ArraySpec(shape, "float32"),
            grid=SimpleNamespace(chunk_shape=shape),
            offset=(offset,) * len(shape),
        )
        for shape in shapes
    ]
    return SimpleNamespace(plan=SimpleNamespace(arrays=SimpleNamespace(of=parts.__getitem__)))


def entries_of(process: int, parts: list[tuple[int, Box, bytes, int]]) -> Any:
    return SimpleNamespace(process=process, parts=Parts.of(parts))


def cuts(draw: Any, extent: int) -> list[int]:
    inner = draw(st.sets(st.integers(1, max(1, extent - 1)), max_size=3)) if extent > 1 else set()
    return [0, *sorted(inner), extent]


@given(st.data())
def test_boxes_of_all_processes_make_each_array(data: st.DataObject) -> None:
    """Whatever the cuts, the ranks, the replicas and the order of the processes."""
    draw = data.draw
    shapes = draw(
        st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    at = draw(st.integers(0, 5))
    values = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1 for shape in shapes]
    count = draw(st.integers(1, 4))
    sent: list[list[tuple[int, Box, bytes, int]]] = [[] for _ in range(count)]
    for array, value in enumerate(values):
        edges = [cuts(draw, extent) for extent in value.shape]
        for index in np.ndindex(*(len(each) - 1 for each in edges)):
            begin = [each[i] for each, i in zip(edges, index, strict=True)]
            end = [each[i + 1] for each, i in zip(edges, index, strict=True)]
            inside = value[tuple(map(slice, begin, end))]
            box = Box(tuple(b + at for b in begin), inside.shape)
            holders = sorted(draw(st.sets(st.integers(0, count - 1), min_size=1)))
            for holder in holders:
                elements = inside.tobytes() if holder == holders[0] else b""
                sent[holder].append((array, box, elements, crc32c(inside.tobytes())))
    boxes = BoxesOfParts(
        [entries_of(p, draw(st.permutations(each))) for p, each in enumerate(sent)]
    )
    assert (boxes.parts.crc == boxes.parts.crc[boxes.first]).all()
    layout = layout_of([tuple(shape) for shape in shapes], at)
    made = {array: boxes.chunk(layout, array, rows) for array, rows in boxes.by_array()}
    assert made == {array: value.tobytes() for array, value in enumerate(values)}


def test_what_differs_is_found_at_the_lowest_process_that_has_it() -> None:
    box, other = Box((0,), (2,)), Box((2,), (2,))
    entries = [
        entries_of(0, [(0, other, bytes(8), 7)]),
        entries_of(3, [(0, box, bytes(8), 1)]),
        entries_of(4, [(0, box, b"", 1), (0, other, b"", 7)]),
        entries_of(5, [(0, box, b"", 2)]),
    ]
    boxes = BoxesOfParts(entries)
    (row,) = np.flatnonzero(boxes.parts.crc != boxes.parts.crc[boxes.first])
    assert (boxes.process[boxes.first[row]], boxes.process[row]) == (3, 5)


def test_an_array_of_which_a_part_is_missing_is_refused() -> None:
    boxes = BoxesOfParts([entries_of(1, [(0, Box((0,), (3,)), bytes(12), 0)])])
    ((array, rows),) = boxes.by_array()
    with pytest.raises(UsageError, match="12 of 16 bytes of one leaf were sent"):
        boxes.chunk(layout_of([(4,)]), array, rows)


def test_no_parts_are_no_boxes() -> None:
    assert list(BoxesOfParts([entries_of(0, [])]).by_array()) == []
    assert list(BoxesOfParts([]).by_array()) == []
