"""Cost to a training loop: the stall of a background save, and the lag of its event loop.

Stall is the time in `start_save` plus by how much the next three training steps take longer than
those before. The step donates (or changes in place) the state that is being saved, which is what
shows whether the save still leans on the caller's memory.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.local.ours import AsyncCkpt
from benchmarks.measure import Run, cpu_seconds, median
from benchmarks.subject import awaited
from benchmarks.workloads import Tree, Workload, difference, leaves, map_leaves

STEPS_BEFORE = 5
STEPS_AFTER = 3
STEP_NBYTES = 64 << 20
"""Bytes that a small step of the NumPy loop changes."""

UPDATED_SHARE = 16
"""A small step of a JAX or torch loop updates leaves that hold at least one part in so many."""

HEARTBEAT_S = 0.001
IDLE_S = 0.2


class NumpyLoop:
    """A loop whose step multiplies parts of the state in place."""

    def __init__(self, workload: Workload) -> None:
        self.state: Tree = map_leaves(
            lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, workload.tree
        )
        self._views: list[np.ndarray] = []
        room = STEP_NBYTES
        for _, leaf in leaves(self.state):
            if isinstance(leaf, np.ndarray) and leaf.dtype == np.float32 and leaf.ndim:
                view = leaf.reshape(-1)[: max(1, room // 4)]
                self._views.append(view)
                room -= view.nbytes
                if room <= 0:
                    break

    def step(self) -> float:
        """One step was done; returns its seconds."""
        start = time.perf_counter()
        for view in self._views:
            np.multiply(view, np.float32(0.9995), out=view)
        return time.perf_counter() - start

    def snapshot(self) -> Tree:
        """Copy the state into NumPy arrays."""
        return map_leaves(
            lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, self.state
        )


class JaxLoop:
    """A loop whose jitted step updates a part of the state, or every leaf.

    It donates the whole state, unless `donating` is false.
    """

    def __init__(
        self, workload: Workload, *, every_leaf: bool = False, donating: bool = True
    ) -> None:
        import jax
        import jax.numpy as jnp

        self._jax = jax
        self.state: Tree = map_leaves(lambda leaf: jnp.array(leaf, copy=True), workload.tree)
        paths = updated_paths(workload)
        if every_leaf:
            paths = {path for path, _ in leaves(workload.tree)}

        @functools.partial(jax.jit, donate_argnums=(0,) if donating else ())
        def step(state: Tree) -> Tree:
            return updated(state, paths)

        self._step = step
        self.step()

    def step(self) -> float:
        """One step was done, its results are there; returns its seconds."""
        start = time.perf_counter()
        self.state = self._step(self.state)
        for _, leaf in leaves(self.state):
            leaf.block_until_ready()
        return time.perf_counter() - start

    def snapshot(self) -> Tree:
        """Copy the state into NumPy arrays."""
        return map_leaves(lambda leaf: np.array(leaf, copy=True), self.state)


def updated_paths(workload: Workload) -> set[str]:
    """Return the leaves that a small step updates."""
    room = workload.nbytes // UPDATED_SHARE
    found: set[str] = set()
    for path, leaf in leaves(workload.tree):
        if room > 0:
            found.add(path)
            room -= np.asarray(leaf).nbytes
    return found


def updated(state: Tree, paths: set[str], prefix: str = "") -> Tree:
    """Return the state after a step that updates these leaves."""
    made: Tree = {}
    for key, value in state.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            made[key] = updated(value, paths, path)
        else:
            made[key] = value * 0.9995 if path in paths else value
    return made


class StallRun(Run):
    """Runs one background save within a training loop; `check` compares the first one."""

    def __init__(self, subject: AsyncCkpt, workload: Workload, loop: Any) -> None:
        self._subject = subject
        self._workload = workload
        self._loop = loop
        self._expected: Tree | None = None
        self._checked = False
        self._step: int | None = None

    def prepare(self) -> None:
        """Warm the pool, and before the first save copy the state."""
        if not self._subject.is_open:
            self._subject.open(Workload(self._workload.id, "", self._loop.state))
        if not self._checked:
            self._expected = self._loop.snapshot()

    def run(self) -> Mapping[str, float]:
        """`wall_s` is the stall."""
        return self._subject.runner.run(self._measured())

    def finish(self) -> None:
        """Check that the first checkpoint holds the state at the call, and delete the step."""
        if self._step is None:
            return
        step, self._step = self._step, None
        checkpointer = self._subject.checkpointer
        if not self._checked:
            found = self._subject.runner.run(checkpointer.restore(step, leaves="numpy"))
            wrong = difference(self._expected or {}, found)
            self._expected, self._checked = None, True
            if wrong:
                raise AssertionError(f"saved in the background, but not as it was: {wrong}")
        self._subject.runner.run(checkpointer.delete(step))

    async def _measured(self) -> dict[str, float]:
        checkpointer, step, loop = self._subject.checkpointer, self._subject.next_step(), self._loop
        # The copy that the first run is compared with was taken before these steps.
        before = [] if not self._checked else [loop.step() for _ in range(STEPS_BEFORE)]
        cpu_start_s = cpu_seconds()
        start = time.perf_counter()
        pending = await checkpointer.start_save(step, loop.state)
        start_save_s = time.perf_counter() - start
        cpu_s = cpu_seconds() - cpu_start_s
        after = [loop.step() for _ in range(STEPS_AFTER)]
        await pending
        total_s = time.perf_counter() - start
        self._step = step
        step_s = median(before) if before else median(after)
        inflation_s = sum(after) - STEPS_AFTER * step_s
        return {
            "wall_s": start_save_s + max(0.0, inflation_s),
            "cpu_s": cpu_s,
            "start_save_s": start_save_s,
            "inflation_s": inflation_s,
            "step_s": step_s,
            "committed_s": total_s,
        }


class LagRun(Run):
    """Saves in the background while a task on the caller's loop wakes every millisecond."""

    def __init__(self, subject: AsyncCkpt, workload: Workload) -> None:
        self._subject = subject
        self._workload = workload
        self._step: int | None = None

    def prepare(self) -> None:
        """Warm the pool."""
        self._subject.open(self._workload)

    def run(self) -> Mapping[str, float]:
        """`wall_s` is the time to the commit; lags are those of the whole time."""
        return self._subject.runner.run(self._measured())

    def finish(self) -> None:
        """Delete the step."""
        if self._step is not None:
            step, self._step = self._step, None
            self._subject.runner.run(self._subject.checkpointer.delete(step))

    async def _measured(self) -> dict[str, float]:
        checkpointer, step = self._subject.checkpointer, self._subject.next_step()
        idle: list[float] = []
        async with asyncio.TaskGroup() as group:
            heart = group.create_task(heartbeat(idle))
            await asyncio.sleep(IDLE_S)
            heart.cancel()
        values = await watched_save(checkpointer, step, self._workload.tree)
        self._step = step
        return {**values, "idle_lag_p99_s": percentile(idle, 0.99)}


async def watched_save(checkpointer: Any, step: int, tree: Tree) -> dict[str, float]:
    """Save in the background as `watched` does; also time `start_save`."""
    start_save_s = 0.0

    async def saved() -> None:
        nonlocal start_save_s
        pending, start_save_s = await awaited(checkpointer.start_save(step, tree))
        await pending

    return {**await watched(saved), "start_save_s": start_save_s}


async def watched(work: Callable[[], Awaitable[None]]) -> dict[str, float]:
    """Do the work while a task on the same loop wakes every millisecond; time it and its lags."""
    lags: list[float] = []
    async with asyncio.TaskGroup() as group:
        heart = group.create_task(heartbeat(lags))
        await asyncio.sleep(2 * HEARTBEAT_S)
        start = time.perf_counter()
        await work()
        wall_s = time.perf_counter() - start
        # It beats once more: a block at the very end counts too.
        await asyncio.sleep(2 * HEARTBEAT_S)
        heart.cancel()
    return {
        "wall_s": wall_s,
        "lag_p99_s": percentile(lags, 0.99),
        "lag_max_s": max(lags, default=0.0),
    }


async def heartbeat(lags: list[float], clock: Callable[[], float] = time.perf_counter) -> None:
    """Wakes every millisecond and notes by how much too late, until cancelled.

    A loop blocked for 20 ms would otherwise count as one late wake-up among hundreds: the wake-ups
    that it missed are counted with the lag that each would have had.
    """
    while True:
        start = clock()
        await asyncio.sleep(HEARTBEAT_S)
        lag = clock() - start - HEARTBEAT_S
        while lag > HEARTBEAT_S:
            lags.append(lag)
            lag -= HEARTBEAT_S
        lags.append(max(0.0, lag))


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of all values do not exceed; 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
