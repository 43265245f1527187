"""The simulator in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Self

from asyncckpt.flow.threads import Workers
from asyncckpt.options import MIB
from asyncckpt.testing.objectstore.buffers import Buffers
from asyncckpt.testing.objectstore.clients import REGION, Endpoints
from asyncckpt.testing.objectstore.control import Control
from asyncckpt.testing.objectstore.credentials import Credentials
from asyncckpt.testing.objectstore.digests import digests_of
from asyncckpt.testing.objectstore.faults import Fault
from asyncckpt.testing.objectstore.gcs import GCS
from asyncckpt.testing.objectstore.profiles import Profile, profile_of
from asyncckpt.testing.objectstore.requests import Logged
from asyncckpt.testing.objectstore.s3 import S3
from asyncckpt.testing.objectstore.server import Port, Traffic
from asyncckpt.testing.objectstore.service import (
    INLINE_NBYTES,
    MD5_MAX_NBYTES,
    PART_MIN_NBYTES,
    Service,
)
from asyncckpt.testing.objectstore.shaping import Shaper
from asyncckpt.testing.objectstore.state import Bucket, Content, State, StoredObject, Upload

HOST = "127.0.0.1"
DIGEST_THREADS = 2
BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Stats:
    """What the simulator has done since it began or was reset.

    Attributes:
        requests: how many came.
        by_kind: of them by kind.
        by_status: answers by status; 0 for none.
        received_nbytes: of bodies.
        sent_nbytes: of bodies of answers.
        in_flight: requests that are being handled.
        max_in_flight: most of them at one time.
        connections: accepted since it began.
        objects: stored now.
        stored_nbytes: their bytes.
        uploads: open now.
        cpu_s: CPU time of its threads since it began or was reset.
    """

    requests: int
    by_kind: Mapping[str, int]
    by_status: Mapping[int, int]
    received_nbytes: int
    sent_nbytes: int
    in_flight: int
    max_in_flight: int
    connections: int
    objects: int
    stored_nbytes: int
    uploads: int
    cpu_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Simulator(Endpoints):
    """A service with an S3 and a GCS endpoint; a context manager, of both kinds.

    All methods and attributes may be used from any thread while it runs.

    Attributes:
        profile: what it is like.
        faults: the script; a list that may be changed at any time.
        state: buckets and uploads.
    """

    def __init__(
        self,
        profile: Profile | str = "loopback",
        *,
        faults: Iterable[Fault] = (),
        buckets: Iterable[str] = ("bucket",),
        credentials: Credentials | None = None,
        region: str | None = None,
        part_min_nbytes: int = PART_MIN_NBYTES,
        md5_max_nbytes: int = MD5_MAX_NBYTES,
        verify_checksums: bool = True,
        keep_log: bool = True,
        s3_port: int = 0,
        gcs_port: int = 0,
        spare_nbytes: int = 64 * MIB,
        own_process: bool = False,
    ) -> None:
        self.profile = profile_of(profile)
        self.faults = list(faults)
        self.state = State()
        self.region = region or REGION
        for name in buckets:
            self.state.create_bucket(name)
        self._traffic = Traffic(self.faults, keep_log=keep_log)
        self._buffers = Buffers(spare_nbytes)
        self._workers = Workers(DIGEST_THREADS, "objectstore-digests")
        self._service = Service(
            self.state,
            self._workers,
            credentials,
            region,
            part_min_nbytes,
            md5_max_nbytes,
            verify_checksums,
        )
        self._wanted = {"s3": s3_port, "gcs": gcs_port}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._own_process = own_process
        self._cpu_base_s = 0.0
        self.control_endpoint = ""

    def __repr__(self) -> str:
        return f"Simulator({self.profile.name!r}, {self.s3_endpoint}, {self.gcs_endpoint})"

    # Running

    def start(self) -> None:
        """The thread runs; the endpoints are known once `_started` resolves."""
        if self._thread is not None:
            raise RuntimeError("a simulator is used once")
        self._thread = threading.Thread(target=self._run, name="objectstore-simulator", daemon=True)
        self._thread.start()

    def _request_stop(self) -> None:
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)

    def __enter__(self) -> Self:
        self.start()
        self._started.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._request_stop()
        self._ended.result()
        assert self._thread is not None
        self._thread.join()

    async def __aenter__(self) -> Self:
        self.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
        except asyncio.CancelledError:
            self._started.add_done_callback(lambda _: self._request_stop())
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._request_stop()
        await asyncio.wrap_future(self._ended)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            failure = error
            while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
                failure = failure.exceptions[0]
        if failure is None and self._traffic.errors:
            failure = ExceptionGroup("the simulator or a hook failed", self._traffic.errors)
        self._workers.shutdown()
        self._buffers.close()
        for future in (self._started, self._ended):
            if not future.done():
                future.set_result(None) if failure is None else future.set_exception(failure)

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        stop = self._stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
                for port in self._make_ports(group, loop):
                    server = await loop.create_server(
                        port.connection, HOST, self._wanted.get(port.name, 0), backlog=BACKLOG
                    )
                    stack.callback(port.close)
                    stack.callback(server.close)
                    number = server.sockets[0].getsockname()[1]
                    setattr(self, f"{port.name}_endpoint", f"http://{HOST}:{number}")
                self._cpu_base_s = self._cpu_s()
                self._started.set_result(None)
                await stop.wait()
                raise _Stopped
        except* _Stopped:
            pass

    def _make_ports(self, group: asyncio.TaskGroup, loop: asyncio.AbstractEventLoop) -> list[Port]:
        shaped = Shaper(self.profile)
        own = Traffic([], keep_log=False)
        return [
            Port("s3", S3(self._service), self._traffic, shaped, self._buffers, group, loop),
            Port("gcs", GCS(self._service), self._traffic, shaped, self._buffers, group, loop),
            Port("control", Control(self), own, None, self._buffers, group, loop),
        ]

    def _cpu_s(self) -> float:
        thread = self._thread
        if self._own_process or thread is None or thread.ident is None:
            return time.process_time()
        if not hasattr(time, "pthread_getcpuclockid"):
            return time.process_time()
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    # What it has seen

    @property
    def requests(self) -> list[Logged]:
        """The log, in the order in which the heads came; control requests are not in it."""
        return self._traffic.log

    @property
    def uploads(self) -> list[Upload]:
        """Multipart and resumable uploads that nobody completed or aborted."""
        return list(self.state.uploads.values())

    @property
    def buckets(self) -> dict[str, Bucket]:
        """Buckets by name."""
        return self.state.buckets

    def stored(self, bucket: str = "bucket") -> dict[str, StoredObject]:
        """The objects of a bucket by key, in order."""
        found = self.state.bucket(bucket)
        return {key: found.objects[key] for key in list(found.keys) if key in found.objects}

    def objects(self, bucket: str = "bucket") -> dict[str, bytes]:
        """The contents of a bucket by key, in order; copies."""
        return {key: item.content.tobytes() for key, item in self.stored(bucket).items()}

    def stats(self) -> Stats:
        """Counters since the beginning or the last `reset`, and what is stored now."""
        traffic = self._traffic
        stored = [item for b in list(self.buckets.values()) for item in list(b.objects.values())]
        return Stats(
            requests=traffic.requests,
            by_kind=dict(traffic.counts),
            by_status=dict(traffic.statuses),
            received_nbytes=traffic.received_nbytes,
            sent_nbytes=traffic.sent_nbytes,
            in_flight=traffic.in_flight,
            max_in_flight=traffic.max_in_flight,
            connections=traffic.connections,
            objects=len(stored),
            stored_nbytes=sum(item.nbytes for item in stored),
            uploads=len(self.state.uploads),
            cpu_s=self._cpu_s() - self._cpu_base_s,
        )

    # What it shall do

    def create_bucket(self, name: str, *, region: str | None = None) -> None:
        """The bucket is there; S3 requests that are signed for another region are sent away."""
        self.state.create_bucket(name, region)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """The object is `data`, as if another client had put it; not in the log."""
        content = Content(data)
        digests = digests_of(
            content,
            md5_max_nbytes=MD5_MAX_NBYTES,
            generation=self.state.next_generation(),
            checksums={},
            with_crc32c=len(data) <= INLINE_NBYTES,
        )
        self.state.put(bucket, key, content, digests)

    def get(self, bucket: str, key: str) -> bytes:
        """The contents of an object; a copy. Not in the log."""
        return self.state.get(bucket, key).content.tobytes()

    def delete(self, bucket: str, key: str) -> None:
        """The object is gone, as if another client had deleted it; not in the log."""
        self.state.delete(bucket, key)

    def reset(self) -> None:
        """Log and counters are empty, faults count from the start; what is stored remains."""
        self._traffic.clear()
        self._cpu_base_s = self._cpu_s()

    def clear(self) -> None:
        """All buckets are empty and no upload is open, beside what `reset` does."""
        self.state.clear()
        self.reset()


class _Stopped(Exception):
    """Ends the tasks of requests that are still waited for."""


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
