"""TensorStore by itself: one OCDBT database of zarr3 arrays, written in one transaction."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.timing import fsynced
from benchmarks.subject import Restored, Saved, Subject
from benchmarks.workloads import Workload, flat_arrays, leaves

MIB = 1 << 20
COPIES = 2
CHUNK_NBYTES = 16 * MIB
FILE_NBYTES = 16 * MIB
JOINED_NBYTES = 1 * MIB
"""Copies at a time, chunks, data files, and reads that are joined: the fastest that was tried."""


@dataclass(slots=True)
class TensorStore(Subject):
    """TensorStore's file driver below its OCDBT and zarr3 drivers."""

    name: ClassVar[str] = "tensorstore"
    restores_in_place: ClassVar[bool] = False

    def save(self, workload: Workload) -> Saved:
        """Write all arrays in one transaction and commit it."""
        path = self._new_path()
        path.mkdir()
        arrays = flat_arrays(workload.tree)
        start = time.perf_counter()
        asyncio.run(write(f"file://{path}/", arrays, {}))
        return fsynced(path, start)

    def restore(self, saved: Saved, workload: Workload) -> Restored:
        """Read all arrays in one batch."""
        paths = [path for path, _ in leaves(workload.tree)]
        start = time.perf_counter()
        found = asyncio.run(read(f"file://{saved.path}/", paths, {}))
        wall_s = time.perf_counter() - start
        return Restored(found, {"wall_s": wall_s}, flat=True)


async def write(base: Any, arrays: Mapping[str, np.ndarray], limits: Mapping[str, Any]) -> None:
    """Write arrays to a new database.

    Args:
        base: spec or URL of the key-value store below it.
        arrays: path -> array.
        limits: resources of the context, beyond those set here.
    """
    import tensorstore as ts

    context, transaction = _context(limits), ts.Transaction()
    opened = [
        ts.open(
            {**_spec(base, path), "metadata": _metadata(array)},
            create=True,
            context=context,
            transaction=transaction,
        )
        for path, array in arrays.items()
    ]
    writes = [
        (await store).write(array) for store, array in zip(opened, arrays.values(), strict=True)
    ]
    for begun in writes:
        await begun.copy
    await transaction.commit_async()


async def read(base: Any, paths: list[str], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Read arrays of a database; arguments as those of `write`."""
    import tensorstore as ts

    context = _context(limits)
    opened = [ts.open(_spec(base, path), open=True, context=context) for path in paths]
    batch = ts.Batch()
    reads = [(await store).read(batch=batch) for store in opened]
    batch.submit()
    return {path: await read for path, read in zip(paths, reads, strict=True)}


def _context(limits: Mapping[str, Any]) -> Any:
    import tensorstore as ts

    return ts.Context(
        {
            "data_copy_concurrency": {"limit": COPIES},
            "cache_pool": {"total_bytes_limit": 0},
            **limits,
        }
    )


def _spec(base: Any, path: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": base,
            "path": path.replace("/", ".") + "/",
            "target_data_file_size": FILE_NBYTES,
            "config": {"max_inline_value_bytes": 1024},
            "experimental_read_coalescing_threshold_bytes": JOINED_NBYTES,
            "experimental_read_coalescing_merged_bytes": CHUNK_NBYTES,
        },
    }


def _metadata(array: np.ndarray) -> dict[str, Any]:
    chunk = list(array.shape)
    if chunk:
        row = max(1, array.nbytes // max(1, chunk[0]))
        chunk[0] = max(1, min(chunk[0], CHUNK_NBYTES // row))
    return {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
