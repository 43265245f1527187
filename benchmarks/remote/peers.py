"""The peers on an object store: TensorStore's OCDBT, torch DCP, Orbax, a safetensors file.

Each is told as many streams as its interface lets one tell, and does what its documentation says.
"""

from __future__ import annotations

import functools
import shutil
import time
from typing import Any, ClassVar

from benchmarks.peers import tensorstore
from benchmarks.peers.dcp import load, load_into, tensors
from benchmarks.peers.orbax import restored
from benchmarks.peers.timing import quiet
from benchmarks.remote.raw import BUCKET, s3fs_options
from benchmarks.remote.subject import Setup, Subject, Values, run
from benchmarks.subject import Restored
from benchmarks.workloads import Tree, Workload, flat_arrays, leaves

# ---------------------------------------------------------------------------------- TensorStore


class TensorStore(Subject):
    """TensorStore's s3 driver below its OCDBT and zarr3 drivers, 32 requests in flight."""

    LIMITS: ClassVar[dict[str, Any]] = {"s3_request_concurrency": {"limit": 32}}  # its default

    def _base(self, name: int) -> Any:
        return self.setup.endpoints.tensorstore_s3(BUCKET, f"{self.setup.prefix}/{name}/")

    def save(self, workload: Workload, name: int) -> Values:
        arrays = flat_arrays(workload.tree)
        start = time.perf_counter()
        run(tensorstore.write(self._base(name), arrays, self.LIMITS))
        return {"wall_s": time.perf_counter() - start}

    def restore(self, workload: Workload, name: int) -> Restored:
        paths = [path for path, _ in leaves(workload.tree)]
        start = time.perf_counter()
        found = run(tensorstore.read(self._base(name), paths, self.LIMITS))
        return Restored(found, {"wall_s": time.perf_counter() - start}, flat=True)


# ------------------------------------------------------------------------------------------ DCP


class Dcp(Subject):
    """torch.distributed.checkpoint with `FsspecWriter` and `FsspecReader` over s3fs."""

    THREADS = 4
    """One file each: its writer sends a file's parts one batch after the other."""

    def _url(self, name: int) -> str:
        return f"s3://{BUCKET}/{self.setup.prefix}/{name}"

    def _options(self) -> dict[str, Any]:
        return {**s3fs_options(self.setup.endpoints), "use_listings_cache": False}

    def _writer(self, name: int) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        # What it would sync is the local disk.
        return FsspecWriter(
            self._url(name),
            thread_count=self.THREADS,
            sync_files=False,
            **self._options(),
        )

    def _reader(self, name: int) -> Any:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(self._url(name), **self._options())

    def save(self, workload: Workload, name: int) -> Values:
        import torch.distributed.checkpoint as dcp

        state = tensors(workload.tree)
        with quiet():
            start = time.perf_counter()
            dcp.save(state, storage_writer=self._writer(name), no_dist=True)
            return {"wall_s": time.perf_counter() - start}

    def restore(self, workload: Workload, name: int) -> Restored:
        """`load` into fresh tensors."""
        return load(workload, functools.partial(self._reader, name))

    def restore_into(self, targets: Tree, name: int) -> Restored:
        """`load` into tensors that share the targets' memory."""
        return load_into(targets, functools.partial(self._reader, name))


class S3Connector(Dcp):
    """torch.distributed.checkpoint with `S3StorageWriter` and `S3StorageReader` of Amazon."""

    def _filesystem(self) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        endpoints = self.setup.endpoints
        # Its classes of storage take no endpoint, so that they are given a client that has one.
        client = S3Client(
            endpoints.region,
            endpoint=endpoints.s3_endpoint,
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        return S3FileSystem(endpoints.region, s3_client=client)

    def _writer(self, name: int) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        region = self.setup.endpoints.region
        writer = S3StorageWriter(region, self._url(name), thread_count=self.THREADS)
        writer.fs = self._filesystem()
        return writer

    def _reader(self, name: int) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(self.setup.endpoints.region, self._url(name))
        reader.fs = self._filesystem()
        return reader


# ---------------------------------------------------------------------------------- safetensors


class Safetensors(Subject):
    """A safetensors file on local disk that s3fs uploads; and back."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import fsspec

        options = s3fs_options(setup.endpoints)
        self._filesystem = fsspec.filesystem("s3", **options, use_listings_cache=False)

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


# ---------------------------------------------------------------------------------------- Orbax


class Orbax(Subject):
    """Orbax on ``gs://``: OCDBT without compression, its `Checkpointer`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        import orbax.checkpoint as ocp

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
        return restored(self._checkpointer, self._url(name), workload)

    def close(self) -> None:
        shutil.rmtree(self.setup.directory, ignore_errors=True)
        self._checkpointer.close()
