"""Saves and restores by several `Checkpointer`s that coordinate, in threads of one process.

Real processes, kills and runtimes are in `tests/processes`; what can be seen without them is here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt import Checkpointer, ShardedArray
from asyncckpt.coordinators.rounds import Round
from tests.session.together.job import Job, equal, state

two_and_four = pytest.mark.parametrize("job", [2, 4], indirect=True)


@two_and_four
def test_all_processes_save_one_checkpoint_and_restore_it(job: Job) -> None:
    tree = state() | {"larger than a slot": np.arange(1_100_000.0)}

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
