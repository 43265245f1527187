"""Processes of one job, started once, in which many tests call functions.

    pool = Pool("torch", 2, directory)
    pool.all("tests.coordinators.calls:shake", root="x")   # in every process, results in order
    call = pool.start(1, wait_for_it, "key")               # goes on
    pool.stop(0)
    with pytest.raises(StoreError):
        call.result(20)

A function gets the `Worker` of its process first. Plain functions run one after the other in the
main thread; coroutine functions run concurrently on one event loop. Arguments, results and
exceptions are pickled.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from tests.ports import free_port
from tests.preloaded import Forked, Preloaded, preloaded
from tests.processes.messages import Ask, Cancel, Start

REPOSITORY = Path(__file__).parents[2]

CALL_S = 60.0
"""Time limit of a call."""

START_S = 120.0
"""Time limit of the start, with imports."""

STACKS_S = 10.0
"""How long a process that hangs may take to begin to write its stacks."""

Function = str | Callable[..., Any]

WORKER = "tests.processes.worker"

PRELOADED = {
    "jax": ("tests.processes.jax_cases", "tests.processes.jax_exchange_cases", WORKER),
    "numpy": ("tests.processes.failure_cases", "tests.processes.numpy_cases", WORKER),
    "torch": ("tests.processes.torch_cases", "tests.processes.torch_exchange_cases", WORKER),
}
"""What processes of a kind import, made once for all that have the same hash seed."""

HASH_SEEDS = 2
"""How many there are of preloaded processes: neighbours have different ones."""


class ProcessDiedError(Exception):
    """The process ended before it answered."""


class Call:
    """A call that is being made.

    Attributes:
        future: its outcome.
    """

    def __init__(self, member: _Member, number: int, what: str) -> None:
        self._member = member
        self._number = number
        self._what = what
        self.future: Future[Any] = Future()

    def result(self, timeout_s: float = CALL_S) -> Any:
        """Return or raise the outcome; fails with the stacks of the process when time is up."""
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            if not self.future.done():
                raise AssertionError(
                    f"{self._what}: no answer for {timeout_s} s\n{self._member.stacks()}"
                ) from None
            raise

    async def wait(self) -> Any:
        """Return or raise the outcome. Cancelling cancels the coroutine in the process."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self.future))
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the coroutine; the outcome is then a `CancelledError`, unless it had ended."""
        self._member.send(Cancel(self._number))


class Pool:
    """A job of several processes on this machine; neighbours have different hash seeds.

    Args:
        kind: `jax` or `torch`, whose runtime is initialised in every process, or `numpy`.
        count: number of processes.
        directory: shared by them; gets their stderr.
        settings: of jax: `devices` of each process, `recoverability`, and `initialize`, a dict of
            keywords of `jax.distributed.initialize`.
    """

    def __init__(self, kind: str, count: int, directory: Path, **settings: Any) -> None:
        self.kind = kind
        self.count = count
        self.directory = directory
        address = f"127.0.0.1:{free_port()}"
        self._members: list[_Member] = []
        try:
            for index in range(count):
                start = Start(kind, index, count, address, str(directory), settings)
                self._members.append(_Member(start))
            for member in self._members:
                member.ready.result(START_S)
        except BaseException:
            self.close()
            raise

    def start(self, process: int, function: Function, *args: Any, **keywords: Any) -> Call:
        """Begin a call in one process."""
        return self._members[process].start(function, args, keywords)

    def run(
        self,
        process: int,
        function: Function,
        *args: Any,
        timeout_s: float = CALL_S,
        **keywords: Any,
    ) -> Any:
        """Return the result of a call in one process."""
        return self.start(process, function, *args, **keywords).result(timeout_s)

    def all(
        self, function: Function, *args: Any, timeout_s: float = CALL_S, **keywords: Any
    ) -> list[Any]:
        """Return the results of the same call in all processes; raise the first exception."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s, **keywords)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(
        self,
        function: Function,
        *args: Any,
        processes: Sequence[int] | None = None,
        timeout_s: float = CALL_S,
        **keywords: Any,
    ) -> list[Any]:
        """Return results or exceptions of the same call in all, or in some, processes."""
        chosen = range(self.count) if processes is None else processes
        calls = [self.start(process, function, *args, **keywords) for process in chosen]
        end = time.monotonic() + timeout_s
        outcomes = []
        for call in calls:
            try:
                outcomes.append(call.result(max(end - time.monotonic(), 0.0)))
            except AssertionError:
                raise
            except BaseException as error:
                outcomes.append(error)
        return outcomes

    def kill(self, process: int) -> None:
        """Kill a process, as a crash would; its calls raise `ProcessDiedError`."""
        self._members[process].kill()

    def stop(self, process: int) -> None:
        """Stop a process until `resume`."""
        self._members[process].signal(signal.SIGSTOP)

    def resume(self, process: int) -> None:
        """Let a stopped process go on."""
        self._members[process].signal(signal.SIGCONT)

    def pid(self, process: int) -> int:
        """Return the process id."""
        return self._members[process].process.pid

    def alive(self) -> list[int]:
        """Return the processes that have not ended."""
        return [i for i, member in enumerate(self._members) if member.process.poll() is None]

    def close(self) -> None:
        """End all processes, stopped ones too, and what reads their files."""
        for member in self._members:
            member.kill()
        for member in self._members:
            member.join()


class _Member:
    """One process, seen from the test."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self.ready: Future[Any] = Future()
        ours, theirs = multiprocessing.Pipe()
        self._pipe: Connection = ours  # type: ignore[assignment]
        self._stderr = Path(start.directory) / f"stderr-{start.index}.txt"
        with theirs, self._stderr.open("ab") as stderr:
            self.process = _started(start, theirs.fileno(), stderr)
        self.send(start)
        self._reader = threading.Thread(target=self._read, name="tests-pool", daemon=True)
        self._reader.start()

    def start(self, function: Function, args: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        number = next(self._numbers)
        call = Call(self, number, f"{function} in process {self._start.index}")
        with self._lock:
            self._calls[number] = call
        try:
            self.send(Ask(number, function, args, keywords))
        except OSError:
            self._end()
        return call

    def send(self, message: object) -> None:
        with self._lock:
            self._pipe.send(message)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def join(self) -> None:
        self._reader.join(CALL_S)
        assert not self._reader.is_alive()

    def stacks(self) -> str:
        """Return the end of what the process has written, with the stacks of its threads."""
        before = self._stderr.stat().st_size
        end = time.monotonic() + STACKS_S
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGUSR1)
        while self._stderr.stat().st_size == before and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)  # it writes all threads at once
        return self._stderr.read_text(errors="replace")[-8000:]

    def _read(self) -> None:
        try:
            while True:
                told = self._pipe.recv()
                with self._lock:
                    call = self._calls.pop(told.number, None)
                future = self.ready if call is None else call.future
                if told.error is not None:
                    future.set_exception(told.error)
                else:
                    future.set_result(told.value)
        except (EOFError, OSError):
            self._end()

    def _end(self) -> None:
        status = self.process.wait()
        with self._lock:
            calls, self._calls = list(self._calls.values()), {}
        text = self._stderr.read_text(errors="replace")[-4000:]
        error = ProcessDiedError(
            f"process {self._start.index} of {self._start.count} ended with status {status}\n{text}"
        )
        if not self.ready.done():
            self.ready.set_exception(error)
        for call in calls:
            call.future.set_exception(error)


def _started(start: Start, pipe: int, stderr: IO[bytes]) -> Forked | subprocess.Popen[bytes]:
    """Return the process of a member, which reads from the pipe what it is."""
    if sys.platform == "linux":
        server = server_of(start.kind, start.index)
        return server.start(WORKER, str(pipe), stderr=stderr, pass_fds=[pipe])
    return subprocess.Popen(
        [sys.executable, "-m", WORKER, str(pipe)],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONHASHSEED": str(1000 + start.index),
            "PYTHONPATH": str(REPOSITORY),
        },
        pass_fds=[pipe],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )


def server_of(kind: str, index: int) -> Preloaded:
    """Return the server from which the process of this kind and index is forked."""
    seed = ("PYTHONHASHSEED", str(1000 + index % HASH_SEEDS))
    # JAX looks at its variable as it is imported.
    return preloaded(PRELOADED[kind], (seed, ("JAX_PLATFORMS", "cpu")))
