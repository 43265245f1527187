"""The one place of backpressure: a first-in, first-out budget counted in slots."""

# Rule 1: acquire may wait; release never does and is synchronous, so that it can stand in a
#   `finally` that a second cancellation cannot interrupt.
# Rule 2: nobody waits for units while holding units that cannot drain by themselves. What needs
#   several takes them in one acquire.

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Share:
    """What one user of a budget has of it, counted from the moment that it is granted.

    Attributes:
        in_use: slots of the budget.
        standing: those of them that stand.
    """

    in_use: int = 0
    standing: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    count: int
    limit: int | None
    share: Share | None
    beside: int
    granted: asyncio.Future[None]


class ByteBudget:
    """A number of slots, of which at most `capacity` are in use at any time.

    It belongs to one event loop. Attributes: `capacity`, `in_use` and `peak`, in slots, and
    `standing`, the part of `in_use` that whoever waits cannot hope for.
    """

    __slots__ = ("_waiters", "capacity", "in_use", "peak", "standing")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: a budget holds at least one slot")
        self.capacity = capacity
        self.in_use = 0
        self.peak = 0
        self.standing = 0
        self._waiters: deque[_Waiter] = deque()

    def __repr__(self) -> str:
        return (
            f"ByteBudget({self.in_use} of {self.capacity} slots in use, "
            f"{len(self._waiters)} waiting)"
        )

    def try_acquire(
        self,
        count: int = 1,
        *,
        limit: int | None = None,
        share: Share | None = None,
        beside: int = 0,
    ) -> bool:
        """Whether `count` slots were taken; not if anybody waits who can get his."""
        if not self._fits(count, limit, share):
            return False
        if any(not self._hopeless(w.count) for w in self._waiters if not w.granted.done()):
            return False
        self._take(count, share, beside)
        return True

    async def acquire(
        self,
        count: int = 1,
        *,
        limit: int | None = None,
        share: Share | None = None,
        beside: int = 0,
    ) -> None:
        """`count` slots belong to the caller, who waits in line for them.

        Args:
            count: slots; more than `capacity` takes all of it, so that a request as large as
                the budget, or larger, is served alone instead of refused.
            limit: wait until this many slots, or fewer, would be in use, not counting those that
                stand; of the share, if there is one.
            share: in which the slots are counted, too.
            beside: so many of them are not.

        Cancellation: leaves the line; slots that were granted in the meantime go to the next.
        """
        count = min(count, self.capacity)
        if self.try_acquire(count, limit=limit, share=share, beside=beside):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(count, limit, share, beside, granted)
        self._waiters.append(waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                self._grant()
            else:
                if share is not None:
                    share.in_use -= count - beside
                self.release(count)
            raise

    def release(self, count: int = 1, *, share: Share | None = None) -> None:
        """`count` slots (of this share) are free again, and go to those who wait, in order."""
        count = min(count, self.capacity)
        if count > self.in_use:
            raise RuntimeError(f"released {count} slots, only {self.in_use} are in use")
        self.in_use -= count
        if share is not None:
            share.in_use -= count
        self._grant()

    def stand(self, count: int, *, share: Share | None = None) -> None:
        """`count` more slots in use are kept for as long as those who wait with a limit may take.

        Negative: they are no longer. Without this, a limit that is reached by what somebody keeps
        would be waited for without end.
        """
        self.standing += count
        if share is not None:
            share.standing += count
        self._grant()

    @property
    def waiting(self) -> int:
        """Number of callers in line."""
        return len(self._waiters)

    def _hopeless(self, count: int) -> bool:
        """Whether that many cannot be free before what stands is given up.

        Whoever asks for so many waits until then, but not those behind him: what stands may
        belong to one of them, who goes on when he gets a few.
        """
        return count > self.capacity - self.standing

    def _fits(self, count: int, limit: int | None, share: Share | None) -> bool:
        if self.in_use + count > self.capacity:
            return False
        user = self if share is None else share
        return limit is None or user.in_use - user.standing + count <= max(limit, count)

    def _take(self, count: int, share: Share | None, beside: int) -> None:
        self.in_use += count
        self.peak = max(self.peak, self.in_use)
        if share is not None:
            share.in_use += count - beside

    def _grant(self) -> None:
        passed: list[_Waiter] = []
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.granted.done():
                self._waiters.popleft()  # cancelled; its task has not run since
                continue
            if not self._fits(waiter.count, waiter.limit, waiter.share):
                if not self._hopeless(waiter.count):
                    break
                passed.append(self._waiters.popleft())
                continue
            self._waiters.popleft()
            self._take(waiter.count, waiter.share, waiter.beside)
            waiter.granted.set_result(None)
        self._waiters.extendleft(reversed(passed))
