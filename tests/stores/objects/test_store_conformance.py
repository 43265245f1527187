"""Object stores keep the laws of every store, over every client library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from asyncckpt.ports import Store
from asyncckpt.testing.conformance import StoreConformance
from asyncckpt.testing.objectstore import Simulator, simulator
from tests.stores.objects.stores import opened, opened_at


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator(keep_log=False) as sim:
        yield sim


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    ).create_bucket(Bucket="bucket")
    yield url
    server.stop()


class OnSimulator(StoreConformance):
    lists_attempts = True
    kind: str
    sim: Simulator

    @pytest.fixture(autouse=True)
    def _on(self, sim: Simulator) -> Iterator[None]:
        self.sim = sim
        yield
        assert not sim.uploads
        sim.clear()

    def opened(self, place: Path) -> AbstractAsyncContextManager[Store]:
        return opened(self.kind, self.sim, place.name)


class TestMemory(OnSimulator):
    kind = "memory"


class TestS3fs(OnSimulator):
    kind = "s3fs"


class TestGcsfs(OnSimulator):
    kind = "gcsfs"


class TestObstore(OnSimulator):
    kind = "obstore"


class TestMoto(StoreConformance):
    lists_attempts = True

    @pytest.fixture(autouse=True)
    def _on(self, moto: str) -> None:
        self.endpoint = moto

    def opened(self, place: Path) -> AbstractAsyncContextManager[Store]:
        options = {
            "client": "obstore",
            "key": "key",
            "secret": "secret",
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        return opened_at(f"s3://bucket/{place.name}", options)
