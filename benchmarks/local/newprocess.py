"""Restores by a process of its own, as by a job that continues: it has used no memory before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crc32c import crc32c

from benchmarks import files, measure
from benchmarks.measure import Run
from benchmarks.results import OURS
from benchmarks.subject import Saved
from benchmarks.workers import apart
from benchmarks.workloads import Tree, Workload, flat_arrays


@dataclass(slots=True)
class NewProcessRun(Run):
    """Restores a checkpoint that is not in the page cache; checksums are compared."""

    library: str
    workload: Workload
    saved: Saved
    _expected: int | None = field(default=None, init=False)
    _found: float | None = field(default=None, init=False)

    def prepare(self) -> None:
        if self._expected is None:
            self._expected = checksum(flat_arrays(self.workload.tree))
        files.chill(self.saved.path)

    def run(self) -> Mapping[str, float]:
        values = apart(restored, self.library, self.saved.path)
        self._found = values.pop("checksum")
        values["device_share"] = values.pop("read_nbytes") / self.workload.nbytes
        return values

    def finish(self) -> None:
        if self._found is not None and self._found != self._expected:
            raise AssertionError(f"{self.library} restored something else in a new process")


def checksum(arrays: Mapping[str, Any]) -> int:
    """Return a number that depends on the bytes of all arrays, whatever their order."""
    return sum(crc32c(array.reshape(-1).view("u1")) for array in arrays.values())


def restored(library: str, path: Path) -> dict[str, float]:
    """Restore, and return what it took, with the bytes read from the device and the checksum."""
    if library == OURS:
        from asyncckpt.blocking import restore
    else:
        from safetensors.numpy import load_file as restore
    before, cpu_s = measure.device_read_nbytes() or 0, measure.cpu_seconds()
    baseline = measure.resident_nbytes()
    measure.reset_peak()
    start = time.perf_counter()
    tree: Tree = restore(path)
    return {
        "wall_s": time.perf_counter() - start,
        "cpu_s": measure.cpu_seconds() - cpu_s,
        "extra_nbytes": measure.peak_nbytes() - baseline,
        "read_nbytes": (measure.device_read_nbytes() or 0) - before,
        "checksum": checksum(flat_arrays(tree)),
    }
