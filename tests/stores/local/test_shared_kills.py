"""One of two processes that share an attempt is killed at every mutating system call.

The other one ends its share, by an abort or by dying too. Whatever happens, the checkpoint is
published whole or not at all, and after a sweep nothing is left. Each test counts its points.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.ports import Attempt, AttemptFiles, JoinedAttempt
from asyncckpt.stores.local.owners import is_locked
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import PAGE, content, pattern
from tests.crash.faults import ForkServer
from tests.stores.checkpoints import write_file
from tests.stores.children import with_store
from tests.stores.local.shared import die, files_of

SAVE_ID = "0123456789abcdef0123456789abcdef"
POLL_S = 0.002
WAIT_S = 30.0
HERE = "tests.stores.local.test_shared_kills"

Role = Callable[[LocalStore, Callable[[], bool], str], Awaitable[None]]


def never() -> bool:
    return False


async def write_own(attempt: AttemptFiles, process: int) -> None:
    await write_file(attempt, f"default/d/{SAVE_ID}-p{process}", pattern(PAGE + 1, process))
    await attempt.put(f"default/small-{process}", b"%d" % process)


async def passed_on(attempt: AttemptFiles, path: str, over: Callable[[], bool]) -> bool:
    """Wait for a passed-on file; return whether it arrived before the end."""
    while await attempt.taken(path, max_nbytes=99) is None:
        if over():
            return False
        await asyncio.sleep(POLL_S)
    return True


async def joined(store: LocalStore, over: Callable[[], bool]) -> JoinedAttempt | None:
    """Join the attempt; return None if it ends first."""
    while not over():
        try:
            return await store.join("1", SAVE_ID, process=1, timeout_s=10 * POLL_S)
        except CheckpointNotFoundError:
            pass
    return None


async def lead(store: LocalStore, over: Callable[[], bool], end: str = "abort") -> None:
    """Process 0: publishes once process 1 is ready, or ends its share if the attempt ends first."""
    attempt = await store.begin("1", SAVE_ID, shared=True)
    await write_own(attempt, 0)
    if await passed_on(attempt, "ready-1", over):
        await attempt.publish(b"record 0")
    else:
        await give_up(attempt, end)


async def follow(store: LocalStore, over: Callable[[], bool], end: str = "abort") -> None:
    """Process 1: leaves once the checkpoint exists, or ends its share if the attempt ends first."""
    share = await joined(store, over)
    if share is None:
        return
    await write_own(share, 1)
    await share.pass_on("entries-1", b"entries")
    await share.settle()
    await share.pass_on("ready-1", b"ready")
    published = Path(store.url, "1", "checkpoint.json")
    while not published.exists() and not over():
        await asyncio.sleep(POLL_S)
    if published.exists():
        await share.leave()
    else:
        await give_up(share, end)


async def give_up(attempt: Attempt | JoinedAttempt, end: str) -> None:
    if end == "die":
        die(attempt)
    else:
        await attempt.abort()


def lead_once(root: str) -> None:
    with_store(root, lambda store: lead(store, never))


def follow_once(root: str) -> None:
    with_store(root, lambda store: follow(store, never))


def lead_and_abort(root: str, alone: bool = False) -> None:
    """Abort as process 0 once process 1 is ready or, if `alone`, dead."""

    async def use(store: LocalStore) -> None:
        attempt = await store.begin("1", SAVE_ID, shared=True)
        await write_own(attempt, 0)
        await passed_on(attempt, "entries-1", never)
        await until_dead(root, 1, alone)
        await attempt.abort()

    with_store(root, use)


def follow_and_abort(root: str, alone: bool = False) -> None:
    """Abort as process 1 after a write or, if `alone`, once process 0 is dead."""

    async def use(store: LocalStore) -> None:
        share = await store.join("1", SAVE_ID, process=1, timeout_s=WAIT_S)
        await write_own(share, 1)
        await share.pass_on("entries-1", b"entries")
        await until_dead(root, 0, alone)
        await share.abort()

    with_store(root, use)


def lead_last(root: str) -> None:
    lead_and_abort(root, alone=True)


def follow_last(root: str) -> None:
    follow_and_abort(root, alone=True)


async def until_dead(root: str, process: int, alone: bool) -> None:
    owner_file = f"{root}/.asyncckpt/epoch-0/1-{SAVE_ID}.owner-{process}"
    while alone and is_locked(owner_file):
        await asyncio.sleep(POLL_S)


async def die_leading(store: LocalStore, over: Callable[[], bool], end: str) -> None:
    """Process 0 dies once process 1 has written something, or is dead."""
    attempt = await store.begin("1", SAVE_ID, shared=True)
    await write_own(attempt, 0)
    await passed_on(attempt, "entries-1", over)
    die(attempt)


async def die_following(store: LocalStore, over: Callable[[], bool], end: str) -> None:
    """Process 1 dies once it has passed something on."""
    share = await joined(store, over)
    if share is not None:
        await write_own(share, 1)
        await share.pass_on("entries-1", b"entries")
        die(share)


class Survivor(threading.Thread):
    """The other process of the attempt, alive until the end."""

    def __init__(self, root: Path, role: Role, end: str) -> None:
        super().__init__(name="survivor")
        self.root = root
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._role = role
        self._end = end
        self.start()

    def run(self) -> None:
        try:
            with_store(self.root, lambda store: self._role(store, self.over.is_set, self._end))
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        self.over.set()
        self.join(WAIT_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


class Pairs:
    """Roots, each with a survivor that has begun."""

    def __init__(self, place: Path, role: Role, end: str) -> None:
        self._place = place
        self._role = role
        self._end = end
        self.last: Survivor | None = None

    def __call__(self, number: int) -> dict[str, Any]:
        if self.last is not None:
            self.finish()
        root = self._place / str(number)
        root.mkdir()
        self.last = Survivor(root, self._role, self._end)
        return {"root": str(root)}

    def finish(self) -> None:
        assert self.last is not None
        self.last.finish()


def published(root: Path) -> bool:
    """Sweep and check that nothing else is left; return whether the checkpoint is listed."""
    found: list[bool] = []

    async def use(store: LocalStore) -> None:
        before = await store.names()
        await store.sweep()
        assert await store.names() == before
        found.append(before == ["1"])
        if before:
            for process in (0, 1):
                path = f"default/d/{SAVE_ID}-p{process}"
                data = await content(store, "1", path, 2 * PAGE)
                assert data == pattern(PAGE + 1, process).tobytes()
                assert await content(store, "1", f"default/small-{process}", 9) == b"%d" % process
            assert await content(store, "1", "checkpoint.json", 99) == b"record 0"
            assert sorted(os.listdir(root / "1")) == ["checkpoint.json", "default"]

    with_store(root, use)
    assert files_of(root / ".asyncckpt") == []
    return found[0]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(imports=("numpy", HERE)) as running:
        yield running


@pytest.mark.parametrize(
    ("victim", "role", "end", "publishes", "fewest"),
    [
        ("lead_once", follow, "abort", True, 30),
        ("lead_once", follow, "die", True, 30),
        ("follow_once", lead, "abort", True, 15),
        ("follow_once", lead, "die", True, 15),
        ("lead_and_abort", follow, "abort", False, 25),
        ("follow_and_abort", lead, "abort", False, 15),
        ("lead_last", die_following, "die", False, 25),
        ("follow_last", die_leading, "die", False, 15),
    ],
)
def test_a_kill_leaves_all_or_nothing_and_the_sweep_removes_the_rest(
    server: ForkServer,
    scratch: Path,
    victim: str,
    role: Role,
    end: str,
    publishes: bool,
    fewest: int,
) -> None:
    pairs = Pairs(scratch, role, end)
    visited, seen = 0, set()
    try:
        for number, args, outcome in server.each_call(f"{HERE}:{victim}", pairs):
            assert outcome.killed, outcome.describe()
            pairs.finish()
            root = Path(args["root"])
            try:
                seen.add(published(root))
            except AssertionError as error:
                error.add_note(f"{number}: {outcome.describe()}")
                raise
            shutil.rmtree(root)
            visited += 1
    finally:
        pairs.finish()
    print(f"{victim} {end}: killed at {visited} points")
    assert visited >= fewest
    assert seen == ({True, False} if publishes else {False})
