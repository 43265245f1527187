"""What a pool and its processes send each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class RemoteError(Exception):
    """An exception that cannot be pickled; its text is that of the exception."""


@dataclass(frozen=True)
class Start:
    """What a process is, the first message to it.

    Attributes:
        kind: `jax`, `torch` or `numpy`.
        index: number of the process.
        count: number of processes.
        address: where the runtime's service listens.
        directory: shared by all.
        settings: see `tests.processes.pool.Pool`.
    """

    kind: str
    index: int
    count: int
    address: str
    directory: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """A call of `function`, as `module:name`."""

    number: int
    function: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Cancel:
    """Cancels the coroutine of a call."""

    number: int


@dataclass(frozen=True)
class Told:
    """The outcome of a call; number -1 says that the process is ready."""

    number: int
    value: Any = field(default=None)
    error: BaseException | None = None
