"""Calls that fail on one process before they meet the others: all processes get the error."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

import asyncckpt
from asyncckpt import Checkpointer, RestoreOptions, SaveOptions
from asyncckpt.errors import (
    AsyncCheckpointError,
    DeadlineExceededError,
    SaveAbortedError,
    StoreError,
    UsageError,
)
from tests.session.together.job import Job, equal, state

# Waiting for a process that has failed would take longer than a test may.

Call = Callable[[Checkpointer], Coroutine[Any, Any, Any]]


class Broken:
    """A target whose state dict cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def restores(**arguments: Any) -> Call:
    return lambda ckpt: ckpt.restore(**arguments)


RESTORES: dict[str, Call] = {
    "no state dict": lambda ckpt: ckpt.restore_into({"model": Broken()}),
    "an unsupported leaf": restores(like={"w": object()}),
    "another step": restores(step=-1),
    "a callback": restores(on_report=7),
    "a switch": restores(cast="x"),
    "a switch in place": lambda ckpt: ckpt.restore_into(state(), strict="x"),  # type: ignore[arg-type]
    "leaves with like": restores(like=state(), leaves="torch"),
    "no collectives": restores(like=state(), options=RestoreOptions(broadcast=True)),
}


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("wrong", RESTORES.values(), ids=RESTORES)
def test_a_restore_that_fails_before_it_begins_fails_on_all(
    job: Job, wrong: Call, process: int
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        with pytest.raises(Exception, match=r".") as caught:
            await (wrong(ckpt) if this == process else ckpt.restore(like=state(1)))
        assert equal(await ckpt.restore(like=state(1)), state()), "calls are in step"
        assert await ckpt.latest_step() == 1
        return str(caught.value)

    results = job.play(part)
    assert all(isinstance(text, str) for text in results), results
    assert results[1 - process].startswith(f"process {process} ("), results
    assert results[process] in results[1 - process]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("call", ["save", "delete", "delete_after"])
def test_a_step_that_is_no_step_on_one_process_fails_on_all(
    job: Job, call: str, process: int
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        with pytest.raises(AsyncCheckpointError, match="a step is a non-negative integer"):
            step = -1 if this == process else 2
            await (ckpt.save(step, state()) if call == "save" else getattr(ckpt, call)(step))
        await ckpt.save(3, state())
        return await ckpt.latest_step()

    assert job.play(part) == [3] * job.count


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("options", [7, SaveOptions(on_overlap="skip", silence_s=77)])
def test_a_save_with_wrong_options_on_one_process_fails_on_all(
    job: Job, options: Any, process: int
) -> None:
    right = SaveOptions(on_overlap="skip")
    failed = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        with pytest.raises(UsageError, match="options="):
            if this == process:
                await ckpt.start_save(2, state(), options=options)
            else:
                assert await asyncio.to_thread(failed.wait, 20)
                await (await ckpt.start_save(2, state(), options=right))
        failed.set()
        await ckpt.save(3, state())
        return await ckpt.latest_step()

    assert job.play(part) == [3] * job.count


@pytest.mark.parametrize("process", [0, 1])
def test_a_save_that_is_interrupted_before_it_begins_fails_on_all(job: Job, process: int) -> None:
    class Interrupted(Broken):
        def state_dict(self) -> dict[str, Any]:
            raise KeyboardInterrupt

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        if this == process:
            with pytest.raises(KeyboardInterrupt):
                await ckpt.save(2, {"model": Interrupted()})
        else:
            with pytest.raises(SaveAbortedError, match="the call was cancelled there"):
                await ckpt.save(2, state())
        await ckpt.save(3, state())
        return await ckpt.latest_step()

    assert job.play(part) == [3] * job.count


@pytest.mark.parametrize("process", [0, 1])
def test_a_one_shot_restore_that_fails_before_it_begins_fails_on_all(
    job: Job, process: int
) -> None:
    async def main(this: int) -> Any:
        coordinator = job.coordinator(this)
        await asyncckpt.save(job.root / "final", state(), coordinator=coordinator)
        like = {"w": object()} if this == process else state()
        with pytest.raises(AsyncCheckpointError, match="object"):
            await asyncckpt.restore(job.root / "final", like=like, coordinator=coordinator)
        back = await asyncckpt.restore(job.root / "final", coordinator=coordinator)
        return equal(back, state())

    assert job.run(main) == [True] * job.count


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("call", ["save", "restore", "latest_step"])
def test_a_call_that_is_cancelled_before_it_begins_fails_on_all(
    job: Job, call: str, process: int
) -> None:
    """A task that is cancelled while it runs learns of it where it waits first: in the call.

    The others come later: together they might have ended the call before it is cancelled.
    """
    failed = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        arguments = (2, state()) if call == "save" else ()

        async def cancelled() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await getattr(ckpt, call)(*arguments)

        if this == process:
            with pytest.raises((SaveAbortedError, asyncio.CancelledError)):
                await asyncio.create_task(cancelled())
            failed.set()
        else:
            assert await asyncio.to_thread(failed.wait, 20)
            with pytest.raises(SaveAbortedError):
                await getattr(ckpt, call)(*arguments)
        # The tree is the same, with which no process may be in doubt.
        await ckpt.save(3, state())
        assert equal(await ckpt.restore(like=state(1)), state())
        return await ckpt.latest_step()

    assert job.play(part) == [3] * job.count


@pytest.mark.parametrize("process", [0, 1])
def test_a_call_whose_store_cannot_be_opened_fails_on_all_however_soon_that_is_known(
    job: Job, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may have ended before the call that submits it has returned."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        engine = ckpt._session.runtime.engine
        submit = engine.submit

        async def unopened(_: Any) -> Any:
            raise StoreError("no such store")

        def submitted(*args: Any, **keywords: Any) -> Any:
            made = submit(*args, **keywords)
            while made.future in engine._jobs and not engine.runs_here:  # until its end is known
                time.sleep(0.001)
            return made

        if this == process:
            with monkeypatch.context() as patched:
                patched.setattr(ckpt._session.root, "opened", unopened)
                patched.setattr(engine, "submit", submitted)
                calling = ckpt._session.call_once("latest_step()", ckpt._session.steps.latest)
            call = calling.wait()
        else:
            call = ckpt.latest_step()
        with pytest.raises(StoreError, match="no such store"):
            await call
        return await ckpt.latest_step()

    assert job.play(part) == [1] * job.count


@pytest.mark.parametrize("process", [0, 1])
def test_a_deadline_that_passes_before_the_round_is_the_error_on_all(
    job: Job, process: int
) -> None:
    failed = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        with pytest.raises(DeadlineExceededError, match=r"came to save\(2\) within 1e-09 s"):
            if this == process:
                await ckpt.save(2, state(), options=SaveOptions(deadline_s=1e-9))
            else:
                assert await asyncio.to_thread(failed.wait, 20)
                await ckpt.save(2, state())
        failed.set()
        return (await ckpt.save(3, state())).step

    assert job.play(part) == [3] * job.count


@pytest.mark.parametrize("process", [0, 1])
def test_the_save_after_one_that_was_cancelled_before_its_round_works(
    job: Job, process: int
) -> None:
    """Its round waits for its turn: the plan is known, and no process may be in doubt about it."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        session = ckpt._session
        numbering = session.processes._numbering
        if this == process:
            await session.call(numbering.acquire).wait()
            saving = asyncio.create_task(ckpt.start_save(2, state()))
            await asyncio.sleep(0)  # it has called the engine
            await session.call(
                partial(asyncio.sleep, 0)
            ).wait()  # and the engine waits for its turn
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            numbering.release()
        else:
            with pytest.raises(SaveAbortedError):
                await ckpt.save(2, state())
        return (await ckpt.save(3, state())).step

    assert job.play(part) == [3] * job.count
