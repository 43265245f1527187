"""What obstore copies, holds and lets go of, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obstore.store import AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store

from asyncckpt import Checkpointer, SaveOptions, verify
from asyncckpt.flow.budget import ByteBudget
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool, map_pages
from asyncckpt.flow.threads import Workers
from asyncckpt.options import MIB
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.clients.obstore_client import (
    ObstoreClient,
    obstore_client,
)
from tests import children
from tests.simulator import LOOPBACK, Fault, Gate, Simulator, simulator
from tests.stores.objects.clients.opened import obstore_from
from tests.watch import nothing_left_behind, open_files, pending_tasks

BODY_NBYTES = 48 * MIB
"""Far more than the buffers of a connection hold on both sides."""


def pages(nbytes: int) -> np.ndarray:
    mapping, start = map_pages(nbytes)
    return np.frombuffer(mapping, np.uint8)[start : start + nbytes]


@pytest.fixture(scope="module")
def running() -> Iterator[Simulator]:
    with simulator(verify_checksums=False) as sim:
        yield sim


@pytest.fixture
def slow() -> Iterator[Simulator]:
    """A server that needs seconds to take a body of `BODY_NBYTES`."""
    with simulator(replace(LOOPBACK, put_bandwidth=8e6), verify_checksums=False) as sim:
        yield sim


@pytest.fixture
def sim(running: Simulator) -> Simulator:
    running.clear()
    running.faults.clear()
    return running


def client_of(sim: Simulator) -> ObstoreClient:
    client = obstore_from("s3://bucket/root", sim.s3_options())
    assert client is not None
    return client


def status_nbytes(name: str) -> int:
    if sys.platform != "linux":  # the peak since the start: what it grows by is a lower bound
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


async def until(condition: Any) -> None:
    """`condition()` holds. Waits in turns: what happens on threads of Rust cannot be awaited."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


# ---------------------------------------------------------------------------------------- copies


async def test_a_body_is_sent_from_where_it_lies(slow: Simulator) -> None:
    client = client_of(slow)
    await client.put("small", b"x")
    body = pages(BODY_NBYTES)
    body.fill(7)
    before = status_nbytes("VmRSS")
    sending = asyncio.ensure_future(client.put("large", body))
    await until(lambda: len(slow.requests) == 2)
    held = []
    for _ in range(20):
        await asyncio.sleep(0.005)
        held.append(status_nbytes("VmRSS") - before)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert max(held) < (client.traits.put_copies + 1 / 4) * BODY_NBYTES
    await client.close()


async def test_an_answer_is_held_once(sim: Simulator) -> None:
    sim.put("bucket", "root/large", bytes(BODY_NBYTES))
    client = client_of(sim)
    await client.get("large", 0, 1)
    gc.collect()
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_nbytes("VmRSS")
    answer = memoryview(await client.get("large", 0, BODY_NBYTES))
    peak = status_nbytes("VmHWM") - before
    assert peak < (client.traits.get_copies + 1 / 4) * BODY_NBYTES
    # It is obstore's own buffer, of which views make no copy.
    assert answer.readonly
    assert np.frombuffer(answer, np.uint8).nbytes == BODY_NBYTES
    await client.close()


# ----------------------------------------------------------------------------------- cancellation


async def test_a_cancelled_body_is_held_until_it_is_not_sent_any_more(slow: Simulator) -> None:
    client = client_of(slow)
    memory = pages(BODY_NBYTES)
    memory.fill(7)
    body = memory[:]
    collected = threading.Event()
    weakref.finalize(body, collected.set)
    sending = asyncio.ensure_future(client.put("a", body))
    await until(lambda: slow.requests)
    # The very object that was passed is held, not only its memory.
    del body
    gc.collect()
    assert not collected.is_set()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    del sending
    await until(collected.is_set)
    # The connection is closed in the middle of the body, so that no object comes of it.
    await until(lambda: slow.requests[0].ended_s)
    assert slow.stats().received_nbytes < BODY_NBYTES
    assert slow.objects() == {}
    await client.close()


async def test_memory_of_a_cancelled_body_is_discarded_and_its_budget_returns(
    slow: Simulator,
) -> None:
    """As the pipeline does it: the slot is forgotten; the budget returns with its memory."""
    client = client_of(slow)
    workers = Workers(2, "test-clients")
    try:
        budget = ByteBudget(BODY_NBYTES)
        pool = SlotPool(budget, workers, AnonymousMemory(), slot_nbytes=BODY_NBYTES)
        (slot,) = await pool.take()
        assert not budget.try_acquire(1)
        sending = asyncio.ensure_future(client.put("a", slot.body(BODY_NBYTES)))
        await until(lambda: slow.requests)
        pool.discard([slot])
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        del sending
        await until(lambda: not pool.discarded)
        assert budget.try_acquire(budget.capacity)
        budget.release(budget.capacity)
        pool.close()
    finally:
        workers.shutdown()
    await client.close()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_body_is_let_go_when_its_request_has_ended(sim: Simulator, refused: bool) -> None:
    """Without any further call of the library, and also when it was refused under way."""
    if refused:
        sim.faults.append(Fault(kind="put_object", number=0, early=True, status=503))
    client = client_of(sim)
    for _ in range(10):
        body = np.full(BODY_NBYTES // 4, 7, np.uint8)
        collected = threading.Event()
        weakref.finalize(body, collected.set)
        if refused:
            with pytest.raises(RequestError):
                await client.put("a", body)
        else:
            await client.put("a", body)
        del body
        await until(collected.is_set)
    await client.close()


async def test_a_cancelled_conditional_create_leaves_all_or_nothing(sim: Simulator) -> None:
    client = client_of(sim)
    body = np.arange(3 * MIB, dtype=np.uint8)
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
        sending = asyncio.ensure_future(client.put(f"{delay_s}", body, create=True))
        await asyncio.sleep(delay_s)
        sending.cancel()
        try:
            await sending
        except asyncio.CancelledError:
            pass
    await client.close()
    await until(lambda: all(logged.ended_s for logged in sim.requests))
    assert all(data == body.tobytes() for data in sim.objects().values())


# ----------------------------------------------------------------------- connections and requests


async def test_a_hundred_requests_are_in_flight_at_once(sim: Simulator) -> None:
    gate = Gate()
    sim.faults.append(Fault(number=0, gate=gate))
    client = client_of(sim)
    async with asyncio.TaskGroup() as group:
        for i in range(100):
            group.create_task(client.put(f"{i}", b"x"))
        await until(lambda: sim.stats().in_flight == 100)
        gate.release()
    await client.close()


async def test_one_call_is_one_request(sim: Simulator) -> None:
    client = client_of(sim)
    await client.put("a", b"content")
    await client.put("b", b"content", create=True)
    await client.get("a", 2, 4)
    await client.get("a", 7, 9)
    await client.size("a")
    await client.list("", recursive=True, limit=10)
    await client.list("", recursive=False, limit=10)
    await client.delete([f"{i}" for i in range(1000)])
    assert [logged.kind for logged in sim.requests] == [
        "put_object",
        "put_object",
        "get_object",
        "get_object",
        "get_object",
        "list_objects",
        "list_objects",
        "delete_objects",
    ]
    assert [logged.headers.get("range") for logged in sim.requests[2:5]] == [
        "bytes=2-3",
        "bytes=7-8",
        "bytes=0-0",
    ]
    assert [logged.headers.get("if-none-match") for logged in sim.requests[:2]] == [None, "*"]
    await client.close()


async def test_no_call_blocks_the_loop(sim: Simulator, no_blocking: list[str]) -> None:
    client = await asyncio.to_thread(client_of, sim)
    body = np.full(BODY_NBYTES // 4, 7, np.uint8)
    await client.put("a", body)
    await client.get("a", 0, body.nbytes)
    await client.size("a")
    await client.list("", recursive=True, limit=10)
    await client.list("", recursive=False, limit=10)
    await client.delete(["a", "b"])
    await client.close()


async def test_a_listing_of_all_asks_for_no_more_pages_than_its_limit_needs(
    sim: Simulator,
) -> None:
    for i in range(2500):
        sim.put("bucket", f"root/{i:04}", b"")
    client = client_of(sim)
    assert len(await client.list("", recursive=True, limit=10)) == 11
    assert len(sim.requests) <= 2  # one, and perhaps one that was asked for ahead
    sim.reset()
    assert len(await client.list("", recursive=True, limit=5000)) == 2500
    assert len(await client.list("", recursive=False, limit=1500)) == 1501
    assert len(sim.requests) == 6
    await client.close()


async def test_markers_of_directories_are_left_out(sim: Simulator) -> None:
    for key in ("", "empty/", "d/", "d/e/", "d/e/f/", "d/e/f/x", "d/g"):
        sim.put("bucket", f"root/{key}", b"")
    client = client_of(sim)
    everything = await client.list("", recursive=True, limit=100)
    # That of a directory with nothing in it looks like an empty object to obstore.
    assert [entry.key for entry in everything] == ["d/e/f/x", "d/g", "empty"]
    level = await client.list("d", recursive=False, limit=100)
    assert [(entry.key, entry.is_prefix) for entry in level] == [("d/e", True), ("d/g", False)]
    await client.close()


async def test_a_closed_client_leaves_no_connection_and_no_thread(sim: Simulator) -> None:
    async def use() -> None:
        client = client_of(sim)
        await client.put("a", b"x")
        await client.get("a", 0, 1)
        await client.close()

    await use()  # the threads of obstore are for the life of the process
    files, tasks, threads = open_files(), pending_tasks(), threading.active_count()
    with nothing_left_behind():
        for _ in range(5):
            await use()
        # The service closes its side of a connection when it sees that ours is closed.
        await until(lambda: open_files() <= files and pending_tasks().keys() <= tasks.keys())
    assert threading.active_count() <= threads


ENDING = """
import asyncio, sys
import numpy as np
from tests.stores.objects.clients.opened import obstore_from
from tests.simulator import Fault, Gate, simulator

async def main():
    gate = Gate()
    sim = simulator(faults=[Fault(number=0, early=True, gate=gate)])
    await sim.__aenter__()
    client = obstore_from("s3://bucket/root", sim.s3_options())
    body = np.ones(16 << 20, np.uint8)
    sending = [asyncio.ensure_future(client.put(f"{i}", body)) for i in range(8)]
    await gate.reached.wait()
    if sys.argv[1] == "cancelled":
        for task in sending:
            task.cancel()
    print("ending", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["cancelled", "sending"])
def test_a_process_ends_while_requests_are_sent(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, how], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "ending\n"), done.stderr


# ---------------------------------------------------------------------------------- store objects


class Derived(S3Store):
    """A user's own class of stores."""


class DerivedMemory(MemoryStore):
    """Another one."""


async def test_store_objects_are_named_by_bucket_and_prefix(tmp_path: Path) -> None:
    keys = {"access_key_id": "AKIAEXAMPLE", "secret_access_key": "a-secret", "region": "us-east-1"}
    azure = AzureStore("container", account_name="account", account_key="c2VjcmV0")
    for store, prefix, url in (
        (S3Store("bucket", **keys), "", "s3://bucket"),
        (S3Store("bucket", prefix="own", **keys), "runs/1/", "s3://bucket/own/runs/1"),
        (GCSStore("bucket", skip_signature=True), "runs", "gs://bucket/runs"),
        (azure, "runs", "az://container/runs"),
        (MemoryStore(), "runs", "memory://runs"),
        (DerivedMemory(), "runs", "memory://runs"),
        (LocalStore(), "runs", "local://runs"),
        (HTTPStore.from_url("https://user:a-secret@host.invalid/x"), "runs", "https://runs"),
        (Derived("bucket", **keys), "runs", "s3://bucket/runs"),
    ):
        client = obstore_client(store, prefix)
        assert client.url == url
        assert "secret" not in repr(client)
        assert client.traits.name == "obstore"
        await client.close()


@pytest.mark.parametrize("kind", [S3Store, Derived])
async def test_a_store_object_keeps_its_options_but_not_its_retries(
    sim: Simulator, kind: type[S3Store]
) -> None:
    sim.faults.append(Fault(number=0, status=503))
    client = obstore_client(kind("bucket", prefix="own", **sim.obstore_s3_config()), "below")
    begun_s = time.monotonic()
    with pytest.raises(RequestError):
        await client.get("a", 0, 1)
    assert time.monotonic() - begun_s < 30
    assert len(sim.requests) == 1
    sim.faults.clear()
    await client.put("a", b"x")
    assert sim.objects() == {"own/below/a": b"x"}
    await client.close()


ENDS_AT_ONCE = """
import asyncio, gc, os, sys
from obstore.store import S3Store
from asyncckpt.stores.objects.clients.obstore_client import obstore_client

async def main():
    config = {"endpoint": sys.argv[1], "access_key_id": "key", "secret_access_key": "secret",
              "region": "us-east-1", "virtual_hosted_style_request": "false"}
    client = obstore_client(S3Store("bucket", config=config, client_options={"allow_http": True}))
    await client.put("key", b"body")

gc.freeze()  # a child whose collector looks at all that is imported copies its pages
children = []
while len(children) < 60 and (pid := os.fork()):
    children.append(pid)
if len(children) == 60:
    print([os.waitpid(pid, 0)[1] for pid in children])
else:
    asyncio.run(main())
"""


def test_a_process_that_ends_right_after_a_request_is_not_aborted(sim: Simulator) -> None:
    assert children.output(ENDS_AT_ONCE, sim.s3_endpoint) == f"{[0] * 60}\n"


FORKS = """
import json, os, signal, sys, warnings
import numpy as np
from asyncckpt import UsageError, blocking
from obstore.store import S3Store

warnings.filterwarnings("ignore", message=".*fork.*")
options = json.loads(sys.argv[1])
config = {"endpoint": options["endpoint_url"], "access_key_id": "key",
          "secret_access_key": "secret", "region": "us-east-1",
          "virtual_hosted_style_request": "false"}
store = S3Store("bucket", config=config, client_options={"allow_http": True})
tree = {"w": np.arange(5)}

def child(options):
    pid = os.fork()
    if not pid:
        signal.alarm(30)  # a request of obstore would never end
        try:
            blocking.save("s3://bucket/child", tree, storage_options=options)
            print("saved", flush=True)
        except UsageError as error:
            print(error, flush=True)
        finally:
            os._exit(0)
    assert not os.waitpid(pid, 0)[1]

blocking.save("s3://bucket/parent", tree, storage_options=options)
child(options)
child({**options, "client": "obstore"})
child({"client": store})
sys.modules["s3fs"] = None  # as if it were not installed
child(options)
"""


def test_obstore_used_before_a_fork_is_replaced_or_refused_in_the_child(sim: Simulator) -> None:
    refusal = (
        "s3://bucket: obstore was used before this process was forked, and its threads do not "
        "survive a fork; start processes with spawn, or pass "
        'storage_options={"client": "fsspec"}'
    )
    printed = children.output(FORKS, json.dumps(sim.s3_options()))
    assert printed.splitlines() == ["saved", refusal, refusal, refusal]


async def test_a_save_to_a_memory_store_does_not_change_with_its_buffers() -> None:
    """The store keeps what it is given, and the buffers of a save are filled again and again."""
    rng = np.random.default_rng(0)
    tree = {str(n): rng.integers(0, 256, MIB, np.uint8) for n in range(128)}
    options = SaveOptions(host_memory_nbytes=64 * MIB, target_data_file_nbytes=8 * MIB)
    location, given = "memory://root", {"client": MemoryStore()}
    async with Checkpointer(location, storage_options=given, save_options=options) as ckpt:
        await ckpt.save(1, tree)
        found = await ckpt.restore(1)
        assert all(np.array_equal(found[name], values) for name, values in tree.items())
        assert (await verify(f"{location}/1", storage_options=given)).damages == ()
