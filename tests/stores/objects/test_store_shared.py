"""Attempts that several processes share on an object store: what each writes, reads and removes."""

from __future__ import annotations

import logging

import pytest

from asyncckpt.errors import CheckpointExistsError, SaveError, StoreError, UsageError
from asyncckpt.stores.objects import publish
from asyncckpt.stores.objects.attempt import ObjectAttempt
from asyncckpt.stores.objects.layout import exchange_path, is_exchange, owner
from asyncckpt.stores.objects.share import ObjectJoinedAttempt
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import data_path, delete, expect, fill, identity, record_of, save
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import KINDS, RECORD_PUT, ROOT, names, of, opened, writes
from tests.stores.objects.test_store_collect import WEEK_S, age

SAVE_ID = identity("shared")
MARK = f"1/{exchange_path(SAVE_ID, '.begun')}"
DELETION = ("delete_object", "delete_objects")


def exchanged(sim: Simulator) -> list[str]:
    """Keys of the mark and of what was passed on."""
    return [key for key in names(sim) if is_exchange(key.partition("/")[2])]


async def shared(
    store: ObjectStore, other: ObjectStore
) -> tuple[ObjectAttempt, ObjectJoinedAttempt]:
    """An attempt at step 1, and a share in it."""
    attempt = await store.begin("1", SAVE_ID, shared=True)
    return attempt, await other.join("1", SAVE_ID, process=1, timeout_s=20.0)


def test_objects_that_were_passed_on_are_recognised() -> None:
    for path in (".begun", "entries-12", "a" * 64):
        assert is_exchange(exchange_path(SAVE_ID, path))
        assert owner(exchange_path(SAVE_ID, path)) == SAVE_ID
    for path in ("", "a/b", "a" * 65):
        assert not is_exchange(exchange_path(SAVE_ID, path))
    assert not is_exchange(data_path(SAVE_ID))


@pytest.mark.parametrize("kind", KINDS)
async def test_process_0_removes_what_was_exchanged_after_the_commit(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store, opened(kind, sim) as other:
        attempt, share = await shared(store, other)
        assert exchanged(sim) == [MARK]
        await share.pass_on("entries-1", b"entries")
        assert await attempt.taken("entries-1", max_nbytes=99) == b"entries"
        await attempt.pass_on("answer", b"answer")
        record = await fill(attempt, SAVE_ID)
        assert len(exchanged(sim)) == 3
        await attempt.publish(record)
        await store.settled()
        before = len(writes(sim))
        await share.leave()
        await other.close()
        await store.close()
        assert exchanged(sim) == []
        kinds = {request.kind for request in writes(sim)[before:]}
        assert kinds <= {"delete_object", "delete_objects"}
    async with opened(kind, sim) as again:
        await expect(again, "1")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_removes_what_its_process_has_written(sim: Simulator, kind: str) -> None:
    async with opened(kind, sim) as store, opened(kind, sim) as other:
        attempt, share = await shared(store, other)
        await fill(attempt, SAVE_ID)
        await share.put(data_path(SAVE_ID, "p1"), b"x")
        await share.pass_on("entries-1", b"entries")
        await share.pass_on("entries-2", b"entries")
        await attempt.taken("entries-2", max_nbytes=99)
        await attempt.abort()
        own = [f"1/{data_path(SAVE_ID, 'p1')}", f"1/{exchange_path(SAVE_ID, 'entries-1')}"]
        assert sorted(names(sim)) == sorted(own)
        await share.abort()
        await share.abort()
        assert names(sim) == []


async def test_an_abort_that_comes_after_the_record_removes_nothing(sim: Simulator) -> None:
    """A process that does not know the outcome must not damage what is a checkpoint."""
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        await share.put(data_path(SAVE_ID, "p1"), b"x")
        await attempt.publish(await fill(attempt, SAVE_ID))
        await store.settled()
        before = {key for key in of(sim, "shared") if not is_exchange(key.partition("/")[2])}
        await share.abort()
        assert before <= set(of(sim, "shared"))
        await expect(store, "1")


async def test_an_abort_that_cannot_read_the_record_removes_nothing(sim: Simulator) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        await share.put(data_path(SAVE_ID, "p1"), b"x")
        sim.faults.append(Fault(kind="get_object", key="*/checkpoint.json", number=0, status=403))
        with pytest.raises(StoreError, match="removing the objects of an aborted save"):
            await share.abort()
        sim.faults.clear()
        assert f"1/{data_path(SAVE_ID, 'p1')}" in names(sim)
        await attempt.abort()


async def test_a_lost_race_removes_what_was_exchanged(sim: Simulator) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        await share.pass_on("entries-1", b"entries")
        await attempt.taken("entries-1", max_nbytes=99)
        await save(other, "1", "winner", 1)
        with pytest.raises(CheckpointExistsError):
            await attempt.publish(await fill(attempt, SAVE_ID))
        await share.abort()
        assert of(sim, "shared") == []
        await expect(store, "1", 1)


async def test_what_may_still_be_committed_is_left(sim: Simulator) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        path = data_path(SAVE_ID, "p1")
        await share.put(path, b"x")
        sim.faults.append(Fault(**RECORD_PUT, number=0, status=503))
        with pytest.raises(SaveError, match="is unknown"):
            await attempt.publish(record_of(SAVE_ID, data=path))
        sim.faults.clear()
        before = writes(sim)
        await share.leave()
        await attempt.abort()
        assert writes(sim) == before
        assert f"1/{path}" in names(sim)


async def test_objects_that_were_sent_twice_are_removed_when_a_process_leaves(
    sim: Simulator,
) -> None:
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        share._sending.orphans.add(f"1/{data_path(SAVE_ID, 'twice')}")
        sim.put("bucket", f"{ROOT}/1/{data_path(SAVE_ID, 'twice')}", b"x")
        await share.leave()
        await other.close()
        assert names(sim) == [MARK]
        await attempt.abort()


@pytest.mark.parametrize("fault", [{"status": 403}, {"hang": True}])
async def test_orphans_that_cannot_be_removed_are_logged(
    sim: Simulator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, object],
) -> None:
    monkeypatch.setattr(publish, "AFTER_S", 0.1)
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        share._sending.orphans.add(f"1/{data_path(SAVE_ID, 'twice')}")
        sim.faults.append(Fault(kind=DELETION, number=0, **fault))
        with caplog.at_level(logging.WARNING):
            await share.leave()
            await other.close()
        assert "orphaned data objects could not be removed" in caplog.text
        sim.faults.clear()
        await attempt.abort()


@pytest.mark.parametrize("fault", [{"status": 403}, {"hang": True}])
async def test_what_cannot_be_removed_after_the_commit_is_logged(
    sim: Simulator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, object],
) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", SAVE_ID, shared=True)
        record = await fill(attempt, SAVE_ID)
        sim.faults.append(Fault(kind=DELETION, number=0, **fault))
        monkeypatch.setattr(publish, "AFTER_S", 0.1)
        with caplog.at_level(logging.WARNING):
            await attempt.publish(record)
            await store.close()
        assert "files exchanged by its processes could not be removed" in caplog.text
        sim.faults.clear()
    assert exchanged(sim) == [MARK]
    async with opened("obstore", sim) as again:
        await expect(again, "1")
        await delete(again, "1")
    assert names(sim) == []


# -------------------------------------------------------------------------------- bad input, faults


@pytest.mark.parametrize("kind", KINDS)
async def test_a_mark_that_cannot_be_written_fails_begin(sim: Simulator, kind: str) -> None:
    async with opened(kind, sim) as store:
        sim.faults.append(Fault(kind="put_object", key="*-x-.begun", number=0, status=403))
        with pytest.raises(StoreError, match="may not do that"):
            await store.begin("1", SAVE_ID, shared=True)
        sim.faults.clear()
        assert names(sim) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_mark_that_cannot_be_read_fails_join(sim: Simulator, kind: str) -> None:
    async with opened(kind, sim) as store, opened(kind, sim) as other:
        attempt = await store.begin("1", SAVE_ID, shared=True)
        sim.faults.append(Fault(kind="get_object", key="*-x-.begun", number=0, status=403))
        with pytest.raises(StoreError, match="looking for the attempt to join failed"):
            await other.join("1", SAVE_ID, process=1, timeout_s=20.0)
        sim.faults.clear()
        await attempt.abort()
        assert names(sim) == []


async def test_an_attempt_that_cannot_be_marked_nor_cleaned_up_fails_for_the_mark(
    sim: Simulator,
) -> None:
    sim.faults.append(Fault(kind="put_object", key="*-x-.begun", status=403))
    # Every one: the probe removes an object at the same time.
    sim.faults.append(Fault(kind="delete_objects", number=0, status=403))
    async with opened("obstore", sim) as store:
        with pytest.raises(StoreError, match=r"-x-\.begun: writing .* failed") as caught:
            await store.begin("1", SAVE_ID, shared=True)
        (note,) = caught.value.__notes__
        assert (
            "cleaning up failed too: " in note and "removing the objects of an aborted save" in note
        )
        sim.faults.clear()


async def test_what_was_passed_on_and_cannot_be_read_fails(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", SAVE_ID, shared=True)
        sim.faults.append(Fault(kind="get_object", key="*-x-entries", number=0, status=403))
        with pytest.raises(StoreError, match="reading what was passed on failed"):
            await attempt.taken("entries", max_nbytes=1)
        sim.faults.clear()
        await attempt.abort()


async def test_other_processes_write_no_fixed_names(sim: Simulator) -> None:
    """Only the winner of several attempts does, and process 0 speaks for it."""
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        attempt, share = await shared(store, other)
        with pytest.raises(UsageError, match="put the save id"):
            await share.put("default/small", b"x")
        with pytest.raises(UsageError, match="put the save id"):
            await share.create("default/d/data", nbytes=1, window_nbytes=4096)
        await share.abort()
        await attempt.abort()
        assert names(sim) == []


async def test_only_old_leftovers_of_an_exchange_are_collected(sim: Simulator) -> None:
    """Also of a save that was committed: nothing of an exchange belongs to a checkpoint."""
    async with opened("obstore", sim) as store:
        await save(store, "1", "shared", 1)
        leftovers = [f"1/{exchange_path(SAVE_ID, path)}" for path in (".begun", "entries-1")]
        leftovers.append(f"1/{exchange_path(identity('dead'), '.begun')}")
        for key in leftovers:
            sim.put("bucket", f"{ROOT}/{key}", b"x")
        assert await store.collect(WEEK_S) == []
        age(sim, WEEK_S + 3600)
        assert await store.collect(WEEK_S) == sorted(leftovers)
        await expect(store, "1", 1)
