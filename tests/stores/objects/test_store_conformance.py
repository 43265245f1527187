"""Object stores keep the laws of every store, over every client library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from asyncckpt.ports import Store
from asyncckpt.testing.conformance import StoreConformance
from tests.moto_s3 import moto_server
from tests.simulator import Simulator, simulator
from tests.stores.objects.stores import opened, opened_at


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator(keep_log=False) as sim:
        yield sim


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server("bucket") as url:
        yield url


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
