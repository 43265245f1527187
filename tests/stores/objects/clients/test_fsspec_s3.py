"""s3fs as a client of an object store: the laws of every client, and what S3 adds to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.client import ObjectClient, RequestError
from asyncckpt.stores.objects.clients.opening import open_client
from tests.moto_s3 import KEY, SECRET, moto_server, s3_of
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


async def test_a_bucket_with_object_lock_takes_what_the_error_advises(
    workers: Workers, moto: str
) -> None:
    s3 = s3_of(moto)
    s3.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    s3.put_object_lock_configuration(
        Bucket="locked",
        ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
    )
    options: dict[str, Any] = {"key": KEY, "secret": SECRET, "endpoint_url": moto}
    for kind in ("fsspec", "obstore"):
        given = options | {"client": kind}
        client = open_client("s3://locked/run", storage_options=given, workers=workers)
        with pytest.raises(RequestError) as caught:
            await client.put("a", b"x")
        assert "pass storage_options={'config_kwargs': {'request_ch" in str(caught.value.hint)
        await client.close()
    given = options | {"config_kwargs": {"request_checksum_calculation": "when_supported"}}
    client = open_client("s3://locked/run", storage_options=given, workers=workers)
    await client.put("a", b"x", create=True)
    assert bytes(memoryview(await client.get("a", 0, 9))) == b"x"
    await client.delete(["a"])  # hides it
    assert await client.list("", recursive=True, limit=9) == []
    await client.close()
