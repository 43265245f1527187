"""One process of a `tests.processes.pool.Pool`: it serves calls that arrive over a pipe."""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.processes.messages import Ask, Cancel, RemoteError, Start, Told


@dataclass
class Worker:
    """What a function that a test calls in a process gets as its first argument.

    Attributes:
        kind: `jax`, `torch` or `numpy`.
        index: number of this process.
        count: number of processes.
        directory: a directory that all processes of the pool and the test share.
        state: what functions keep between calls.
    """

    kind: str
    index: int
    count: int
    directory: Path
    state: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Join the runtime, then serve. Coroutines run on one loop, functions in the main thread."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = Connection(int(sys.argv[1]))
    start: Start = pipe.recv()
    RUNTIMES[start.kind](start)
    worker = Worker(start.kind, start.index, start.count, Path(start.directory))
    _Server(pipe, worker).serve()


class _Server:
    def __init__(self, pipe: Connection, worker: Worker) -> None:
        self._pipe = pipe
        self._worker = worker
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Ask, Callable[..., Any]]] = queue.SimpleQueue()
        self._running: dict[int, Future[Any]] = {}
        self._loop = asyncio.new_event_loop()

    def serve(self) -> None:
        threading.Thread(target=self._loop.run_forever, name="loop", daemon=True).start()
        threading.Thread(target=self._read, name="pipe", daemon=True).start()
        self._tell(-1, None)
        while True:
            ask, function = self._calls.get()
            try:
                value = function(self._worker, *ask.args, **ask.keywords)
            except BaseException as error:
                self._fail(ask.number, error)
            else:
                self._tell(ask.number, value)

    def _read(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except EOFError:
                os._exit(0)  # the test has ended: no runtime's exit handlers, which wait for others
            if isinstance(message, Cancel):
                future = self._running.get(message.number)
                if future is not None:
                    future.cancel()
                continue
            try:
                function = _resolve(message.function)
            except BaseException as error:
                self._fail(message.number, error)
                continue
            if inspect.iscoroutinefunction(function):
                coroutine = self._run(message, function)
                self._running[message.number] = asyncio.run_coroutine_threadsafe(
                    coroutine, self._loop
                )
            else:
                self._calls.put((message, function))

    async def _run(self, ask: Ask, function: Callable[..., Any]) -> None:
        try:
            value = await function(self._worker, *ask.args, **ask.keywords)
        except BaseException as error:
            self._fail(ask.number, error)
        else:
            self._tell(ask.number, value)
        finally:
            self._running.pop(ask.number, None)

    def _fail(self, number: int, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RemoteError(f"{type(error).__name__}: {error}")
        error.add_note(f"in process {self._worker.index} of {self._worker.count}:\n{trace}")
        self._send(Told(number, error=error))

    def _tell(self, number: int, value: object) -> None:
        try:
            self._send(Told(number, value=value))
        except Exception as error:
            self._fail(number, error)

    def _send(self, told: Told) -> None:
        data = pickle.dumps(told)
        with self._lock:
            self._pipe.send_bytes(data)


def _resolve(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _numpy(start: Start) -> None:
    import numpy  # noqa: F401


def _jax(start: Start) -> None:
    devices = start.settings.get("devices", 1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax

    if start.settings.get("recoverability"):
        jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        start.address, start.count, start.index, **start.settings.get("initialize", {})
    )


def _torch(start: Start) -> None:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{start.address}", rank=start.index, world_size=start.count
    )


RUNTIMES: dict[str, Callable[[Start], None]] = {"jax": _jax, "numpy": _numpy, "torch": _torch}

if __name__ == "__main__":
    # The functions that tests call get the same classes as this module.
    importlib.import_module("tests.processes.worker").main()
