"""The peers on an object store: TensorStore's OCDBT, torch DCP, Orbax, a safetensors file.

Each is told as many streams as its interface lets one tell, and does what its documentation says.
"""

from __future__ import annotations

import shutil
import time
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.peers import quiet
from benchmarks.remote.raw import BUCKET, CONNECTIONS
from benchmarks.remote.subject import Restored, Setup, Subject, Values, run
from benchmarks.workloads import Tree, Workload, flat_arrays, leaves, map_leaves

MIB = 1 << 20

# ---------------------------------------------------------------------------------- TensorStore


class TensorStore(Subject):
    """One OCDBT database of zarr3 arrays on TensorStore's s3 driver, written in one transaction.

    Chunks and data files of 16 MiB, 32 requests in flight (its default), copies in two threads,
    reads that are close to each other joined: the fastest of what was tried.
    """

    REQUESTS = 32
    COPIES = 2
    CHUNK_NBYTES = 16 * MIB
    FILE_NBYTES = 16 * MIB
    JOINED_NBYTES = 1 * MIB

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import tensorstore as ts

        self._ts = ts

    def _context(self) -> Any:
        return self._ts.Context(
            {
                "s3_request_concurrency": {"limit": self.REQUESTS},
                "data_copy_concurrency": {"limit": self.COPIES},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )

    def _spec(self, name: int, path: str) -> dict[str, Any]:
        base = self.setup.endpoints.tensorstore_s3(BUCKET, f"{self.setup.prefix}/{name}/")
        return {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": base,
                "path": path.replace("/", ".") + "/",
                "target_data_file_size": self.FILE_NBYTES,
                "config": {"max_inline_value_bytes": 1024},
                "experimental_read_coalescing_threshold_bytes": self.JOINED_NBYTES,
                "experimental_read_coalescing_merged_bytes": self.CHUNK_NBYTES,
            },
        }

    def save(self, workload: Workload, name: int) -> Values:
        arrays = flat_arrays(workload.tree)
        return run(self._save(arrays, name))

    async def _save(self, arrays: dict[str, np.ndarray], name: int) -> Values:
        ts = self._ts
        start = time.perf_counter()
        context, transaction = self._context(), ts.Transaction()
        opened = [
            ts.open(
                {**self._spec(name, path), "metadata": self._metadata(array)},
                create=True,
                context=context,
                transaction=transaction,
            )
            for path, array in arrays.items()
        ]
        writes = [
            (await store).write(array) for store, array in zip(opened, arrays.values(), strict=True)
        ]
        for write in writes:
            await write.copy
        await transaction.commit_async()
        return {"wall_s": time.perf_counter() - start}

    def _metadata(self, array: np.ndarray) -> dict[str, Any]:
        chunk = list(array.shape)
        if chunk:
            row = max(1, array.nbytes // max(1, chunk[0]))
            chunk[0] = max(1, min(chunk[0], self.CHUNK_NBYTES // row))
        return {
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        }

    def restore(self, workload: Workload, name: int) -> Restored:
        paths = [path for path, _ in leaves(workload.tree)]
        return run(self._restore(paths, name))

    async def _restore(self, paths: list[str], name: int) -> Restored:
        ts = self._ts
        start = time.perf_counter()
        context = self._context()
        opened = [ts.open(self._spec(name, path), open=True, context=context) for path in paths]
        batch = ts.Batch()
        reads = [(await store).read(batch=batch) for store in opened]
        batch.submit()
        found = {path: await read for path, read in zip(paths, reads, strict=True)}
        wall_s = time.perf_counter() - start
        return Restored(found, {"wall_s": wall_s}, flat=True)


# ------------------------------------------------------------------------------------------ DCP


class Dcp(Subject):
    """torch.distributed.checkpoint with `FsspecWriter` and `FsspecReader` over s3fs."""

    THREADS = 4
    """One file each: its writer sends a file's parts one batch after the other."""

    def _options(self) -> dict[str, Any]:
        return s3fs_options(self.setup)

    def _url(self, name: int) -> str:
        return f"s3://{BUCKET}/{self.setup.prefix}/{name}"

    def save(self, workload: Workload, name: int) -> Values:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        state = {path: tensor(leaf) for path, leaf in leaves(workload.tree)}
        with quiet():
            start = time.perf_counter()
            # What it would sync is the local disk.
            writer = FsspecWriter(
                self._url(name), thread_count=self.THREADS, sync_files=False, **self._options()
            )
            dcp.save(state, storage_writer=writer, no_dist=True)
            return {"wall_s": time.perf_counter() - start}

    def restore(self, workload: Workload, name: int) -> Restored:
        """`load` into fresh tensors; making them is inside the timed part."""
        import torch

        like = {path: tensor(leaf) for path, leaf in leaves(workload.tree)}
        start = time.perf_counter()
        state = {path: torch.empty_like(value) for path, value in like.items()}
        self._load(state, name)
        wall_s = time.perf_counter() - start
        kinds = {path: np.asarray(leaf).dtype for path, leaf in leaves(workload.tree)}
        flat = {path: array(value, kinds[path]) for path, value in state.items()}
        return Restored(flat, {"wall_s": wall_s}, flat=True)

    def restore_into(self, targets: Tree, name: int) -> Restored:
        """`load` into tensors that share the targets' memory."""
        state = {path: tensor(leaf) for path, leaf in leaves(targets)}
        start = time.perf_counter()
        self._load(state, name)
        return Restored(targets, {"wall_s": time.perf_counter() - start})

    def _load(self, state: dict[str, Any], name: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        with quiet():
            reader = FsspecReader(self._url(name), **self._options())
            dcp.load(state, storage_reader=reader, no_dist=True)


def tensor(leaf: Any) -> Any:
    """Return a tensor that shares the memory of the array."""
    import torch

    found = np.asarray(leaf)
    if found.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(found)


def array(value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array that shares the memory of the tensor."""
    import torch

    bits = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    found: np.ndarray = bits.numpy()
    return found.view(dtype)


# ---------------------------------------------------------------------------------- safetensors


class Safetensors(Subject):
    """A safetensors file on local disk that s3fs uploads; and back."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import fsspec

        self._filesystem = fsspec.filesystem("s3", **s3fs_options(setup))

    def save(self, workload: Workload, name: int) -> Values:
        from safetensors.numpy import save_file

        path = self.setup.directory / "model.safetensors"
        flat = flat_arrays(workload.tree)
        start = time.perf_counter()
        save_file(flat, path)
        self._filesystem.put_file(str(path), self._key(name))
        wall_s = time.perf_counter() - start
        path.unlink()
        return {"wall_s": wall_s}

    def restore(self, workload: Workload, name: int) -> Restored:
        from safetensors.numpy import load_file

        path = self.setup.directory / "back.safetensors"
        start = time.perf_counter()
        self._filesystem.get_file(self._key(name), str(path))
        flat = load_file(path)
        wall_s = time.perf_counter() - start
        path.unlink()
        return Restored(flat, {"wall_s": wall_s}, flat=True)

    def _key(self, name: int) -> str:
        return f"{BUCKET}/{self.setup.prefix}/{name}.safetensors"


def s3fs_options(setup: Setup) -> dict[str, Any]:
    """s3fs with as many connections as the raw client has, and no checksums nobody asked for."""
    config = {
        "max_pool_connections": CONNECTIONS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return setup.endpoints.s3_options(config_kwargs=config, use_listings_cache=False)


# ---------------------------------------------------------------------------------------- Orbax


class Orbax(Subject):
    """Orbax on ``gs://``: OCDBT without compression, its `Checkpointer`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self._checkpointer = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        )

    def _url(self, name: int) -> Any:
        from etils import epath

        return epath.Path(f"gs://{BUCKET}/{self.setup.prefix}/{name}")

    def save(self, workload: Workload, name: int) -> Values:
        with quiet():
            start = time.perf_counter()
            self._checkpointer.save(self._url(name), workload.tree)
            return {"wall_s": time.perf_counter() - start}

    def restore(self, workload: Workload, name: int) -> Restored:
        kinds = map_leaves(
            lambda leaf: self._ocp.RestoreArgs(restore_type=type(leaf)), workload.tree
        )
        with quiet():
            start = time.perf_counter()
            tree = self._checkpointer.restore(self._url(name), restore_args=kinds)
            return Restored(tree, {"wall_s": time.perf_counter() - start})

    def close(self) -> None:
        shutil.rmtree(self.setup.directory, ignore_errors=True)
        self._checkpointer.close()
