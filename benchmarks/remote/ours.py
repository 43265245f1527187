"""asyncckpt on an object store."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import asyncckpt
from benchmarks.local.stall import watched_save
from benchmarks.remote.raw import BUCKET, Point
from benchmarks.remote.subject import Setup, Subject, Values, loop_factory
from benchmarks.subject import Restored, awaited
from benchmarks.workloads import Tree, Workload


class Ours(Subject):
    """A `Checkpointer` on a URL.

    Args:
        setup: see `Setup`.
        client: ``obstore``, ``s3fs``, ``gcsfs`` or ``obstore-gcs``.
        point: size of data files and streams of saves; None leaves both to ``"auto"``.
        reads: streams of restores; None likewise.
    """

    def __init__(
        self, setup: Setup, client: str, point: Point | None = None, reads: int | None = None
    ) -> None:
        super().__init__(setup)
        self._client = client
        self._point = point
        self._reads: int | Literal["auto"] = "auto" if reads is None else reads
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._checkpointer: Any = None

    def open(self, workload: Workload) -> None:
        """Return a new `Checkpointer`, its pool warm."""
        self._runner.run(self._open(workload))

    def prepare(self, workload: Workload) -> None:
        """Warm the pool for this workload too."""
        self._runner.run(self._checkpointer.prepare(workload.tree))

    async def _open(self, workload: Workload) -> None:
        if self._checkpointer is not None:
            await self._checkpointer.close()
        point: dict[str, Any] = {}
        if self._point is not None:
            point = {"concurrency": self._point.streams}
            point["target_data_file_nbytes"] = self._point.nbytes
        scheme = "gs" if self._client in ("gcsfs", "obstore-gcs") else "s3"
        self._checkpointer = asyncckpt.Checkpointer(
            f"{scheme}://{BUCKET}/{self.setup.prefix}",
            save_options=asyncckpt.SaveOptions(
                host_memory_nbytes=self.setup.budget_nbytes, **point
            ),
            restore_options=asyncckpt.RestoreOptions(concurrency=self._reads),
            storage_options=self._storage_options(),
        )
        await self._checkpointer.prepare(workload.tree)

    def _storage_options(self) -> dict[str, Any]:
        endpoints = self.setup.endpoints
        if self._client == "obstore-gcs":
            return {"client": endpoints.obstore_gcs(BUCKET)}
        if self._client == "gcsfs":
            return endpoints.gcs_options(client="fsspec")
        return endpoints.s3_options(client="obstore" if self._client == "obstore" else "fsspec")

    def save(self, workload: Workload, name: int) -> Values:
        """`await checkpointer.save(...)`, from the call to the durable commit."""
        report, wall_s = self._runner.run(awaited(self._checkpointer.save(name, workload.tree)))
        return {
            "wall_s": wall_s,
            "files": report.file_count,
            "stored_nbytes": report.stored_nbytes,
            "staged_nbytes": report.peak_staged_nbytes,
        }

    def background(self, workload: Workload, name: int) -> Values:
        """`await checkpointer.start_save(...)`, and the loop goes on."""
        return self._runner.run(watched_save(self._checkpointer, name, workload.tree))

    def restore(self, workload: Workload, name: int) -> Restored:
        """`await checkpointer.restore(step)`: arrays that the library allocates."""
        tree, wall_s = self._runner.run(awaited(self._checkpointer.restore(name)))
        return Restored(tree, {"wall_s": wall_s})

    def restore_into(self, targets: Tree, name: int) -> Restored:
        """`await checkpointer.restore_into(targets)`."""
        restoring = self._checkpointer.restore_into(targets, step=name)
        report, wall_s = self._runner.run(awaited(restoring))
        return Restored(targets, {"wall_s": wall_s, "read_nbytes": report.read_nbytes})

    def discard(self, name: int) -> None:
        """Delete the step."""
        self._runner.run(self._checkpointer.delete(name))

    def close(self) -> None:
        """Close the checkpointer and its loop."""
        try:
            if self._checkpointer is not None:
                self._runner.run(self._checkpointer.close())
        finally:
            self._checkpointer = None
            self._runner.close()
