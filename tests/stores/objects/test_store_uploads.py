"""Data files on an object store, in one request and in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from asyncckpt.errors import UsageError
from asyncckpt.stores.objects.layout import owner
from asyncckpt.testing.conformance import PAGE, data_path, identity, pattern, record_of, write_file
from asyncckpt.testing.objectstore import Fault, Gate, Simulator
from tests.stores.objects.stores import KINDS, UNRACED, names, opened, whole
from tests.watch import no_blocking_calls

# --------------------------------------------------------------------------------------- data files


@pytest.mark.parametrize("kind", KINDS)
async def test_a_file_that_is_written_in_order_keeps_its_name(sim: Simulator, kind: str) -> None:
    """Its bytes never change, so that a try that arrives late is harmless; the index is one."""
    async with opened(kind, sim) as store:
        sim.faults.append(Fault(kind="put_object", key="*-data", reset=True, applied=True))
        attempt = await store.begin("1", identity("a"))
        path = await write_file(attempt, data_path(identity("a")), pattern(PAGE + 1))
        assert path == data_path(identity("a"))
        await attempt.put("default/small", b"small 0")
        await attempt.publish(record_of(identity("a"), 0, path))
        await whole(sim, store, "1", 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_data_file_whose_answer_was_lost_gets_another_name(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim, policy=UNRACED) as store:
        sim.faults.append(Fault(kind="put_object", key="*-data", reset=True, applied=True))
        attempt = await store.begin("1", identity("a"))
        file = await attempt.create(
            data_path(identity("a")), nbytes=PAGE + 1, window_nbytes=2 * PAGE
        )
        assert await file.write(0, pattern(PAGE + 1))
        await file.seal(PAGE + 1)
        path = file.path
        assert path == data_path(identity("a")) + ".r1" and owner(path) == identity("a")
        await attempt.put("default/small", b"small 0")
        await attempt.publish(record_of(identity("a"), 0, path))
        await whole(sim, store, "1", 0)
        # The orphan is gone, or was gone already when the answer was lost.
        assert [key for key in names(sim) if "/d/" in key] == [f"1/{path}"]


# ---------------------------------------------------------------------------------------- multipart


WINDOW = 5 << 20


# Sessions of resumable uploads to Google cannot be listed: one whose id was lost expires there.
PARTS = ("s3fs", "gcsfs")
LOST = (
    ("s3fs", {"kind": "create_upload", "reset": True, "applied": True}),
    *((kind, {"kind": "put_part", "reset": True, "applied": True}) for kind in PARTS),
    *((kind, {"kind": "put_part", "number": 2, "status": 503}) for kind in PARTS),
    ("s3fs", {"kind": "complete_upload", "reset": True, "applied": True}),
    ("s3fs", {"kind": "complete_upload", "status": 500}),
)


@pytest.mark.parametrize(("kind", "what"), LOST, ids=str)
async def test_a_multipart_upload_survives_lost_answers_and_leaves_no_other(
    sim: Simulator, kind: str, what: dict[str, object]
) -> None:
    data = pattern(2 * WINDOW + 5)
    fault = Fault(**what)
    async with opened(kind, sim) as store:
        sim.faults.append(fault)
        attempt = await store.begin("1", identity("a"))
        file = await attempt.create(
            data_path(identity("a")), nbytes=data.size, window_nbytes=WINDOW
        )
        async with asyncio.TaskGroup() as group:
            for start in range(0, data.size, WINDOW):
                piece = bytearray(data[start : start + WINDOW].tobytes())
                group.create_task(file.write(start, piece))
        await file.seal(data.size)
        await attempt.publish(record_of(identity("a"), 0, file.path))
        files = store.files("1")
        assert await files.read(file.path, max_nbytes=data.size) == data.tobytes()
        await files.close()
    assert fault.happened
    assert not sim.uploads


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("s3fs", "create_upload"),
        ("s3fs", "put_part"),
        ("s3fs", "complete_upload"),
        ("gcsfs", "put_part"),
    ],
)
async def test_an_upload_that_was_cancelled_anywhere_is_aborted_for_good(
    sim: Simulator, kind: str, at: str
) -> None:
    """Twice, and also where the id of the upload was lost with the answer."""
    data = pattern(WINDOW + 5)
    async with opened(kind, sim) as store:
        attempt = await store.begin("1", identity("a"))
        gate = Gate()
        sim.faults.append(Fault(kind=at, applied=True, hang=True, gate=gate))
        file = await attempt.create(
            data_path(identity("a")), nbytes=data.size, window_nbytes=WINDOW
        )

        async def write() -> None:
            await file.write(0, bytearray(data[:WINDOW].tobytes()))
            await file.write(WINDOW, bytearray(data[WINDOW:].tobytes()))
            await file.seal(data.size)

        task = asyncio.ensure_future(write())
        await gate.reached.wait()
        gate.release()
        await until(lambda: bool(sim.uploads) == (at != "complete_upload"))  # it took effect
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        aborting = asyncio.ensure_future(attempt.abort())
        await asyncio.sleep(0)
        aborting.cancel()
        await asyncio.sleep(0)
        aborting.cancel()
        with suppress(asyncio.CancelledError):
            await aborting
        assert not sim.uploads
        assert names(sim) == []


@pytest.mark.parametrize("kind", ("memory", "s3fs", "gcsfs"))
async def test_saving_blocks_no_loop(sim: Simulator, kind: str) -> None:
    data = pattern(2 * WINDOW + 5)
    async with opened(kind, sim, "blocked") as store:
        with no_blocking_calls():
            attempt = await store.begin("1", identity("a"))
            whole = await attempt.create(
                data_path(identity("a")), nbytes=data.size, window_nbytes=WINDOW
            )
            async with asyncio.TaskGroup() as group:
                for start in range(0, data.size, WINDOW):
                    group.create_task(whole.write(start, data[start : start + WINDOW]))
            await whole.seal(data.size)
            serial = await write_file(attempt, data_path(identity("a"), "serial"), data)
            await attempt.put("default/large", memoryview(data)[: 1 << 20])
            await attempt.publish(record_of(identity("a"), 0, serial))
            await store.delete("1")


@pytest.mark.parametrize("kind", ("memory", "gcsfs", "obstore"))
async def test_a_file_written_in_order_may_be_longer_than_a_part(sim: Simulator, kind: str) -> None:
    data = pattern(33 << 20)
    async with opened(kind, sim, "long") as store:
        attempt = await store.begin("1", identity("a"))
        file = await attempt.create(data_path(identity("a")), nbytes=1)
        step = 5 << 20
        for start in range(0, data.size, step):
            assert await file.write(start, data[start : start + step])
        with pytest.raises(UsageError, match="writes come in order"):
            await file.write(0, data[:1])
        await file.seal(data.size - 3)
        await attempt.publish(record_of(identity("a"), 0, file.path))
        files = store.files("1")
        found = await files.read(file.path, max_nbytes=data.size)
        assert found == data[:-3].tobytes()
        await files.close()
        await store.delete("1")
