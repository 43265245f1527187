"""A filesystem that does not answer holds nobody up, and one that cannot be made says nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import asyncckpt
from asyncckpt import SaveOptions
from asyncckpt.errors import DeadlineExceededError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.fsspec_session import FilesystemSession
from asyncckpt.stores.objects.clients.opening import open_client
from tests.simulator import Simulator

SECRET = "zXsecretX0815"


class Stuck:
    """A call that does not return until it is let go."""

    def __init__(self, end: Callable[[], Any] = lambda: None) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self._end = end

    def __call__(self) -> Any:
        self.begun.set()
        assert self.go.wait(60)
        return self._end()

    async def reached(self) -> None:
        """The call has begun."""
        assert await asyncio.to_thread(self.begun.wait, 30)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stuck = Stuck()
    yield stuck
    stuck.go.set()


@pytest.fixture
def workers() -> Iterator[Workers]:
    """One thread; whoever is stuck in it must have been given up when the test ends."""
    workers = Workers(1, "test-clients")
    yield workers
    ended = threading.Thread(target=workers.shutdown, daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()


async def cancelled(task: asyncio.Task[Any]) -> None:
    """The task has ended soon after it was cancelled."""
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task


# ----------------------------------------------------------------------------------------- threads


async def test_closing_does_not_wait_for_credentials_that_do_not_come(
    workers: Workers, stuck: Stuck
) -> None:
    """Nor for what somebody waited for who has given up since."""
    session = FilesystemSession(stuck, workers)
    opening = asyncio.create_task(session.filesystem())
    await stuck.reached()
    await cancelled(opening)
    async with asyncio.timeout(30):
        await session.close()
        assert await workers.run(int, "3") == 3


async def test_credentials_that_come_late_are_used(workers: Workers) -> None:
    """The lookup goes on when the first request runs out of its time."""
    made = object()
    slow = Stuck(lambda: made)
    session = FilesystemSession(slow, workers)
    first = asyncio.create_task(session.filesystem())
    await slow.reached()
    await cancelled(first)
    second = asyncio.create_task(session.filesystem())
    slow.go.set()
    assert await second is made
    assert await session.filesystem() is made
    await session.close()


class Connection:
    """The session of a filesystem; also the filesystem itself."""

    async_impl = True
    closed = False

    async def set_session(self) -> Connection:
        return self

    async def close(self) -> None:
        self.closed = True


async def test_a_filesystem_that_comes_after_the_last_wait_is_closed(workers: Workers) -> None:
    made = Connection()
    slow = Stuck(lambda: made)
    session = FilesystemSession(slow, workers)
    opening = asyncio.create_task(session.filesystem())
    await slow.reached()
    await cancelled(opening)
    slow.go.set()
    await workers.run(int)  # after the one thread has made it
    await session.close()
    assert made.closed


class Dead(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem that is not async, and whose server does not answer once it is `dead`."""

    protocol = "dead"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    dead: Stuck | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(str(path).replace("dead://", "memory://"))
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        if self.dead is not None and "/d/" in path:
            self.dead()
        super().pipe_file(path, value, mode=mode, **more)


async def test_a_checkpointer_is_closed_though_its_filesystem_does_not_answer(
    stuck: Stuck,
) -> None:
    filesystem = Dead(skip_instance_cache=True)
    async with asyncio.timeout(60):
        async with asyncckpt.Checkpointer(
            "dead://run",
            storage_options={"filesystem": filesystem},
            save_options=SaveOptions(deadline_s=1.0),
        ) as ckpt:
            await ckpt.save(0, {"w": [1.0]}, options=SaveOptions(deadline_s=60.0))
            filesystem.dead = stuck
            with pytest.raises(DeadlineExceededError):
                await ckpt.save(1, {"w": [1.0]})
            filesystem.dead = None
            assert stuck.begun.is_set()
    assert not stuck.go.is_set()


# ------------------------------------------------------------------------------------ what is told


async def test_what_no_filesystem_could_be_made_with_is_in_no_log(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    """The library says it in its error, and asyncio logs errors that nobody has waited for."""

    def fail() -> Any:
        raise ValueError(f"{SECRET} is no token")

    slow = Stuck(fail)
    session = FilesystemSession(slow, workers)
    with caplog.at_level(logging.DEBUG):
        opening = asyncio.create_task(session.filesystem())
        await slow.reached()
        await cancelled(opening)
        slow.go.set()
        await workers.run(int)  # it has ended
        await asyncio.sleep(0)
        await session.close()
        del opening, session, slow
        gc.collect()
        await asyncio.sleep(0)
    assert SECRET not in caplog.text
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
async def test_options_that_no_filesystem_can_be_made_with_are_in_no_log(
    workers: Workers, sim: Simulator, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    if scheme == "gs":
        options = sim.gcs_options(token=SECRET)
    else:
        options = sim.s3_options(client="fsspec", endpoint_url=f"http//u:{SECRET}@127.0.0.1:1")
    with caplog.at_level(logging.DEBUG):
        for ahead in range(4):
            client = open_client(f"{scheme}://bucket/run", storage_options=options, workers=workers)
            asking = asyncio.create_task(client.size("key"))
            for _ in range(ahead):
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await workers.run(int)
            await asyncio.sleep(0)
            await client.close()
        del client, asking
        gc.collect()
        await asyncio.sleep(0)
    assert SECRET not in caplog.text
