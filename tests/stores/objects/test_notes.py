"""The last errors of processes on object stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.stores.objects.requests.requests import Requests
from tests.simulator import Fault, Simulator, simulator
from tests.stores.objects.stores import KINDS, ROOT, opened
from tests.stores.objects.test_store_collect import age, keys


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator(keep_log=False) as sim:
        yield sim


@pytest.mark.parametrize("kind", KINDS)
async def test_notes_are_kept_taken_and_collected(sim: Simulator, kind: str) -> None:
    async with opened(kind, sim) as store:
        for process in (10, 2):
            await store.keep_note(process, f"of {process}".encode())
        assert keys(sim) == {".asyncckpt/error-2", ".asyncckpt/error-10"}
        assert await store.sweep() == ()
        assert set(await store.take_notes()) == {b"of 2", b"of 10"}
        assert await store.take_notes() == []
        await store.keep_note(1, b"failed")
        async with opened(kind, sim) as other:
            await other.keep_note(1, None)  # of another job
            assert keys(sim) == {".asyncckpt/error-1"}
        await store.keep_note(1, None)
        assert keys(sim) == set()
        await store.keep_note(3, b"failed")
        age(sim, COLLECT_MIN_S + 3600)
        assert await store.collect(COLLECT_MIN_S) == [".asyncckpt/error-3"]


async def test_notes_are_read_at_the_same_time(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of thousands of processes may have left as many."""
    all_three, read = asyncio.Barrier(3), Requests.read

    async def read_at_once(self: Requests, key: str, *, max_nbytes: int) -> bytes | None:
        async with asyncio.timeout(30):
            await all_three.wait()
        return await read(self, key, max_nbytes=max_nbytes)

    async with opened("s3fs", sim) as store:
        for process in range(3):
            await store.keep_note(process, f"of {process}".encode())
        monkeypatch.setattr(Requests, "read", read_at_once)
        assert sorted(await store.take_notes()) == [b"of 0", b"of 1", b"of 2"]


async def test_a_note_that_another_process_takes_meanwhile_is_left_out(sim: Simulator) -> None:
    async with opened("s3fs", sim) as store:
        for process in (1, 2):
            await store.keep_note(process, f"of {process}".encode())
        take = partial(sim.delete, "bucket", f"{ROOT}/.asyncckpt/error-1")
        sim.faults.append(Fault(kind="get_object", key="*error-1", hook=lambda _: take()))
        assert await store.take_notes() == [b"of 2"]
