"""How a request is sent: its permit, its deadline, its tries, and what is learnt from it."""

# Rule 1: who waits before the next try holds no permit.
# Rule 2: whoever takes a permit releases it himself, and not a task that may never have run.
# Rule 3: only tries that were answered are measured, and time in line does not count.

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from asyncckpt.flow.climb import Climb, Meter
from asyncckpt.flow.hedge import HedgeBudget, first
from asyncckpt.flow.limiter import Limiter, Permit
from asyncckpt.flow.link import Direction, Link
from asyncckpt.flow.retry import Patience, Tries
from asyncckpt.stores.objects.client import RETRYABLE, Kind, RequestError
from asyncckpt.stores.objects.policy import RequestPolicy

T = TypeVar("T")

logger = logging.getLogger(__name__)

REPEATED: frozenset[Kind] = RETRYABLE - {"conflict"}
"""What is tried again unless a request says otherwise."""

FIRST_TRIES = 4
"""Tries of a request to a server that no request has reached yet: two seconds."""

LONGEST = 8
"""Times the deadline of the first try that a try gets at most, after others ran out of time."""


@dataclass(slots=True, eq=False)
class Try:
    """One try of a request.

    Attributes:
        number: 0 for the first.
        deadline_s: seconds that it may take once it has its permit.
        begun_s: when it got it.
        abandoned: it ran out of time: the client may still be sending its body.
        kind: why it failed.
    """

    number: int
    deadline_s: float
    begun_s: float = 0.0
    abandoned: bool = False
    kind: Kind | None = None


_DIRECTIONS: tuple[Direction, ...] = ("put", "get")


class Sender:
    """Sends the requests of one store.

    Attributes:
        link: latency and bandwidth as measured.
        limiter: the window of requests in flight.
        hedges: second transfers, either way.
        answers: how many requests were answered, in whatever way.
    """

    def __init__(self, url: str, policy: RequestPolicy, rng: random.Random) -> None:
        self.link = Link()
        self.limiter = Limiter(policy.ceiling)
        self.hedges: dict[Direction, HedgeBudget] = {
            direction: HedgeBudget(
                share=policy.hedge_share, burst=policy.hedge_burst, at_once=policy.hedges_at_once
            )
            for direction in _DIRECTIONS
        }
        self.answers = 0
        self._url = url
        self._policy = policy
        self._rng = rng
        self._lanes: dict[Direction, _Lane] = {"put": _Lane(policy), "get": _Lane(policy)}

    def climb(self, direction: Direction) -> Climb:
        """How many transfers this way are worth while."""
        return self._lanes[direction].climb

    def fix_streams(self, direction: Direction, streams: int | None) -> None:
        """So many transfers this way may be in flight; None finds out again how many."""
        self._lanes[direction].fix(streams)
        fixed = sum(lane.fixed or 0 for lane in self._lanes.values())
        self.limiter.ceiling = max(self._policy.ceiling, fixed)

    async def asked(
        self, call: Callable[[], Awaitable[T]], *, deadline_s: float | None = None
    ) -> T:
        return await self.tried(lambda this: self.bounded(this, call), deadline_s=deadline_s)

    async def tried(
        self,
        send: Callable[[Try], Awaitable[T]],
        *,
        nbytes: int = 0,
        deadline_s: float | None = None,
        retried: frozenset[Kind] = REPEATED,
        failed: list[Try] | None = None,
    ) -> T:
        """The result of the first try that succeeds; those that did not are put into `failed`."""
        failed = [] if failed is None else failed
        base_s = self._policy.deadline_s(nbytes) if deadline_s is None else deadline_s
        tries: Tries | None = None
        while True:
            abandoned = sum(this.abandoned for this in failed)
            this = Try(len(failed), base_s * min(2**abandoned, LONGEST))
            try:
                return await send(this)
            except RequestError as error:
                this.kind = error.kind
                failed.append(this)
                if error.kind not in retried:
                    raise
                if tries is None:
                    tries = Tries(self._patience(error.kind), self._rng)
                wait_s = tries.next_wait_s(
                    self._now() - this.begun_s,
                    asked_s=error.retry_after_s,
                    deadline_s=base_s,
                )
                if wait_s is None:
                    raise _given_up(error, tries) from error
                logger.info(
                    "%s: %s; try %d of %d follows in %.2f s",
                    self._url, error, len(failed) + 1, self._policy.patience.tries, wait_s,
                )  # fmt: skip
            await asyncio.sleep(wait_s)

    def _patience(self, kind: Kind) -> Patience:
        """How often a request is tried that failed like this."""
        patience = self._policy.patience
        if kind == "connection" and not self.answers:
            # More likely a name that is misspelt than a network that will be back.
            return replace(patience, tries=min(patience.tries, FIRST_TRIES))
        return patience

    async def bounded(self, this: Try, call: Callable[[], Awaitable[T]]) -> T:
        """One request that moves no data worth measuring."""
        with await self.limiter.acquire() as permit:
            this.begun_s = self._now()
            return await self._sent(this, permit, call)

    async def transfer(
        self, this: Try, direction: Direction, nbytes: int, call: Callable[[], Awaitable[T]]
    ) -> T:
        """One request that moves `nbytes`."""
        lane = self._lanes[direction]
        with await lane.gate.acquire(), await self.limiter.acquire() as permit:
            this.begun_s = self._now()
            return await self._measured(this, permit, direction, nbytes, call)

    async def raced(
        self,
        this: Try,
        direction: Direction,
        nbytes: int,
        start: Callable[[int], Awaitable[T]],
    ) -> T:
        """One transfer, raced by a second one where it is slow and a request may be added at once.

        `start(0)` makes the first request, `start(1)` the second one.
        """
        hedges = self.hedges[direction]
        extra: Permit | None = None
        answered: set[int] = set()

        async def run(number: int, permit: Permit) -> T:
            answer = await self._measured(this, permit, direction, nbytes, partial(start, number))
            answered.add(number)
            return answer

        def second() -> Coroutine[Any, Any, T] | None:
            nonlocal extra
            permit = self.limiter.try_acquire()
            if permit is None or not hedges.take():
                if permit is not None:
                    permit.release()
                return None
            extra = permit
            return run(1, permit)

        with await self._lanes[direction].gate.acquire(), await self.limiter.acquire() as permit:
            this.begun_s = self._now()
            hedges.earn()
            try:
                answer = await first(
                    partial(run, 0, permit), self._slow_s(direction, nbytes), second
                )
            finally:
                if extra is not None:
                    extra.release()
                    hedges.give_back()
            if 0 not in answered:
                # It would have taken longer still; without it slow ones would seem not to exist,
                # and ever faster ones be raced.
                moved = len(answer) if direction == "get" and isinstance(answer, Sized) else nbytes
                self.link.observe(direction, moved, self._now() - this.begun_s)
            return answer

    def _slow_s(self, direction: Direction, nbytes: int) -> float:
        """Seconds after which a transfer of `nbytes` is slow."""
        policy = self._policy
        usual_s = self.link.toward(direction).quantile_s(nbytes, policy.hedge_quantile)
        if usual_s is None:
            return policy.hedge_cold_s + nbytes / policy.hedge_cold_nbytes_per_s
        return max(policy.hedge_min_s, policy.hedge_factor * usual_s)

    async def _measured(
        self,
        this: Try,
        permit: Permit,
        direction: Direction,
        nbytes: int,
        call: Callable[[], Awaitable[T]],
    ) -> T:
        """The answer to one request that moves `nbytes`, which the estimates hear of."""
        lane = self._lanes[direction]
        begun_s = self._now()
        moved = 0
        lane.began(begun_s)
        try:
            answer = await self._sent(this, permit, call)
            moved = nbytes
            if direction == "get" and isinstance(answer, Sized):
                moved = len(answer)  # what was asked for may end past the object's end
            self.link.observe(direction, moved, self._now() - begun_s)
            return answer
        finally:
            lane.ended(self._now(), moved)

    async def _sent(self, this: Try, permit: Permit, call: Callable[[], Awaitable[T]]) -> T:
        """The answer to one request, which it gets `this.deadline_s` for."""
        late = False
        try:
            async with asyncio.timeout(this.deadline_s):
                answer = await call()
        except TimeoutError:
            this.abandoned = late = True
            self.limiter.throttled(permit)
        except RequestError as error:
            self.answers += error.kind not in ("connection", "timeout")
            if error.kind == "timeout":
                this.abandoned = True
            if error.kind in ("throttled", "timeout") and not error.concerns_one_object:
                self.limiter.throttled(permit)
            raise
        if late:
            # Not inside `except`: a TimeoutError holds its timeout, and that the task of this
            # request, which holds the error that it has ended with.
            raise RequestError("timeout", f"no answer within {this.deadline_s:g} s")
        self.answers += 1
        self.limiter.succeeded(permit)
        return answer

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class _Lane:
    """The transfers in one direction: how many there may be, and what they carry together."""

    __slots__ = ("_meter", "_policy", "climb", "fixed", "gate")

    def __init__(self, policy: RequestPolicy) -> None:
        self._policy = policy
        self._meter = Meter()
        self.climb = Climb(policy.streams, policy.max_streams)
        self.fixed: int | None = None
        self.gate = Limiter(self.climb.streams)

    def fix(self, streams: int | None) -> None:
        self.fixed = streams
        self.gate.ceiling = self.climb.streams if streams is None else streams

    def began(self, now_s: float) -> None:
        self._meter.began(now_s)

    def ended(self, now_s: float, nbytes: int) -> None:
        interval = self._meter.ended(now_s, nbytes)
        if interval is not None and self.fixed is None:
            self.climb.observe(interval)
            self.gate.ceiling = self.climb.streams


def _given_up(error: RequestError, tries: Tries) -> RequestError:
    return RequestError(
        error.kind,
        f"{error.detail} (tried {tries.failed} times in {tries.spent_s:.1f} s)",
        status=error.status,
        retry_after_s=error.retry_after_s,
    )
