from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.planning import tiling
from asyncckpt.planning.tiling import box_text, claimed_tiling_fault, first_overlap, tiling_fault
from asyncckpt.spec import Box


@st.composite
def whole_and_boxes(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """A small array, and boxes that tile it, or nearly so."""
    rank = draw(st.integers(0, 3))
    whole = Box.whole(tuple(draw(st.integers(1, 5)) for _ in range(rank)))
    boxes = [whole]
    for _ in range(draw(st.integers(0, 4)) if rank else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, rank - 1))
        first = draw(st.integers(0, box.shape[axis]))
        for low, high in ((0, first), (first, box.shape[axis])):
            offset, shape = list(box.offset), list(box.shape)
            offset[axis] += low
            shape[axis] = high - low
            if high > low:
                boxes.append(Box(tuple(offset), tuple(shape)))
    for _ in range(draw(st.integers(0, 2))):
        change = draw(st.sampled_from(["none", "drop", "move", "grow"]))
        if change == "none" or not boxes:
            continue
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if change == "move":
            boxes.append(Box(tuple(o + 1 for o in box.offset), box.shape))
        if change == "grow":
            boxes.append(Box(box.offset, tuple(n + 1 for n in box.shape)))
    return whole, list(dict.fromkeys(boxes))


@given(whole_and_boxes())
def test_a_fault_is_found_exactly_where_an_element_is_in_no_box_or_in_two(
    case: tuple[Box, list[Box]],
) -> None:
    whole, boxes = case
    canvas = np.zeros(tuple(n + 3 for n in whole.shape), int)
    for box in boxes:
        canvas[box.slices()] += 1
    wanted = np.zeros_like(canvas)
    wanted[whole.slices()] = 1
    fault = tiling_fault(whole, boxes)
    assert (fault is None) == np.array_equal(canvas, wanted)
    assert (claimed_tiling_fault(whole, boxes) is None) == (fault is None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "MOST_EXPLAINED", 0)
        assert (claimed_tiling_fault(whole, boxes) is None) == (fault is None)
    overlap = first_overlap(boxes)
    assert (overlap is None) == (canvas.max(initial=0) < 2)
    if overlap is not None:
        assert overlap[0].intersect(overlap[1]) is not None
    if fault is not None and fault.startswith("nothing holds"):
        ends = [part.split(":") for part in fault.split("[")[1].rstrip("]").split(", ") if part]
        gap = canvas[tuple(slice(int(a), int(b)) for a, b in ends)]
        assert gap.size and not gap.any()


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([], "nothing holds [0:4, 0:6]"),
        ([Box((0, 0), (4, 5))], "nothing holds [0:4, 5:6]"),
        ([Box((0, 0), (2, 6)), Box((3, 0), (1, 6))], "nothing holds [2:3, 0:6]"),
        ([Box((0, 0), (3, 6)), Box((2, 0), (2, 6))], "[0:3, 0:6] and [2:4, 0:6] overlap"),
        ([Box((0, 0), (4, 7))], "[0:4, 0:7] reaches past it"),
        # As many elements as the array, one of them twice.
        ([Box((0, 0), (4, 5)), Box((0, 4), (4, 1))], "[0:4, 0:5] and [0:4, 4:5] overlap"),
    ],
)
def test_a_fault_names_the_boxes(boxes: list[Box], fault: str) -> None:
    assert tiling_fault(Box.whole((4, 6)), boxes) == fault


def test_an_array_without_elements_needs_no_boxes() -> None:
    assert tiling_fault(Box.whole((0, 6)), []) is None
    assert tiling_fault(Box.whole(()), [Box((), ())]) is None
    assert tiling_fault(Box.whole(()), []) == "nothing holds []"
    assert box_text(Box((), ())) == "[]"


def test_boxes_that_cut_every_axis_of_many_are_checked_without_all_their_corners() -> None:
    """Also boxes in damaged metadata: 2^30 corners of one box would take hours and terabytes."""
    rank = 30
    whole = Box.whole((2,) * rank)
    boxes = [
        Box((*(0,) * axis, 1, *(0,) * rest), (*(1,) * axis, 1, *(2,) * rest))
        for axis, rest in enumerate(reversed(range(rank)))
    ]
    boxes.append(Box((0,) * rank, (1,) * rank))
    assert tiling_fault(whole, boxes) is None
    fault = tiling_fault(whole, boxes[:-1])
    assert fault is not None and fault.startswith("nothing holds [0:1, ")
    fault = tiling_fault(whole, [*boxes[:-1], Box((0,) * rank, (1,) * (rank - 1) + (2,))])
    assert fault is not None and fault.endswith(" overlap")


def test_no_overlap_is_searched_among_many_boxes_of_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of these meets all others on one axis: 8,000 of them took 2 s on the event loop."""
    count = tiling.MOST_EXPLAINED

    def staggered(count: int) -> list[Box]:
        return [Box((n, n), (count, 1)) for n in range(count)]

    whole = Box.whole((count, count))
    fault = claimed_tiling_fault(whole, staggered(count))
    assert fault == f"[1:{count + 1}, 1:2] reaches past it"
    monkeypatch.setattr(tiling, "first_overlap", None)
    boxes = staggered(count + 1)
    assert claimed_tiling_fault(whole, boxes) == "some reach past it or overlap"
    held = count * count
    fault = claimed_tiling_fault(Box.whole((2 * count, count)), staggered(count))
    assert fault == f"they hold {held} of its {2 * held} elements"
    rows = [Box((n, 0), (1, count)) for n in range(2 * count)]
    assert claimed_tiling_fault(Box.whole((2 * count, count)), rows) is None
    fault = claimed_tiling_fault(Box.whole((2 * count, count)), [*rows[1:], *rows[1:]])
    assert fault == "some reach past it or overlap"
