"""The commit on an object store, whatever answers are lost and whoever else writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    SaveError,
    StoreError,
    UsageError,
)
from asyncckpt.stores.objects import attempt as attempts
from asyncckpt.stores.objects.layout import fixed_owner, is_probe, owner
from asyncckpt.stores.objects.store import COLLECT_MIN_S, ObjectStore
from asyncckpt.testing.conformance import (
    PAGE,
    data_path,
    expect,
    expect_no_record,
    fill,
    identity,
    pattern,
    record_of,
    save,
    write_file,
)
from asyncckpt.testing.objectstore import Fault, Gate, Logged, Request, Simulator, simulator
from tests.stores.objects.stores import ROOT, opened
from tests.watch import no_blocking_calls

KINDS = ("s3fs", "gcsfs", "obstore")
FOREVER = 1 << 30
RECORD_PUT = {"kind": "put_object", "key": "*/checkpoint.json"}


@pytest.fixture(scope="module")
def simulators() -> Iterator[Simulator]:
    with simulator() as sim:
        yield sim


@pytest.fixture
def sim(simulators: Simulator) -> Iterator[Simulator]:
    simulators.faults.clear()
    simulators.clear()
    yield simulators
    simulators.faults.clear()
    assert not simulators.uploads
    simulators.clear()


def names(sim: Simulator) -> list[str]:
    """Keys below the root, without those of the experiment that runs beside a first save."""
    keys = [key.removeprefix(f"{ROOT}/") for key in sim.stored()]
    return [key for key in keys if not is_probe(key)]


def of(sim: Simulator, text: str) -> list[str]:
    """Keys that carry this save id."""
    return [key for key in names(sim) if identity(text) in key]


async def whole(sim: Simulator, store: ObjectStore, name: str, seed: int) -> None:
    """The checkpoint of this seed is whole, its fixed names and Orbax's mark included."""
    await expect(store, name, seed)
    assert sim.get("bucket", f"{ROOT}/{name}/default/small") == b"small %d" % seed


def writes(sim: Simulator) -> list[Logged]:
    return [
        request for request in sim.requests if request.kind not in ("get_object", "list_objects")
    ]


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", ("obstore", "gcsfs"))
async def test_a_commit_is_one_round_trip_and_one_more_for_the_fixed_names(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store:
        await save(store, "0", "first")  # the store is known from here on
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        await attempt.put("default/_METADATA", b"metadata")
        sim.reset()
        await attempt.publish(record)
        log = writes(sim)
    key = f"{ROOT}/1/"
    assert [request.key for request in log[:1]] == [f"{key}checkpoint.json"]
    second = {request.key for request in log[1:3]}
    assert second == {f"{key}default/small", f"{key}default/_METADATA"}
    assert all(request.began_s >= log[0].ended_s for request in log[1:3])
    if kind == "gcsfs":
        marks = {request.key for request in log[3:5]}
        assert marks == {f"{key}default/commit_success.txt", f"{key}commit_success.txt"}
        done_s = max(request.ended_s for request in log[1:3])
        assert all(request.began_s >= done_s for request in log[3:5])


async def test_nothing_before_the_record_has_a_name_that_others_could_write(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        await attempt.put("default/more", b"more")
        assert all(identity("a") in key for key in names(sim))
        # The contents of fixed names are durable before the record, in objects of the attempt.
        assert len([key for key in names(sim) if fixed_owner(key.removeprefix("1/"))]) == 2
        with pytest.raises(UsageError, match="another attempt could write this name"):
            await attempt.create("default/d/data", nbytes=1)
        await attempt.publish(record)


async def test_files_that_are_put_together_are_kept_in_one_object(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(attempt.put(f"default/{number}", b"%d" % number))
        assert of(sim, "a") == [f"1/.asyncckpt-{identity('a')}-fixed-0"]
        await attempt.publish(record_of(identity("a")))
        assert sim.get("bucket", f"{ROOT}/1/default/7") == b"7"


# ------------------------------------------------------------------------------- answers of a PUT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overwrite", (False, True))
@pytest.mark.parametrize(
    "fault",
    [
        {"reset": True, "applied": True},
        {"close": True, "applied": True},
        {"status": 500, "applied": True},
        {"status": 503, "times": 2},
        {"status": 409},
        {"status": 429},
        {"reset": True},
    ],
    ids=str,
)
async def test_a_lost_or_refused_answer_to_the_record_does_not_fail_the_save(
    sim: Simulator, kind: str, overwrite: bool, fault: dict[str, object]
) -> None:
    async with opened(kind, sim) as store:
        if overwrite:
            await save(store, "1", "old", 1)
        sim.faults.append(Fault(**RECORD_PUT, **fault))
        await save(store, "1", "a", 7, overwrite=overwrite)
        assert sim.faults[0].happened
        await whole(sim, store, "1", 7)
        assert not of(sim, "old")


async def test_without_any_answer_everything_is_kept_and_the_error_says_what_is_unknown(
    sim: Simulator,
) -> None:
    """Whatever arrives later finds a whole checkpoint behind it."""
    async with opened("obstore", sim) as store:
        sim.faults.append(Fault(**RECORD_PUT, number=0, status=503))
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        with pytest.raises(SaveError, match="visible and durable is unknown") as caught:
            await attempt.publish(record)
        assert "checkpoint.json" in str(caught.value) and "asyncckpt gc" in str(caught.value)
        assert not caught.value.visible and not caught.value.durable
        await attempt.abort()
        await expect_no_record(store, "1")
        sim.faults.clear()
        sim.put("bucket", f"{ROOT}/1/checkpoint.json", record)  # the request arrives after all
        await expect(store, "1")
        await store.sweep()
        await whole(sim, store, "1", 0)


async def test_an_answer_that_cannot_be_read_back_is_unknown_too(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        sim.faults += [
            Fault(**RECORD_PUT, number=0, status=500, applied=True),
            Fault(kind="get_object", number=0, status=503),
        ]
        with pytest.raises(SaveError, match="unknown"):
            await attempt.publish(record)
        sim.faults.clear()
        await expect(store, "1")


async def test_a_refusal_for_good_names_the_object_and_the_right(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        sim.faults.append(Fault(**RECORD_PUT, number=0, status=403))
        with pytest.raises(
            SaveError, match=r"checkpoint\.json: writing the commit record"
        ) as caught:
            await save(store, "1", "a")
        assert "not visible" in str(caught.value) and "s3:PutObject" in str(caught.value)
        await expect_no_record(store, "1")


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_no_record_is_reported_and_only_replaced_when_asked(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store:
        sim.put("bucket", f"{ROOT}/1/checkpoint.json", b"torn")
        with pytest.raises(
            CheckpointExistsError, match="4 bytes that are no commit record"
        ) as caught:
            await save(store, "1", "a")
        assert caught.value.found == b"torn" and "overwrite=True" in str(caught.value)
        assert names(sim) == ["1/checkpoint.json"]
        await save(store, "1", "b", 2, overwrite=True)
        await whole(sim, store, "1", 2)


# --------------------------------------------------------------------------------- other writers


async def test_a_writer_that_was_paused_before_its_record_changes_nothing(sim: Simulator) -> None:
    async with opened("obstore", sim) as paused, opened("obstore", sim) as other:
        gate = Gate()
        sim.faults.append(Fault(**RECORD_PUT, gate=gate))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(outcome(save(paused, "1", "a", 1)))
            await gate.reached.wait()
            await save(other, "1", "b", 2)
            before = sim.objects()
            gate.release()
        assert isinstance(task.result(), CheckpointExistsError)
        assert sim.objects() == {key: data for key, data in before.items() if not in_key(key, "a")}
        await whole(sim, other, "1", 2)


async def test_fixed_names_of_a_winner_that_was_paused_do_not_stay_in_its_successors(
    sim: Simulator,
) -> None:
    """It writes them late, sees that another record stands, and writes that one's again."""
    async with opened("obstore", sim) as other:
        async with opened("obstore", sim) as paused:
            gate = Gate()
            sim.faults.append(Fault(kind="put_object", key="*/default/small", gate=gate))
            async with asyncio.TaskGroup() as group:
                group.create_task(save(paused, "1", "a", 1))
                await gate.reached.wait()
                await save(other, "1", "b", 2, overwrite=True)
                assert not of(sim, "a")
                gate.release()
        await whole(sim, other, "1", 2)


async def test_fixed_names_of_a_winner_that_was_paused_do_not_stay_after_a_deletion(
    sim: Simulator,
) -> None:
    async with opened("gcsfs", sim) as other:
        async with opened("gcsfs", sim) as paused:
            gate = Gate()
            sim.faults.append(Fault(kind="put_object", key="*/default/small", gate=gate))
            async with asyncio.TaskGroup() as group:
                group.create_task(save(paused, "1", "a", 1))
                await gate.reached.wait()
                await other.delete("1")
                gate.release()
        assert names(sim) == []


async def test_a_deletion_leaves_the_save_that_took_the_name_meanwhile_whole(
    sim: Simulator,
) -> None:
    async with opened("obstore", sim) as deleting, opened("obstore", sim) as other:
        await save(other, "1", "a", 1)
        gate = Gate()
        # The record is gone; what follows is held.
        sim.faults.append(Fault(kind=("delete_objects", "delete_object"), number=2, gate=gate))
        async with asyncio.TaskGroup() as group:
            group.create_task(deleting.delete("1"))
            await gate.reached.wait()
            await save(other, "1", "b", 2)
            gate.release()
        await whole(sim, other, "1", 2)
        assert not of(sim, "a")


async def test_concurrent_overwriters_leave_one_whole_checkpoint(sim: Simulator) -> None:
    async with opened("obstore", sim) as first:
        for turn in range(5):
            await save(first, "1", f"old{turn}", 9, overwrite=True)
            async with opened("obstore", sim) as second, opened("obstore", sim) as third:
                async with asyncio.TaskGroup() as group:
                    for number, store in enumerate((first, second, third)):
                        name = f"{turn}-{number}"
                        group.create_task(save(store, "1", name, number, overwrite=True))
            files = first.files("1")
            record = await files.read("checkpoint.json", max_nbytes=200)
            await files.close()
            await whole(sim, first, "1", int(record.split()[1]))
            assert not of(sim, f"old{turn}")


async def test_an_overwrite_removes_what_only_the_old_one_had(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        await attempt.put("default/_METADATA", b"old")
        await attempt.publish(record)
        sim.put("bucket", f"{ROOT}/1/notes.txt", b"a person's")
        sim.put("bucket", f"{ROOT}/1/default/d/{identity('living')}-0", b"another attempt's")
        await save(store, "1", "b", 2, overwrite=True)
        await whole(sim, store, "1", 2)
        assert {key for key in names(sim) if identity("b") not in key} == {
            "1/checkpoint.json",
            "1/default/small",
            "1/notes.txt",
            f"1/default/d/{identity('living')}-0",
        }


def in_key(key: str, text: str) -> bool:
    return identity(text) in key


async def outcome(work: object) -> BaseException | None:
    """What the coroutine raised."""
    try:
        await work  # type: ignore[misc]
    except AsyncCheckpointError as error:
        return error
    return None


# ---------------------------------------------------------------- stores that create nothing safely


def ignore_condition(request: Request) -> None:
    request.headers.pop("if-none-match", None)


async def test_a_server_that_ignores_the_condition_is_found_out(
    sim: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    sim.faults.append(Fault(kind="put_object", number=0, hook=ignore_condition))
    async with opened("obstore", sim) as store:
        assert store.capabilities.conditional_create
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            await save(store, "1", "a", 1)
        assert not store.capabilities.conditional_create
        assert "both will believe" in caplog.text
        await whole(sim, store, "1", 1)
        with pytest.raises(CheckpointExistsError):
            await save(store, "1", "b", 2)
        await save(store, "1", "c", 3, overwrite=True)
        await whole(sim, store, "1", 3)
    assert not [key for key in sim.stored() if "/probe-" in key]


async def test_without_conditional_puts_a_loser_keeps_what_its_record_would_need(
    sim: Simulator,
) -> None:
    """A try of its own that is still on its way could replace the record of the other one."""
    sim.faults.append(Fault(kind="put_object", number=0, hook=ignore_condition))
    async with opened("obstore", sim) as first, opened("obstore", sim) as second:
        for number, store in enumerate((first, second)):
            await save(store, f"0{number}", f"known{number}")
        late, asked = Gate(), Gate()
        sim.faults.insert(0, Fault(**RECORD_PUT, gate=late))
        async with asyncio.TaskGroup() as group:
            won = group.create_task(outcome(save(second, "1", "b", 2)))
            await late.reached.wait()  # it has looked, and nothing stood there
            sim.faults.insert(
                1, Fault(kind="get_object", key="*/1/checkpoint.json", number=2, gate=asked)
            )
            lost = group.create_task(outcome(save(first, "1", "a", 1)))
            await asked.reached.wait()  # it has put its record, and reads it back
            late.release()
            await won
            asked.release()
        assert won.result() is None
        assert isinstance(lost.result(), CheckpointExistsError)
        await whole(sim, second, "1", 2)
        assert len(of(sim, "a")) == 2


async def test_the_experiment_is_made_once_and_beside_the_upload(sim: Simulator) -> None:
    gate = Gate()
    sim.faults.append(Fault(kind="put_object", key="*/.asyncckpt/probe-*", gate=gate))
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        await gate.reached.wait()
        gate.release()
        await attempt.publish(record)
        await save(store, "2", "b")
    probes = [r for r in sim.requests if "/probe-" in r.key and r.kind == "put_object"]
    assert [probe.status for probe in probes] == [200, 412]


async def test_a_probe_that_got_no_answer_is_made_again(sim: Simulator) -> None:
    sim.faults.append(Fault(kind="put_object", key="*/.asyncckpt/probe-*", times=6, status=503))
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        assert store.capabilities.conditional_create
        await whole(sim, store, "1", 1)


# ---------------------------------------------------------------------------------- crash points


@dataclass(frozen=True)
class Scenario:
    name: str

    async def run(self, store: ObjectStore) -> None:
        if self.name == "delete":
            await store.delete("1")
        else:
            step = "1" if self.name == "overwrite" else "2"
            await save(store, step, "new", 2, overwrite=self.name == "overwrite")

    async def check(self, sim: Simulator, store: ObjectStore) -> str:
        """The old state or the new one, whole; which of them."""
        if self.name == "save":
            await whole(sim, store, "1", 1)
            return await self._either(sim, store, "2", 2)
        if self.name == "delete":
            return await self._either(sim, store, "1", 1)
        seed = await seed_of(store, "1")
        assert seed in (1, 2)
        await whole(sim, store, "1", seed)
        return str(seed)

    async def _either(self, sim: Simulator, store: ObjectStore, name: str, seed: int) -> str:
        if await seed_of(store, name) is None:
            await expect_no_record(store, name)
            return "nothing"
        await whole(sim, store, name, seed)
        return str(seed)


async def seed_of(store: ObjectStore, name: str) -> int | None:
    files = store.files(name)
    try:
        return int((await files.read("checkpoint.json", max_nbytes=200)).split()[1])
    except CheckpointNotFoundError:
        return None
    finally:
        await files.close()


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [("obstore", "save"), ("obstore", "overwrite"), ("obstore", "delete"), ("gcsfs", "delete")],
)
async def test_a_crash_at_any_request_leaves_the_old_or_the_new(
    sim: Simulator, kind: str, scenario: str
) -> None:
    """From request N on nothing arrives any more, also nothing that would clean up."""
    this = Scenario(scenario)
    outcomes: set[str] = set()
    number, happened = 0, True
    while happened:
        sim.clear()
        async with opened(kind, sim) as store:
            await save(store, "1", "old", 1)
            async with opened(kind, sim) as dying:
                await save(dying, "0", "known", 5)
                applied, first = bool(number % 2), number // 2 + 1
                if applied:
                    sim.faults.append(Fault(number=first, status=403, applied=True))
                sim.faults.append(Fault(number=first + applied, times=FOREVER, status=403))
                with suppress(AsyncCheckpointError):
                    await this.run(dying)
            happened = bool(sim.faults[0].happened)
            sim.faults.clear()
            async with opened(kind, sim) as later:
                assert await later.sweep() == ()
                outcomes.add(await this.check(sim, later))
                await whole(sim, later, "0", 5)
                await save(later, "1", "again", 3, overwrite=True)
                await whole(sim, later, "1", 3)
        number += 1
    print(f"{kind}, {scenario}: {number} points, outcomes {sorted(outcomes)}")
    assert number >= 10 and len(outcomes) == 2


async def test_a_save_that_was_interrupted_before_its_fixed_names_is_read_and_mended(
    sim: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened("gcsfs", sim) as store:
        sim.faults.append(Fault(kind="put_object", key="*/default/small", number=0, status=403))
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            await save(store, "1", "a", 1)
            await save(store, "final", "b", 2)
        assert "committed, but files for other programs" in caplog.text
        assert not {"1/default/small", "1/commit_success.txt"} & set(names(sim))
        await expect(store, "1", 1)
        await expect(store, "final", 2)
        assert await store.sweep() == ()  # may not write: a warning at most
        sim.faults.clear()
    async with opened("gcsfs", sim) as reader:
        await expect(reader, "final", 2)
        await reader.sweep()
        await whole(sim, reader, "1", 1)
        await whole(sim, reader, "final", 2)
        assert {"1/commit_success.txt", "final/commit_success.txt"} <= set(names(sim))
        sim.reset()
        await reader.sweep()
        assert not [r for r in writes(sim) if r.kind.startswith("put")]


async def test_sweeping_looks_at_the_newest_steps_only(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        for step in (1, 2, 9, 10, 11):
            await save(store, str(step), f"a{step}", step)
            sim.delete("bucket", f"{ROOT}/{step}/default/small")
    async with opened("obstore", sim) as later:
        sim.reset()
        await later.sweep()
        assert len(sim.requests) <= 1 + 3 * 8
        assert {f"{step}/default/small" for step in (9, 10, 11)} == {
            key for key in names(sim) if key.endswith("small")
        }


# ------------------------------------------------------------------------------------- data files


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
    async with opened(kind, sim) as store:
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


@pytest.mark.parametrize("clock", ("monotonic", "time"))
async def test_an_attempt_that_is_too_old_does_not_publish(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    """Half of what `collect` waits for, by either clock: one stops in sleep, one can be set."""
    passed_s = 0.0
    clocks = SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: 1000.0)
    monkeypatch.setattr(attempts, "time", clocks)
    async with opened("obstore", sim) as store:
        for passed_s, refused in ((COLLECT_MIN_S / 2 - 1, False), (COLLECT_MIN_S / 2 + 1, True)):
            attempt = await store.begin("1", identity(f"{passed_s}"), overwrite=True)
            record = await fill(attempt, identity(f"{passed_s}"), int(passed_s))
            now_s = getattr(clocks, clock)() + passed_s
            monkeypatch.setattr(clocks, clock, lambda now_s=now_s: now_s)
            if refused:
                with pytest.raises(SaveError, match=r"84\.0 hours ago") as caught:
                    await attempt.publish(record)
                assert not caught.value.visible
            else:
                await attempt.publish(record)
        assert not of(sim, f"{passed_s}")


async def test_save_ids_are_what_names_are_recognised_by(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        for save_id in ("a", "A" * 32, identity("a") + "0", ""):
            with pytest.raises(UsageError, match="32 lower-case hex digits"):
                await store.begin("1", save_id)


async def test_an_abort_that_cannot_remove_says_so_and_where(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        await fill(attempt, identity("a"))
        sim.faults.append(Fault(kind=("delete_objects", "delete_object"), number=0, status=403))
        with pytest.raises(StoreError, match="removing what an aborted save has written"):
            await attempt.abort()
        sim.faults.clear()


# ---------------------------------------------------------------------------------- multipart


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
