"""From a request to its answer: shape, faults, handling, log."""

# Rule 1: once the whole of a request is there it is applied, whether its client still waits or not.
# Rule 2: latency comes first, then the effect, then the answer at once.

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from asyncckpt.testing.objectstore.buffers import Buffers
from asyncckpt.testing.objectstore.faults import Fault
from asyncckpt.testing.objectstore.http import Connection
from asyncckpt.testing.objectstore.requests import Logged, Request, Response, without_secrets
from asyncckpt.testing.objectstore.shaping import UNSHAPED, Shape, Shaper
from asyncckpt.testing.objectstore.state import Content


class Dialect(Protocol):
    """A protocol above HTTP."""

    def classify(self, request: Request) -> None:
        """Kind, bucket and key of the request are known."""
        ...

    async def handle(self, request: Request) -> Response:
        """The request has taken effect; its answer."""
        ...

    def error(self, request: Request, code: str) -> Response:
        """The answer that names an error."""
        ...

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """The answer of a fault."""
        ...


@dataclass(slots=True, eq=False)
class Traffic:
    """What came and went, over all listening ports but that for control.

    Attributes:
        log: of requests, in the order of their heads.
        faults: the script; faults happen to a request in its order.
        counts: requests by kind.
        statuses: answers by status.
        in_flight: requests whose head has come and whose answer has not ended.
        max_in_flight: most of them at one time.
        received_nbytes: of bodies.
        sent_nbytes: of bodies of answers.
        connections: how many were accepted.
        keep_log: whether requests are logged.
        errors: of the simulator itself, or of hooks.
    """

    faults: list[Fault]
    log: list[Logged] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    in_flight: int = 0
    max_in_flight: int = 0
    received_nbytes: int = 0
    sent_nbytes: int = 0
    requests: int = 0
    connections: int = 0
    keep_log: bool = True
    errors: list[Exception] = field(default_factory=list)

    def clear(self) -> None:
        """Nothing has happened yet; the faults remain, and count from the start."""
        self.log = []
        self.counts = Counter()
        self.statuses = Counter()
        self.max_in_flight = self.in_flight
        self.received_nbytes = self.sent_nbytes = self.requests = 0
        for fault in self.faults:
            fault.met = fault.happened = 0


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its way to its answer."""

    request: Request
    logged: Logged
    shape: Shape
    faults: list[Fault]
    early: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def is_refused_early(self) -> bool:
        """Whether it is answered, or not, without its body."""
        return any(fault.early and fault.replaces for fault in self.faults)


class Port:
    """Serves the connections of one listening port."""

    def __init__(
        self,
        name: str,
        dialect: Dialect,
        traffic: Traffic,
        shaper: Shaper | None,
        buffers: Buffers,
        group: asyncio.TaskGroup,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self._dialect = dialect
        self._traffic = traffic
        self._shaper = shaper
        self.buffers = buffers
        self._group = group
        self._loop = loop
        self._open: set[Connection] = set()
        self._current: dict[Connection, Exchange] = {}

    def connection(self) -> Connection:
        """What the listening socket makes for each client."""
        self._traffic.connections += 1
        return Connection(self, self._traffic.connections, self._loop)

    def close(self) -> None:
        """Every connection is cut."""
        for connection in list(self._open):
            connection.reset()

    # http.Served

    def connected(self, connection: Connection) -> None:
        """A client is there."""
        self._open.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """A client is gone; what it has sent completely goes on."""
        self._open.discard(connection)
        exchange = self._current.pop(connection, None)
        if exchange is not None and not exchange.logged.received_s:
            self._end(exchange.logged)  # the body never became complete

    def head(self, connection: Connection, request: Request) -> float | None:
        """The request is logged, its shape and faults are known; returns its bandwidth."""
        self._dialect.classify(request)
        traffic = self._traffic
        traffic.requests += 1
        traffic.counts[request.kind] += 1
        traffic.in_flight += 1
        traffic.max_in_flight = max(traffic.max_in_flight, traffic.in_flight)
        logged = Logged(
            traffic.requests,
            self.name,
            request.method,
            request.kind,
            request.bucket,
            request.key,
            request.query,
            without_secrets(request.headers.items()),
            connection.number,
            time.monotonic(),
        )
        if traffic.keep_log:
            traffic.log.append(logged)
        faults = [fault for fault in traffic.faults if fault.takes(self.name, request)]
        logged.faults = tuple(fault.name for fault in faults)
        shape = self._shaper.shape(request) if self._shaper is not None else UNSHAPED
        exchange = self._current[connection] = Exchange(request, logged, shape, faults)
        if exchange.is_refused_early:
            self._group.create_task(self._fail_early(connection, exchange))
        else:
            exchange.early = [
                self._group.create_task(self._before(fault, request))
                for fault in faults
                if fault.early
            ]
        return shape.put_bandwidth

    def complete(self, connection: Connection, request: Request) -> None:
        """The request is on its way to its effect and its answer."""
        exchange = self._current.pop(connection, None)
        if exchange is None:
            return
        exchange.logged.received_s = time.monotonic()
        exchange.logged.nbytes = len(request.body)
        self._traffic.received_nbytes += len(request.body)
        if exchange.is_refused_early:
            return  # its answer is on the way, or there is none
        self._group.create_task(self._exchange(connection, exchange))

    def failed(self, error: Exception) -> None:
        """The simulator raises it when it ends."""
        self._traffic.errors.append(error)

    # The way of a request

    async def _fail_early(self, connection: Connection, exchange: Exchange) -> None:
        logged = exchange.logged
        try:
            for fault in exchange.faults:
                if fault.early:
                    await fault.before(exchange.request)
                    if fault.replaces:
                        await self._fail(connection, exchange, fault)
                        break
            connection.close()
        except Exception as error:
            self.failed(error)
            connection.reset()
        finally:
            self._end(logged)

    async def _before(self, fault: Fault, request: Request) -> None:
        try:
            await fault.before(request)
        except Exception as error:
            self.failed(error)

    async def _exchange(self, connection: Connection, exchange: Exchange) -> None:
        logged, request, shape = exchange.logged, exchange.request, exchange.shape
        try:
            if shape.latency_s:
                await asyncio.sleep(shape.latency_s)
            for task in exchange.early:
                await task
            for fault in exchange.faults:
                if not fault.early:
                    await fault.before(request)
                if fault.replaces:
                    if fault.applied:
                        await self._apply(exchange)
                    await self._fail(connection, exchange, fault)
                    return
            if shape.refusal is not None:
                response = self._dialect.error(request, shape.refusal)
            else:
                response = await self._apply(exchange)
            await self._answer(connection, exchange, response)
        except Exception as error:
            self.failed(error)
            connection.reset()
        finally:
            self._end(logged)
            connection.next()

    async def _apply(self, exchange: Exchange) -> Response:
        request = exchange.request
        flips = [fault.flip for fault in exchange.faults if fault.flip is not None]
        response = await self._dialect.handle(request)
        changed = request.stored
        if changed is None and flips and response.body:
            changed = Content(bytearray(b"".join(response.body)))
            response.body = changed.segments
        if changed is not None:
            for flip in flips:
                changed.flip(flip)
        if response.status < 400:
            exchange.logged.applied_s = time.monotonic()
        return response

    async def _answer(self, connection: Connection, exchange: Exchange, response: Response) -> None:
        logged = exchange.logged
        stops = [
            stop
            for fault in exchange.faults
            for stop in (fault.truncate, fault.stall)
            if stop is not None
        ]
        logged.status = response.status
        sent = await connection.send(
            response,
            rate=exchange.shape.get_bandwidth,
            stop=min(stops) if stops else None,
        )
        logged.answered_nbytes = sent
        if any(fault.stall is not None for fault in exchange.faults):
            # An answer that was whole before leaves a connection that its client uses again.
            if sent < response.nbytes:
                await connection.wait_closed()
        elif stops:
            connection.close()

    async def _fail(self, connection: Connection, exchange: Exchange, fault: Fault) -> None:
        if fault.status is not None:
            response = self._dialect.failure(
                exchange.request, fault.status, fault.code, fault.message
            )
            if fault.retry_after_s is not None:
                after = {"Retry-After": f"{fault.retry_after_s:g}"}
                response.headers = response.headers | after  # which answers may share
            await self._answer(connection, exchange, response)
        elif fault.reset:
            connection.reset()
        elif fault.close:
            connection.close()
        else:
            await connection.wait_closed()

    def _end(self, logged: Logged) -> None:
        if not logged.ended_s:
            logged.ended_s = time.monotonic()
            traffic = self._traffic
            traffic.in_flight -= 1
            traffic.statuses[logged.status] += 1
            traffic.sent_nbytes += logged.answered_nbytes
