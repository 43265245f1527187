"""Processes that do what their parent says, all of them at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 120.0
"""Seconds that a process may take to answer, and to end."""


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
