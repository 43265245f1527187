"""Subjects of the remote benchmarks: each saves workloads to an object store and restores them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.local.stall import watched
from benchmarks.subject import Restored
from benchmarks.workloads import Tree, Workload
from tests.simulator.clients import Endpoints

Values = dict[str, float]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setup:
    """Arguments that a subject gets when its process begins.

    Attributes:
        endpoints: of the service.
        prefix: of its objects; nobody else's begin with it.
        directory: an empty directory of its own.
        budget_nbytes: staging memory, for those who have such a budget.
    """

    endpoints: Endpoints
    prefix: str
    directory: Path
    budget_nbytes: int


class Subject(ABC):
    """One way to save and restore; `name` is that of one checkpoint, a number not used before."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def open(self, workload: Workload) -> None:
        """Do what is done once for a workload, and not for every save."""
        return None

    def prepare(self, workload: Workload) -> None:
        """Memory for saves of this workload is there, where somebody keeps such memory."""
        return None

    @abstractmethod
    def save(self, workload: Workload, name: int) -> Values:
        """Save the workload; `wall_s` is how long that took."""

    @abstractmethod
    def restore(self, workload: Workload, name: int) -> Restored:
        """Restore a save, in memory that the package allocates."""

    def restore_into(self, targets: Tree, name: int) -> Restored:
        """Restore a save into the arrays of `targets`."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore into given arrays")

    def background(self, workload: Workload, name: int) -> Values:
        """As `save`, and how long the caller's event loop stood still meanwhile.

        Who has no asynchronous interface is called in a thread, as asyncio's users would do.
        """

        async def saved() -> None:
            await asyncio.to_thread(self.save, workload, name)

        return run(watched(saved))

    def discard(self, name: int) -> None:
        """Forget a save that was deleted."""
        return None

    def close(self) -> None:
        """Threads and sessions are gone."""
        return None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def loop_factory() -> Any:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
