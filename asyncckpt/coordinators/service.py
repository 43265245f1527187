"""Coordinators on key-value services whose calls block.

A call may block until its server answers, whatever its time limit: with the server stopped, calls
of torch's store with limits of 1 and 2 s returned after 10 and 21 s. So each coordinator makes its
calls in a daemon thread with its own connection, which can be abandoned and replaced.
"""

# Rule 1: an await never waits for the thread to leave a call: cancelling returns at once. A call
#   that changes keys is still made in its turn, so that an error reaches the other processes even
#   if the process that posts it does not wait for a slow server.
#   (test_cancelling_returns_while_the_server_is_stopped,
#   test_a_message_of_a_cancelled_call_arrives_when_the_server_answers_again)
# Rule 2: no call waits for a key; a wait consists of many calls, so that it delays no beat.
#   (test_waits_do_not_hold_up_other_calls)
# Rule 3: after an error the connection is not used again: torch's is then broken.
# Rule 4: a thread that has been in one call for `CALL_LIMIT_S` is abandoned. The next call gets a
#   new thread and connection; at most `ABANDONED_MAX` threads pile up.
#   (test_a_call_without_an_answer_abandons_its_thread)
# Rule 5: at the end of the process, all threads end first, if they do so in time. The interpreter
#   would unwind a thread that returns from a call, and torch's C++ code would abort the process.
#   (test_a_process_ends_well_whose_thread_makes_calls_to_the_end)
# Rule 6: the thread does not refer to its coordinator, and ends with it. The garbage collector may
#   drop a coordinator inside any call of any thread, so ending a caller takes no lock.
#   (test_a_caller_may_be_ended_at_any_instruction_of_its_calls)

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from asyncckpt.coordinators.key_values import check_key, check_message, pauses
from asyncckpt.errors import AsyncCheckpointError, ClosedError, StoreError
from asyncckpt.flow.engine import call_at_exit
from asyncckpt.flow.threads import seen, thread_error

CALL_LIMIT_S = 10.0
"""A call that has not returned after this time is given up."""

ABANDONED_MAX = 4
"""Number of live abandoned threads, each with a connection, at which calls fail at once."""

STOPPED_S = 0.2
"""Time to read an answer that arrived while this process itself was stopped."""

CLOSE_S = 1.0
"""How long `close` waits for its thread, and the end of the process for all threads."""


class Service(Protocol):
    """One connection to a key-value service, used only by the thread that made it.

    Its methods do what those of `ports.Coordinator` do, and may block. Any error means that the
    connection is broken: it is dropped, and ends with the last reference to it.
    """

    def put(self, key: str, value: bytes) -> None: ...
    def put_once(self, key: str, value: bytes) -> bytes: ...
    def look(self, key: str) -> bytes | None: ...
    def list(self, prefix: str) -> Mapping[str, bytes]: ...
    def delete(self, prefix: str) -> None: ...


S = TypeVar("S", bound=Service)
T = TypeVar("T")


class ServiceCoordinator(Generic[S]):
    """A `ports.Coordinator` that calls a service in a separate thread.

    Attributes:
        name: its name in messages.
        server: the process that serves the keys, for errors; empty if none does.
    """

    server = ""
    _caller: _Caller[S] | None = None

    def __init__(
        self, name: str, process_index: int, process_count: int, connect: Callable[[], S]
    ) -> None:
        self.name = name
        self.process_index = process_index
        self.process_count = process_count
        self._connect = connect
        self._started = 0
        self._abandoned: list[threading.Thread] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process {self.process_index} of {self.process_count})"

    def __del__(self) -> None:
        if self._caller is not None:  # dropped without `close`
            self._caller.end()

    async def put(self, key: str, value: bytes) -> None:
        """Set `key`, replacing any value."""
        check_message(key, value)
        await self.call(f"put({key})", lambda service: service.put(key, value), lasting=True)

    async def put_once(self, key: str, value: bytes) -> bytes:
        """Set `key` if it is not set; return the value that was set first."""
        check_message(key, value)
        return await self.call(
            f"put_once({key})", lambda service: service.put_once(key, value), lasting=True
        )

    async def look(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it is not set, without waiting."""
        check_key(key)
        return await self.call(f"look({key})", lambda service: service.look(key))

    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        """Return the value of `key` once it is set, None if it is still unset after `timeout_s`."""
        end = time.monotonic() + timeout_s
        for pause in pauses(self.process_count):
            value = await self.look(key)
            left_s = end - time.monotonic()
            if value is not None or left_s <= 0:
                return value
            await asyncio.sleep(min(pause, left_s))
        raise AssertionError("pauses never end")

    async def list(self, prefix: str) -> Mapping[str, bytes]:
        """Return all values whose keys begin with ``prefix/``, by the rest of their keys."""
        check_key(prefix)
        return await self.call(f"list({prefix})", lambda service: service.list(prefix))

    async def delete(self, prefix: str) -> None:
        """Delete the key `prefix` and all that begin with ``prefix/``; there may be none."""
        check_key(prefix)
        await self.call(f"delete({prefix})", lambda service: service.delete(prefix), lasting=True)

    async def close(self) -> None:
        """End connection and thread. Idempotent; the service and its keys remain."""
        self._closed = True
        caller, self._caller = self._caller, None
        if caller is None:
            return
        caller.end()
        end = time.monotonic() + CLOSE_S
        for pause in pauses(1):
            if not caller.thread.is_alive() or time.monotonic() >= end:
                return
            await asyncio.sleep(pause)

    async def call(self, what: str, function: Callable[[S], T], *, lasting: bool = False) -> T:
        """Make a call in the thread and return its result.

        Args:
            what: description of the call, for errors.
            function: makes the call.
            lasting: make the call even if it is cancelled before it begins.

        Cancellation: returns at once, see Rule 1.

        Raises:
            StoreError: the call failed or did not return.
            ClosedError: the coordinator was closed.
        """
        caller = self._serving(what)
        future = caller.submit(function, lasting=lasting)
        answer = asyncio.wrap_future(future)
        try:
            while not answer.done():
                await asyncio.wait((answer,), timeout=caller.time_left_s())
                if not answer.done() and caller.time_left_s() <= 0:
                    await asyncio.wait((answer,), timeout=STOPPED_S)
                    if not answer.done() and caller.time_left_s() <= 0:
                        raise self._abandon(caller, what)
        finally:
            answer.cancel()
            seen(answer)
        try:
            return answer.result()
        except AsyncCheckpointError:
            raise
        except Exception as error:
            why = f"; {self.server} serves the keys, and may have died" if self.server else ""
            raise StoreError(
                f"{self.name} coordinator, process {self.process_index} of {self.process_count}: "
                f"{what} failed: {type(error).__name__}: {error}{why}",
                retryable=True,
                found=str(error),
            ) from error

    def _serving(self, what: str) -> _Caller[S]:
        if self._closed:
            raise ClosedError(f"{self.name} coordinator: {what} after close()")
        if self._caller is not None and self._caller.pid != os.getpid():
            # Before the lock, which may be held for ever here, like the caller's queue.
            raise ClosedError(
                f"{self.name} coordinator: {what}: it was created before this process was "
                "forked; create a new one in the child"
            )
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= ABANDONED_MAX:
            raise self._no_answer(what, f"{ABANDONED_MAX} earlier calls are still unanswered")
        with _starting:
            if self._caller is None:
                self._started += 1
                number = f"-{self._started}" if self._started > 1 else ""
                name = f"asyncckpt-{self.name}-coordinator{number}"
                self._caller = _Caller(name, self._connect)
            return self._caller

    def _abandon(self, caller: _Caller[S], what: str) -> StoreError:
        # Every call that waits for this thread comes here; the first one drops it.
        if self._caller is caller:
            self._caller = None
            self._abandoned.append(caller.thread)
            caller.end()
        return self._no_answer(
            what,
            f"no answer for {CALL_LIMIT_S:.0f} s; the thread {caller.thread.name} was abandoned",
        )

    def _no_answer(self, what: str, why: str) -> StoreError:
        return StoreError(
            f"{self.name} coordinator, process {self.process_index} of {self.process_count}: "
            f"{what}: {why}. Check whether the process that serves the keys "
            f"({self.server or 'usually process 0'}) is stopped, and the network to its host",
            retryable=True,
        )


_Call = tuple[Future[Any], Callable[[Any], Any]]


class _Caller(Generic[S]):
    """A thread with a connection that makes one call after the other."""

    def __init__(self, name: str, connect: Callable[[], S]) -> None:
        self._connect = connect
        self._calls: deque[_Call] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each call, and the end
        self._busy_since: float | None = None
        self._ended = False
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            raise thread_error(name, error) from error
        _callers.add(self)

    def submit(self, function: Callable[[S], T], *, lasting: bool = False) -> Future[T]:
        """Queue a call; a `lasting` call cannot be cancelled."""
        future: Future[T] = Future()
        if lasting:
            future.set_running_or_notify_cancel()
        self._calls.append((future, function))
        self._wake.put(None)
        return future

    def time_left_s(self) -> float:
        """Return how long the thread may stay in its current call, or in the next one."""
        since = self._busy_since
        return CALL_LIMIT_S if since is None else since + CALL_LIMIT_S - time.monotonic()

    def end(self) -> None:
        """Let the thread end after its current call; queued calls are refused. Idempotent."""
        self._ended = True
        self._wake.put(None)

    def _serve(self) -> None:
        service: S | None = None
        while True:
            self._wake.get()
            if not self._calls:  # ended, and all calls were refused
                return
            future, function = self._calls.popleft()
            # A `lasting` call is marked as running; another may have been cancelled.
            if not (future.running() or future.set_running_or_notify_cancel()):
                continue
            if self._ended:
                future.set_exception(ClosedError("the coordinator was closed"))
                continue
            self._busy_since = time.monotonic()
            try:
                if service is None:
                    service = self._connect()
                result = function(service)
            except BaseException as error:
                service = None
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            self._busy_since = None
            del future, function


_callers: weakref.WeakSet[_Caller[Any]] = weakref.WeakSet()

_starting = threading.Lock()  # the engines of several `Checkpointer`s may share a coordinator


def _end_all() -> None:
    callers = [caller for caller in _callers if caller.thread.is_alive()]
    for caller in callers:
        caller.end()
    end = time.monotonic() + CLOSE_S
    for caller in callers:
        caller.thread.join(max(0.0, end - time.monotonic()))


call_at_exit(_end_all)
