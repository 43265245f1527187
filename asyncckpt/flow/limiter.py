"""Window of requests in flight, which halves when the server is overloaded and grows again."""

# Rule 1: acquire may wait; release is synchronous and never waits.
# Rule 2: a caller holds no permit while it waits before a retry.
# Rule 3: one overload cuts the window once, however many requests fail: only a request that began
#   after the last cut can cut again.

from __future__ import annotations

import asyncio
from collections import deque


class Permit:
    """The right to have one request in flight, until it is released.

    Attributes:
        cuts: number of cuts of the window before the request began.
    """

    __slots__ = ("_limiter", "cuts")

    def __init__(self, limiter: Limiter) -> None:
        self._limiter: Limiter | None = limiter
        self.cuts = limiter.cuts

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Return the permit after the request. Idempotent."""
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter._release()


class Limiter:
    """At most `limit` permits at a time; additive increase, multiplicative decrease.

    It belongs to one event loop and serves waiters in order. A round of `limit` successes during
    which the window was full adds one; `throttled` halves it, down to 1. Permits are not revoked,
    so after a cut more than `limit` may be in use for a while.

    Args:
        ceiling: initial and largest size of the window.
    """

    __slots__ = ("_ceiling", "_full", "_successes", "_waiters", "cuts", "in_flight", "limit")

    def __init__(self, ceiling: int) -> None:
        self.in_flight = 0
        self.cuts = 0
        self._successes = 0
        self._full = False
        self._waiters: deque[asyncio.Future[Permit]] = deque()
        self._ceiling = self.limit = 0
        self.ceiling = ceiling

    def __repr__(self) -> str:
        return (
            f"Limiter({self.in_flight} of {self.limit} requests in flight, "
            f"{self.waiting} waiting, at most {self._ceiling})"
        )

    @property
    def waiting(self) -> int:
        """Number of callers in line."""
        return sum(not waiter.done() for waiter in self._waiters)

    @property
    def ceiling(self) -> int:
        """Largest size of the window. A window of this size follows changes."""
        return self._ceiling

    @ceiling.setter
    def ceiling(self, ceiling: int) -> None:
        if ceiling < 1:
            raise ValueError(f"ceiling={ceiling}: at least one request must be allowed")
        at_top = self.limit == self._ceiling
        self._ceiling = ceiling
        self.limit = ceiling if at_top else min(self.limit, ceiling)
        self._grant()

    def try_acquire(self) -> Permit | None:
        """Return a permit if one is free and no caller is waiting."""
        if self.in_flight >= self.limit or (self._waiters and self.waiting):
            return None
        return self._take()

    async def acquire(self) -> Permit:
        """Return a permit, waiting in line for it.

        Cancellation: leaves the line; a permit granted in the meantime goes to the next.
        """
        permit = self.try_acquire()
        if permit is not None:
            return permit
        self._full = True
        waiter: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
            else:
                waiter.result().release()
            raise

    def succeeded(self, permit: Permit) -> None:
        """Record a response; a round of them widens the window by one."""
        if permit.cuts < self.cuts:
            return  # it began before the last cut and says nothing about the new window
        self._successes += 1
        if self._successes >= self.limit:
            if self._full and self.limit < self._ceiling:
                self.limit += 1
                self._grant()
            self._successes = 0
            self._full = self.in_flight >= self.limit

    def throttled(self, permit: Permit) -> None:
        """Halve the window, because the server asked for fewer requests; once per overload."""
        if permit.cuts < self.cuts:
            return
        self.cuts += 1
        self.limit = max(1, self.limit // 2)
        self._successes = 0
        self._full = False

    def _take(self) -> Permit:
        self.in_flight += 1
        if self.in_flight >= self.limit:
            self._full = True
        return Permit(self)

    def _release(self) -> None:
        self.in_flight -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self.in_flight < self.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():  # else cancelled; its task has not run since
                waiter.set_result(self._take())
