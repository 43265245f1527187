"""Boxes that meet: found by a sweep, equal to what all pairs would give."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.spec import Box


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[Box], Box]:
    rank = draw(st.integers(0, 3))

    def box() -> Box:
        ends = [(draw(st.integers(0, 8)), draw(st.integers(0, 4))) for _ in range(rank)]
        return Box(tuple(o for o, _ in ends), tuple(n for _, n in ends))

    return [box() for _ in range(draw(st.integers(0, 12)))], box()


@given(boxes())
def test_the_sweep_finds_exactly_the_boxes_that_share_elements(case: tuple[list[Box], Box]) -> None:
    held, wanted = case
    found = sorted(BoxIndex(held).meeting(wanted).tolist())
    expected = []
    for number, box in enumerate(held):
        common = box.intersect(wanted) if box.shape else Box((), ())
        if common is not None and common.size and box.size:
            expected.append(number)
    assert found == expected


def test_a_question_looks_only_at_boxes_that_its_extent_can_meet() -> None:
    rows = [Box((i, 0), (1, 100)) for i in range(1000)]
    assert BoxIndex(rows).meeting(Box((500, 3), (2, 1))).tolist() == [500, 501]
