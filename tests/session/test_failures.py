"""A failed save is reported by every await of it, or else exactly once by the next call."""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import blocking
from asyncckpt.errors import DeadlineExceededError, SaveError, StoreError, UsageError
from asyncckpt.flow.engine import ended
from asyncckpt.save import save as saving
from asyncckpt.session import pending as pending_saves
from asyncckpt.testing.faults import Fault
from tests import children
from tests.script import Script, in_thread

TREE = {"w": np.arange(20_000.0), "step": 1}

Next = Callable[[asyncckpt.Checkpointer], Awaitable[object]]


NOTE = "a save failed, too: StoreError: disk on fire\nthis ended the save of {}"


async def failed_unseen(ckpt: asyncckpt.Checkpointer, error: Exception | None = None) -> Script:
    """A save of step 1 has failed, and no caller has seen it."""
    script = Script(ckpt)
    script.fail("seal", error or StoreError("disk on fire"))
    await ckpt.start_save(1, TREE)
    for pending in ckpt._session.saves.pending():
        with pytest.raises(StoreError):
            await ckpt._session.call(lambda p=pending: wait_quietly(p)).wait()
    return script


async def wait_quietly(pending: asyncckpt.PendingSave) -> None:
    await asyncio.wrap_future(pending._job.future)


NEXT: dict[str, Next] = {
    "save": lambda ckpt: ckpt.save(2, TREE),
    "start_save": lambda ckpt: ckpt.start_save(2, TREE),
    "wait": lambda ckpt: ckpt.wait(),
    "close": lambda ckpt: ckpt.close(),
}


@pytest.mark.parametrize("name", NEXT)
async def test_an_unseen_failure_is_raised_exactly_once_by_the_next_call(
    tmp_path: Path, name: str
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    script = await failed_unseen(ckpt)
    begun = script.count("begin")
    with pytest.raises(StoreError, match="disk on fire"):
        await NEXT[name](ckpt)
    assert script.count("begin") == begun  # nothing was started
    if name != "close":
        await ckpt.save(3, TREE)
        assert await ckpt.steps() == [3]
    await ckpt.close()


async def test_the_end_of_the_block_raises_an_unseen_failure(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="disk on fire"):
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            await failed_unseen(ckpt)


async def test_the_end_of_the_block_waits_for_saves_in_flight(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        pending = await ckpt.start_save(1, TREE)
    assert pending.done()
    assert (await asyncckpt.verify(tmp_path / "1")).ok


async def test_the_exception_of_the_body_is_not_replaced_and_the_saves_error_is_a_note(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyError) as caught:
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            Script(ckpt).fail("publish", StoreError("disk on fire"))
            pending = await ckpt.start_save(1, TREE)
            raise KeyError("body")
    assert pending.done()
    assert caught.value.__notes__ == [NOTE.format(tmp_path / "1")]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_failure_is_a_warning_if_the_block_is_left_by_what_shows_no_notes(
    tmp_path: Path, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(RuntimeWarning, match="a save failed, too: StoreError: disk on fire"):
        with pytest.raises(error) as caught, blocking.Checkpointer(tmp_path) as ckpt:
            Script(ckpt).fail("publish", StoreError("disk on fire"))
            ckpt.start_save(1, TREE)
            raise error
    assert caught.value.__notes__ == [NOTE.format(tmp_path / "1")]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("blocked", [False, True], ids=["async", "blocking"])
async def test_a_store_that_cannot_be_closed_hides_no_failed_save(
    tmp_path: Path, blocked: bool
) -> None:
    ckpt = blocking.Checkpointer(tmp_path) if blocked else asyncckpt.Checkpointer(tmp_path)
    script = Script(ckpt)
    script.fail("seal", StoreError("disk on fire"))
    closed = OSError("handle is gone")
    script.store.script.append(Fault("close", 0, error=closed))
    # Closes what is given to the checkpointer, like a third-party store.
    ckpt._session.runtime._stores[:] = [script.store]
    with pytest.raises(StoreError, match="disk on fire") as caught:
        if isinstance(ckpt, blocking.Checkpointer):
            await in_thread(lambda: (ckpt.start_save(1, TREE), ckpt.close()))
        else:
            await ckpt.start_save(1, TREE)
            await ckpt.close()
    assert caught.value.__notes__ == [
        f"this ended the save of {tmp_path / '1'}",
        "closing failed, too: OSError: handle is gone",
    ]
    assert caught.value.__context__ is closed
    await (in_thread(ckpt.close) if blocked else ckpt.close())  # heard of once


async def test_a_close_that_is_cancelled_leaves_the_failure_to_the_next_one(
    tmp_path: Path,
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    script = await failed_unseen(ckpt)
    sweep = script.hold("sweep")
    closing = asyncio.create_task(ckpt.close())
    await sweep.reached()
    closing.cancel()
    sweep.go()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(StoreError, match="disk on fire"):
        await ckpt.close()
    await ckpt.close()


async def test_after_an_exception_of_the_body_saves_in_flight_are_still_finished(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyError) as caught:
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            await ckpt.start_save(1, TREE)
            raise KeyError("body")
    assert not hasattr(caught.value, "__notes__")
    assert (await asyncckpt.verify(tmp_path / "1")).ok


async def test_every_await_of_a_failed_save_raises_and_nothing_else_does(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        Script(ckpt).fail("seal", StoreError("disk on fire"))
        pending = await ckpt.start_save(1, TREE)
        for _ in range(3):
            with pytest.raises(StoreError, match="disk on fire"):
                await pending
        await ckpt.wait()
        await ckpt.save(2, TREE)
        assert await ckpt.steps() == [2]


def test_the_traceback_of_a_failure_does_not_grow_with_every_wait(tmp_path: Path) -> None:
    ckpt = blocking.Checkpointer(tmp_path)
    Script(ckpt).fail("seal", StoreError("disk on fire"))
    pending = ckpt.start_save(1, TREE)
    lengths = set()
    for _ in range(3):
        with pytest.raises(StoreError) as caught:
            pending.result()
        lengths.add(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert len(lengths) == 1
    ckpt.close()


async def test_a_failure_after_the_state_was_copied_belongs_to_the_pending_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the caller goes on, `start_save` does not raise it."""
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        Script(ckpt).fail("seal", StoreError("disk on fire"))

        async def late(future: Future[Any]) -> None:
            await ended(future)
            for pending in ckpt._session.saves.pending():
                await ended(pending._job.future)

        monkeypatch.setattr(pending_saves, "ended", late)
        pending = await ckpt.start_save(1, TREE)
        assert pending.done()
        with pytest.raises(StoreError, match="disk on fire"):
            await pending


async def test_a_failure_raised_by_save_is_seen(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        script.fail("write", StoreError("disk on fire"))
        with pytest.raises(StoreError):
            await ckpt.save(1, TREE)
        script.fail("begin", StoreError("disk on fire"))
        with pytest.raises(StoreError):
            await ckpt.start_save(1, TREE)  # fails while it is being staged
        await ckpt.wait()


async def test_on_failed_save_log_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = asyncckpt.SaveOptions(on_failed_save="log")
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        await failed_unseen(ckpt)
        with caplog.at_level(logging.ERROR, "asyncckpt"):
            await ckpt.save(2, TREE)
        assert "an earlier save failed: disk on fire" in caplog.text
        assert await ckpt.steps() == [2]


async def two_failed_unseen(ckpt: asyncckpt.Checkpointer) -> None:
    """Saves of steps 1 and 2 fail, and no caller sees it."""
    script = Script(ckpt)
    hold = script.hold("publish")
    script.fail("publish", StoreError("first"))
    script.fail("publish", StoreError("second"), 2)
    await ckpt.start_save(1, TREE)
    await hold.reached()
    queued = asyncio.create_task(ckpt.start_save(2, TREE))
    await asyncio.sleep(0)
    hold.go()
    await queued


async def test_two_unseen_failures_are_one_error_with_a_note(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await two_failed_unseen(ckpt)
        with pytest.raises(StoreError, match="first") as caught:
            await ckpt.wait()
        assert caught.value.__notes__ == [
            f"this ended the save of {tmp_path / '1'}",
            "another save failed too: second",
        ]
        await ckpt.wait()


async def test_of_two_unseen_failures_both_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = asyncckpt.SaveOptions(on_failed_save="log")
    async with asyncckpt.Checkpointer(tmp_path, save_options=options) as ckpt:
        await two_failed_unseen(ckpt)
        await ckpt._session.idle()
        with caplog.at_level(logging.ERROR, "asyncckpt"):
            await ckpt.save(3, TREE)
    text = f"first\nthis ended the save of {tmp_path / '1'}\nanother save failed too: second"
    assert f"an earlier save failed: {text}" in caplog.text


async def test_of_two_unseen_failures_both_are_notes_of_the_bodys_exception(
    tmp_path: Path,
) -> None:
    with pytest.raises(KeyError) as caught:
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            await two_failed_unseen(ckpt)
            raise KeyError("body")
    (note,) = caught.value.__notes__
    text = f"first\nthis ended the save of {tmp_path / '1'}\nanother save failed too: second"
    assert note == f"a save failed, too: StoreError: {text}"


async def test_a_failing_clean_up_does_not_hide_why_the_save_failed(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        script.fail("write", StoreError("disk on fire"))
        script.fail("abort", StoreError("still burning"))
        with pytest.raises(StoreError, match="disk on fire") as caught:
            await ckpt.save(1, TREE)
        assert caught.value.__notes__ == ["cleaning up failed too: still burning"]


async def test_a_deadline_aborts_the_save_says_where_it_was_and_cleans_up(tmp_path: Path) -> None:
    options = asyncckpt.SaveOptions(deadline_s=2.0)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(0, TREE)
        script = Script(ckpt)
        for nth in (1, 2):  # data and index, in either order
            script.hold("write", nth)
        with pytest.raises(
            DeadlineExceededError, match=r"did not finish within 2\.0 s .*in upload, at 0%"
        ) as caught:
            await ckpt.save(1, TREE, options=options)
        assert (caught.value.stage, caught.value.location) == ("upload", str(tmp_path / "1"))
        assert isinstance(caught.value, SaveError) and not caught.value.visible
        assert await ckpt.steps() == [0]
        assert ckpt._session.runtime.budget.in_use == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


async def test_a_deadline_that_passes_before_sizes_are_known_names_only_the_stage(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        Script(ckpt).hold("read")
        with pytest.raises(DeadlineExceededError, match=r"\(it was in plan\) and was aborted"):
            await ckpt.save(1, TREE, options=asyncckpt.SaveOptions(deadline_s=0.05))


async def test_a_store_that_stops_answering_delays_a_deadline_by_a_bounded_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "ABORT_S", 0.1)
    options = asyncckpt.SaveOptions(deadline_s=0.5)
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        script.hold("write")
        script.hold("abort")
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineExceededError) as caught:
                await ckpt.save(1, TREE, options=options)
        (note,) = caught.value.__notes__
        assert note.startswith("cleaning up did not finish within 0.1 s")
        await ckpt.save(2, TREE)
        assert await ckpt.steps() == [2]


async def test_a_deadline_counts_from_the_call_also_behind_another_save(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        publish = script.hold("publish")
        first = await ckpt.start_save(1, TREE)
        await publish.reached()
        with pytest.raises(DeadlineExceededError):
            await ckpt.start_save(2, TREE, options=asyncckpt.SaveOptions(deadline_s=0.05))
        publish.go()
        await first
        assert script.count("begin") == 1


async def test_a_restore_past_its_deadline_is_aborted(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        reading = Script(ckpt).hold("read_into")
        with pytest.raises(DeadlineExceededError, match=r"restore did not finish within 0\.05 s"):
            await ckpt.restore(options=asyncckpt.RestoreOptions(deadline_s=0.05))
        reading.go()  # a slow machine has not come that far
        assert (await ckpt.restore())["step"] == 1


async def test_the_deadline_of_a_restore_includes_the_search_for_the_newest_step(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        listing = Script(ckpt).hold("names")
        options = asyncckpt.RestoreOptions(deadline_s=0.05)
        with pytest.raises(DeadlineExceededError, match=r"did not finish within 0\.05 s") as caught:
            await asyncio.wait_for(ckpt.restore(options=options), 20)
        assert caught.value.location == str(tmp_path)
        listing.go()


async def test_the_error_of_a_deadline_lists_the_targets_that_were_written(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        reading = Script(ckpt).hold("read_into")
        options = asyncckpt.RestoreOptions(deadline_s=2.0)
        with pytest.raises(DeadlineExceededError) as caught:
            await ckpt.restore_into({"w": np.zeros(20_000), "step": 0}, options=options)
        assert reading._gate.reached.is_set()
        assert caught.value.written == ("w",)


@pytest.mark.parametrize("deadline_s", [None, 60.0])
async def test_a_timeout_of_the_store_is_no_deadline_of_the_restore(
    tmp_path: Path, deadline_s: float | None
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, TREE)
        Script(ckpt).fail("read_into", TimeoutError("the mount"))
        with pytest.raises(TimeoutError, match="the mount"):
            await ckpt.restore(options=asyncckpt.RestoreOptions(deadline_s=deadline_s))


async def test_overlapping_saves_wait_or_are_skipped_or_are_an_error(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        first = await ckpt.start_save(1, TREE)
        await publish.reached()
        skip = asyncckpt.SaveOptions(on_overlap="skip")
        skipped = await ckpt.start_save(2, TREE, options=skip)
        assert skipped.skipped and skipped.done() and not skipped.cancel()
        report = await skipped
        assert report.skipped and report.step == 2
        assert str(report) == f"skipped {tmp_path / '2'}: another save was in flight"
        assert repr(skipped) == "<PendingSave step 2: skipped>"
        error = asyncckpt.SaveOptions(on_overlap="error")
        with pytest.raises(UsageError, match=r"another save is in flight .*step 1.*await it first"):
            await ckpt.start_save(3, TREE, options=error)
        publish.go()
        await first
        for step, options in ((4, skip), (5, error)):
            assert not (await ckpt.start_save(step, TREE, options=options)).skipped
            await ckpt.wait()
        assert await ckpt.steps() == [1, 4, 5]


FAILED_UNSEEN = """
import asyncio, gc, logging, os, sys
logging.basicConfig()
import numpy as np
import asyncckpt
from asyncckpt.errors import StoreError
from tests import children
from tests.script import Script

async def main():
    ckpt = asyncckpt.Checkpointer(sys.argv[1])
    await ckpt.save(5, {"w": np.arange(9.0)})
    script = Script(ckpt)
    script.fail("seal", StoreError("disk on fire"))
    held = script.hold("seal")
    pending = await ckpt.start_save(6, {"w": np.arange(20_000.0)})
    held.go()
    future = pending._job.future
    while not future.done():
        await asyncio.sleep(0)
    %s

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "ending",
    [
        "del ckpt, pending, script, held; gc.collect(); print('dropped')",
        "sys.modules['kept'] = ckpt",
        "sys.modules['kept'] = pending",
        "return",
    ],
)
def test_a_failure_that_no_call_raises_is_a_warning_when_its_save_is_dropped_or_the_process_ends(
    tmp_path: Path, ending: str
) -> None:
    child = children.start(FAILED_UNSEEN % ending, tmp_path, warnings="always")
    status, out, err = children.finish(child)
    assert status == 0, err
    assert out == ("dropped\n" if "del" in ending else "")
    warning = f"RuntimeWarning: {tmp_path}/6: the save failed, and no call has raised its error"
    assert err.count(warning) == 1 and "StoreError: disk on fire" in err
    assert err.count(f"ERROR:asyncckpt:{tmp_path}/6: the save failed") == 1


def test_a_failure_that_no_call_raises_is_printed_if_warnings_are_errors(tmp_path: Path) -> None:
    code = FAILED_UNSEEN.replace("logging.basicConfig()", "") % "return"
    status, _, err = children.finish(children.start(code, tmp_path, warnings="error"))
    warning = f"RuntimeWarning: {tmp_path}/6: the save failed, and no call has raised its error"
    assert status == 0 and err.count(warning) == 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_failure_that_no_call_raises_is_a_warning_when_a_child_of_multiprocessing_ends(
    tmp_path: Path, method: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import multiprocessing, sys, warnings
import numpy as np
from asyncckpt import blocking
from asyncckpt.errors import StoreError
from tests.script import Script

def work(root):
    warnings.simplefilter("always")
    sys.modules["kept"] = ckpt = blocking.Checkpointer(root)
    Script(ckpt).fail("seal", StoreError("disk on fire"))
    pending = ckpt.start_save(6, {{"w": np.arange(20_000.0)}})
    while not pending.done():
        pass

if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=work, args=(sys.argv[1],))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    )
    root = tmp_path / "run"
    code = f"import runpy, sys; runpy.run_path({str(program)!r}, run_name='__main__')"
    status, _, err = children.finish(children.start(code, root, warnings="ignore"))
    assert status == 0, err
    assert err.count(f"RuntimeWarning: {root}/6: the save failed, and no call has raised") == 1


@pytest.mark.parametrize(
    "ending",
    [
        "await asyncio.gather(pending, return_exceptions=True)",
        "await asyncio.gather(ckpt.wait(), return_exceptions=True)",
        "await asyncio.gather(ckpt.close(), return_exceptions=True)",
        "await asyncio.gather(ckpt.save(7, {'x': 1}), return_exceptions=True)",
        "os.fork() or os._exit(0); await asyncio.gather(pending, return_exceptions=True)",
    ],
)
def test_a_failure_that_a_call_has_raised_is_no_warning(tmp_path: Path, ending: str) -> None:
    child = children.start(FAILED_UNSEEN % ending, tmp_path, warnings="always")
    status, out, err = children.finish(child)
    assert (status, out) == (0, "")
    assert "no call has raised" not in err


async def test_saves_that_an_exception_of_the_block_aborts_are_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def train() -> None:
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            Script(ckpt).hold("seal")
            await ckpt.start_save(1, TREE)

    task = asyncio.create_task(train())
    while not list(tmp_path.glob(".asyncckpt/**/default")):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    assert not [record for record in caplog.records if str(tmp_path) in record.message]
