"""asyncckpt as a subject of measurement."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import asyncckpt
from asyncckpt import blocking
from benchmarks.subject import Restored, Saved, Subject, awaited, budget_nbytes
from benchmarks.workloads import Tree, Workload, leaves


@dataclass(slots=True)
class AsyncCkpt(Subject):
    """asyncckpt: one `Checkpointer`, prepared once, with a budget for two whole states.

    Attributes:
        retention: the policy; None keeps every step.
        options: further ones for saves.
        unplanned: open a new `Checkpointer` for every save and prepare nothing, so that each is
            the first of its tree.
    """

    name: ClassVar[str] = "asyncckpt"
    keeps_memory: ClassVar[bool] = True

    retention: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unplanned: bool = False
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    checkpointer: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there is a checkpointer, and its pool is warm."""
        return self.checkpointer is not None

    @property
    def deletes_older(self) -> bool:
        """Whether there is retention."""
        return self.retention is not None

    def open(self, workload: Workload) -> Any:
        """Return the `Checkpointer`, its pool warm."""
        if self.checkpointer is None:
            self.checkpointer = self.make(workload.nbytes)
            if not self.unplanned:
                self.runner.run(self.checkpointer.prepare(workload.tree))
        return self.checkpointer

    def make(self, nbytes: int) -> Any:
        """Return a new `Checkpointer` for states of so many bytes."""
        return asyncckpt.Checkpointer(
            self.directory,
            keep=self.retention,
            save_options=asyncckpt.SaveOptions(
                host_memory_nbytes=budget_nbytes(nbytes), **self.options
            ),
        )

    def next_step(self) -> int:
        """Return a step that was not used yet."""
        self._count += 1
        return self._count

    def save(self, workload: Workload) -> Saved:
        """Time `await checkpointer.save(...)`, and how long it takes until `wait()` returns."""
        if self.unplanned:
            self._closed()
        checkpointer, step = self.open(workload), self.next_step()

        async def saved() -> tuple[Any, float, float]:
            report, wall_s = await awaited(checkpointer.save(step, workload.tree))
            _, waited_s = await awaited(checkpointer.wait())
            return report, wall_s, wall_s + waited_s

        report, wall_s, waited_s = self.runner.run(saved())
        values = {
            "wall_s": wall_s,
            "as_shipped_s": wall_s,
            "stall_s": report.blocked_s,
            "waited_s": waited_s,
        }
        return Saved(self.directory / str(step), values, step)

    def discard(self, saved: Saved) -> None:
        """Delete the step."""
        self.runner.run(self.checkpointer.delete(saved.handle))

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`await checkpointer.restore(step)`: arrays that the library allocates."""
        tree, wall_s = self.runner.run(awaited(self.checkpointer.restore(saved.handle)))
        return Restored(tree, {"wall_s": wall_s})

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """`await checkpointer.restore_into(targets)`."""
        restoring = self.checkpointer.restore_into(targets, step=saved.handle)
        _, wall_s = self.runner.run(awaited(restoring))
        return Restored(targets, {"wall_s": wall_s})

    def close(self) -> None:
        """Close the checkpointer and its loop."""
        try:
            self._closed()
        finally:
            self.runner.close()

    def _closed(self) -> None:
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            self.runner.run(checkpointer.close())


@dataclass(slots=True)
class OneShot(Subject):
    """The functions `asyncckpt.blocking.save`, `restore` and `restore_into`, given paths.

    Attributes:
        flat: what is restored was written without a tree, by another library.
    """

    name: ClassVar[str] = "asyncckpt, one-shot"

    flat: bool = False

    def save(self, workload: Workload) -> Saved:
        """`save(path, tree)`."""
        path = self._new_path()
        start = time.perf_counter()
        blocking.save(path, workload.tree)
        wall_s = time.perf_counter() - start
        return Saved(path, {"wall_s": wall_s, "as_shipped_s": wall_s, "stall_s": wall_s})

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`restore(path)`: arrays that the library allocates."""
        with unverified():
            start = time.perf_counter()
            tree = blocking.restore(saved.path)
            wall_s = time.perf_counter() - start
        return Restored(tree, {"wall_s": wall_s}, flat=self.flat)

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """`restore_into(path, targets)`."""
        target = dict(leaves(targets)) if self.flat else targets
        with unverified():
            start = time.perf_counter()
            blocking.restore_into(saved.path, target)
            wall_s = time.perf_counter() - start
        return Restored(targets, {"wall_s": wall_s})


class unverified(warnings.catch_warnings):
    """Ignore that other libraries keep no checksums."""

    def __enter__(self) -> Any:
        caught = super().__enter__()
        warnings.simplefilter("ignore", asyncckpt.RestoreWarning)
        return caught
