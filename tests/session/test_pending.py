"""A save in the background: what its `PendingSave` shows, and what a cancellation stops."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import SaveAbortedError, StoreError, UsageError
from asyncckpt.save.stage import Staging
from asyncckpt.stores.local import publish as publishing
from tests.script import Script, in_thread

pytestmark = pytest.mark.usefixtures("no_blocking")


def tree(n: int = 300_000) -> dict[str, Any]:
    return {"w": np.arange(n, dtype=np.float32), "step": 3}


async def test_start_save_returns_when_the_state_is_taken_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        publish = script.hold("publish")
        pending = await ckpt.start_save(3, tree())
        await publish.reached()
        assert not pending.done()
        assert await ckpt.steps() == []
        publish.go()
        report = await pending
        assert pending.done()
        assert (report.step, report.location) == (3, str(tmp_path / "3"))
        assert (report.leaf_count, report.array_count, report.nbytes) == (2, 1, 1_200_000)
        assert 0 < report.blocked_s <= report.total_s
        assert await ckpt.steps() == [3]
        assert (await pending) is report  # as often as one likes


async def test_the_repr_shows_step_stage_and_percent(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        write = script.hold("write")
        pending = await ckpt.start_save(12, tree())
        await write.reached()
        assert re.fullmatch(r"<PendingSave step 12: upload 0% of 1\.1 MiB>", repr(pending))
        assert pending.progress.fraction == 0.0
        write.go()
        await pending
        assert repr(pending) == "<PendingSave step 12: committed>"
        assert pending.progress.fraction == 1.0
        script.fail("begin", StoreError("no space on disk"))
        failed = await started(ckpt, 13)
        assert failed is None


async def test_leaves_are_copied_while_the_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flush may wait for the removal of an older step."""
    copied = threading.Event()
    forget = Staging.forget

    def forgotten(staging: Staging) -> None:
        forget(staging)
        copied.set()

    monkeypatch.setattr(Staging, "forget", forgotten)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        begin = Script(ckpt).hold("begin")
        call = asyncio.create_task(ckpt.start_save(1, tree()))
        await begin.reached()
        assert await in_thread(lambda: copied.wait(30))
        assert not call.done()  # the attempt may be refused
        begin.go()
        await (await call)
        assert await ckpt.steps() == [1]


async def started(ckpt: asyncckpt.Checkpointer, step: int) -> asyncckpt.PendingSave | None:
    try:
        return await ckpt.start_save(step, tree())
    except StoreError:
        return None


async def test_the_repr_of_a_failed_save_shows_why(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        Script(ckpt).fail("seal", StoreError("disk on fire"))
        pending = await ckpt.start_save(1, tree())
        with pytest.raises(StoreError):
            await pending
        assert repr(pending) == "<PendingSave step 1: failed: disk on fire>"


async def test_timing_out_an_await_of_a_pending_save_stops_only_the_waiting(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        pending = await ckpt.start_save(1, tree())
        await publish.reached()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pending, 0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await pending
        assert not pending.done()
        publish.go()
        assert (await pending).step == 1


async def test_cancelling_an_await_of_a_pending_save_stops_only_the_waiting(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        pending = await ckpt.start_save(1, tree())
        await publish.reached()
        waits = [pending.future() for _ in range(3)]
        await asyncio.sleep(0)
        assert all(isinstance(wait, asyncio.Future) for wait in waits)
        for wait in waits[:2]:
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
        assert not pending.done()
        publish.go()
        assert (await waits[2]) is (await pending)


async def test_cancel_aborts_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        write = script.hold("write")
        pending = await ckpt.start_save(1, tree())
        await write.reached()
        assert pending.cancel()
        for _ in range(2):
            with pytest.raises(
                SaveAbortedError, match="was cancelled in upload and cleaned up"
            ) as caught:
                await pending
        assert caught.value.location == str(tmp_path / "1")
        assert script.count("abort") == 1
        assert not pending.cancel()
        assert await ckpt.steps() == []
        assert ckpt._session.runtime.budget.in_use == 0
    assert list(tmp_path.iterdir()) == []


async def test_a_save_that_was_cancelled_is_raised_by_no_later_call(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        write = Script(ckpt).hold("write")
        pending = await ckpt.start_save(1, tree())
        await write.reached()
        assert pending.cancel()
        await ckpt.save(2, tree())
        assert await ckpt.steps() == [2]


async def test_cancelling_a_save_whose_publication_has_begun_commits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def held(rename: Callable[..., None], *names: str) -> None:
        begun.set()
        assert go.wait(60)
        landed(rename, *names)

    landed = publishing.landed
    monkeypatch.setattr(publishing, "landed", held)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, tree())
        assert await in_thread(lambda: begun.wait(60))
        assert pending.cancel()
        assert pending.cancel()
        go.set()
        assert (await pending).step == 1
        assert await ckpt.steps() == [1]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("background", [False, True], ids=["save", "start_save"])
async def test_cancelling_the_call_aborts_the_save_and_returns_after_its_clean_up(
    tmp_path: Path, times: int, background: bool
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        held = script.hold("begin" if background else "write")
        abort = script.hold("abort") if not background else None
        call = ckpt.start_save(1, tree()) if background else ckpt.save(1, tree())
        task = asyncio.create_task(call)
        await held.reached()
        task.cancel()
        if abort is not None:
            await abort.reached()
            for _ in range(times - 1):
                task.cancel()
                await ckpt.latest_step()
            assert not task.done()
            abort.go()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ckpt._session.saves.pending() == []
        assert await ckpt.steps() == []
        await ckpt.save(2, tree())
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


async def test_a_queued_save_that_is_cancelled_never_begins(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        publish = script.hold("publish")
        first = await ckpt.start_save(1, tree())
        await publish.reached()
        queued = asyncio.create_task(ckpt.start_save(2, tree()))
        await asyncio.sleep(0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        publish.go()
        await first
        assert script.count("begin") == 1


@pytest.mark.parametrize("background", [False, True], ids=["save", "start_save"])
async def test_a_save_that_is_cancelled_before_it_begins_does_not_look_like_a_cancelled_task(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opening(_: object) -> None:
        await asyncio.Event().wait()

    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr(ckpt._session.root, "opened", opening)
        task = asyncio.create_task((ckpt.start_save if background else ckpt.save)(1, tree()))
        await asyncio.sleep(0)
        (pending,) = ckpt._session.saves.pending()
        assert pending.cancel()
        with pytest.raises(SaveAbortedError, match=r"/1: the save was cancelled before it had beg"):
            await task
        with pytest.raises(SaveAbortedError):
            await pending


async def test_saves_commit_in_the_order_of_their_calls(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        first = await ckpt.start_save(5, tree())
        second = asyncio.create_task(ckpt.start_save(4, tree()))
        await publish.reached()
        await asyncio.sleep(0)
        assert not second.done()
        assert await ckpt.steps() == []
        publish.go()
        await first
        assert await ckpt.steps() == [5]
        await (await second)
        assert await ckpt.steps() == [4, 5]


async def test_result_of_an_async_save_says_what_to_write_instead(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, {"a": 1})
        with pytest.raises(UsageError, match=r"write `report = await pending`, or use .*blocking"):
            pending.result()
        assert (await pending).step == 1


async def test_future_outside_a_loop_says_what_to_use_instead(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, {"a": 1})
        with pytest.raises(UsageError, match=r"future\(\) belongs to an event loop, and none is"):
            await asyncio.to_thread(pending.future)
        assert (await pending.future()).step == 1
