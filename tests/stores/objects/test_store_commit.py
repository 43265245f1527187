"""The commit on an object store, whatever answers are lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import CheckpointExistsError, SaveError, StoreError, UsageError
from asyncckpt.stores.objects import attempt as attempts
from asyncckpt.stores.objects.layout import is_fixed, owner
from asyncckpt.testing.checkpoints import (
    delete,
    expect,
    expect_no_record,
    fill,
    identity,
    put,
    record_of,
    save,
)
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import (
    KINDS,
    RECORD_PUT,
    ROOT,
    UNRACED,
    names,
    of,
    opened,
    whole,
    writes,
)

# -------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("kind", ("obstore", "gcsfs"))
async def test_a_commit_is_one_round_trip_and_one_more_for_the_fixed_names(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim, policy=UNRACED) as store:
        await save(store, "0", "first")  # the store is known from here on
        attempt = await store.begin("1", identity("a"))
        await fill(attempt, identity("a"))
        small = {"default/small": b"small 0", "default/_METADATA": b"metadata"}
        record = await put(attempt, identity("a"), small)
        sim.reset()
        await attempt.publish(record)
        await store.settled()
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


async def test_only_a_save_under_another_name_looks_for_steps_by_one_request(
    sim: Simulator,
) -> None:
    async with opened("obstore", sim, policy=UNRACED) as store:
        await save(store, "0", "first")  # the store is known from here on
        for name, lists in (("1", 0), ("model", 1)):
            sim.reset()
            await save(store, name, name)
            kinds = [request.kind for request in sim.requests]
            assert kinds.count("list_objects") == lists
            assert len(kinds) == 5 + lists, kinds
        await expect(store, "model")


def looks() -> list[asyncio.Task[Any]]:
    """Every look for the steps of a run that goes on."""
    return [task for task in asyncio.all_tasks() if "refuse_run" in repr(task.get_coro())]


async def test_the_look_for_steps_ends_with_its_attempt(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        await save(store, "0", "first")
        sim.faults.append(Fault(kind="list_objects", number=0, hang=True))
        attempt = await store.begin("model", identity("a"))
        await fill(attempt, identity("a"))
        assert looks()
        await attempt.abort()
        assert not looks()
        assert all(key.startswith("0/") for key in names(sim))


async def test_names_of_steps_without_a_record_are_no_run(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        sim.put("bucket", f"{ROOT}/model/3/weights", b"not ours")
        await save(store, "model", "a")
        await expect(store, "model")


@pytest.mark.parametrize("status", (403, 500))
async def test_a_save_needs_no_right_to_list_but_an_answer(sim: Simulator, status: int) -> None:
    async with opened("obstore", sim) as store:
        sim.faults.append(Fault(kind="list_objects", number=0, status=status))
        if status == 403:
            await save(store, "model", "a")
            sim.faults.clear()
            await expect(store, "model")
        else:
            with pytest.raises(StoreError, match="run/model: looking for steps failed"):
                await save(store, "model", "a")
            sim.faults.clear()
            await expect_no_record(store, "model")


async def test_a_step_is_unlisted_by_three_requests(sim: Simulator) -> None:
    async with opened("obstore", sim, policy=UNRACED) as store:
        await save(store, "0", "first")
        await save(store, "1", "second")
        await delete(store, "0")  # the store is known from here on
        sim.reset()
        remove = await store.unlist("1")
        # Its record; the names that other programs look for; the record again, to delete it.
        kinds = [request.kind for request in sim.requests]
        assert kinds == ["get_object", "delete_objects", "delete_objects"]
        await remove()


async def test_nothing_before_the_record_has_a_name_that_others_could_write(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        record = await fill(attempt, identity("a"))
        await attempt.put("default/more", b"more")
        assert all(identity("a") in key for key in names(sim))
        # The contents of fixed names are durable before the record, in objects of the attempt.
        assert len([key for key in names(sim) if is_fixed(key.removeprefix("1/"))]) == 2
        with pytest.raises(UsageError, match="another attempt could write this name"):
            await attempt.create("default/d/data", nbytes=1, window_nbytes=4096)
        await attempt.publish(record)


async def test_the_content_of_a_file_is_where_its_attempt_says_before_the_record(
    sim: Simulator,
) -> None:
    """In an object of its own, or in the record alone."""
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        await attempt.put("default/small", b"small")
        source = attempt.source("default/small")
        assert source is not None and owner(source) == identity("a")
        assert sim.get("bucket", f"{ROOT}/1/{source}") == b"small"
        await attempt.put("default/manifest", b"manifest", in_record=True)
        assert of(sim, "a") == [f"1/{source}"]
        await attempt.publish(record_of(identity("a")))
        await store.settled()
        assert sim.get("bucket", f"{ROOT}/1/default/small") == b"small"
        assert sim.get("bucket", f"{ROOT}/1/default/manifest") == b"manifest"
        assert attempt.source(f"default/d/{identity('a')}-0") is None


# --------------------------------------------------------------------------------- answers of a PUT


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
        {"status": 200, "page": b"", "times": 2},
        {"status": 204, "page": b"", "applied": True},
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


@pytest.mark.parametrize("overwrite", (False, True))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_refusal_after_a_lost_response_leaves_the_outcome_unknown(
    sim: Simulator, kind: str, overwrite: bool
) -> None:
    """The record was written, and then the credentials expired."""
    async with opened(kind, sim) as store:
        if overwrite:
            await save(store, "1", "old", 1)
        attempt = await store.begin("1", identity("a"), overwrite=overwrite)
        record = await fill(attempt, identity("a"), 7)

        def expire(_: object) -> None:
            sim.faults.append(Fault(key="*/1/checkpoint.json", number=0, status=403))

        sim.faults.append(Fault(**RECORD_PUT, reset=True, applied=True, hook=expire))
        with pytest.raises(SaveError, match=r"whether the checkpoint is .* visible .* is unknown"):
            await attempt.publish(record)
        sim.faults.clear()
        await store.sweep()
        await whole(sim, store, "1", 7)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_no_record_is_reported_and_only_replaced_when_asked(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store:
        sim.put("bucket", f"{ROOT}/1/checkpoint.json", b"torn")
        with pytest.raises(
            CheckpointExistsError, match="holds 4 bytes, not a valid commit record"
        ) as caught:
            await save(store, "1", "a")
        assert caught.value.found == b"torn" and "overwrite=True" in str(caught.value)
        assert names(sim) == ["1/checkpoint.json"]
        await save(store, "1", "b", 2, overwrite=True)
        await whole(sim, store, "1", 2)


# ----------------------------------------------------------------------------------------- attempts


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
        with pytest.raises(StoreError, match="removing the objects of an aborted save"):
            await attempt.abort()
        sim.faults.clear()
