"""Backpressure: a first-in, first-out budget of bytes."""

# Rule 1: acquire may wait; release never does and is synchronous, so that it works in a `finally`
#   that a second cancellation cannot interrupt.
#   (test_whatever_is_cancelled_nothing_leaks_and_the_bound_holds)
# Rule 2: no task waits for bytes while it holds some that are released only after the wait. A task
#   that needs several slots takes them in one acquire: two tasks that each hold half and wait for
#   the other half would wait forever.
# Rule 3: bytes are counted when they are granted, in `release`, not when the waiter's task runs
#   next. Otherwise a caller in between would find them free and exceed the capacity.
#   (test_a_wait_cancelled_just_after_its_grant_leaks_no_slot)
# Rule 4: the line is first-in, first-out, so that small requests do not starve a large one. A
#   request that cannot be served before kept bytes are released is passed over, because a task that
#   waits behind it may keep them; it stays in its place.
#   (test_who_cannot_be_served_while_others_keep_theirs_holds_up_nobody)
# Rule 5: idle memory of all accounts and the bytes in use together stay within the capacity: it
#   makes way before anything is allocated for granted bytes.
#   (test_idle_slots_and_memory_elsewhere_stay_within_the_budget)

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


class Account:
    """The part of a budget that one owner uses, and memory that it holds beyond that.

    Attributes:
        in_use: bytes of the budget, counted from the moment that they are granted.
        kept: those of them that are kept.
        beyond_nbytes: bytes of memory in use that no request was granted.
    """

    def __init__(self) -> None:
        self.in_use = 0
        self.kept = 0
        self.beyond_nbytes = 0

    @property
    def idle_nbytes(self) -> int:
        """Bytes of memory that no request was granted."""
        return 0

    def free_idle(self, nbytes: int) -> None:
        """Free idle memory, `nbytes` of it if there is so much."""


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    limit: int | None
    account: Account | None
    extra: int
    granted: asyncio.Future[None]


class ByteBudget:
    """A number of bytes, of which at most `capacity` are in use at any time.

    It belongs to one event loop. Attributes: `capacity`, `in_use` and `peak`, in bytes, and
    `kept`, the part of `in_use` that is not released as long as others wait; `accounts`, whose idle
    memory makes way for bytes in use.
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
        self._waiters: deque[_Waiter] = deque()

    def __repr__(self) -> str:
        return (
            f"ByteBudget({self.in_use} of {self.capacity} bytes in use, "
            f"{len(self._waiters)} waiting)"
        )

    @property
    def waiting(self) -> int:
        """Number of callers in line."""
        return len(self._waiters)

    def try_acquire(
        self,
        nbytes: int,
        *,
        limit: int | None = None,
        account: Account | None = None,
        extra: int = 0,
    ) -> bool:
        """Take `nbytes` if they are free and no waiter could be served first; return whether."""
        if not self._fits(nbytes, limit, account):
            return False
        if self._waiters and any(
            not self._must_wait(w.nbytes) for w in self._waiters if not w.granted.done()
        ):
            return False
        self._take(nbytes, account, extra)
        return True

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
            nbytes: bytes; more than `capacity` takes all of it, so that a request as large as the
                budget, or larger, is served alone instead of refused.
            limit: wait until at most this many bytes would be in use besides kept ones; of the
                account, if there is one.
            account: also counts them.
            extra: the part of `nbytes` that the account does not count.

        Cancellation: leaves the line; what was granted in the meantime goes to the next.
        """
        nbytes = min(nbytes, self.capacity)
        if self.try_acquire(nbytes, limit=limit, account=account, extra=extra):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(nbytes, limit, account, extra, granted)
        self._waiters.append(waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                self._grant()
            else:
                if account is not None:
                    account.in_use -= nbytes - extra
                self.release(nbytes)
            raise

    def release(self, nbytes: int, *, account: Account | None = None) -> None:
        """Free `nbytes` (of this account), and serve the next in line."""
        nbytes = min(nbytes, self.capacity)
        if nbytes > self.in_use:
            raise RuntimeError(f"released {nbytes} bytes, only {self.in_use} are in use")
        self.in_use -= nbytes
        if account is not None:
            account.in_use -= nbytes
        self._grant()

    def keep(self, nbytes: int, *, account: Account | None = None) -> None:
        """Declare `nbytes` more of those in use as not released while others wait; negative: fewer.

        Without this, a waiter with a limit could wait forever for bytes that are kept.
        """
        self.kept += nbytes
        if account is not None:
            account.kept += nbytes
        self._grant()

    def has_room(self, nbytes: int) -> bool:
        """Return whether all memory, idle or in use, and `nbytes` more are within the capacity.

        An estimate, if this is not the loop's thread.
        """
        return self.in_use + self._unused() + nbytes <= self.capacity

    def make_way(self, account: Account | None = None) -> None:
        """Free idle memory, that of `account` last, while it and all in use exceed the capacity.

        For an account that was granted bytes or whose idle memory has grown.
        """
        for other in sorted(self.accounts, key=lambda other: other is account):
            over = self.in_use + self._unused() - self.capacity
            if over <= 0:
                return
            other.free_idle(over)

    def _unused(self) -> int:
        return sum([one.idle_nbytes + one.beyond_nbytes for one in self.accounts])

    def _must_wait(self, nbytes: int) -> bool:
        """Return whether `nbytes` cannot be free before kept bytes are released."""
        return nbytes > self.capacity - self.kept

    def _fits(self, nbytes: int, limit: int | None, account: Account | None) -> bool:
        if self.in_use + nbytes > self.capacity:
            return False
        user = self if account is None else account
        return limit is None or user.in_use - user.kept + nbytes <= max(limit, nbytes)

    def _take(self, nbytes: int, account: Account | None, extra: int) -> None:
        self.in_use += nbytes
        self.peak = max(self.peak, self.in_use)
        if account is not None:
            account.in_use += nbytes - extra

    def _grant(self) -> None:
        passed: list[_Waiter] = []
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.granted.done():
                continue  # cancelled; its task has not run since
            if self._fits(waiter.nbytes, waiter.limit, waiter.account):
                self._take(waiter.nbytes, waiter.account, waiter.extra)
                waiter.granted.set_result(None)
                continue
            passed.append(waiter)
            if not self._must_wait(waiter.nbytes):
                break
        self._waiters.extendleft(reversed(passed))
