"""A save that is cancelled anywhere leaves nothing of itself, and everything else as it was."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import asyncckpt
from asyncckpt.errors import SaveAbortedError
from asyncckpt.reports import SaveReport
from asyncckpt.session.session import Session
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

POINTS_MIN = 120
"""A save of `state()` suspends about 200 times; far fewer would mean that something is not seen."""

SITES_MIN = 13
"""Places in the code at which it does."""


class Saves:
    """Saves of step 1 beside an intact step 0, cancelled at chosen suspensions."""

    def __init__(self, ckpt: asyncckpt.Checkpointer, core: Session, root: Path) -> None:
        self._ckpt = ckpt
        self._root = root
        self._session = core
        self.points = Points(core.runtime.engine)
        self._quiet = Quiet(core, root)
        self._new = state(1)
        self.committed = 0

    async def prepare(self) -> None:
        """Step 0 is there, every thread has started, every suspension is counted."""
        await count_tasks_of(self._session, self.points)
        await self._ckpt.save(0, state(0))
        await self._save(overwrite=False)
        await self._ckpt.delete(1)
        await self._quiet.note()

    async def cancelled_at(self, *at: int, background: bool, overwrite: bool = False) -> bool:
        """Whether the save came to the first of these suspensions; all laws were checked."""
        self.points.arm(*at)
        result: SaveReport | None = None
        with contextlib.suppress(SaveAbortedError):
            if background:
                result = await (await self._ckpt.start_save(1, self._new, overwrite=overwrite))
            else:
                result = await self._save(overwrite=overwrite)
        fired = self.points.fired
        self.points.arm()
        assert fired or result is not None
        steps = await self._ckpt.steps()
        assert steps == ([0] if result is None else [0, 1])
        # What is visible is complete, and nothing else is there at all.
        assert sorted(p.name for p in self._root.iterdir() if p.name != ".asyncckpt") == [
            str(step) for step in steps
        ]
        for step in steps:
            assert (await self._ckpt.verify(step)).ok
        if result is not None:
            self.committed += 1
            if fired:
                assert_equal(await self._ckpt.restore(1), self._new)
            await self._ckpt.delete(1)
        await self._quiet.check()
        return fired

    async def _save(self, *, overwrite: bool) -> SaveReport:
        return await self._ckpt.save(1, self._new, overwrite=overwrite)


@contextlib.asynccontextmanager
async def saves(root: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Saves]:
    await warm_up()
    with nothing_left_behind():
        async with asyncckpt.Checkpointer(root, save_options=options()) as ckpt:
            made = Saves(ckpt, small_slots(ckpt, monkeypatch), root)
            await made.prepare()
            yield made
            assert_equal(await ckpt.restore(0), state(0))


async def every_await(made: Saves, *gaps: int, background: bool, stride: int = 1) -> int:
    """Number of suspensions at which the save was cancelled (and again after each of `gaps`)."""
    n = 1
    while await made.cancelled_at(n, *(n + gap for gap in gaps), background=background):
        n += stride
    return (n - 1) // stride


@pytest.mark.parametrize("background", [False, True], ids=["save", "start_save"])
async def test_a_save_cancelled_at_any_await_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    async with saves(tmp_path / "run", monkeypatch) as made:
        # The second way to save differs in its order of copies and writes only.
        visited = await every_await(made, background=background, stride=2 if background else 1)
    report("save cancelled once", visited, list(made.points.sites))
    assert visited * (2 if background else 1) >= POINTS_MIN
    assert len(made.points.sites) >= (SITES_MIN - 5 if background else SITES_MIN)


async def test_a_save_cancelled_twice_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with saves(tmp_path / "run", monkeypatch) as made:
        visited = await every_await(made, 1, background=False, stride=9)
    report("save cancelled twice, sampled", visited, list(made.points.sites))
    assert visited * 9 >= POINTS_MIN


@pytest.mark.long
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
@pytest.mark.parametrize("background", [False, True], ids=["save", "start_save"])
async def test_a_save_cancelled_twice_at_any_await_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, gap: int
) -> None:
    async with saves(tmp_path / "run", monkeypatch) as made:
        visited = await every_await(made, gap, background=background)
    report(f"save cancelled twice, {gap} apart", visited, list(made.points.sites))
    assert visited >= POINTS_MIN
    assert len(made.points.sites) >= SITES_MIN


@pytest.mark.long
async def test_a_replacement_cancelled_at_any_await_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = state(5), state(6)
    await warm_up()
    with nothing_left_behind():
        async with asyncckpt.Checkpointer(tmp_path, save_options=options()) as ckpt:
            core = small_slots(ckpt, monkeypatch)
            points = Points(core.runtime.engine)
            await count_tasks_of(core, points)
            await ckpt.save(3, old)
            await ckpt.save(3, old, overwrite=True)
            await ckpt.restore(3)
            quiet = Quiet(core, tmp_path)
            await quiet.note()
            n = 1
            while True:
                points.arm(n)
                committed = True
                try:
                    await ckpt.save(3, new, overwrite=True)
                except SaveAbortedError:
                    committed = False
                fired = points.fired
                points.arm()
                assert (await ckpt.verify(3)).ok
                assert_equal(await ckpt.restore(3), new if committed else old)
                if committed:
                    await ckpt.save(3, old, overwrite=True)
                await quiet.check()
                if not fired:
                    break
                n += 1
    report("replacement cancelled once", n - 1, list(points.sites))
    assert n - 1 >= POINTS_MIN
