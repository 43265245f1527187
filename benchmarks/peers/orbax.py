"""Orbax: the checkpointers of its v0 interface, and the functions of v1."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.peers.timing import fsynced, quiet
from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import Tree, Workload, map_leaves


@dataclass(slots=True)
class Orbax(Subject):
    """`AsyncCheckpointer` (or `Checkpointer`) with a `PyTreeCheckpointHandler`."""

    name: ClassVar[str] = "orbax"
    restores_in_place: ClassVar[bool] = False

    compression: bool = True
    asynchronous: bool = True
    ocdbt: bool = True
    _checkpointer: Any = None

    def open(self) -> Any:
        """Return its checkpointer."""
        if self._checkpointer is None:
            import orbax.checkpoint as ocp

            handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=self.ocdbt, use_compression=self.compression
            )
            kind = ocp.AsyncCheckpointer if self.asynchronous else ocp.Checkpointer
            self._checkpointer = kind(handler)
        return self._checkpointer

    def save(self, workload: Workload) -> Saved:
        """`save` and, where it is asynchronous, `wait_until_finished`."""
        # Its type handlers know arrays and Python numbers, as our workloads have them.
        start, path, stall_s = self.begin(workload.tree)
        self.wait()
        return fsynced(path, start, stall_s if self.asynchronous else None)

    def begin(self, tree: Tree) -> tuple[float, Any, float]:
        """Call `save`; return when, the path, and the seconds that the call took."""
        checkpointer, path = self.open(), self._new_path()
        start = time.perf_counter()
        with quiet():
            checkpointer.save(path, tree)
        return start, path, time.perf_counter() - start

    def wait(self) -> None:
        """Wait for a save that is asynchronous."""
        if self.asynchronous:
            self.open().wait_until_finished()

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`restore` to NumPy arrays, which is how the leaves were saved."""
        return restored(self.open(), saved.path, workload)

    def close(self) -> None:
        """End its threads."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None


def restored(checkpointer: Any, path: Any, workload: Workload) -> Restored:
    """Restore NumPy arrays and scalars, as the workload has them."""
    import orbax.checkpoint as ocp

    restore_args = map_leaves(lambda leaf: ocp.RestoreArgs(restore_type=type(leaf)), workload.tree)
    start = time.perf_counter()
    with quiet():
        tree = checkpointer.restore(path, restore_args=restore_args)
    return Restored(tree, {"wall_s": time.perf_counter() - start})


@dataclass(slots=True)
class OrbaxV1(Subject):
    """`save_async` and `load` of Orbax's v1 interface, OCDBT."""

    name: ClassVar[str] = "orbax v1"
    restores_in_place: ClassVar[bool] = False

    compression: bool = True

    def save(self, workload: Workload) -> Saved:
        """`save_async`, and the wait for its response."""
        import orbax.checkpoint.experimental.v1 as ocp

        path = self._new_path()
        saving = ocp.options.ArrayOptions.Saving(use_compression=self.compression)
        with quiet(), ocp.Context(array_options=ocp.options.ArrayOptions(saving=saving)):
            start = time.perf_counter()
            response = ocp.save_async(path, workload.tree)
            stall_s = time.perf_counter() - start
            response.result()
        return fsynced(path, start, stall_s)

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`load` to NumPy arrays, which is how the leaves were saved."""
        import orbax.checkpoint.experimental.v1 as ocp

        with quiet():
            start = time.perf_counter()
            tree = ocp.load(saved.path)
            wall_s = time.perf_counter() - start
        return Restored(tree, {"wall_s": wall_s})
