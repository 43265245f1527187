"""The memory filesystem of fsspec as an object store: the laws of every client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.client import ObjectClient
from asyncckpt.stores.objects.clients.opening import open_client
from tests.stores.objects.clients.laws import ClientConformance


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4, "test-clients")
    yield workers
    workers.shutdown()


class TestMemory(ClientConformance):
    @pytest.fixture(autouse=True)
    def _threads(self, workers: Workers) -> None:
        self.workers = workers

    @asynccontextmanager
    async def opened(self, prefix: str) -> AsyncIterator[ObjectClient]:
        client = open_client(f"memory://test/{prefix}", workers=self.workers)
        try:
            yield client
        finally:
            await client.close()
