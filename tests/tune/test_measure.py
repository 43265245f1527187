"""Measuring a store within the limits of bytes and time, without leftovers."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import asyncckpt
from asyncckpt import blocking
from asyncckpt.errors import StoreError, UsageError
from asyncckpt.flow.threads import Workers
from asyncckpt.options import GIB, KIB, MIB
from asyncckpt.reports import Progress
from asyncckpt.stores.objects.clients.client import Take
from asyncckpt.stores.objects.clients.fsspec_apis import S3Client
from asyncckpt.stores.objects.clients.opening import open_client
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.tune.measure import POLICY, Measurement
from asyncckpt.tune.recommend import GridPoint
from tests.simulator import Fault, Gate, Simulator, simulator
from tests.stores.objects.hasty import HASTY

FEW = 65 * MIB
"""Enough for the first point and a shorter one, but none of the large ones."""


@pytest.fixture(scope="module")
def server() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(server: Simulator) -> Iterator[Simulator]:
    server.faults.clear()
    server.clear()
    yield server
    server.faults.clear()


def options(sim: Simulator, library: str) -> dict[str, Any]:
    if library == "obstore":
        return {"client": sim.obstore_s3("bucket")}
    return {"client": "fsspec", **sim.s3_options()}


@pytest.mark.parametrize("library", ["obstore", "s3fs"])
async def test_a_store_is_measured_and_left_as_it_was(sim: Simulator, library: str) -> None:
    sim.put("bucket", "run/7/checkpoint.json", b"of somebody")
    seen: list[Progress] = []
    report = await asyncckpt.tune(
        "s3://bucket/run",
        max_nbytes=FEW,
        storage_options=options(sim, library),
        progress=seen.append,
    )
    assert sim.objects("bucket") == {"run/7/checkpoint.json": b"of somebody"}
    sim.delete("bucket", "run/7/checkpoint.json")
    assert report.location == "s3://bucket/run"
    assert report.client == library
    assert {(point.nbytes, point.streams) for point in report.points} == {
        (4 * MIB, 4),
        (4 * MIB, 1),
    }
    assert {point.direction for point in report.points} == {"put", "get"}
    assert report.moved_nbytes == 64 * MIB + 64 * KIB
    assert seen[-1].done_nbytes == report.moved_nbytes
    assert report.target_data_file_nbytes == 4 * MIB
    assert report.concurrency in (1, 4)
    assert report.nbytes_per_s > 0
    assert 0 < report.put_latency_s < 30
    assert report.reason in str(report)


def test_the_blocking_twin_does_the_same(sim: Simulator) -> None:
    report = blocking.tune(
        "s3://bucket/run", max_nbytes=FEW, storage_options=options(sim, "obstore")
    )
    assert report.points
    assert sim.objects("bucket") == {}


async def test_a_progress_callback_that_raises_is_a_note(sim: Simulator) -> None:
    def broken(progress: Progress) -> None:
        raise RuntimeError("no terminal")

    report = await asyncckpt.tune(
        "s3://bucket/run",
        max_nbytes=FEW,
        storage_options=options(sim, "obstore"),
        progress=broken,
    )
    assert report.points
    assert report.notes[-1].startswith("the progress callback raised RuntimeError: no terminal")


@pytest.mark.parametrize("times", [1, 2])
async def test_a_measurement_that_is_cancelled_removes_what_it_wrote(
    sim: Simulator, times: int
) -> None:
    gate = Gate()
    sim.faults.append(Fault(kind="get_object", number=3, gate=gate))
    task = asyncio.create_task(
        asyncckpt.tune("s3://bucket/run", max_nbytes=FEW, storage_options=options(sim, "obstore"))
    )
    await gate.reached.wait()
    assert sim.objects("bucket")
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    gate.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sim.objects("bucket") == {}


CHILD = """
import json, signal, sys
from asyncckpt import blocking

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where this runs in the background
try:
    blocking.tune("s3://bucket/run", storage_options=json.loads(sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_removes_what_was_written(sim: Simulator) -> None:
    gate = Gate()
    sim.faults.append(Fault(kind="get_object", number=3, gate=gate))
    given = json.dumps({"client": "fsspec", **sim.s3_options()})
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, given], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            gate.reached.wait_blocking()
            assert sim.objects("bucket")
            child.send_signal(signal.SIGINT)
            gate.release()
            out, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert (child.returncode, out) == (0, "interrupted\n")
    assert sim.objects("bucket") == {}


async def test_orphans_of_lost_answers_are_removed_too(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="put_object", number=10, applied=True, reset=True))
    report = await asyncckpt.tune(
        "s3://bucket/run", max_nbytes=FEW, storage_options=options(sim, "obstore")
    )
    assert report.points
    assert sim.objects("bucket") == {}


async def measure(
    sim: Simulator,
    *,
    planned: tuple[GridPoint, ...] = (),
    policy: RequestPolicy = POLICY,
    max_s: float = 60.0,
) -> asyncckpt.TuneReport:
    """A measurement on the test's own loop, so that its parts can be set."""
    workers = Workers(1, "test-tune")
    client = open_client(
        "s3://bucket/run", storage_options=options(sim, "obstore"), workers=workers
    )
    try:
        work = Measurement(
            Requests(client, policy=policy),
            max_nbytes=FEW,
            max_s=max_s,
            budget_nbytes=GIB,
            body=random_body,
        )
        work.planned = planned or work.planned
        return await work.run()
    finally:
        await client.close()
        workers.shutdown()


async def random_body(nbytes: int) -> bytes:
    return random.Random(0).randbytes(nbytes)


async def test_reads_are_measured_as_restores_make_them(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    receive = S3Client.receive

    async def counted(self: S3Client, key: str, start: int, stop: int, take: Take) -> None:
        received.append(stop - start)
        await receive(self, key, start, stop, take)

    monkeypatch.setattr(S3Client, "receive", counted)
    report = await asyncckpt.tune(
        "s3://bucket/run", max_nbytes=FEW, storage_options=options(sim, "s3fs")
    )
    assert sum(received) == 32 * MIB
    assert {point.direction for point in report.points} == {"put", "get"}


@pytest.mark.parametrize(("kind", "puts"), [("put_object", 1), ("get_object", 2)])
async def test_when_time_runs_out_what_was_measured_is_reported(
    sim: Simulator, kind: str, puts: int
) -> None:
    planned = (GridPoint(4 * MIB, 1, 1), GridPoint(1 * MIB, 1, 1), GridPoint(8 * MIB, 1, 1))
    sim.faults.append(Fault(kind=kind, key="*/1-0", hang=True, times=9))
    report = await measure(sim, planned=planned, max_s=5.0)
    assert [point.direction for point in report.points] == ["put", "get", "put"][: puts + 1]
    assert report.notes == (
        "1 of 3 points were measured within 5 s; allow more time for the others",
    )
    assert sim.objects("bucket") == {}


async def test_a_store_so_slow_that_nothing_was_measured_is_an_error(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="get_object", hang=True, number=0))
    with pytest.raises(StoreError, match=r"nothing was measured within 0\.3 s") as caught:
        await measure(sim, max_s=0.3)
    assert caught.value.retryable
    assert sim.objects("bucket") == {}


async def test_a_measurement_that_ends_before_its_first_reads_is_an_error(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="get_object", key="*/0-0", hang=True, number=0))
    with pytest.raises(StoreError, match="nothing was measured within 1 s"):
        await measure(sim, planned=(GridPoint(4 * MIB, 1, 1),), max_s=1.0)
    assert sim.objects("bucket") == {}


async def test_a_store_that_refuses_says_what_to_do(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="put_object", status=403, code="AccessDenied", number=0))
    with pytest.raises(StoreError, match="measuring failed: these credentials may not") as caught:
        await measure(sim)
    assert caught.value.location is not None
    assert caught.value.location.startswith("s3://bucket/run/asyncckpt-tune-")


async def test_a_removal_that_fails_does_not_hide_why_the_measurement_did(sim: Simulator) -> None:
    kinds = ("put_object", "list_objects")
    sim.faults.append(Fault(kind=kinds, status=403, code="AccessDenied", number=0))
    with pytest.raises(StoreError, match="measuring failed") as caught:
        await measure(sim)
    assert "could not be removed" in caught.value.__notes__[0]


async def test_what_could_not_be_removed_is_named(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="list_objects", status=403, code="AccessDenied", number=0))
    with pytest.raises(StoreError, match="could not be removed") as caught:
        await measure(sim, policy=HASTY)
    assert str(caught.value.location).startswith("s3://bucket/run/asyncckpt-tune-")
    assert "by hand" in str(caught.value)
    for key in sim.objects("bucket"):
        sim.delete("bucket", key)


async def test_wrong_arguments_are_refused_before_anything_is_sent(sim: Simulator) -> None:
    url, given = "s3://bucket/run", options(sim, "obstore")
    with pytest.raises(UsageError, match="this is not the URL of one"):
        await asyncckpt.tune("/data/run")
    with pytest.raises(UsageError, match="max_s=0: pass a positive number"):
        await asyncckpt.tune(url, max_s=0, storage_options=given)
    with pytest.raises(UsageError, match="max_nbytes=True: pass a positive number"):
        await asyncckpt.tune(url, max_nbytes=True, storage_options=given)
    wrong: Any = 5
    with pytest.raises(UsageError, match="progress=5"):
        await asyncckpt.tune(url, storage_options=given, progress=wrong)
    with pytest.raises(UsageError, match="the smallest measurement moves more") as caught:
        await asyncckpt.tune(url, max_nbytes=32 * MIB, storage_options=given)
    assert caught.value.expected > 32 * MIB
    assert sim.requests == []


def test_both_facades_take_the_same_arguments() -> None:
    own = inspect.signature(blocking.tune).parameters.values()
    other = inspect.signature(asyncckpt.tune).parameters.values()
    assert [(p.name, p.kind, p.default) for p in own] == [
        (p.name, p.kind, p.default) for p in other
    ]
