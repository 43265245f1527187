"""Messages between processes during a save of a known plan, counted at the coordinator port.

Beats come by the clock and are left out, as are looks at a key that is not there yet.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from asyncckpt import Checkpointer, DirectoryCoordinator, PerProcess
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.local.tree import AttemptTree

SAVES = 4
"""The first plans, and the last one is counted: earlier rounds are then deleted behind it."""

Calls = list[tuple[str, str]]


class Counted(DirectoryCoordinator):
    """A coordinator that notes its calls, with keys relative to the run."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.calls: Calls = []

    def _note(self, method: str, key: str) -> None:
        about = "/".join(key.split("/")[2:])  # after the library's name and the run
        if not about.startswith("beat"):
            self.calls.append((method, about))

    async def put(self, key: str, value: bytes) -> None:
        self._note("put", key)
        await super().put(key, value)

    async def put_once(self, key: str, value: bytes) -> bytes:
        self._note("put_once", key)
        return await super().put_once(key, value)

    async def look(self, key: str) -> bytes | None:
        self._note("look", key)
        return await super().look(key)

    async def list(self, prefix: str) -> Mapping[str, bytes]:
        self._note("list", prefix)
        return await super().list(prefix)

    async def delete(self, prefix: str) -> None:
        self._note("delete", prefix)
        await super().delete(prefix)


def known_save(path: Path, count: int, differing: str = "") -> list[Calls]:
    """Let so many processes save the same tree; return the calls of each in the last save.

    If `differing`, each of them has a leaf that the others lack, or a value per process.
    """
    calls: list[Calls] = [[] for _ in range(count)]
    ready = threading.Barrier(count)
    array = np.arange(100_000.0)

    async def play(process: int) -> None:
        coordinator = Counted(path / "keys", process_index=process, process_count=count)
        async with Checkpointer(path / "root", coordinator=coordinator) as ckpt:
            for step in range(SAVES):
                await asyncio.to_thread(ready.wait, 60)
                coordinator.calls.clear()
                tree: dict[str, Any] = {"w": array, "step": step}
                if differing == "leaf":
                    tree[f"only {process}"] = 1
                elif differing == "value":
                    tree["random"] = PerProcess({"state": process})
                report = await ckpt.save(step, tree)
            assert report.plan_cached
            calls[process] = [*coordinator.calls]
        await coordinator.close()

    threads = [threading.Thread(target=asyncio.run, args=(play(p),)) for p in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return calls


@contextmanager
def counted(owner: type, *names: str) -> Iterator[list[str]]:
    """Note the calls of these methods of the store, whichever process makes them."""
    noted: list[str] = []

    def watched(name: str) -> Any:
        method = getattr(owner, name)

        async def call(self: Any, *args: Any, **keywords: Any) -> Any:
            found = await method(self, *args, **keywords)
            noted.append(name)
            return found

        return mock.patch.object(owner, name, call)

    patches = [watched(name) for name in names]
    for patch in patches:
        patch.start()
    try:
        yield noted
    finally:
        for patch in patches:
            patch.stop()


def messages(calls: Calls) -> Calls:
    """Leave out looks and lists, which repeat until there is something to see."""
    return [(method, about) for method, about in calls if method not in ("look", "list")]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_known_plan_costs_one_message_and_one_answer_per_process(
    tmp_path: Path, count: int
) -> None:
    last = f"save/{SAVES - 1}"
    first, *others = known_save(tmp_path, count)
    for process, calls in enumerate(others, 1):
        assert messages(calls) == [("put", f"{last}/ready/{process}")]
        # One answer; after a second without it, also whether process 0 has decided or left.
        looked = {about for _, about in calls} - {f"{last}/ready/{process}"}
        assert looked - {f"{last}/decision", "bye/0"} == {f"{last}/outcome"}
    # The calls of process 0 are the same, whatever the number of processes.
    sent = [call for call in messages(first) if call[0] != "delete"]
    assert sent == [("put_once", f"{last}/decision"), ("put", f"{last}/outcome")]
    # It deletes those rounds of which it has heard that they have ended on all.
    deleted = {about for method, about in first if method == "delete"}
    assert deleted <= {f"save/{number}" for number in range(SAVES - 1)}
    looked = [call for call in first if call[0] in ("look", "list")]
    assert looked[0] == ("look", f"{last}/decision")  # in case this process missed the call
    assert set(looked[1:]) == {("list", last)}


@pytest.mark.parametrize("differing", ["leaf", "value"])
@pytest.mark.parametrize("count", [2, 4])
def test_where_trees_differ_a_known_plan_costs_one_more_of_each(
    tmp_path: Path, count: int, differing: str
) -> None:
    """The processes say that they know the plan, and process 0 that all do; no schema follows."""
    last = f"save/{SAVES - 1}"
    first, *others = known_save(tmp_path, count, differing)
    for process, calls in enumerate(others, 1):
        posted = [("put", f"{last}/{what}/{process}") for what in ("plan", "ready")]
        assert messages(calls) == posted
    assert [call for call in messages(first) if call[0] != "delete"] == [
        ("put", f"{last}/planned"),
        ("put_once", f"{last}/decision"),
        ("put", f"{last}/outcome"),
    ]


def test_store_requests_in_place_of_messages_are_one_each(tmp_path: Path) -> None:
    """Each other process sees that the save has begun, and passes its entries on, which are read.

    The first save passes schemas on besides, because the trees differ.
    """
    with (
        counted(LocalStore, "join") as joined,
        counted(AttemptTree, "pass_on", "taken") as passed,
    ):
        known_save(tmp_path, 4, "leaf")
    assert joined == ["join"] * 3 * SAVES
    assert passed.count("pass_on") == 3 * SAVES + 4
    assert passed.count("taken") >= 3 * SAVES + 6
