"""A thread stuck in a system call is abandoned: named, replaced, and its memory not used again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.flow.engine import Engine
from asyncckpt.flow.threads import ThreadAbandonedError
from asyncckpt.restore.decode import Decode
from asyncckpt.save.serialize import Compressor, WindowChecksums
from asyncckpt.save.stage import Staging
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.verify.verify import _FileChecker
from tests.cancellation.points import SLOT_NBYTES, assert_equal, options, small_slots, state

ABANDON_S = 0.3


class Stuck:
    """The first call of a function that a test holds."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self._first = threading.Lock()

    async def cancel(self, task: asyncio.Task[Any], engine: Engine) -> None:
        """Cancel a task once its call is held; it ends although the call does not."""
        await asyncio.to_thread(self.reached.wait, 60)
        with impatient(engine):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._first.acquire(blocking=False):
                self.reached.set()
                assert self.go.wait(60)
            return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def impatient(engine: Engine) -> Iterator[None]:
    """Give threads up early inside the block only: elsewhere, they are just slow."""
    pools = engine.io, engine.compute
    patience_s = [workers._abandon_s for workers in pools]
    for workers in pools:
        workers._abandon_s = ABANDON_S
    yield
    for workers, abandon_s in zip(pools, patience_s, strict=True):
        workers._abandon_s = abandon_s


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.go.set()


PLACES = {
    "copying": (Staging, "_copy_windows", "_copy_windows"),
    "copying a chunk": (Staging, "_copy_chunks", "_copy_chunks"),
    "copying and checksums": (WindowChecksums, "seal", "_copy_windows"),
    "checksums later": (WindowChecksums, "seal", "seal"),
    "compressing": (Compressor, "compress", "compress"),
    "writing": (LocalDataFile, "_write", "_write"),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_save_with_a_stuck_thread_ends_names_it_and_spares_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: Stuck, place: str
) -> None:
    owner, name, shown = PLACES[place]
    async with asyncckpt.Checkpointer(tmp_path, save_options=options()) as ckpt:
        core = small_slots(ckpt, monkeypatch)
        engine, budget = core.runtime.engine, core.runtime.budget
        await ckpt.save(0, state(0))
        monkeypatch.setattr(owner, name, stuck.wrap(getattr(owner, name)))
        # The state is larger than the memory: `start_save` waits for windows to be written.
        begin = ckpt.start_save if place == "checksums later" else ckpt.save
        task = asyncio.create_task(begin(1, state(1)))
        await asyncio.to_thread(stuck.reached.wait, 60)
        (pending,) = core.saves.pending()
        await stuck.cancel(task, engine)
        with (
            impatient(engine),
            pytest.raises(ThreadAbandonedError, match=rf"stuck in .*{shown}|stuck in .*call"),
        ):
            await pending
        assert budget.in_use > 0  # what the thread may still touch
        # The rest of the memory and a new thread serve the next saves.
        for step in (2, 3):
            await ckpt.save(step, state(step))
            assert_equal(await ckpt.restore(step), state(step))
        assert await ckpt.steps() == [0, 2, 3]
        stuck.go.set()
        while budget.in_use:
            await ckpt.latest_step()
        pool = core.runtime.pool
        assert not pool.kept and len(pool._free) == pool._allocated


async def test_a_restore_with_a_stuck_thread_ends_and_spares_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: Stuck
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, save_options=options()) as ckpt:
        core = small_slots(ckpt, monkeypatch)
        await ckpt.save(0, {"small": {str(i): np.arange(400.0) + i for i in range(9)}})
        monkeypatch.setattr(Decode, "small", stuck.wrap(Decode.small))
        task = asyncio.create_task(ckpt.restore(0))
        await stuck.cancel(task, core.runtime.engine)
        assert core.runtime.budget.in_use == SLOT_NBYTES
        assert (await ckpt.restore(0))["small"]["3"][0] == 3
        stuck.go.set()
        while core.runtime.budget.in_use:
            await ckpt.latest_step()


@pytest.mark.parametrize(("owner", "name"), [(LocalFiles, "_read_into"), (_FileChecker, "feed")])
async def test_a_verification_with_a_stuck_thread_ends_and_spares_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: Stuck, owner: type, name: str
) -> None:
    """A later save would else copy leaves into memory that the thread may still write to."""
    async with asyncckpt.Checkpointer(tmp_path, save_options=options()) as ckpt:
        core = small_slots(ckpt, monkeypatch)
        engine, budget = core.runtime.engine, core.runtime.budget
        await ckpt.save(0, state(0))
        monkeypatch.setattr(owner, name, stuck.wrap(getattr(owner, name)))
        task = asyncio.create_task(ckpt.verify(0))
        await stuck.cancel(task, engine)
        assert budget.in_use == SLOT_NBYTES
        assert (await ckpt.verify(0)).ok
        stuck.go.set()
        while budget.in_use:
            await ckpt.latest_step()


async def test_reading_that_is_stuck_is_abandoned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: Stuck
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(0, {"a": np.arange(5.0)})
        monkeypatch.setattr(LocalFiles, "_open_file", stuck.wrap(LocalFiles._open_file))
        task = asyncio.create_task(ckpt.restore(0))
        await stuck.cancel(task, ckpt._session.runtime.engine)
        assert (await ckpt.restore(0))["a"].tolist() == [0, 1, 2, 3, 4]
        stuck.go.set()
