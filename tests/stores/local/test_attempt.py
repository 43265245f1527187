"""Effects of one save on disk: their order, the modes, and failures."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import (
    CheckpointExistsError,
    SaveError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local import attempt as attempts
from asyncckpt.stores.local import datafile, posix, publish
from asyncckpt.stores.local.locks import this_machine
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.paths import open_local
from asyncckpt.testing.checkpoints import PAGE, delete, pattern
from tests.stores.checkpoints import expect, save, write_file

BIG = 1 << 20


@pytest.fixture
def workers() -> Iterator[Workers]:
    threads = Workers(4, "test-io")
    yield threads
    threads.shutdown()


@pytest.fixture
async def store(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path / "root", workers)
    yield opened
    await opened.close()


def everything(path: Path) -> list[str]:
    """All paths below, except the directories that any attempt shares and the root's lock."""
    shared = {".asyncckpt", ".asyncckpt/epoch-0", ".asyncckpt/lock"}
    return sorted({str(p.relative_to(path)) for p in path.rglob("*")} - shared)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


class Journal:
    """The flushes and renames of the store, in the order in which they ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.events: list[str] = []
        self._root = root
        for name in ("fsync", "fdatasync"):
            self._wrap(monkeypatch, name)
        for name in ("rename_noreplace", "rename_exchange"):
            rename = getattr(publish, name)

            def renamed(source: str, target: str, rename: Any = rename) -> None:
                rename(source, target)
                self.events.append(f"rename {self._relative(target)}")

            monkeypatch.setattr(publish, name, renamed)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        call = getattr(os, name)

        def flushed(fd: int) -> None:
            call(fd)
            self.events.append(f"flush {self._relative(os.readlink(f'/proc/self/fd/{fd}'))}")

        monkeypatch.setattr(os, name, flushed)

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root).replace(".asyncckpt/epoch-0/1-a", "attempt")


# -------------------------------------------------------------------------------------- the order


async def test_the_record_is_flushed_after_everything_and_before_the_rename(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    journal = Journal(monkeypatch, root)
    await save(store, "1", "a")
    events = journal.events
    before = [
        "flush .",
        "flush attempt/default",
        "flush attempt/default/d",
        "flush attempt/default/d/data",
        "flush attempt/default/small",
    ]
    assert set(before) <= set(events)
    assert sorted(events[-4:-2]) == ["flush attempt", "flush attempt/checkpoint.json"]
    assert events[-2:] == ["rename 1", "flush ."]
    assert "flush .." in events  # the root was new
    assert events.count("flush attempt/default/d/data") == 1


async def test_a_replaced_checkpoint_is_removed_after_the_flush(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "first", 1)
    journal = Journal(monkeypatch, tmp_path / "root")
    remove = publish.remove_tree

    def removed(path: str, *, first: str | None = None) -> None:
        journal.events.append("remove")
        remove(path, first=first)

    monkeypatch.setattr(publish, "remove_tree", removed)
    await save(store, "1", "a", 2, overwrite=True)
    assert journal.events[-3:] == ["rename 1", "flush .", "remove"]
    await expect(store, "1", 2)


async def test_modes_follow_the_umask_and_private_is_private(
    store: LocalStore, tmp_path: Path
) -> None:
    previous = os.umask(0o027)
    try:
        await save(store, "1", "a")
        await save(store, "2", "b", private=True)
        private = LocalStore(tmp_path / "private" / "root", store._workers)
        await save(private, "3", "c", private=True)
        await private.close()
    finally:
        os.umask(previous)

    def modes(path: Path) -> set[tuple[bool, int]]:
        paths = [path, *path.rglob("*")]
        return {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in paths}

    assert modes(tmp_path / "root" / "1") == {(True, 0o750), (False, 0o640)}
    assert modes(tmp_path / "root" / "2") == {(True, 0o700), (False, 0o600)}
    assert modes(tmp_path / "private") == {(True, 0o700), (False, 0o600)}


async def test_the_owner_file_says_who_saves(store: LocalStore, tmp_path: Path) -> None:
    for _ in range(3):
        claim = await store.claim()
    attempt = await store.begin("1", "a", epoch=claim.epoch)
    path = tmp_path / "root" / ".asyncckpt" / "epoch-3" / "1-a.owner"
    owner = json.loads(path.read_bytes())
    assert owner.pop("created_ns") > 0
    machine = this_machine()
    assert owner == {
        "host": machine.host,
        "boot_id": machine.boot_id,
        "pid": os.getpid(),
        "name": "1",
        "save_id": "a",
    }
    await attempt.publish(b"record")
    assert sorted(os.listdir(tmp_path / "root" / "1")) == ["checkpoint.json"]
    assert not path.exists()


async def test_close_leaves_no_empty_directory_of_ours(store: LocalStore, tmp_path: Path) -> None:
    await save(store, "1", "a")
    await save(store, "1", "b", overwrite=True)  # makes the lock
    await store.close()
    await store.close()
    assert os.listdir(tmp_path / "root") == ["1"]


async def test_close_keeps_what_another_store_uses(store: LocalStore, tmp_path: Path) -> None:
    attempt = await store.begin("1", "a")
    other = LocalStore(tmp_path / "root", store._workers)
    await save(other, "2", "b")
    await other.close()
    await attempt.publish(b"record")
    assert sorted(await store.names()) == ["1", "2"]


def test_a_one_shot_location_is_a_name_in_its_parent(tmp_path: Path) -> None:
    assert open_local(tmp_path / "final") == (str(tmp_path), "final")
    assert open_local(f"{tmp_path}/a/../final/") == (str(tmp_path), "final")
    for location in ("/", f"{tmp_path}/.asyncckpt"):
        with pytest.raises(UsageError, match="cannot name a checkpoint"):
            open_local(location)


@pytest.mark.parametrize("name", ["", "a/b", ".", "..", "a\0", ".asyncckpt", 5, None])
async def test_what_is_no_name_is_refused(store: LocalStore, name: Any) -> None:
    with pytest.raises(UsageError, match="cannot name a checkpoint"):
        await store.begin(name, "a")
    with pytest.raises(UsageError, match="cannot name a checkpoint"):
        await asyncckpt.save((store, name), {"w": 1})


async def test_long_names_are_saved(store: LocalStore) -> None:
    for name in ("n" * 255, "é" * 127):
        await save(store, name, "a" * 36)
        await expect(store, name)


async def test_a_save_id_is_used_once(store: LocalStore) -> None:
    attempt = await store.begin("1", "a")
    with pytest.raises(UsageError, match="an attempt of this save id exists"):
        await store.begin("1", "a")
    with pytest.raises(UsageError, match="save id"):
        await store.begin("1", "../a")
    await attempt.put("small", b"x")
    await attempt.publish(b"record")


# ---------------------------------------------------------------------------- what is in the way


async def test_a_directory_without_record_is_moved_aside_and_kept(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    (root / "1").mkdir(parents=True)
    (root / "1" / "thesis.txt").write_text("years of work")
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        await save(store, "1", "a")
    aside = root / ".asyncckpt" / "aside-1-a"
    assert f"it was moved to {aside}" in caplog.text
    assert await store.sweep() == []
    await store.close()
    assert (aside / "thesis.txt").read_text() == "years of work"
    await expect(store, "1")


@pytest.mark.parametrize("overwrite", [False, True])
async def test_saving_onto_an_empty_directory_leaves_no_aside(
    store: LocalStore, tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "root" / "2").mkdir(parents=True)
    await save(store, "2", "b", overwrite=overwrite)
    await expect(store, "2")
    assert everything(tmp_path / "root" / ".asyncckpt") == ["epoch-0", "lock"]


async def test_what_counts_as_a_checkpoint_is_asked(tmp_path: Path, workers: Workers) -> None:
    store = LocalStore(tmp_path, workers, is_valid=lambda record: record.startswith(b"record"))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "checkpoint.json").write_bytes(b"torn")
    await save(store, "1", "a")
    assert (tmp_path / ".asyncckpt" / "aside-1-a" / "checkpoint.json").read_bytes() == b"torn"
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True to replace it"):
        await save(store, "1", "b")
    await store.close()


def a_project(place: Path) -> None:
    (place / "src").mkdir(parents=True)
    (place / "src" / "train.py").write_text("print()")


def a_run(place: Path) -> None:
    for step in ("5", "10"):
        (place / step).mkdir(parents=True)
        (place / step / "checkpoint.json").write_bytes(b"record 0")


@pytest.mark.parametrize(
    ("make", "name", "text"),
    [
        (a_project, "final", r"a directory that is not a checkpoint \(it has src\) exists here"),
        (a_run, "final", r"the root of a run \(it has step 5, 10\) exists here .*Checkpointer\("),
        (a_run, "1", r"the root of a run \(it has step 5, 10\) exists here"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["before", "meanwhile"])
@pytest.mark.parametrize("flags", [True, False], ids=["renameat2", "rename"])
async def test_a_directory_that_is_no_leftover_of_the_run_is_refused_and_stays(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    name: str,
    text: str,
    late: bool,
    flags: bool,
) -> None:
    def unsupported(*_: Any) -> None:
        raise posix.UnsupportedCallError("renameat2")

    if not flags:
        monkeypatch.setattr(publish, "rename_noreplace", unsupported)
    root = tmp_path / "root"
    place = root / name
    if not late:
        make(place)
        inode = place.stat().st_ino
        with pytest.raises(CheckpointExistsError, match=text) as caught:
            await store.begin(name, "a")
        assert not (root / ".asyncckpt").exists()  # nothing was begun
    else:
        attempt = await store.begin(name, "a")
        await write_file(attempt, "default/d/data", pattern(PAGE))
        make(place)
        inode = place.stat().st_ino
        with pytest.raises(CheckpointExistsError, match=text) as caught:
            await attempt.publish(b"record")
    assert caught.value.location == str(place)
    await store.close()
    assert place.stat().st_ino == inode
    assert [path.name for path in root.iterdir() if path.name != ".asyncckpt"] == [name]
    assert not [path for path in everything(root) if path.startswith(".asyncckpt")]
    # With `overwrite` it is moved, and nothing is lost.
    await save(store, name, "b", overwrite=True)
    await expect(store, name)
    assert (root / ".asyncckpt" / f"aside-{name}-b").stat().st_ino == inode


async def test_an_empty_directory_or_a_damaged_checkpoint_makes_way_for_a_one_shot_one(
    tmp_path: Path, workers: Workers
) -> None:
    store = LocalStore(tmp_path, workers, is_valid=lambda record: record.startswith(b"record"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "checkpoint.json").write_bytes(b"torn")
    for name in ("empty", "torn"):
        await save(store, name, "a")
        await expect(store, name)
    assert (tmp_path / ".asyncckpt" / "aside-torn-a" / "checkpoint.json").read_bytes() == b"torn"
    await store.close()


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_file_in_the_way_is_kept(
    store: LocalStore, tmp_path: Path, overwrite: bool
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "1").write_text("mine")
    (root / "2").symlink_to("nowhere")
    for name, found in (("1", "a file"), ("2", "a symbolic link")):
        with pytest.raises(CheckpointExistsError, match=f"{name}: {found} exists here") as caught:
            await store.begin(name, "a", overwrite=overwrite)  # before anything is staged
        assert caught.value.found == found
    assert (root / "1").read_text() == "mine"
    assert everything(root) == ["1", "2"]


async def test_a_link_to_an_empty_directory_is_kept_and_called_a_link(
    store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointExistsError, match="1: a symbolic link exists here"):
        await save(store, "1", "a")
    assert (tmp_path / "root" / "1").is_symlink()


async def test_a_link_to_a_checkpoint_is_replaced_without_touching_what_it_leads_to(
    store: LocalStore, tmp_path: Path
) -> None:
    elsewhere = LocalStore(tmp_path / "elsewhere", store._workers)
    await save(elsewhere, "1", "a", 1)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "1").symlink_to(tmp_path / "elsewhere" / "1")
    with pytest.raises(CheckpointExistsError):
        await save(store, "1", "b", 2)
    await expect(store, "1", 1)
    await save(store, "1", "c", 2, overwrite=True)
    await expect(store, "1", 2)
    await expect(elsewhere, "1", 1)
    (tmp_path / "root" / "3").symlink_to(tmp_path / "elsewhere" / "1")
    await delete(store, "3")
    await expect(elsewhere, "1", 1)
    assert await store.names() == ["1"]
    assert everything(tmp_path / "root") == everything_of("1")
    await elsewhere.close()


def everything_of(name: str) -> list[str]:
    inside = ("", "/checkpoint.json", "/default", "/default/d", "/default/d/data", "/default/small")
    return [name + path for path in inside]


# --------------------------------------------------------------------------------- failed flushes


async def test_a_failed_flush_of_a_data_file_is_not_repeated_and_ends_the_attempt(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await store.begin("1", "a")
    file = await attempt.create("data", nbytes=PAGE)
    await file.write(0, pattern(PAGE))
    calls = []

    def fdatasync(fd: int) -> None:
        calls.append(fd)
        failing(errno.EIO)()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(StoreError, match=r"data: flushing 4096 bytes failed: .* \(EIO\)") as e:
            await file.seal(PAGE)
    assert len(calls) == 1
    for call in (
        lambda: file.seal(PAGE),
        lambda: file.write(0, pattern(PAGE)),
        lambda: attempt.put("small", b"x"),
        lambda: attempt.create("other", nbytes=1),
        lambda: attempt.publish(b"record"),
    ):
        with pytest.raises(StoreError) as again:
            await call()
        assert again.value is e.value
    assert everything(tmp_path / "root") == []


@pytest.mark.parametrize("victim", ["default/d", "default", "", "checkpoint.json"])
async def test_a_failed_flush_before_the_rename_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    path = os.path.join(str(tmp_path / "root" / ".asyncckpt" / "epoch-0" / "1-a"), victim)
    fail_flush_of(monkeypatch, path.rstrip("/"))
    with pytest.raises(StoreError, match=r"flushing the (directory|record) failed"):
        await save(store, "1", "a")
    assert await store.names() == []
    assert everything(tmp_path / "root") == []


def fail_flush_of(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for name in ("fsync", "fdatasync"):
        call = getattr(os, name)

        def flushed(fd: int, call: Any = call) -> None:
            if os.readlink(f"/proc/self/fd/{fd}") == path:
                failing(errno.EIO)()
            call(fd)

        monkeypatch.setattr(os, name, flushed)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("flags", [True, False], ids=["one step", "two steps"])
async def test_a_failed_flush_of_the_root_takes_the_rename_back(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
    flags: bool,
) -> None:
    root = tmp_path / "root"
    if overwrite:
        await save(store, "1", "old", 1)
    else:
        await save(store, "2", "other")
    before = everything(root)
    if not flags:
        without_rename_flags(monkeypatch)
    with monkeypatch.context() as patch:
        fail_root_flush(patch, root)
        with pytest.raises(SaveError, match="the rename was undone") as caught:
            await save(store, "1", "new", 2, overwrite=overwrite)
    assert (caught.value.visible, caught.value.durable) == (False, False)
    assert everything(root) == before
    if overwrite:
        await expect(store, "1", 1)


def fail_root_flush(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Fails flushes of the root once a record has been flushed."""
    sync = os.fsync
    data_sync = os.fdatasync
    seen = []

    def fdatasync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("checkpoint.json"):
            seen.append(fd)
        data_sync(fd)

    def fsync(fd: int) -> None:
        if seen and os.readlink(f"/proc/self/fd/{fd}") == str(root):
            failing(errno.EIO)()
        sync(fd)

    patch.setattr(os, "fdatasync", fdatasync)
    patch.setattr(os, "fsync", fsync)


def without_rename_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(source: str, target: str) -> None:
        raise posix.UnsupportedCallError("renameat2")

    for name in ("rename_noreplace", "rename_exchange"):
        monkeypatch.setattr(publish, name, unsupported)


@pytest.mark.parametrize("end", ["replaced", "deleted"])
async def test_a_publication_is_taken_back_only_while_it_has_the_name(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A renames, its flush of the root fails; B overwrites and is acknowledged; A undoes."""
    root, sync = tmp_path / "root", os.fsync
    await save(store, "2", "other")
    renamed, go_on = threading.Event(), threading.Event()

    def fsync(fd: int) -> None:
        place = os.readlink(f"/proc/self/fd/{fd}")
        if place == str(root) and (root / "1").exists() and not renamed.is_set():
            renamed.set()
            assert go_on.wait(30)
            failing(errno.EIO)()
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    first = asyncio.create_task(save(store, "1", "a", 1))
    await asyncio.to_thread(renamed.wait, 30)
    if end == "replaced":
        await save(store, "1", "b", 2, overwrite=True)
    else:
        await delete(store, "1")
    go_on.set()
    with pytest.raises(SaveError, match="another process has replaced or deleted") as caught:
        await first
    assert (caught.value.visible, caught.value.durable) == (False, False)
    if end == "replaced":
        await expect(store, "1", 2)
    assert sorted(await store.names()) == (["1", "2"] if end == "replaced" else ["2"])
    assert await store.sweep() == []


@pytest.mark.parametrize("overwrite", [False, True])
async def test_if_the_rename_cannot_be_taken_back_the_error_says_visible(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    root = tmp_path / "root"
    if overwrite:
        await save(store, "1", "old", 1)
    exchange = publish.rename_exchange
    calls = []

    def once(source: str, target: str) -> None:
        calls.append(source)
        if len(calls) > 1:
            failing(errno.EIO)()
        exchange(source, target)

    with monkeypatch.context() as patch:
        fail_root_flush(patch, root)
        patch.setattr(publish, "rename_exchange", once)
        patch.setattr(publish.os, "rename", failing(errno.EIO))
        with pytest.raises(SaveError, match="may not survive power loss") as caught:
            await save(store, "1", "new", 2, overwrite=overwrite)
    assert (caught.value.visible, caught.value.durable) == (True, False)
    await expect(store, "1", 2)
    # The exchange may not be durable: after power loss the old checkpoint must be complete.
    left = {path for path in everything(root) if path.startswith(".")}
    assert await store.sweep() == []
    assert (".asyncckpt/epoch-0/1-new/checkpoint.json" in left) == overwrite
    assert {path for path in everything(root) if path.startswith(".")} == left


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_rename_that_was_done_but_reported_as_failed_counts(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    if overwrite:
        await save(store, "1", "old", 1)
    for name in ("rename_noreplace", "rename_exchange"):
        rename = getattr(publish, name)

        def lost(source: str, target: str, rename: Any = rename) -> None:
            rename(source, target)
            failing(errno.EIO)()

        monkeypatch.setattr(publish, name, lost)
    await save(store, "1", "new", 2, overwrite=overwrite)
    await expect(store, "1", 2)
    assert everything(tmp_path / "root") == everything_of("1")


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_rename_that_failed_leaves_the_old_set_of_checkpoints(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    await save(store, "0", "other", 0)
    if overwrite:
        await save(store, "1", "old", 1)
    before = everything(tmp_path / "root")
    for name in ("rename_noreplace", "rename_exchange"):
        monkeypatch.setattr(publish, name, failing(errno.EIO))
    with pytest.raises(StoreError, match=r"1: publishing the checkpoint failed: .* \(EIO\)"):
        await save(store, "1", "new", 2, overwrite=overwrite)
    assert everything(tmp_path / "root") == before


async def test_an_attempt_that_was_taken_over_cannot_publish(
    store: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", "a")
    control = tmp_path / "root" / ".asyncckpt"
    (control / "epoch-0").rename(control / "epoch-0-closed")
    with pytest.raises(SaveError, match="another process has taken over"):
        await attempt.publish(b"record")
    assert await store.names() == []


async def test_an_unsealed_data_file_cannot_be_published(store: LocalStore, tmp_path: Path) -> None:
    attempt = await store.begin("1", "a")
    await attempt.create("data", nbytes=1)
    with pytest.raises(UsageError, match="data: the data file is not sealed"):
        await attempt.publish(b"record")
    assert everything(tmp_path / "root") == []


# ----------------------------------------------------------------------------------- cancellation


async def test_a_publish_cancelled_after_the_rename_returns_its_outcome(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = publish.rename_noreplace
    renamed, go_on = threading.Event(), threading.Event()

    def held(source: str, target: str) -> None:
        rename(source, target)
        renamed.set()
        assert go_on.wait(30)

    monkeypatch.setattr(publish, "rename_noreplace", held)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(save(store, "1", "a"))
        await store._workers.run(renamed.wait, 30)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
    assert not task.cancelled()
    await expect(store, "1")


async def test_a_cancelled_begin_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = attempts.leads_to
    locked, go_on = threading.Event(), threading.Event()

    def held(path: str, fd: int) -> bool:
        locked.set()
        assert go_on.wait(30)
        return own(path, fd)

    monkeypatch.setattr(attempts, "leads_to", held)
    task = asyncio.create_task(store.begin("1", "a"))
    await store._workers.run(locked.wait, 30)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert everything(tmp_path / "root") == []


async def test_no_descriptor_and_no_lock_stays_after_an_attempt(
    store: LocalStore, tmp_path: Path
) -> None:
    await save(store, "warm", "up")
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(3):
        attempt = await store.begin("1", f"a{number}")
        file = await attempt.create("data", nbytes=BIG)
        await file.write(0, pattern(BIG))
        await attempt.abort()
    await save(store, "1", "b")
    with pytest.raises(CheckpointExistsError):
        await save(store, "1", "c")
    await delete(store, "1")
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_an_unlisting_that_is_cancelled_leaves_no_descriptor_and_no_lock(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "a")
    before = sorted(os.listdir("/proc/self/fd"))
    moved, go_on = threading.Event(), threading.Event()
    rename = os.rename

    def held(source: str, target: str) -> None:
        rename(source, target)
        moved.set()
        assert go_on.wait(30)

    monkeypatch.setattr(os, "rename", held)
    task = asyncio.create_task(store.unlist("1"))
    await asyncio.to_thread(moved.wait, 30)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert await store.names() == []
    assert len(await store.sweep()) == 1


# ---------------------------------------------------------------------------------- direct writes


class Writes:
    """Direct and buffered writes of the store, on a scripted file system."""

    def __init__(self, patch: pytest.MonkeyPatch, spoil: Callable[[int, int], int | None]) -> None:
        self.direct = 0
        self.buffered = 0
        write = os.pwrite

        def pwrite(fd: int, data: Any, offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                self.direct += 1
                part = spoil(self.direct, len(data))
                data = data if part is None else data[:part]
                if part is not None and part % 512:
                    raise OSError(errno.EINVAL, "not in a test")
            else:
                self.buffered += 1
            return write(fd, data, offset)

        patch.setattr(os, "pwrite", pwrite)


async def saved_bytes(store: LocalStore, data: Any) -> bytes:
    attempt = await store.begin("1", "a")
    await write_file(attempt, "data", data)
    await attempt.publish(b"record")
    files = store.files("1")
    found = await files.read("data", max_nbytes=data.size)
    await files.close()
    return found


async def test_whole_pages_are_written_past_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pattern(BIG)
    writes = Writes(monkeypatch, lambda number, nbytes: None)
    assert await saved_bytes(store, data) == data.tobytes()
    assert writes.direct == 8
    assert writes.buffered == 2  # the owner file and the record


async def test_a_short_direct_write_is_finished_through_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pattern(BIG)
    writes = Writes(monkeypatch, lambda number, nbytes: 512 * 13 if number % 3 == 0 else PAGE * 3)
    assert await saved_bytes(store, data) == data.tobytes()
    assert writes.direct > 8


@pytest.mark.parametrize("when", ["open", "first write", "later write"])
async def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    data = pattern(BIG + 5)
    if when == "open":
        opened = os.open

        def refusing(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return opened(path, flags, *args, **options)

        monkeypatch.setattr(datafile.os, "open", refusing)
    else:
        first = 1 if when == "first write" else 4

        def spoil(number: int, nbytes: int) -> int | None:
            if number >= first:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return None

        writes = Writes(monkeypatch, spoil)
    assert await saved_bytes(store, data) == data.tobytes()
    if when != "open":
        assert writes.direct == first  # asked once


async def test_a_thread_whose_direct_write_begins_after_the_first_refusal_writes_an_ordinary_one(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, both, refused = pattern(2 * BIG), threading.Barrier(2), threading.Event()
    write_direct = datafile.LocalDataFile._write_direct

    def ordered(file: Any, direct: Any, view: memoryview, offset: int) -> int:
        both.wait(30)
        if offset:
            assert refused.wait(30)
        done = write_direct(file, direct, view, offset)
        refused.set()
        return done

    monkeypatch.setattr(datafile.LocalDataFile, "_write_direct", ordered)
    Writes(monkeypatch, lambda number, nbytes: failing(errno.EINVAL)())
    attempt = await store.begin("1", "a")
    file = await attempt.create("data", nbytes=data.size)
    await asyncio.gather(file.write(0, data[:BIG]), file.write(BIG, data[BIG:]))
    await file.seal(data.size)
    await attempt.publish(b"record")
    files = store.files("1")
    assert await files.read("data", max_nbytes=data.size) == data.tobytes()
    await files.close()


async def test_insisting_on_direct_writes_is_an_error_where_there_are_none(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, workers, direct_io=True)
    attempt = await store.begin("1", "a")
    file = await attempt.create("data", nbytes=BIG)
    Writes(monkeypatch, lambda number, nbytes: failing(errno.EINVAL)())
    with pytest.raises(StoreError, match="pass direct_io='auto'"):
        await file.write(0, pattern(BIG))
    await attempt.abort()


async def test_a_full_disk_names_the_free_space(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await store.begin("1", "a")
    file = await attempt.create("data", nbytes=BIG)
    with monkeypatch.context() as patch:
        Writes(patch, lambda number, nbytes: failing(errno.ENOSPC)())
        with pytest.raises(StoreError) as caught:
            await file.write(0, pattern(BIG))
    text = str(caught.value)
    assert f"epoch-0/1-a/data: writing {BIG} bytes at offset 0 failed" in text
    assert "(ENOSPC)" in text and "bytes are free; free space or inodes, or save elsewhere" in text
    assert not caught.value.retryable
    await attempt.abort()
    assert everything(tmp_path / "root") == []


async def test_preallocated_space_that_is_not_used_is_given_back(
    store: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", "a")
    await write_file_announced(attempt, 64 * BIG, pattern(BIG))
    await attempt.publish(b"record")
    found = (tmp_path / "root" / "1" / "data").stat()
    assert found.st_size == BIG
    assert found.st_blocks * 512 <= BIG + 64 * 1024


async def write_file_announced(attempt: Any, nbytes: int, data: Any) -> None:
    file = await attempt.create("data", nbytes=nbytes)
    await file.write(0, data)
    await file.seal(data.size)


async def test_writes_of_every_alignment_come_back(store: LocalStore) -> None:
    source = pattern(BIG)
    attempt = await store.begin("1", "a")
    expected = {}
    for shift in (0, 1, 512, PAGE - 1):  # of the address
        for offset in (0, 1, 512, PAGE - 1):  # in the file
            data = source[shift : shift + 200_000]
            file = await attempt.create(f"{shift}-{offset}", nbytes=offset + data.size)
            await file.write(offset, data)
            await file.write(0, np.zeros(offset, np.uint8))
            await file.seal(offset + data.size)
            expected[file.path] = bytes(offset) + data.tobytes()
    await attempt.publish(b"record")
    files = store.files("1")
    for path, data in expected.items():
        assert await files.read(path, max_nbytes=BIG) == data
    await files.close()


async def test_nothing_blocks_the_loop(store: LocalStore, no_blocking: list[str]) -> None:
    await save(store, "1", "a")
    await save(store, "1", "b", 1, overwrite=True)
    await expect(store, "1", 1)
    attempt = await store.begin("2", "c")
    await attempt.create("data", nbytes=BIG)
    await attempt.abort()
    await store.sweep()
    await delete(store, "1")
    await store.close()
