"""asyncckpt as a subject of measurement."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import Tree, Workload

BUDGET_MARGIN_NBYTES = 128 << 20
"""Added to the size of the state for the byte budget: slots are rounded up per stage."""


@dataclass(slots=True)
class AsyncCkpt(Subject):
    """asyncckpt: one `Checkpointer`, prepared once, with a budget that holds the whole state."""

    name: ClassVar[str] = "asyncckpt"

    budget_nbytes: int = 0
    retention: Any = None
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    checkpointer: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there is a checkpointer, and its pool is warm."""
        return self.checkpointer is not None

    def open(self, workload: Workload) -> Any:
        """Return the `Checkpointer`, its pool warm."""
        import asyncckpt

        if self.checkpointer is None:
            budget = max(self.budget_nbytes, workload.nbytes + workload.nbytes // 16)
            self.checkpointer = asyncckpt.Checkpointer(
                self.directory,
                keep=self.retention,
                save_options=asyncckpt.SaveOptions(
                    host_memory_nbytes=budget + BUDGET_MARGIN_NBYTES
                ),
            )
            self.runner.run(self.checkpointer.prepare(workload.tree))
        return self.checkpointer

    def next_step(self) -> int:
        """Return a step that was not used yet."""
        self._count += 1
        return self._count

    def save(self, workload: Workload) -> Saved:
        """Time `await checkpointer.save(...)`, and how long it takes until `wait()` returns."""
        checkpointer, step = self.open(workload), self.next_step()

        async def timed() -> tuple[Any, float, float]:
            start = time.perf_counter()
            report = await checkpointer.save(step, workload.tree)
            wall_s = time.perf_counter() - start
            await checkpointer.wait()
            return report, wall_s, time.perf_counter() - start

        report, wall_s, waited_s = self.runner.run(timed())
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

        async def timed() -> tuple[Tree, float]:
            start = time.perf_counter()
            tree = await self.checkpointer.restore(saved.handle)
            return tree, time.perf_counter() - start

        tree, wall_s = self.runner.run(timed())
        return Restored(tree, {"wall_s": wall_s})

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """`await checkpointer.restore_into(targets)`."""

        async def timed() -> float:
            start = time.perf_counter()
            await self.checkpointer.restore_into(targets, step=saved.handle)
            return time.perf_counter() - start

        return Restored(targets, {"wall_s": self.runner.run(timed())})

    def close(self) -> None:
        """Close the checkpointer and its loop."""
        try:
            if self.checkpointer is not None:
                self.runner.run(self.checkpointer.close())
        finally:
            self.checkpointer = None
            self.runner.close()
