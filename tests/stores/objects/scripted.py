"""An object client in memory whose requests fail by script, and a clock that is set by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from asyncckpt.stores.objects.clients.client import (
    Body,
    ClientTraits,
    Kind,
    Listed,
    ObjectClient,
    PendingParts,
    RequestError,
    Take,
)
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from tests.stores.objects.hasty import HASTY

AT_ONCE = replace(
    HASTY, retry=RetryPolicy(tries=4, backoff_s=0.0, backoff_cap_s=0.0), hedge_cold_s=60.0
)
SHORT = replace(AT_ONCE, timeout_s=0.02)
"""Deadlines that a request without an answer reaches at once."""

TURNS = 50
"""Turns of the loop in which whatever waits for nothing else has come to its end."""


class Hang:
    """The request never ends by itself; with `applied`, it has taken effect."""

    def __init__(self, *, applied: bool = False) -> None:
        self.applied = applied


class Fails:
    """The request fails; with `applied`, it has taken effect and only its answer is lost."""

    def __init__(
        self, kind: Kind, *, applied: bool = False, retry_after_s: float | None = None
    ) -> None:
        self.kind = kind
        self.applied = applied
        self.retry_after_s = retry_after_s


Step = Hang | Fails | asyncio.Event | None
"""What happens to one request: it fails, waits for an event, or simply succeeds (None)."""


class ScriptedClient:
    """The objects of a prefix, in memory.

    `script` has a step for each of the next requests; after its last, all succeed.
    """

    def __init__(self, *script: Step) -> None:
        self.url = "script://bucket/run"
        self.traits = ClientTraits("scripted", 0, 0, True, multipart=True)
        self.script = list(script)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        self.running = self.peak = self.ended = 0
        self.closed = 0

    async def _request(self, name: str, act: Callable[[], None] = lambda: None) -> None:
        self.requests.append(name)
        step = self.script.pop(0) if self.script else None
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0)
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step is not None and step.applied:
                act()
            if isinstance(step, Hang):
                await asyncio.Event().wait()
            elif isinstance(step, Fails):
                raise RequestError(step.kind, "by script", retry_after_s=step.retry_after_s)
            act()
        finally:
            self.running -= 1
            self.ended += 1

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        def act() -> None:
            if create and key in self.objects:
                raise RequestError("exists", key, status=412)
            self.objects[key] = bytes(body)

        await self._request(f"put {key}", act)

    async def get(self, key: str, start: int, stop: int) -> Body:
        await self._request(f"get {key} {start}-{stop}")
        if key not in self.objects:
            raise RequestError("missing", key, status=404)
        return self.objects[key][start:stop]

    async def receive(self, key: str, start: int, stop: int, take: Take) -> None:
        await take([await self.get(key, start, stop)])

    async def size(self, key: str) -> int:
        await self._request(f"size {key}")
        if key not in self.objects:
            raise RequestError("missing", key, status=404)
        return len(self.objects[key])

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        await self._request(f"list {prefix}")
        return [Listed(key, len(value)) for key, value in sorted(self.objects.items())]

    async def delete(self, keys: Sequence[str]) -> None:
        def act() -> None:
            for key in keys:
                self.objects.pop(key, None)

        await self._request(f"delete {' '.join(keys)}", act)

    async def begin_parts(self, key: str, *, create: bool = False) -> str:
        upload = f"upload {len(self.uploads)}"

        def act() -> None:
            self.uploads[upload] = {}

        await self._request(f"begin {key}", act)
        return upload

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        def act() -> None:
            self.uploads[upload][number] = bytes(body)

        await self._request(f"part {number}", act)
        return f"tag {number}"

    async def complete_parts(
        self, key: str, upload: str, tags: Sequence[str], *, create: bool = False
    ) -> None:
        def act() -> None:
            if upload not in self.uploads:
                raise RequestError("missing", upload, status=404)
            parts = self.uploads.pop(upload)
            self.objects[key] = b"".join(parts[number] for number in sorted(parts))

        await self._request(f"complete {key}", act)

    async def abort_parts(self, key: str, upload: str) -> None:
        await self._request(f"abort {key}", lambda: None)
        self.uploads.pop(upload, None)

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        await self._request(f"pending {prefix}")
        return [PendingParts("key", upload) for upload in self.uploads]

    async def close(self) -> None:
        self.closed += 1


def requests(*script: Step, policy: RequestPolicy = AT_ONCE) -> tuple[Requests, ScriptedClient]:
    """Requests through a client of this script, and the client."""
    client = ScriptedClient(*script)
    typed: ObjectClient = client
    return Requests(typed, policy=policy, rng=random.Random(0)), client


def name(number: int) -> str:
    """The key of a data object at its try `number`."""
    return f"d/file-0.r{number}"


def assert_at_rest(store: Requests, client: ScriptedClient) -> None:
    """Every request has ended and holds nothing."""
    assert (store.limiter.in_flight, store.limiter.waiting) == (0, 0)
    assert all(store.controllers[way].hedges_in_flight == 0 for way in ("put", "get"))
    assert client.running == 0
    assert client.ended == len(client.requests)


class Clock:
    """The time of the running loop, which passes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self._now_s)

    def jump(self, seconds: float) -> None:
        """So much time passes in this turn of the loop."""
        self._now_s += seconds

    async def advance(self, seconds: float) -> None:
        """So much time has passed since nothing else was left to do, and nothing is again."""
        await self._turn()
        self.jump(seconds)
        await self._turn()

    async def _turn(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
