"""The byte budget: bounded, first come first served, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.flow.budget import Account, ByteBudget


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(8):
        await asyncio.sleep(0)


def test_a_budget_holds_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        ByteBudget(0)


async def test_slots_are_granted_until_none_is_left() -> None:
    budget = ByteBudget(3)
    await budget.acquire(2)
    assert budget.try_acquire(1)
    assert not budget.try_acquire(1)
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
        assert not budget.try_acquire(1)
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
    budget.keep(4)
    await task  # they will not
    assert budget.in_use == 6
    over = asyncio.create_task(budget.acquire(2, limit=3))
    await settle()
    assert not over.done()
    over.cancel()
    await settle()
    await budget.acquire(1, limit=3)
    assert not budget.try_acquire(2)  # the capacity limits it too, including kept bytes
    budget.keep(-4)
    budget.release(7)
    assert not budget.in_use and not budget.kept


async def line_behind_kept(count: int) -> tuple[ByteBudget, asyncio.Task[None]]:
    """Return a budget of eight bytes, five of them kept, and a waiter for `count`."""
    budget = ByteBudget(8)
    await budget.acquire(5)
    budget.keep(5)
    first = asyncio.create_task(budget.acquire(count))
    await settle()
    assert not first.done()
    return budget, first


async def test_who_cannot_be_served_while_others_keep_theirs_holds_up_nobody() -> None:
    """The kept bytes may belong to a task that needs a few more to continue."""
    budget, large = await line_behind_kept(6)
    assert budget.try_acquire(1)
    await asyncio.wait_for(budget.acquire(2), 10)
    behind = asyncio.create_task(budget.acquire(1))  # now a request waits behind the large one
    await settle()
    budget.release(2)
    await settle()
    assert behind.done() and not large.done()
    budget.release(2)
    await settle()
    assert (large.done(), budget.in_use, budget.waiting) == (False, 5, 1)
    budget.keep(-5)
    budget.release(5)
    await large
    assert (budget.in_use, budget.waiting) == (6, 0)


async def test_who_was_passed_over_has_kept_his_place() -> None:
    budget, large = await line_behind_kept(6)
    await budget.acquire(3)
    small = asyncio.create_task(budget.acquire(3))
    await settle()
    budget.keep(-5)  # now the large one is an ordinary first waiter
    budget.release(5)
    await settle()
    assert (large.done(), small.done(), budget.in_use) == (False, False, 3)
    assert not budget.try_acquire(1)
    budget.release(3)
    await settle()
    assert (large.done(), small.done(), budget.in_use) == (True, False, 6)
    budget.release(6)
    await small
    assert (budget.in_use, budget.waiting) == (3, 0)


async def test_who_can_be_served_is_not_passed_over() -> None:
    """Three fit beside the five that are kept, so later waiters do not pass."""
    budget = ByteBudget(8)
    await budget.acquire(6)
    budget.keep(5)
    first = asyncio.create_task(budget.acquire(3))
    await settle()
    behind = asyncio.create_task(budget.acquire(1))
    await settle()
    assert not budget.try_acquire(1)
    assert (first.done(), behind.done()) == (False, False)
    budget.release(1)
    await settle()
    assert (first.done(), behind.done(), budget.in_use) == (True, False, 8)
    budget.release(3)
    await behind


@pytest.mark.parametrize("when", ["passed over", "its turn has come", "granted"])
async def test_who_was_passed_over_may_be_cancelled(when: str) -> None:
    budget, large = await line_behind_kept(6)
    await budget.acquire(3)
    small = asyncio.create_task(budget.acquire(3))
    await settle()
    if when != "passed over":
        budget.keep(-5)
    if when == "granted":
        budget.release(8)
        assert budget.in_use == 6
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    if when == "granted":
        await small
        assert (budget.in_use, budget.waiting) == (3, 0)
        return
    assert (budget.in_use, budget.waiting) == (8, 1)
    budget.release(3)
    await small
    assert (budget.in_use, budget.waiting) == (8, 0)


async def test_a_share_has_a_limit_that_others_do_not_use_up() -> None:
    budget, account = ByteBudget(12), Account()
    await budget.acquire(6)  # another user
    budget.keep(6)  # this makes no room in the account
    await budget.acquire(2, limit=2, account=account)
    assert (budget.in_use, account.in_use) == (8, 2)
    waiting = [asyncio.create_task(budget.acquire(1, limit=2, account=account)) for _ in range(3)]
    await settle()
    budget.release(1, account=account)
    await settle()
    # One slot serves one waiter, though the budget has more.
    assert [task.done() for task in waiting] == [True, False, False]
    budget.keep(1, account=account)
    await settle()
    assert [task.done() for task in waiting] == [True, True, False]
    waiting[2].cancel()
    await asyncio.wait(waiting)
    budget.keep(-1, account=account)
    budget.release(3, account=account)
    assert (account.in_use, account.kept, budget.in_use, budget.kept) == (0, 0, 6, 6)


async def test_a_share_has_no_part_in_what_is_taken_beside_it() -> None:
    budget, account = ByteBudget(4), Account()
    await budget.acquire(3, account=account, extra=1)
    assert (budget.in_use, account.in_use) == (3, 2)
    task = asyncio.create_task(budget.acquire(3, account=account, extra=2))
    await settle()
    budget.release(2, account=account)
    task.cancel()  # it was granted its slots but has not run yet
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (budget.in_use, account.in_use) == (1, 0)


async def test_releasing_more_than_is_in_use_is_an_error() -> None:
    budget = ByteBudget(2)
    await budget.acquire(1)
    with pytest.raises(RuntimeError, match="released 2 bytes, only 1 are in use"):
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
    await budget.acquire(1)
    waiter = asyncio.create_task(budget.acquire(1))
    await settle()
    waiter.cancel()
    budget.release(1)  # before the cancelled task has run
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (budget.in_use, budget.waiting) == (0, 0)


async def test_a_wait_cancelled_just_after_its_grant_leaks_no_slot() -> None:
    budget = ByteBudget(1)
    await budget.acquire(1)
    first = asyncio.create_task(budget.acquire(1))
    await settle()
    second = asyncio.create_task(budget.acquire(1))
    await settle()
    budget.release(1)
    first.cancel()  # it was granted the slot but has not run yet
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),
            st.sampled_from(["use", "keep", "cancel"]),
            st.none() | st.integers(1, 3),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_whatever_stands_everybody_is_served_in_the_end(
    wants: list[tuple[int, str, int | None, bool]],
) -> None:
    async def run() -> None:
        budget, account = ByteBudget(5), Account()
        keeping = asyncio.Lock()  # one save at a time keeps memory and needs one more slot

        async def use(count: int, fate: str, limit: int | None, shared: bool) -> None:
            of = account if shared else None
            if fate != "keep":
                await budget.acquire(count, limit=limit, account=of)
                try:
                    await asyncio.sleep(0)
                finally:
                    budget.release(min(count, 5), account=of)
                return
            async with keeping:
                kept = min(count, 4)
                await budget.acquire(kept, account=of)
                budget.keep(kept, account=of)
                for _ in range(3):
                    await budget.acquire(1, limit=limit, account=of)
                    assert budget.in_use <= 5
                    await asyncio.sleep(0)
                    budget.release(1, account=of)
                budget.keep(-kept, account=of)
                budget.release(kept, account=of)

        tasks = [asyncio.create_task(use(*want)) for want in wants]
        await asyncio.sleep(0)
        for task, (_, fate, _, _) in zip(tasks, wants, strict=True):
            if fate == "cancel":
                task.cancel()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [error for error in ended if isinstance(error, Exception)]
        assert (budget.in_use, budget.kept, budget.waiting) == (0, 0, 0)
        assert (account.in_use, account.kept) == (0, 0)

    asyncio.run(run())
