"""A restore that is cancelled anywhere lets go of its targets before it returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.options import KIB
from asyncckpt.planning import restore as plans
from asyncckpt.restore import ranges as runs
from asyncckpt.restore.decode import Decode
from asyncckpt.restore.fetch import Fetch
from tests.cancellation.points import (
    Points,
    Quiet,
    assert_equal,
    count_tasks_of,
    options,
    report,
    small_slots,
    state,
    warm_up,
)
from tests.watch import nothing_left_behind

POINTS_MIN = 40
"""A restore of `state()` suspends about 60 times."""

SITES_MIN = 8
"""Places in the code at which it does."""


def targets() -> dict[str, Any]:
    """Memory of every layout: contiguous, transposed, strided; filled with what is wrong."""
    wrong = state(9)
    # Read straight into place; through a slot, piece by piece; scattered with a stride.
    wrong["large"] = np.full_like(wrong["large"], -1)
    wrong["turned"] = np.full(wrong["turned"].shape[::-1], -1.0).T
    wide = np.full((80_000,), -1)
    wrong["zipped"]["many"] = wide[::2]
    wrong["step"], wrong["name"] = 1, "run"
    return wrong


def arrays(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [array for child in tree.values() for array in arrays(child)]
    return [tree] if isinstance(tree, np.ndarray) else []


class Restores:
    """Restores of one step, cancelled at chosen suspensions."""

    def __init__(self, ckpt: asyncckpt.Checkpointer, points: Points, quiet: Quiet) -> None:
        self._ckpt = ckpt
        self.points = points
        self._quiet = quiet

    async def cancelled_at(self, *at: int, in_place: bool) -> bool:
        """Whether the restore came to the first of these suspensions; all laws were checked."""
        target = targets()
        self.points.arm(*at)
        finished, result = False, None
        with contextlib.suppress(asyncio.CancelledError):
            if in_place:
                await self._ckpt.restore_into(target)
            else:
                result = await self._ckpt.restore()
            finished = True
        fired = self.points.fired
        self.points.arm()
        assert fired or finished
        # Nobody writes to the targets any more: they are the caller's again.
        for array in arrays(target):
            if not finished:
                array[...] = 7
        await self._quiet.check()
        if finished:
            assert_equal(target if in_place else result, state(1))
        else:
            assert all((array == 7).all() for array in arrays(target))
        return fired


WAYS = ((Fetch, "_buffers"), (Decode, "small"), (Fetch, "_large"), (Fetch, "_large_encoded"))
"""The ways from a file to a target."""


def ways_taken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ways that restores take from now on."""
    taken: set[str] = set()

    def seen(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            taken.add(name)
            return function(*args)

        return call

    for stage, name in WAYS:
        monkeypatch.setattr(stage, name, seen(name, getattr(stage, name)))
    return taken


@contextlib.asynccontextmanager
async def restoring(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Restores]:
    await warm_up()
    # Each chunk is read by itself.
    monkeypatch.setattr(plans, "OWN_BATCH_NBYTES", 64 * KIB)
    monkeypatch.setattr(runs, "LOCAL_RUN_NBYTES", 128 * KIB)
    monkeypatch.setattr(runs, "ASIDE_NBYTES", 64 * KIB)
    taken = ways_taken(monkeypatch)
    with nothing_left_behind():
        async with asyncckpt.Checkpointer(
            root, save_options=options(chunk_nbytes=128 * KIB)
        ) as ckpt:
            core = small_slots(ckpt, monkeypatch)
            points = Points(core.runtime.engine)
            await count_tasks_of(core, points)
            await ckpt.save(1, state(1))
            assert_equal(await ckpt.restore(), state(1))
            quiet = Quiet(core, root)
            await quiet.note()
            yield Restores(ckpt, points, quiet)
            target = targets()
            await ckpt.restore_into(target)
            assert_equal(target, state(1))
            assert taken == {name for _, name in WAYS}


async def every_await(made: Restores, *gaps: int, in_place: bool, stride: int = 1) -> int:
    """Number of suspensions at which the restore was cancelled (and after each of `gaps`)."""
    n = 1
    while await made.cancelled_at(n, *(n + gap for gap in gaps), in_place=in_place):
        n += stride
    return (n - 1) // stride


@pytest.mark.parametrize("in_place", [True, False], ids=["restore_into", "restore"])
async def test_a_restore_cancelled_at_any_await_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    async with restoring(tmp_path, monkeypatch) as made:
        visited = await every_await(made, in_place=in_place)
    report("restore cancelled once", visited, list(made.points.sites))
    assert visited >= POINTS_MIN
    assert len(made.points.sites) >= SITES_MIN


async def test_a_restore_cancelled_twice_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with restoring(tmp_path, monkeypatch) as made:
        visited = await every_await(made, 1, in_place=True, stride=5)
    report("restore cancelled twice, sampled", visited, list(made.points.sites))
    assert visited * 5 >= POINTS_MIN


@pytest.mark.long
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
@pytest.mark.parametrize("in_place", [True, False], ids=["restore_into", "restore"])
async def test_a_restore_cancelled_twice_at_any_await_lets_go_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool, gap: int
) -> None:
    async with restoring(tmp_path, monkeypatch) as made:
        visited = await every_await(made, gap, in_place=in_place)
    report(f"restore cancelled twice, {gap} apart", visited, list(made.points.sites))
    assert visited >= POINTS_MIN
    assert len(made.points.sites) >= SITES_MIN
