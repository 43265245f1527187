"""The floor: the best that a bare client does with as many bytes in as many streams.

Bodies are prepared before the clock starts, nothing is checked, hashed or planned. Reads end in the
client's own memory, or are copied from there to where they belong.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tests.simulator.clients import Endpoints

BUCKET = "bucket"
CONNECTIONS = 64
"""The most streams that any point of a grid has: no client's pool is the limit."""


@dataclass(frozen=True, slots=True)
class Point:
    """So many bytes per object or range, and so many of them in flight."""

    nbytes: int
    streams: int

    def __str__(self) -> str:
        return f"{self.nbytes / 2**20:.4g} MiB × {self.streams}"


class RawClient(ABC):
    """A client library without anything around it. Lives on one event loop."""

    body: ClassVar[Callable[[memoryview], Any]] = staticmethod(bytes)
    """Type of body that the client takes."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints

    @abstractmethod
    async def open(self) -> None:
        """Make the client ready for requests."""

    @abstractmethod
    async def put(self, key: str, body: Any) -> None:
        """Put an object."""

    @abstractmethod
    async def get(self, key: str, start: int, stop: int) -> Any:
        """Return that range of the object, as a buffer."""

    async def close(self) -> None:
        """Close the session."""
        return None


class Obstore(RawClient):
    """obstore on S3; bodies are not hashed for the signature, which plain HTTP would ask for."""

    body = staticmethod(lambda data: data)

    async def open(self) -> None:
        from obstore.store import S3Store

        config = dict(self.endpoints.obstore_s3_config())
        client = config.pop("client_options")
        make: Any = S3Store
        self._store = make(
            BUCKET, config={**config, "unsigned_payload": "true"}, client_options=client
        )

    async def put(self, key: str, body: Any) -> None:
        import obstore

        await obstore.put_async(self._store, key, body, use_multipart=False)

    async def get(self, key: str, start: int, stop: int) -> Any:
        import obstore

        return await obstore.get_range_async(self._store, key, start=start, end=stop)


class ObstoreGcs(Obstore):
    """obstore on GCS."""

    async def open(self) -> None:
        self._store = self.endpoints.obstore_gcs(BUCKET)


class _Fsspec(RawClient):
    async def put(self, key: str, body: Any) -> None:
        await self._filesystem._pipe_file(f"{BUCKET}/{key}", body)

    async def get(self, key: str, start: int, stop: int) -> Any:
        return await self._filesystem._cat_file(f"{BUCKET}/{key}", start=start, end=stop)

    async def open(self) -> None:
        self._filesystem = self._make(
            {"asynchronous": True, "skip_instance_cache": True, "use_listings_cache": False}
        )
        self._session = await self._connected()

    @abstractmethod
    def _make(self, options: dict[str, Any]) -> Any: ...

    @abstractmethod
    async def _connected(self) -> Any: ...

    async def close(self) -> None:
        await self._session.close()


class S3fs(_Fsspec):
    """s3fs with the options that its documentation gives for many connections."""

    def _make(self, options: dict[str, Any]) -> Any:
        from s3fs import S3FileSystem

        return S3FileSystem(**s3fs_options(self.endpoints), **options)

    async def _connected(self) -> Any:
        return await self._filesystem.set_session()


def s3fs_options(endpoints: Endpoints) -> dict[str, Any]:
    """Return options of s3fs for many connections, without optional checksums."""
    config = {
        "max_pool_connections": CONNECTIONS,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return endpoints.s3_options(config_kwargs=config)


class Gcsfs(_Fsspec):
    """gcsfs as it is."""

    def _make(self, options: dict[str, Any]) -> Any:
        from gcsfs.core import GCSFileSystem

        return GCSFileSystem(**self.endpoints.gcs_options(), **options)

    async def _connected(self) -> Any:
        return await self._filesystem._set_session()


CLIENTS: dict[str, type[RawClient]] = {
    "obstore": Obstore,
    "obstore-gcs": ObstoreGcs,
    "s3fs": S3fs,
    "gcsfs": Gcsfs,
}


def bodies(client: RawClient, data: np.ndarray, nbytes: int, size: int) -> list[Any]:
    """`nbytes` of data in bodies of `size`; `data` is used again from its start where it ends."""
    view = memoryview(data if len(data) >= min(size, nbytes) else np.resize(data, size))
    made = []
    for start in range(0, nbytes, size):
        length = min(size, nbytes - start)
        at = start % max(1, len(view) - length + 1)
        made.append(client.body(view[at : at + length]))
    return made


async def write(client: RawClient, prefix: str, parts: list[Any], streams: int) -> float:
    """Seconds until every part is an object below `prefix`."""

    async def put(index: int) -> None:
        await client.put(f"{prefix}/{index:05}", parts[index])

    return await _timed(put, range(len(parts)), streams)


async def read(
    client: RawClient,
    prefix: str,
    sizes: list[int],
    size: int,
    streams: int,
    target: np.ndarray | None = None,
) -> float:
    """Seconds until all objects below `prefix`, of these sizes, were read by ranges of `size`.

    With `target` every range is copied to its place in it.
    """
    starts = np.cumsum([0, *sizes]).tolist()
    ranges = [
        (index, start, min(start + size, nbytes))
        for index, nbytes in enumerate(sizes)
        for start in range(0, nbytes, size)
    ]

    async def get(item: tuple[int, int, int]) -> None:
        index, start, stop = item
        found = await client.get(f"{prefix}/{index:05}", start, stop)
        if len(found) != stop - start:
            raise AssertionError(f"{len(found)} bytes came instead of {stop - start}")
        if target is not None:
            at = starts[index] + start
            np.copyto(target[at : at + len(found)], np.frombuffer(found, dtype=np.uint8))

    return await _timed(get, ranges, streams)


async def _timed(
    work: Callable[[Any], Awaitable[None]], items: Iterable[Any], streams: int
) -> float:
    left: Iterator[Any] = iter(items)

    async def stream() -> None:
        for item in left:
            await work(item)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())
    return time.perf_counter() - start
