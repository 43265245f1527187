"""Backpressure: a first-in, first-out budget of bytes."""

# Rule 1: acquire may wait; release is synchronous and never waits, so a second cancellation cannot
#   interrupt it in a `finally`. (test_whatever_is_cancelled_nothing_leaks_and_the_bound_holds)
# Rule 2: no task waits for bytes while it holds bytes that it releases only after the wait. A task
#   that needs several slots takes them in one acquire: two tasks that each hold half and wait for
#   the other half would wait forever.
# Rule 3: bytes are counted when they are granted, in `release`, not when the waiter's task next
#   runs. Otherwise a caller in between would find them free and exceed the capacity.
#   (test_a_wait_cancelled_just_after_its_grant_leaks_no_slot)
# Rule 4: the line is first-in, first-out, so small requests do not starve a large one. A request
#   that needs kept bytes is passed over but stays in its place, because a task behind it may be
#   the one that keeps them. (test_who_cannot_be_served_while_others_keep_theirs_holds_up_nobody)
# Rule 5: the idle memory of all accounts and the bytes in use together stay within the capacity:
#   idle memory is freed before anything is allocated for granted bytes.
#   (test_idle_slots_and_memory_elsewhere_stay_within_the_budget)

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field


class Account:
    """The part of a budget that one owner uses, and its memory beyond that.

    Attributes:
        in_use: bytes of the budget, counted from the moment they are granted.
        kept: kept bytes among these.
        unbudgeted_nbytes: bytes of memory in use without a grant.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.kept = 0
        self.unbudgeted_nbytes = 0

    @property
    def idle_nbytes(self) -> int:
        """Bytes of memory that are not in use."""
        return 0

    def evict(self, nbytes: int) -> None:
        """Free at least `nbytes` of idle memory, or all of it."""


@dataclass(slots=True, eq=False)
class _Request:
    nbytes: int
    limit: int | None
    account: Account | None
    extra: int = 0
    granted: asyncio.Future[None] = field(init=False, repr=False)  # set when it has to wait


class ByteBudget:
    """A number of bytes, of which at most `capacity` are in use at any time.

    It belongs to one event loop.

    Attributes:
        capacity: bytes of the budget.
        in_use: bytes granted and not released.
        peak: largest value of `in_use`.
        kept: the part of `in_use` that is not released while others wait.
        accounts: owners of idle memory, which is freed for bytes in use.
    """

    __slots__ = ("_waiters", "accounts", "capacity", "in_use", "kept", "peak")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: a budget holds at least one byte")
        self.capacity = capacity
        self.in_use = 0
        self.peak = 0
        self.kept = 0
        self.accounts: list[Account] = []
        self._waiters: deque[_Request] = deque()

    @property
    def waiting(self) -> int:
        """Number of callers in line."""
        return len(self._waiters)

    def try_acquire(self, nbytes: int, *, account: Account | None = None) -> bool:
        """Take `nbytes` if they are free and no waiter could be served first; return whether."""
        return self._try(_Request(nbytes, None, account))

    async def acquire(
        self,
        nbytes: int,
        *,
        limit: int | None = None,
        account: Account | None = None,
        extra: int = 0,
    ) -> None:
        """Take `nbytes`, waiting in line for them.

        Args:
            nbytes: bytes; a request of `capacity` or more takes the whole budget and is served
                alone instead of refused.
            limit: wait until at most this many bytes, kept ones excluded, would be in use: of the
                account, if there is one.
            account: owner that the bytes are also counted for.
            extra: the part of `nbytes` that is not counted for the account.

        Cancellation: leaves the line; bytes already granted go to the next waiter.
        """
        nbytes = min(nbytes, self.capacity)
        request = _Request(nbytes, limit, account, extra)
        if self._try(request):
            return
        request.granted = asyncio.get_running_loop().create_future()
        self._waiters.append(request)
        try:
            await request.granted
        except asyncio.CancelledError:
            if request.granted.cancelled():
                if request in self._waiters:
                    self._waiters.remove(request)
                self._grant()
            else:
                if account is not None:
                    account.in_use -= nbytes - extra
                self.release(nbytes)
            raise

    def release(self, nbytes: int, *, account: Account | None = None) -> None:
        """Release `nbytes` (of this account) and serve the waiters."""
        nbytes = min(nbytes, self.capacity)
        if nbytes > self.in_use:
            raise RuntimeError(f"released {nbytes} bytes, only {self.in_use} are in use")
        self.in_use -= nbytes
        if account is not None:
            account.in_use -= nbytes
        self._grant()

    def keep(self, nbytes: int, *, account: Account | None = None) -> None:
        """Mark `nbytes` more in use as not released while others wait; negative: fewer.

        Otherwise a waiter with a limit could wait for them forever.
        """
        self.kept += nbytes
        if account is not None:
            account.kept += nbytes
        self._grant()

    def has_room(self, nbytes: int) -> bool:
        """Return whether the capacity has room for `nbytes` besides idle and used memory.

        An estimate outside the loop's thread.
        """
        return self.in_use + self._unused() + nbytes <= self.capacity

    def evict(self, account: Account | None = None) -> None:
        """Free idle memory while it and the bytes in use exceed the capacity, `account`'s last.

        Called after `account` was granted bytes or its idle memory grew.
        """
        for other in sorted(self.accounts, key=lambda other: other is account):
            over = self.in_use + self._unused() - self.capacity
            if over <= 0:
                return
            other.evict(over)

    def _unused(self) -> int:
        return sum([one.idle_nbytes + one.unbudgeted_nbytes for one in self.accounts])

    def _must_wait(self, request: _Request) -> bool:
        """Return whether a request cannot be served before kept bytes are released."""
        return request.nbytes > self.capacity - self.kept

    def _try(self, request: _Request) -> bool:
        for other in self._waiters:
            if not other.granted.done() and not self._must_wait(other):
                return False
        return self._take(request)

    def _take(self, request: _Request) -> bool:
        """Take a request's bytes if they are free, ignoring the line; return whether."""
        nbytes, limit, account = request.nbytes, request.limit, request.account
        if self.in_use + nbytes > self.capacity:
            return False
        user = self if account is None else account
        if limit is not None and user.in_use - user.kept + nbytes > max(limit, nbytes):
            return False
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        if account is not None:
            account.in_use += nbytes - request.extra
        return True

    def _grant(self) -> None:
        passed: list[_Request] = []
        while self._waiters:
            request = self._waiters.popleft()
            if request.granted.done():
                continue  # cancelled, but its task has not run yet
            if self._take(request):
                request.granted.set_result(None)
                continue
            passed.append(request)
            if not self._must_wait(request):
                break
        self._waiters.extendleft(reversed(passed))
