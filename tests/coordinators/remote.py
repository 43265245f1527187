"""Coordinators of other processes: functions that run there, and their proxies here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncckpt.coordinators.choice import choose
from asyncckpt.ports import Coordinator
from tests.processes.pool import Pool
from tests.processes.worker import Worker


async def open_coordinator(worker: Worker) -> tuple[str, int, int]:
    """The coordinator of the process's runtime is open; its name, index and count."""
    coordinator = choose("auto")
    worker.state["coordinator"] = coordinator
    return coordinator.name, coordinator.process_index, coordinator.process_count


async def call(worker: Worker, method: str, *args: Any, **keywords: Any) -> Any:
    """A method of the coordinator."""
    return await getattr(worker.state["coordinator"], method)(*args, **keywords)


class RemoteCoordinator:
    """The coordinator of a process of a pool."""

    def __init__(self, pool: Pool, index: int) -> None:
        self._pool = pool
        self._index = index
        self.name, self.process_index, self.process_count = pool.run(index, open_coordinator)

    async def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        return await self._pool.start(self._index, call, method, *args, **keywords).wait()

    async def put(self, key: str, value: bytes) -> None:
        await self._call("put", key, value)

    async def put_once(self, key: str, value: bytes) -> bytes:
        return await self._call("put_once", key, value)  # type: ignore[no-any-return]

    async def look(self, key: str) -> bytes | None:
        return await self._call("look", key)  # type: ignore[no-any-return]

    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        return await self._call("wait", key, timeout_s=timeout_s)  # type: ignore[no-any-return]

    async def list(self, prefix: str) -> Mapping[str, bytes]:
        return await self._call("list", prefix)  # type: ignore[no-any-return]

    async def delete(self, prefix: str) -> None:
        await self._call("delete", prefix)

    async def close(self) -> None:
        await self._call("close")


@asynccontextmanager
async def opened(pool: Pool) -> AsyncIterator[Sequence[Coordinator]]:
    """The coordinators of all processes of a pool."""
    coordinators = [RemoteCoordinator(pool, index) for index in range(pool.count)]
    yield coordinators
    for coordinator in coordinators:
        await coordinator.close()
