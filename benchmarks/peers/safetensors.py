"""safetensors with NumPy: one file; the state is flattened before the clock starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from benchmarks.peers.timing import fsynced
from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import Tree, Workload, flat_arrays, leaves


@dataclass(slots=True)
class Safetensors(Subject):
    """`save_file` and `load_file`, and `safe_open` into given arrays."""

    name: ClassVar[str] = "safetensors"
    warms_up: ClassVar[bool] = False

    def save(self, workload: Workload) -> Saved:
        """`save_file`, then fsync of the file and its directory."""
        from safetensors.numpy import save_file

        path = self._new_path()
        flat = flat_arrays(workload.tree)
        start = time.perf_counter()
        save_file(flat, path)
        return fsynced(path, start)

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
