"""Processes that do what their parent says: one thing, or several at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT_S = 120.0
"""Seconds that a process may take to answer, and to end."""


def apart(work: Callable[..., T], *given: Any) -> T:
    """Return what a function returns in a process of its own, which is gone then.

    Raises:
        RuntimeError: the function raised, or the process ended; the message says why.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(work, given, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found, failure = mine.recv()
    except EOFError:
        process.join()
        found, failure = None, f"it ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if failure:
        raise RuntimeError(f"{work.__name__} failed in a process of its own: {failure}")
    result: T = found
    return result


def _answer(work: Callable[..., object], given: Sequence[Any], pipe: Connection) -> None:
    os.dup2(2, 1)  # libraries that print do not print into the results
    try:
        answer = work(*given), ""
    except Exception:
        answer = None, traceback.format_exc()
    pipe.send(answer)


class Workers:
    """Running processes, each at the other end of a pipe."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def tell(self, word: Any) -> None:
        """Say the same to every process."""
        for pipe in self._pipes:
            pipe.send(word)

    def answers(self) -> list[Any]:
        """Return what every process says next."""
        found = []
        for number, pipe in enumerate(self._pipes):
            if not pipe.poll(LIMIT_S):
                raise TimeoutError(f"process {number} of {len(self._pipes)} has said nothing")
            found.append(pipe.recv())
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
    processes = []
    try:
        for given in arguments:
            mine, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(*given, theirs), daemon=True))
            processes[-1].start()
            pipes.append(mine)
        workers = Workers(pipes)
        yield workers
        workers.tell(None)
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
