"""A mount that stops answering: cancelling, deadlines and close() end all the same."""

from __future__ import annotations

import asyncio
import glob
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import blocking
from asyncckpt.errors import SaveError
from asyncckpt.flow import shield
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.session import root
from asyncckpt.stores.local import publish
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.local.tree import AttemptTree
from asyncckpt.testing.checkpoints import identity, save

ABANDON_S = 0.05

LIMIT_S = 20.0
"""Without the mends nothing here ends; with them it takes a few times `ABANDON_S`."""

CALLS = (
    "fdatasync",
    "fsync",
    "listdir",
    "lstat",
    "mkdir",
    "open",
    "preadv",
    "pwrite",
    "rmdir",
    "scandir",
    "unlink",
)

TREE = {"w": np.arange(50_000.0), "b": np.arange(7)}


class Mount:
    """A file system whose calls from the library's I/O threads do not return while it hangs.

    Attributes:
        at: name of the call at which it begins to hang; None for none.
        passes: so many of these calls return before.
        hung: set once a call hangs.
        on_hang: called just before that, in the thread whose call hangs.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: str | None = None
        self.passes = 0
        self.hung = threading.Event()
        self.on_hang: Callable[[], None] = lambda: None
        self.answers = threading.Event()
        for name in CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if "-io-" in threading.current_thread().name:
                if name == self.at:
                    self.passes -= 1
                    if self.passes < 0:
                        self.on_hang()
                        self.hung.set()
                if self.hung.is_set():
                    assert self.answers.wait(60)
            return call(*args, **kwargs)

        return called

    async def hangs(self) -> None:
        """Wait until a call hangs."""
        assert await asyncio.to_thread(self.hung.wait, LIMIT_S)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    monkeypatch.setattr(shield, "CLEANUP_S", 2 * ABANDON_S)
    monkeypatch.setattr(root, "SWEEP_S", 2 * ABANDON_S)
    made = Mount(monkeypatch)
    yield made
    made.answers.set()


def impatient(ckpt: asyncckpt.Checkpointer | blocking.Checkpointer) -> None:
    """Abandon threads early from now on, when the mount hangs: before, they may just be slow."""
    engine = ckpt._session.runtime.engine
    engine.io._abandon_s = engine.compute._abandon_s = ABANDON_S


async def settled(root: Path) -> None:
    """The mount answers again: the abandoned threads end, and remove what they left."""
    async with asyncio.timeout(LIMIT_S):
        # Unlike `Path.glob`, it does not mind directories that go meanwhile.
        while glob.glob(f"{glob.escape(str(root))}/.asyncckpt/epoch-0/*"):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("at", "passes"),
    [
        ("mkdir", 0),
        ("pwrite", 0),  # the owner file
        ("pwrite", 1),  # a data file
        ("fsync", 0),  # the owner file
        ("fdatasync", 0),  # a small file or a data file
        ("fdatasync", 3),
        ("fsync", 2),  # a directory
        ("preadv", 0),  # a restore
    ],
)
async def test_a_cancelled_save_ends_on_a_mount_that_does_not_answer(
    tmp_path: Path, mount: Mount, at: str, passes: int
) -> None:
    async with asyncio.timeout(LIMIT_S):
        ckpt = asyncckpt.Checkpointer(tmp_path)
        await ckpt.save(0, TREE)
        mount.at, mount.passes = at, passes
        saving = asyncio.create_task(ckpt.restore(0) if at == "preadv" else ckpt.save(1, TREE))
        await mount.hangs()
        impatient(ckpt)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        with pytest.raises(ThreadAbandonedError, match=r"a thread was stuck in .* check the mount"):
            await ckpt.close()
    mount.answers.set()
    await settled(tmp_path)


async def test_a_deadline_ends_a_save_on_a_mount_that_does_not_answer(
    tmp_path: Path, mount: Mount
) -> None:
    options = asyncckpt.SaveOptions(deadline_s=3.0)
    ckpt = asyncckpt.Checkpointer(tmp_path, save_options=options)
    mount.on_hang = lambda: impatient(ckpt)
    async with asyncio.timeout(LIMIT_S):
        mount.at = "fdatasync"
        with pytest.raises(SaveError, match=r"a thread was stuck in .* check the mount"):
            await ckpt.save(1, TREE)
        with pytest.raises(ThreadAbandonedError, match="a thread was stuck"):
            await ckpt.close()
    mount.answers.set()
    await settled(tmp_path)


async def test_a_publication_that_does_not_answer_ends_too_and_says_what_is_unknown(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = publish.rename_noreplace

    def renamed(source: str, target: str) -> None:
        rename(source, target)
        mount.at = "fsync"  # of the root

    monkeypatch.setattr(publish, "rename_noreplace", renamed)
    async with asyncio.timeout(LIMIT_S):
        ckpt = asyncckpt.Checkpointer(tmp_path)
        pending = await ckpt.start_save(1, TREE)
        await mount.hangs()
        impatient(ckpt)
        pending.cancel()
        with pytest.raises(ThreadAbandonedError) as caught:
            await pending
        assert any("not known whether" in note for note in caught.value.__notes__)
        with pytest.raises(ThreadAbandonedError):
            await ckpt.close()
    mount.answers.set()


async def test_a_removal_of_what_was_replaced_that_does_not_answer_fails_no_save(
    tmp_path: Path, mount: Mount
) -> None:
    async with asyncio.timeout(LIMIT_S):
        ckpt = asyncckpt.Checkpointer(tmp_path)
        await ckpt.save(1, {"w": np.zeros(3)})
        mount.at = "rmdir"  # of the replaced checkpoint
        pending = await ckpt.start_save(1, TREE, overwrite=True)
        await mount.hangs()
        impatient(ckpt)
        pending.cancel()
        assert (await pending).step == 1
        with pytest.raises(ThreadAbandonedError):
            await ckpt.close()
    mount.answers.set()
    await settled(tmp_path)
    assert np.array_equal((await asyncckpt.restore(tmp_path / "1"))["w"], TREE["w"])


async def test_an_attempt_whose_record_was_not_written_is_removed_by_one_thread(
    tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, write_file = AttemptTree._remove, AttemptTree._write_file
    removals: list[AttemptTree] = []

    def counted(attempt: AttemptTree) -> None:
        if attempt.location.startswith(f"{tmp_path}/"):  # not one of a thread of another test
            removals.append(attempt)
        remove(attempt)

    def written(attempt: AttemptTree, path: str, *args: Any) -> None:
        if path == RECORD_NAME:
            mount.at = "pwrite"
        write_file(attempt, path, *args)

    monkeypatch.setattr(AttemptTree, "_remove", counted)
    monkeypatch.setattr(AttemptTree, "_write_file", written)
    async with asyncio.timeout(LIMIT_S):
        ckpt = asyncckpt.Checkpointer(tmp_path)
        saving = asyncio.create_task(ckpt.save(1, TREE))
        await mount.hangs()
        impatient(ckpt)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        with pytest.raises(ThreadAbandonedError, match="a thread was stuck"):
            await ckpt.close()
    mount.answers.set()
    await settled(tmp_path)
    assert len(removals) == 1


@pytest.mark.parametrize(("call", "at"), [("settle", "fsync"), ("taken", "open")])
async def test_a_share_is_removed_once_the_mount_answers_again(
    tmp_path: Path, mount: Mount, call: str, at: str
) -> None:
    workers = Workers(4, "test-io")
    store = LocalStore(tmp_path, workers)
    async with asyncio.timeout(LIMIT_S):
        attempt = await store.begin("1", "a", shared=True)
        share = await store.join("1", "a", process=1, timeout_s=LIMIT_S)
        await share.put("default/of-1", b"x")
        mount.at = at
        calling = asyncio.create_task(
            share.settle() if call == "settle" else share.taken("entries-0", max_nbytes=1)
        )
        await mount.hangs()
        workers._abandon_s = ABANDON_S
        calling.cancel()
        with pytest.raises(ThreadAbandonedError, match="a thread was stuck in") as caught:
            await calling
        assert str(caught.value.location).startswith(share._path)
        await share.abort()
        assert glob.glob(f"{share._path}/default/of-1"), "nothing is removed meanwhile"
        workers._abandon_s = LIMIT_S
        mount.answers.set()
        while glob.glob(f"{share._path}/default/of-1"):
            await asyncio.sleep(0.01)
        await attempt.abort()
        await store.close()
    workers.shutdown()


STORE_CALLS: dict[str, tuple[str, Callable[[LocalStore], Awaitable[Any]]]] = {
    "begin": ("mkdir", lambda store: store.begin("2", "b")),
    "join": ("listdir", lambda store: store.join("2", "b", process=1, timeout_s=LIMIT_S)),
    "claim": ("mkdir", lambda store: store.claim()),
    "claims": ("listdir", lambda store: store.claims()),
    "check_claim": ("listdir", lambda store: store.check_claim(1)),
    "names": ("scandir", lambda store: store.names()),
    "unlist": ("open", lambda store: store.unlist("1")),
    "sweep": ("listdir", lambda store: store.sweep()),
    "collect": ("listdir", lambda store: store.collect(1.0)),
    "keep_note": ("open", lambda store: store.keep_note(1, b"failed")),
    "take_notes": ("listdir", lambda store: store.take_notes()),
    "close": ("rmdir", lambda store: store.close()),
    "entries": ("open", lambda store: store.files("1").entries(max_entries=9)),
}


@pytest.mark.parametrize("call", STORE_CALLS)
async def test_an_abandoned_call_of_a_store_names_the_place(
    tmp_path: Path, mount: Mount, call: str
) -> None:
    workers = Workers(4, "test-io")
    store = LocalStore(tmp_path, workers)
    await save(store, "1", identity("a"))
    mount.at, begin = STORE_CALLS[call]
    async with asyncio.timeout(LIMIT_S):
        calling = asyncio.ensure_future(begin(store))
        await mount.hangs()
        workers._abandon_s = ABANDON_S
        calling.cancel()
        with pytest.raises(ThreadAbandonedError, match=f"^{re.escape(str(tmp_path))}") as caught:
            await calling
    assert str(caught.value.location).startswith(str(tmp_path))
    mount.answers.set()
    workers.shutdown()


async def test_close_ends_on_a_mount_that_does_not_answer(tmp_path: Path, mount: Mount) -> None:
    async with asyncio.timeout(LIMIT_S):
        ckpt = asyncckpt.Checkpointer(tmp_path)
        await ckpt.save(0, TREE)
        impatient(ckpt)
        mount.hung.set()
        with pytest.raises(ThreadAbandonedError, match="after clean-up began"):
            await ckpt.close()
    mount.answers.set()


def test_a_blocking_close_ends_on_a_mount_that_does_not_answer(
    tmp_path: Path, mount: Mount
) -> None:
    begun = time.monotonic()
    ckpt = blocking.Checkpointer(tmp_path)
    ckpt.save(0, TREE)
    impatient(ckpt)
    mount.hung.set()
    with pytest.raises(ThreadAbandonedError, match="after clean-up began"):
        ckpt.close()
    assert time.monotonic() - begun < LIMIT_S
    mount.answers.set()
