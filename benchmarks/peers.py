"""Who is measured: asyncckpt, safetensors, Orbax and torch DCP, behind one small interface.

Every peer has two columns, taken from one run. *as shipped*: it does what its documentation says,
no more. *durable*: the same, and every file and directory it made is fsynced at the end. asyncckpt
is always durable. Only the calls of the measured package (and that fsync) are timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import importlib.util
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.measure import fsync_tree
from benchmarks.workloads import Tree, Workload, flat_arrays, leaves, map_leaves

BUDGET_MARGIN_NBYTES = 128 << 20
"""Added to the size of the state for the byte budget: slots are rounded up per stage."""


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

    directory: Path
    _count: int = field(default=0, init=False)

    name: ClassVar[str] = ""
    restores_in_place: ClassVar[bool] = True

    @abstractmethod
    def save(self, workload: Workload) -> Saved:
        """The workload is saved under a new name."""

    def discard(self, saved: Saved) -> None:
        """The checkpoint is gone."""
        if saved.path.is_dir():
            shutil.rmtree(saved.path)
        else:
            saved.path.unlink()

    @abstractmethod
    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """What was saved, in memory that the package allocates; every page was touched."""

    def restore_into(self, saved: Saved, targets: Tree) -> Restored:
        """What was saved, in the arrays of `targets`."""
        raise NotImplementedError(f"{self.name} cannot restore into given arrays")

    def close(self) -> None:
        """Threads and loops of the subject are gone."""

    def _new_path(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._count += 1
        return self.directory / f"{self._count:04}"


# --------------------------------------------------------------------------------------- ours


@dataclass(slots=True)
class AsyncCkpt(Subject):
    """asyncckpt: one `Checkpointer`, prepared once, with a budget that holds the whole state."""

    name: ClassVar[str] = "asyncckpt"

    budget_nbytes: int = 0
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    checkpointer: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there is a checkpointer, and its pool is warm."""
        return self.checkpointer is not None

    def open(self, workload: Workload) -> Any:
        """The `Checkpointer`, its pool warm."""
        import asyncckpt

        if self.checkpointer is None:
            budget = max(self.budget_nbytes, workload.nbytes + workload.nbytes // 16)
            self.checkpointer = asyncckpt.Checkpointer(
                self.directory,
                save_options=asyncckpt.SaveOptions(
                    host_memory_nbytes=budget + BUDGET_MARGIN_NBYTES
                ),
            )
            self.runner.run(self.checkpointer.prepare(workload.tree))
        return self.checkpointer

    def next_step(self) -> int:
        """A step that was not used yet."""
        self._count += 1
        return self._count

    def save(self, workload: Workload) -> Saved:
        """`await checkpointer.save(...)`, from the call to the durable commit."""
        checkpointer, step = self.open(workload), self.next_step()

        async def timed() -> tuple[Any, float]:
            start = time.perf_counter()
            report = await checkpointer.save(step, workload.tree)
            return report, time.perf_counter() - start

        report, wall_s = self.runner.run(timed())
        values = {"wall_s": wall_s, "as_shipped_s": wall_s, "stall_s": report.blocked_s}
        return Saved(self.directory / str(step), values, step)

    def discard(self, saved: Saved) -> None:
        """The step is deleted."""
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
        """The checkpointer and its loop are closed."""
        try:
            if self.checkpointer is not None:
                self.runner.run(self.checkpointer.close())
        finally:
            self.checkpointer = None
            self.runner.close()


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

    def _open(self) -> Any:
        if self._checkpointer is None:
            import orbax.checkpoint as ocp

            handler = ocp.PyTreeCheckpointHandler(
                use_ocdbt=True, use_compression=self.compression
            )
            kind = ocp.AsyncCheckpointer if self.asynchronous else ocp.Checkpointer
            self._checkpointer = kind(handler)
        return self._checkpointer

    def save(self, workload: Workload) -> Saved:
        """`save` and, where it is asynchronous, `wait_until_finished`."""
        checkpointer, path = self._open(), self._new_path()
        # Its type handlers know arrays and Python numbers, as our workloads have them.
        start = time.perf_counter()
        with _quiet():
            checkpointer.save(path, workload.tree)
            stall_s = time.perf_counter() - start
            if self.asynchronous:
                checkpointer.wait_until_finished()
        return _fsynced(path, start, stall_s if self.asynchronous else None)

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """`restore` to NumPy arrays, which is how the leaves were saved."""
        import orbax.checkpoint as ocp

        checkpointer = self._open()
        restore_args = map_leaves(
            lambda leaf: ocp.RestoreArgs(restore_type=type(leaf)), workload.tree
        )
        start = time.perf_counter()
        with _quiet():
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
        with _quiet():
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
            path: torch.empty_like(value)
            for path, value in self._tensors(workload.tree).items()
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

        with _quiet():
            dcp.load(state, storage_reader=dcp.FileSystemReader(saved.path), no_dist=True)

    def _tensors(self, tree: Tree) -> dict[str, Any]:
        return {path: _tensor(leaf) for path, leaf in leaves(tree)}

    def close(self) -> None:
        """The stager's threads are gone."""
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

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


def _fsynced(path: Path, start: float, stall_s: float | None = None) -> Saved:
    as_shipped_s = time.perf_counter() - start
    fsync_tree(path)
    wall_s = time.perf_counter() - start
    stall_s = as_shipped_s if stall_s is None else stall_s
    return Saved(path, {"wall_s": wall_s, "as_shipped_s": as_shipped_s, "stall_s": stall_s})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
        "asyncckpt",
        "numpy",
        "safetensors",
        "jax",
        "torch",
        "orbax-checkpoint",
        "tensorstore",
        "crc32c",
        "uvloop",
    )
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
