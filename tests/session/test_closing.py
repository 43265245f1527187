"""Closing a session: the first call closes it, all others wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import asyncckpt
from asyncckpt import DirectoryCoordinator, blocking
from asyncckpt.errors import SaveAbortedError
from asyncckpt.flow.threads import Outcome
from asyncckpt.session.session import Session
from asyncckpt.testing.faults import Fault
from tests.script import Script, in_thread

TREE = {"w": np.arange(1000.0)}


async def test_calls_of_close_at_the_same_time_wait_for_one_release(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    script = Script(ckpt)
    sweep = script.hold("sweep")
    await ckpt.save(1, TREE)
    closing = [asyncio.create_task(ckpt.close()) for _ in range(3)]
    await sweep.reached()
    late = asyncio.create_task(ckpt.close())
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*closing, late))
    sweep.go()
    await asyncio.gather(*closing, late)
    await ckpt.close()
    assert script.count("sweep") == 1


async def test_of_calls_at_the_same_time_one_raises_what_could_not_be_closed(
    tmp_path: Path,
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    script = Script(ckpt)
    script.store.script.append(Fault("close", 0, error=OSError("handle is gone")))
    ckpt._session.runtime._stores[:] = [script.store]
    await ckpt.save(1, TREE)
    ended = await asyncio.gather(*(ckpt.close() for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in ended if error is not None] == ["handle is gone"]


def test_threads_that_close_at_the_same_time_all_return(tmp_path: Path) -> None:
    for step in range(20):
        ckpt = blocking.Checkpointer(tmp_path)
        ckpt.save(step, TREE)
        with ThreadPoolExecutor(4) as pool:
            for closing in [pool.submit(ckpt.close) for _ in range(4)]:
                closing.result(30)


async def test_async_and_blocking_calls_may_mix(tmp_path: Path) -> None:
    ckpt = blocking.Checkpointer(tmp_path)
    await in_thread(lambda: ckpt.save(1, TREE))
    await asyncio.gather(*(in_thread(ckpt.close) for _ in range(3)))
    with pytest.raises(asyncckpt.ClosedError):
        ckpt.save(2, TREE)


async def test_a_cancelled_close_aborts_all_saves_at_once(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path)
    script = Script(ckpt)
    write, abort = script.hold("write"), script.hold("abort")
    first, second = (asyncio.create_task(ckpt.save(step, TREE)) for step in (1, 2))
    await write.reached()
    closing = asyncio.create_task(ckpt.close())
    await asyncio.sleep(0)
    closing.cancel()
    await abort.reached()
    with pytest.raises(SaveAbortedError):
        await second  # although the first one has not ended
    abort.go()
    with pytest.raises(SaveAbortedError):
        await first
    with pytest.raises(asyncio.CancelledError):
        await closing


async def test_a_wait_that_is_cancelled_forgets_no_refusal(tmp_path: Path) -> None:
    """The error that other processes are told must arrive before the coordinator is closed."""
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        core, refused = ckpt._session, Outcome()
        core._refusals.append(refused)
        waiting = asyncio.create_task(core.idle())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert core._refusals == [refused]
        waiting = asyncio.create_task(core.idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        refused.set_result(None)
        await waiting
        assert core._refusals == []


async def test_an_error_of_closing_is_a_note_on_the_cancellation_before_it(tmp_path: Path) -> None:
    session, refused = Session(tmp_path), Outcome[None]()
    inside = asyncio.Event()

    async def fine() -> None:
        return None

    async def fail() -> None:
        raise OSError("no close")

    async def use() -> None:
        async with session:
            await session.call(fine).wait()
            session.root.release = fail  # type: ignore[method-assign]
            session._refusals.append(refused)
            inside.set()

    using = asyncio.create_task(use())
    await inside.wait()
    await asyncio.sleep(0)
    using.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await using
    assert caught.value.__notes__ == ["closing failed, too: OSError: no close"]


class Parting(DirectoryCoordinator):
    """A coordinator whose process stops, or fails, as it leaves the group."""

    def __init__(self, path: Path, error: Exception | None) -> None:
        super().__init__(path, process_index=0, process_count=1)
        self.leaving = asyncio.Event()
        self.closed = False
        self._error = error

    async def put(self, key: str, value: bytes) -> None:
        if value == b"bye":
            self.leaving.set()
            if self._error is not None:
                raise self._error
            await asyncio.Event().wait()
        await super().put(key, value)

    async def close(self) -> None:
        self.closed = True
        await super().close()


@pytest.mark.parametrize("error", [None, OSError("service is gone")], ids=["cancelled", "failed"])
async def test_a_coordinator_is_closed_even_if_leaving_the_group_ends_early(
    tmp_path: Path, error: Exception | None
) -> None:
    coordinator = Parting(tmp_path / "messages", error)
    session = Session(tmp_path / "run", coordinator=coordinator, owns_coordinator=True)
    await session.call(session.processes.group).wait()
    releasing = session.runtime.engine.submit(session._release)
    if error is None:
        await session.call(coordinator.leaving.wait).wait()
        releasing.cancel()
    with pytest.raises(asyncio.CancelledError if error is None else OSError):
        await releasing.wait()
    assert coordinator.closed
    await session.runtime.engine.aclose()
