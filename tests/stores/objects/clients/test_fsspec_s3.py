"""s3fs as a client of an object store: the laws of every client, and what S3 adds to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.client import ObjectClient
from asyncckpt.stores.objects.clients.opening import open_client
from tests.moto_s3 import KEY, SECRET, moto_server
from tests.simulator import Simulator, simulator
from tests.stores.objects.clients.laws import ClientConformance
from tests.stores.objects.stores import session


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server("bucket") as url:
        yield url


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4, "test-clients")
    yield workers
    workers.shutdown()


class OnS3(ClientConformance):
    workers: Workers
    options: dict[str, Any]

    @asynccontextmanager
    async def opened(self, prefix: str, bucket: str = "bucket") -> AsyncIterator[ObjectClient]:
        client = open_client(
            f"s3://{bucket}/{prefix}", storage_options=self.options, workers=self.workers
        )
        try:
            yield client
        finally:
            await client.close()

    def opened_without_bucket(self) -> AbstractAsyncContextManager[ObjectClient]:
        return self.opened("run", "no-such-bucket")


class TestMoto(OnS3):
    missing_count = 100  # s3fs deletes each in a request of its own; TestSimulator sees more

    @pytest.fixture(autouse=True)
    def _made_of(self, workers: Workers, moto: str) -> None:
        self.workers = workers
        self.options = {
            "client": "fsspec",
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": moto,
            "client_kwargs": {"region_name": "us-east-1"},
            "session": session(),
        }


class TestSimulator(OnS3):
    @pytest.fixture(autouse=True)
    def _made_of(self, workers: Workers, sim: Simulator) -> None:
        self.workers = workers
        self.options = sim.s3_options(client="fsspec", session=session())
