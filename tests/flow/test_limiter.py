"""The window of requests: bounded, served in order, halved once per window, and grown again."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncckpt.flow.limiter import Limiter, Permit


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(8):
        await asyncio.sleep(0)


async def round_of_successes(limiter: Limiter) -> None:
    """Run a full window of successful requests."""
    permits = [await limiter.acquire() for _ in range(limiter.limit)]
    for permit in permits:
        limiter.succeeded(permit)
        permit.release()


def test_at_least_one_request_must_be_allowed() -> None:
    with pytest.raises(ValueError, match="ceiling=0"):
        Limiter(0)
    limiter = Limiter(4)
    with pytest.raises(ValueError, match="ceiling=-1"):
        limiter.ceiling = -1


async def test_permits_are_given_until_the_window_is_full() -> None:
    limiter = Limiter(2)
    first = await limiter.acquire()
    second = limiter.try_acquire()
    assert second is not None
    assert limiter.try_acquire() is None
    first.release()
    first.release()  # again: no effect
    assert limiter.in_flight == 1
    with second:
        pass
    assert limiter.in_flight == 0
    assert repr(limiter) == "Limiter(0 of 2 requests in flight, 0 waiting, at most 2)"


async def test_those_who_wait_are_served_in_their_order() -> None:
    limiter = Limiter(1)
    held = await limiter.acquire()
    served: list[int] = []

    async def use(number: int) -> None:
        with await limiter.acquire():
            served.append(number)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(use(number))
        await settle()
        assert limiter.waiting == 5
        assert limiter.try_acquire() is None
        held.release()
    assert served == [0, 1, 2, 3, 4]


async def test_a_cancelled_wait_leaks_nothing_before_and_after_its_grant() -> None:
    limiter = Limiter(1)
    held = await limiter.acquire()
    before = asyncio.create_task(limiter.acquire())
    await settle()
    before.cancel()
    held.release()  # before the cancelled task has run
    with pytest.raises(asyncio.CancelledError):
        await before
    assert (limiter.in_flight, limiter.waiting) == (0, 0)

    held = await limiter.acquire()
    after = asyncio.create_task(limiter.acquire())
    behind = asyncio.create_task(limiter.acquire())
    await settle()
    held.release()
    after.cancel()  # it was granted the permit but has not run yet
    with pytest.raises(asyncio.CancelledError):
        await after
    (await behind).release()
    assert (limiter.in_flight, limiter.waiting) == (0, 0)


async def test_one_window_of_refusals_halves_it_once() -> None:
    limiter = Limiter(16)
    permits = [await limiter.acquire() for _ in range(16)]
    for permit in permits:
        limiter.throttled(permit)
        permit.release()
    assert limiter.limit == 8
    again = await limiter.acquire()
    limiter.throttled(again)
    again.release()
    assert limiter.limit == 4


async def test_the_window_never_closes() -> None:
    limiter = Limiter(3)
    for _ in range(5):
        with await limiter.acquire() as permit:
            limiter.throttled(permit)
    assert limiter.limit == 1
    with await limiter.acquire():
        pass


async def test_it_grows_by_one_for_every_round_up_to_its_ceiling() -> None:
    limiter = Limiter(6)
    limiter.limit = 2
    grown = []
    for _ in range(6):
        await round_of_successes(limiter)
        grown.append(limiter.limit)
    assert grown == [3, 4, 5, 6, 6, 6]


async def test_a_window_that_nobody_fills_does_not_grow() -> None:
    limiter = Limiter(64)
    limiter.limit = 4
    for _ in range(100):
        with await limiter.acquire() as permit:
            limiter.succeeded(permit)
    assert limiter.limit == 4


async def test_what_began_before_a_cut_neither_grows_nor_cuts_the_window() -> None:
    limiter = Limiter(8)
    old = [await limiter.acquire() for _ in range(8)]
    limiter.throttled(old[0])
    assert limiter.limit == 4
    for permit in old[1:]:
        limiter.succeeded(permit)
        permit.release()
    assert limiter.limit == 4
    limiter.throttled(old[1])
    assert limiter.limit == 4


async def test_after_a_cut_nobody_starts_until_the_smaller_window_has_room() -> None:
    limiter = Limiter(4)
    permits = [await limiter.acquire() for _ in range(4)]
    waiter = asyncio.create_task(limiter.acquire())
    await settle()
    limiter.throttled(permits[0])
    for permit in permits[:2]:
        permit.release()
        await settle()
        assert not waiter.done()
    permits[2].release()
    (await waiter).release()
    permits[3].release()


async def test_a_window_at_its_ceiling_moves_with_it_and_one_that_was_cut_does_not() -> None:
    limiter = Limiter(4)
    permits = [await limiter.acquire() for _ in range(4)]
    waiter = asyncio.create_task(limiter.acquire())
    await settle()
    limiter.ceiling = 5
    permits.append(await waiter)
    limiter.throttled(permits[0])
    limiter.ceiling = 64
    assert (limiter.limit, limiter.ceiling) == (2, 64)
    limiter.ceiling = 1
    assert limiter.limit == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "cancel", "succeed", "throttle", "drop", "turn", "ceiling"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), ACTIONS)
def test_whatever_happens_the_window_holds_and_nobody_waits_beside_a_free_permit(
    ceiling: int, start: int, actions: list[tuple[str, int]]
) -> None:
    async def run() -> None:
        limiter = Limiter(ceiling)
        limiter.limit = min(start, ceiling)
        asking: list[asyncio.Task[Permit]] = []
        held: list[Permit] = []
        granted_under = limiter.limit

        def take_done() -> None:
            for task in [task for task in asking if task.done()]:
                asking.remove(task)
                if not task.cancelled():
                    held.append(task.result())

        for action, number in actions:
            before, in_flight = limiter.limit, limiter.in_flight
            if action == "ask":
                asking.append(asyncio.create_task(limiter.acquire()))
            elif action == "cancel" and asking:
                asking[number % len(asking)].cancel()
            elif action == "ceiling":
                limiter.ceiling = number + 1
            elif action == "turn":
                await asyncio.sleep(0)
            elif held:
                permit = held.pop(number % len(held))
                if action == "succeed":
                    limiter.succeeded(permit)
                    assert limiter.limit - before in (0, 1)
                elif action == "throttle":
                    limiter.throttled(permit)
                    assert limiter.limit in (before, max(1, before // 2))
                permit.release()
            take_done()
            granted_under = max(limiter.limit, before)
            assert 1 <= limiter.limit <= limiter.ceiling
            # No permit is granted above the window; permits from before a cut stay valid.
            assert limiter.in_flight <= max(in_flight, granted_under)
            assert not (limiter.waiting and limiter.in_flight < limiter.limit)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        take_done()
        for permit in held:
            permit.release()
        assert (limiter.in_flight, limiter.waiting) == (0, 0)

    asyncio.run(run())
