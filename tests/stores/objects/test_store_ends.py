"""A save that ends, is overtaken or is answered by nobody while its record is on its way."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from asyncckpt.errors import CheckpointExistsError, SaveError
from asyncckpt.flow import shield
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import Attempt, Store
from asyncckpt.stores.objects import publish
from asyncckpt.stores.objects.clients.client import RequestError
from asyncckpt.stores.objects.context import READS_MAX, Context
from asyncckpt.stores.objects.datafile import Sending
from asyncckpt.stores.objects.requests.policy import RequestPolicy, RetryPolicy
from asyncckpt.stores.objects.requests.requests import Requests
from asyncckpt.stores.objects.requests.sending import LANDING_S
from asyncckpt.testing.checkpoints import delete, epoch_of, expect, fill, identity, outline_of, save
from tests.simulator import Fault, Gate, Simulator
from tests.stores.objects.scripted import AT_ONCE, Clock, Hang, assert_at_rest, requests
from tests.stores.objects.stores import KINDS, RECORD_PUT, ROOT, UNRACED, names, of, opened, whole


def uniform(data: bytes) -> str | None:
    """The save id in a record that consists of one letter; None for anything else."""
    return data[:1].decode() if len(set(data)) == 1 else None


def context_of(store: Requests, workers: Workers) -> Context:
    """The context of readers of such records."""
    return Context(store, workers, uniform, outline_of, epoch_of)


async def without_response(
    sim: Simulator, store: Store, *, overwrite: bool
) -> tuple[Attempt, bytes, asyncio.Task[None], Gate]:
    """Publish a record of step 1, to which the service does not respond before the gate opens."""
    attempt = await store.begin("1", identity("a"), overwrite=overwrite)
    record = await fill(attempt, identity("a"), 7)
    gate = Gate()
    sim.faults.append(Fault(**RECORD_PUT, gate=gate, hang=True))
    publishing = asyncio.create_task(attempt.publish(record))
    await gate.reached.wait()
    return attempt, record, publishing, gate


# --------------------------------------------------------------------------------- ended too early


async def test_what_a_cancelled_save_is_sending_gets_a_second_whatever_was_cancelled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that is sent for one save gets it together, though cancelled one after the other."""
    clock, workers = Clock(monkeypatch), Workers(1, "test-clients")
    store, client = requests(Hang(), Hang(), Hang(), Hang(), policy=replace(AT_ONCE, timeout_s=60))
    context = context_of(store, workers)
    before, after = Sending(context, "1"), Sending(context, "2")
    earlier = asyncio.create_task(before.send("1/data", b"body"))
    sends = after.send("2/data", b"body"), after.send_named("2/index", b"body")
    data, index = map(asyncio.create_task, sends)
    await clock.advance(0.0)
    earlier.cancel()
    await clock.advance(0.9 * LANDING_S)
    assert not earlier.done()
    data.cancel()
    await clock.advance(0.2 * LANDING_S)
    assert earlier.cancelled() and not data.done()
    index.cancel()
    await clock.advance(0.7 * LANDING_S)
    assert not data.done() and not index.done()
    await clock.advance(0.2 * LANDING_S)
    assert data.cancelled() and index.cancelled()
    assert_at_rest(store, client)
    workers.shutdown()


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_cancelled_save_whose_record_gets_no_response_is_unknown_not_cancelled(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """The caller waits for the response, but not forever; the request may still arrive."""
    monkeypatch.setattr(shield, "CLEANUP_S", 0.1)
    async with opened("obstore", sim, policy=PATIENT) as store:
        if overwrite:
            await save(store, "1", "old", 1)
        _, _, publishing, gate = await without_response(sim, store, overwrite=overwrite)
        publishing.cancel()
        with pytest.raises(SaveError, match=r"checkpoint\.json: .* durable is unknown"):
            await publishing
        gate.release()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_ends_while_its_record_is_on_its_way_keeps_what_the_record_refers_to(
    sim: Simulator, kind: str, overwrite: bool
) -> None:
    """As at the end of a process, which cancels also what is shielded; the request arrives."""
    async with opened(kind, sim) as store:
        await save(store, "0", "known")
        attempt, record, publishing, gate = await without_response(sim, store, overwrite=overwrite)
        (shielded,) = (t for t in asyncio.all_tasks() if "_conclude" in str(t.get_coro()))
        shielded.cancel()
        with pytest.raises(SaveError, match="durable is unknown"):
            await publishing
        await attempt.abort()  # whoever began it does so
        gate.release()
        sim.faults.clear()
        sim.put("bucket", f"{ROOT}/1/checkpoint.json", record)
    async with opened(kind, sim) as later:
        await expect(later, "1", 7)
        await later.sweep()
        await whole(sim, later, "1", 7)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("applied", [False, True])
async def test_a_cancelled_save_does_not_send_its_record_again(
    sim: Simulator, overwrite: bool, applied: bool
) -> None:
    """As does one whose deadline has passed: what the try on its way has done is read back."""
    gate = Gate()
    patient = RetryPolicy(total_s=1e9, backoff_s=1e6, backoff_cap_s=1e6)
    policy = replace(UNRACED, retry=patient)
    async with asyncio.timeout(30), opened("obstore", sim, policy=policy) as store:
        if overwrite:
            await save(store, "1", "old", 1)
        lost = Fault(**RECORD_PUT, number=0, status=503, applied=applied, gate=gate)
        sim.faults.append(lost)
        attempt = await store.begin("1", identity("a"), overwrite=overwrite)
        publishing = asyncio.create_task(attempt.publish(await fill(attempt, identity("a"))))
        await gate.reached.wait()
        publishing.cancel()
        gate.release()
        if applied:
            await publishing
        else:
            with pytest.raises(SaveError, match=r"deadline passed.*durable is unknown"):
                await publishing
        assert lost.happened == 1
        sim.faults.clear()
        if applied:
            await expect(store, "1")


async def test_what_was_refused_leaves_nothing_though_it_would_have_been_kept(
    sim: Simulator,
) -> None:
    async with opened("obstore", sim) as store:
        await save(store, "1", "winner", 1)
        with pytest.raises(CheckpointExistsError):
            await save(store, "1", "loser", 2)
        assert not of(sim, "loser")
        await whole(sim, store, "1", 1)


async def test_what_replaces_what_came_in_between_is_whole(sim: Simulator) -> None:
    """Nothing stands there when it looks, and another's record when it creates its own."""
    async with opened("obstore", sim, policy=UNRACED) as store, opened("obstore", sim) as other:
        gate = Gate()
        sim.faults.append(Fault(**RECORD_PUT, gate=gate))
        async with asyncio.TaskGroup() as group:
            group.create_task(save(store, "1", "a", 2, overwrite=True))
            await gate.reached.wait()
            await save(other, "1", "faster", 1)
            gate.release()
        await whole(sim, store, "1", 2)
        assert not of(sim, "faster")


async def test_what_a_client_may_have_sent_twice_replaces_nothing_that_came_in_between(
    sim: Simulator,
) -> None:
    """Its first request may have landed, and have been replaced by the one that is there."""
    async with opened("obstore", sim, policy=UNRACED) as store, opened("obstore", sim) as other:
        client = store._requests.client
        client.traits = replace(client.traits, repeats=True)
        gate = Gate()
        sim.faults.append(Fault(**RECORD_PUT, gate=gate))
        saving = asyncio.create_task(save(store, "1", "a", 2, overwrite=True))
        await gate.reached.wait()
        await save(other, "1", "faster", 1)
        gate.release()
        with pytest.raises(SaveError, match="another process has replaced"):
            await saving
        await whole(sim, other, "1", 1)
        assert not of(sim, "a")


# ------------------------------------------------------------------------------------ an old answer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_record_that_was_replaced_is_not_brought_back_by_another_try(
    sim: Simulator, kind: str
) -> None:
    """Its first try has landed, and its answer was lost; another save replaces it meanwhile."""
    async with opened(kind, sim, policy=UNRACED) as first, opened(kind, sim) as second:
        await save(first, "1", "old", 1)
        await save(second, "0", "known")
        attempt = await first.begin("1", identity("a"), overwrite=True)
        record = await fill(attempt, identity("a"), 2)
        gate = Gate()
        at_record = "*/1/checkpoint.json"
        # After a look and the first try: without a condition it looks again, with one it tries.
        conditional = first._requests.traits.conditional_replace
        again = {"kind": "put_object", "number": 2} if conditional else {"number": 3}
        sim.faults += [
            Fault(kind="put_object", key=at_record, reset=True, applied=True),
            Fault(key=at_record, gate=gate, **again),
        ]
        publishing = asyncio.create_task(attempt.publish(record))
        await gate.reached.wait()
        await save(second, "1", "b", 3, overwrite=True)
        gate.release()
        complaint = "another process has replaced" if conditional else "another one is there so far"
        with pytest.raises(SaveError, match=complaint) as caught:
            await publishing
        assert not caught.value.visible
        await whole(sim, second, "1", 3)
        assert not of(sim, "a")  # to which the record of the first one would refer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_save_that_was_created_and_replaced_is_not_brought_back_by_another_try(
    sim: Simulator, kind: str
) -> None:
    """As above, where nothing stood there before: its data go with its record."""
    async with opened(kind, sim, policy=UNRACED) as first, opened(kind, sim) as second:
        await save(second, "0", "known")
        await save(second, "0", "known too", overwrite=True)
        attempt = await first.begin("1", identity("a"), overwrite=True)
        record = await fill(attempt, identity("a"), 2)
        gate = Gate()
        look = Fault(kind="get_object", key="*/1/checkpoint.json", gate=gate)
        sim.faults.append(
            Fault(**RECORD_PUT, reset=True, applied=True, hook=lambda _: sim.faults.append(look))
        )
        publishing = asyncio.create_task(attempt.publish(record))
        await gate.reached.wait()
        await save(second, "1", "b", 3, overwrite=True)
        gate.release()
        with pytest.raises(SaveError, match="another process has replaced") as caught:
            await publishing
        assert not caught.value.visible
        await whole(sim, second, "1", 3)
        assert not of(sim, "a")


async def test_a_record_whose_answers_were_lost_is_seen_to_stand(sim: Simulator) -> None:
    """Another try is refused where the first one has landed."""
    async with opened("obstore", sim) as store:
        await save(store, "1", "old", 1)
        sim.reset()
        sim.faults.append(Fault(**RECORD_PUT, number=1, reset=True, applied=True))
        await save(store, "1", "a", 2, overwrite=True)
        puts = [r for r in sim.requests if r.kind == "put_object" and r.key.endswith(".json")]
        assert [put.status for put in puts[1:]] == [412]
        await whole(sim, store, "1", 2)


# -------------------------------------------------------------------------------- after the record

PATIENT = RequestPolicy()
"""A request gets a minute, and is tried for five."""


async def test_fixed_names_that_are_never_answered_hold_no_save_up(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publish, "AFTER_S", 2.0)
    async with opened("obstore", sim, policy=PATIENT) as store:
        await save(store, "0", "known")
        sim.faults.append(Fault(kind="put_object", key="*/1/default/small", number=0, hang=True))
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            async with asyncio.timeout(60):
                await save(store, "1", "a", 1)
        assert "1: the checkpoint is committed, but files for other programs" in caplog.text
        assert "not within 2 s" in caplog.text
        await expect(store, "1", 1)
        assert "1/default/small" not in names(sim)
        sim.faults.clear()
    async with opened("obstore", sim) as later:
        await later.sweep()
        await whole(sim, later, "1", 1)


async def test_tidying_up_that_is_never_answered_holds_no_save_up(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened("obstore", sim, policy=PATIENT) as store:
        await save(store, "1", "old", 1)
        monkeypatch.setattr(publish, "AFTER_S", 2.0)
        sim.faults.append(Fault(kind=("delete_object", "delete_objects"), number=0, hang=True))
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            async with asyncio.timeout(60):
                await save(store, "1", "a", 2, overwrite=True)
        assert "committed, but cleaning up after it failed: not within 2 s" in caplog.text
        sim.faults.clear()
        await whole(sim, store, "1", 2)


# ---------------------------------------------------------------------------------- records in two


async def test_a_long_record_that_is_replaced_between_its_reads_is_read_again() -> None:
    workers = Workers(1, "test-clients")
    policy = replace(AT_ONCE, first_read_nbytes=8)
    gate = asyncio.Event()
    store, client = requests(None, gate, policy=policy)
    client.objects["1/checkpoint.json"] = b"a" * 20
    reading = asyncio.create_task(context_of(store, workers).read_record("1"))
    while len(client.requests) < 2:
        await asyncio.sleep(0)
    client.objects["1/checkpoint.json"] = b"b" * 21
    gate.set()
    found = await reading
    assert found is not None
    assert (found.data, found.save_id) == (b"b" * 21, "b")
    assert len(client.requests) == 4
    workers.shutdown()


async def test_a_reader_of_a_long_record_that_is_replaced_sees_the_new_one(sim: Simulator) -> None:
    policy = replace(UNRACED, first_read_nbytes=16)
    async with opened("obstore", sim) as other:
        await save(other, "1", "old", 1)  # and is closed, so that nothing of it reads any more
    async with opened("obstore", sim, policy=policy) as store, opened("obstore", sim) as other:
        gate = Gate()
        sim.faults.append(Fault(kind="get_object", key="*/1/checkpoint.json", number=2, gate=gate))
        reading = asyncio.create_task(expect(store, "1", 11))
        await gate.reached.wait()
        await save(other, "1", "new", 11, overwrite=True)
        gate.release()
        await reading


@pytest.mark.parametrize(("nbytes", "reads"), [(7, 1), (9, 2 * READS_MAX)])
async def test_a_damaged_record_is_read_again_only_if_it_takes_several_requests(
    nbytes: int, reads: int
) -> None:
    workers = Workers(1, "test-clients")
    store, client = requests(policy=replace(AT_ONCE, first_read_nbytes=8))
    client.objects["1/checkpoint.json"] = damaged = b"x" * (nbytes - 1) + b"y"
    found = await context_of(store, workers).read_record("1")
    assert found is not None
    assert (found.data, found.save_id) == (damaged, None)
    assert len(client.requests) == reads
    workers.shutdown()


# ------------------------------------------------------------------------------- came back to life

CONDITIONAL = ("s3fs", "gcsfs")
"""Clients that delete on condition of the version."""

DELETIONS = ("delete_object", "delete_objects")


@pytest.mark.parametrize("landed", [True, False])
async def test_a_retried_creation_brings_no_deleted_step_back(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """The response to its first try was lost. Another process deletes the step before it looks, or
    (where the record is gone already when it looks) removes the data before its second try."""
    async with opened("obstore", sim) as store, opened("obstore", sim) as other:
        await save(store, "0", "known")
        client = store._requests.client
        put, tries = client.put, 0

        async def losing(key: str, body: bytes, *, create: bool = False) -> None:
            nonlocal tries
            if not key.endswith("1/checkpoint.json"):
                return await put(key, body, create=create)
            tries += 1
            if tries == 1:
                if landed:
                    await put(key, body, create=create)
                    await delete(other, "1")
                raise RequestError("connection", "by the test")
            for mine in of(sim, "a"):
                sim.delete("bucket", f"{ROOT}/{mine}")
            await put(key, body, create=create)

        monkeypatch.setattr(client, "put", losing)
        with pytest.raises(SaveError, match="another process deleted it") as caught:
            await save(store, "1", "a", 2)
        assert tries == (1 if landed else 2) and not caught.value.visible
        assert not [key for key in names(sim) if key.startswith("1/")]


@pytest.mark.parametrize("kind", CONDITIONAL)
async def test_a_save_that_undoes_its_record_spares_the_one_that_has_replaced_it(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It has found its record without data, and is about to remove it."""
    async with opened(kind, sim) as store, opened(kind, sim) as other:
        await save(store, "0", "known")
        await save(other, "0", "known too", overwrite=True)
        put, tries = store._requests.client.put, 0

        async def losing(key: str, body: bytes, *, create: bool = False) -> None:
            nonlocal tries
            if key == "1/checkpoint.json":
                tries += 1
                if tries == 1:
                    raise RequestError("connection", "by the test")
                for mine in of(sim, "a"):
                    sim.delete("bucket", f"{ROOT}/{mine}")
            await put(key, body, create=create)

        monkeypatch.setattr(store._requests.client, "put", losing)
        gate = Gate()
        sim.faults.append(Fault(kind=DELETIONS, key="*/1/*", gate=gate))
        undoing = asyncio.create_task(save(store, "1", "a", 2))
        await gate.reached.wait()
        await save(other, "1", "b", 3, overwrite=True)
        gate.release()
        with pytest.raises(SaveError, match="another process deleted it"):
            await undoing
        await whole(sim, other, "1", 3)


@pytest.mark.parametrize("kind", CONDITIONAL)
async def test_a_deletion_spares_the_record_that_has_replaced_one_that_came_back(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store, opened(kind, sim) as other:
        await save(other, "0", "known")
        await save(other, "0", "known too", overwrite=True)
        await save(store, "1", "a", 1)
        record = sim.get("bucket", f"{ROOT}/1/checkpoint.json")
        remove = await store.unlist("1")
        sim.put("bucket", f"{ROOT}/1/checkpoint.json", record)
        gate = Gate()
        sim.faults.append(Fault(kind=DELETIONS, key="*/checkpoint.json", gate=gate))
        removing = asyncio.create_task(remove())
        await gate.reached.wait()
        await save(other, "1", "b", 3, overwrite=True)
        gate.release()
        await removing
        await whole(sim, other, "1", 3)


async def test_a_deletion_removes_a_record_that_came_back_meanwhile(sim: Simulator) -> None:
    """A try of the save that was still on its way arrives between the record and the data."""
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        record = sim.get("bucket", f"{ROOT}/1/checkpoint.json")
        gate = Gate()
        sim.faults.append(Fault(kind="list_objects", gate=gate))
        deleting = asyncio.create_task(delete(store, "1"))
        await gate.reached.wait()
        sim.put("bucket", f"{ROOT}/1/checkpoint.json", record)
        gate.release()
        await deleting
        assert names(sim) == []
