"""The peers: safetensors, Orbax and torch DCP.

Every peer has two columns, taken from one run. *as shipped*: it does what its documentation says,
no more. *durable*: the same, and every file and directory it made is fsynced at the end. Only the
calls of the measured package (and that fsync) are timed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import asyncckpt
from benchmarks.files import fsync_tree
from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import Tree, Workload, flat_arrays, leaves, map_leaves

# --------------------------------------------------------------------------------- safetensors


@dataclass(slots=True)
class Safetensors(Subject):
    """safetensors with NumPy: one file; the state is flattened before the clock starts."""

    name: ClassVar[str] = "safetensors"

    def save(self, workload: Workload) -> Saved:
        """`save_file`, then fsync of the file and its directory."""
        from safetensors.numpy import save_file

        path = self._new_path()
        flat = flat_arrays(workload.tree)
        start = time.perf_counter()
        save_file(flat, path)
        return _fsynced(path, start)

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`load_file`, which copies out of the mapped file: every page is touched."""
        from safetensors.numpy import load_file

        start = time.perf_counter()
        flat = load_file(saved.path)
        wall_s = time.perf_counter() - start
        return Restored(flat, {"wall_s": wall_s}, flat=True)

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """Tensor by tensor out of `safe_open`, copied into the targets."""
        from safetensors import safe_open

        flat = {path: leaf for path, leaf in leaves(targets) if isinstance(leaf, np.ndarray)}
        start = time.perf_counter()
        with safe_open(saved.path, framework="np") as file:
            for path, target in flat.items():
                np.copyto(target, file.get_tensor(path))
        wall_s = time.perf_counter() - start
        return Restored(targets, {"wall_s": wall_s})


# --------------------------------------------------------------------------------------- orbax


@dataclass(slots=True)
class Orbax(Subject):
    """Orbax `AsyncCheckpointer` (or `Checkpointer`) with a `PyTreeCheckpointHandler`, OCDBT."""

    name: ClassVar[str] = "orbax"
    restores_in_place: ClassVar[bool] = False

    compression: bool = True
    asynchronous: bool = True
    _checkpointer: Any = None

    def open(self) -> Any:
        """Its checkpointer."""
        if self._checkpointer is None:
            import orbax.checkpoint as ocp

            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=self.compression)
            kind = ocp.AsyncCheckpointer if self.asynchronous else ocp.Checkpointer
            self._checkpointer = kind(handler)
        return self._checkpointer

    def save(self, workload: Workload) -> Saved:
        """`save` and, where it is asynchronous, `wait_until_finished`."""
        checkpointer, path = self.open(), self._new_path()
        # Its type handlers know arrays and Python numbers, as our workloads have them.
        start = time.perf_counter()
        with quiet():
            checkpointer.save(path, workload.tree)
            stall_s = time.perf_counter() - start
            if self.asynchronous:
                checkpointer.wait_until_finished()
        return _fsynced(path, start, stall_s if self.asynchronous else None)

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`restore` to NumPy arrays, which is how the leaves were saved."""
        import orbax.checkpoint as ocp

        checkpointer = self.open()
        restore_args = map_leaves(
            lambda leaf: ocp.RestoreArgs(restore_type=type(leaf)), workload.tree
        )
        start = time.perf_counter()
        with quiet():
            tree = checkpointer.restore(saved.path, restore_args=restore_args)
        wall_s = time.perf_counter() - start
        return Restored(tree, {"wall_s": wall_s})

    def close(self) -> None:
        """Its threads are gone."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None


# ----------------------------------------------------------------------------------------- dcp


@dataclass(slots=True)
class TorchDcp(Subject):
    """torch.distributed.checkpoint without process group: `save` or `async_save`, and `load`."""

    name: ClassVar[str] = "torch DCP"

    asynchronous: bool = False
    threads: int = 2
    _stager: Any = None

    def save(self, workload: Workload) -> Saved:
        """`save`, or `async_save` with a stager that is kept, and the wait for its future."""
        import torch.distributed.checkpoint as dcp

        path = self._new_path()
        state = self._tensors(workload.tree)
        # `sync_files` fsyncs the data files; it is what DCP ships with.
        writer = dcp.FileSystemWriter(path, thread_count=self.threads)
        start = time.perf_counter()
        stall_s = None
        with quiet():
            if self.asynchronous:
                stall_s = self._save_async(dcp, state, writer, start)
            else:
                dcp.save(state, storage_writer=writer, no_dist=True)
        return _fsynced(path, start, stall_s)

    def _save_async(self, dcp: Any, state: Any, writer: Any, start: float) -> float:
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
        answer = dcp.async_save(
            state, storage_writer=writer, no_dist=True, async_stager=self._stager
        )
        stall_s = time.perf_counter() - start
        getattr(answer, "upload_completion", answer).result()
        return stall_s

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`load` into fresh tensors; making them is inside the timed part."""
        import torch

        start = time.perf_counter()
        state = {
            path: torch.empty_like(value) for path, value in self._tensors(workload.tree).items()
        }
        self._load(saved, state)
        wall_s = time.perf_counter() - start
        kinds = {path: np.asarray(leaf).dtype for path, leaf in leaves(workload.tree)}
        flat = {path: _numpy(value, kinds[path]) for path, value in state.items()}
        return Restored(flat, {"wall_s": wall_s}, flat=True)

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """`load` into tensors that share the targets' memory."""
        state = self._tensors(targets)
        start = time.perf_counter()
        self._load(saved, state)
        return Restored(targets, {"wall_s": time.perf_counter() - start})

    def _load(self, saved: Saved, state: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        with quiet():
            dcp.load(state, storage_reader=dcp.FileSystemReader(saved.path), no_dist=True)

    def _tensors(self, tree: Tree) -> dict[str, Any]:
        return {path: _tensor(leaf) for path, leaf in leaves(tree)}

    def close(self) -> None:
        """End the stager's threads."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _tensor(leaf: Any) -> Any:
    import torch

    array = np.asarray(leaf)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _numpy(tensor: Any, dtype: np.dtype[Any]) -> np.ndarray:
    import torch

    bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    array: np.ndarray = bits.numpy()
    return array.view(dtype)


def _fsynced(path: Path, start: float, stall_s: float | None = None) -> Saved:
    as_shipped_s = time.perf_counter() - start
    fsync_tree(path)
    wall_s = time.perf_counter() - start
    stall_s = as_shipped_s if stall_s is None else stall_s
    return Saved(path, {"wall_s": wall_s, "as_shipped_s": as_shipped_s, "stall_s": stall_s})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of a package that is measured are not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --------------------------------------------------------------------------------- who is there


def full_peers() -> dict[str, Callable[[Path], Subject]]:
    """Label -> maker of the peers of the full form that are installed."""
    made: dict[str, Callable[[Path], Subject]] = {}
    if importlib.util.find_spec("orbax"):
        for asynchronous in (True, False):
            for compression in (True, False):
                how = "async" if asynchronous else "sync"
                what = "zstd" if compression else "uncompressed"
                made[f"Orbax {how}, {what}"] = functools.partial(
                    Orbax, compression=compression, asynchronous=asynchronous
                )
    if importlib.util.find_spec("torch"):
        made["torch DCP sync"] = functools.partial(TorchDcp, asynchronous=False)
        made["torch DCP async"] = functools.partial(TorchDcp, asynchronous=True)
    return made


def versions() -> dict[str, str]:
    """Versions of every package that is measured or underneath."""
    names = (
        "numpy",
        "safetensors",
        "jax",
        "torch",
        "orbax-checkpoint",
        "tensorstore",
        "crc32c",
        "uvloop",
    )
    found = {"asyncckpt": asyncckpt.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
