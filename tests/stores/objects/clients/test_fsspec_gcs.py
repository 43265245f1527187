"""gcsfs as a client of an object store: the laws of every client, against the simulator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np
import pytest

from asyncckpt.flow.threads import Workers
from asyncckpt.options import KIB
from asyncckpt.stores.objects.clients.client import ObjectClient, RequestError
from asyncckpt.stores.objects.clients.opening import open_client
from tests.simulator import Fault, Simulator, simulator
from tests.stores.objects.clients.laws import ClientConformance, content


@pytest.fixture(scope="module")
def sim() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4, "test-clients")
    yield workers
    workers.shutdown()


class TestGcs(ClientConformance):
    @pytest.fixture(autouse=True)
    def _made_of(self, workers: Workers, sim: Simulator) -> None:
        self.workers, self.sim = workers, sim

    @asynccontextmanager
    async def opened(self, prefix: str, bucket: str = "bucket") -> AsyncIterator[ObjectClient]:
        client = open_client(
            f"gs://{bucket}/{prefix}", storage_options=self.sim.gcs_options(), workers=self.workers
        )
        try:
            yield client
        finally:
            await client.close()

    def opened_without_bucket(self) -> AbstractAsyncContextManager[ObjectClient]:
        return self.opened("run", "no-such-bucket")

    async def test_parts_that_end_where_the_server_counts(self, prefix: str) -> None:
        """Nothing is left for the request that finishes the object."""
        data = content(1024 * KIB)
        async with self.opened(prefix) as client:
            upload = await client.begin_parts("a")
            for number, start in enumerate(range(0, len(data), 512 * KIB)):
                part = data[start : start + 512 * KIB]
                await client.put_part("a", upload, number, start, part)
            await client.complete_parts("a", upload, ["", ""])
            assert bytes(await client.get("a", 0, len(data) + 1)) == data

    async def test_a_part_that_was_not_taken_is_sent_again(self, prefix: str) -> None:
        """The server says how much it holds, and its word counts."""
        data = np.frombuffer(content(700 * KIB), np.uint8)
        async with self.opened(prefix) as client:
            upload = await client.begin_parts("a")
            self.sim.faults.append(Fault(kind="put_part", number=1, status=308))
            with pytest.raises(RequestError) as caught:
                await client.put_part("a", upload, 0, 0, data)
            assert caught.value.kind == "short"
            assert caught.value.retryable
            self.sim.faults.clear()
            await client.put_part("a", upload, 0, 0, data)
            await client.complete_parts("a", upload, [""])
            assert bytes(await client.get("a", 0, data.size)) == data.tobytes()

    @pytest.mark.parametrize("status", [301, 302, 307])
    async def test_an_upload_that_is_redirected_is_refused(self, prefix: str, status: int) -> None:
        """From some redirections aiohttp makes a read, which succeeds, though nothing is stored."""
        async with self.opened(prefix) as client:
            self.sim.faults.append(Fault(kind="put_object", status=status, code="redirected"))
            with pytest.raises(RequestError) as caught:
                await client.put("a", b"body")
            assert (caught.value.kind, caught.value.status) == ("endpoint", status)
            assert not caught.value.retryable

    async def test_the_url_of_an_upload_is_in_no_error(self, prefix: str) -> None:
        """Who has it can write."""
        async with self.opened(prefix) as client:
            upload = await client.begin_parts("a")
            await client.abort_parts("a", upload)
            with pytest.raises(RequestError) as caught:
                await client.put_part("a", upload, 0, 0, content(256 * KIB))
            assert caught.value.kind in ("missing", "invalid")
            assert upload.rpartition("=")[2] not in str(caught.value)
