"""Whatever fails in a save by several processes, fails on all of them, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import Checkpointer, LeafOptions, SaveOptions, ShardedArray, options
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    DeadlineExceededError,
    FencedError,
    MismatchError,
    SaveAbortedError,
    StoreError,
    UnsupportedLeafError,
    UsageError,
)
from asyncckpt.save import shared_plan, snapshot
from asyncckpt.save.commit import Committable
from asyncckpt.save.shared import SharedSave
from asyncckpt.session.root import Root
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.paths import Layout
from tests.script import Script
from tests.session.together.job import Job, Part, equal, state

two_and_four = pytest.mark.parametrize("job", [2, 4], indirect=True)


def fails(
    job: Job, part: Part, kind: type[BaseException], *words: str, **options: Any
) -> list[Any]:
    """Check that all processes raise this error, that nothing is left, and the next save works."""
    results = job.play(part, **options)
    for error in results:
        assert isinstance(error, kind), results
        for word in words:
            assert word in str(error), error
    assert job.left() == []

    async def again(ckpt: Checkpointer, process: int) -> Any:
        assert 1 not in await ckpt.steps()
        return await ckpt.save(1, state())

    assert [r.step for r in job.play(again)] == [1] * job.count
    return results


def on(process: int, error: Callable[[], Any]) -> Part:
    """Return a part in which one process saves the result of `error`, all others the state."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        return await ckpt.save(1, error() if this == process else state())

    return part


@pytest.mark.parametrize("process", [0, 1])
def test_an_unsupported_leaf_on_one_process(job: Job, process: int) -> None:
    part = on(process, lambda: {**state(), "odd": object()})
    fails(job, part, UnsupportedLeafError, "odd")


@pytest.mark.parametrize("process", [0, 1])
def test_a_leaf_that_a_worker_thread_refuses_on_one_process(
    job: Job, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "AT_ONCE", 0)
    part = on(process, lambda: {**state(), "odd": torch.ones(3).to_sparse()})
    fails(job, part, UnsupportedLeafError, "odd")


@pytest.mark.parametrize("process", [0, 1])
def test_another_tree_on_one_process(job: Job, process: int) -> None:
    part = on(process, lambda: {**state(), "more": np.ones(3)})
    fails(job, part, MismatchError, save_options=SaveOptions(tree="same"))


@pytest.mark.parametrize("name", ["w", "b"])
def test_replicas_that_differ(job: Job, name: str) -> None:
    def other() -> dict[str, Any]:
        tree = state()
        tree["params"][name].flat[3] += 1
        return tree

    fails(job, on(1, other), MismatchError, f"params/{name}", "process 0", "process 1")


def test_replicas_in_several_local_shards_that_differ(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        values = np.full((64, 1024), process, np.float32)
        return await ckpt.save(1, {"w": ShardedArray.tiles(values, (2, 1))})

    fails(job, part, MismatchError, "w: ", "process 0", "process 1")


def replicated_shards(process: int, values: list[int]) -> dict[str, Any]:
    """A leaf of 8 numbers in two shards: processes 0 and 2 hold one, 1 and 3 the other."""
    offset = 4 * (process % 2)
    return {"s": ShardedArray((8,), "int32", [((offset,), np.array(values, np.int32))])}


@pytest.mark.parametrize("job", [4], indirect=True)
@pytest.mark.parametrize("process", [0, 3])
def test_replicas_of_small_shards_that_differ(job: Job, process: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, replicated_shards(this, [1, 2, 3, 4]))
        values = [1, 2, 3, 5] if this == process else [1, 2, 3, 4]
        return await ckpt.save(2, replicated_shards(this, values))

    for error in job.play(part):
        assert isinstance(error, MismatchError), error
        assert error.path == "s"
        assert f"process {process} (" in str(error)
        assert f"process {(process + 2) % 4} (" in str(error)
    assert job.left() == []


@pytest.mark.parametrize("job", [4], indirect=True)
def test_of_small_shards_that_may_differ_the_lowest_holder_counts(job: Job) -> None:
    options = SaveOptions(leaf_options=lambda path, spec: LeafOptions(replicas="first"))

    async def part(ckpt: Checkpointer, this: int) -> Any:
        return await ckpt.save(1, replicated_shards(this, [this] * 4), options=options)

    reports = job.play(part)
    assert all(isinstance(report, asyncckpt.SaveReport) for report in reports), reports
    restored = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert restored["s"].tolist() == [0] * 4 + [1] * 4


async def different(ckpt: Checkpointer, process: int) -> Any:
    return await ckpt.save(1, {"w": np.full(10, process)})


async def equal_values(ckpt: Checkpointer, process: int) -> Any:
    return await ckpt.save(2, {"w": np.ones(10)})


def test_a_restarted_job_says_why_the_one_before_failed(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.play(different)
    notes = [path.name for path in (job.root / ".asyncckpt").glob("error-*")]
    assert notes == ["error-0"], "one note, by the process that found the difference"
    job.play(equal_values)
    (line,) = [text for text in caplog.messages if "in an earlier job" in text]
    assert "process 0 (" in line and "w: " in line and "hold different values" in line
    assert not list((job.root / ".asyncckpt").glob("error-*"))
    caplog.clear()
    job.play(lambda ckpt, process: ckpt.save(3, {"w": np.ones(10)}))
    assert "in an earlier job" not in caplog.text


def test_a_save_that_succeeds_removes_the_last_error(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        with pytest.raises(MismatchError):
            await different(ckpt, process)
        await equal_values(ckpt, process)

    assert job.play(part) == [None] * job.count
    assert not list((job.root / ".asyncckpt").glob("error-*"))


def test_a_job_that_was_taken_over_is_fenced_on_all_processes(job: Job, tmp_path: Path) -> None:
    later = Job(tmp_path / "later", job.count)
    later.root = job.root

    async def take_over(ckpt: Checkpointer, process: int) -> Any:
        assert await ckpt.latest_step() == 1
        return (await ckpt.save(2, state(2))).step

    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, state(1))
        assert (await ckpt.inspect(1)).epoch == 1
        if process == 0:  # the others come to their next save, and wait
            assert await asyncio.to_thread(later.play, take_over) == [2] * job.count
        for step in (3, 2, 4):
            # Process 0 does not wait when it fails, and may soon be two calls ahead.
            with pytest.raises(FencedError, match="the run was taken over by claim 2") as caught:
                await ckpt.save(step, state(step))
            assert (caught.value.epoch, caught.value.visible) == (1, False)
            assert caught.value.claimed_by is not None and caught.value.claimed_ns is not None
        with pytest.raises(FencedError):
            await ckpt.delete(1)
        with pytest.raises(FencedError):
            await ckpt.delete_after(0)
        return await ckpt.steps()

    assert job.play(part) == [[1, 2]] * job.count


def test_a_job_that_only_deletes_takes_over_too(job: Job) -> None:
    async def save(ckpt: Checkpointer, process: int) -> Any:
        for step in (1, 2):
            await ckpt.save(step, state(step))

    async def delete(ckpt: Checkpointer, process: int) -> Any:
        return await ckpt.delete_after(1)

    assert job.play(save) == [None] * job.count
    assert job.play(delete) == [[2]] * job.count
    assert sorted(path.name for path in (job.root / ".asyncckpt").glob("claim-*")) == [
        "claim-1",
        "claim-2",
    ]


def test_an_error_that_cannot_be_noted_is_raised_all_the_same(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(LocalStore, "keep_note", broken)
    assert all(isinstance(error, MismatchError) for error in job.play(different))


def test_control_without_the_comparison_different_replicas_are_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncckpt.save import merge

    monkeypatch.setattr(merge, "compare", lambda *_: None)
    job = Job(tmp_path, 2)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        return await ckpt.save(1, {"w": np.full((64, 1 << 18), process, np.float32)})

    job.play(part)
    values = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))["w"]
    assert {0.0, 1.0} <= set(np.unique(values)), "parts of both, and nobody noticed"


def test_control_without_the_digest_a_leaf_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(shared_plan, "schema_digest", lambda _: "equal")
    job = Job(tmp_path, 2)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        tree = {"w": np.ones((4, 1 << 20)), "v" if process else "u": np.ones((8, 1 << 18))}
        return await ckpt.save(1, tree)

    reports = job.play(part)
    assert all(isinstance(report, asyncckpt.SaveReport) for report in reports), reports
    restored = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert "v" not in restored, "a leaf is lost, and nobody noticed"


def test_a_scalar_that_differs(job: Job) -> None:
    errors = fails(job, on(1, lambda: {**state(), "step": 13}), MismatchError, "step")
    assert all("PerProcess; else find out why" in str(error) for error in errors)


def test_replicas_that_may_differ_are_those_of_the_first_process(job: Job) -> None:
    options = SaveOptions(
        leaf_options=lambda path, spec: LeafOptions(replicas="first") if "w" in path else None
    )

    async def part(ckpt: Checkpointer, process: int) -> Any:
        tree = state()
        tree["params"]["w"] += process
        return await ckpt.save(1, tree, options=options)

    assert [r.step for r in job.play(part)] == [1] * job.count
    restored = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert equal(restored, state())


def test_a_step_that_exists(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, state())
        return await ckpt.save(1, state())

    results = job.play(part)
    assert all(isinstance(error, CheckpointExistsError) for error in results), results
    assert job.left() == []


@two_and_four
def test_overwrite_replaces_a_step(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, state())
        return await ckpt.save(1, state(1), overwrite=True)

    assert [r.step for r in job.play(part)] == [1] * job.count
    assert equal(asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single")), state(1))
    assert job.left() == []


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_never_comes(job: Job, process: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        return await ckpt.save(1, state())

    others = set(range(job.count)) - {process}
    options = SaveOptions(arrival_s=1.0)
    results = job.play(part, only=others, save_options=options)
    for this in others:
        assert isinstance(results[this], AsyncCheckpointError)
        assert 'coordinator="single"' in str(results[this])
    assert job.left() == []


@pytest.mark.parametrize("process", [0, 1])
def test_a_checkpointer_that_one_process_has_closed_is_noticed_at_once(
    job: Job, process: int
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        if this == process:
            await ckpt.close()
        return await ckpt.save(2, state())

    begun = time.monotonic()
    results = job.play(part)  # arrival_s is 300 s
    assert time.monotonic() - begun < 15
    assert isinstance(results[process], ClosedError)
    assert isinstance(results[1 - process], UsageError)
    assert f"process {process} (" in str(results[1 - process])
    assert "has closed the Checkpointer" in str(results[1 - process])
    assert job.left() == []


@two_and_four
def test_only_process_0_sweeps(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeping: list[str] = []
    real = Root.sweep

    async def sweep(root: Root) -> None:
        sweeping.append(threading.current_thread().name)
        await real(root)

    monkeypatch.setattr(Root, "sweep", sweep)

    async def part(ckpt: Checkpointer, process: int) -> Any:
        assert len(sweeping) <= 1
        await ckpt.save(1, state())

    assert job.play(part) == [None] * job.count
    assert len(sweeping) == 1


@two_and_four
@pytest.mark.parametrize("process", [0, 1])
def test_cancelling_on_one_process_aborts_on_all(job: Job, process: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        pending = await ckpt.start_save(1, {"w": np.ones((1000, 5000))})
        if this == process:
            pending.cancel()
        return await pending

    results = job.play(part)
    for error in results:
        assert isinstance(error, (SaveAbortedError, asyncckpt.SaveReport)), results
    kinds = {type(result) for result in results}
    assert len(kinds) == 1, "some say that it was saved, others that it was not"
    assert job.left() == []


def test_a_deadline_that_passes(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        if this == 1:
            await asyncio.sleep(1.5)
        return await ckpt.save(1, state(), options=SaveOptions(deadline_s=1.0))

    fails(job, part, DeadlineExceededError)


@pytest.mark.parametrize("kind", [StoreError, RuntimeError])
def test_a_save_stays_committed_if_a_process_cannot_end_its_share(
    kind: type[Exception], job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        Script(ckpt).fail("leave", kind("disk on fire"))
        return [(await ckpt.save(step, state())).plan_cached for step in (1, 2)]

    assert job.play(part) == [[False, True]] * job.count
    assert "disk on fire" in caplog.text
    assert asyncio.run(asyncckpt.verify(job.root / "1")).ok


def test_a_save_cancelled_after_its_success_is_no_failure(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        leave = Script(ckpt).hold("leave")
        pending = await ckpt.start_save(1, state())
        if this == 1:
            await leave.reached()
            pending.cancel()
            leave.go()
        return (await pending).step

    assert job.play(part) == [1] * job.count


def test_a_save_cancelled_as_process_0_ends_it_is_no_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, conclude = Round.watch, SharedSave._conclude

    async def watching(self: Round) -> None:
        await watch(self)
        if self.leads:
            await asyncio.Event().wait()  # as in a long pause between two polls

    async def concluded(self: SharedSave, made: Committable) -> Committable:
        made = await conclude(self, made)
        task = asyncio.current_task()
        if self.round_.leads and task is not None:
            task.cancel()
        return made

    async def part(ckpt: Checkpointer, this: int) -> Any:
        return (await ckpt.save(1, state())).step

    monkeypatch.setattr(Round, "watch", watching)
    monkeypatch.setattr(SharedSave, "_conclude", concluded)
    assert job.play(part) == [1] * job.count


def test_another_step_on_one_process(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        return await ckpt.save(1 + this, state())

    fails(job, part, UsageError, "save(1)", save_options=SaveOptions(arrival_s=3.0))


def test_a_root_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, written = saved_on_two_disks(tmp_path, monkeypatch)
    for error in results:
        assert isinstance(error, UsageError), results
        assert "share" in str(error)
    assert not [place for place in written if "host1" in place], "written before it was seen"
    assert not [p for p in tmp_path.glob("host*/**/d/*") if p.is_file()]


def test_control_without_the_check_of_the_root_a_process_writes_to_its_own_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncckpt.stores.local import attempt as attempts

    def made(layout: Layout, name: str) -> list[str]:
        path = os.path.join(layout.epoch(1), name)
        os.makedirs(path, exist_ok=True)
        return [path]

    monkeypatch.setattr(attempts, "_attempts", made)
    monkeypatch.setattr(attempts, "has_mark", lambda *_: True)
    _, written = saved_on_two_disks(tmp_path, monkeypatch)
    assert [place for place in written if "host1" in place], "on its own disk, and nobody noticed"


def saved_on_two_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str]]:
    """Return the outcome of a save by two processes with different disks, and their files."""
    from asyncckpt.save import shared

    monkeypatch.setattr(shared, "JOIN_S", 0.2)
    monkeypatch.setattr(shared, "VISIBLE_S", 0.5)
    monkeypatch.setattr(shared_plan, "VISIBLE_S", 0.5)
    job, written = Job(tmp_path, 2), []
    write = LocalDataFile.write

    async def noted(self: LocalDataFile, *args: Any, **keywords: Any) -> Any:
        written.append(self._location)
        return await write(self, *args, **keywords)

    monkeypatch.setattr(LocalDataFile, "write", noted)

    async def main(process: int) -> Any:
        # The processes call it by one name, and each sees another directory.
        root = tmp_path / f"host{process}"
        async with Checkpointer(root, coordinator=job.coordinator(process)) as ckpt:
            ckpt._session.processes._root = "one name"
            return await ckpt.save(1, state())

    return job.run(main), written


def test_the_first_call_of_all_divides_memory_that_was_prepared_before(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MAX_DEFAULT_BUDGET_NBYTES", 128 << 20)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        prepared = await ckpt.prepare({"w": np.zeros(200 << 20, np.uint8)})
        await ckpt.latest_step()
        runtime = ckpt._session.runtime
        return prepared >> 20, runtime.budget.capacity >> 20, runtime.pool.allocated_nbytes >> 20

    assert job.play(part) == [(128, 64, 64)] * job.count


def test_retention_is_that_of_process_0(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in range(4):
            await ckpt.save(step, state())
        await ckpt.wait()
        await ckpt.latest_step()
        return await ckpt.steps()

    assert job.play(part, keep=asyncckpt.KeepLast(2)) == [[2, 3]] * job.count


def test_deleting_is_done_once(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in range(4):
            await ckpt.save(step, state())
        await ckpt.delete(0)
        assert await ckpt.delete_after(1) == [2, 3]
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
            await ckpt.delete(0)
        return await ckpt.steps()

    assert job.play(part) == [[1]] * job.count


def test_the_result_of_a_call_may_be_longer_than_a_message(job: Job) -> None:
    """Such as that of `delete_after` with thousands of steps."""
    long = list(range(10**15, 10**15 + 20_000))

    async def found() -> list[int]:
        return long

    async def part(ckpt: Checkpointer, this: int) -> Any:
        return await ckpt._session.call_once("steps()", found).wait()

    assert job.play(part) == [long] * job.count


def test_other_calls_on_one_process(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        return await (ckpt.latest_step() if this else ckpt.delete(1))

    results = job.play(part)
    assert all(isinstance(error, UsageError) for error in results), results
