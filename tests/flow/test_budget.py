"""The byte budget: bounded, first come first served, and never short of what was released."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.flow.budget import ByteBudget


async def settle() -> None:
    """Every task has gone as far as it can."""
    for _ in range(8):
        await asyncio.sleep(0)


def test_a_budget_holds_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        ByteBudget(0)


async def test_slots_are_granted_until_none_is_left() -> None:
    budget = ByteBudget(3)
    await budget.acquire(2)
    assert budget.try_acquire()
    assert not budget.try_acquire()
    assert (budget.in_use, budget.peak) == (3, 3)
    budget.release(3)
    assert (budget.in_use, budget.peak) == (0, 3)


async def test_those_who_wait_are_served_in_their_order() -> None:
    budget = ByteBudget(2)
    await budget.acquire(2)
    served: list[str] = []

    async def want(name: str, count: int) -> None:
        await budget.acquire(count)
        served.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(want("large", 2))
        await settle()
        group.create_task(want("small", 1))
        await settle()
        budget.release(1)
        await settle()
        # One slot is free, but the large one came first.
        assert served == []
        assert not budget.try_acquire()
        budget.release(1)
        await settle()
        assert served == ["large"]
        budget.release(2)
    assert served == ["large", "small"]


async def test_a_request_as_large_as_the_limit_or_larger_is_served_alone() -> None:
    budget = ByteBudget(4)
    await budget.acquire(1)
    task = asyncio.create_task(budget.acquire(9))
    await settle()
    assert not task.done()
    budget.release(1)
    await task
    assert budget.in_use == 4
    budget.release(9)
    assert budget.in_use == 0


async def test_a_limit_below_the_capacity_is_kept_but_never_below_the_request() -> None:
    budget = ByteBudget(8)
    await budget.acquire(3, limit=2)
    assert budget.in_use == 3
    task = asyncio.create_task(budget.acquire(1, limit=3))
    await settle()
    assert not task.done()
    budget.release(1)
    await task
    budget.release(3)


async def test_a_limit_does_not_count_what_is_kept() -> None:
    budget = ByteBudget(8)
    await budget.acquire(4)
    task = asyncio.create_task(budget.acquire(2, limit=3))
    await settle()
    assert not task.done()  # the four may come back
    budget.stand(4)
    await task  # they will not
    assert budget.in_use == 6
    assert not budget.try_acquire(2, limit=3)
    assert budget.try_acquire(1, limit=3)
    assert not budget.try_acquire(2, limit=100)  # the capacity is one, whatever stands
    budget.stand(-4)
    budget.release(7)
    assert not budget.in_use and not budget.standing


async def test_releasing_more_than_is_in_use_is_an_error() -> None:
    budget = ByteBudget(2)
    await budget.acquire()
    with pytest.raises(RuntimeError, match="released 2 slots, only 1 are in use"):
        budget.release(2)


async def test_a_cancelled_wait_leaves_the_line_and_lets_the_next_one_through() -> None:
    budget = ByteBudget(2)
    await budget.acquire(1)
    large = asyncio.create_task(budget.acquire(2))
    await settle()
    small = asyncio.create_task(budget.acquire(1))
    await settle()
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    await small
    assert (budget.in_use, budget.waiting) == (2, 0)


async def test_a_wait_cancelled_just_before_a_release_leaks_no_slot() -> None:
    budget = ByteBudget(1)
    await budget.acquire()
    waiter = asyncio.create_task(budget.acquire())
    await settle()
    waiter.cancel()
    budget.release()  # before the cancelled task has run
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (budget.in_use, budget.waiting) == (0, 0)


async def test_a_wait_cancelled_just_after_its_grant_leaks_no_slot() -> None:
    budget = ByteBudget(1)
    await budget.acquire()
    first = asyncio.create_task(budget.acquire())
    await settle()
    second = asyncio.create_task(budget.acquire())
    await settle()
    budget.release()
    first.cancel()  # it was granted the slot and has not run since
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert budget.in_use == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["keep", "cancel", "cancel twice"])),
        max_size=12,
    ),
    st.integers(0, 3),
)
def test_whatever_is_cancelled_nothing_leaks_and_the_bound_holds(
    wants: list[tuple[int, str]], turns: int
) -> None:
    async def run() -> None:
        budget = ByteBudget(3)
        await budget.acquire(3)

        async def use(count: int) -> None:
            await budget.acquire(count)
            try:
                assert budget.in_use <= 3
                await asyncio.sleep(0)
            finally:
                budget.release(count)

        tasks = [asyncio.create_task(use(count)) for count, _ in wants]
        await asyncio.sleep(0)
        for task, (_, fate) in zip(tasks, wants, strict=True):
            if fate != "keep":
                task.cancel()
        budget.release(3)
        for _ in range(turns):
            await asyncio.sleep(0)
        for task, (_, fate) in zip(tasks, wants, strict=True):
            if fate == "cancel twice":
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (budget.in_use, budget.waiting) == (0, 0)
        for task, (_, fate) in zip(tasks, wants, strict=True):
            assert task.cancelled() == (fate != "keep")

    asyncio.run(run())
