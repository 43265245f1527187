"""Processes whose calls have come out of step, simulated as lists of names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncckpt.coordinators.call_order import CallOrder


def met(programs: Sequence[Sequence[str]]) -> list[str]:
    """Let each process make its calls in order; return those that all have made together.

    As in a round, process 0 compares its call with those of the others, and all learn of the first
    that differs.
    """
    orders = [CallOrder() for _ in programs]
    left = [list(program) for program in programs]
    found: list[str] = []
    while True:
        for order, calls in zip(orders, left, strict=True):
            while calls and order.skips(calls[0]):
                calls.pop(0)
        if not all(left):
            return found
        names = [calls.pop(0) for calls in left]
        other = next((name for name in names if name != names[0]), None)
        if other is None:
            found.append(names[0])
        for order, name in zip(orders, names, strict=True):
            if other is None:
                order.agreed()
            else:
                order.differed(name, other if name == names[0] else names[0])


@given(st.permutations(range(40)), st.integers(0, 6), st.booleans())
def test_two_processes_meet_again_whatever_the_calls(
    numbers: list[int], left_out: int, first: bool
) -> None:
    calls = [f"delete({number})" for number in numbers]
    programs = [calls, calls[left_out:]]
    found = met(programs[::-1] if first else programs)
    # As many rounds fail as calls were left out, one more shows it, and as many are made up for.
    assert found == calls[-len(found) :] and len(found) >= 40 - 2 * left_out - (left_out > 0)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=5))
def test_any_number_of_processes_meets_again(left_out: list[int]) -> None:
    steps = [f"save({step})" for step in range(40)]
    found = met([steps[count:] for count in left_out])
    lost = max(left_out) - min(left_out)
    assert found == steps[-len(found) :]
    assert len(found) >= 40 - min(left_out) - 3 * lost


@pytest.mark.parametrize("period", [2, 3, 4])
@given(left_out=st.integers(0, 5), first=st.booleans())
def test_calls_that_repeat_meet_again(period: int, left_out: int, first: bool) -> None:
    """The order of the calls does not show which process is behind, and both may seem to be."""
    names = ["restore", "latest_step()", "delete(3)", "delete_after(3)"][:period]
    calls = names * 15
    programs = [calls, calls[left_out:]]
    found = met(programs[::-1] if first else programs)
    assert len(found) >= len(calls) - left_out - 12
    assert found == (names * 16)[names.index(found[0]) :][: len(found)]


def test_a_process_that_was_behind_is_so_no_more_once_all_have_met() -> None:
    order = CallOrder()
    order.differed("save(1)", "save(2)")
    order.agreed()
    assert not order.skips("save(2)")


def test_of_two_saves_that_of_the_lower_step_is_behind_whatever_the_manner() -> None:
    lower, higher = "start_save(9, on_overlap='error')", "save(10)"
    orders = CallOrder(), CallOrder()
    orders[0].differed(lower, higher)
    orders[1].differed(higher, lower)
    assert [orders[0].skips(higher), orders[1].skips(lower)] == [True, False]
