"""obstore keeps the laws of clients: on moto, on the simulator's two services, and in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore

from asyncckpt.stores.objects.clients.obstore_client import (
    ObstoreClient,
    obstore_client,
)
from tests.moto_s3 import KEY, SECRET, moto_server
from tests.simulator import Simulator, simulator
from tests.stores.objects.clients.laws import ClientConformance
from tests.stores.objects.clients.opened import obstore_from


@asynccontextmanager
async def closing(client: ObstoreClient | None) -> AsyncIterator[ObstoreClient]:
    assert client is not None
    yield client
    await client.close()


@pytest.fixture(scope="module")
def moto() -> Iterator[dict[str, Any]]:
    """Options that lead to a server of moto with one bucket."""
    with moto_server("bucket") as endpoint:
        yield {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }


class TestObstoreOnMoto(ClientConformance):
    @pytest.fixture(autouse=True)
    def server(self, moto: dict[str, Any]) -> None:
        self.options = moto

    def opened(self, prefix: str) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_from(f"s3://bucket/{prefix}", self.options))

    def opened_without_bucket(self) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_from("s3://no-such-bucket/deep", self.options))


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as running:
        yield running


class TestObstoreOnS3(ClientConformance):
    @pytest.fixture(autouse=True)
    def server(self, sim: Simulator) -> None:
        self.sim = sim

    def opened(self, prefix: str) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_from(f"s3://bucket/{prefix}", self.sim.s3_options()))

    def opened_without_bucket(self) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_from("s3://no-such-bucket/deep", self.sim.s3_options()))


class TestObstoreOnGcs(ClientConformance):
    @pytest.fixture(autouse=True)
    def server(self, sim: Simulator) -> None:
        self.sim = sim

    def opened(self, prefix: str) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_client(self.sim.obstore_gcs("bucket"), prefix))

    def opened_without_bucket(self) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_client(self.sim.obstore_gcs("no-such-bucket"), "deep"))


class TestObstoreInMemory(ClientConformance):
    @pytest.fixture(autouse=True)
    def store(self) -> None:
        self.memory = MemoryStore()

    def opened(self, prefix: str) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_client(self.memory, prefix))


class TestObstoreOnDisk(ClientConformance):
    @pytest.fixture(autouse=True)
    def store(self, tmp_path: Any) -> None:
        self.disk = LocalStore(tmp_path)

    def opened(self, prefix: str) -> AbstractAsyncContextManager[ObstoreClient]:
        return closing(obstore_client(self.disk, prefix))
