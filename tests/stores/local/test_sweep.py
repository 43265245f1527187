"""Leftovers are what this library made below the root, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from asyncckpt.errors import StoreError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local import sweep
from asyncckpt.stores.local.locks import Machine, Terms, write_owner
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import save
from tests.watch import open_files

WEEK_S = 7 * 24 * 3600.0
HERE = Machine("here", "boot")


@pytest.fixture
async def store(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path / "run", workers, machine=lambda: HERE)
    await save(opened, "1", "a")
    await opened.close()  # and remove the control directory
    yield opened
    await opened.close()


def control_of_others(tmp_path: Path) -> Path:
    """A control directory outside the root, with an old attempt, an empty directory and a note."""
    control = tmp_path / "elsewhere"
    (control / "epoch-0/empty").mkdir(parents=True)
    (control / "epoch-0/5-abc").mkdir()
    (control / "epoch-0/5-abc/data").write_text("years of work")
    (control / "error-1").write_text("of another run")
    write_owner(str(control / "epoch-0/5-abc"), HERE, Terms("5", "abc"))
    for path in control.rglob("*"):
        os.utime(path, (1.0, 1.0))
    return control


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("name", ["epoch-0", "epoch-7", "fenced-7-aa"])
async def test_files_behind_a_link_are_not_leftovers(
    tmp_path: Path, store: LocalStore, name: str
) -> None:
    elsewhere = control_of_others(tmp_path)
    before = tree(elsewhere)
    (tmp_path / "run/.asyncckpt").mkdir()
    (tmp_path / "run/.asyncckpt" / name).symlink_to(elsewhere / "epoch-0")
    for _ in range(2):
        await store.claim()
        assert await store.sweep() == []
        assert await store.collect(WEEK_S) == []
    await store.close()
    assert tree(elsewhere) == before


@pytest.mark.parametrize("directory", ["epoch-3", "fenced-3-aa"])
@pytest.mark.parametrize("stray", [".owner", ".owner-1"])
async def test_a_stray_owner_file_makes_no_leftover(
    tmp_path: Path, store: LocalStore, directory: str, stray: str
) -> None:
    control = tmp_path / "run/.asyncckpt" / directory
    (control / "1-aaaa").mkdir(parents=True)
    (control / "1-aaaa/data").write_bytes(b"x")
    (control / stray).write_bytes(b"")
    for path in (control, *control.rglob("*")):
        os.utime(path, (1.0, 1.0))
    lock = os.open(control / "1-aaaa", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    before = tree(control)
    assert await store.sweep() == []
    assert await store.collect(WEEK_S) == []
    os.close(lock)
    assert tree(control) == before


async def test_a_link_in_place_of_the_control_directory_is_refused(
    tmp_path: Path, store: LocalStore
) -> None:
    elsewhere = control_of_others(tmp_path)
    before = tree(elsewhere)
    (tmp_path / "run/.asyncckpt").symlink_to(elsewhere)
    for call in (store.sweep, partial(store.collect, WEEK_S), store.claim):
        with pytest.raises(StoreError, match="a symbolic link is not followed here"):
            await call()
    assert await store.take_notes() == []
    await store.close()
    assert tree(elsewhere) == before


def dead_attempts(control: Path) -> list[Path]:
    """Three attempts of a dead process of this machine, written long ago."""
    (control / "epoch-0").mkdir(parents=True)
    paths = [control / "epoch-0" / f"{name}-dead" for name in "789"]
    for path in paths:
        path.mkdir()
        (path / "data").write_bytes(b"x")
        write_owner(str(path), HERE, Terms(path.name[0], "dead"))
    for path in control.rglob("*"):
        os.utime(path, (1.0, 1.0))
    return paths


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])
@pytest.mark.parametrize("collecting", [False, True])
async def test_a_leftover_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    collecting: bool,
) -> None:
    """Nor does any keep its descriptor until the last one is removed."""
    first, *others = dead_attempts(tmp_path / "run/.asyncckpt")
    remove = sweep.remove_attempt

    def refuse(path: str) -> None:
        assert sum("-dead" in name for name in open_files()) == 1
        if path == str(first):
            raise OSError(code, os.strerror(code), path)
        remove(path)

    monkeypatch.setattr(sweep, "remove_attempt", refuse)
    call = partial(store.collect, WEEK_S) if collecting else store.sweep
    if code == errno.EACCES and not collecting:
        assert await call() == [f"epoch-0/{path.name}" for path in others]
    else:
        with pytest.raises(StoreError, match=errno.errorcode[code]):
            await call()
    assert first.exists()
    assert not any(path.exists() for path in others)


async def test_nothing_is_removed_after_a_failed_flush(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftovers = dead_attempts(tmp_path / "run/.asyncckpt")
    calls: list[str] = []

    def fail_once(path: str) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sweep, "flush_directory", fail_once)
    for call in (store.sweep, partial(store.collect, WEEK_S)):
        calls.clear()
        with pytest.raises(StoreError, match="flushing failed"):
            await call()
        assert calls == [str(tmp_path / "run")]
    assert all(path.exists() for path in leftovers)


async def test_leftovers_that_may_not_be_listed_are_an_error_where_a_person_asks(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("asyncckpt.stores.local.sweep.names_in", refuse)
    assert await store.sweep() == []
    with pytest.raises(StoreError, match="permission denied"):
        await store.collect(WEEK_S)
