"""The simulator in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self

from tests.simulator.clients import REGION, Endpoints
from tests.simulator.dialects.credentials import Credentials
from tests.simulator.dialects.gcs import GCS
from tests.simulator.dialects.s3 import S3
from tests.simulator.dialects.service import (
    INLINE_NBYTES,
    MD5_MAX_NBYTES,
    PART_MIN_NBYTES,
    Service,
    digests_of,
)
from tests.simulator.faults import Fault
from tests.simulator.http import MIB, Buffers
from tests.simulator.profiles import Profile, Shaper, profile_of
from tests.simulator.requests import Request
from tests.simulator.server import Server, Stats
from tests.simulator.state import Bucket, Content, State, StoredObject, Upload

HOST = "127.0.0.1"
DIGEST_THREADS = 2
BACKLOG = 1024


class Simulator(Endpoints):
    """A service with an S3 and a GCS endpoint; a context manager, of both kinds.

    All methods and attributes may be used from any thread while it runs.

    Attributes:
        profile: latencies, bandwidths and limits of the service.
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
    ) -> None:
        self.profile = profile_of(profile)
        self.faults = list(faults)
        self.state = State()
        self.region = region or REGION
        for name in buckets:
            self.state.create_bucket(name)
        self._buffers = Buffers(spare_nbytes)
        self._threads = ThreadPoolExecutor(DIGEST_THREADS, "simulator-digests")
        service = Service(
            self.state,
            self._threads,
            credentials,
            region,
            part_min_nbytes,
            md5_max_nbytes,
            verify_checksums,
        )
        self._server = Server(
            {"s3": S3(service), "gcs": GCS(service)},
            Shaper(self.profile),
            self._buffers,
            self.faults,
            keep_log=keep_log,
        )
        self._ports = {"s3": s3_port, "gcs": gcs_port}
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], None] = lambda: None
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._cpu_base_s = 0.0

    def __repr__(self) -> str:
        return f"Simulator({self.profile.name!r}, {self.s3_endpoint}, {self.gcs_endpoint})"

    # Running

    def start(self) -> None:
        """Start the thread; the endpoints are known once `_started` resolves."""
        if self._thread is not None:
            raise RuntimeError("a simulator is used once")
        self._thread = threading.Thread(target=self._run, name="simulator", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        self._started.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._ended.result()
        assert self._thread is not None
        self._thread.join()

    async def __aenter__(self) -> Self:
        self.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
        except asyncio.CancelledError:
            self._started.add_done_callback(lambda _: self._stop())
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop()
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
        if failure is None and self._server.errors:
            failure = ExceptionGroup("the simulator or a hook failed", self._server.errors)
        self._threads.shutdown()
        self._buffers.close()
        for future in (self._started, self._ended):
            if not future.done():
                future.set_result(None) if failure is None else future.set_exception(failure)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def request_stop() -> None:
            with contextlib.suppress(RuntimeError):  # it has stopped
                loop.call_soon_threadsafe(stop.set)

        self._stop = request_stop
        try:
            async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
                stack.callback(self._server.close)
                for name, port in self._ports.items():
                    connection = partial(self._server.connection, name, group)
                    server = await loop.create_server(connection, HOST, port, backlog=BACKLOG)
                    stack.callback(server.close)
                    number = server.sockets[0].getsockname()[1]
                    setattr(self, f"{name}_endpoint", f"http://{HOST}:{number}")
                self._cpu_base_s = time.process_time()
                self._started.set_result(None)
                await stop.wait()
                raise _Stopped
        except* _Stopped:
            pass

    # What it has seen

    @property
    def requests(self) -> list[Request]:
        """The log, in the order in which the heads came."""
        return self._server.log

    @property
    def uploads(self) -> list[Upload]:
        """Multipart and resumable uploads that were neither completed nor aborted."""
        return list(self.state.uploads.values())

    @property
    def buckets(self) -> dict[str, Bucket]:
        """Buckets by name."""
        return self.state.buckets

    def stored(self, bucket: str = "bucket") -> dict[str, StoredObject]:
        """Return the objects of a bucket by key, in order."""
        found = self.state.bucket(bucket)
        return {key: found.objects[key] for key in list(found.keys) if key in found.objects}

    def objects(self, bucket: str = "bucket") -> dict[str, bytes]:
        """Copy the contents of a bucket by key, in order."""
        return {key: item.content.tobytes() for key, item in self.stored(bucket).items()}

    def stats(self) -> Stats:
        """Return counters since the beginning or the last `reset`, and what is stored now."""
        stats = self._server.stats
        stored = [item for b in list(self.buckets.values()) for item in list(b.objects.values())]
        return dataclasses.replace(
            stats,
            by_kind=dict(stats.by_kind),
            by_status=dict(stats.by_status),
            objects=len(stored),
            stored_nbytes=sum(item.nbytes for item in stored),
            uploads=len(self.state.uploads),
            cpu_s=time.process_time() - self._cpu_base_s,
        )

    # What it shall do; none of this is logged

    def create_bucket(self, name: str, *, region: str | None = None) -> None:
        """Create a bucket. S3 requests that are signed for another region get a redirect."""
        self.state.create_bucket(name, region)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store an object, as another client would."""
        content = Content(data)
        digests = digests_of(
            content,
            md5_max_nbytes=MD5_MAX_NBYTES,
            generation=self.state.next_generation(),
            with_crc32c=len(data) <= INLINE_NBYTES,
        )
        self.state.put(bucket, StoredObject(key, content, digests))

    def get(self, bucket: str, key: str) -> bytes:
        """Copy the contents of an object."""
        return self.state.get(bucket, key).content.tobytes()

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object, as another client would."""
        self.state.delete(bucket, key)

    def reset(self) -> None:
        """Empty log and counters; faults count from the start, objects remain."""
        self._server.clear()
        self._cpu_base_s = time.process_time()

    def clear(self) -> None:
        """Empty all buckets and drop all uploads, and `reset`."""
        self.state.clear()
        self.reset()


class _Stopped(Exception):
    """Ends the tasks of connections."""


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's factory of loops where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
