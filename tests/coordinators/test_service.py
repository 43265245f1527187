"""Calls that block: they are given up, not waited for."""

from __future__ import annotations

import asyncio
import gc
import queue
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest

from asyncckpt.coordinators import service
from asyncckpt.coordinators.service import ServiceCoordinator
from asyncckpt.errors import ClosedError, StoreError


class Server:
    """Holds keys, and can be stopped."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.running = threading.Event()
        self.running.set()
        self.asked = threading.Event()  # while stopped
        self.connections = 0
        self.connected: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.error: Exception | None = None

    async def asked_in_vain(self) -> None:
        """A thread waits for an answer."""
        assert await asyncio.to_thread(self.asked.wait, 30)

    def connect(self) -> Connection:
        self.connections += 1
        made = Connection(self)
        self.connected.add(made)
        return made


class Connection:
    def __init__(self, server: Server) -> None:
        self._server = server

    def _answer(self) -> dict[str, bytes]:
        if not self._server.running.is_set():
            self._server.asked.set()
        assert self._server.running.wait(30)
        if self._server.error is not None:
            raise self._server.error
        return self._server.values

    def put(self, key: str, value: bytes) -> None:
        self._answer()[key] = value

    def put_once(self, key: str, value: bytes) -> bytes:
        return self._answer().setdefault(key, value)

    def look(self, key: str) -> bytes | None:
        return self._answer().get(key)

    def list(self, prefix: str) -> Mapping[str, bytes]:
        return self._answer()

    def delete(self, prefix: str) -> None:
        self._answer().clear()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.running.set()
    assert no_threads()


def names() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("asyncckpt-test-")}


def no_threads() -> bool:
    for _ in range(200):
        if not names():
            return True
        time.sleep(0.01)
    return False


@asynccontextmanager
async def coordinating(server: Server) -> AsyncIterator[ServiceCoordinator[Connection]]:
    made = ServiceCoordinator("test", 1, 2, server.connect)
    yield made
    await made.close()


async def test_one_thread_serves_until_close(server: Server) -> None:
    async with coordinating(server) as coordinator:
        assert names() == set()
        await coordinator.put("a", b"x")
        assert await coordinator.look("a") == b"x"
        assert names() == {"asyncckpt-test-coordinator"}
        assert server.connections == len(server.connected) == 1
    assert names() == set()
    assert not server.connected
    with pytest.raises(ClosedError, match=r"look\(a\) after close"):
        await coordinator.look("a")


async def test_a_coordinator_dropped_without_close_ends_its_thread_and_connection(
    server: Server,
) -> None:
    coordinator = ServiceCoordinator("test", 1, 2, server.connect)
    await coordinator.put("a", b"x")
    assert len(names()) == len(server.connected) == 1
    (thread,) = (thread for thread in threading.enumerate() if thread.name in names())
    del coordinator
    gc.collect()
    await asyncio.to_thread(thread.join, 20)
    assert not thread.is_alive() and not server.connected


def test_a_caller_may_be_ended_at_any_instruction_of_its_calls(server: Server) -> None:
    """The garbage collector may drop a coordinator in the middle of a call of the same thread."""

    def ended_at(number: int) -> bool:
        caller, left = service._Caller("asyncckpt-test-ended", server.connect), number

        def trace(frame: FrameType, what: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in (service.__file__, queue.__file__):
                return None
            frame.f_trace_opcodes = True
            if what == "opcode":
                left -= 1
                if left == 0:
                    caller.end()
            return trace

        def call() -> None:
            sys.settrace(trace)
            caller.submit(lambda connection: connection.look("a"))
            sys.settrace(None)

        in_time(call)
        happened = left <= 0
        caller.end()
        in_time(caller.thread.join)
        return happened

    number = 1
    while ended_at(number) or number == 1:  # Python 3.12 traces instructions from the second time
        number += 1
    assert number > 10


def in_time(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"


async def test_cancelling_returns_while_the_server_is_stopped(server: Server) -> None:
    async with coordinating(server) as coordinator:
        await coordinator.put("a", b"x")
        server.running.clear()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(coordinator.look("a")) for _ in range(3)]
            await server.asked_in_vain()
            for call in calls:
                call.cancel()
        server.running.set()
        assert await coordinator.look("a") == b"x"
        assert server.connections == 1


async def test_a_message_of_a_cancelled_call_arrives_when_the_server_answers_again(
    server: Server,
) -> None:
    async with coordinating(server) as coordinator:
        await coordinator.put("a", b"x")
        server.running.clear()
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(coordinator.look("a")),  # the thread is in this one
                group.create_task(coordinator.put_once("decision", b"no")),
                group.create_task(coordinator.put("b", b"y")),
            ]
            await server.asked_in_vain()
            for call in calls:
                call.cancel()
        server.running.set()
        assert await coordinator.look("decision") == b"no"
        assert await coordinator.look("b") == b"y"


async def test_close_refuses_what_the_thread_has_not_begun(server: Server) -> None:
    async with coordinating(server) as coordinator:
        server.running.clear()

        async def put(key: str) -> str:
            try:
                await coordinator.put(key, b"x")
            except ClosedError:
                return "refused"
            return "put"

        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(put(key)) for key in ("a", "b", "c")]
            await server.asked_in_vain()
            closing = group.create_task(coordinator.close())
            await asyncio.sleep(0.05)
            server.running.set()
            await closing
        assert [call.result() for call in calls] == ["put", "refused", "refused"]


async def test_a_call_without_an_answer_abandons_its_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinating(server) as coordinator:
        await coordinator.put("a", b"x")
        monkeypatch.setattr(service, "CALL_LIMIT_S", 0.2)
        server.running.clear()
        errors = []
        async with asyncio.TaskGroup() as group:

            async def look() -> None:
                with pytest.raises(StoreError) as info:
                    await coordinator.look("a")
                errors.append(str(info.value))

            for _ in range(3):
                group.create_task(look())
        for error in errors:
            assert error.startswith("test coordinator, process 1 of 2: look(a): no answer for")
            assert "the thread asyncckpt-test-coordinator was abandoned" in error
        monkeypatch.undo()
        server.running.set()
        # A new thread with a new connection.
        assert await coordinator.look("a") == b"x"
        assert server.connections == 2
        assert "asyncckpt-test-coordinator-2" in names()


async def test_abandoned_threads_do_not_pile_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with coordinating(server) as coordinator:
        server.running.clear()
        monkeypatch.setattr(service, "CALL_LIMIT_S", 0.05)
        for _ in range(service.ABANDONED_MAX):
            with pytest.raises(StoreError, match="was abandoned"):
                await coordinator.look("a")
        monkeypatch.undo()  # a call that waits takes 10 s from here on
        begun = time.monotonic()
        for _ in range(3):
            with pytest.raises(StoreError, match="4 earlier calls are still unanswered"):
                await coordinator.look("a")
        assert time.monotonic() - begun < service.CALL_LIMIT_S
        assert len(names()) == service.ABANDONED_MAX
        server.running.set()
        assert no_threads()
        assert await coordinator.look("a") is None


async def test_close_does_not_wait_for_a_stopped_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CLOSE_S", 0.1)
    coordinator = ServiceCoordinator("test", 0, 2, server.connect)
    server.running.clear()
    call = asyncio.ensure_future(coordinator.look("a"))
    waiting = asyncio.ensure_future(coordinator.put("a", b"x"))
    await server.asked_in_vain()
    await coordinator.close()
    assert names() == {"asyncckpt-test-coordinator"}
    server.running.set()
    # The call that was under way ends; the one behind it is never made.
    assert await call is None
    with pytest.raises(ClosedError):
        await waiting
    assert server.values == {}


async def test_an_error_is_told_and_ends_the_connection(server: Server) -> None:
    async with coordinating(server) as coordinator:
        server.error = ConnectionResetError("reset by peer")
        coordinator.server = "process 0 (h:1)"
        told = r"put\(a\) failed: ConnectionResetError: reset by peer; process 0 \(h:1\) serves"
        with pytest.raises(StoreError, match=told):
            await coordinator.put("a", b"x")
        server.error = None
        await coordinator.put("a", b"x")
        assert server.connections == 2


def test_two_engines_that_make_the_first_calls_at_once_share_a_thread(server: Server) -> None:
    coordinator = ServiceCoordinator("test", 1, 2, server.connect)
    together = threading.Barrier(4)

    def look() -> None:
        together.wait()
        asyncio.run(coordinator.look("a"))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.connections == len(names()) == 1
    asyncio.run(coordinator.close())
