"""The directory coordinator: values appear whole, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.coordinators.beats import Beats
from asyncckpt.coordinators.directory import DirectoryCoordinator, DirectoryService
from asyncckpt.coordinators.group import part
from asyncckpt.coordinators.handshake import shake_hands
from asyncckpt.errors import StoreError, UsageError
from tests import children


def test_it_is_public_and_checks_its_path() -> None:
    assert asyncckpt.DirectoryCoordinator is DirectoryCoordinator
    with pytest.raises(UsageError, match="path=5: pass a directory"):
        DirectoryCoordinator(5, process_index=0, process_count=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("s3://x/y", "pass a directory that all processes share"),
        (Path("s3://x/y"), "has lost a slash"),
        ("~/zz", "~ is not expanded"),
        ("", "pass the path of a directory"),
        ("a\0b", "no path can hold"),
    ],
)
def test_a_path_that_is_no_directory_is_refused(path: str | Path, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        DirectoryCoordinator(path, process_index=0, process_count=1)


async def test_it_takes_integers_of_numpy_and_can_be_pickled(tmp_path: Path) -> None:
    index, count = np.int64(0), np.int32(2)
    made = DirectoryCoordinator(tmp_path, process_index=index, process_count=count)
    coordinator = pickle.loads(pickle.dumps(made))
    assert (coordinator.process_index, coordinator.process_count) == (0, 2)
    assert type(coordinator.process_index) is type(coordinator.process_count) is int
    await coordinator.put("a/b", b"x")
    assert (tmp_path / "a" / "b=").read_bytes() == b"x"
    await coordinator.close()


async def test_making_it_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    coordinator = DirectoryCoordinator("keys", process_index=0, process_count=2)
    assert list(tmp_path.iterdir()) == []
    # A program that changes its directory means the first one.
    monkeypatch.chdir("/")
    await coordinator.put("a/b", b"x")
    assert (tmp_path / "keys" / "a" / "b=").read_bytes() == b"x"
    await coordinator.close()


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    service = DirectoryService(tmp_path)
    for turn in range(3):
        service.put("a/b", b"x")
        service.put_once("a/c", b"%d" % turn)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b=", "c="]
    service.delete("a")
    assert list(tmp_path.iterdir()) == []


def test_a_file_aside_is_no_key(tmp_path: Path) -> None:
    service = DirectoryService(tmp_path)
    service.put("a/b", b"x")
    (tmp_path / "a" / "c=0123456789abcdef").write_bytes(b"of a process that was killed")
    assert service.list("a") == {"b": b"x"}
    assert service.look("a/c") is None
    service.delete("a")
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_never_seen_in_part(tmp_path: Path) -> None:
    service = DirectoryService(tmp_path)
    values = {b"a" * 50_000, b"b" * 60_000}
    service.put("k/v", b"a" * 50_000)
    ended = threading.Event()

    def write() -> None:
        for _ in range(100):
            for value in values:
                service.put("k/v", value)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not ended.is_set():
        seen.add(service.look("k/v"))
        seen.update(service.list("k").values())
    writer.join()
    assert seen <= values


def test_a_value_that_another_host_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = DirectoryService(tmp_path)
    service.put("a/b", b"x")
    read, failures = Path.read_bytes, [errno.ESTALE]

    def stale(path: Path) -> bytes:
        if failures and path.name == "b=":
            raise OSError(failures.pop(), "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    assert service.look("a/b") == b"x"
    failures.append(errno.ESTALE)
    assert service.list("a") == {"b": b"x"}


def test_a_directory_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes that have written to it would seem to be missing."""
    service = DirectoryService(tmp_path)
    service.put("a/b/c", b"x")
    scan, error = os.scandir, errno.EACCES

    def refusing(path: Any) -> Any:
        if str(path).endswith("b"):
            raise OSError(error, os.strerror(error), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="a/b"):
        service.list("a")
    error = errno.ENOENT  # it was deleted meanwhile
    assert service.list("a") == {}


def test_setting_and_deleting_at_the_same_time_is_no_error(tmp_path: Path) -> None:
    """Raises only the error for giving up after several tries, which is retryable."""
    service = DirectoryService(tmp_path)
    ended = threading.Event()
    errors: list[BaseException] = []

    def retryable(call: Callable[[], object]) -> None:
        try:
            call()
        except StoreError as error:
            if not error.retryable:
                raise

    def delete() -> None:
        try:
            while not ended.is_set():
                retryable(partial(service.delete, "a"))
        except BaseException as error:
            errors.append(error)

    deleter = threading.Thread(target=delete)
    deleter.start()
    try:
        for turn in range(100):
            retryable(partial(service.put, "a/b/c", b"%d" % turn))
            retryable(partial(service.put_once, f"a/b/{turn}", b"x"))
            service.list("a")
    finally:
        ended.set()
        deleter.join()
    assert errors == []


def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match="hard links are not supported here"):
        DirectoryService(tmp_path).put_once("a/b", b"x")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_link_whose_answer_was_lost_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = os.link

    def link(source: Path, target: Path) -> None:
        linked(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    assert DirectoryService(tmp_path).put_once("a/b", b"mine") == b"mine"


async def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    coordinator = DirectoryCoordinator(tmp_path / "file", process_index=0, process_count=1)
    with pytest.raises(StoreError, match=r"NotADirectoryError|FileExistsError"):
        await coordinator.put("a/b", b"x")
    await coordinator.close()


async def test_nothing_blocks_the_loop_and_nothing_is_left(
    tmp_path: Path, no_blocking: list[str], leak_check: None
) -> None:
    """From the handshake to the last one out."""
    coordinators = [
        DirectoryCoordinator(tmp_path / "keys", process_index=index, process_count=2)
        for index in range(2)
    ]
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(shake_hands(c, root="/run", opened=1, arrival_s=10))
            for c in coordinators
        ]
    groups = [call.result() for call in calls]
    async with asyncio.TaskGroup() as tasks:
        beats = [Beats(group, 60.0, every_s=0.01) for group in groups]
        running = [tasks.create_task(each.run()) for each in beats]
        await asyncio.sleep(0.1)
        for task in running:
            task.cancel()
    for group in groups:
        await part(group)
        await group.coordinator.close()
    assert list((tmp_path / "keys").iterdir()) == []


def test_in_a_forked_child_a_used_coordinator_is_an_error(tmp_path: Path) -> None:
    out = children.output(
        """
        import asyncio, os, signal, sys
        from asyncckpt import DirectoryCoordinator, errors

        coordinator = DirectoryCoordinator(sys.argv[1], process_index=0, process_count=2)
        asyncio.run(coordinator.put("a", b"x"))
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                asyncio.run(coordinator.look("a"))
            except errors.ClosedError as error:
                assert "was created before this process was forked" in str(error)
                os._exit(3)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        asyncio.run(coordinator.close())
        """,
        tmp_path,
    )
    assert out == "3\n"
