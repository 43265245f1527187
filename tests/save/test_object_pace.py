"""What overlaps on an object store, where every request that is waited for costs a round trip."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import RestoreOptions, SaveOptions
from asyncckpt.options import MIB
from asyncckpt.ports import Bytes, Reading
from asyncckpt.restore.decode import Check
from asyncckpt.stores.objects.files import ObjectFiles
from asyncckpt.stores.objects.requests.requests import Requests
from tests.simulator import Fault, Gate, Signal, Simulator, simulator

pytestmark = pytest.mark.usefixtures("unraced")

ROOT = "s3://bucket/run"
OPTIONS = SaveOptions(target_data_file_nbytes=8 * MIB, concurrency=4)


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator() as running:
        yield running


def state(count: int = 4, nbytes: int = 7 * MIB) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(count)
    return {f"w{n}": random.integers(0, 256, nbytes, np.uint8) for n in range(count)}


def checkpointer(sim: Simulator, **options: Any) -> asyncckpt.Checkpointer:
    options = {"save_options": OPTIONS, **options}
    return asyncckpt.Checkpointer(ROOT, storage_options=sim.s3_options(), **options)


def equal(found: Any, expected: dict[str, np.ndarray[Any, Any]]) -> bool:
    return set(found) == set(expected) and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


async def test_data_are_sent_before_it_is_known_whether_the_step_exists(sim: Simulator) -> None:
    looking, sent = Gate(), Signal()
    async with asyncio.timeout(60), checkpointer(sim) as ckpt:
        sim.faults.extend(
            [
                Fault(kind="get_object", key="*/checkpoint.json", gate=looking),
                Fault(kind="put_object", key="*/d/*", hook=lambda _: sent.set()),
            ]
        )
        starting = asyncio.create_task(ckpt.start_save(1, state()))
        await looking.reached.wait()
        await sent.wait()
        assert not starting.done()  # the caller hears of an existing step before it goes on
        looking.release()
        await (await starting)
        assert equal(await ckpt.restore(), state())


@pytest.mark.parametrize("how", ["save", "start_save"])
async def test_a_step_that_exists_is_refused_and_nothing_is_left(sim: Simulator, how: str) -> None:
    async with checkpointer(sim) as ckpt:
        await ckpt.save(1, state())
        before = sim.objects("bucket")
        with pytest.raises(asyncckpt.CheckpointExistsError, match="already exists here"):
            await getattr(ckpt, how)(1, state(3))
        assert sim.objects("bucket") == before
        assert not sim.uploads
        assert equal(await ckpt.restore(), state())
        await ckpt.save(2, state(3))  # and the Checkpointer goes on


async def test_the_index_follows_a_file_to_its_new_name_before_the_last_one_is_sent(
    sim: Simulator,
) -> None:
    last, indexed, again = Gate(), Signal(), Signal()

    async def fail_late(_: object) -> None:
        await indexed.wait()

    async with asyncio.timeout(60), checkpointer(sim) as ckpt:
        sim.faults.extend(
            [
                Fault(kind="put_object", key="*/d/*-0", hook=fail_late, status=500),
                Fault(kind="put_object", key="*/d/*-1", gate=last),
                Fault(kind="put_object", key="*-index", hook=lambda _: indexed.set()),
                Fault(kind="put_object", key="*-index1", hook=lambda _: again.set()),
            ]
        )
        saving = asyncio.create_task(ckpt.save(1, state()))
        await last.reached.wait()
        await again.wait()
        assert not saving.done()
        last.release()
        report = await saving
        assert equal(await ckpt.restore(), state())
        info = await ckpt.inspect()
        assert info.save_id == report.save_id
        assert (await ckpt.verify()).ok


@pytest.mark.parametrize(("streams", "least", "most"), [(1, 7, 18), (4, 7, 9)])
async def test_what_is_read_is_cut_evenly_and_the_longest_is_read_first(
    sim: Simulator, streams: int, least: int, most: int
) -> None:
    """A data file of 32.5 MiB is no two requests and a crumb, nor one read for every stream."""
    options = SaveOptions(target_data_file_nbytes=36 * MIB, concurrency=1)
    tree = state(4, 8 * MIB - 4096) | {"small": np.ones(MIB // 2, np.uint8)}
    restore = RestoreOptions(concurrency=streams)
    async with checkpointer(sim, save_options=options, restore_options=restore) as ckpt:
        await ckpt.save(1, tree)
        sim.reset()
        assert equal(await ckpt.restore(), tree)
        reads = [
            r.answered_nbytes
            for r in sim.requests
            if r.kind == "get_object" and "/d/" in r.key and not r.key.endswith("-index")
        ]
    assert sum(reads) >= 32 * MIB
    assert least * MIB <= min(reads)
    assert max(reads) <= most * MIB
    if streams == 1:  # several arrive in any order
        assert reads == sorted(reads, reverse=True)


async def test_a_restore_uses_more_streams_as_soon_as_the_link_is_seen_to_reward_them(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = state(4)
    everybody = Gate()
    seen: list[str] = []

    async def come(request: Any) -> None:
        seen.append(request.key)
        if len(seen) == 4:
            everybody.release()
        if len(seen) > 1:
            await everybody.hold()

    monkeypatch.setattr(ObjectFiles, "reads", lambda *_: 3 if seen else 1)
    async with checkpointer(sim) as ckpt:
        await ckpt.save(1, tree)
        sim.faults.append(Fault(kind="get_object", key="*/d/*-[0-9]", number=0, hook=come))
        async with asyncio.timeout(60):
            assert equal(await ckpt.restore(), tree)
        assert len(seen) == 4


async def test_the_next_read_begins_before_the_last_one_is_checked(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = threading.Event()
    check = Check.__call__

    def checked_late(self: Check, there: int) -> None:
        assert second.wait(30)
        check(self, there)

    monkeypatch.setattr(Check, "__call__", checked_late)
    tree = state()
    async with checkpointer(sim, restore_options=RestoreOptions(concurrency=1)) as ckpt:
        await ckpt.save(1, tree)
        sim.faults.extend(
            [Fault(kind="get_object", key="*/d/*-[0-9]", number=2, hook=lambda _: second.set())]
        )
        assert equal(await ckpt.restore(), tree)


async def test_as_many_reads_are_in_flight_as_were_asked_for(sim: Simulator) -> None:
    """More than a `Checkpointer` begins with by itself."""
    tree = state(20, 5 * MIB)
    everybody = Gate()
    waiting: set[str] = set()

    async def come(request: Any) -> None:
        waiting.add(request.key)
        if len(waiting) == 20:
            everybody.release()
        await everybody.hold()

    restore = RestoreOptions(concurrency=20)
    save = SaveOptions(target_data_file_nbytes=8 * MIB, concurrency=20)
    async with checkpointer(sim, save_options=save, restore_options=restore) as ckpt:
        await ckpt.save(1, tree)
        sim.faults.append(
            Fault(
                kind="get_object",
                number=0,
                when=lambda r: "/d/" in r.key and "index" not in r.key,
                hook=come,
            )
        )
        async with asyncio.timeout(60):
            assert equal(await ckpt.restore(), tree)
        assert len(waiting) == 20


async def test_memory_is_prepared_where_saves_stage(sim: Simulator) -> None:
    """Windows of an object store are no slots of local files."""
    tree = state(6)
    async with checkpointer(sim, save_options=SaveOptions()) as ckpt:
        nbytes = await ckpt.prepare(tree)
        pool = ckpt._session.runtime._window_pool
        assert pool is not None
        assert nbytes == pool.allocated_nbytes >= 6 * 7 * MIB
        await ckpt.save(1, tree)
        assert ckpt._session.runtime._window_pool is pool
        assert pool.allocated_nbytes == nbytes


async def test_no_more_of_a_run_is_in_flight_than_is_allowed(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"large": np.arange(10 * MIB)}
    in_flight, peak = 0, 0
    fill = Requests.fill

    async def counted(self: Any, *args: Any) -> Any:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        try:
            return await fill(self, *args)
        finally:
            in_flight -= 1

    async with checkpointer(
        sim, save_options=SaveOptions(target_data_file_nbytes=96 * MIB, concurrency=1)
    ) as ckpt:
        await ckpt.save(1, tree)
        store = ckpt._session.root.store
        (entry,) = [e for e in await ckpt._session.call(lambda: _data_files(store)).wait()]
        buffer = np.empty(80 * MIB, np.uint8)
        monkeypatch.setattr(Requests, "fill", counted)
        for ahead, expected in ((None, 5), (40 * MIB, 2), (1, 1)):
            peak = 0

            async def read(ahead: int | None = ahead) -> None:
                await store.files("1").read_into(
                    entry, 0, [buffer], how=Reading(ahead_nbytes=ahead)
                )

            await ckpt._session.call(read).wait()
            assert peak == expected


async def _data_files(store: Any) -> list[str]:
    entries = await store.files("1").entries("default/d", max_entries=10)
    return [f"default/d/{entry.name}" for entry in entries if entry.nbytes > 70 * MIB]


async def test_every_stream_sends_as_many_objects_of_one_length_the_longest_first(
    sim: Simulator,
) -> None:
    """What is left over beside large leaves is filled with small ones."""
    streams = 8
    tree = state(8, 5 * MIB) | {f"small{n}": np.full(100_000 + n, n, np.uint8) for n in range(200)}
    everybody = Gate()
    waiting: set[str] = set()

    async def come(request: Any) -> None:
        waiting.add(asked(request))
        if len(waiting) == streams:
            everybody.release()
        await everybody.hold()

    options = SaveOptions(target_data_file_nbytes=8 * MIB, concurrency=streams)
    async with asyncio.timeout(60), checkpointer(sim, save_options=options) as ckpt:
        sim.faults.append(
            Fault(kind="put_object", key="*/d/*-[0-9]*", times=streams, number=1, hook=come)
        )
        await ckpt.save(1, tree)
        sent = {
            asked(request): request.nbytes
            for request in sim.requests
            if request.kind == "put_object"
            and "/d/" in request.key
            and not request.key.endswith("-index")
        }
        assert equal(await ckpt.restore(), tree)
    assert len(sent) == streams
    assert max(sent.values()) <= 1.1 * sum(sent.values()) / len(sent)


def asked(request: Any) -> str:
    """Return the key that was asked for, also of a second request that races a slow one."""
    return re.sub(r"\.r\d+$", "", str(request.key))


def reads(sim: Simulator) -> list[tuple[str, str]]:
    """Requests of a restore, in the order of their heads: kind, and what is read."""
    return [
        (request.kind, "data" if "/d/" in request.key else request.key.partition("/")[2])
        for request in sim.requests
    ]


async def test_a_restore_of_the_newest_step_makes_one_round_trip_before_its_data(
    sim: Simulator,
) -> None:
    """The record of the step that was newest before is read while the names are listed."""
    record = ("get_object", "1/checkpoint.json")
    async with asyncio.timeout(60), checkpointer(sim) as ckpt:
        await ckpt.save(1, state(1))
        await ckpt._session.call(ckpt._session.root.store._context.background.ended).wait()  # type: ignore[attr-defined]
        sim.reset()
        listing, both = Gate(), Signal()
        sim.faults.extend(
            [
                Fault(kind="list_objects", gate=listing),
                Fault(kind="get_object", key="*/checkpoint.json", hook=lambda _: both.set()),
            ]
        )
        restoring = asyncio.create_task(ckpt.restore())
        await listing.reached.wait()
        await both.wait()
        assert ("get_object", "data") not in reads(sim)
        listing.release()
        assert equal(await restoring, state(1))
        found = reads(sim)
        assert sorted(found[:2]) == [record, ("list_objects", "")]
        assert set(found[2:]) == {("get_object", "data")}
        # A step that is named needs no listing.
        sim.faults.clear()
        sim.reset()
        assert equal(await ckpt.restore(1), state(1))
        assert reads(sim)[0] == record and set(reads(sim)[1:]) == {("get_object", "data")}


async def test_a_step_that_another_process_has_saved_or_deleted_is_noticed(sim: Simulator) -> None:
    async with checkpointer(sim) as ckpt, checkpointer(sim) as other:
        await ckpt.save(1, state(1))
        await other.save(2, state(2))
        assert equal(await ckpt.restore(), state(2))
        assert await ckpt.latest_step() == 2
        await other.delete(2)
        assert await ckpt.latest_step() == 1
        assert equal(await ckpt.restore(), state(1))
        await other.delete(1)
        assert await ckpt.latest_step() is None
        with pytest.raises(asyncckpt.CheckpointNotFoundError):
            await ckpt.restore()


async def test_what_is_read_is_copied_once_to_where_it_goes(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also arrays of less than a mebibyte, which direct reads of local files cannot serve."""
    tree = {f"w{n}": np.full(200_000, n, np.uint8) for n in range(3)}
    read = ObjectFiles.read_into
    given: list[Bytes] = []

    async def noted(
        self: ObjectFiles, path: str, offset: int, buffers: Sequence[Bytes], **more: Any
    ) -> None:
        given.extend(buffers)
        await read(self, path, offset, buffers, **more)

    async with asyncio.timeout(60), checkpointer(sim) as ckpt:
        await ckpt.save(1, tree)
        target = {name: np.zeros_like(array) for name, array in tree.items()}
        monkeypatch.setattr(ObjectFiles, "read_into", noted)
        await ckpt.restore_into(target)
    assert equal(target, tree)
    for array in target.values():
        assert any(np.shares_memory(array, buffer) for buffer in given)


async def test_reads_in_flight_take_just_their_bytes_of_the_budget(sim: Simulator) -> None:
    """Each rounded up to slots of 8 MiB, fourteen reads of 4.3 MiB and their copies did not fit."""
    tree = state(24, 43 * MIB // 10)
    save = SaveOptions(
        target_data_file_nbytes=8 * MIB, concurrency=24, host_memory_nbytes=128 * MIB
    )
    everybody = Gate()
    waiting: set[str] = set()

    async def come(request: Any) -> None:
        waiting.add(request.key)
        if len(waiting) == 14:
            everybody.release()
        await everybody.hold()

    restore = RestoreOptions(concurrency=24)
    async with checkpointer(sim, save_options=save, restore_options=restore) as ckpt:
        await ckpt.save(1, tree)
        budget = ckpt._session.runtime.budget
        sim.faults.append(
            Fault(kind="get_object", key="*/d/*-[0-9]*", number=1, times=14, hook=come)
        )
        async with asyncio.timeout(60):
            assert equal(await ckpt.restore(), tree)
        assert budget.in_use == 0
