"""Object stores for tests: over every client library, on the simulator, on moto and in memory."""

from __future__ import annotations

import dataclasses
import functools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.clients.client import ObjectClient
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.layout import is_probe
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import epoch_of, expect, identity, outline_of, save_id_of
from tests.simulator import Request, Simulator
from tests.stores.objects.hasty import HASTY

if TYPE_CHECKING:
    from aiobotocore.session import AioSession

ROOT = "run"
KINDS = ("s3fs", "gcsfs", "obstore")
RECORD_PUT = {"kind": "put_object", "key": "*/checkpoint.json"}

UNRACED = replace(HASTY, hedges_at_once=0, timeout_s=60.0, list_timeout_s=60.0)
"""For tests that count: on a busy machine any request may look slow, and would be repeated."""


CERTIFICATE = Path(__file__).with_name("certificate.pem")
"""One that signs nothing. Every client of s3fs reads all certificates it may trust, by default
some hundred, which costs more than the requests of most tests. The servers of tests use no TLS."""


def new_session() -> AioSession:
    """A session for one thread, whose clients are opened quickly."""
    from aiobotocore.session import AioSession  # half of what a child without s3fs would import

    made = AioSession()
    made.set_config_variable("ca_bundle", str(CERTIFICATE))
    return made


@functools.cache
def session() -> AioSession:
    """What botocore knows about S3, read once."""
    return new_session()


def options_of(kind: str, sim: Simulator) -> tuple[str, dict[str, Any]]:
    """Scheme and `storage_options` of a client library on the simulator, or of memory."""
    if kind == "memory":
        return "memory", {}
    if kind == "gcsfs":
        return "gs", sim.gcs_options(client="fsspec")
    if kind == "obstore":
        return "s3", sim.s3_options(client="obstore")
    return "s3", sim.s3_options(client="fsspec", session=session())


@asynccontextmanager
async def opened(
    kind: str, sim: Simulator, root: str = ROOT, bucket: str = "bucket", **more: Any
) -> AsyncIterator[ObjectStore]:
    """A store on the simulator's bucket, over a client library; closed at the end."""
    scheme, options = options_of(kind, sim)
    url = f"{scheme}://{bucket}/{root}"
    async with opened_at(url, options, **more) as store:
        yield store


@asynccontextmanager
async def opened_at(url: str, options: dict[str, Any], **more: Any) -> AsyncIterator[ObjectStore]:
    """A store at a URL; closed at the end."""
    workers = Workers(4, "test-objects")
    client: ObjectClient = open_client(url, storage_options=options, workers=workers)
    store = store_of(client, workers, **more)
    try:
        yield store
    finally:
        await store.close()
        workers.shutdown()


def store_of(client: ObjectClient, workers: Workers, policy: RequestPolicy = HASTY) -> ObjectStore:
    """A store over a client, impatient with servers that fail on purpose."""
    requests = Requests(client, policy=policy)
    return ObjectStore(Context(requests, workers, save_id_of, outline_of, epoch_of))


def new_root() -> str:
    """A prefix that no other test uses."""
    return f"run-{uuid.uuid4().hex[:8]}"


def names(sim: Simulator) -> list[str]:
    """Keys below the root, without those of the experiment that runs beside a first save."""
    keys = [key.removeprefix(f"{ROOT}/") for key in sim.stored()]
    return [key for key in keys if not is_probe(key)]


def of(sim: Simulator, text: str) -> list[str]:
    """Keys that carry this save id."""
    return [key for key in names(sim) if identity(text) in key]


async def whole(sim: Simulator, store: ObjectStore, name: str, seed: int) -> None:
    """The checkpoint of this seed is whole, its fixed names and Orbax's mark included."""
    await store.settled()
    await expect(store, name, seed)
    assert sim.get("bucket", f"{ROOT}/{name}/default/small") == b"small %d" % seed


def writes(sim: Simulator) -> list[Request]:
    """Requests that change something, in their order."""
    return [
        request for request in sim.requests if request.kind not in ("get_object", "list_objects")
    ]


def age(sim: Simulator) -> None:
    """Everything that is there is old enough to be collected."""
    objects = sim.buckets["bucket"].objects
    for key, item in list(objects.items()):
        modified_s = item.modified_s - COLLECT_MIN_S - 3600
        objects[key] = dataclasses.replace(item, modified_s=modified_s)
