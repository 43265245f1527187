"""Scripted faults.

faults = [
    Fault(kind="put_object", number=3, status=503),  # the third PUT
    Fault(key="*/checkpoint.json", reset=True, applied=True),  # a lost response
    Fault(kind="get_object", number=0, flip=100),  # every GET
]
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tests.simulator.requests import Request

Hook = Callable[[Request], Awaitable[None] | None]


class Signal:
    """An event that is set once; any thread and any event loop may wait for it."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()

    @property
    def is_set(self) -> bool:
        """Whether it was set."""
        return self._future.done()

    def set(self) -> None:
        """Wake all that wait."""
        with contextlib.suppress(InvalidStateError):
            self._future.set_result(None)

    async def wait(self) -> None:
        """Wait until it is set."""
        own: Future[None] = Future()  # a cancelled waiter must not cancel the signal

        def wake(_: Future[None]) -> None:
            with contextlib.suppress(InvalidStateError):
                own.set_result(None)

        self._future.add_done_callback(wake)
        await asyncio.wrap_future(own)

    def wait_blocking(self, timeout_s: float = 30.0) -> None:
        """Wait until it is set, without an event loop.

        Raises:
            TimeoutError: not within `timeout_s`.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"nothing was signalled within {timeout_s} s") from None


class Gate:
    """Holds requests: sets `reached`, and lets them go on after `release`."""

    def __init__(self) -> None:
        self.reached = Signal()
        self.released = Signal()

    def release(self) -> None:
        """Let the requests that wait here go on, and those to come."""
        self.released.set()

    async def hold(self) -> None:
        """Wait until the gate is released. Called by the server."""
        self.reached.set()
        await self.released.wait()


@dataclass(slots=True, eq=False)
class Fault:
    """A fault that happens to one request, or to several.

    Requests that fit all of `kind`, `key` and `when` are counted from 1, and the fault happens to
    `times` of them from the one with `number` on.

    In this order: `gate` holds the request, `hook` is called, then the request takes effect if
    `applied`, and then one of `status`, `reset`, `close`, `hang` happens instead of its response.
    Without any of those four it takes effect and is answered, changed by `flip`, `truncate` or
    `stall`.

    Attributes:
        kind: see `requests.Kind`, or None for all; or a tuple of kinds.
        key: shell pattern whose ``*`` matches slashes too, or None.
        when: called last with the request; decides whether it counts.
        number: first request it happens to; 0 for every one.
        times: to how many requests it happens.
        early: it happens after the head, before the body is received. With `status`, `reset`,
            `close` or `hang` the body is never received.
        gate: holds the request.
        hook: called on the server's thread; its result is awaited if it is awaitable, like that
            of `asyncio.sleep`, which delays the request.
        status: sent instead of the true response.
        code: of that response's error; by default the usual one of the status.
        message: of that response's error.
        page: sent as HTML with `status`, as a proxy or a login page answers.
        retry_after_s: sent as `Retry-After`.
        reset: the connection is reset.
        close: the connection is closed in order, without a response.
        hang: there is no response; ends when the client closes the connection.
        applied: the request takes effect before; the response is lost.
        flip: the lowest bit of the byte with this offset is changed, in contents as stored or in
            the body of a response.
        truncate: the response announces its whole body, but the connection is closed after this
            many bytes of it.
        stall: after this many bytes of its body the response stops until the client closes the
            connection; shorter ones are whole.
        name: for the log.
        met: how many requests counted so far.
        happened: to how many of them it happened.
    """

    kind: str | tuple[str, ...] | None = None
    key: str | None = None
    when: Callable[[Request], bool] | None = None
    number: int = 1
    times: int = 1
    early: bool = False
    gate: Gate | None = None
    hook: Hook | None = None
    status: int | None = None
    code: str | None = None
    message: str = "A scripted fault."
    page: bytes | None = None
    retry_after_s: float | None = None
    reset: bool = False
    close: bool = False
    hang: bool = False
    applied: bool = False
    flip: int | None = None
    truncate: int | None = None
    stall: int | None = None
    name: str = "fault"
    met: int = field(default=0, init=False)
    happened: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.early and self.applied:
            raise ValueError("an early fault is not applied: a request takes effect after its body")

    @property
    def replaces(self) -> bool:
        """Whether the true response never comes."""
        return self.status is not None or self.reset or self.close or self.hang

    def fits(self, request: Request) -> bool:
        """Return whether the request counts."""
        kinds = (self.kind,) if isinstance(self.kind, str) else self.kind
        return (
            (kinds is None or request.kind in kinds)
            and (self.key is None or fnmatchcase(request.key, self.key))
            and (self.when is None or self.when(request))
        )

    def takes(self, request: Request) -> bool:
        """Count the request; return whether the fault happens to it."""
        if not self.fits(request):
            return False
        self.met += 1
        if self.number and not self.number <= self.met < self.number + self.times:
            return False
        self.happened += 1
        return True

    async def before(self, request: Request) -> None:
        """Pass gate and hook."""
        if self.gate is not None:
            await self.gate.hold()
        if self.hook is not None:
            waiting = self.hook(request)
            if inspect.isawaitable(waiting):
                await waiting
