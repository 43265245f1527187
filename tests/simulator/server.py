"""The way of a request to its response: log, shape, faults, handling."""

# Rule 1: once the whole of a request is there it is applied, whether its client still waits or not.
# Rule 2: latency comes first, then the effect, then the response at once.

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.simulator.dialects.service import Dialect
from tests.simulator.faults import Fault
from tests.simulator.http import BadRequest, Buffers, Connection
from tests.simulator.profiles import Shaper
from tests.simulator.requests import Request, Response
from tests.simulator.state import Content


@dataclass(slots=True)
class Stats:
    """Counters since the simulator began or was reset, and what it stores.

    Attributes:
        requests: how many came.
        by_kind: of them by kind.
        by_status: responses by status; 0 for none.
        received_nbytes: of bodies.
        sent_nbytes: of bodies of responses.
        in_flight: requests whose head has come and whose response has not ended.
        max_in_flight: most of them at one time.
        connections: accepted since the simulator began.
        objects: stored now.
        stored_nbytes: their bytes.
        uploads: open now.
        cpu_s: CPU time of the simulator's process.
    """

    requests: int = 0
    by_kind: dict[str, int] = field(default_factory=Counter)
    by_status: dict[int, int] = field(default_factory=Counter)
    received_nbytes: int = 0
    sent_nbytes: int = 0
    in_flight: int = 0
    max_in_flight: int = 0
    connections: int = 0
    objects: int = 0
    stored_nbytes: int = 0
    uploads: int = 0
    cpu_s: float = 0.0


class Server:
    """Serves the clients of all listening ports, and keeps the log of their requests.

    Attributes:
        faults: the script; faults happen to a request in its order.
        log: of requests, in the order of their heads.
        stats: counters.
        errors: of the simulator itself, or of hooks.
    """

    def __init__(
        self,
        dialects: Mapping[str, Dialect],
        shaper: Shaper,
        buffers: Buffers,
        faults: list[Fault],
        *,
        keep_log: bool,
    ) -> None:
        self.faults = faults
        self.log: list[Request] = []
        self.stats = Stats()
        self.errors: list[Exception] = []
        self._dialects = dialects
        self._shaper = shaper
        self._buffers = buffers
        self._keep_log = keep_log
        self._open: set[Connection] = set()

    def clear(self) -> None:
        """Empty log and counters; the faults remain, and count from the start."""
        self.log = []
        now = self.stats
        self.stats = Stats(
            in_flight=now.in_flight, max_in_flight=now.in_flight, connections=now.connections
        )
        for fault in self.faults:
            fault.met = fault.happened = 0

    def _begin(self, request: Request) -> None:
        """Count and log a request whose head has come."""
        stats = self.stats
        stats.requests += 1
        stats.by_kind[request.kind] += 1
        stats.in_flight += 1
        stats.max_in_flight = max(stats.max_in_flight, stats.in_flight)
        request.number = stats.requests
        request.began_s = time.monotonic()
        if self._keep_log:
            self.log.append(request)

    def _end(self, request: Request) -> None:
        """Count the end of a request, and drop what the log does not keep."""
        request.ended_s = time.monotonic()
        request.body, request.stored, request.secrets = memoryview(b""), None, {}
        self.stats.in_flight -= 1
        self.stats.by_status[request.status] += 1
        self.stats.sent_nbytes += request.answered_nbytes

    def connection(self, service: str, group: asyncio.TaskGroup) -> Connection:
        """Return the protocol of a new client of a service, which a task of the group serves."""

        def begin(connection: Connection) -> None:
            self._open.add(connection)
            group.create_task(self._serve(service, connection))

        self.stats.connections += 1
        return Connection(begin, self.stats.connections, asyncio.get_running_loop())

    def close(self) -> None:
        """Reset every connection."""
        for connection in self._open:
            connection.reset()

    async def _serve(self, service: str, connection: Connection) -> None:
        try:
            while connection.keep_alive:
                request = await connection.head()
                request.service, request.connection = service, connection.number
                dialect = self._dialects[service].classify(request)
                self._begin(request)
                try:
                    await self._exchange(connection, request, dialect)
                finally:
                    self._end(request)
        except EOFError:
            pass  # the client is gone
        except BadRequest as error:
            await connection.refuse(str(error))
        except Exception as error:  # of the simulator or a hook; raised when the simulator ends
            self.errors.append(error)
            connection.reset()
        finally:
            self._open.discard(connection)
            connection.close()

    async def _exchange(self, connection: Connection, request: Request, dialect: Dialect) -> None:
        faults = [fault for fault in self.faults if fault.takes(request)]
        request.faults = tuple(fault.name for fault in faults)
        shape = self._shaper.shape(request)
        for fault in faults:
            if fault.early:
                await fault.before(request)
                if fault.replaces:
                    connection.keep_alive = False  # the body is still on its way
                    return await self._fail(connection, request, dialect, fault)
        await connection.body(request, self._buffers, shape.put_bandwidth)
        request.received_s = time.monotonic()
        request.nbytes = len(request.body)
        self.stats.received_nbytes += request.nbytes
        if shape.latency_s:
            await asyncio.sleep(shape.latency_s)
        for fault in faults:
            if not fault.early:
                await fault.before(request)
                if fault.replaces:
                    if fault.applied:
                        await self._apply(request, dialect, faults)
                    return await self._fail(connection, request, dialect, fault)
        if shape.refusal is not None:
            response = dialect.error(request, shape.refusal)
        else:
            response = await self._apply(request, dialect, faults)
        await self._answer(connection, request, response, faults, shape.get_bandwidth)

    async def _apply(self, request: Request, dialect: Dialect, faults: list[Fault]) -> Response:
        flips = [fault.flip for fault in faults if fault.flip is not None]
        response = await dialect.handle(request)
        changed = request.stored
        if changed is None and flips and response.body:
            changed = Content(bytearray(b"".join(response.body)))
            response.body = changed.segments
        if changed is not None:
            for flip in flips:
                changed.flip(flip)
        if response.status < 400:
            request.applied_s = time.monotonic()
        return response

    async def _answer(
        self,
        connection: Connection,
        request: Request,
        response: Response,
        faults: list[Fault],
        rate: float | None,
    ) -> None:
        stalls = [fault.stall for fault in faults if fault.stall is not None]
        stops = stalls + [fault.truncate for fault in faults if fault.truncate is not None]
        request.status = response.status
        stop = min(stops, default=None)
        if wait_s := self._shaper.link_wait_s(response.nbytes):
            await asyncio.sleep(wait_s)
        request.answered_nbytes = await connection.send(response, rate=rate, stop=stop)
        if not stalls:
            connection.keep_alive &= not stops
        elif request.answered_nbytes < response.nbytes:
            await connection.wait_closed()

    async def _fail(
        self, connection: Connection, request: Request, dialect: Dialect, fault: Fault
    ) -> None:
        if fault.status is not None:
            response = dialect.failure(request, fault.status, fault.code, fault.message)
            if fault.page is not None:
                response = Response(fault.status, {"Content-Type": "text/html"}, (fault.page,))
            if fault.retry_after_s is not None:
                after = {"Retry-After": f"{fault.retry_after_s:g}"}
                response.headers = response.headers | after  # which responses may share
            return await self._answer(connection, request, response, [], None)
        connection.keep_alive = False
        if fault.reset:
            connection.reset()
        elif fault.hang:
            await connection.wait_closed()
