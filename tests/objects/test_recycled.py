"""Memory that a request may still be sending is not used again, whatever becomes of the request."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import SaveOptions
from asyncckpt.errors import AsyncCheckpointError, StoreError
from asyncckpt.options import MIB, SLOT_NBYTES
from asyncckpt.ports import Sizes
from asyncckpt.session.session import Session
from asyncckpt.stores.objects.clients.client import Body
from asyncckpt.stores.objects.datafile import ObjectDataFile
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy
from asyncckpt.stores.objects.store import ObjectStore
from tests.cancellation.points import assert_equal
from tests.objects.stores import CLIENTS, SAVE_OPTIONS, Place, place, state
from tests.simulator import Fault, Gate, Request
from tests.watch import slot_pools

WINDOW_NBYTES = 8 * MIB
WINDOWS = 9
OPTIONS = SaveOptions(host_memory_nbytes=64 * MIB, chunk_nbytes=2 * MIB)

PATIENT = RequestPolicy(
    timeout_s=0.3,
    floor_nbytes_per_s=64.0 * MIB,
    retry=RetryPolicy(tries=9, total_s=60.0, backoff_s=0.01, backoff_cap_s=0.05),
)


class LargeStore(ObjectStore):
    """A store whose data files are one window of 8 MiB each."""

    def sizes(self, nbytes: int, **asked: object) -> Sizes:
        """Two windows at a time."""
        return Sizes(WINDOW_NBYTES, WINDOW_NBYTES, 2)


class Stubborn:
    """A client whose requests go on when whoever made them has given up, as some libraries' do.

    One of them is slow: it reads its body when a gate is released, and not before.

    Attributes:
        sent: checksum of every body when it was handed over, by key; no CRC-32C, which is the same
            for all files whose chunks end with theirs.
        tasks: requests on their way.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.tasks: set[asyncio.Task[None]] = set()
        self.sent: dict[str, int] = {}
        self.slow: tuple[int, Gate] | None = None
        self._puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """As the client's, and it ends when it ends."""
        self.sent[key] = zlib.crc32(body)
        gate = None
        if "/d/" in key:
            self._puts += 1
            if self.slow is not None and self.slow[0] == self._puts:
                gate = self.slow[1]
        task = asyncio.create_task(self._send(gate, key, body, create))
        del body
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    async def _send(self, gate: Gate | None, key: str, body: Body, create: bool) -> None:
        if gate is not None:
            await gate.hold()
        await self._client.put(key, body, create=create)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()


class Watched:
    """A root of which every body that arrives is compared with what was handed over."""

    def __init__(self, at: Place, ckpt: asyncckpt.Checkpointer, client: Stubborn) -> None:
        self.at = at
        self.ckpt = ckpt
        self.client = client
        self.core: Session = ckpt._session
        self.arrived: list[tuple[str, int]] = []
        at.sim.faults.append(
            Fault(kind="put_object", key="*/d/*", number=0, hook=self._note, name="watched")
        )

    def _note(self, request: Request) -> None:
        self.arrived.append(
            (request.key.removeprefix(f"{self.at.root}/"), zlib.crc32(request.body))
        )

    def pause(self, number: int) -> Gate:
        """This request for data is not sent until its gate is released."""
        gate = Gate()
        self.client.slow = number, gate
        return gate

    async def wait_until_free(self) -> None:
        """No memory is held for requests."""
        budget = self.core.runtime.budget
        async with asyncio.timeout(20):
            while budget.in_use or any(pool.discarded for pool in slot_pools(budget)):
                await asyncio.sleep(0.01)

    def wrong(self) -> list[str]:
        """Names under which other bytes arrived than were handed over for them."""
        return [key for key, crc in self.arrived if crc != self.client.sent[key]]


@asynccontextmanager
async def watched(kind: str) -> AsyncIterator[Watched]:
    """A root on a simulator, and a Checkpointer with memory for eight windows."""
    async with place(kind) as at:
        client = Stubborn(at.client())
        store = at.store(cls=LargeStore, client=client, policy=PATIENT)  # type: ignore[arg-type]
        async with asyncckpt.Checkpointer(store, save_options=OPTIONS) as ckpt:
            yield Watched(at, ckpt, client)


def large(version: int) -> dict[str, Any]:
    """A state of windows that all differ."""
    base = np.arange(WINDOWS * (WINDOW_NBYTES - MIB) // 8, dtype=np.int64)
    return {"w": base * (2 * version + 1) + version, "step": version}


@pytest.mark.parametrize("kind", CLIENTS)
async def test_what_a_request_that_ran_out_of_time_may_still_send_is_not_used_again(
    kind: str,
) -> None:
    async with watched(kind) as made:
        gate = made.pause(2)
        await made.ckpt.save(1, large(1))
        assert gate.reached.is_set
        assert any(key.endswith(".r1") for key in made.client.sent)
        assert any(pool.discarded for pool in slot_pools(made.core.runtime.budget))
        await made.ckpt.save(2, large(2))  # which needs all memory again and again
        gate.release()
        await made.wait_until_free()
        assert len(made.arrived) > 2 * WINDOWS
        assert made.wrong() == []
        assert_equal(await made.ckpt.restore(2), large(2))
        assert_equal(await made.ckpt.restore(1), large(1))


@pytest.mark.parametrize("kind", CLIENTS)
async def test_what_a_cancelled_save_may_still_send_is_not_used_by_the_next_one(kind: str) -> None:
    async with watched(kind) as made:
        gate = made.pause(2)
        saving = asyncio.create_task(made.ckpt.save(1, large(1)))
        await gate.reached.wait()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        await made.ckpt.save(2, large(2))
        gate.release()
        await made.wait_until_free()
        assert made.wrong() == []
        assert await made.ckpt.steps() == [2]
        assert_equal(await made.ckpt.restore(2), large(2))


async def test_memory_that_is_used_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ObjectDataFile.write

    async def reusable(self: ObjectDataFile, offset: int, data: Any) -> bool:
        await write(self, offset, data)
        return True

    monkeypatch.setattr(ObjectDataFile, "write", reusable)
    async with watched("s3fs") as made:
        gate = made.pause(2)
        await made.ckpt.save(1, large(1))
        await made.ckpt.save(2, large(2))
        gate.release()
        async with asyncio.timeout(20):
            while made.client.tasks:
                await asyncio.sleep(0.01)
        assert made.wrong() != []


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("fault", [{"status": 403}, {"hang": True}], ids=["refused", "unanswered"])
async def test_saves_that_failed_leave_memory_for_the_next_one_while_their_errors_are_kept(
    kind: str, fault: dict[str, Any]
) -> None:
    policy = RequestPolicy(timeout_s=0.1, retry=RetryPolicy(tries=1))
    async with place(kind) as at:
        store = at.store(policy=policy)
        async with asyncckpt.Checkpointer(store, save_options=SAVE_OPTIONS) as ckpt:
            slots = ckpt._session.runtime.budget.capacity // SLOT_NBYTES
            errors: list[AsyncCheckpointError] = []
            at.sim.faults.append(
                # Every name, that of a slow upload's second request too.
                Fault(kind=("put_object", "put_part"), key="*/d/*", number=0, **fault)
            )
            for version in range(slots + 2):
                with pytest.raises(StoreError) as caught:
                    async with asyncio.timeout(10):
                        await ckpt.save(version, state(version))
                errors.append(caught.value)
            at.sim.faults.clear()
            store._requests.policy = RequestPolicy()  # a busy machine may take its time
            async with asyncio.timeout(10):
                await ckpt.save(99, state(99))
            assert len(errors) == slots + 2
