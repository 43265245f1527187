"""Restores by several processes, and what ends them on all."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, RestoreOptions, SaveOptions
from asyncckpt.coordinators.rounds import Round
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    DeadlineExceededError,
    MismatchError,
    RestoreError,
    SaveError,
    StoreError,
    TreeMismatchError,
    UnsupportedLeafError,
    UsageError,
)
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from tests.script import Script
from tests.session.together.job import Job, equal, state

two_and_four = pytest.mark.parametrize("job", [2, 4], indirect=True)


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


class Part:
    """An object that takes its state in the thread that made it, unless it refuses."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.value = refuses, 0
        self.thread = threading.get_ident()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert threading.get_ident() == self.thread
        if self.refuses:
            raise ValueError("not this one")
        self.value = state["value"]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("process", [0, 1])
def test_an_object_that_refuses_its_state_on_one_process_fails_on_all(
    job: Job, process: int, atomic: bool
) -> None:
    async def part(ckpt: Checkpointer, this: int) -> Any:
        saved = Part()
        saved.value = 7
        await ckpt.save(1, {"part": saved, "x": np.ones(3)})
        target = {"part": Part(refuses=this == process), "x": np.zeros(3)}
        with pytest.raises(RestoreError, match=r"part: .*refused.*not this one") as caught:
            await ckpt.restore_into(target, options=RestoreOptions(atomic=atomic))
        assert set(caught.value.written) >= {"x"}
        fresh = {"part": Part(), "x": np.zeros(3)}
        report = await ckpt.restore_into(fresh)
        assert fresh["part"].value == 7, "calls are in step"
        return report.step, str(caught.value)

    steps, texts = zip(*job.play(part), strict=True)
    assert steps == (1, 1)
    assert texts[1 - process].startswith(f"process {process} (")
    assert texts[process] in texts[1 - process]


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
