"""Whoever awaits the library may be cancelled at any await of their own, once or twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from tests.cancellation.points import Points, Stepped, assert_equal, report, warm_up
from tests.watch import nothing_left_behind

Caller = Callable[[Path], Coroutine[Any, Any, None]]


def tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal(30_000), "b": rng.standard_normal(10), "step": seed}


async def train(root: Path) -> None:
    """Everything that a run does, with saves in flight at most awaits."""
    async with asyncckpt.Checkpointer(root / "run", keep=asyncckpt.KeepLast(2)) as ckpt:
        await ckpt.latest_step()
        await ckpt.prepare(tree(1))
        await ckpt.save(1, tree(1))
        pending = await ckpt.start_save(2, tree(2))
        other = await ckpt.start_save(3, tree(3))
        await pending
        await other.future()
        await ckpt.start_save(4, tree(4))
        await ckpt.wait()
        await ckpt.restore()
        await ckpt.restore_into({**tree(0), "step": 4})
        await ckpt.verify()
        await ckpt.inspect(3)
        await ckpt.delete(3)
        await ckpt.start_save(5, tree(5))


async def one_shot(root: Path) -> None:
    place = root / "run" / "7"
    await asyncckpt.save(place, tree(7))
    await asyncckpt.restore(place)
    await asyncckpt.restore_into(place, {**tree(0), "step": 7})
    await asyncckpt.inspect(place)
    await asyncckpt.verify(place)
    await asyncckpt.save(place, tree(8), overwrite=True)


async def cancelled_at(caller: Caller, points: Points, root: Path, *at: int) -> bool:
    """Whether the caller came to the first of these suspensions; the laws were checked."""
    with nothing_left_behind():
        points.arm(*at)
        loop = asyncio.get_running_loop()
        task = asyncio.Task(Stepped(caller(root), points), loop=loop)
        points.task = task
        ended = "returned"
        try:
            await task
        except asyncio.CancelledError:
            ended = "cancelled"
        fired = points.fired
        points.arm()
        assert fired == (ended == "cancelled")
    async with asyncckpt.Checkpointer(root / "run") as ckpt:
        for step in await ckpt.steps():
            assert (await ckpt.verify(step)).ok
            found = await ckpt.restore(step)
            assert_equal(found, tree(found["step"]))
            assert step in (found["step"], 7)
    return fired


@pytest.mark.parametrize("caller", [train, one_shot])
@pytest.mark.parametrize(
    "gaps",
    [(), pytest.param((1,), marks=pytest.mark.long), pytest.param((1, 2), marks=pytest.mark.long)],
    ids=["once", "twice", "three times"],
)
async def test_a_caller_cancelled_at_any_await_leaves_nothing_running(
    tmp_path: Path, caller: Caller, gaps: tuple[int, ...]
) -> None:
    await warm_up()
    points = Points()
    n = 1
    while await cancelled_at(caller, points, tmp_path / str(n), n, *(n + gap for gap in gaps)):
        n += 1
    report(f"{caller.__name__} cancelled {len(gaps) + 1} times", n - 1, list(points.sites))
    assert n - 1 >= (15 if caller is train else 10)


async def test_timing_out_a_save_aborts_it_and_cleans_up(tmp_path: Path) -> None:
    await warm_up()
    with nothing_left_behind():
        async with asyncckpt.Checkpointer(tmp_path) as ckpt:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await ckpt.save(1, tree(1))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await ckpt.start_save(2, tree(2))
            await ckpt.save(3, tree(3))
            assert await ckpt.steps() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3"]
