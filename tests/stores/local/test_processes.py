"""Several processes at one root: one winner, no gap, and only the dead are swept."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local import publish
from asyncckpt.stores.local.locks import Machine, Terms, this_machine, write_owner
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import delete
from tests.stores.checkpoints import expect, save
from tests.stores.children import answer, end, start, tell, unsupported

ROUNDS = 50


@pytest.fixture
async def store(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path, workers)
    yield opened
    await opened.close()


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        end(child, kill=True)


def left(root: Path) -> list[str]:
    """All control files below the root, except directories of epochs and the lock."""
    control = root / ".asyncckpt"
    paths = [*control.glob("epoch-*/*"), *control.glob("*-*-*")]
    return sorted(str(path.relative_to(control)) for path in paths)


@pytest.mark.parametrize("overwrite", [False, True])
async def test_of_two_processes_exactly_one_wins_each_round(
    tmp_path: Path, children: list[subprocess.Popen[str]], overwrite: bool, store: LocalStore
) -> None:
    children += [start("race", str(tmp_path), who, ROUNDS, overwrite) for who in "ab"]
    for number in range(ROUNDS):
        for child in children:
            assert answer(child) == "ready"
        for child in children:
            tell(child)
        outcomes = sorted(answer(child) for child in children)
        won = 2 if overwrite else 1
        assert outcomes == sorted(["published"] * won + ["CheckpointExistsError"] * (2 - won))
        directory = tmp_path / str(number)
        assert (directory / "checkpoint.json").read_bytes() == (directory / "data").read_bytes()
    for child in children:
        end(child)
    assert len(await store.names()) == ROUNDS
    assert left(tmp_path) == []


async def test_while_it_is_replaced_a_checkpoint_is_always_there(
    tmp_path: Path, children: list[subprocess.Popen[str]], store: LocalStore
) -> None:
    await save(store, "1", "first")
    child = start("overwrite_many", str(tmp_path), 40)
    children.append(child)
    seen = set()
    while child.poll() is None and len(seen) < 35:
        assert await store.names() == ["1"]
        files = store.files("1")
        try:
            record = await files.read("checkpoint.json", max_nbytes=100)
            seen.add(record)
        except CheckpointNotFoundError:
            pass  # the directory was opened, then replaced and removed
        finally:
            await files.close()
    assert answer(child) == "done"
    end(child)
    assert len(seen) > 1
    assert left(tmp_path) == []


async def test_sweeping_never_takes_an_attempt_that_is_being_made(
    tmp_path: Path, children: list[subprocess.Popen[str]], store: LocalStore
) -> None:
    children += [start("begin_many", str(tmp_path), who, 25) for who in "ab"]
    swept = 0
    while any(child.poll() is None for child in children):
        swept += len(await store.sweep())
        if all(len(list(tmp_path.glob(f"{who}-*"))) == 25 for who in "ab"):
            break
    assert [answer(child) for child in children] == [[], []]
    for child in children:
        end(child)
    assert len(await store.names()) == 50
    await store.sweep()
    assert left(tmp_path) == []


async def test_the_attempt_of_a_live_process_is_kept_and_of_a_dead_one_swept(
    tmp_path: Path, children: list[subprocess.Popen[str]], store: LocalStore
) -> None:
    children += [start("hold_attempt", str(tmp_path), name, "x") for name in ("1", "2")]
    assert [answer(child) for child in children] == ["begun", "begun"]
    assert await store.sweep() == []
    os.kill(children[0].pid, signal.SIGSTOP)  # a stopped process is alive
    assert await store.sweep() == []
    os.kill(children[0].pid, signal.SIGKILL)
    end(children[0])
    assert await store.sweep() == ["epoch-0/1-x"]
    assert left(tmp_path) == ["epoch-0/2-x", "epoch-0/2-x.owner"]
    tell(children[1])
    assert answer(children[1]) == "published"
    assert await store.names() == ["2"]
    end(children[1])
    assert left(tmp_path) == []


async def test_only_attempts_of_this_host_are_swept(
    tmp_path: Path, workers: Workers, children: list[subprocess.Popen[str]]
) -> None:
    child = start("hold_attempt", str(tmp_path), "1", "x")
    children.append(child)
    assert answer(child) == "begun"
    end(child, kill=True)
    machine = this_machine()
    other = LocalStore(tmp_path, workers, machine=lambda: Machine("elsewhere", "another boot"))
    assert await other.sweep() == []
    unknown = LocalStore(tmp_path, workers, machine=lambda: Machine("elsewhere", ""))
    assert await unknown.sweep() == []
    assert left(tmp_path) == ["epoch-0/1-x", "epoch-0/1-x.owner"]
    after_boot = LocalStore(
        tmp_path, workers, machine=lambda: Machine(machine.host, "another boot")
    )
    assert await after_boot.sweep() == ["epoch-0/1-x"]
    assert left(tmp_path) == []


async def test_what_a_dead_container_of_this_kernel_has_left_is_swept(
    tmp_path: Path,
    workers: Workers,
    children: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restarted container has a new host name on the same kernel."""
    child = start("hold_attempt", str(tmp_path), "1", "x")
    children.append(child)
    assert answer(child) == "begun"
    boot_id = this_machine().boot_id
    restarted = LocalStore(tmp_path, workers, machine=lambda: Machine("restarted", boot_id))
    assert await restarted.sweep() == []  # alive
    end(child, kill=True)
    with monkeypatch.context() as patch:
        patch.setattr("asyncckpt.stores.local.locks.is_certainly_local", lambda path: False)
        assert await restarted.sweep() == []
    assert await restarted.sweep() == ["epoch-0/1-x"]
    assert left(tmp_path) == []


async def test_a_held_lock_outweighs_an_owner_file_of_another_boot(
    tmp_path: Path, workers: Workers, children: list[subprocess.Popen[str]]
) -> None:
    # Two machines with one host name on one network file system: only the lock proves life.
    child = start("hold_attempt", str(tmp_path), "1", "x")
    children.append(child)
    assert answer(child) == "begun"
    after_boot = LocalStore(
        tmp_path, workers, machine=lambda: Machine(this_machine().host, "another")
    )
    assert await after_boot.sweep() == []
    tell(child)
    assert answer(child) == "published"


async def test_another_boot_proves_nothing_where_the_file_system_may_be_shared(
    tmp_path: Path,
    workers: Workers,
    children: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two machines with one host name on NFS without shared locks: each finds the other's free."""
    child = start("hold_attempt", str(tmp_path), "1", "x")
    children.append(child)
    assert answer(child) == "begun"
    mounts = Path("/proc/self/mounts").read_bytes()
    mount = f"server:/export {os.path.realpath(tmp_path)} nfs4 rw,local_lock=all 0 0\n"

    monkeypatch.setattr("asyncckpt.stores.local.sweep.try_lock", lambda fd: True)
    other = LocalStore(tmp_path, workers, machine=lambda: Machine(this_machine().host, "another"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: mounts + mount.encode())
        assert await other.sweep() == []
    assert await other.sweep() == ["epoch-0/1-x"], "a local file system has one kernel"
    end(child, kill=True)


async def test_without_locks_only_another_boot_proves_death(
    tmp_path: Path,
    workers: Workers,
    children: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = start("hold_attempt", str(tmp_path), "1", "x")
    children.append(child)
    assert answer(child) == "begun"
    end(child, kill=True)
    monkeypatch.setattr("asyncckpt.stores.local.sweep.try_lock", lambda fd: None)
    same = LocalStore(tmp_path, workers)
    assert await same.sweep() == []
    after_boot = LocalStore(
        tmp_path, workers, machine=lambda: Machine(this_machine().host, "another")
    )
    assert await after_boot.sweep() == ["epoch-0/1-x"]


async def test_an_unfinished_deletion_is_finished_by_the_sweep(
    tmp_path: Path, store: LocalStore
) -> None:
    await save(store, "1", "a")
    control = tmp_path / ".asyncckpt"
    control.mkdir(exist_ok=True)
    trash = control / "trash-1-0"
    (tmp_path / "1").rename(trash)
    assert await store.sweep() == []  # no owner file: a person must remove it
    write_owner(str(trash), this_machine(), Terms("1", "", private=True))
    assert await store.sweep() == ["trash-1-0"]
    assert left(tmp_path) == []


async def test_an_interrupted_replacement_is_put_back(tmp_path: Path, store: LocalStore) -> None:
    await save(store, "1", "a", 1)
    old = tmp_path / ".asyncckpt" / "old-1-b"
    old.parent.mkdir(exist_ok=True)
    write_owner(str(old), this_machine(), Terms("1", "b", private=True))
    (tmp_path / "1").rename(old)
    assert await store.sweep() == []
    await expect(store, "1", 1)
    assert left(tmp_path) == []


async def test_a_finished_replacement_loses_its_old_checkpoint(
    tmp_path: Path, store: LocalStore
) -> None:
    await save(store, "1", "a", 1)
    old = tmp_path / ".asyncckpt" / "old-1-b"
    old.parent.mkdir(exist_ok=True)
    write_owner(str(old), this_machine(), Terms("1", "b", private=True))
    (tmp_path / "1").rename(old)
    await save(store, "1", "b", 2)
    assert await store.sweep() == ["old-1-b"]
    await expect(store, "1", 2)
    assert left(tmp_path) == []


@pytest.fixture
def killed_before_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacements take two renames, and end before the old checkpoint is removed."""
    monkeypatch.setattr(publish, "rename_noreplace", unsupported)
    monkeypatch.setattr(publish, "rename_exchange", unsupported)
    monkeypatch.setattr(publish.Publication, "_remove", lambda self, path: None)


@pytest.mark.usefixtures("killed_before_removal")
@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("by_age", [False, True])
async def test_a_deleted_step_does_not_come_back_after_a_killed_replacement(
    tmp_path: Path, store: LocalStore, claimed: bool, by_age: bool
) -> None:
    epoch = (await store.claim()).epoch if claimed else 0
    for name in ("1", "1-a"):
        await save(store, name, "a", 1, epoch=epoch)
        await save(store, name, "b", 2, epoch=epoch, overwrite=True)
    if claimed:  # the next job moves the leftovers of this one
        epoch = (await store.claim()).epoch
    await delete(store, "1", epoch=epoch)
    shutil.rmtree(tmp_path / "1-a")  # as if its replacement had ended between the two renames
    await (store.collect(0) if by_age else store.sweep())
    assert await store.names() == ["1-a"]
    await expect(store, "1-a", 1)
    assert not [*(tmp_path / ".asyncckpt").rglob("old-*")]


@pytest.mark.usefixtures("killed_before_removal")
async def test_of_two_replaced_checkpoints_the_newer_one_is_put_back(
    tmp_path: Path, store: LocalStore
) -> None:
    await save(store, "1", "a", 1)
    await save(store, "1", "b", 2, overwrite=True)
    await save(store, "1", "c", 3, overwrite=True)
    shutil.rmtree(tmp_path / "1")  # as if the second had ended between its two renames
    await store.sweep()
    await expect(store, "1", 2)
    assert left(tmp_path) == []


async def test_a_hostile_owner_file_moves_nothing_out_of_the_root(
    tmp_path: Path, workers: Workers
) -> None:
    root = tmp_path / "root"
    old = root / ".asyncckpt" / "old-1-b"
    old.mkdir(parents=True)
    write_owner(str(old), this_machine(), Terms("../escaped", "b", private=True))
    store = LocalStore(root, workers)
    assert await store.sweep() == []
    assert not (tmp_path / "escaped").exists()
    assert old.exists()


async def test_an_empty_directory_without_owner_is_swept_and_a_full_one_kept(
    tmp_path: Path, store: LocalStore
) -> None:
    epoch = tmp_path / ".asyncckpt" / "epoch-0"
    (epoch / "empty-x").mkdir(parents=True)
    (epoch / "full-x").mkdir()
    (epoch / "full-x" / "data").write_bytes(b"x")
    (epoch / "torn-x").mkdir()
    (epoch / "torn-x.owner").write_bytes(b'{"host": ')
    write_owner(str(epoch / "orphan-x"), this_machine(), Terms("orphan", "x", private=True))
    assert sorted(await store.sweep()) == ["epoch-0/empty-x", "epoch-0/torn-x"]
    assert left(tmp_path) == ["epoch-0/full-x"]


async def test_a_full_disk_is_named_and_leaves_nothing(
    children: list[subprocess.Popen[str]],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        child = start("save_on_full_disk", root)
        children.append(child)
        reason = answer(child)
        found = answer(child)
    assert found["kind"] == "StoreError"
    assert f"({reason})" in found["text"]
    assert "default/d/data: writing 1048576 bytes at offset" in found["text"]
    assert ("bytes are free" in found["text"]) == (reason == "ENOSPC")
    assert found["names"] == []
    assert not [path for path in found["left"] if "/epoch-0/" in path]


@pytest.mark.parametrize("epoch", ["", "claimed"])
@pytest.mark.parametrize("options", ["size=1m", "nr_inodes=40"])
async def test_a_checkpoint_can_be_deleted_where_no_space_is_left(
    options: str, epoch: str, tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    child = start("delete_on_full_disk", str(tmp_path), options, epoch)
    children.append(child)
    text = answer(child)
    if text:  # a small file system could be mounted
        assert ("no inodes are free" if "inodes" in options else "bytes are free") in text
    assert answer(child) == ([".asyncckpt", "claim-1", "epoch-1", "lock"] if epoch else [])


async def test_a_checkpoint_of_a_lower_layer_can_be_deleted(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    child = start("delete_in_lower_layer", str(tmp_path))
    children.append(child)
    assert answer(child) == []
    assert answer(child) == []


async def test_what_is_mounted_in_a_checkpoint_outlives_it(
    tmp_path: Path, children: list[subprocess.Popen[str]]
) -> None:
    outside = tmp_path / "dataset"
    outside.mkdir()
    (outside / "train.bin").write_text("x")
    child = start("delete_with_a_mount_inside", str(tmp_path / "root"), str(outside))
    children.append(child)
    if answer(child):  # it could be mounted
        assert "unmount" in answer(child)
    else:
        assert answer(child) == ""
    assert (outside / "train.bin").exists()
    assert not (tmp_path / "root/1").exists()


@pytest.mark.parametrize("function", ["save_read_only", "save_without_rights"])
async def test_a_directory_that_cannot_be_written_is_named(
    function: str, children: list[subprocess.Popen[str]]
) -> None:
    root = tempfile.mkdtemp()
    try:
        child = start(function, root)
        children.append(child)
        reason = answer(child)
        found = answer(child)
    finally:
        os.chmod(root, 0o755)
        shutil.rmtree(root)
    assert found["kind"] == "StoreError"
    assert f"{root}/1: beginning a save failed" in found["text"]
    assert f"({reason})" in found["text"]
    assert found["names"] == []
    assert found["left"] == []
