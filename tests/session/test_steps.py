"""The steps of a run: which exist, which stay, and which are replaced."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StoreError, UsageError
from tests.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")


def tree(seed: int) -> dict[str, Any]:
    return {"w": np.arange(20_000.0) + seed, "step": seed}


async def test_an_empty_run_has_no_steps(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path / "not" / "there") as ckpt:
        assert await ckpt.steps() == []
        assert await ckpt.latest_step() is None
        with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint to restore"):
            await ckpt.restore()
        with pytest.raises(CheckpointNotFoundError):
            await ckpt.inspect()
        with pytest.raises(CheckpointNotFoundError):
            await ckpt.verify(5)
        with pytest.raises(CheckpointNotFoundError, match="not/there/7"):
            await ckpt.restore(7)
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint to delete"):
            await ckpt.delete(1)
        assert await ckpt.delete_after(0) == []
    assert list(tmp_path.iterdir()) == []  # looking creates nothing


async def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(12):
            await ckpt.save(step, tree(step))
        with pytest.raises(CheckpointNotFoundError, match=r"/77: there is no such step; .*…, 2"):
            await ckpt.restore(77)


async def test_the_error_for_a_missing_step_lists_the_steps_that_have_records(
    tmp_path: Path,
) -> None:
    (tmp_path / "9").mkdir()
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        for call in (ckpt.restore, ckpt.inspect, ckpt.verify):
            with pytest.raises(CheckpointNotFoundError, match=r"the steps are 1$") as caught:
                await call(5)
            assert caught.value.found == await ckpt.steps() == [1]
            with pytest.raises(CheckpointNotFoundError, match=f"^{tmp_path}/9: ") as caught:
                await call(9)
            assert caught.value.__cause__ is not caught.value


async def test_the_error_for_a_missing_step_names_the_steps_of_other_libraries(
    tmp_path: Path,
) -> None:
    await asyncckpt.save(tmp_path / "saved", tree(1))
    (tmp_path / "run" / "7").mkdir(parents=True)
    await asyncckpt.convert(tmp_path / "saved", tmp_path / "run" / "7" / "model.safetensors")
    async with asyncckpt.Checkpointer(tmp_path / "run") as ckpt:
        with pytest.raises(
            CheckpointNotFoundError, match="the steps are none: 7 is a step of safetensors, which"
        ):
            await ckpt.restore(5)


async def test_a_checkpoint_is_no_root_of_a_run(tmp_path: Path) -> None:
    await asyncckpt.save(tmp_path / "x", tree(1))
    before = sorted(tmp_path.rglob("*"))
    calls: list[Any] = [
        lambda ckpt: ckpt.latest_step(),
        lambda ckpt: ckpt.steps(),
        lambda ckpt: ckpt.restore(),
        lambda ckpt: ckpt.save(1, tree(1)),
        lambda ckpt: ckpt.delete_after(0),
    ]
    for call in calls:
        async with asyncckpt.Checkpointer(tmp_path / "x") as ckpt:
            with pytest.raises(UsageError, match="this is a checkpoint, not the root of a run"):
                await call(ckpt)
    assert sorted(tmp_path.rglob("*")) == before


async def test_a_checkpoint_on_an_object_store_is_no_root_of_a_run(tmp_path: Path) -> None:
    location = f"memory://{tmp_path}/x"
    await asyncckpt.save(location, tree(1))
    for call in ("latest_step", "steps", "restore"):
        async with asyncckpt.Checkpointer(location) as ckpt:
            with pytest.raises(UsageError, match="this is a checkpoint, not the root of a run"):
                await getattr(ckpt, call)()


async def test_run_twice_against_the_same_root_continues(tmp_path: Path) -> None:
    states = []
    for _ in range(3):
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            latest = await ckpt.latest_step()
            state = tree(0) if latest is None else await ckpt.restore(like=tree(0))
            start = 0 if latest is None else latest + 1
            for step in range(start, start + 2):
                state = {"w": state["w"] * 2, "step": step}
                await ckpt.start_save(step, state)
        states.append(state)
    assert states[-1]["step"] == 5
    np.testing.assert_array_equal(states[-1]["w"], tree(0)["w"] * 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("012345")


async def test_steps_ignores_foreign_names_and_what_is_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (2, 10, 7):
            await ckpt.save(step, tree(step))
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "007").mkdir()
        (tmp_path / "12").mkdir()  # without a record
        (tmp_path / "13").write_text("a file")
        (tmp_path / "-1").mkdir()
        (tmp_path / "best").symlink_to("10")
        (tmp_path / ("9" * 20)).mkdir()
        shutil.copytree(tmp_path / "10", tmp_path / "11")
        record = tmp_path / "11" / "checkpoint.json"
        data = record.read_bytes()
        record.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
        shutil.copytree(tmp_path / "10", tmp_path / "20")
        (tmp_path / "20" / "checkpoint.json").write_bytes(data[: len(data) // 2])
        assert await ckpt.steps() == [2, 7, 10]
        for _ in range(2):
            assert await ckpt.latest_step() == 10
        assert [message.partition(": ")[0] for message in caplog.messages] == [
            str(tmp_path / step) for step in ("20", "11")
        ]
        assert "the commit record is damaged" in caplog.messages[0]
        assert (await ckpt.restore())["step"] == 10
        assert await ckpt.delete_after(2) == [7, 10]
        assert await ckpt.steps() == [2]
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"notes.txt", "007", "12", "13", "-1", "best", "9" * 20, "11", "20"}


async def test_an_existing_step_is_reported_before_anything_is_staged(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        script = Script(ckpt)
        with pytest.raises(
            CheckpointExistsError, match=r"a checkpoint already exists here; pass overwrite=True"
        ) as caught:
            await ckpt.save(1, tree(2))
        assert caught.value.location == str(tmp_path / "1")
        with pytest.raises(CheckpointExistsError):
            await ckpt.start_save(1, tree(2))
        assert script.count("begin") == 0
        assert ckpt._session.runtime.pool.allocated_nbytes == 0 or script.count("write") == 0
        assert (await ckpt.restore(1))["step"] == 1
    with pytest.raises(CheckpointExistsError):
        await asyncckpt.save(tmp_path / "1", tree(2))


async def test_a_step_that_appears_during_the_save_is_not_replaced(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        publish = Script(ckpt).hold("publish")
        pending = await ckpt.start_save(1, tree(1))
        await publish.reached()
        await asyncckpt.save(tmp_path / "1", tree(2))
        publish.go()
        with pytest.raises(CheckpointExistsError):
            await pending
        assert (await ckpt.restore(1))["step"] == 2


async def test_overwrite_replaces_the_step_and_leaves_nothing_of_the_old_one(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        first = await ckpt.save(1, tree(1))
        publish = Script(ckpt).hold("publish")
        pending = await ckpt.start_save(1, tree(2), overwrite=True)
        await publish.reached()
        # Until the last moment the old one stands.
        assert (await ckpt.restore(1))["step"] == 1
        publish.go()
        assert (await pending).save_id != first.save_id
        assert (await ckpt.restore(1))["step"] == 2
        assert (await ckpt.verify(1)).ok
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


async def test_a_failed_replacement_leaves_the_old_step(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        Script(ckpt).fail("publish", StoreError("disk on fire"))
        with pytest.raises(StoreError):
            await ckpt.save(1, tree(2), overwrite=True)
        assert (await ckpt.restore(1))["step"] == 1
        assert (await ckpt.verify(1)).ok


async def test_a_directory_without_a_record_is_moved_aside_by_save_never_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "precious.txt").write_text("mine")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        assert await ckpt.steps() == [1]
    (kept,) = tmp_path.rglob("precious.txt")
    assert kept.read_text() == "mine"


async def test_keep_last_deletes_all_but_the_newest(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(2)) as ckpt:
        reports = [await ckpt.save(step, tree(step)) for step in (1, 2, 3, 10)]
        assert [report.deleted_steps for report in reports] == [(), (), (1,), (2,)]
        assert await ckpt.steps() == [3, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "3"]


async def test_keep_last_never_deletes_the_step_just_saved(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(1)) as ckpt:
        await ckpt.save(10, tree(10))
        report = await ckpt.save(3, tree(3))  # an earlier step, saved later
        assert report.deleted_steps == (10,)
        assert await ckpt.steps() == [3]
        await ckpt.save(11, tree(11))
        assert await ckpt.steps() == [11]


async def test_keep_last_never_deletes_a_step_that_is_being_restored(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        read = Script(ckpt).hold("read_into")
        restoring = asyncio.create_task(ckpt.restore(1))
        await read.reached()
        report = await ckpt.save(2, tree(2))
        assert report.deleted_steps == ()
        read.go()
        assert (await restoring)["step"] == 1
        assert (await ckpt.save(3, tree(3))).deleted_steps == (1, 2)


async def test_a_step_that_cannot_be_deleted_is_a_note_of_a_save_that_stands(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        Script(ckpt).fail("unlist", StoreError("busy"))
        report = await ckpt.save(2, tree(2))
        assert report.notes == ("step 1 could not be deleted: busy",)
        assert await ckpt.steps() == [1, 2]
        assert (await ckpt.save(3, tree(3))).deleted_steps == (1, 2)


async def test_retention_sees_metrics_and_may_be_anybodys(tmp_path: Path) -> None:
    class KeepBest:
        def keep(self, steps: Any, metrics: Any) -> set[int]:
            return {max(steps, key=lambda step: metrics[step].get("score", 0.0))}

    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest()) as ckpt:
        for step, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
            await ckpt.save(step, tree(step), metrics={"score": score})
        assert await ckpt.steps() == [2, 3]
        assert (await ckpt.inspect(2)).metrics == {"score": 0.9}


async def test_delete_removes_the_step_and_its_bytes(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        await ckpt.save(2, tree(2))
        await ckpt.delete(1)
        assert await ckpt.steps() == [2]
        with pytest.raises(CheckpointNotFoundError):
            await ckpt.delete(1)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


async def test_a_step_deleted_while_it_is_restored_is_not_found_never_corrupt(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, tree(1))
        await ckpt.save(2, tree(2))
        script = Script(ckpt)
        for expected in ("named", "newest"):
            held = script.hold("read_into")  # the chunk index: no data file is open yet
            restoring = asyncio.create_task(ckpt.restore(2 if expected == "named" else None))
            await held.reached()
            await asyncio.to_thread(shutil.rmtree, tmp_path / "2")
            held.go()
            if expected == "named":
                with pytest.raises(CheckpointNotFoundError, match="was deleted while being read"):
                    await restoring
                await ckpt.save(2, tree(2))
            else:
                assert (await restoring)["step"] == 1


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, None, 10**19, np.float32(1), [1], b"1"])
async def test_a_step_is_a_non_negative_integer(tmp_path: Path, step: Any) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        calls: list[Any] = [
            lambda: ckpt.save(step, tree(0)),
            lambda: ckpt.start_save(step, tree(0)),
            lambda: ckpt.delete(step),
            lambda: ckpt.delete_after(step),
        ]
        if step is not None:
            calls += [
                lambda: ckpt.restore(step),
                lambda: ckpt.restore_into(tree(0), step=step),
                lambda: ckpt.inspect(step),
                lambda: ckpt.verify(step),
            ]
        for call in calls:
            with pytest.raises(UsageError, match="a step is a non-negative integer") as caught:
                await call()
            assert caught.value.found == step
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [0, 10**19 - 1, np.int32(5), np.uint64(7), np.array(8)])
async def test_every_integer_is_a_step(tmp_path: Path, step: Any) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        assert (await ckpt.save(step, tree(0))).step == int(step)
        assert await ckpt.steps() == [int(step)]
        assert (await ckpt.restore(step))["step"] == 0
        assert json.loads((tmp_path / str(int(step)) / "checkpoint.json").read_bytes())


async def test_a_run_that_always_has_a_step_never_looks_empty(tmp_path: Path) -> None:
    """Another process saves with `KeepLast(1)` between the listing and the look at the records."""
    async with (
        asyncckpt.Checkpointer(tmp_path) as reader,
        asyncckpt.Checkpointer(tmp_path, keep=asyncckpt.KeepLast(1)) as writer,
    ):
        saved = 0
        await writer.save(saved, tree(saved))

        async def overtaken(call: Any) -> Any:
            nonlocal saved
            held = Script(reader).hold("read")  # the record of a listed step
            calling = asyncio.create_task(call())
            await held.reached()
            saved += 1
            await writer.save(saved, tree(saved))
            held.go()
            return await calling

        assert await overtaken(reader.latest_step) == 1
        assert await overtaken(reader.steps) == [2]
        assert (await overtaken(reader.restore))["step"] == 3
        assert (await overtaken(reader.inspect)).step == 4


async def test_a_step_that_is_deleted_while_it_is_read_gives_way_to_newer_ones(
    tmp_path: Path,
) -> None:
    async with (
        asyncckpt.Checkpointer(tmp_path) as reader,
        asyncckpt.Checkpointer(tmp_path) as writer,
    ):
        await writer.save(1, tree(1))
        index = Script(reader).hold("read_into")
        restoring = asyncio.create_task(reader.restore())
        await index.reached()
        await writer.save(2, tree(2))
        await asyncio.to_thread(shutil.rmtree, tmp_path / "1")
        index.go()
        assert (await restoring)["step"] == 2
