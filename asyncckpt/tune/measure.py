"""Measuring a store: how large its objects should be, and how many requests are in flight."""

# Rule 1: everything is written below one prefix that nothing else uses, and nothing of it is left,
#   however the measurement ends.
# Rule 2: the requests are those of saves and restores, with their deadlines and retries; only
#   second reads are left out, which would move bytes that nobody announced.

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import statistics
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from asyncckpt.checkpointer.runtime import Runtime
from asyncckpt.errors import StoreError, UsageError
from asyncckpt.flow.engine import Job
from asyncckpt.flow.link import Direction
from asyncckpt.flow.shield import leading_error, to_completion, uninterrupted
from asyncckpt.options import KIB, MIN_BUDGET_NBYTES, SLOT_NBYTES, default_budget_nbytes
from asyncckpt.planning.sizes import Choice, choose
from asyncckpt.planning.tuning import (
    ASSUMED,
    MAX_NBYTES,
    MAX_S,
    STATE_NBYTES,
    GridPoint,
    TunePoint,
    TuneReport,
    auto_traffic,
    grid,
    measured,
    reason,
    recommend,
)
from asyncckpt.reports import Progress, nbytes_text
from asyncckpt.stores.objects.client import RequestError
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.opening import open_client
from asyncckpt.stores.objects.policy import RequestPolicy
from asyncckpt.stores.objects.requests import Requests
from asyncckpt.stores.objects.urls import is_url

SMALL_NBYTES = 4 * KIB
SMALL_REQUESTS = 8
"""What latency is measured with, each way."""


class Tuning:
    """One measurement: `submit` it, wait for the job, then close.

    Attributes:
        prefix: URL below which everything is written and removed again.
        planned: the measurements that will be made if time suffices.
        planned_nbytes: bytes that they move at most, both ways together.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        max_nbytes: int,
        max_s: float,
        state_nbytes: int,
        host_memory_nbytes: int | None,
        storage_options: Mapping[str, Any] | None,
        progress: Callable[[Progress], None] | None,
        policy: RequestPolicy | None = None,
    ) -> None:
        if not is_url(url):
            raise UsageError(
                f"{url}: tune measures object stores, and this is no URL of one; sizes do not "
                "matter on local disk",
                location=str(url),
            )
        _positive("max_nbytes", max_nbytes)
        _positive("max_s", max_s)
        _positive("state_nbytes", state_nbytes)
        self._max_s = float(max_s)
        self._state_nbytes = int(state_nbytes)
        self._budget_nbytes = max(MIN_BUDGET_NBYTES, host_memory_nbytes or default_budget_nbytes())
        self._progress = progress
        self._runtime = Runtime("asyncckpt-tune", host_memory_nbytes=MIN_BUDGET_NBYTES)
        try:
            client = open_client(
                url, storage_options=storage_options, workers=self._runtime.engine.io
            )
        except BaseException:
            self._runtime.close()
            raise
        policy = dataclasses.replace(policy or RequestPolicy(), hedge_share=0.0, hedge_burst=0.0)
        self._requests = Requests(client, policy=policy)
        self._below = f"asyncckpt-tune-{uuid.uuid4().hex}"
        self.prefix = self._requests.location(self._below)
        self._copies = max(client.traits.put_copies, client.traits.get_copies)
        small = 2 * SMALL_NBYTES * SMALL_REQUESTS
        self.planned = grid(int(max_nbytes) - small, self._budget_nbytes, self._copies)
        self.planned_nbytes = small + sum(point.moved_nbytes for point in self.planned)
        self._max_nbytes = int(max_nbytes)
        self._moved_nbytes = 0
        if not self.planned:
            self._runtime.close()
            raise UsageError(
                f"max_nbytes={max_nbytes}: the smallest measurement moves more "
                f"({nbytes_text(_SMALLEST)}); allow more bytes, or more memory",
                expected=_SMALLEST,
                found=max_nbytes,
            )

    def submit(self) -> Job[TuneReport]:
        """The measurement is on its way."""
        return self._runtime.engine.submit(self._run)

    async def aclose(self) -> None:
        """All connections are closed and all threads have ended. Idempotent."""
        if self._runtime.engine.usable:
            await self._runtime.engine.submit(self._requests.close).wait()
        await self._runtime.aclose()

    def close(self) -> None:
        """As `aclose`, blocking."""
        if self._runtime.engine.usable and not self._runtime.engine.abandoned:
            self._runtime.engine.submit(self._requests.close).result()
        self._runtime.close()

    # -- on the engine

    async def _run(self) -> TuneReport:
        try:
            with reported("measuring", self.prefix):
                report = await self._measure()
        except BaseException as error:
            try:
                await to_completion(self._remove())
            except StoreError as second:
                error.add_note(str(second))  # what went wrong first is what the caller hears
            raise
        await to_completion(self._remove())
        return report

    async def _measure(self) -> TuneReport:
        begun_s = time.perf_counter()
        points: list[TunePoint] = []
        notes: list[str] = []
        try:
            async with asyncio.timeout(self._max_s):
                latencies = await self._small()
                await self._grid(points, begun_s + self._max_s)
                auto = self._auto(points, latencies[0])
                if measured(points, auto) is None:
                    again = GridPoint(auto.window_nbytes, auto.concurrency, auto.concurrency)
                    if self._moved_nbytes + again.moved_nbytes <= self._max_nbytes:
                        await self._point(f"{self._below}/auto", again, points)
        except TimeoutError:
            if not points:
                raise StoreError(
                    f"{self.prefix}: nothing was measured within {self._max_s:g} s; "
                    "allow more time",
                    retryable=True,
                    location=self.prefix,
                ) from None
        done = len({(point.nbytes, point.streams) for point in points})
        if done < len(self.planned):
            notes.append(
                f"{done} of {len(self.planned)} points were measured within {self._max_s:g} s; "
                "allow more time for the others"
            )
        auto = self._auto(points, latencies[0])
        same = measured(points, auto)
        chosen = recommend(points, "put")
        return TuneReport(
            location=self._requests.url,
            client=self._requests.traits.name,
            put_latency_s=latencies[0],
            get_latency_s=latencies[1],
            points=tuple(points),
            target_data_file_nbytes=chosen.nbytes,
            concurrency=chosen.streams,
            read_concurrency=recommend(points, "get").streams,
            nbytes_per_s=chosen.nbytes_per_s,
            reason=reason(points, chosen),
            state_nbytes=self._state_nbytes,
            auto_data_file_nbytes=auto.data_file_nbytes,
            auto_concurrency=auto.concurrency,
            auto_nbytes_per_s=None if same is None else same.nbytes_per_s,
            moved_nbytes=self._moved_nbytes,
            total_s=time.perf_counter() - begun_s,
            notes=tuple(notes),
        )

    async def _grid(self, points: list[TunePoint], end_s: float) -> None:
        """The points were measured that there is time for."""
        for number, planned in enumerate(self.planned):
            if points:
                # Time for both ways at the best rate so far: the worst that more streams can do.
                best = max(point.nbytes_per_s for point in points)
                if time.perf_counter() + planned.moved_nbytes / best > end_s:
                    continue
            await self._point(f"{self._below}/{number}", planned, points)

    def _auto(self, points: Sequence[TunePoint], latency_s: float) -> Choice:
        """What a save would choose by itself, once an earlier one had measured this."""
        traits = self._requests.traits
        choice: Choice | None = None
        for traffic in (ASSUMED, auto_traffic(points, latency_s)):
            if traffic is not None:
                choice = choose(
                    self._state_nbytes,
                    traffic,
                    budget_nbytes=self._budget_nbytes,
                    copies=traits.put_copies,
                    slot_nbytes=SLOT_NBYTES,
                    put_max_nbytes=traits.put_max_nbytes,
                    parts=self._requests.part_rules,
                    last=choice,
                )
        assert choice is not None
        return choice

    async def _small(self) -> tuple[float, float]:
        """Latency of writing and reading; the store can be written to and read."""
        body = random.Random(0).randbytes(SMALL_NBYTES)
        for number in range(SMALL_REQUESTS):
            key = f"{self._below}/small-{number}"
            sent = await self._requests.put(_named(key), body)
            await self._requests.get(sent.key, 0, SMALL_NBYTES)
            self._moved(2 * SMALL_NBYTES)
        return self._requests.link.put.latency_s, self._requests.link.get.latency_s

    async def _point(self, key: str, point: GridPoint, points: list[TunePoint]) -> None:
        """One point was measured, both ways, and its objects are gone."""
        # One body for all: what is measured is the way to the store. Random, because stores and
        # proxies that compress would look faster than they are.
        body = await self._runtime.engine.compute.run(_random_body, point.nbytes)
        keys: list[str] = []

        async def put(number: int) -> None:
            sent = await self._requests.put(_named(f"{key}-{number}"), body)
            keys.append(sent.key)

        async def get(number: int) -> None:
            await self._requests.get(keys[number], 0, point.nbytes)

        ways: tuple[tuple[Direction, Callable[[int], Coroutine[Any, Any, None]]], ...] = (
            ("put", put),
            ("get", get),
        )
        for direction, request in ways:
            rate = await self._rate(direction, point, request)
            points.append(TunePoint(direction, point.nbytes, point.streams, rate))
        await self._requests.delete(keys)

    async def _rate(
        self,
        direction: Direction,
        point: GridPoint,
        request: Callable[[int], Coroutine[Any, Any, None]],
    ) -> float:
        """Bytes per second of a point's streams together, while all of them are busy."""
        self._requests.fix_streams(direction, point.streams)
        numbers = iter(range(point.requests))
        seconds: list[float] = []

        async def stream() -> None:
            for number in numbers:
                begun_s = time.perf_counter()
                await request(number)
                seconds.append(time.perf_counter() - begun_s)
                self._moved(point.nbytes)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(point.streams):
                    group.create_task(stream())
        except BaseExceptionGroup as errors:
            raise leading_error(errors) from None
        # Neither by the last one to end nor by the mean: one slow request in a hundred would
        # decide, by whether a point of sixteen has met it.
        return point.streams * point.nbytes / statistics.median(seconds)

    async def _remove(self) -> None:
        """Nothing stands below the prefix, also what lost answers have left."""
        try:
            while found := await self._requests.list(self._below, recursive=True, limit=1000):
                await self._requests.delete([entry.key for entry in found])
        except RequestError as error:
            raise StoreError(
                f"{self.prefix}: what tune has written could not be removed ({error.detail}); "
                "remove this prefix by hand",
                retryable=error.retryable,
                location=self.prefix,
            ) from error

    def _moved(self, nbytes: int) -> None:
        self._moved_nbytes += nbytes
        if self._progress is not None:
            self._progress(Progress("tune", self._moved_nbytes, self.planned_nbytes))


async def tune(
    url: str,
    *,
    max_nbytes: int = MAX_NBYTES,
    max_s: float = MAX_S,
    state_nbytes: int = STATE_NBYTES,
    host_memory_nbytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TuneReport:
    """What an object store carries is known, for objects of several sizes and numbers of streams.

    Objects are written below a prefix of their own under `url`, read, and removed again.

    Args:
        url: where checkpoints are to be kept, for example ``"s3://bucket/run"``.
        max_nbytes: bytes to move at most, written and read together.
        max_s: seconds after which the measurement ends with what it has.
        state_nbytes: size of the state for which the automatic choice is computed.
        host_memory_nbytes: as for saving: what may be in flight.
        storage_options: options of the file system.
        progress: called on the engine's thread with a `Progress`.

    Cancellation: removes what was written, then raises.

    Raises:
        UsageError: an argument is wrong, or the URL is none of an object store.
        StoreError: the store cannot be written to, read or listed; says what to do.
    """
    work = Tuning(
        url,
        max_nbytes=max_nbytes,
        max_s=max_s,
        state_nbytes=state_nbytes,
        host_memory_nbytes=host_memory_nbytes,
        storage_options=storage_options,
        progress=progress,
    )
    try:
        return await work.submit().wait()
    finally:
        await uninterrupted(work.aclose())


_SMALLEST = min(point.moved_nbytes for point in grid(1 << 60, 1 << 60, 0))


def _named(key: str) -> Callable[[int], str]:
    return lambda number: f"{key}.r{number}"


def _random_body(nbytes: int) -> bytes:
    block = random.Random(0).randbytes(1 << 20)
    return block * (nbytes >> 20) + block[: nbytes & ((1 << 20) - 1)]


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"{name}={value!r}: pass a positive number", found=value)
