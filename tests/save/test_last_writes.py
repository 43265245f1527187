"""What a local save does before its first copy and during its last writes."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import StoreError
from asyncckpt.save.commit import Commit
from asyncckpt.save.merge import SharedCommit
from asyncckpt.save.snapshot import Consent
from asyncckpt.save.stage import Staging
from asyncckpt.session.pending import PendingSave
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.tree import AttemptTree
from tests.cancellation.points import SLOT_NBYTES, assert_equal, small_slots

WAIT_S = 60
STATE = {"a": np.arange(5 * SLOT_NBYTES // 8)}


class Held:
    """The write of one window waits, and may fail; what happens meanwhile is seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go, self.indexed = (threading.Event() for _ in range(3))
        self.error: OSError | None = None
        self.indexes = 0
        write, put, put_index = LocalDataFile._write, AttemptTree._write_file, Commit.put_index

        def held_write(file: LocalDataFile, offset: int, data: Any) -> None:
            if file.path.endswith("-0") and offset == SLOT_NBYTES:
                self.reached.set()
                assert self.go.wait(WAIT_S)
                if self.error is not None:
                    with file._guard.step("writing", file.path):
                        raise self.error
            write(file, offset, data)

        def seen_put(attempt: AttemptTree, path: str, *args: Any) -> None:
            put(attempt, path, *args)
            if path.endswith("-index"):
                self.indexed.set()

        async def counted(commit: Commit, payload: Any) -> Any:
            self.indexes += 1
            return await put_index(commit, payload)

        monkeypatch.setattr(LocalDataFile, "_write", held_write)
        monkeypatch.setattr(AttemptTree, "_write_file", seen_put)
        monkeypatch.setattr(Commit, "put_index", counted)

    async def wait(self, event: threading.Event) -> None:
        """Wait for something that happens in another thread."""
        assert await asyncio.to_thread(event.wait, WAIT_S)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go.set()


@pytest.mark.parametrize("stall_first", [False, True], ids=["save", "start_save"])
async def test_the_index_is_written_once_while_a_window_still_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Held, stall_first: bool
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        small_slots(ckpt, monkeypatch)
        task = asyncio.create_task((ckpt.start_save if stall_first else ckpt.save)(1, STATE))
        await held.wait(held.reached)
        await held.wait(held.indexed)
        assert await ckpt.steps() == []  # the record waits for all data
        held.go.set()
        if isinstance(found := await task, PendingSave):
            await found
        assert held.indexes == 1 and await ckpt.steps() == [1]
        assert (await ckpt.verify(1)).ok
        assert_equal(await ckpt.restore(1), STATE)


async def test_a_write_that_fails_after_the_index_was_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    held.error = OSError(errno.EIO, "bad sector")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        small_slots(ckpt, monkeypatch)
        task = asyncio.create_task(ckpt.save(1, STATE))
        await held.wait(held.indexed)
        held.go.set()
        with pytest.raises(StoreError, match="EIO"):
            await task
        assert await ckpt.steps() == []
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and "-" in path.name]


async def test_consent_is_asked_for_when_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    asked = threading.Event()

    async def given() -> dict[str, Any]:
        return {"by": "all"}

    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        session = small_slots(ckpt, monkeypatch)
        pending = session.start_save(
            1,
            STATE,
            metadata=None,
            metrics=None,
            overwrite=False,
            options=None,
            progress=None,
            stall_first=False,
            consent=Consent(asked.set, given),
        )
        await held.wait(held.reached)
        await ckpt.steps()
        assert not asked.is_set() and held.indexes == 0
        held.go.set()
        await pending
        assert asked.is_set() and (await ckpt.inspect(1)).metadata == {"by": "all"}


async def test_the_first_data_file_is_there_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    copy, open_file = Staging._copy_windows, LocalDataFile.open

    def late(self: Staging, *args: Any) -> Any:
        assert opened.wait(WAIT_S)
        return copy(self, *args)

    def seen(self: LocalDataFile, *args: Any) -> None:
        open_file(self, *args)
        opened.set()

    monkeypatch.setattr(Staging, "_copy_windows", late)
    monkeypatch.setattr(LocalDataFile, "open", seen)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, STATE)


def test_entries_are_passed_on_when_the_files_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_on = threading.Event()
    early: list[bool] = []
    pass_on, seal = SharedCommit._pass_on, LocalDataFile._seal

    async def seen(commit: SharedCommit, entries: Any) -> Any:
        passed_on.set()
        return await pass_on(commit, entries)

    def late(file: LocalDataFile, nbytes: int) -> None:
        if file.path.endswith("-1-0"):
            early.append(passed_on.wait(0.3))
        seal(file, nbytes)

    async def save(process: int) -> None:
        shard = [((process * 1024, 0), np.full((1024, 1024), process, np.float32))]
        coordinator = asyncckpt.DirectoryCoordinator(
            tmp_path / "keys", process_index=process, process_count=2
        )
        try:
            tree = {"x": asyncckpt.ShardedArray((2048, 1024), "float32", shard)}
            await asyncckpt.save(tmp_path / "saved", tree, coordinator=coordinator)
        finally:
            await coordinator.close()

    monkeypatch.setattr(SharedCommit, "_pass_on", seen)
    monkeypatch.setattr(LocalDataFile, "_seal", late)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda process: asyncio.run(save(process)), range(2)))
    assert early == [False]
    assert passed_on.is_set()
