"""Retention takes no time from a save but unlisting, and never fails a save that is committed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import KeepBest, KeepLast
from asyncckpt.errors import StoreError
from asyncckpt.session.pruning import UNLISTED_MAX
from tests.script import Script

pytestmark = pytest.mark.usefixtures("no_blocking")


def tree(seed: int) -> dict[str, Any]:
    return {"w": np.arange(100.0) + seed, "step": seed}


async def test_bytes_of_a_deleted_step_are_removed_after_the_save(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        removal = Script(ckpt).hold("remove")
        assert (await ckpt.save(2, tree(2))).deleted_steps == (1,)
        assert await ckpt.steps() == [2]  # unlisted, durably, before the save returned
        await removal.reached()
        removal.go()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


async def test_at_most_one_removal_is_behind(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        script = Script(ckpt)
        removal = script.hold("remove")
        await ckpt.save(2, tree(2))
        await removal.reached()
        saving = asyncio.create_task(ckpt.save(3, tree(3)))
        while 3 not in await ckpt.steps():
            await asyncio.sleep(0.005)
        assert script.count("unlist") == 1 and not saving.done()
        removal.go()
        assert (await saving).deleted_steps == (2,)


async def test_wait_waits_for_bytes_that_are_being_removed(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        removal = Script(ckpt).hold("remove")
        await ckpt.save(2, tree(2))
        await removal.reached()
        waiting = asyncio.create_task(ckpt.wait())
        done, _ = await asyncio.wait((waiting,), timeout=0.05)
        assert not done
        removal.go()
        await waiting
        assert not list(tmp_path.glob(".asyncckpt/trash-*"))


async def test_close_waits_for_bytes_that_are_being_removed(tmp_path: Path) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1))
    await ckpt.save(1, tree(1))
    removal = Script(ckpt).hold("remove")
    await ckpt.save(2, tree(2))
    await removal.reached()
    closing = asyncio.create_task(ckpt.close())
    done, _ = await asyncio.wait((closing,), timeout=0.05)
    assert not done
    removal.go()
    await closing
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.mark.parametrize("error", [OSError(5, "disk on fire"), StoreError("disk on fire")])
async def test_a_removal_that_fails_is_told_by_the_next_report(
    tmp_path: Path, error: Exception
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        Script(ckpt).fail("remove", error)
        assert (await ckpt.save(2, tree(2))).notes == ()
        (note,) = (await ckpt.save(3, tree(3))).notes
        assert note.startswith("step 1 could only be unlisted, not removed completely: ")
        assert "disk on fire" in note
        assert (await ckpt.save(4, tree(4))).notes == ()


@pytest.mark.parametrize("kind", ["unlist", "names"])
async def test_a_committed_save_survives_a_raw_error_of_retention(
    tmp_path: Path, kind: str
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await ckpt.save(1, tree(1))
        Script(ckpt).fail(kind, OSError(5, "disk on fire"))
        report = await ckpt.save(2, tree(2))
        (note,) = report.notes
        assert "deleted" in note and "disk on fire" in note
        assert await ckpt.steps() == [1, 2]


async def test_steps_of_a_run_that_went_back_count_as_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (10, 98, 99, 100):
            await ckpt.save(step, tree(step))
    caplog.set_level(logging.WARNING, "asyncckpt")
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as ckpt:
        await ckpt.restore(10)
        kept = []
        for step in (11, 12, 13):
            report = await ckpt.save(step, tree(step))
            kept.append(await ckpt.steps())
        assert kept == [[11, 100], [11, 12], [12, 13]]
        assert report.notes == ()
    (told,) = caplog.messages
    assert told.startswith("step 100 is above the one saved last, and latest_step() returns it")
    assert "delete_after" in told


@pytest.mark.parametrize(
    ("keep", "losses", "deleted", "latest"),
    [
        (KeepLast(1), {3: 0.1}, (3,), 2),
        (KeepLast(2), {3: 0.1, 4: 0.2}, (3,), 4),
        (KeepBest(1, "loss"), {3: 0.1, 4: 0.2}, (4,), 3),
    ],
    ids=["none", "highest", "lower"],
)
async def test_only_a_step_that_stays_is_told_to_be_above_the_one_saved_last(
    tmp_path: Path,
    keep: asyncckpt.Retention,
    losses: dict[int, float],
    deleted: tuple[int, ...],
    latest: int,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step, loss in losses.items():
            await ckpt.save(step, tree(step), metrics={"loss": loss})
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        report = await ckpt.save(2, tree(2), metrics={"loss": 0.3})
        assert (report.deleted_steps, await ckpt.latest_step()) == (deleted, latest)
        told = [int(note.split()[1]) for note in report.notes if "above the one saved" in note]
        assert told == [latest] * (latest > 2)


async def test_steps_saved_after_going_back_in_one_run_follow_those_of_the_branch_it_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncckpt")
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(3)) as ckpt:
        for step in (80, 90, 100):
            await ckpt.save(step, tree(step))
        await ckpt.restore(80)
        kept = []
        for step in (85, 87, 90, 91):
            report = await ckpt.save(step, tree(step), overwrite=True)
            kept.append(await ckpt.steps())
        assert kept == [[85, 90, 100], [85, 87, 100], [85, 87, 90], [87, 90, 91]]
        assert report.notes == ()
    (told,) = caplog.messages
    assert told.startswith("step 100 is above the one saved last")


async def test_two_runs_on_one_root_never_delete_the_newest_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncckpt")
    async with (
        asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as low,
        asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as high,
    ):
        await low.save(1, tree(1))
        for step in range(100, 105):
            await high.save(step, tree(step))
            report = await low.save(step - 98, tree(step))
            assert await low.latest_step() == step
            (note,) = report.notes
            assert note.startswith("another job saves to this root: steps above")
        assert await low.steps() == [6, 103, 104]
    (told,) = caplog.messages
    assert "takeover=True" in told


async def test_runs_that_take_turns_keep_the_newest_steps_of_both(tmp_path: Path) -> None:
    async with (
        asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as odd,
        asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as even,
    ):
        for step in range(1, 9):
            assert (await (odd if step % 2 else even).save(step, tree(step))).notes == ()
            assert await odd.steps() == [step - 1, step][step == 1 :]


async def test_a_step_that_was_converted_into_the_run_counts_by_its_number(tmp_path: Path) -> None:
    other, root = tmp_path / "other", tmp_path / "run"
    await asyncckpt.save(other, tree(0))
    async with asyncckpt.Checkpointer(root, keep=KeepLast(2)) as ckpt:
        await ckpt.save(1, tree(1))
        await ckpt.save(2, tree(2))
        await asyncckpt.convert(other, root / "3")
        assert (await ckpt.save(4, tree(4))).deleted_steps == (1, 2)
        await asyncckpt.convert(other, root / "9")  # above what is saved: left alone
        assert (await ckpt.save(5, tree(5))).deleted_steps == (3,)
        assert (await ckpt.save(10, tree(10))).deleted_steps == (4, 5)
        assert await ckpt.steps() == [9, 10]


async def test_a_branch_is_no_longer_one_once_another_writer_has_replaced_it(
    tmp_path: Path,
) -> None:
    async with (
        asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt,
        asyncckpt.Checkpointer(tmp_path) as other,
    ):
        await other.save(100, tree(100))
        script = Script(ckpt)
        unlist = script.hold("unlist")
        saving = asyncio.create_task(ckpt.save(1, tree(1)))
        await unlist.reached()
        await other.save(100, tree(101), overwrite=True)
        unlist.go()
        assert (await saving).deleted_steps == ()
        for step in (2, 3):
            assert (await ckpt.save(step, tree(step))).deleted_steps == (step - 1,)
        assert await ckpt.steps() == [3, 100]


async def test_few_steps_are_unlisted_at_a_time_and_removed_before_the_next(
    tmp_path: Path,
) -> None:
    count = 2 * UNLISTED_MAX + 3
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(count):
            await ckpt.save(step, tree(step))
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        script = Script(ckpt)
        assert len((await ckpt.save(count, tree(count))).deleted_steps) == count
    waiting = [0]
    for kind in script.kinds:
        waiting.append(waiting[-1] + (kind == "unlist") - (kind == "remove"))
    assert max(waiting) == UNLISTED_MAX and waiting[-1] == 0
    assert [path.name for path in tmp_path.iterdir()] == [str(count)]


async def test_failures_of_one_save_are_one_note(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            await ckpt.save(step, tree(step))
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        script = Script(ckpt)
        for nth in (2, 3):
            script.fail("unlist", StoreError("busy"), nth=nth)
        for nth in (1, 2):
            script.fail("remove", StoreError("on fire"), nth=nth)
        report = await ckpt.save(4, tree(4))
        assert report.deleted_steps == (0, 3)
        assert report.notes == ("2 steps could not be deleted, the first: step 1: busy",)
        (note,) = (await ckpt.save(5, tree(5))).notes
        assert note.startswith("2 steps could only be unlisted, not removed completely, ")
        assert ", the first: step 0: on fire; the next sweep" in note
