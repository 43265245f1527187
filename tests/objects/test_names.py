"""Names that only other programs read: written after the record, and who waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import asyncckpt
from asyncckpt import Checkpointer, blocking
from tests import children
from tests.cancellation.points import assert_equal
from tests.objects.stores import SAVE_OPTIONS, Place, place, state
from tests.simulator import Fault, Gate, Signal
from tests.stores.objects.stores import options_of

KINDS = ("s3fs", "gcsfs", "obstore")
NAMES = {"kind": "put_object", "key": "*/default/manifest.ocdbt"}


@asynccontextmanager
async def held(kind: str) -> AsyncIterator[tuple[Place, Checkpointer, Gate]]:
    """Step 1 was saved and awaited; the names of its files for other programs wait at the gate."""
    async with asyncio.timeout(60), place(kind) as at:
        gate = Gate()
        at.sim.faults.append(Fault(**NAMES, gate=gate))
        ckpt = Checkpointer(at.store(), save_options=SAVE_OPTIONS)
        try:
            pending = await ckpt.start_save(1, state(1))
            report = await pending
            assert report.step == 1
            await gate.reached.wait()
            yield at, ckpt, gate
        finally:
            gate.release()
            await ckpt.close()


def named(at: Place, step: int = 1) -> bool:
    """Whether other programs find the step."""
    return f"{step}/default/manifest.ocdbt" in at.keys(f"{step}/")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_background_save_has_ended_when_its_record_stands(kind: str) -> None:
    async with held(kind) as (at, ckpt, gate):
        assert not named(at)
        assert await ckpt.latest_step() == 1
        assert_equal(await ckpt.restore(), state(1))
        gate.release()
        await ckpt.wait()
        assert named(at)
        assert not at.sim.uploads


async def _save(ckpt: Checkpointer) -> None:
    await ckpt.save(2, state(2))


async def _next(ckpt: Checkpointer) -> None:
    await (await ckpt.start_save(2, state(2)))


async def _delete(ckpt: Checkpointer) -> None:
    await ckpt.delete(1)


@pytest.mark.parametrize("call", [Checkpointer.wait, Checkpointer.close, _save, _next, _delete])
async def test_these_calls_wait_for_the_names(
    call: Callable[[Checkpointer], Awaitable[None]],
) -> None:
    async with held("obstore") as (at, ckpt, gate):
        sent = Signal()
        at.sim.faults.append(Fault(kind="put_object", key="*/2/default/d/*", hook=sent_by(sent)))
        calling = asyncio.create_task(call(ckpt))
        if call in (_save, _next):
            await sent.wait()  # what comes before the next record goes on
        done, _ = await asyncio.wait([calling], timeout=0.2)
        assert not done
        assert "2/checkpoint.json" not in at.keys("2/")
        gate.release()
        await calling
        assert named(at) == (call is not _delete)
        if call in (_save, _next):
            await ckpt.wait()
            assert named(at, 2)
        if call is _delete:
            assert at.keys("1/") == []


def sent_by(signal: Signal) -> Callable[[object], None]:
    return lambda _: signal.set()


async def test_a_save_that_is_awaited_at_once_waits_for_its_own_names() -> None:
    async with asyncio.timeout(60), place("obstore") as at:
        gate = Gate()
        at.sim.faults.append(Fault(**NAMES, gate=gate))
        async with Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            saving = asyncio.create_task(ckpt.save(1, state(1)))
            await gate.reached.wait()
            done, _ = await asyncio.wait([saving], timeout=0.2)
            assert not done
            # A cancellation stops that waiting; the step stays, and its names still come.
            saving.cancel()
            await asyncio.wait([saving])
            assert saving.cancelled()
            assert await ckpt.steps() == [1]
            gate.release()
        assert named(at)


async def test_names_that_could_not_be_written_are_logged_and_written_by_the_next_save(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with place("s3fs") as at:
        at.sim.faults.append(Fault(**NAMES, status=403))
        async with Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            with caplog.at_level(logging.WARNING, "asyncckpt"):
                await ckpt.save(1, state(1))
            assert not named(at)
            assert "files for other programs could not be written" in caplog.text
            assert_equal(await ckpt.restore(1), state(1))
            await (await ckpt.start_save(2, state(2)))
            await ckpt.wait()
            assert named(at, 1) and named(at, 2)


CHILD = """
import json, os, sys
from asyncckpt import blocking
from tests.objects.stores import SAVE_OPTIONS, state
ckpt = blocking.Checkpointer(sys.argv[1], save_options=SAVE_OPTIONS,
                             storage_options=json.loads(sys.argv[2]))
pending = ckpt.start_save(1, state(1))
assert pending.result(60).step == 1
if sys.argv[3] == "killed":
    os._exit(7)
"""


@pytest.mark.parametrize("kind", ["s3fs", "obstore"])
@pytest.mark.parametrize("by", ["Checkpointer", "gc"])
async def test_a_process_that_dies_before_the_names_leaves_a_step_that_is_completed_later(
    kind: str, by: str
) -> None:
    async with asyncio.timeout(120), place(kind) as at:
        scheme, options = options_of(kind, at.sim)
        options.pop("session", None)
        gate = Gate()
        at.sim.faults.append(Fault(**NAMES, gate=gate, reset=True))
        url = f"{scheme}://bucket/{at.root}"
        child = children.start(CHILD, url, json.dumps(options), "killed")
        status, _, error = await asyncio.to_thread(children.finish, child)
        assert status == 7, error
        gate.release()
        at.sim.faults.clear()
        assert not named(at)
        if by == "gc":
            await asyncckpt.collect_garbage(url, dry_run=True, storage_options=options)
            assert not named(at)
            assert await asyncckpt.collect_garbage(url, storage_options=options) == []
        async with Checkpointer(at.store(), save_options=SAVE_OPTIONS) as ckpt:
            assert named(at)
            assert await ckpt.steps() == [1]
            assert_equal(await ckpt.restore(), state(1))
            assert (await ckpt.verify(1)).ok


async def test_a_process_that_ends_without_close_waits_for_the_names() -> None:
    async with asyncio.timeout(120), place("obstore") as at:
        scheme, options = options_of("obstore", at.sim)
        gate = Gate()
        at.sim.faults.append(Fault(**NAMES, gate=gate))
        url = f"{scheme}://bucket/{at.root}"
        child = children.start(CHILD, url, json.dumps(options), "ends", warnings="default")
        assert child.stderr is not None
        assert "ends without close()" in await asyncio.to_thread(child.stderr.readline)
        gate.release()
        status, _, error = await asyncio.to_thread(children.finish, child)
        assert status == 0, error
        assert named(at)


def test_without_a_loop_the_result_is_there_when_the_record_stands() -> None:
    async def run() -> None:
        async with place("obstore") as at:
            gate = Gate()
            at.sim.faults.append(Fault(**NAMES, gate=gate))
            scheme, options = options_of("obstore", at.sim)
            url = f"{scheme}://bucket/{at.root}"

            def train() -> None:
                with blocking.Checkpointer(url, storage_options=options) as ckpt:
                    assert ckpt.start_save(1, state(1)).result(60).step == 1
                    assert not named(at)
                    gate.release()
                    ckpt.wait()
                    assert named(at)

            await asyncio.to_thread(train)

    asyncio.run(run())
