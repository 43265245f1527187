"""RELIABILITY row 6 on object stores: whatever is cancelled, nothing of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import fsspec
import numpy as np
import pytest

import asyncckpt
from asyncckpt import RestoreOptions, SaveOptions
from asyncckpt.errors import DeadlineExceededError, SaveAbortedError
from asyncckpt.options import KIB, MIB, LeafOptions
from asyncckpt.spec import ArraySpec
from asyncckpt.stores.objects.gc import remove_garbage
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.store import ObjectStore
from tests.cancellation.points import Points, assert_equal, count_tasks_of, report
from tests.objects.stores import HURRIED, Place, place, state
from tests.simulator import Fault
from tests.stores.objects.stores import new_root
from tests.watch import nothing_left_behind, slot_pools

SAVE_POINTS_MIN = {"s3fs": 45, "obstore": 40, "memory": 40}
RESTORE_POINTS_MIN = {"s3fs": 10, "obstore": 10, "memory": 10}
"""Fewest suspensions of a save and of a restore: below, something was not seen."""


def options() -> SaveOptions:
    """One leaf is compressed, and chunks are smaller than leaves."""

    def leaf(path: str, spec: ArraySpec) -> LeafOptions | None:
        return LeafOptions(compression="zstd") if path.startswith("zipped") else None

    return SaveOptions(host_memory_nbytes=64 * MIB, chunk_nbytes=32 * KIB, leaf_options=leaf)


def tree(version: int) -> dict[str, Any]:
    """A state of which one leaf is compressed."""
    rng = np.random.default_rng(version)
    return {**state(version), "zipped": rng.integers(0, 9, 9_000)}


class Remote:
    """Saves and restores of step 1 beside an intact step 0, cancelled at chosen suspensions."""

    def __init__(self, at: Place, ckpt: asyncckpt.Checkpointer) -> None:
        self._at = at
        self._ckpt = ckpt
        self._session = ckpt._session
        store = self._session.root.store
        assert isinstance(store, ObjectStore)
        self._store = store
        self.points = Points(self._session.runtime.engine)
        self.committed = 0
        self.collected = 0
        self._before: tuple[object, ...] = ()
        self._new = tree(1)

    async def prepare(self) -> None:
        """Step 0 stands, every thread has started, every suspension is counted."""
        await count_tasks_of(self._session, self.points)
        await self._ckpt.save(0, tree(0))
        await self._ckpt.save(1, self._new)
        await self._ckpt.restore(1)
        await self._ckpt.verify(1)
        await self._ckpt.delete(1)
        await self._settled()
        self._before = await self._held()

    async def save_cancelled_at(self, *at: int, background: bool = False) -> bool:
        """Whether the save came to the first of these suspensions; all laws were checked."""
        self.points.arm(*at)
        done = False
        with contextlib.suppress(SaveAbortedError):
            if background:
                await (await self._ckpt.start_save(1, self._new))
            else:
                await self._ckpt.save(1, self._new)
            done = True
        fired = self.points.fired
        self.points.arm()
        assert fired or done
        await self._settled()
        steps = await self._ckpt.steps()
        assert steps == ([0, 1] if done else [0])
        if done:
            self.committed += 1
            if fired:
                assert (await self._ckpt.verify(1)).ok
                assert_equal(await self._ckpt.restore(1), self._new)
            await self._ckpt.delete(1)
        if self.keys("1/") or self._at.sim.uploads:
            # A request that was cancelled may arrive after the one that undoes it.
            self.collected += 1
            await self._session.call(
                lambda: remove_garbage(self._store._context, -5.0, dry_run=False)
            ).wait()
        assert self.keys("1/") == []
        assert self._at.sim.uploads == []
        await self.check_quiet()
        return fired

    async def restore_cancelled_at(self, *at: int) -> bool:
        """As `save_cancelled_at`, for a restore in place of step 0."""
        target = tree(5)
        target["step"] = 0
        before = {name: target[name].copy() for name in ("w", "b")}
        self.points.arm(*at)
        done = False
        with contextlib.suppress(asyncio.CancelledError):
            await self._ckpt.restore_into(target)
            done = True
        fired = self.points.fired
        self.points.arm()
        assert fired or done
        if done:
            assert_equal(target, tree(0))
        # Nobody writes to the targets any more: they are the caller's again.
        for name in before:
            target[name][...] = 7
        await self.check_quiet()
        for name in before:
            assert (target[name] == 7).all()
        return fired

    def keys(self, below: str = "") -> list[str]:
        """Keys below the root."""
        if self._at.kind != "memory":
            return self._at.keys(below)
        prefix = f"/bucket/{self._at.root}/"
        found = fsspec.filesystem("memory").store
        return [key.removeprefix(prefix) for key in found if key.startswith(prefix + below)]

    async def check_quiet(self) -> None:
        """No task, thread, slot or upload is held that was not held before."""
        runtime = self._session.runtime
        for _ in range(2000):
            # What a cancelled request held goes with its connection.
            held = await self._held()
            pools = slot_pools(runtime.budget)
            if held == self._before and not any(pool.discarded for pool in pools):
                break
            await asyncio.sleep(0.005)
        assert held == self._before
        assert runtime.budget.in_use == 0
        assert runtime.budget.waiting == 0
        for pool in slot_pools(runtime.budget):
            assert pool.discarded == 0
            assert not pool.kept
            assert len(pool._free) == pool._allocated

    async def _settled(self) -> None:
        async def wait() -> None:
            await self._store._context.background.ended()

        await self._session.call(wait).wait()

    async def _held(self) -> tuple[object, ...]:
        async def tasks() -> int:
            return len(asyncio.all_tasks())

        count = await self._session.call(tasks).wait()
        # A thread whose call was cancelled is replaced by one of another number.
        names = [t.name for t in threading.enumerate() if t.name.startswith("asyncckpt")]
        return count, sorted(name.rpartition("-")[0] for name in names)


@contextlib.asynccontextmanager
async def remote(kind: str) -> AsyncIterator[Remote]:
    """Nothing of what happens in the block is left after it."""
    async with place(kind, root=new_root()) as at:
        # What a client library opens once per process is open.
        async with asyncckpt.Checkpointer(at.store(), save_options=options()) as ckpt:
            await ckpt.steps()
        with nothing_left_behind():
            policy = unhurried()
            async with asyncckpt.Checkpointer(
                at.store(policy=policy), save_options=options()
            ) as ckpt:
                made = Remote(at, ckpt)
                await made.prepare()
                yield made
                assert_equal(await ckpt.restore(0), tree(0))
                await ckpt.delete(0)
                assert made.keys() == []


def unhurried() -> RequestPolicy:
    """A policy with which no request of an idle server runs out of its time."""
    return RequestPolicy(retry=HURRIED.retry, hedge_cold_s=5.0, hedge_min_s=5.0)


@pytest.mark.parametrize("kind", ["memory", "obstore", "s3fs"])
async def test_a_save_cancelled_at_any_await_leaves_nothing(kind: str) -> None:
    stride = {"memory": 1, "obstore": 2, "s3fs": 5}[kind]
    async with remote(kind) as made:
        n = 1
        while await made.save_cancelled_at(n, background=n % 2 == 0):
            n += stride
    report(
        f"{kind}, save cancelled once, {made.collected} collected",
        n // stride,
        [*made.points.sites],
    )
    assert n >= SAVE_POINTS_MIN[kind]


@pytest.mark.parametrize("kind", ["memory", "obstore", "s3fs"])
async def test_a_save_cancelled_twice_leaves_nothing(kind: str) -> None:
    stride = {"memory": 5, "obstore": 9, "s3fs": 25}[kind]
    async with remote(kind) as made:
        n = 2
        while await made.save_cancelled_at(n, n + 1):
            n += stride
    report(f"{kind}, save cancelled twice, sampled", n // stride, [*made.points.sites])
    assert n >= SAVE_POINTS_MIN[kind]


@pytest.mark.parametrize("kind", ["memory", "obstore", "s3fs"])
async def test_a_restore_cancelled_at_any_await_lets_go_of_everything(kind: str) -> None:
    stride = {"memory": 1, "obstore": 1, "s3fs": 3}[kind]
    async with remote(kind) as made:
        n = 1
        while await made.restore_cancelled_at(n, *([n + 1] if n % 3 == 0 else [])):
            n += stride
    report(f"{kind}, restore cancelled", n // stride, [*made.points.sites])
    assert n >= RESTORE_POINTS_MIN[kind]


@pytest.mark.long
@pytest.mark.parametrize("gap", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("background", [False, True], ids=["save", "start_save"])
@pytest.mark.parametrize("kind", ["memory", "obstore", "s3fs", "gcsfs"])
async def test_a_save_cancelled_at_every_await_once_and_twice_leaves_nothing(
    kind: str, background: bool, gap: int
) -> None:
    async with remote(kind) as made:
        n = 1
        while await made.save_cancelled_at(n, *([n + gap] if gap else []), background=background):
            n += 1
    report(f"{kind}, save cancelled, {gap} apart", n - 1, [*made.points.sites])
    assert n - 1 >= SAVE_POINTS_MIN.get(kind, 40)


@pytest.mark.long
@pytest.mark.parametrize("gap", [0, 1, 2])
@pytest.mark.parametrize("kind", ["memory", "obstore", "s3fs", "gcsfs"])
async def test_a_restore_cancelled_at_every_await_once_and_twice_lets_go_of_everything(
    kind: str, gap: int
) -> None:
    async with remote(kind) as made:
        n = 1
        while await made.restore_cancelled_at(n, *([n + gap] if gap else [])):
            n += 1
    report(f"{kind}, restore cancelled, {gap} apart", n - 1, [*made.points.sites])
    assert n - 1 >= RESTORE_POINTS_MIN.get(kind, 10)


@pytest.mark.parametrize("kind", ["obstore", "s3fs"])
async def test_a_deadline_ends_a_save_on_a_store_that_never_answers(kind: str) -> None:
    async with remote(kind) as made:
        sim = made._at.sim
        late = SaveOptions(host_memory_nbytes=64 * MIB, deadline_s=1.0)
        hang = Fault(kind=("put_object", "put_part"), key="*/d/*", number=0, hang=True)
        sim.faults.append(hang)
        with pytest.raises(DeadlineExceededError, match=r"did not finish within 1\.0 s") as caught:
            await made._ckpt.save(1, tree(1), options=late)
        location, stage = caught.value.location, caught.value.stage
        del caught
        assert (location, hang.happened > 0) == (f"s3://bucket/{made._at.root}/1", True)
        assert stage is not None
        sim.faults.clear()
        await made.check_quiet()
        assert (made.keys("1/"), sim.uploads) == ([], [])
        assert await made._ckpt.steps() == [0]
        await made._ckpt.save(1, tree(1), options=replace(late, deadline_s=None))
        await made._ckpt.delete(1)


@pytest.mark.parametrize("kind", ["obstore", "s3fs"])
async def test_a_deadline_ends_a_restore_from_a_store_that_never_answers(kind: str) -> None:
    async with remote(kind) as made:
        made._at.sim.faults.append(Fault(kind="get_object", key="*/d/*", number=0, hang=True))
        with pytest.raises(DeadlineExceededError, match=r"did not finish within 0\.2 s"):
            await made._ckpt.restore(0, options=RestoreOptions(deadline_s=0.2))
        made._at.sim.faults.clear()
        await made.check_quiet()
