"""Measurement of an object store: throughput by object size and number of streams."""

# Rule 1: all objects are written below a unique prefix and removed, however the measurement ends.
# Rule 2: requests have the deadlines and retries of saves and restores, but no hedges, which would
#   move more bytes than announced.

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import statistics
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from asyncckpt.arguments import ProgressCallback, guarded, progress_notes
from asyncckpt.errors import StoreError, UsageError
from asyncckpt.flow.driver import check_loop
from asyncckpt.flow.shield import cleaned_up, mapped, to_completion, uninterrupted
from asyncckpt.options import KIB, MIN_BUDGET_NBYTES, check_budget, default_budget_nbytes
from asyncckpt.reports import Progress, nbytes_text
from asyncckpt.runtime import Runtime
from asyncckpt.stores.objects.clients.client import Body, RequestError
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.clients.urls import is_url
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import retried
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.objects.requests.sending import Direction
from asyncckpt.tune.recommend import (
    MAX_NBYTES,
    MAX_S,
    GridPoint,
    TunePoint,
    TuneReport,
    grid,
    reason,
    recommend,
)

SMALL_NBYTES = 4 * KIB
SMALL_REQUESTS = 8
"""Size and number per direction of the requests that measure latency."""

SMALL_MOVED_NBYTES = 2 * SMALL_NBYTES * SMALL_REQUESTS


async def tune(
    url: str,
    *,
    max_nbytes: int = MAX_NBYTES,
    max_s: float = MAX_S,
    host_memory_nbytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> TuneReport:
    """Measure an object store, and recommend sizes and concurrency for it.

    Writes objects of several sizes below a unique prefix under `url`, reads them with several
    numbers of streams, and removes them.

    Args:
        url: location of the checkpoints, for example ``"s3://bucket/run"``.
        max_nbytes: most bytes to move, written and read together.
        max_s: seconds after which the measurement ends with the results so far.
        host_memory_nbytes: most bytes in flight, as for saving; at least 64 MiB.
        storage_options: options of the file system.
        progress: called on the engine's thread with a `Progress`.

    Cancellation: removes what was written, then raises.

    Raises:
        UsageError: an argument is wrong, or the URL is not that of an object store.
        StoreError: the store cannot be written to, read or listed.
    """
    check_loop()
    check_url(url)
    check_budget(host_memory_nbytes)
    for name, value in (("max_nbytes", max_nbytes), ("max_s", max_s)):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise UsageError(f"{name}={value!r}: pass a positive number", found=value)
    guard = guarded(progress)
    runtime = Runtime("asyncckpt-tune", host_memory_nbytes=MIN_BUDGET_NBYTES)

    async def run() -> TuneReport:
        workers = runtime.engine.io
        client = await workers.run(
            open_client, url, storage_options=storage_options, workers=workers
        )
        try:
            work = Measurement(
                Requests(client, policy=POLICY),
                max_nbytes=int(max_nbytes),
                max_s=max_s,
                budget_nbytes=host_memory_nbytes or default_budget_nbytes(),
                body=lambda nbytes: runtime.engine.compute.run(_random_body, nbytes),
                progress=guard,
            )
            report = await work.run()
            return dataclasses.replace(report, notes=(*report.notes, *progress_notes(guard)))
        finally:
            await to_completion(client.close())

    try:
        return await runtime.engine.submit(run).wait()
    finally:
        await uninterrupted(runtime.aclose())


def check_url(url: str) -> None:
    """Raise `UsageError` unless this is the URL of an object store."""
    if not is_url(url):
        raise UsageError(
            f"{url}: tune measures object stores, and this is not the URL of one; on local disk "
            "sizes do not matter",
            location=str(url),
        )


POLICY = dataclasses.replace(RequestPolicy(), hedge_share=0.0, hedge_burst=0.0)
"""Policy of saves and restores, without hedges."""


@dataclass(eq=False, repr=False)
class Measurement:
    """One measurement, on the event loop of its requests.

    Attributes:
        prefix: URL below which objects are written and removed.
        planned: the points to measure while time remains.

    Raises:
        UsageError: `max_nbytes` is too small for any point.
    """

    requests: Requests
    _: KW_ONLY
    max_nbytes: int
    max_s: float
    budget_nbytes: int
    body: Callable[[int], Coroutine[Any, Any, bytes]]
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        self._below = f"asyncckpt-tune-{uuid.uuid4().hex}"
        self.prefix = self.requests.location(self._below)
        copies = max(self.requests.traits.put_copies, self.requests.traits.get_copies)
        self.planned = grid(self.max_nbytes - SMALL_MOVED_NBYTES, self.budget_nbytes, copies)
        self._planned_nbytes = SMALL_MOVED_NBYTES
        self._planned_nbytes += sum(point.moved_nbytes for point in self.planned)
        self._moved_nbytes = 0
        self._points: list[TunePoint] = []
        if not self.planned:
            raise UsageError(
                f"max_nbytes={self.max_nbytes}: the smallest measurement moves more "
                f"({nbytes_text(_SMALLEST)}); allow more bytes, or more memory",
                expected=_SMALLEST,
                found=self.max_nbytes,
            )

    async def run(self) -> TuneReport:
        """Measure, remove all written objects, and return the report."""
        try:
            with reported("measuring", self.prefix):
                report = await self._measure()
        except BaseException as error:
            await cleaned_up(to_completion(self._remove()), error)
            raise
        await to_completion(self._remove())
        return report

    async def _measure(self) -> TuneReport:
        begun_s = time.perf_counter()
        points = self._points
        latencies = (0.0, 0.0)
        try:
            async with asyncio.timeout(self.max_s):
                latencies = await self._small()
                for number, planned in enumerate(self.planned):
                    # A point starts only if it can end in time at the best rate so far.
                    best = max((point.nbytes_per_s for point in points), default=math.inf)
                    left_s = begun_s + self.max_s - time.perf_counter()
                    if planned.moved_nbytes / best <= left_s:
                        await self._point(f"{self._below}/{number}", planned)
        except TimeoutError:
            if not any(point.direction == "get" for point in points):
                raise StoreError(
                    f"{self.prefix}: nothing was measured within {self.max_s:g} s; allow more time",
                    retryable=True,
                    location=self.prefix,
                ) from None
        done = sum(point.direction == "get" for point in points)
        notes: tuple[str, ...] = ()
        if done < len(self.planned):
            notes = (
                f"{done} of {len(self.planned)} points were measured within {self.max_s:g} s; "
                "allow more time for the others",
            )
        chosen = recommend(points, "put")
        return TuneReport(
            location=self.requests.url,
            client=self.requests.traits.name,
            put_latency_s=latencies[0],
            get_latency_s=latencies[1],
            points=tuple(points),
            target_data_file_nbytes=chosen.nbytes,
            concurrency=chosen.streams,
            read_concurrency=recommend(points, "get").streams,
            nbytes_per_s=chosen.nbytes_per_s,
            reason=reason(points, chosen),
            moved_nbytes=self._moved_nbytes,
            total_s=time.perf_counter() - begun_s,
            notes=notes,
        )

    async def _small(self) -> tuple[float, float]:
        """Return the latencies of writing and reading, in seconds."""
        body = await self.body(SMALL_NBYTES)
        for number in range(SMALL_REQUESTS):
            sent = await self.requests.put(partial(retried, f"{self._below}/small-{number}"), body)
            await self.requests.get(sent.key, 0, SMALL_NBYTES)
            self._moved(2 * SMALL_NBYTES)
        put, get = self.requests.controllers["put"], self.requests.controllers["get"]
        return put.estimate.latency_s, get.estimate.latency_s

    async def _point(self, key: str, point: GridPoint) -> None:
        """Measure one point in both directions, and delete its objects."""
        # One body for all objects, to measure the link, not the memory. Its bytes are random, so
        # that stores and proxies that compress do not look faster than they are.
        body = await self.body(point.nbytes)
        keys: list[str] = []

        async def put(number: int) -> None:
            sent = await self.requests.put(partial(retried, f"{key}-{number}"), body)
            keys.append(sent.key)

        async def get(number: int) -> None:
            await self.requests.fill(keys[number], _Discarded(stop=point.nbytes))

        await self._direction("put", point, put)
        await self._direction("get", point, get)
        await self.requests.delete(keys)

    async def _direction(
        self,
        direction: Direction,
        point: GridPoint,
        request: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        """Measure the total throughput of a point's streams while all are busy."""
        self.requests.fix_streams(direction, point.streams)

        async def timed(number: int) -> float:
            begun_s = time.perf_counter()
            await request(number)
            taken_s = time.perf_counter() - begun_s
            self._moved(point.nbytes)
            return taken_s

        seconds = await mapped(timed, range(point.requests), point.streams)
        # The median, because one slow request among sixteen would dominate the maximum or mean.
        rate = point.streams * point.nbytes / statistics.median(seconds)
        self._points.append(TunePoint(direction, point.nbytes, point.streams, rate))

    async def _remove(self) -> None:
        """Delete everything below the prefix, including objects whose responses were lost."""
        try:
            while found := await self.requests.list(self._below, recursive=True, limit=1000):
                await self.requests.delete([entry.key for entry in found])
        except RequestError as error:
            raise StoreError(
                f"{self.prefix}: the objects that tune wrote could not be removed "
                f"({error.detail}); remove this prefix by hand",
                retryable=error.retryable,
                location=self.prefix,
            ) from error

    def _moved(self, nbytes: int) -> None:
        self._moved_nbytes += nbytes
        if self.progress is not None:
            self.progress(Progress("tune", self._moved_nbytes, self._planned_nbytes))


@dataclass(slots=True)
class _Discarded:
    """A `Sink` that discards the bytes, to read as restores do but without copies."""

    stop: int
    at: int = 0

    async def put(self, start: int, pieces: Sequence[Body]) -> None:
        """As `Sink.put`."""
        self.at = max(self.at, start + sum(map(len, pieces)))


_SMALLEST = min(point.moved_nbytes for point in grid(1 << 60, 1 << 60, 0)) + SMALL_MOVED_NBYTES


def _random_body(nbytes: int) -> bytes:
    block = random.Random(0).randbytes(1 << 20)
    return block * (nbytes >> 20) + block[: nbytes & ((1 << 20) - 1)]
