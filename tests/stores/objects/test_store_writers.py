"""The commit on an object store, whoever else writes, and where nothing is created safely."""

from __future__ import annotations

import asyncio
import logging

import pytest

from asyncckpt.errors import AsyncCheckpointError, CheckpointExistsError, StoreError
from asyncckpt.testing.checkpoints import delete, fill, identity, put, save
from tests.simulator import Fault, Gate, Request, Simulator
from tests.stores.objects.stores import KINDS, RECORD_PUT, ROOT, UNRACED, names, of, opened, whole


def in_key(key: str, text: str) -> bool:
    return identity(text) in key


async def outcome(work: object) -> BaseException | None:
    """What the coroutine raised."""
    try:
        await work  # type: ignore[misc]
    except AsyncCheckpointError as error:
        return error
    return None


# ------------------------------------------------------------------------------------ other writers


async def test_a_writer_that_was_paused_before_its_record_changes_nothing(sim: Simulator) -> None:
    async with (
        opened("obstore", sim, policy=UNRACED) as paused,
        opened("obstore", sim) as other,
    ):
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
        async with opened("obstore", sim, policy=UNRACED) as paused:
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
        async with opened("gcsfs", sim, policy=UNRACED) as paused:
            gate = Gate()
            sim.faults.append(Fault(kind="put_object", key="*/default/small", gate=gate))
            async with asyncio.TaskGroup() as group:
                group.create_task(save(paused, "1", "a", 1))
                await gate.reached.wait()
                await delete(other, "1")
                gate.release()
        assert names(sim) == []


async def test_a_deletion_leaves_the_save_that_took_the_name_meanwhile_whole(
    sim: Simulator,
) -> None:
    async with (
        opened("obstore", sim, policy=UNRACED) as deleting,
        opened("obstore", sim) as other,
    ):
        await save(other, "1", "a", 1)
        gate = Gate()
        # The record is gone; what follows is held.
        sim.faults.append(Fault(kind="list_objects", gate=gate))
        async with asyncio.TaskGroup() as group:
            group.create_task(delete(deleting, "1"))
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
            record = await files.read("checkpoint.json", max_nbytes=1000)
            await files.close()
            await whole(sim, first, "1", int(record.split()[1]))
            assert not of(sim, f"old{turn}")


async def test_an_overwrite_removes_what_only_the_old_one_had(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        await fill(attempt, identity("a"))
        small = {"default/small": b"small 0", "default/_METADATA": b"old"}
        await attempt.publish(await put(attempt, identity("a"), small))
        await store.settled()
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


# ---------------------------------------------------------------- stores that create nothing safely


def ignore_condition(request: Request) -> None:
    request.headers.pop("if-none-match", None)


async def test_a_server_that_ignores_the_condition_is_found_out(
    sim: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    sim.faults.append(Fault(kind="put_object", number=0, hook=ignore_condition))
    async with opened("obstore", sim) as store:
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            await save(store, "1", "a", 1)
        assert not (await store._context.probes.conditions(versions=False)).create
        assert "both report success" in caplog.text
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
    async with (
        opened("obstore", sim, policy=UNRACED) as first,
        opened("obstore", sim, policy=UNRACED) as second,
    ):
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


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_refuses_every_write_is_not_said_to_lack_conditions(
    sim: Simulator, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    sim.faults.append(Fault(kind="put_object", number=0, status=400))
    async with opened(kind, sim, policy=UNRACED) as store:
        for _ in range(2):
            with pytest.raises(StoreError, match="finding out which conditions it obeys failed"):
                await store._context.probes.conditions(versions=False)
        sim.faults.clear()
        assert (await store._context.probes.conditions(versions=False)).create
    assert "supports conditional creation" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_refuses_only_conditions_is_said_to_lack_them(
    sim: Simulator, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    sim.faults.append(Fault(kind="put_object", when=is_conditional, number=0, status=400))
    async with opened(kind, sim, policy=UNRACED) as store:
        assert not (await store._context.probes.conditions(versions=False)).create
    assert "supports conditional creation, but this server does not" in caplog.text
    assert not [key for key in sim.stored() if "/probe-" in key]


def is_conditional(request: Request) -> bool:
    return "if-none-match" in request.headers or "ifGenerationMatch" in request.query


async def test_the_experiment_is_made_once_and_beside_the_upload(sim: Simulator) -> None:
    gate = Gate()
    sim.faults.append(Fault(kind="put_object", key="*/.asyncckpt/probe-*", gate=gate))
    async with opened("obstore", sim, policy=UNRACED) as store:
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
        assert (await store._context.probes.conditions(versions=False)).create
        await whole(sim, store, "1", 1)


async def test_a_probe_that_was_ended_is_made_again(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        probes = store._context.probes
        probes.begin()
        await probes.close()
        assert (await probes.conditions(versions=False)).create
