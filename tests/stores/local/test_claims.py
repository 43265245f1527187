"""Claims of a directory: live writers, fenced writers, and crashes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncckpt.errors import FencedError, StoreError
from asyncckpt.flow.threads import Workers
from asyncckpt.stores.local import epochs
from asyncckpt.stores.local.locks import Machine, Terms, unlock, write_owner
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import expect, fill, identity, save
from tests.crash.faults import ForkServer
from tests.stores.children import answer, attempted, end, fresh, start, tell, with_store

DAY_NS = 24 * 3600 * 10**9
AT_ONCE = 8


@pytest.fixture
async def store(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path, workers)
    yield opened
    await opened.close()


@pytest.fixture
async def other(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path, workers)
    yield opened
    await opened.close()


def control(root: Path) -> list[str]:
    """Names in the control directory, without tokens."""
    names = sorted(os.listdir(root / ".asyncckpt"))
    return [name.rpartition("-")[0] if name.startswith("fenced") else name for name in names]


def token(root: Path) -> str:
    """Token of the directory to which the attempts of epoch 1 were taken."""
    (taken,) = (root / ".asyncckpt").glob("fenced-1-*")
    return taken.name.rpartition("-")[2]


async def test_a_claim_is_a_file_and_a_directory_and_takes_those_of_others_away(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    assert (await store.claim()).epoch == 1
    assert control(tmp_path) == ["claim-1", "epoch-1"]
    attempt = await store.begin("1", identity("a"), epoch=1)
    assert (await other.claim()).epoch == 2
    assert control(tmp_path) == ["claim-1", "claim-2", "epoch-2", "fenced-1"]
    (taken,) = (tmp_path / ".asyncckpt").glob("fenced-1-*")
    assert sorted(os.listdir(taken)) == [f"1-{identity('a')}", f"1-{identity('a')}.owner"]
    assert await other.sweep() == []  # its owner is alive
    await attempt.abort()
    assert len(await other.sweep()) == 1
    await other.close()
    assert control(tmp_path) == ["claim-1", "claim-2", "epoch-2", "lock"]


async def test_what_was_taken_from_a_writer_of_another_host_is_swept(
    tmp_path: Path, workers: Workers, store: LocalStore
) -> None:
    elsewhere = LocalStore(tmp_path, workers, machine=lambda: Machine("elsewhere", "boot"))
    await elsewhere.claim()
    attempt = await elsewhere.begin("1", identity("a"), epoch=1)
    await fill(attempt, identity("a"), 1)
    directory = attempt._directory
    assert directory is not None
    with directory.use() as fd:
        unlock(fd)  # as seen from a host that does not share its locks
    assert await store.sweep() == []
    await store.claim()
    assert await store.sweep() == [f"fenced-1-{token(tmp_path)}/1-{identity('a')}"]
    with pytest.raises((FencedError, StoreError)):
        await attempt.publish(b"record")
    with pytest.raises(FencedError):
        await elsewhere.begin("2", identity("b"), epoch=1)
    assert await store.names() == []
    await elsewhere.close()


async def test_a_directory_that_a_fenced_writer_has_open_is_dead(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    """Like an NFS client that has cached the path."""
    await store.claim()
    attempt = await store.begin("1", identity("a"), epoch=1)
    await fill(attempt, identity("a"), 1)
    epoch = os.open(tmp_path / ".asyncckpt" / "epoch-1", os.O_RDONLY)
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        await other.claim()
        with pytest.raises(FileNotFoundError):
            os.rename(f"1-{identity('a')}", "1", src_dir_fd=epoch, dst_dir_fd=root)
        with pytest.raises(FileNotFoundError):
            os.mkdir("2-new", dir_fd=epoch)
        with pytest.raises(FileNotFoundError):
            os.rename("x", "trash-1", src_dir_fd=root, dst_dir_fd=epoch)
    finally:
        os.close(epoch)
        os.close(root)
    await attempt.abort()


async def test_a_claim_that_was_overtaken_while_it_was_made_is_lost(
    tmp_path: Path, store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped between making the file and the directory."""
    make = epochs._make

    def make_and_wait(layout: object) -> object:
        made = make(layout)  # type: ignore[arg-type]
        monkeypatch.setattr(epochs, "_make", make)
        overtaking = epochs.claim(layout)  # type: ignore[arg-type]
        assert (made.epoch, overtaking.epoch) == (1, 2)
        return made

    monkeypatch.setattr(epochs, "_make", make_and_wait)
    with pytest.raises(FencedError, match=r"epoch 1\) has ended.*claim 2, made by process"):
        await store.claim()
    with pytest.raises(FencedError):
        await save(store, "1", "a", 1, epoch=1)
    await save(other, "1", "b", 2, epoch=2)


async def test_of_two_that_make_one_claim_the_second_has_an_error(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.claim()
    monkeypatch.setattr(epochs, "_next", lambda layout: 1)
    with pytest.raises(FencedError, match=r"claim 1 was made by process .* while this process"):
        await other.claim()
    await save(store, "1", "a", 1, epoch=1)


def test_of_eight_processes_that_take_over_at_once_one_has_the_run(tmp_path: Path) -> None:
    children: list[subprocess.Popen[str]] = []
    try:
        children += [start("take_over", str(tmp_path), str(n)) for n in range(1, AT_ONCE + 1)]
        assert [answer(child) for child in children] == ["ready"] * AT_ONCE
        for child in children:
            tell(child)
        made = [answer(child) for child in children]
        for child in children:
            tell(child)
        outcomes = [answer(child) for child in children]
    finally:
        for child in children:
            end(child, kill=True)
    won = outcomes.index("saved")
    assert outcomes.count("saved") == 1 and outcomes.count("FencedError") == AT_ONCE - 1
    assert made[won] == max(made)
    steps = [name for name in os.listdir(tmp_path) if name != ".asyncckpt"]
    assert steps == [str(won + 1)]


async def test_tidying_leaves_the_directory_of_a_living_epoch(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    await store.claim()
    await other.sweep()
    await other.close()
    await save(store, "1", "a", 1, epoch=1)
    await store.close()
    assert control(tmp_path) == ["claim-1", "epoch-1"]
    await save(store, "2", "b", 2, epoch=1)


async def test_a_writer_makes_the_directory_of_its_epoch_once(
    tmp_path: Path, store: LocalStore
) -> None:
    await store.claim()
    (tmp_path / ".asyncckpt" / "epoch-1").rmdir()
    with pytest.raises(FencedError, match="taken over by another process, whose claim cannot"):
        await store.begin("1", identity("a"), epoch=1)
    assert control(tmp_path) == ["claim-1"]


async def test_numbers_are_not_used_again_where_claims_were_removed(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    await store.claim()
    (tmp_path / ".asyncckpt" / "claim-1").unlink()
    assert (await other.claim()).epoch == 2
    with pytest.raises(FencedError):
        await save(store, "1", "a", 1, epoch=1)


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 10_000, None])
async def test_a_damaged_claim_takes_its_number_all_the_same(
    tmp_path: Path, store: LocalStore, other: LocalStore, content: bytes | None
) -> None:
    await store.claim()
    await other.claim()
    path = tmp_path / ".asyncckpt" / "claim-2"
    if content is None:
        content = path.read_bytes().replace(b'"pid"', b'"pit"')
    path.write_bytes(content)
    assert [claim.epoch for claim in await store.claims()] == [1]
    with pytest.raises(FencedError, match="another process, whose claim cannot be read") as caught:
        await save(store, "1", "a", 1, epoch=1)
    assert (caught.value.claimed_by, caught.value.claimed_ns) == (None, None)
    await save(other, "1", "b", 2, epoch=2)
    assert (await store.claim()).epoch == 3


async def test_a_claim_that_cannot_be_made_is_an_error_and_can_be_made_later(
    tmp_path: Path, store: LocalStore
) -> None:
    (tmp_path / ".asyncckpt").write_text("mine")
    with pytest.raises(StoreError, match=r"\.asyncckpt: making a claim failed: Not a directory"):
        await store.claim()
    assert (tmp_path / ".asyncckpt").read_text() == "mine"
    (tmp_path / ".asyncckpt").unlink()
    assert (await store.claim()).epoch == 1


async def test_claims_that_cannot_be_listed_are_a_clear_error(
    tmp_path: Path, store: LocalStore
) -> None:
    (tmp_path / ".asyncckpt").write_text("a file")
    for call in (store.claims(), store.check_claim(1)):
        with pytest.raises(StoreError, match=r"reading the claims failed: .*\(ENOTDIR\)") as caught:
            await call
        assert caught.value.location == f"{tmp_path}/.asyncckpt"


@pytest.mark.parametrize("days", [-1, 1])
async def test_a_clock_that_is_wrong_by_a_day_decides_nothing(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    first = await store.claim()
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + days * DAY_NS)
    second = await other.claim()
    monkeypatch.undo()
    assert (second.created_ns - first.created_ns) * days > 0.9 * DAY_NS
    with pytest.raises(FencedError):
        await save(store, "1", "a", 1, epoch=1)
    await save(other, "1", "b", 2, epoch=2)
    await expect(store, "1", 2)


async def test_a_step_that_was_being_replaced_in_two_steps_is_put_back(
    tmp_path: Path, store: LocalStore, other: LocalStore
) -> None:
    """Without an exchange of directories; the job was stopped between its two renames."""
    await store.claim()
    await save(store, "1", "a", 1, epoch=1)
    old = store._layout.leftover("old", "1", identity("b"), 1)
    write_owner(old, store._context.machine(), Terms("1", identity("b")))
    os.rename(tmp_path / "1", old)
    await other.claim()
    await expect(other, "1", 1)


# -- a crash in a takeover


def prepare(root: Path, scenario: str) -> None:
    """A job has saved a step, and is about to save another one."""

    async def use(store: LocalStore) -> None:
        claim = await store.claim()
        await save(store, "1", "old", 1, epoch=claim.epoch)
        if scenario == "attempt":
            attempt = await store.begin("2", identity("left"), epoch=claim.epoch)
            await fill(attempt, identity("left"), 2, claim.epoch)

    with_store(root, use)


def take_over(root: str, scenario: str) -> dict[str, bool]:
    """The takeover that dies or fails."""

    async def work(store: LocalStore) -> None:
        await store.claim()

    return attempted(root, work)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(
        imports=("numpy", "asyncckpt.stores.local.store", "tests.stores.children")
    ) as running:
        yield running


@pytest.mark.parametrize(
    ("scenario", "mode"), [("nothing", "kill"), ("attempt", "kill"), ("attempt", "error")]
)
def test_a_takeover_that_dies_at_any_call_hides_and_loses_nothing(
    server: ForkServer, scratch: Path, scenario: str, mode: Any
) -> None:
    visited = 0
    saved = set()
    target = "tests.stores.local.test_claims:take_over"
    places = fresh(prepare, scratch, scenario)
    for number, args, outcome in server.each_call(target, places, mode=mode):
        assert outcome.killed == (mode == "kill"), outcome.describe()

        async def look(store: LocalStore, outcome: Any = outcome, number: int = number) -> None:
            await expect(store, "1", 1)
            try:  # the job being taken over continues, or is fenced
                await save(store, "2", "stale", 2, epoch=1)
                saved.add(True)
                await expect(store, "2", 2)
            except FencedError:
                saved.add(False)
                assert await store.names() == ["1"]
            names = await store.names()
            claim = await store.claim()
            assert claim.epoch in (2, 3), (number, outcome.describe())
            with pytest.raises(FencedError):
                await save(store, "3", "later", 3, epoch=1)
            await save(store, "3", "new", 4, epoch=claim.epoch)
            assert sorted(await store.names()) == sorted([*names, "3"])
            await store.sweep()

        with_store(args["root"], look)
        visited += 1
    assert visited > 5 and saved == {True, False}
    print(f"{scenario}: {visited} points")
