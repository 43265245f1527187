"""What the timing of all peers has in common."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from benchmarks.files import fsync_tree
from benchmarks.subject import Saved


def fsynced(path: Path, start: float, stall_s: float | None = None) -> Saved:
    """Flush a save that began at `start`, and time it with and without that."""
    as_shipped_s = time.perf_counter() - start
    fsync_tree(path)
    wall_s = time.perf_counter() - start
    stall_s = as_shipped_s if stall_s is None else stall_s
    return Saved(path, {"wall_s": wall_s, "as_shipped_s": as_shipped_s, "stall_s": stall_s})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the warnings of a package that is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
