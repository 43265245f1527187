"""The local store obeys the laws of stores on every available kind of file system."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.errors import StoreError
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import Store
from asyncckpt.stores.local import posix, publish
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import save
from asyncckpt.testing.conformance import StoreConformance
from asyncckpt.testing.faults import FaultStore

MEMORY = Path("/dev/shm" if sys.platform == "linux" else tempfile.gettempdir())


async def test_a_removal_that_is_cancelled_before_it_begins_leaves_its_bytes_to_a_sweep(
    tmp_path: Path,
) -> None:
    workers = Workers(1, "test-io")
    store = LocalStore(tmp_path, workers)
    await save(store, "1", "a")
    before = sorted(os.listdir("/proc/self/fd"))
    remove = await store.unlist("1")
    go_on = threading.Event()
    blocked = workers.submit(go_on.wait, 30)
    removing = asyncio.create_task(remove())
    await asyncio.sleep(0)  # its call is queued
    removing.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert blocked.result() and sorted(os.listdir("/proc/self/fd")) == before
    assert len(await store.sweep()) == 1
    await store.close()
    workers.shutdown()


async def test_links_that_lead_nowhere_are_no_names(tmp_path: Path) -> None:
    workers = Workers(1, "test-io")
    store = LocalStore(tmp_path, workers)
    await save(store, "1", "a")
    for name in ("2", "3", "latest"):
        (tmp_path / name).symlink_to("nothing" if name == "2" else name)
    assert await store.names() == ["1"]
    await store.close()
    workers.shutdown()


@pytest.mark.usefixtures("leak_check")
class TestLocalStore(StoreConformance):
    direct_io = "auto"

    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "not" / "there yet"

    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[Store]:
        workers = Workers(4, "test-io")
        store = LocalStore(self.place(place), workers, direct_io=self.direct_io)
        try:
            yield store
        finally:
            await store.close()
            workers.shutdown()
        assert not (self.place(place) / ".asyncckpt").exists() or list(
            (self.place(place) / ".asyncckpt").rglob("*-*")
        )


class TestLocalStoreBuffered(TestLocalStore):
    direct_io = False


class TestLocalStoreInMemory(TestLocalStore):
    def place(self, tmp_path: Path) -> Path:
        return self.memory / tmp_path.name

    @pytest.fixture(autouse=True)
    def _removed(self) -> Iterator[None]:
        self.memory = Path(tempfile.mkdtemp(prefix="asyncckpt-", dir=MEMORY))
        yield
        shutil.rmtree(self.memory, ignore_errors=True)


class TestLocalStoreWithoutRenameFlags(TestLocalStore):
    """File systems such as NFS, which cannot exchange two directories."""

    @pytest.fixture(autouse=True)
    def _old_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unsupported(source: str, target: str) -> None:
            raise posix.UnsupportedCallError("renameat2")

        monkeypatch.setattr(publish, "rename_noreplace", unsupported)
        monkeypatch.setattr(publish, "rename_exchange", unsupported)


class TestFaultStoreWithoutScript(TestLocalStore):
    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[Store]:
        async with super().opened(place) as store:
            yield FaultStore(store)


async def test_the_path_that_failed_is_named_where_it_is_another_one(tmp_path: Path) -> None:
    (tmp_path / ".asyncckpt").touch()
    text = rf"{tmp_path}/30: beginning a save failed: .* at {tmp_path}/\.asyncckpt; a part of"
    with pytest.raises(StoreError, match=text):
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            await ckpt.save(30, {"w": 1})
