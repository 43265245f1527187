"""Object stores in which a small state makes every kind of request, on a simulator that fails."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import epoch_of, outline_of, save_id_of
from asyncckpt.options import KIB, MIB, PAGE_NBYTES, SaveOptions
from asyncckpt.ports import Sizes
from asyncckpt.stores.objects.clients.client import ObjectClient
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.objects.store import ObjectStore
from tests.simulator import Simulator
from tests.stores.objects.stores import options_of

CLIENTS = ("s3fs", "gcsfs", "obstore")
"""Every client library that speaks to a server, by the names of `options_of`."""

WINDOW_NBYTES = 64 * KIB

SAVE_OPTIONS = SaveOptions(host_memory_nbytes=64 * MIB, chunk_nbytes=32 * KIB)

HURRIED = RequestPolicy(
    timeout_s=0.4,  # s3fs pauses for 0.2 s after a response that ended too early
    floor_nbytes_per_s=64.0 * MIB,
    list_timeout_s=0.15,
    retry=RetryPolicy(tries=5, total_s=20.0, backoff_s=0.002, backoff_cap_s=0.02),
    hedges_at_once=0,
)
"""For servers in this process that fail on purpose. A busy machine makes requests run out of their
time that nobody meant to: they are tried again, and each try has longer than the one before.
Nothing is raced, so that the requests of a restore can be counted."""


class SmallStore(ObjectStore):
    """A store whose data files have 64 KiB, so that a small state is several."""

    def sizes(self, nbytes: int, **asked: object) -> Sizes:
        """Small windows, three at a time."""
        limit = WINDOW_NBYTES - PAGE_NBYTES
        return Sizes(WINDOW_NBYTES, WINDOW_NBYTES, 3, chunk_nbytes=limit, chunk_limit_nbytes=limit)


class Place:
    """One root on one simulator, through one client library.

    Attributes:
        kind: the client library.
        sim: the simulator.
        root: prefix in the bucket ``"bucket"``.
        workers: threads of all stores that it makes.
    """

    def __init__(self, kind: str, sim: Simulator, workers: Workers, root: str = "run") -> None:
        self.kind = kind
        self.sim = sim
        self.root = root
        self.workers = workers

    def client(self, **more: Any) -> ObjectClient:
        """A new client of the root."""
        scheme, options = options_of(self.kind, self.sim)
        url = f"{scheme}://bucket/{self.root}"
        return open_client(url, storage_options=options | more, workers=self.workers)

    def store(
        self,
        *,
        policy: RequestPolicy = HURRIED,
        client: ObjectClient | None = None,
        cls: type[ObjectStore] = SmallStore,
    ) -> ObjectStore:
        """A new store of the root, for one engine."""
        client = client or self.client()
        requests = Requests(client, policy=policy, rng=random.Random(1))
        return cls(Context(requests, self.workers, save_id_of, outline_of, epoch_of))

    def keys(self, below: str = "") -> list[str]:
        """Keys below the root, without it."""
        prefix = f"{self.root}/"
        return [
            key.removeprefix(prefix)
            for key in self.sim.stored("bucket")
            if key.startswith(prefix + below)
        ]


@asynccontextmanager
async def place(kind: str, root: str = "run", **simulator: Any) -> AsyncIterator[Place]:
    """A simulator with a bucket, and a root in it; both end with the block."""
    workers = Workers(4, "test-objects")
    try:
        async with Simulator("loopback", part_min_nbytes=1, **simulator) as sim:
            yield Place(kind, sim, workers, root)
    finally:
        workers.shutdown()


def state(version: int) -> dict[str, Any]:
    """A tree with several files of one request each, inline values and scalars."""
    rng = np.random.default_rng(version)
    return {
        "w": rng.standard_normal((96, 128)),  # 96 KiB
        "b": rng.standard_normal(9_000).astype(np.float32),
        "small": {str(i): rng.standard_normal(300) for i in range(3)},
        "inline": np.arange(version, version + 5),
        "step": version,
    }
