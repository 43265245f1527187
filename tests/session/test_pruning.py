"""Retention in a run: which steps are deleted after a save, why, and at what cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import KeepBest, KeepEvery, KeepLast
from asyncckpt.errors import StoreError
from asyncckpt.flow import shield
from asyncckpt.format.record import seal
from tests.script import Script
from tests.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_blocking")


def tree(seed: int) -> dict[str, Any]:
    return {"w": np.arange(100.0) + seed, "step": seed}


async def save(
    ckpt: asyncckpt.Checkpointer, step: int, loss: float | None = None, **options: Any
) -> asyncckpt.SaveReport:
    metrics = None if loss is None else {"loss": loss}
    return await ckpt.save(step, tree(step), metrics=metrics, **options)


async def test_policies_together_keep_what_any_of_them_keeps(tmp_path: Path) -> None:
    keep = KeepLast(2) | KeepEvery(4) | KeepBest(1, "loss")
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        run = [0.9, 0.8, 0.1, 0.7, 0.6, math.nan, 0.5, 0.4, 0.05]
        deleted = {
            step: (await save(ckpt, step, loss)).deleted_steps for step, loss in enumerate(run)
        }
        assert {step: gone for step, gone in deleted.items() if gone} == {
            3: (1,),
            5: (3,),
            7: (5,),
            8: (2, 6),
        }
        assert await ckpt.steps() == [0, 4, 7, 8]


async def test_a_resumed_run_knows_the_metrics_of_the_steps_it_finds(tmp_path: Path) -> None:
    for step, loss in ((1, 0.1), (2, math.inf), (3, 0.3)):
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            await save(ckpt, step, loss)
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(2, "loss")) as ckpt:
        assert (await save(ckpt, 4, -math.inf)).deleted_steps == (2, 3)
        assert (await ckpt.inspect(4)).metrics == {"loss": -math.inf}


async def test_the_step_just_saved_stays_even_if_it_is_the_worst(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "loss")) as ckpt:
        await save(ckpt, 1, 0.1)
        assert (await save(ckpt, 2, 0.9)).deleted_steps == ()
        assert (await save(ckpt, 3, 0.8)).deleted_steps == (2,)
        assert await ckpt.steps() == [1, 3]


async def test_a_misspelt_metric_deletes_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncckpt")
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "lsos")) as ckpt:
        for step in range(3):
            report = await save(ckpt, step, 0.5)
            (note,) = report.notes
            assert note.startswith("KeepBest(n=1, metric='lsos', mode='min') keeps every step")
            assert "they have 'loss'" in note
        assert await ckpt.steps() == [0, 1, 2]
        assert [record.message for record in caplog.records] == [note]  # once, not at every save


async def test_steps_saved_before_the_first_value_go_when_it_comes(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "loss")) as ckpt:
        assert (await save(ckpt, 1)).notes
        assert (await save(ckpt, 2, math.nan)).notes
        report = await save(ckpt, 3, 0.5)
        assert report.deleted_steps == (1, 2) and report.notes == ()


async def test_a_replaced_step_counts_with_its_new_metrics(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "loss")) as ckpt:
        await save(ckpt, 1, 0.1)
        await save(ckpt, 2, 0.5)
        assert (await save(ckpt, 1, 0.9, overwrite=True)).deleted_steps == ()
        assert (await save(ckpt, 3, 0.7)).deleted_steps == (1,)
        assert await ckpt.steps() == [2, 3]


async def test_an_abandoned_branch_no_longer_counts(tmp_path: Path) -> None:
    keep = KeepLast(1) | KeepBest(1, "loss")
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            await save(ckpt, step, loss)
        assert await ckpt.steps() == [2, 3]
        assert await ckpt.delete_after(1) == [2, 3]
        await save(ckpt, 2, 0.9)
        assert (await save(ckpt, 3, 0.8)).deleted_steps == (2,)
        assert (await save(ckpt, 4, 0.85)).deleted_steps == ()
        assert await ckpt.steps() == [3, 4]


async def test_delete_after_includes_saves_in_flight(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await save(ckpt, 1)
        await save(ckpt, 2)
        publish = Script(ckpt).hold("publish")
        pending = await ckpt.start_save(3, tree(3))
        await publish.reached()
        deleting = asyncio.create_task(ckpt.delete_after(1))
        await asyncio.sleep(0)
        publish.go()
        assert await deleting == [2, 3]
        assert (await pending).step == 3  # it was committed, and then deleted
        assert await ckpt.steps() == [1]


async def test_delete_waits_for_the_save_of_its_step_and_for_no_other(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await save(ckpt, 1)
        publish = Script(ckpt).hold("publish")
        pending = await ckpt.start_save(2, tree(2))
        await publish.reached()
        await ckpt.delete(1)
        deleting = asyncio.create_task(ckpt.delete(2))
        await asyncio.sleep(0)
        publish.go()
        await deleting
        assert (await pending).step == 2  # it was committed, and then deleted
        assert await ckpt.steps() == []


async def test_delete_after_reads_no_step_that_it_does_not_delete(tmp_path: Path) -> None:
    """Lower steps may belong to another user, who does not let this one read them."""
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            await save(ckpt, step)
        script = Script(ckpt)
        assert await ckpt.delete_after(2) == [3]
        assert script.count("read") == 1


async def test_delete_after_leaves_to_others_what_they_delete_first(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            await save(ckpt, step)
        delete = Script(ckpt).hold("unlist")
        deleting = asyncio.create_task(ckpt.delete_after(1))
        await delete.reached()
        await asyncio.to_thread(shutil.rmtree, tmp_path / "3")
        delete.go()
        assert await deleting == [2]
        assert await ckpt.steps() == [1]


async def test_a_save_reads_few_records_however_many_steps_are_kept(tmp_path: Path) -> None:
    keep = KeepEvery(2) | KeepLast(1) | KeepBest(1, "loss")
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in range(40):
            await save(ckpt, step, 1.0 / (step + 1))
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        script = Script(ckpt)
        reads = []
        for step in range(40, 50):
            before = script.count("read")
            await save(ckpt, step, 1.0 / (step + 1))
            reads.append(script.count("read") - before)  # one tells whether the step exists
    assert reads == [1 + 21, *[1] * 9]  # 21 steps were there when the run was resumed


async def test_steps_are_listed_while_the_save_is_published(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await save(ckpt, 1)
        script = Script(ckpt)
        publish, names = script.hold("publish"), script.hold("names")
        saving = asyncio.create_task(save(ckpt, 2))
        await names.reached()
        await publish.reached()
        names.go()
        publish.go()
        assert (await saving).deleted_steps == (1,)
        assert script.count("names") == 1


async def test_a_save_that_fails_ends_the_listing_of_steps(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await save(ckpt, 1)
        script = Script(ckpt)
        publish, names = script.hold("publish"), script.hold("names")
        saving = asyncio.create_task(save(ckpt, 2))
        await names.reached()  # and held: nothing but the save ends it
        await publish.reached()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        tasks = asyncio.all_tasks(ckpt._session.runtime.engine._loop)
        assert not [task for task in tasks if "candidates" in repr(task)]
        assert (await save(ckpt, 3)).deleted_steps == (1,)


async def test_a_save_cancelled_during_retention_stays_committed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shield, "CLEANUP_S", 0.05)
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await save(ckpt, 1)
        unlist = Script(ckpt).hold("unlist")
        pending = await ckpt.start_save(2, tree(2))
        await unlist.reached()
        assert pending.cancel()
        report = await pending
        assert report.step == 2
        assert report.deleted_steps == ()
        (note,) = report.notes
        assert note.startswith("deleting older checkpoints was cancelled")
        assert await ckpt.steps() == [1, 2]
        assert (await save(ckpt, 3)).deleted_steps == (1, 2)


async def test_a_failed_listing_deletes_nothing_and_is_told(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await save(ckpt, 1)
        Script(ckpt).fail("names", OSError("no answer"))
        report = await save(ckpt, 2)
        assert report.deleted_steps == ()
        assert "no step was deleted: no answer" in report.notes
        assert (await save(ckpt, 3)).deleted_steps == (1, 2)
        Script(ckpt).fail("names", OSError("no answer"))
        await save(ckpt, 9)
        report = await save(ckpt, 5)  # goes back behind a step of its own
        assert report.deleted_steps == (3, 9)
        assert not [note for note in report.notes if "another job" in note]


async def test_a_policy_of_step_numbers_has_no_metrics_read(tmp_path: Path) -> None:
    record = tmp_path / "1" / "checkpoint.json"
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await save(ckpt, 1)
    document = json.loads(await asyncio.to_thread(record.read_bytes))
    del document["crc32c"]
    document["metrics"] = "none that this release could read"
    await asyncio.to_thread(record.write_bytes, seal(json.dumps(document, separators=(",", ":"))))
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        assert (await save(ckpt, 2)).deleted_steps == (1,)


class Newest:
    """A user's policy of step numbers."""

    uses_metrics = False

    def keep(self, steps: Sequence[int], metrics: object) -> Sequence[int]:
        return steps[-2:]


@pytest.mark.parametrize(
    ("keep", "deleted"),
    [
        (KeepLast(2), (0, 1)),
        (KeepEvery(2), (1,)),
        (KeepBest(1, "loss"), (1, 2)),
        (KeepLast(2) | KeepEvery(10), (1,)),
        (Newest(), (0, 1)),
    ],
    ids=["last", "every", "best", "any", "own"],
)
@pytest.mark.parametrize("place", ["local", "s3"])
async def test_steps_of_a_newer_release_are_left_alone_and_do_not_count(
    tmp_path: Path, place: str, keep: asyncckpt.Retention, deleted: tuple[int, ...]
) -> None:
    with simulator() if place == "s3" else contextlib.nullcontext() as sim:
        root = tmp_path if sim is None else "s3://bucket/run"
        storage = None if sim is None else sim.s3_options()

        def rewrite(step: int) -> None:
            record, key = tmp_path / f"{step}" / "checkpoint.json", f"run/{step}/checkpoint.json"
            data = record.read_bytes() if sim is None else sim.get("bucket", key)
            data = seal(data[:-22].decode().replace('"version":2', '"version":3', 1) + "}")
            record.write_bytes(data) if sim is None else sim.put("bucket", key, data)

        async with asyncckpt.Checkpointer(root, storage_options=storage) as ckpt:
            for step in range(5):
                await save(ckpt, step, step / 10)
        await asyncio.to_thread(rewrite, 3)
        await asyncio.to_thread(rewrite, 4)
        async with asyncckpt.Checkpointer(root, keep=keep, storage_options=storage) as ckpt:
            report = await save(ckpt, 5, 0.5)
            assert report.deleted_steps == deleted
            (note,) = report.notes
            assert note.startswith("2 steps could not be read and will stay")
            assert "version 3, this release reads versions up to 2" in note
            assert {3, 4} < set(await ckpt.steps())


async def test_a_damaged_record_is_no_step_and_is_left_alone(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            await save(ckpt, step, 0.5)
    damaged = tmp_path / "1" / "checkpoint.json"
    await asyncio.to_thread(damaged.write_bytes, b"{}")
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "loss")) as ckpt:
        report = await save(ckpt, 3, 0.1)
        assert (report.deleted_steps, report.notes) == ((2,), ())
    assert await asyncio.to_thread(damaged.exists)


async def test_a_step_that_cannot_be_read_is_left_alone_and_the_others_are_deleted(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            await save(ckpt, step)
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(2)) as ckpt:
        # The first read asks whether the step exists.
        Script(ckpt).fail("read", StoreError("permission denied"), nth=2)
        report = await save(ckpt, 4)
        assert report.deleted_steps == (2,)
        assert report.notes == ("step 1 could not be read and will stay: permission denied",)
        report = await save(ckpt, 5)  # it can be read again
        assert (report.deleted_steps, report.notes) == ((1, 3), ())


async def test_a_step_that_changed_since_it_was_read_is_not_deleted_on_old_grounds(
    tmp_path: Path,
) -> None:
    async with (
        asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "loss")) as ckpt,
        asyncckpt.Checkpointer(tmp_path) as other,
    ):
        await save(ckpt, 1, 0.5)
        await save(ckpt, 2, 0.4)
        await save(other, 2, 0.01, overwrite=True)
        # What this run knows of step 2 is no longer true: it is looked at again, and stays.
        assert (await save(ckpt, 3, 0.3)).deleted_steps == ()
        assert (await save(ckpt, 4, 0.2)).deleted_steps == (3,)
        damaged = tmp_path / "2" / "checkpoint.json"
        await asyncio.to_thread(damaged.write_bytes, b"{}")
        assert (await save(ckpt, 5, 0.001)).deleted_steps == (4,)
        assert await asyncio.to_thread(damaged.exists)


def truncated(record: Path) -> None:
    record.write_bytes(record.read_bytes()[:10])


def altered(record: Path) -> None:
    record.write_bytes(record.read_bytes().replace(b'"version":', b'"Version":', 1))


@pytest.mark.parametrize("damage", [truncated, altered, Path.unlink])
@pytest.mark.parametrize(
    ("keep", "losses", "damaged", "kept"),
    [
        (KeepLast(2), (0.1, 0.2, 0.3, 0.4), 2, [1, 3]),
        (KeepLast(3), (0.1, 0.2, 0.3, 0.4), 2, [0, 1, 3]),
        (KeepBest(2, "loss"), (0.4, 0.1, 0.2, 0.15), 1, [2, 3]),
        (KeepLast(1) | KeepBest(1, "loss"), (0.1, 0.3, 0.2, 0.4), 0, [2, 3]),
        (KeepLast(2) | KeepEvery(3), (0.1, 0.2, 0.3, 0.4), 2, [0, 1, 3]),
        (Newest(), (0.1, 0.2, 0.3, 0.4), 2, [1, 3]),
    ],
    ids=["last", "first deletion", "best", "last or best", "last or every", "own"],
)
async def test_a_step_damaged_meanwhile_displaces_no_good_one(
    tmp_path: Path,
    keep: asyncckpt.Retention,
    losses: Sequence[float],
    damaged: int,
    kept: list[int],
    damage: Callable[[Path], None],
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in range(3):
            await save(ckpt, step, losses[step])
        record = tmp_path / f"{damaged}" / "checkpoint.json"
        await asyncio.to_thread(damage, record)
        assert (await save(ckpt, 3, losses[3])).notes == ()
        assert await ckpt.steps() == kept
        assert await asyncio.to_thread(record.parent.exists)


async def test_steps_that_move_up_for_damaged_ones_are_checked_too(tmp_path: Path) -> None:
    keep = Answers(lambda steps: steps if steps[-1] < 5 else steps[-2:])
    async with asyncckpt.Checkpointer(tmp_path, keep=keep) as ckpt:
        for step in range(5):
            await save(ckpt, step)
        for step in (3, 4):
            await asyncio.to_thread(truncated, tmp_path / f"{step}" / "checkpoint.json")
        assert (await save(ckpt, 5)).deleted_steps == (0, 1)
        assert await ckpt.steps() == [2, 5]


async def test_a_step_replaced_meanwhile_displaces_others_by_its_new_metrics(
    tmp_path: Path,
) -> None:
    async with (
        asyncckpt.Checkpointer(tmp_path, keep=KeepBest(2, "loss")) as ckpt,
        asyncckpt.Checkpointer(tmp_path) as other,
    ):
        await save(ckpt, 1, 0.1)
        await save(ckpt, 2, 0.2)
        await save(other, 1, 0.9, overwrite=True)
        await save(ckpt, 3, 0.3)
        assert (await save(ckpt, 4, 0.4)).deleted_steps == (1,)
        assert await ckpt.steps() == [2, 3, 4]


async def test_kept_steps_that_cannot_be_checked_are_not_reasons_to_delete_others(
    tmp_path: Path,
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(3)) as ckpt:
        for step in (0, 1, 2):
            await save(ckpt, step)
        script = Script(ckpt)
        for nth in (2, 3):  # the first read asks whether the step exists
            script.fail("read", StoreError("no answer"), nth=nth)
        report = await save(ckpt, 3)
        assert report.deleted_steps == ()
        assert report.notes == (
            "2 steps could not be read and will stay, the first: step 1: no answer",
        )
        report = await save(ckpt, 4)  # they can be read again
        assert (report.deleted_steps, report.notes) == ((0, 1), ())


async def test_kept_steps_are_checked_while_the_save_is_published(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(3)) as ckpt:
        for step in range(4):
            await save(ckpt, step)
        script = Script(ckpt)
        # The first read asks whether the step exists; then come the three of the last decision.
        publish, last = script.hold("publish"), script.hold("read", nth=4)
        saving = asyncio.create_task(save(ckpt, 4))
        await publish.reached()
        await last.reached()
        publish.go()
        last.go()
        assert (await saving).deleted_steps == (1,)
        assert script.count("read") == 4


async def test_a_save_that_keeps_no_other_step_reads_none(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1) | KeepEvery(2)) as ckpt:
        script = Script(ckpt)
        for step in range(5):
            await save(ckpt, step)
        assert await ckpt.steps() == [0, 2, 4]
        # One asks whether the step exists, and one of `steps` whether it is valid.
        assert script.count("read") == 5 + 3


async def test_a_step_that_somebody_else_deleted_is_forgotten(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepBest(1, "loss")) as ckpt:
        await save(ckpt, 1, 0.1)
        await asyncio.to_thread(shutil.rmtree, tmp_path / "1")
        await save(ckpt, 2, 0.5)
        assert (await save(ckpt, 3, 0.6)).deleted_steps == ()
        assert await ckpt.steps() == [2, 3]


async def test_a_policy_that_fails_deletes_nothing_and_the_save_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def keep(self, steps: Any, metrics: Any) -> set[int]:
            return {max(metrics[step]["loss"] for step in steps)}

        def __repr__(self) -> str:
            return "Broken()"

    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1) | Broken()) as ckpt:
        await save(ckpt, 1, 0.5)
        report = await save(ckpt, 2)
        assert report.notes == (
            "no step was deleted, because KeepLast(n=1) | Broken() failed: KeyError('loss')",
        )
        assert await ckpt.steps() == [1, 2]
    assert "the retention policy KeepLast(n=1) | Broken() failed" in caplog.text


class Answers:
    """A policy with scripted answers."""

    def __init__(self, answer: Callable[[Sequence[int]], Any]) -> None:
        self.answer = answer

    def keep(self, steps: Sequence[int], metrics: Any) -> Any:
        return self.answer(steps)

    def __repr__(self) -> str:
        return "Answers()"


def even(steps: Sequence[int]) -> Iterator[int]:
    yield from (step for step in steps if step % 2 == 0)


@pytest.mark.parametrize(
    "answer",
    [
        even,
        lambda steps: filter(lambda step: step % 2 == 0, steps),
        lambda steps: list(even(steps)),
        lambda steps: dict.fromkeys(even(steps), "kept"),
        lambda steps: np.array(list(even(steps))),
    ],
    ids=["generator", "filter", "list", "dict", "array"],
)
async def test_what_a_policy_names_stays_in_whatever_it_names_it(
    tmp_path: Path, answer: Any
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in range(5):
            await save(ckpt, step)
    async with asyncckpt.Checkpointer(tmp_path, keep=Answers(answer)) as ckpt:
        report = await save(ckpt, 5)
        assert (report.deleted_steps, report.notes) == ((1, 3), ())
        assert await ckpt.steps() == [0, 2, 4, 5]


def failing(steps: Sequence[int]) -> Iterator[int]:
    yield steps[0]
    raise KeyError("loss")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda steps: None, "TypeError('keep() returned None, not the steps to keep')"),
        (lambda steps: 1, "TypeError('keep() returned 1, not the steps to keep')"),
        (lambda steps: "1", """TypeError("keep() returned '1' among the steps to keep")"""),
        (
            lambda steps: [step > 1 for step in steps],
            "TypeError('keep() returned False among the steps to keep')",
        ),
        (
            lambda steps: np.array(steps) > 1,
            f"TypeError('keep() returned {np.False_!r} among the steps to keep')",
        ),
        (
            lambda steps: {float(step) for step in steps[-1:]},
            "TypeError('keep() returned 3.0 among the steps to keep')",
        ),
        (failing, "KeyError('loss')"),
    ],
    ids=["None", "number", "text", "mask", "array mask", "floats", "generator"],
)
async def test_a_policy_that_names_no_steps_deletes_nothing_and_the_save_stands(
    tmp_path: Path, answer: Any, why: str
) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            await save(ckpt, step)
    async with asyncckpt.Checkpointer(tmp_path, keep=Answers(answer)) as ckpt:
        report = await save(ckpt, 3)
        assert report.notes == (f"no step was deleted, because Answers() failed: {why}",)
        assert report.deleted_steps == ()
        assert await ckpt.steps() == [1, 2, 3]


async def test_a_policy_that_cannot_even_say_its_name_fails_no_save(tmp_path: Path) -> None:
    class Nameless:
        def keep(self, steps: Any, metrics: Any) -> set[int]:
            raise ValueError("broken")

        def __repr__(self) -> str:
            raise RuntimeError("broken too")

    async with asyncckpt.Checkpointer(tmp_path, keep=Nameless()) as ckpt:
        report = await save(ckpt, 1)
    assert report.notes == ("no step was deleted, because Nameless failed: ValueError('broken')",)


async def test_a_root_that_cannot_be_listed_is_a_note_of_a_save_that_stands(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, keep=KeepLast(1)) as ckpt:
        await save(ckpt, 1)
        Script(ckpt).fail("names", StoreError("busy"))
        report = await save(ckpt, 2)
        assert report.notes == ("no step was deleted: busy",)
        assert (await save(ckpt, 3)).deleted_steps == (1, 2)
