"""The last errors of processes: kept, taken and collected, without raising errors."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncckpt.errors import StoreError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local.store import LocalStore


@pytest.fixture
def workers() -> Iterator[Workers]:
    threads = Workers(4, "test-io")
    yield threads
    threads.shutdown()


async def test_notes_are_kept_by_process_and_taken_once(tmp_path: Path, workers: Workers) -> None:
    store = LocalStore(tmp_path, workers)
    for process in (10, 2):
        await store.keep_note(process, b"first")
        await store.keep_note(process, f"of {process}".encode())
    mode = (tmp_path / ".asyncckpt" / "error-2").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    other = LocalStore(tmp_path, workers)
    assert set(await other.take_notes()) == {b"of 2", b"of 10"}
    assert await other.take_notes() == []
    await other.close()
    await store.close()


async def test_a_note_is_removed_by_the_store_that_kept_it(
    tmp_path: Path, workers: Workers
) -> None:
    store, other = LocalStore(tmp_path, workers), LocalStore(tmp_path, workers)
    await store.keep_note(1, b"failed")
    await other.keep_note(1, None)
    assert (tmp_path / ".asyncckpt" / "error-1").exists()
    await store.keep_note(1, None)
    assert not (tmp_path / ".asyncckpt" / "error-1").exists()


async def test_what_cannot_be_noted_is_passed_over(tmp_path: Path, workers: Workers) -> None:
    nowhere = LocalStore(tmp_path / "nowhere", workers)
    await nowhere.keep_note(0, b"failed")
    assert await nowhere.take_notes() == []
    assert not (tmp_path / "nowhere").exists()


async def test_notes_that_cannot_be_listed_are_passed_over(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, workers)
    await store.keep_note(0, b"failed")

    def refuse(path: object) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        assert await store.take_notes() == []
    assert await store.take_notes() == [b"failed"]
    await store.close()


async def test_notes_that_are_no_regular_files_are_neither_read_nor_written(
    tmp_path: Path, workers: Workers
) -> None:
    store, control = LocalStore(tmp_path, workers), tmp_path / ".asyncckpt"
    control.mkdir()
    os.mkfifo(control / "error-1")
    (tmp_path / "secret").write_text("secret")
    (control / "error-2").symlink_to("../secret")
    (control / "error-3").symlink_to("/dev/zero")
    async with asyncio.timeout(10):
        for process in (1, 2, 3):
            await store.keep_note(process, b"failed")
        assert await store.take_notes() == []
    reader = os.open(control / "error-1", os.O_RDONLY | os.O_NONBLOCK)
    try:
        await store.keep_note(1, b"failed")
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
    assert (tmp_path / "secret").read_text() == "secret"


async def test_old_notes_are_garbage(tmp_path: Path, workers: Workers) -> None:
    store = LocalStore(tmp_path, workers)
    for process in (1, 2):
        await store.keep_note(process, b"failed")
    old = tmp_path / ".asyncckpt" / "error-1"
    os.utime(old, (1, 1))
    assert await store.collect(3600.0, dry_run=True) == ["error-1"]
    assert old.exists()
    assert await store.collect(3600.0) == ["error-1"]
    assert not old.exists()
    assert await store.sweep() == []
    assert await store.take_notes() == [b"failed"]


async def test_a_root_that_cannot_be_listed_is_a_store_error_for_the_collection(
    tmp_path: Path, workers: Workers
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for root in (loop, tmp_path / ("x" * 300)):
        with pytest.raises(StoreError, match="collecting leftovers"):
            await LocalStore(root, workers).collect(0.0)
