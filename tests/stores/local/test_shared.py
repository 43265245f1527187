"""Attempts that several processes share in one directory: ownership and removal."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.errors import (
    CheckpointNotFoundError,
    SaveError,
    StoreError,
    UsageError,
)
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import JoinedAttempt
from asyncckpt.stores.local import attempt as attempts
from asyncckpt.stores.local import locks, owners, publish, sweep
from asyncckpt.stores.local.locks import Machine, Terms, this_machine
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.paths import Layout
from asyncckpt.testing.checkpoints import PAGE, pattern
from tests.stores.checkpoints import DATA, expect, save, write_file
from tests.stores.local.shared import die, files_of

JOIN_S = 20.0
GIVE_UP_S = 0.02
ID = "a"
ATTEMPT = f".asyncckpt/epoch-0/1-{ID}"
EXCHANGE = f"{ATTEMPT}/.asyncckpt-exchange"


@pytest.fixture
def workers() -> Iterator[Workers]:
    threads = Workers(4, "test-io")
    yield threads
    threads.shutdown()


@pytest.fixture
async def store(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path, workers)
    yield opened
    await opened.close()


@pytest.fixture
async def other(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    """The same root, opened by another process."""
    opened = LocalStore(tmp_path, workers)
    yield opened
    await opened.close()


async def join(store: LocalStore, process: int = 1, **options: Any) -> JoinedAttempt:
    return await store.join("1", ID, process=process, timeout_s=JOIN_S, **options)


def left(root: Path) -> list[str]:
    return files_of(root / ".asyncckpt")


def age(root: Path) -> None:
    """Everything was written long ago."""
    for path in [*root.rglob("*"), *(root / ".asyncckpt").rglob("*")]:
        os.utime(path, (1.0, 1.0), follow_symlinks=False)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# ----------------------------------------------------------------------------------- what is made


async def test_a_single_process_makes_neither_mark_nor_owner_files(
    store: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", ID)
    assert left(tmp_path) == ["epoch-0/1-a", "epoch-0/1-a.owner"]
    await attempt.abort()


async def test_every_process_has_an_owner_file_that_says_who_it_is(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    epoch = (await store.claim()).epoch
    attempt = await store.begin("1", ID, epoch=epoch, shared=True, private=True)
    share = await join(other, 7, private=True)
    await write_file(share, DATA, pattern(PAGE))
    await share.pass_on("entries-7", b"x")
    base = tmp_path / ".asyncckpt/epoch-1/1-a"
    for number in ("", "-0", "-7"):
        owner = json.loads(Path(f"{base}.owner{number}").read_bytes())
        assert (owner["pid"], owner["name"], owner["save_id"]) == (os.getpid(), "1", ID)
        assert (owner["host"], owner["boot_id"]) == (this_machine().host, this_machine().boot_id)
    assert (base / ".asyncckpt-exchange/.begun").read_text() == f"{ID} {this_machine().host}\n"
    for path in [base, *base.rglob("*"), *base.parent.glob("*.owner*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    await attempt.publish(b"record")
    assert left(tmp_path) == ["claim-1", "epoch-1", "epoch-1/1-a.owner-7"]
    await share.leave()
    assert left(tmp_path) == ["claim-1", "epoch-1"]
    assert not (tmp_path / "1/.asyncckpt-exchange").exists()


async def test_joining_makes_no_directory(store: LocalStore, tmp_path: Path) -> None:
    root = tmp_path / "of another host"
    elsewhere = LocalStore(root, store._workers)
    attempt = await store.begin("1", ID, shared=True)
    with pytest.raises(CheckpointNotFoundError, match=f"{root}/1: no attempt with save id a"):
        await elsewhere.join("1", ID, process=1, timeout_s=GIVE_UP_S)
    assert not root.exists()
    (tmp_path / EXCHANGE / ".begun").unlink()
    with pytest.raises(CheckpointNotFoundError):
        await store.join("1", ID, process=1, timeout_s=GIVE_UP_S)
    await attempt.abort()
    await elsewhere.close()
    assert not root.exists()
    assert left(tmp_path) == []


async def test_an_attempt_is_found_where_a_sweeper_took_its_first_directory(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = attempts.try_lock, []

    def held_once(fd: int) -> bool | None:
        calls.append(fd)
        return False if len(calls) == 1 else own(fd)

    monkeypatch.setattr(attempts, "try_lock", held_once)
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    assert "epoch-0/1-a.1.owner-1" in left(tmp_path)
    await share.abort()
    await attempt.abort()
    (tmp_path / ATTEMPT).rmdir()
    assert left(tmp_path) == []


async def test_two_processes_of_one_number_are_refused(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    share = await join(store)
    with pytest.raises(UsageError, match="process 1 has already joined this attempt"):
        await join(other)
    await share.abort()
    await attempt.abort()
    assert left(tmp_path) == []


async def test_own_files_and_their_directories_are_flushed_by_settle(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def record(name: str) -> None:
        call = getattr(os, name)

        def flush(fd: int) -> None:
            call(fd)
            flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / ATTEMPT))

        monkeypatch.setattr(os, name, flush)

    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    for name in ("fsync", "fdatasync"):
        record(name)
    await write_file(attempt, DATA, pattern(PAGE))
    await write_file(share, "default/d/other", pattern(PAGE))
    await share.put("more/small", b"x")
    await share.pass_on("entries-1", b"x")
    assert flushed == ["default/d/data", "default/d/other", "more/small"]
    flushed.clear()
    await share.settle()
    assert sorted(flushed) == [".", "default", "default/d", "more"]
    await attempt.publish(b"record")
    await share.leave()


# ------------------------------------------------------------------------------------ who removes


async def test_the_last_living_process_removes_everything(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    """Even the files of process 0 and another dead process."""
    attempt = await store.begin("1", ID, shared=True)
    processes = [await join(other, process) for process in (1, 2, 3)]
    for process, share in enumerate([attempt, *processes]):
        await write_file(share, f"default/d/{process}", pattern(PAGE))
    die(attempt)
    die(processes[0])
    await processes[1].abort()
    assert (tmp_path / ATTEMPT / "default/d/0").exists()
    assert not (tmp_path / ATTEMPT / "default/d/2").exists()
    await processes[2].leave()
    assert left(tmp_path) == []


async def test_of_several_that_give_up_at_once_one_removes_what_is_left(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    for number in range(20):
        attempt = await store.begin("1", f"a{number}", shared=True)
        processes = [
            await other.join("1", f"a{number}", process=process, timeout_s=JOIN_S)
            for process in range(1, 5)
        ]
        die(processes.pop(number % 4))
        async with asyncio.TaskGroup() as group:
            for share in (attempt, *processes):
                group.create_task(share.abort())
        assert left(tmp_path) == []


async def test_a_process_that_looks_for_owners_is_not_taken_for_one(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    """Two survivors look at the owner file of a dead process at the same time."""
    attempt = await store.begin("1", ID, shared=True)
    die(await join(other))
    with open(tmp_path / f"{ATTEMPT}.owner-1") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        await attempt.abort()
    assert left(tmp_path) == []


async def test_an_abort_of_process_0_leaves_the_others_their_files(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    await attempt.put("default/of-0", b"x")
    await share.put("default/of-1", b"x")
    await attempt.pass_on("answer", b"x")
    await attempt.abort()
    assert left(tmp_path) == [
        "epoch-0/1-a",
        "epoch-0/1-a.owner",
        "epoch-0/1-a.owner-1",
        "epoch-0/1-a/.asyncckpt-exchange",
        "epoch-0/1-a/default",
        "epoch-0/1-a/default/of-1",
    ]
    assert await share.taken("answer", max_nbytes=1) is None
    await share.put("default/late", b"x")
    with pytest.raises(CheckpointNotFoundError):
        await other.join("1", ID, process=2, timeout_s=GIVE_UP_S)
    assert await store.sweep() == []
    await share.abort()
    assert left(tmp_path) == []


async def test_an_abort_that_comes_after_publication_removes_nothing(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    """A process that does not know the outcome must not damage what may be a checkpoint."""
    await save(store, "1", "old", 1)
    attempt = await store.begin("1", ID, shared=True, overwrite=True)
    share = await join(other)
    await write_file(attempt, DATA, pattern(PAGE + 1))
    await attempt.put("default/small", b"small 0")
    await share.put("default/of-1", b"x")
    await share.settle()
    await attempt.publish(b"record 0")
    await share.abort()
    await expect(store, "1", 0)
    assert (tmp_path / "1/default/of-1").read_bytes() == b"x"
    assert left(tmp_path) == []


async def test_a_share_outlives_a_publication_that_was_taken_back(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    await share.put("default/of-1", b"x")
    flush = publish.flush_directory

    def fail_at_root(path: str, **options: Any) -> None:
        if path == str(tmp_path):
            raise OSError(errno.EIO, "by script")
        flush(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "flush_directory", fail_at_root)
        with pytest.raises(SaveError, match="undone"):
            await attempt.publish(b"record")
    assert not (tmp_path / "1").exists()
    assert (tmp_path / ATTEMPT / "default/of-1").exists()
    await share.leave()
    assert left(tmp_path) == []


async def test_what_replaced_checkpoints_need_is_kept(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename is done and cannot be undone: the old checkpoint is at the attempt's path."""
    await save(store, "1", "old", 1)
    attempt = await store.begin("1", ID, shared=True, overwrite=True)
    share = await join(other)
    own, calls = publish.rename_exchange, []

    def once(source: str, target: str) -> None:
        calls.append(source)
        if len(calls) > 1:
            raise OSError(errno.EIO, "by script")
        own(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(publish, "rename_exchange", once)
        patch.setattr(publish, "flush_directory", failing(errno.EIO))
        with pytest.raises(SaveError, match="visible"):
            await attempt.publish(b"record")
    await share.leave()
    assert (tmp_path / ATTEMPT / "checkpoint.json").read_bytes() == b"record 1"
    assert await store.sweep() == []
    assert (tmp_path / ATTEMPT / "checkpoint.json").exists()


async def test_a_process_that_joins_while_the_attempt_is_removed_notices_it(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then the last one, whichever process checks first."""
    attempt = await store.begin("1", ID, shared=True)
    marked, go_on = threading.Event(), threading.Event()
    own = attempts.make_owner_file

    def held(*args: Any) -> Any:
        share = own(*args)
        marked.set()
        assert go_on.wait(30)
        return share

    monkeypatch.setattr(attempts, "make_owner_file", held)
    joining = store._workers.submit(attempts.LocalJoinedAttempt.look, share_of(other), 1)
    await store._workers.run(marked.wait, 30)
    await attempt.abort()
    assert (tmp_path / ATTEMPT).exists()  # the other one is alive
    go_on.set()
    assert await store._workers.run(joining.result) is False
    assert left(tmp_path) == []


def share_of(store: LocalStore) -> attempts.LocalJoinedAttempt:
    return attempts.LocalJoinedAttempt(store._context, Terms("1", ID))


async def test_an_owner_file_that_is_swept_while_it_is_made_is_made_again(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    own, calls = owners.try_lock, []

    def held_once(fd: int, **options: bool) -> bool | None:
        calls.append(fd)
        return False if len(calls) == 1 else own(fd, **options)

    monkeypatch.setattr(owners, "try_lock", held_once)
    share = await join(other)
    assert len(calls) == 2
    await share.abort()
    await attempt.abort()
    assert left(tmp_path) == []


# ------------------------------------------------------------------------------------------ sweep


@pytest.mark.parametrize("living", [0, 1, 2])
async def test_a_sweep_takes_an_attempt_only_when_all_its_processes_are_dead(
    store: LocalStore, other: LocalStore, tmp_path: Path, living: int
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    processes = [attempt, await join(other, 1), await join(other, 2)]
    for process, share in enumerate(processes):
        await write_file(share, f"default/d/{process}", pattern(PAGE))
        if process != living:
            die(share)
    before = left(tmp_path)
    age(tmp_path)
    assert await store.sweep() == []
    assert await store.collect(1.0) == []
    assert left(tmp_path) == before
    die(processes[living])
    assert await store.sweep() == ["epoch-0/1-a"]
    assert left(tmp_path) == []


async def test_a_sweep_takes_owner_files_that_are_torn(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    """Their processes died while they wrote them."""
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    (tmp_path / f"{ATTEMPT}.owner-1").write_bytes(b'{"host":')
    assert await store.sweep() == []
    for one in (attempt, share):
        die(one)
    assert await store.sweep() == ["epoch-0/1-a"]
    assert left(tmp_path) == []


async def test_owner_files_without_a_directory_are_swept_once_their_processes_are_dead(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    share, torn = await join(other, 1), await join(other, 2)
    await attempt.publish(b"record")
    assert await store.sweep() == []
    assert left(tmp_path) == ["epoch-0/1-a.owner-1", "epoch-0/1-a.owner-2"]
    age(tmp_path)
    assert await store.collect(1.0) == []
    (tmp_path / f"{ATTEMPT}.owner-2").write_bytes(b"")
    for one in (share, torn):
        die(one)
    assert await store.sweep() == []
    assert left(tmp_path) == []


@pytest.mark.parametrize("published", [False, True])
async def test_only_gc_takes_what_a_process_of_another_host_has_left(
    tmp_path: Path, workers: Workers, published: bool
) -> None:
    store = LocalStore(tmp_path, workers)
    elsewhere = LocalStore(tmp_path, workers, machine=lambda: Machine("elsewhere", "boot"))
    attempt = await store.begin("1", ID, shared=True)
    share = await elsewhere.join("1", ID, process=1, timeout_s=JOIN_S)
    await share.put("default/of-1", b"x")
    die(share)
    if published:
        await attempt.publish(b"record")
    else:
        await attempt.abort()
    before = left(tmp_path)
    assert "epoch-0/1-a.owner-1" in before
    assert ("epoch-0/1-a.owner" in before) is not published
    assert await store.sweep() == []
    assert await store.collect(3600.0) == []
    age(tmp_path)
    assert await store.collect(3600.0, dry_run=True) == ["epoch-0/1-a"]
    assert left(tmp_path) == before
    assert await store.collect(3600.0) == ["epoch-0/1-a"]
    assert left(tmp_path) == []
    await store.close()
    await elsewhere.close()


async def test_others_delete_and_replace_while_leftovers_are_removed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing many takes longer than a deletion waits for the root's lock."""
    leftovers = [tmp_path / ".asyncckpt/epoch-0" / name for name in ("8-dead", "9-dead")]
    for path in leftovers:
        path.mkdir(parents=True)
        (path / "data").write_bytes(b"x")
    age(tmp_path)
    layout = Layout(str(tmp_path))
    remove, flush = sweep.remove_attempt, sweep.flush_directory
    flushed: list[str] = []

    def note_flush(path: str) -> None:
        # Until a leftover is locked, its owner could exchange it, and die before the flush.
        assert [path for path in leftovers if path.exists() and is_locked(str(path))]
        flush(path)
        flushed.append(path)

    def remove_unlocked(path: str) -> None:
        assert flushed == [layout.root, layout.control]  # or power loss brings names back
        flushed.clear()
        with locks.root_lock(layout, wait_s=0.0):
            remove(path)

    def is_locked(path: str) -> bool:
        fd = os.open(path, os.O_RDONLY)
        try:
            return locks.try_lock(fd) is False
        finally:
            os.close(fd)

    monkeypatch.setattr(sweep, "flush_directory", note_flush)
    monkeypatch.setattr(sweep, "remove_attempt", remove_unlocked)
    assert await store.sweep() == []  # not empty, and without an owner
    assert await store.collect(3600.0) == ["epoch-0/8-dead", "epoch-0/9-dead"]
    assert not any(path.exists() for path in leftovers)


async def test_where_there_are_no_locks_processes_are_taken_for_alive(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fcntl, locks.fcntl):
        monkeypatch.setattr(module, "flock", failing(errno.ENOLCK))
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    await share.put("default/of-1", b"x")
    await attempt.abort()
    assert (tmp_path / ATTEMPT / "default/of-1").exists()
    assert await store.sweep() == []
    await share.abort()
    assert left(tmp_path) == []


async def test_an_owner_file_that_cannot_be_opened_counts_as_alive(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, say."""
    attempt = await store.begin("1", ID, shared=True)
    (tmp_path / f"{ATTEMPT}.owner-5").symlink_to("somewhere")
    await attempt.abort()
    assert "epoch-0/1-a.owner-5" in left(tmp_path)
    assert await store.sweep() == []
    age(tmp_path)
    assert await store.collect(1.0) == []
    (tmp_path / f"{ATTEMPT}.owner-5").unlink()
    assert await store.sweep() == ["epoch-0/1-a"]


async def test_an_owner_file_that_vanishes_before_it_is_opened_counts_as_dead(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has ended meanwhile."""
    attempt = await store.begin("1", ID, shared=True)
    monkeypatch.setattr(owners, "owner_files", lambda attempt: iter([f"{attempt}.owner-5"]))
    await attempt.abort()
    assert left(tmp_path) == []


# ----------------------------------------------------------------------------------------- errors


async def test_what_is_passed_on_after_the_end_of_the_attempt_fails(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    await attempt.publish(b"record")
    with pytest.raises(StoreError, match="passing on 1 bytes failed"):
        await share.pass_on("late", b"x")
    await share.leave()
    assert os.listdir(tmp_path / "1") == ["checkpoint.json"]


async def test_a_failed_begin_of_a_shared_attempt_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("make_owner_file", "write_exchange"):
        with monkeypatch.context() as patch:
            patch.setattr(attempts, name, failing(errno.ENOSPC))
            with pytest.raises(StoreError, match="ENOSPC"):
                await store.begin("1", ID, shared=True)
        assert left(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "make_owner_file", lambda *_: None)
        with pytest.raises(StoreError, match="removed the owner file") as caught:
            await store.begin("1", ID, shared=True)
        assert caught.value.retryable
    assert left(tmp_path) == []


async def test_a_failed_join_leaves_nothing(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    before = left(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(owners, "fill_owner", failing(errno.ENOSPC))
        with pytest.raises(StoreError, match="joining a save failed"):
            await join(other)
    assert left(tmp_path) == before
    own, calls = attempts.has_mark, []

    def fails_later(*args: Any) -> bool:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.EIO, "by script")
        return own(*args)

    with monkeypatch.context() as patch:
        patch.setattr(attempts, "has_mark", fails_later)
        with pytest.raises(StoreError, match="joining a save failed"):
            await join(other)
    assert left(tmp_path) == before
    await attempt.abort()


async def test_what_cannot_be_removed_is_reported_and_swept_later(
    store: LocalStore, other: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await store.begin("1", ID, shared=True)
    share = await join(other)
    await share.put("default/of-1", b"x")
    unlink = os.unlink

    def fails(path: str, **options: Any) -> None:
        if str(path).endswith("of-1"):
            raise OSError(errno.EIO, "by script")
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails)
        with pytest.raises(StoreError, match="removing the attempt failed"):
            await share.abort()
        with pytest.raises(StoreError, match="removing the attempt failed"):
            await attempt.abort()
    assert await store.sweep() == ["epoch-0/1-a"]
    assert left(tmp_path) == []


async def test_shares_leave_no_descriptors(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    await save(store, "warm", "up")
    before = sorted(os.listdir("/proc/self/fd"))
    for number in range(3):
        attempt = await store.begin("1", f"{number}", shared=True)
        share = await other.join("1", f"{number}", process=1, timeout_s=JOIN_S)
        with pytest.raises(UsageError):
            await other.join("1", f"{number}", process=1, timeout_s=JOIN_S)
        await share.create("data", nbytes=PAGE)
        await share.pass_on("x", b"x")
        assert await attempt.taken("x", max_nbytes=1) == b"x"
        with pytest.raises(CheckpointNotFoundError):
            await other.join("1", "none", process=1, timeout_s=0.0)
        for one in (share, attempt) if number else (attempt, share):
            await one.abort()
    assert sorted(os.listdir("/proc/self/fd")) == before
