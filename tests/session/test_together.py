"""Saves and restores by several `Checkpointer`s that coordinate, in threads of one process.

Real processes, kills and runtimes are in `tests/processes`; what can be seen without them is here.
"""

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
    SaveError,
    ShapeMismatchError,
    StoreError,
    TreeMismatchError,
    UnsupportedLeafError,
    UsageError,
)
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from asyncckpt.save import shared_plan
from asyncckpt.save.commit import Committable
from asyncckpt.save.shared import SharedSave
from asyncckpt.session.root import Root
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.stores.paths import Layout
from tests.script import Script
from tests.session.together.job import Job, Part, equal, state

two_and_four = pytest.mark.parametrize("job", [2, 4], indirect=True)


@two_and_four
def test_all_processes_save_one_checkpoint_and_restore_it(job: Job) -> None:
    tree = state()

    async def part(ckpt: Checkpointer, process: int) -> Any:
        first = await ckpt.save(1, tree)
        pending = await ckpt.start_save(2, tree)
        second = await pending
        assert second.plan_cached and not first.plan_cached
        assert await ckpt.latest_step() == 2
        assert equal(await ckpt.restore(like=tree), tree)
        return second

    reports = job.play(part)
    assert not [r for r in reports if isinstance(r, BaseException)], reports
    assert len({r.save_id for r in reports}) == 1
    parts = reports[0].processes
    assert [part.process for part in parts] == list(range(job.count))
    assert sum(part.written_nbytes for part in parts) <= reports[0].stored_nbytes
    assert all(0 < part.blocked_s <= part.written_s <= reports[0].total_s + 1 for part in parts)
    assert [part.process for part in reports[1].processes] == [1]
    assert len({r.stored_nbytes for r in reports}) == 1
    assert job.left() == []
    # Any single process reads it, and verifies every byte.
    assert asyncio.run(asyncckpt.verify(job.root / "2")).ok
    assert equal(asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single")), tree)


def test_process_0_announces_each_attempt_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each announcement posts a beat, and reads those of all processes."""
    announced: list[int] = []
    begun = Round.begun

    def counted(round_: Round) -> None:
        announced.append(round_.number)
        begun(round_)

    monkeypatch.setattr(Round, "begun", counted)

    async def part(ckpt: Checkpointer, process: int) -> None:
        await ckpt.save(1, state())
        await ckpt.save(2, state())

    assert job.play(part) == [None, None]
    assert announced == [0, 1]


@two_and_four
def test_the_bytes_are_spread_over_the_processes_and_written_once(job: Job) -> None:
    tree = {f"w{i}": np.full((64, 64, 64), i, np.float32) for i in range(32)}  # 1 MiB each

    async def part(ckpt: Checkpointer, process: int) -> Any:
        return await ckpt.save(1, tree)

    report = job.play(part)[0]
    assert report.nbytes <= report.stored_nbytes <= 1.02 * report.nbytes + 65536
    nbytes: dict[str, int] = {}
    for path in (job.root / "1/default/d").iterdir():
        process = path.name[33:].partition("-")[0] if path.name.count("-") > 1 else "0"
        if not path.name.endswith("-index"):
            nbytes[process] = nbytes.get(process, 0) + path.stat().st_size
    assert len(nbytes) == job.count
    assert max(nbytes.values()) <= 1.05 * sum(nbytes.values()) / job.count


def test_sharded_arrays_are_saved_in_parts_and_restored_on_another_count(tmp_path: Path) -> None:
    four, two = Job(tmp_path, 4), Job(tmp_path, 2)
    whole = np.arange(4 * 6 * 1000, dtype=np.float64).reshape(24, 1000)
    small = np.arange(8, dtype=np.int32)

    def tree(process: int, count: int, *, filled: bool) -> dict[str, Any]:
        parts = {}
        for name, array in (("w", whole), ("s", small)):
            rows = len(array) // count
            held = array[process * rows : (process + 1) * rows]
            offset = (process * rows, *(0,) * (array.ndim - 1))
            shard = held.copy() if filled else np.zeros_like(held)
            parts[name] = ShardedArray(array.shape, array.dtype, [(offset, shard)])
        return parts

    async def save(ckpt: Checkpointer, process: int) -> Any:
        return await ckpt.save(5, tree(process, 4, filled=True))

    reports = four.play(save)
    assert not [r for r in reports if isinstance(r, BaseException)], reports
    restored = asyncio.run(asyncckpt.restore(four.root / "5", coordinator="single"))
    assert np.array_equal(restored["w"], whole)
    assert np.array_equal(restored["s"], small)

    async def restore(ckpt: Checkpointer, process: int) -> Any:
        target = tree(process, 2, filled=False)
        await ckpt.restore_into(target)
        wanted = tree(process, 2, filled=True)
        return all(
            np.array_equal(target[name].shards[0][1], wanted[name].shards[0][1]) for name in wanted
        )

    assert two.play(restore) == [True, True]


# ------------------------------------------------------------------------------- every failure


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
    from asyncckpt.save import shared_plan

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
        pending = await ckpt.start_save(1, {"w": np.ones((4000, 5000))})
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
    from asyncckpt.stores.local import joined

    def made(layout: Layout, name: str) -> list[str]:
        path = os.path.join(layout.epoch(1), name)
        os.makedirs(path, exist_ok=True)
        return [path]

    monkeypatch.setattr(joined, "_attempts", made)
    monkeypatch.setattr(joined, "has_mark", lambda *_: True)
    _, written = saved_on_two_disks(tmp_path, monkeypatch)
    assert [place for place in written if "host1" in place], "on its own disk, and nobody noticed"


def saved_on_two_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[str]]:
    """Return the outcome of a save by two processes with different disks, and their files."""
    from asyncckpt.save import shared, shared_plan

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


# ------------------------------------------------------------------------------------- restores


def test_a_target_that_does_not_fit_on_one_process_reads_nothing_on_any(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        like = state(1)
        if this == 1:
            like["params"]["w"] = np.zeros((2, 2))
        await ckpt.restore_into(like)

    results = job.play(part)
    for error in results:
        assert isinstance(error, MismatchError), results
        assert "params/w" in str(error)


def test_what_no_process_wants_is_unexpected_and_what_one_wants_is_not(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        one = {"params": state()["params"]}
        two = {key: value for key, value in state().items() if key != "params"}
        mine = await ckpt.restore(like=two if this else one)
        assert equal(mine, two if this else one)
        with pytest.raises(TreeMismatchError, match="no process") as caught:
            await ckpt.restore(like=one)
        return str(caught.value)

    for text in job.play(part):
        assert "step" in text and "params" not in text, text


def restored_until_one_fails(
    job: Job, process: int, *, atomic: bool
) -> list[tuple[AsyncCheckpointError, Any]]:
    """Return error and target of each process, if reading fails on one after the other has read."""
    read = threading.Event()

    def note(progress: asyncckpt.Progress) -> None:
        if progress.done_nbytes >= progress.total_nbytes:
            read.set()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, {"w": np.arange(200_000.0)})
        target = {"w": np.full(200_000, 7.0)}
        options = asyncckpt.RestoreOptions(atomic=atomic)
        held = None
        if this == process:
            script = Script(ckpt)
            held = script.hold("read_into")
            script.fail("read_into", StoreError("bad sector"))
        progress = None if held else note
        restoring = ckpt.restore_into(target, options=options, progress=progress)
        task = asyncio.create_task(restoring)
        if held is not None:
            assert await asyncio.to_thread(read.wait, 20)
            held.go()
        with pytest.raises(StoreError, match="bad sector") as caught:
            await task
        return caught.value, target

    return job.play(part)


@pytest.mark.parametrize("process", [0, 1])
def test_an_atomic_restore_that_fails_on_one_process_changes_no_target(
    job: Job, process: int
) -> None:
    for error, target in restored_until_one_fails(job, process, atomic=True):
        assert (target["w"] == 7).all() and error.written == ()


@pytest.mark.parametrize("process", [0, 1])
def test_a_restore_that_fails_on_one_process_lists_what_was_written_on_each(
    job: Job, process: int
) -> None:
    for error, _ in restored_until_one_fails(job, process, atomic=False):
        assert error.written == ("w",)
        assert "1 targets are undefined" in error.__notes__[-1]


def test_an_atomic_restore_is_atomic_on_all_processes_or_none(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        await ckpt.restore_into(state(), options=asyncckpt.RestoreOptions(atomic=bool(this)))

    for error in job.play(part):
        assert isinstance(error, UsageError)
        assert "atomic=True here, and with atomic=False on process 0" in str(error)


@pytest.mark.parametrize("process", [0, 1])
def test_a_deadline_of_a_restore_ends_the_wait_for_a_process_that_does_not_come(
    job: Job, process: int
) -> None:
    passed = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
            if this == process:
                await ckpt.restore(options=asyncckpt.RestoreOptions(deadline_s=0.2))
            else:
                assert await asyncio.to_thread(passed.wait, 20)
                await ckpt.restore()
        passed.set()
        return await ckpt.latest_step()

    assert job.play(part) == [1] * job.count


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("strict", [True, False])
def test_a_process_may_have_and_want_nothing(job: Job, process: int, strict: bool) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        tree = {"params": {} if this == process else state()["params"]}
        await ckpt.save(1, tree)
        report = await ckpt.restore_into(tree, strict=strict)
        assert report.leaf_count == len(tree["params"])
        return equal(await ckpt.restore(like=tree, strict=strict), tree)

    assert job.play(part) == [True] * job.count


def test_processes_that_open_different_saves_of_a_step_restore_neither(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, replaced = threading.Event(), threading.Event()
    step, matched = RestoreAgreement.step, RestoreAgreement.matched

    async def replace() -> None:
        async with Checkpointer(job.root, coordinator="single") as other:
            await other.save(1, {"value": 2}, overwrite=True)

    async def stepped(self: RestoreAgreement, *args: Any) -> Any:
        chosen = await step(self, *args)
        if not self.round.leads and not replaced.is_set():
            assert await asyncio.to_thread(opened.wait, 20)
            await asyncio.to_thread(asyncio.run, replace())
            replaced.set()
        return chosen

    async def opening(self: RestoreAgreement, *args: Any) -> None:
        opened.set()
        await matched(self, *args)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, {"value": 1})
        with pytest.raises(CheckpointNotFoundError, match="was replaced") as caught:
            await ckpt.restore()
        assert caught.value.found == "replaced"
        return (await ckpt.restore())["value"]

    monkeypatch.setattr(RestoreAgreement, "step", stepped)
    monkeypatch.setattr(RestoreAgreement, "matched", opening)
    assert job.play(part) == [2] * job.count


def test_different_steps_are_refused(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        await ckpt.save(2, state())
        return await ckpt.restore(1 if this == 0 else 2)

    assert all(isinstance(error, UsageError) for error in job.play(part))


def test_without_a_checkpoint_all_say_so(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        assert await ckpt.latest_step() is None
        return await ckpt.restore()

    assert all(isinstance(error, CheckpointNotFoundError) for error in job.play(part))


def test_one_shot_functions_coordinate_and_leave_no_keys(job: Job) -> None:
    async def main(process: int) -> Any:
        coordinator = job.coordinator(process)
        await asyncckpt.save(job.root / "final", state(), coordinator=coordinator)
        tree = await asyncckpt.restore(job.root / "final", coordinator=coordinator)
        return equal(tree, state())

    assert job.run(main) == [True] * job.count
    left = [str(path.relative_to(job.keys)) for path in job.keys.rglob("*") if path.is_file()]
    assert left == []


def test_a_second_save_waits_for_nobody_before_it_returns(job: Job) -> None:
    gate = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        if this == 1:
            await asyncio.to_thread(gate.wait, 20)
        pending = await ckpt.start_save(2, state())
        if this == 0:
            assert not pending.done()
            gate.set()
        return (await pending).step

    assert job.play(part) == [2] * job.count


@pytest.mark.parametrize("choice", ["skip", "error"])
def test_process_0_decides_whether_saves_overlap(job: Job, choice: Any) -> None:
    options = SaveOptions(on_overlap=choice)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        first = await ckpt.start_save(2, {"w": np.ones((3000, 4000))}, options=options)
        if this:
            await first  # so that this process has none in flight; the word of process 0 counts
        try:
            second = await ckpt.start_save(3, state(), options=options)
        except UsageError as error:
            await first
            return str(error)
        report = await second
        await first
        return second.skipped, report.skipped

    results = job.play(part)
    assert len({str(r) for r in results}) == 1 or choice == "error", results
    if choice == "skip":
        assert results[0] in ((True, True), (False, False))
    else:
        assert all("in flight" in str(r) or r == (False, False) for r in results), results


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("choice", ["skip", "error"])
def test_saves_that_are_skipped_end_no_save_in_flight(
    job: Job, monkeypatch: pytest.MonkeyPatch, choice: Any, late: int
) -> None:
    """Process 0 skips them at once, and is then several calls ahead of a late process."""
    options = SaveOptions(on_overlap=choice)
    gate, looked = threading.Event(), threading.Event()
    check = Round._check_decision

    async def watched(round_: Round) -> None:  # whether process 0 takes part, every second
        await check(round_)
        looked.set()

    monkeypatch.setattr(Round, "_check_decision", watched)
    tree = {"w": np.zeros(1 << 20, np.uint8)}

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, tree)
        if this == late:
            looked.clear()
            # The others wait for the word of process 0, or it is ahead of process 1.
            assert await asyncio.to_thread((gate if late else looked).wait, 20)
        held = Script(ckpt).hold("seal") if this == 0 else None
        first = await ckpt.start_save(1, tree, options=options)
        for step in (2, 3, 4):
            if choice == "error":
                with pytest.raises(UsageError, match="another save is in flight"):
                    await (await ckpt.start_save(step, tree, options=options))
            else:
                assert (await (await ckpt.start_save(step, tree, options=options))).skipped
        if this == 0:
            if late and job.count > 2:
                assert await asyncio.to_thread(looked.wait, 20)
            gate.set()
        if held is not None:
            held.go()
        return (await first).step, (await ckpt.save(5, tree)).step, await ckpt.steps()

    assert job.play(part) == [(1, 5, [0, 1, 5])] * job.count


def test_a_deadline_of_a_save_ends_the_wait_for_the_word_of_process_0(job: Job) -> None:
    options = SaveOptions(on_overlap="skip", deadline_s=0.2)
    passed = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(1, state())
        if this == 0:
            assert await asyncio.to_thread(passed.wait, 20)
        with pytest.raises(DeadlineExceededError, match=r"within 0\.2 s"):
            await (await ckpt.start_save(2, state(), options=options))
        passed.set()
        return (await ckpt.save(3, state())).step

    assert job.play(part) == [3] * job.count


@pytest.mark.parametrize("choice", ["skip", "error"])
@pytest.mark.parametrize("waits", [0, 1])
@pytest.mark.parametrize("call", ["save", "start_save"])
def test_a_save_that_waits_and_one_that_does_not_fail_together(
    job: Job, call: str, waits: int, choice: Any
) -> None:
    """Process 0 has no answer for a process that asks whether a save is in flight on it."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        with pytest.raises(UsageError) as caught:
            if this == waits and call == "save":
                await ckpt.save(1, state())
            else:
                options = SaveOptions(on_overlap="wait" if this == waits else choice)
                await (await ckpt.start_save(1, state(), options=options))
        assert "called save(1)" in str(caught.value)
        assert f"called start_save(1, on_overlap='{choice}')" in str(caught.value)
        await ckpt.save(2, state())
        return await ckpt.steps()

    assert job.play(part) == [[0, 2]] * job.count


@pytest.mark.parametrize("other", ["start_save(3, on_overlap='skip')", "save(2)"])
def test_a_save_in_place_of_one_that_process_0_skips_fails_alone(job: Job, other: str) -> None:
    options = SaveOptions(on_overlap="skip")
    gate = threading.Event()

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        if this == 1:
            await asyncio.to_thread(gate.wait, 20)
        first = await ckpt.start_save(1, state(), options=options)
        if this == 0:
            assert (await (await ckpt.start_save(2, state(), options=options))).skipped
            gate.set()
        else:
            with pytest.raises(UsageError) as caught:
                if other == "save(2)":
                    await ckpt.save(2, state())
                else:
                    await (await ckpt.start_save(3, state(), options=options))
            assert f"called {other} where" in str(caught.value)
            assert "called start_save(2, on_overlap='skip'):" in str(caught.value)
        await first
        await ckpt.save(4, state())
        return await ckpt.steps()

    assert job.play(part) == [[0, 1, 4]] * job.count


@two_and_four
@pytest.mark.parametrize("missing", [0, 1])
def test_a_save_that_one_process_leaves_out_fails_alone(job: Job, missing: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        if this != missing:
            with pytest.raises(SaveError, match=rf"save\(1\); process {missing} \(.* did not"):
                await ckpt.save(1, state())
        await asyncio.to_thread(together.wait, 20)
        for step in (2, 3):
            await ckpt.save(step, state())
        return await ckpt.steps()

    together = threading.Barrier(job.count)
    options = SaveOptions(arrival_s=1.0, silence_s=4.0)
    assert job.play(part, save_options=options) == [[0, 2, 3]] * job.count


@pytest.mark.parametrize("missing", [0, 1])
def test_saves_work_again_after_one_that_met_another(job: Job, missing: int) -> None:
    """The save that one process leaves out is still in flight when it makes the next one."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        results: list[Any] = []
        for step in range(1, 6):
            await asyncio.to_thread(together.wait, 20)
            try:
                if step == 1 and this != missing:
                    await ckpt.start_save(1, state())
                elif step > 1:
                    results.append((await ckpt.save(step, state())).step)
            except AsyncCheckpointError as error:
                results.append(error)
        return results

    together = threading.Barrier(job.count)
    options = SaveOptions(on_failed_save="log", arrival_s=4.0)
    results = job.play(part, save_options=options)
    for each in results:
        assert each[-2:] == [4, 5], results
        assert all("save(" in str(result) for result in each[:-3]), results


@pytest.mark.parametrize("missing", [0, 1])
def test_a_call_that_one_process_leaves_out_fails_alone(job: Job, missing: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        if this != missing:
            for step in (7, 8):
                with pytest.raises(SaveError, match=rf"delete\({step}\); process {missing} "):
                    await ckpt.delete(step)
        await asyncio.to_thread(together.wait, 20)
        assert equal(await ckpt.restore(like=state(1)), state())
        return await ckpt.latest_step()

    together = threading.Barrier(job.count)
    options = SaveOptions(arrival_s=0.7, silence_s=4.0)
    assert job.play(part, save_options=options) == [0] * job.count


@pytest.mark.parametrize("process", [0, 1])
def test_the_save_after_one_that_a_process_has_refused_works(job: Job, process: int) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        with pytest.raises(UnsupportedLeafError):
            await ckpt.save(1, {"w": object()} if this == process else state())
        return (await ckpt.save(2, state())).step

    assert job.play(part) == [2] * job.count


# --------------------------------------------------------- trees and values that differ by process


@two_and_four
def test_each_process_may_have_leaves_of_its_own(job: Job) -> None:
    """Pipeline stages: every process has another part of the model, and some leaves in common."""

    def tree(process: int, seed: int = 0) -> dict[str, Any]:
        random = np.random.default_rng([seed, process])
        stage = {"w": random.random((100, 1 + process)), "name": f"stage {process}", "n": process}
        return {"step": 7, "stages": {f"{process}": stage}, "shared": np.arange(5)}

    async def part(ckpt: Checkpointer, process: int) -> Any:
        for seed in (0, 1):
            options = SaveOptions(tree="union")
            report = await ckpt.save(seed, tree(process, seed), options=options)
            info = await ckpt.inspect(seed)
            assert (report.leaf_count, report.nbytes) == (len(info.leaves), info.nbytes)
        with pytest.raises(TreeMismatchError, match="stages"):
            await ckpt.save(3, tree(process), options=SaveOptions(tree="same"))
        back = await ckpt.restore(1, like=tree(process, 5))
        return equal(back, tree(process, 1))

    assert job.play(part) == [True] * job.count, "each gets its own stage back"
    whole = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert list(whole) == ["step", "stages", "shared"]
    for process in range(job.count):
        assert equal(whole["stages"][str(process)], tree(process, 1)["stages"][str(process)])
    assert asyncio.run(asyncckpt.verify(job.root / "1")).ok


@pytest.mark.parametrize("job", [2], indirect=True)
def test_schemas_of_all_processes_do_not_block_the_engine(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be one per process, and each takes milliseconds."""
    threads: set[str] = set()
    decode = shared_plan.decode_schema

    def decoding(*args: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        return decode(*args, **options)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        return (await ckpt.save(1, {f"w{this}": np.ones(3)})).step

    monkeypatch.setattr(shared_plan, "decode_schema", decoding)
    assert job.play(part) == [1] * job.count
    assert threads and "asyncckpt" not in threads, "an engine's own thread"


def test_scalars_may_disappear_from_one_process(job: Job) -> None:
    """Arrays and their parts stay as they were, but the scalars are no longer stored as arrays."""

    async def part(ckpt: Checkpointer, process: int) -> Any:
        half = np.full((32, 1024), process, np.float32)
        w = ShardedArray((64, 1024), "float32", [((32 * process, 0), half)])
        tree = {"w": w, "lr": 0.1, "step": 3}
        options = SaveOptions(tree="union")
        reports = [await ckpt.save(1, tree, options=options)]
        reports.append(await ckpt.save(2, tree if process == 0 else {"w": w}, options=options))
        return [report.orbax for report in reports if process == 0]

    assert job.play(part) == [[True, False], []]
    assert asyncio.run(asyncckpt.verify(job.root / "2")).ok


def test_two_stages_that_number_their_state_alike_are_noticed(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        tree = {f"stage{process}": np.ones(3), "state": {"0": np.full(40_000, float(process))}}
        await ckpt.save(1, tree)

    for error in job.play(part):
        assert isinstance(error, MismatchError)
        assert "state/0" in str(error) and "PerProcess" in str(error)
    assert job.left() == []


def test_one_path_with_two_shapes(job: Job) -> None:
    async def part(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(1, {"w": np.ones(3 + (process == 1))})

    for error in job.play(part):
        assert isinstance(error, MismatchError)
        assert "w" in str(error) and "process 1" in str(error)


@two_and_four
def test_values_per_process_come_back_to_each(job: Job) -> None:
    def tree(process: int) -> dict[str, Any]:
        rng = {"state": np.full(4 + process, process), "count": 10 * process}
        return {"step": 3, "rng": asyncckpt.PerProcess(rng)}

    async def part(ckpt: Checkpointer, process: int) -> Any:
        for step in range(2):
            await ckpt.save(step, tree(process))
        back = await ckpt.restore(like=tree(process))
        assert equal(back["rng"].value, tree(process)["rng"].value)
        everything = await ckpt.restore(like={"step": 0, "rng": asyncckpt.PerProcess.all})
        return [value["count"] for value in everything["rng"]]

    counts = [10 * process for process in range(job.count)]
    assert job.play(part) == [counts] * job.count
    # On another number of processes, the values of all are to be had.
    like = {"step": 0, "rng": asyncckpt.PerProcess.all}
    back = asyncio.run(asyncckpt.restore(job.root / "1", like=like, coordinator="single"))
    for process, value in enumerate(back["rng"]):
        assert equal(value, tree(process)["rng"].value)
    with pytest.raises(
        MismatchError, match=r"PerProcess.*restore\(include='rng', leaves=\"torch\""
    ):
        asyncio.run(asyncckpt.restore(job.root / "1", like=tree(0), coordinator="single"))
    plain = asyncio.run(asyncckpt.restore(job.root / "1", coordinator="single"))
    assert list(plain["rng"]) == list(range(job.count))


def test_a_value_per_process_of_a_single_process(tmp_path: Path) -> None:
    tree = {"rng": asyncckpt.PerProcess(np.arange(3)), "w": np.ones(2)}
    asyncio.run(asyncckpt.save(tmp_path / "x", tree))
    back = asyncio.run(asyncckpt.restore(tmp_path / "x", like=tree))
    assert np.array_equal(back["rng"].value, np.arange(3))
    everything = asyncio.run(
        asyncckpt.restore(tmp_path / "x", like={**tree, "rng": asyncckpt.PerProcess.all})
    )
    assert len(everything["rng"]) == 1
    with pytest.raises(UnsupportedLeafError, match=r"^rng: PerProcess\.all .*use restore\(like="):
        asyncio.run(asyncckpt.restore_into(tmp_path / "x", {"rng": asyncckpt.PerProcess.all}))


def test_values_of_other_processes_come_as_tensors_as_the_error_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tree = {"rng": asyncckpt.PerProcess({"s": np.arange(3)}), "w": np.ones(2)}
    asyncio.run(asyncckpt.save(tmp_path / "x", tree))
    place, path = tmp_path / "x", "rng"
    found = asyncio.run(asyncckpt.restore(place, include=path, leaves="torch"))
    assert list(found) == ["rng"] and torch.equal(found["rng"][0]["s"], torch.arange(3))


def expert(process: int, *, states: int = 0) -> dict[str, Any]:
    """A tree with an expert of each process, the states of its optimizer, and shared leaves."""
    random = np.random.default_rng([process, states])
    moments = {str(n): {"step": 2, "m": random.random(30_000)} for n in range(states)}
    return {
        "step": 7,
        f"opt{process}": {"state": moments, "lr": 0.1},
        f"expert{process}": random.random((3, 3)),
        "shared": np.arange(100_000.0),
        "both": np.ones(3),
    }


async def save_and_mutate(ckpt: Checkpointer, step: int, tree: dict[str, Any]) -> Any:
    """Save the tree, and overwrite its arrays as soon as `start_save` returns."""
    pending = await ckpt.start_save(step, tree)

    def overwrite(value: Any) -> None:
        if isinstance(value, np.ndarray):
            value[...] = -1
        elif isinstance(value, dict):
            list(map(overwrite, value.values()))

    overwrite(tree)
    return await pending


def alike(process: int, *, states: int = 0) -> dict[str, Any]:
    """A tree that all processes have, with the states of one process."""
    more = {"more": {str(n): np.full(40_000, n) for n in range(states)}} if states else {}
    return {"step": 7, "shared": np.arange(100_000.0), **more}


@two_and_four
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("make", "unchanged", "tree"), [(expert, 1, "auto"), (alike, 0, "union")])
def test_the_tree_of_one_process_grows_and_shrinks(
    job: Job, process: int, make: Any, unchanged: int, tree: Any
) -> None:
    """All processes plan again within the same save; when nothing changes, they keep the plan."""
    states = [0, 2, 2, 1, 0]

    def made(this: int, step: int) -> dict[str, Any]:
        changed: dict[str, Any] = make(this, states=states[step] if this == process else unchanged)
        return changed

    async def part(ckpt: Checkpointer, this: int) -> Any:
        reports = [await save_and_mutate(ckpt, step, made(this, step)) for step in range(5)]
        return [report.plan_cached for report in reports[:4]]

    cached = job.play(part, save_options=SaveOptions(tree=tree))
    assert cached == [[False, False, True, False]] * job.count
    for step in range(5):
        merged: dict[str, Any] = {}
        for this in range(job.count):
            merged |= made(this, step)
        back = asyncio.run(asyncckpt.restore(job.root / str(step), coordinator="single"))
        assert equal(back, merged)
        assert asyncio.run(asyncckpt.verify(job.root / str(step))).ok
    assert job.left() == []


@pytest.mark.parametrize("process", [0, 1])
def test_an_array_that_both_held_moves_to_one_process(job: Job, process: int) -> None:
    rows = np.arange(60_000.0).reshape(60, 1000)

    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step, holders in enumerate(({0, 1}, {process}, {process}, {0, 1})):
            tree: dict[str, Any] = {f"own{this}": 1}
            if this in holders:
                tree["rows"] = ShardedArray(rows.shape, "float64", [((0, 0), rows.copy())])
            await ckpt.save(step, tree)

    assert job.play(part) == [None] * 2
    for step in range(4):
        back = asyncio.run(asyncckpt.restore(job.root / str(step), coordinator="single"))
        assert np.array_equal(back["rows"], rows)


def test_a_tree_grows_after_equal_trees_were_saved_in_between(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, expert(this))
        await ckpt.save(1, state())
        await ckpt.save(2, expert(this, states=this))
        await ckpt.save(3, state())

    assert job.play(part) == [None] * 2


CONFLICTS: list[tuple[Any, type[MismatchError], str]] = [
    ({"both": np.ones(4)}, ShapeMismatchError, "both"),
    ({"shared": {"0": np.ones(3)}}, TreeMismatchError, "shared"),
    # A stage that numbers its state as another one does, and gets it later.
    ({"opt0": {"state": {"0": {"step": 2, "m": np.ones(30_000)}}}}, MismatchError, "opt0/state/0"),
]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(("change", "kind", "path"), CONFLICTS)
def test_a_conflict_that_appears_later_gives_its_own_error(
    job: Job, process: int, change: dict[str, Any], kind: type[MismatchError], path: str
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        # The processes are numbered so that either may be the one that changes.
        tree = expert(int(this == process), states=1)
        await ckpt.save(0, tree)
        with pytest.raises(kind, match=f"{path}.*process (0|1).*process (0|1)"):
            await ckpt.save(1, tree | change if this == process else tree)
        return (await ckpt.save(2, tree)).step

    assert job.play(part) == [2] * job.count
    assert job.left() == []


@pytest.mark.parametrize("tree", ["auto", "same"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_leaf_that_changes_on_one_process_is_named(job: Job, process: int, tree: Any) -> None:
    """Equal trees are not compared before each save: the processes have begun to copy."""

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        changed = state()
        if this == process:
            changed["params"]["w"] = np.ones((2, 3))
        with pytest.raises(MismatchError, match=f"params/w.*process {process}") as caught:
            await ckpt.save(1, changed)
        assert 'tree="union"' in str(caught.value)
        return (await ckpt.save(2, state())).plan_cached

    assert job.play(part, save_options=SaveOptions(tree=tree)) == [False] * job.count
    assert job.left() == []


def test_processes_of_one_host_divide_memory_and_threads(job: Job) -> None:
    alone = Checkpointer(job.root / "alone")._session.runtime

    async def part(ckpt: Checkpointer, this: int) -> Any:
        await ckpt.save(0, state())
        runtime = ckpt._session.runtime
        return runtime.budget.capacity, runtime.engine.compute.count

    threads = max(1, alone.engine.compute.count // job.count)
    for nbytes, count in job.play(part):
        assert nbytes <= alone.budget.capacity // job.count
        assert count == threads


def test_a_round_leaves_the_messages_of_two_at_most(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        for step in range(6):
            await ckpt.save(step, state())
        await ckpt.latest_step()
        return len([path for path in job.keys.rglob("*") if path.is_file()])

    # Hellos and beats, and of each of two or three rounds what every process has posted.
    assert max(job.play(part)) <= 10 + 12 * job.count


def test_more_threads_than_memory_compare_replicas_within_the_budget(job: Job) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        ckpt._session.runtime.engine.compute.count = 200
        tree = {f"w{number}": np.full(1 << 17, number, np.float64) for number in range(100)}
        return (await ckpt.save(1, tree)).step

    nbytes = 64 << 20
    assert job.play(part, save_options=SaveOptions(host_memory_nbytes=nbytes)) == [1] * job.count
