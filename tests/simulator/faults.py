"""What goes wrong, by script.

faults = [
    Fault(kind="put_object", number=3, status=503),  # the third PUT
    Fault(key="*/checkpoint.json", reset=True, applied=True),  # a lost answer
    Fault(kind="get_object", number=0, flip=100),  # every GET
]
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from asyncckpt.testing.objectstore.requests import Request


class Signal:
    """Is set once; any thread and any event loop may wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self._is_set = False

    @property
    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Everybody who waits goes on."""
        with self._lock:
            self._is_set = True
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            with contextlib.suppress(RuntimeError):  # the loop of a waiter has ended
                wake()

    def _add(self, waker: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_set:
                self._wakers.append(waker)
                return
        waker()

    async def wait(self) -> None:
        """It was set."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def wake_soon() -> None:
            loop.call_soon_threadsafe(wake)

        self._add(wake_soon)
        await future

    def wait_blocking(self, timeout_s: float = 30.0) -> None:
        """It was set. For tests without an event loop.

        Raises:
            TimeoutError: not within `timeout_s`.
        """
        event = threading.Event()
        self._add(event.set)
        if not event.wait(timeout_s):
            raise TimeoutError(f"nothing was signalled within {timeout_s} s")


class Gate:
    """Holds requests: it sets `reached`, and they go on once `release` was called."""

    def __init__(self) -> None:
        self.reached = Signal()
        self.released = Signal()

    def release(self) -> None:
        """Requests that wait here, and those to come, go on."""
        self.released.set()

    async def hold(self) -> None:
        """The gate was released. Called by the server."""
        self.reached.set()
        await self.released.wait()


Hook = Callable[[Request], Awaitable[None] | None]


@dataclass(slots=True, eq=False)
class Fault:
    """Something that happens to one request, or to several.

    Which: those that fit all of `service`, `kind`, `method`, `bucket`, `key` and `when` are counted
    from 1, and the fault happens to `times` of them from the one with `number` on.

    What, in this order: `gate` and `delay_s` hold the request, `hook` is called, then the request
    takes effect if `applied`, and then one of `status`, `reset`, `hang` happens instead of its
    answer. Without any of those three it takes effect and is answered, changed by `flip`,
    `truncate` or `stall`.

    Attributes:
        service: ``"s3"`` or ``"gcs"``, or None for both.
        kind: see `requests.Kind`, or None for all; or a tuple of kinds.
        method: of HTTP, or None.
        bucket: name, or None.
        key: pattern as of a shell, in which ``*`` stands for slashes too, or None.
        when: called with the request; has the last word on whether it counts.
        number: first one it happens to; 0 for every one.
        times: how many of them.
        early: it happens when the head has come, before the body. With `status`, `reset`, `close`
            or `hang` the body is not taken; else the request goes on once it is there.
        gate: the request waits here.
        delay_s: the request waits so long.
        hook: called on the server's thread, and awaited if it returns something to await.
        status: of the answer instead of the true one.
        code: of that answer's error; by default the usual one of the status.
        message: of that answer's error.
        retry_after_s: sent as `Retry-After`.
        reset: the connection is reset.
        close: the connection is closed in order, without an answer.
        hang: there is never an answer; ends when the client closes the connection.
        applied: the request takes effect before; the answer is lost.
        flip: in an answer with contents, or in contents as stored, the lowest bit of the byte with
            this offset is changed.
        truncate: the answer announces all of its body; the connection is closed after this many
            bytes of it.
        stall: after this many bytes of its body nothing more of the answer comes, until the client
            closes the connection; shorter ones are whole.
        name: for the log.
        met: how many requests counted so far.
        happened: to how many of them it happened.
    """

    service: str | None = None
    kind: str | tuple[str, ...] | None = None
    method: str | None = None
    bucket: str | None = None
    key: str | None = None
    when: Callable[[Request], bool] | None = None
    number: int = 1
    times: int = 1
    early: bool = False
    gate: Gate | None = None
    delay_s: float = 0.0
    hook: Hook | None = None
    status: int | None = None
    code: str | None = None
    message: str = "A scripted fault."
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
            raise ValueError("a request does not take effect before its body has come")

    @property
    def replaces(self) -> bool:
        """Whether the true answer never comes."""
        return self.status is not None or self.reset or self.close or self.hang

    def fits(self, service: str, request: Request) -> bool:
        """Whether the request counts."""
        kinds = (self.kind,) if isinstance(self.kind, str) else self.kind
        return (
            (self.service is None or self.service == service)
            and (kinds is None or request.kind in kinds)
            and (self.method is None or self.method == request.method)
            and (self.bucket is None or self.bucket == request.bucket)
            and (self.key is None or fnmatchcase(request.key, self.key))
            and (self.when is None or self.when(request))
        )

    def takes(self, service: str, request: Request) -> bool:
        """Count the request; returns whether the fault happens to it."""
        if not self.fits(service, request):
            return False
        self.met += 1
        if self.number and not self.number <= self.met < self.number + self.times:
            return False
        self.happened += 1
        return True

    async def before(self, request: Request) -> None:
        """Gate, delay and hook are behind the request."""
        if self.gate is not None:
            await self.gate.hold()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.hook is not None:
            waiting = self.hook(request)
            if inspect.isawaitable(waiting):
                await waiting
