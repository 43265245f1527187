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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from asyncckpt.flow.limiter import Limiter, Permit
from asyncckpt.flow.shield import uninterrupted
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
"""Time limit of a cleanup without any answer from the store: a caller who set a deadline does not
wait for minutes, and garbage collection removes the rest later."""


@dataclass(slots=True, eq=False)
class Try(Generic[T]):
    """One try of a request.

    Attributes:
        call: makes the request.
        direction: of a transfer, which is measured; None for requests without such data.
        nbytes: length of the body or of the range.
        hedged: a slow transfer may be hedged by another `call()`.
        deadline_s: seconds that it may take once it has its permit.
        begun_s: when it got the permit.
        abandoned: it timed out, and the client may still be sending its body.
        unwanted: its caller was cancelled.
    """

    call: Callable[[], Awaitable[T]]
    direction: Direction | None
    nbytes: int
    hedged: bool
    deadline_s: float
    begun_s: float = 0.0
    abandoned: bool = False
    unwanted: bool = False

    def moved_nbytes(self, answer: T) -> int:
        """Return the length of the body, which for a read may be less than was requested."""
        return len(answer) if self.direction == "get" and isinstance(answer, Sized) else self.nbytes


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
                    scope.reschedule(loop.time())

            timer = loop.call_later(SILENT_S, look, self.answers)
            try:
                yield
            finally:
                timer.cancel()

    async def send(
        self,
        call: Callable[[], Awaitable[T]],
        *,
        direction: Direction | None = None,
        nbytes: int = 0,
        hedged: bool = False,
        deadline_s: float | None = None,
        conditional: bool = False,
        retried: frozenset[Kind] = RETRYABLE,
        again: Callable[[], Awaitable[bool]] | None = None,
        wanted: Callable[[], bool] | None = None,
        failed: list[Try[T]] | None = None,
        landing: Landing | None = None,
    ) -> T:
        """Return the result of the first try that succeeds.

        Args:
            call: makes one request.
            direction: as `Try.direction`.
            nbytes: as `Try.nbytes`; gives the deadline unless `deadline_s` does.
            hedged: as `Try.hedged`.
            deadline_s: seconds that the first try gets.
            conditional: the request has a condition, which may not hold.
            retried: failures after which there is another try.
            again: called before every try but the first; False ends the tries with `exists`.
            wanted: polled while a try waits; False ends the tries with `timeout`.
            failed: receives the tries that failed.
            landing: of the save that the request belongs to; by default its own.
        """
        failed = [] if failed is None else failed
        base_s = self.policy.deadline_s(nbytes) if deadline_s is None else deadline_s
        spent_s = 0.0
        while True:
            if failed and again is not None and not await again():
                raise RequestError("exists", "another object was put there since the last try")
            abandoned = sum(this.abandoned for this in failed)
            deadline_s = base_s * min(2**abandoned, LONGEST)
            this = Try(call, direction, nbytes, hedged, deadline_s)
            try:
                return await self._tried(this, landing or Landing())
            except RequestError as error:
                failed.append(this)
                if not conditional and error.kind in ("exists", "conflict"):
                    error.kind = "unavailable"
                if error.kind not in retried:
                    raise
                spent_s += self._now() - this.begun_s
                wait_s = self.policy.retry.wait_s(
                    len(failed),
                    spent_s,
                    self._rng,
                    asked_s=error.retry_after_s or 0.0,
                    deadline_s=base_s,
                )
                if wait_s is None:
                    error.detail += f" (tried {len(failed)} times in {spent_s:.1f} s)"
                    raise
                spent_s += wait_s
                logger.info(
                    "%s: %s; try %d of %d follows in %.2f s",
                    self.url, error, len(failed) + 1, self.policy.retry.tries, wait_s,
                )  # fmt: skip
            await self._wait(wait_s, wanted)

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

    async def _tried(self, this: Try[T], landing: Landing) -> T:
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
                return landing.left_s()

            return await uninterrupted(sending, grace_s=cancelled)

    async def _raced(self, this: Try[T], permit: Permit, controller: ConcurrencyController) -> T:
        """Send one try of a transfer, hedged if it is slow and a hedge is allowed."""
        extra: Permit | None = None
        answered: set[Permit] = set()

        async def run(permit: Permit) -> T:
            answer = await self._measured(this, permit, controller)
            answered.add(permit)
            return answer

        def left_s() -> float:
            return controller.slow_s(this.nbytes) - (self._now() - this.begun_s)

        def looks_s() -> Iterator[float]:
            while True:
                left = left_s()
                yield left if 0.0 < left < LOOK_S else LOOK_S

        def second() -> Coroutine[Any, Any, T] | None:
            nonlocal extra
            if this.unwanted or left_s() > 0.0:
                return None
            found = self.limiter.try_acquire()
            if found is None or not controller.take_hedge():
                if found is not None:
                    found.release()
                return None
            extra = found
            return run(found)

        controller.earn_hedge()
        try:
            answer = await race(lambda: run(permit), looks_s(), second)
        finally:
            if extra is not None:
                extra.release()
                controller.end_hedge()
        if permit not in answered:
            # The slow request would have taken even longer. If it did not count, the estimate
            # would lack slow requests, and ever faster ones would be hedged.
            controller.estimate.observe(this.moved_nbytes(answer), self._now() - this.begun_s)
        return answer

    async def _measured(self, this: Try[T], permit: Permit, controller: ConcurrencyController) -> T:
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

    async def _sent(self, this: Try[T], permit: Permit) -> T:
        """Return the answer to one request, which gets `this.deadline_s`."""
        late = False
        try:
            async with asyncio.timeout(this.deadline_s):
                answer = await this.call()
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
            # Raised outside of `except` to avoid a reference cycle: TimeoutError, its timeout, the
            # task of this request, the task's error.
            raise RequestError("timeout", f"no answer within {this.deadline_s:g} s")
        self.answers += 1
        self.limiter.succeeded(permit)
        return answer

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
