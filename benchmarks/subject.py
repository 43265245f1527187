"""Interface of the subjects that save and restore workloads."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from benchmarks.workloads import Tree, Workload

T = TypeVar("T")


async def awaited(work: Awaitable[T]) -> tuple[T, float]:
    """Return the result of a coroutine, and the seconds that it takes."""
    start = time.perf_counter()
    return await work, time.perf_counter() - start


def budget_nbytes(state_nbytes: int) -> int:
    """Return the byte budget with which we save and restore a state of so many bytes.

    It is staged once, and the memory of a dropped restored state is kept for the next restore; a
    response of an object store counts up to twice. Slots are rounded up per stage.
    """
    return 2 * state_nbytes + state_nbytes // 16 + (128 << 20)


@dataclass(frozen=True, slots=True)
class Saved:
    """A finished save: where it lies, and what was timed.

    `values` holds `wall_s` (durable), `as_shipped_s` and `stall_s` (until the state may change).
    """

    path: Path
    values: Mapping[str, float]
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Restored:
    """A finished restore: what came back (nested, or flat by path), and what was timed."""

    tree: Tree
    values: Mapping[str, float]
    flat: bool = False


@dataclass(slots=True)
class Subject(ABC):
    """One way to save and restore; its checkpoints go below `directory`."""

    name: ClassVar[str] = ""
    restores_in_place: ClassVar[bool] = True
    keeps_memory: ClassVar[bool] = False
    """Whether it uses memory again that it keeps, so that none has to be ready for it."""
    warms_up: ClassVar[bool] = True
    """Whether its first save or restore may take longer than those that follow."""

    directory: Path
    _count: int = field(default=0, init=False)

    @abstractmethod
    def save(self, workload: Workload) -> Saved:
        """Save the workload under a new name."""

    @abstractmethod
    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """Restore a save in memory that the package allocates, and touch every page."""

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """Restore a save into the arrays of `targets`."""
        raise NotImplementedError(f"{self.name} cannot restore into given arrays")

    def fresh_nbytes(self, workload: Workload) -> int:
        """Return the memory that has to be ready for a save or restore of the workload."""
        return 0 if self.keeps_memory else workload.fresh_nbytes

    @property
    def deletes_older(self) -> bool:
        """Whether a save deletes the checkpoint before it."""
        return False

    def discard(self, saved: Saved) -> None:
        """Delete the checkpoint."""
        if saved.path.is_dir():
            shutil.rmtree(saved.path)
        else:
            saved.path.unlink()

    def close(self) -> None:
        """End the subject's threads and loops."""
        return None

    def _new_path(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._count += 1
        return self.directory / f"{self._count:04}"
