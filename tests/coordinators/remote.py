"""Coordinators of other processes: functions that run there, and their proxies here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

from asyncckpt.coordinators import service
from asyncckpt.coordinators.choice import choose
from asyncckpt.coordinators.directory import DirectoryCoordinator
from asyncckpt.coordinators.group import part
from asyncckpt.coordinators.handshake import shake_hands
from asyncckpt.errors import StoreError
from asyncckpt.ports import Coordinator
from tests.processes.pool import Pool
from tests.processes.worker import Worker


async def open_coordinator(worker: Worker) -> tuple[str, int, int]:
    """The coordinator of the process's runtime is open; its name, index and count."""
    coordinator = of_process(worker)
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


async def shake_in_process(worker: Worker, parting: bool) -> tuple[str, int, int]:
    """Hands are shaken: the run, the processes on this host, and the keys after parting."""
    coordinator = of_process(worker)
    group = await shake_hands(coordinator, root="/run", opened=1, arrival_s=20)
    if parting:
        await part(group)
        # The other one may not have left yet; the last one out leaves nothing.
        for _ in range(100):
            left = await coordinator.list(group.key())
            if not left:
                break
            await asyncio.sleep(0.02)
    left = await coordinator.list(group.key())
    await coordinator.close()
    return group.run_id, group.processes_on_host, len(left)


def of_process(worker: Worker) -> Coordinator:
    """A new coordinator of the process."""
    if worker.kind != "numpy":
        return choose("auto")
    return DirectoryCoordinator(
        worker.directory / "keys", process_index=worker.index, process_count=worker.count
    )


def chosen(worker: Worker) -> tuple[str, int, int]:
    """Name, index and count of the coordinator that `auto` chooses."""
    coordinator = choose("auto")
    return coordinator.name, coordinator.process_index, coordinator.process_count


def missing_methods(worker: Worker) -> list[str]:
    """Required methods that the client of the runtime lacks."""
    from jax._src import distributed

    from asyncckpt.coordinators.jax import CLIENT_METHODS

    client = distributed.global_state.client
    return [name for name in CLIENT_METHODS if not callable(getattr(client, name, None))]


# ------------------------------------------------------- while the server of the store is stopped


def threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("asyncckpt"))


async def cancel_while_stopped(worker: Worker) -> tuple[float, float, list[str]]:
    """Seconds until a cancelled call and `close` return, and the threads that are left."""
    coordinator = of_process(worker)
    tasks = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(coordinator.put("asyncckpt/y", b"y"))
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((call,))
    cancelled_s = time.monotonic() - begun
    await coordinator.close()
    assert call.cancelled()
    assert asyncio.all_tasks() == tasks
    return cancelled_s, time.monotonic() - begun - cancelled_s, threads()


async def give_up_while_stopped(worker: Worker) -> tuple[list[str], list[str]]:
    """The errors of two calls with a short limit, and the new threads."""
    before = threads()
    coordinator = worker.state["given up"] = of_process(worker)
    errors = []
    with mock.patch.object(service, "CALL_LIMIT_S", 1.0):
        for _ in range(2):
            try:
                await coordinator.look("asyncckpt/x")
            except StoreError as error:
                errors.append(str(error))
    left = threads()
    for name in before:
        left.remove(name)
    return errors, left


async def answers_again(worker: Worker) -> bytes | None:
    coordinator = worker.state["given up"]
    await coordinator.put("asyncckpt/x", b"value")
    value: bytes | None = await coordinator.look("asyncckpt/x")
    await coordinator.delete("asyncckpt/x")
    await coordinator.close()
    return value


async def await_silence(worker: Worker) -> list[str]:
    """The coordinators' threads that are left after a while; there should be none."""
    await worker.state["coordinator"].close()
    for _ in range(500):
        if not threads():
            break
        await asyncio.sleep(0.02)
    return threads()
