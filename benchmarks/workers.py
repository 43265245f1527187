"""Processes that do what their parent says: one thing, or several at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar, cast

T = TypeVar("T")

LIMIT_S = 120.0
"""Seconds that a process may take to answer, and to end."""


class Workers:
    """Running processes, each at the other end of a pipe."""

    def __init__(self, pipes: Sequence[Connection], processes: Sequence[SpawnProcess]) -> None:
        self._pipes = pipes
        self._processes = processes

    def tell(self, word: Any) -> None:
        """Say the same to every process."""
        for pipe in self._pipes:
            pipe.send(word)

    def answers(self, limit_s: float | None = LIMIT_S) -> list[Any]:
        """Return the next answer of every process; with `limit_s=None`, wait without a limit."""
        found = []
        for number, pipe in enumerate(self._pipes):
            name = f"process {number} of {len(self._pipes)}"
            if not pipe.poll(limit_s):
                raise TimeoutError(f"{name} has said nothing")
            try:
                found.append(pipe.recv())
            except (EOFError, OSError):
                self._processes[number].join(LIMIT_S)
                status = self._processes[number].exitcode
                raise RuntimeError(f"{name} has ended with status {status}") from None
        return found

    def ask(self, word: Any) -> list[Any]:
        """Say the same to every process, and return what each answers."""
        self.tell(word)
        return self.answers()


@contextlib.contextmanager
def started(work: Callable[..., None], arguments: Iterable[Sequence[Any]]) -> Iterator[Workers]:
    """Run a process for each of the `arguments` until the block ends.

    Args:
        work: gets the arguments and its end of a pipe, and ends when it is told None.
        arguments: those of each process.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for given in arguments:
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(*given, theirs), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()  # so that the end of the process is noticed
            pipes.append(mine)
        workers = Workers(pipes, processes)
        yield workers
        workers.tell(None)
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def apart(work: Callable[..., T], *given: Any) -> T:
    """Return what a function returns in a process of its own.

    Raises:
        RuntimeError: the function raised, or the process ended; the message says why.
    """
    found, failure = None, ""
    try:
        with started(_answer, [(work, given)]) as workers:
            ((found, failure),) = workers.answers(limit_s=None)
    except RuntimeError as error:
        failure = str(error)
    if failure:
        raise RuntimeError(f"{work.__name__} failed in a process of its own: {failure}")
    return cast(T, found)


def _answer(work: Callable[..., object], given: Sequence[Any], pipe: Connection) -> None:
    os.dup2(2, 1)  # what libraries print does not get into the results
    try:
        pipe.send((work(*given), ""))
    except Exception:
        pipe.send((None, traceback.format_exc()))
    pipe.recv()
