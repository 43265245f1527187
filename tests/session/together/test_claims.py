"""Claims of several `Checkpointer`s of one job on one root."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncckpt import Checkpointer, DirectoryCoordinator, FencedError
from tests.session.together.job import Job, state


def test_the_checkpointers_of_a_job_share_one_claim(job: Job) -> None:
    async def main(process: int) -> Any:
        coordinator = job.coordinator(process)
        async with (
            Checkpointer(job.root, coordinator=coordinator) as one,
            Checkpointer(job.root, coordinator=coordinator) as other,
        ):
            for step in range(0, 4, 2):
                await one.save(step, state())
                await other.save(step + 1, state())
            await other.delete(0)
            await one.delete(1)
            return [(await one.inspect(step)).epoch for step in await other.steps()]

    assert job.run(main) == [[1, 1]] * job.count


def test_checkpointers_that_save_at_once_share_one_claim(job: Job) -> None:
    async def main(process: int) -> Any:
        coordinator = job.coordinator(process)
        async with (
            Checkpointer(job.root, coordinator=coordinator) as one,
            Checkpointer(job.root, coordinator=coordinator) as other,
        ):
            # Both have met, in this order; the claims of both saves are made at once.
            await one.latest_step()
            await other.latest_step()
            await asyncio.gather(one.save(1, state()), other.save(2, state()))
            return [(await one.inspect(step)).epoch for step in (1, 2)]

    assert job.run(main) == [[1, 1]] * job.count


def taking_over(job: Job, tmp_path: Path) -> Callable[[], None]:
    """A call in which another job takes over the run, with step 2."""
    later = Job(tmp_path / "later", job.count)
    later.root = job.root

    async def save(ckpt: Checkpointer, process: int) -> Any:
        await ckpt.save(2, state())

    def take_over() -> None:
        assert later.play(save) == [None] * job.count

    return take_over


def test_a_new_checkpointer_takes_over_from_another_job_that_has_taken_over(
    job: Job, tmp_path: Path
) -> None:
    take_over = taking_over(job, tmp_path)

    async def main(process: int) -> Any:
        coordinator = job.coordinator(process)
        async with Checkpointer(job.root, coordinator=coordinator) as one:
            await one.save(1, state())
            if process == 0:
                await asyncio.to_thread(take_over)
            with pytest.raises(FencedError):
                await one.save(3, state())
            async with Checkpointer(job.root, coordinator=coordinator) as new:
                await new.save(3, state())
                return (await new.inspect(3)).epoch

    assert job.run(main) == [3] * job.count


@pytest.mark.parametrize("first", ["idle", "saver", "deleter"])
def test_a_checkpointer_that_was_idle_during_a_takeover_does_not_take_the_run_back(
    job: Job, tmp_path: Path, first: str
) -> None:
    """Whether it or another one finds out first, and also after a new one has taken over."""
    take_over = taking_over(job, tmp_path)

    async def main(process: int) -> Any:
        coordinator = job.coordinator(process)
        async with (
            Checkpointer(job.root, coordinator=coordinator) as saver,
            Checkpointer(job.root, coordinator=coordinator) as idle,
        ):
            await saver.latest_step()
            await idle.latest_step()
            await saver.save(1, state())
            if process == 0:
                await asyncio.to_thread(take_over)
            if first == "saver":
                with pytest.raises(FencedError):
                    await saver.save(3, state())
            elif first == "deleter":
                with pytest.raises(FencedError):
                    await saver.delete(1)
            with pytest.raises(FencedError, match="taken over by claim 2"):
                await idle.save(3, state())
            async with Checkpointer(job.root, coordinator=coordinator) as new:
                await new.save(4, state())
                with pytest.raises(FencedError):
                    await idle.save(5, state())
                with pytest.raises(FencedError):
                    await saver.save(5, state())
                await new.save(6, state())
                return [(step, (await new.inspect(step)).epoch) for step in await new.steps()]

    assert job.run(main) == [[(1, 1), (2, 2), (4, 3), (6, 3)]] * job.count


def test_the_next_checkpointer_of_a_job_continues_its_claim_unless_the_run_was_removed(
    job: Job,
) -> None:
    met = threading.Barrier(job.count)

    async def main(process: int) -> Any:
        coordinator = job.coordinator(process)
        epochs: list[int | None] = []
        for step in range(3):
            async with Checkpointer(job.root, coordinator=coordinator) as ckpt:
                await ckpt.save(step, state())
                epochs.append((await ckpt.inspect(step)).epoch)
            await asyncio.to_thread(met.wait, 20)
            if step == 1 and process == 0:
                shutil.rmtree(job.root)
            await asyncio.to_thread(met.wait, 20)
        return epochs

    assert job.run(main) == [[1, 1, 1]] * job.count


class Slotted(DirectoryCoordinator):
    """A coordinator that no dict can have as a key."""

    __hash__ = None  # type: ignore[assignment]


def test_a_coordinator_that_cannot_be_a_key_works(job: Job) -> None:
    async def main(process: int) -> Any:
        coordinator = Slotted(job.keys, process_index=process, process_count=job.count)
        async with Checkpointer(job.root, coordinator=coordinator) as ckpt:
            await ckpt.save(1, state())
        await coordinator.close()
        return True

    assert job.run(main) == [True] * job.count
