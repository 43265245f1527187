"""Sending of one request: permit, deadline, tries, and measurements."""

# Rule 1: a request that waits before its next try holds no permit.
# Rule 2: the coroutine that takes a permit releases it, not a task that may never have run.
# Rule 3: only answered tries are measured, without their time in the queue.
# Rule 4: `exists` and `conflict` answer a condition. A server that gives these answers to a request
#   without a condition is treated as `unavailable`.
# Rule 5: a service stores a body once it has its last byte, whether or not the client still
#   listens. So when a save is cancelled, its tries that send bodies get LANDING_S in all to finish:
#   objects that a failed save removes must not land after the removal. An engine that is shut down
#   does not wait that long. (test_a_body_on_its_way_lands_before_it_is_removed)

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sized
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from asyncckpt.flow.limiter import Limiter, Permit
from asyncckpt.flow.shield import troubled, uninterrupted
from asyncckpt.log import logger
from asyncckpt.stores.objects.clients.client import RETRYABLE, Kind, RequestError
from asyncckpt.stores.objects.requests.concurrency import ConcurrencyController
from asyncckpt.stores.objects.requests.hedge import race
from asyncckpt.stores.objects.requests.policy import RequestPolicy

T = TypeVar("T")

Direction = Literal["put", "get"]

LONGEST = 8
"""Maximum deadline of a try after timeouts, as a multiple of the first try's deadline."""

LANDING_S = 1.0
"""Total time that cancelled tries of one save may continue to send bodies, since a save that fails
cancels one after the other."""

LOOK_S = 0.1
"""Longest interval between checks of whether a transfer is slow (the estimate changes while it
runs, above all in a process's first transfers), and of whether another try is still wanted."""

SILENT_S = 5.0
"""Time limit of a cleanup without any answer from the store, a tenth if the last one got none: a
caller who set a deadline does not wait for minutes, and garbage collection removes the rest."""


class Landing:
    """The time that a save's cancelled tries get together to finish sending bodies."""

    def __init__(self) -> None:
        self._end_s: float | None = None

    def left_s(self) -> float:
        """Return how long a try that is cancelled now may continue."""
        now_s = asyncio.get_running_loop().time()
        if self._end_s is None:
            self._end_s = now_s + LANDING_S
        return max(0.0, self._end_s - now_s)


@dataclass(slots=True, eq=False)
class Request(Generic[T]):
    """A request, and what is known of its tries.

    Attributes:
        call: makes one try.
        direction: of a transfer, which is measured; None for requests without such data.
        nbytes: length of the body or of the range.
        hedged: a slow transfer may be hedged by another `call()`.
        deadline_s: seconds that the first try gets once it has its permit; 0 for the policy's.
        conditional: it has a condition, which may not hold.
        retried: failures after which there is another try.
        again: called before every try but the first; False ends the tries with `exists`.
        wanted: polled while a try waits; False ends the tries with `timeout`.
        landing: of the save that it belongs to; by default its own.
        failed: number of tries that failed.
        abandoned: numbers of the tries that timed out; the client may still be sending their body.
        begun_s: when the current try began.
        unwanted: its caller was cancelled.
    """

    call: Callable[[], Awaitable[T]]
    direction: Direction | None = None
    nbytes: int = 0
    hedged: bool = False
    deadline_s: float = 0.0
    conditional: bool = False
    retried: frozenset[Kind] = RETRYABLE
    again: Callable[[], Awaitable[bool]] | None = None
    wanted: Callable[[], bool] | None = None
    landing: Landing | None = None
    failed: int = 0
    abandoned: set[int] = field(default_factory=set)
    begun_s: float = 0.0
    unwanted: bool = False

    def moved_nbytes(self, answer: T) -> int:
        """Return the length of the body, which for a read may be less than was requested."""
        return len(answer) if self.direction == "get" and isinstance(answer, Sized) else self.nbytes


class Sender:
    """Sends the requests of one store.

    Attributes:
        limiter: window of requests in flight, which shrinks when the server throttles.
        url: URL of the client's root.
        policy: deadlines, tries, streams and hedges.
        controllers: concurrency controller of each direction.
        answers: number of requests answered so far, with success or error.
    """

    def __init__(self, url: str, policy: RequestPolicy, rng: random.Random) -> None:
        self.limiter = Limiter(policy.ceiling)
        self.controllers: dict[Direction, ConcurrencyController] = {
            "put": ConcurrencyController(policy),
            "get": ConcurrencyController(policy),
        }
        self.answers = 0
        self._silent_at = -1  # `answers` at the end of a cleanup without any
        self.url = url
        self.policy = policy
        self._rng = rng

    def fix_streams(self, direction: Direction, streams: int | None) -> None:
        """Fix the number of transfers in one direction; None lets the tuner decide again."""
        self.controllers[direction].fix(streams)
        fixed = sum(controller.fixed or 0 for controller in self.controllers.values())
        self.limiter.ceiling = max(self.policy.ceiling, fixed)

    @contextlib.asynccontextmanager
    async def cleaning_up(self, usual_s: float) -> AsyncIterator[None]:
        """Limit the block to `usual_s`, and to `SILENT_S` without any answer from the store.

        Raises:
            TimeoutError: the block was cancelled at one of these limits.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(usual_s) as scope:
            timer: asyncio.TimerHandle

            def look(seen: int) -> None:
                nonlocal timer
                if self.answers != seen:
                    timer = loop.call_later(SILENT_S, look, self.answers)
                elif not scope.expired():
                    self._silent_at = seen
                    scope.reschedule(loop.time())

            limit_s = SILENT_S / 10 if self.answers == self._silent_at else SILENT_S
            timer = loop.call_later(limit_s, look, self.answers)
            try:
                yield
            finally:
                timer.cancel()

    async def send(self, this: Request[T]) -> T:
        """Return the result of the first try that succeeds."""
        this.deadline_s = this.deadline_s or self.policy.deadline_s(this.nbytes)
        spent_s = 0.0
        while True:
            if this.failed and this.again is not None and not await this.again():
                raise RequestError("exists", "another object was put there since the last try")
            try:
                return await self._tried(this)
            except RequestError as error:
                this.failed += 1
                if not this.conditional and error.kind in ("exists", "conflict"):
                    error.kind = "unavailable"
                if error.kind not in this.retried:
                    raise
                spent_s += self._now() - this.begun_s
                wait_s = self.policy.retry.wait_s(
                    this.failed,
                    spent_s,
                    self._rng,
                    asked_s=error.retry_after_s or 0.0,
                    deadline_s=this.deadline_s,
                )
                if wait_s is None:
                    error.detail += f" (tried {this.failed} times in {spent_s:.1f} s)"
                    raise
                spent_s += wait_s
                troubled(f"{self.url}: {error}")
                logger.info(
                    "%s: %s; try %d of %d follows in %.2f s",
                    self.url, error, this.failed + 1, self.policy.retry.tries, wait_s,
                )  # fmt: skip
            await self._wait(wait_s, this.wanted)

    async def _wait(self, wait_s: float, wanted: Callable[[], bool] | None) -> None:
        if wanted is None:
            return await asyncio.sleep(wait_s)
        end_s = self._now() + wait_s
        while wanted() and (left_s := end_s - self._now()) > 0.0:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(min(left_s, LOOK_S))
        if not wanted():
            raise RequestError(
                "timeout", "the save was cancelled, or its deadline passed, before the next try"
            )

    async def _tried(self, this: Request[T]) -> T:
        """Send one try, as soon as it has its permits."""
        if this.direction is None:
            with await self.limiter.acquire() as permit:
                this.begun_s = self._now()
                return await self._sent(this, permit)
        controller = self.controllers[this.direction]
        with await controller.gate.acquire(), await self.limiter.acquire() as permit:
            this.begun_s = self._now()
            send = self._raced if this.hedged else self._measured
            sending = send(this, permit, controller)
            if this.direction == "get":
                return await sending

            def cancelled() -> float:
                this.unwanted = True
                return (this.landing or Landing()).left_s()

            return await uninterrupted(sending, grace_s=cancelled)

    async def _raced(
        self, this: Request[T], permit: Permit, controller: ConcurrencyController
    ) -> T:
        """Send one try of a transfer, hedged if it is slow and a hedge is allowed."""
        extra: Permit | None = None

        async def run(permit: Permit) -> tuple[T, Permit]:
            return await self._measured(this, permit, controller), permit

        def second() -> Coroutine[Any, Any, tuple[T, Permit]] | float:
            nonlocal extra
            left_s = controller.slow_s(this.nbytes) - (self._now() - this.begun_s)
            if left_s > 0.0:
                return min(left_s, LOOK_S)
            if this.unwanted or (found := self.limiter.try_acquire()) is None:
                return LOOK_S
            if not controller.take_hedge():
                found.release()
                return LOOK_S
            extra = found
            return run(found)

        controller.earn_hedge()
        this.begun_s = self._now()  # the loop may have been busy since the permit
        try:
            answer, winner = await race(run(permit), second)
        finally:
            if extra is not None:
                extra.release()
                controller.end_hedge()
        if winner is not permit:
            # The slow request would have taken even longer. If it did not count, the estimate
            # would lack slow requests, and ever faster ones would be hedged.
            controller.estimate.observe(this.moved_nbytes(answer), self._now() - this.begun_s)
        return answer

    async def _measured(
        self, this: Request[T], permit: Permit, controller: ConcurrencyController
    ) -> T:
        """Return the answer to one request of a transfer, and measure it."""
        begun_s = self._now()
        moved = 0
        controller.tuner.began(begun_s)
        try:
            answer = await self._sent(this, permit)
            moved = this.moved_nbytes(answer)
            controller.estimate.observe(moved, self._now() - begun_s)
            return answer
        finally:
            controller.ended(self._now(), moved)

    async def _sent(self, this: Request[T], permit: Permit) -> T:
        """Return the answer to one request, which gets twice as long after every timeout."""
        late = False
        deadline_s = this.deadline_s * min(2 ** len(this.abandoned), LONGEST)
        try:
            async with asyncio.timeout(deadline_s):
                answer = await this.call()
        except TimeoutError:
            late = True
            this.abandoned.add(this.failed)
            self.limiter.throttled(permit)
        except RequestError as error:
            self.answers += error.kind not in ("connection", "timeout")
            if error.kind == "timeout":
                this.abandoned.add(this.failed)
            if error.kind in ("throttled", "timeout") and not error.concerns_one_object:
                self.limiter.throttled(permit)
            raise
        if late:
            # Raised outside of `except` to avoid a reference cycle: TimeoutError, its timeout, the
            # task of this request, the task's error.
            raise RequestError("timeout", f"no answer within {deadline_s:g} s")
        self.answers += 1
        self.limiter.succeeded(permit)
        return answer

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
