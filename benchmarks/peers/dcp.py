"""torch.distributed.checkpoint without process group."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.timing import fsynced, quiet
from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import Tree, Workload, leaves


@dataclass(slots=True)
class TorchDcp(Subject):
    """`save` or `async_save`, and `load`."""

    name: ClassVar[str] = "torch DCP"

    asynchronous: bool = False
    threads: int = 2
    _stager: Any = None

    def save(self, workload: Workload) -> Saved:
        """`save`, or `async_save` with a stager that is kept, and the wait for its future."""
        state = tensors(workload.tree)
        start, path, answer = self.begin(state)
        if answer is None:
            return fsynced(path, start)
        stall_s = time.perf_counter() - start
        with quiet():
            answer.result()
        return fsynced(path, start, stall_s)

    def begin(self, state: dict[str, Any]) -> tuple[float, Any, Any]:
        """Save, or begin to; return when, the path, and the future of an asynchronous save."""
        import torch.distributed.checkpoint as dcp

        path = self._new_path()
        # `sync_files` fsyncs the data files; it is what DCP ships with.
        writer = dcp.FileSystemWriter(path, thread_count=self.threads)
        start = time.perf_counter()
        with quiet():
            if not self.asynchronous:
                dcp.save(state, storage_writer=writer, no_dist=True)
                return start, path, None
            answer = dcp.async_save(
                state, storage_writer=writer, no_dist=True, async_stager=self._kept_stager()
            )
        return start, path, getattr(answer, "upload_completion", answer)

    def _kept_stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            # Pinned and shared memory need CUDA; a stager that is kept reuses its buffers.
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=False,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
        return self._stager

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`load` into fresh tensors."""
        return load(workload, functools.partial(_reader, saved))

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """`load` into tensors that share the targets' memory."""
        return load_into(targets, functools.partial(_reader, saved))

    def close(self) -> None:
        """End the stager's threads."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _reader(saved: Saved) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemReader(saved.path)


def load(workload: Workload, reader: Callable[[], Any]) -> Restored:
    """`load` into fresh tensors; making them, and the reader, is inside the timed part."""
    import torch

    like = tensors(workload.tree)
    start = time.perf_counter()
    state = {path: torch.empty_like(value) for path, value in like.items()}
    _load(state, reader)
    wall_s = time.perf_counter() - start
    kinds = {path: np.asarray(leaf).dtype for path, leaf in leaves(workload.tree)}
    flat = {path: array(value, kinds[path]) for path, value in state.items()}
    return Restored(flat, {"wall_s": wall_s}, flat=True)


def load_into(targets: Tree, reader: Callable[[], Any]) -> Restored:
    """`load` into tensors that share the targets' memory."""
    state = tensors(targets)
    start = time.perf_counter()
    _load(state, reader)
    return Restored(targets, {"wall_s": time.perf_counter() - start})


def _load(state: dict[str, Any], reader: Callable[[], Any]) -> None:
    import torch.distributed.checkpoint as dcp

    with quiet():
        dcp.load(state, storage_reader=reader(), no_dist=True)


def tensors(tree: Tree) -> dict[str, Any]:
    """Return tensors, by path, that share the memory of the arrays."""
    import torch

    made = {}
    for path, leaf in leaves(tree):
        found = np.asarray(leaf)
        if found.dtype.name == "bfloat16":
            made[path] = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
        else:
            made[path] = torch.from_numpy(found)
    return made


def array(tensor: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array that shares the memory of the tensor."""
    import torch

    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    found: np.ndarray = bits.numpy()
    return found.view(dtype)
