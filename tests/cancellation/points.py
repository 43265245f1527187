"""Cancel a job of an engine, or a coroutine of a caller, at its Nth suspension."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import CoroutineType
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.flow.buffers import AnonymousMemory, SlotPool
from asyncckpt.flow.engine import Engine
from asyncckpt.options import KIB, MIB, LeafOptions, SaveOptions
from asyncckpt.session.session import Session
from asyncckpt.spec import ArraySpec
from asyncckpt.stores.local import store as local

SLOT_NBYTES = 64 * KIB
"""Small slots make many windows out of a small state, and a budget that is used up."""


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that reports each of its suspensions."""

    def __init__(self, inner: Coroutine[Any, Any, Any], points: Points) -> None:
        self._inner = inner
        self._points = points

    def send(self, value: Any) -> Any:
        awaited = self._inner.send(value)
        self._points.suspended(self._inner)
        return awaited

    def throw(self, *args: Any) -> Any:
        awaited = self._inner.throw(*args)
        self._points.suspended(self._inner)
        return awaited

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Iterator[Any]:
        return self._inner.__await__()


class Points:
    """Counts suspensions, and cancels one task at some of them.

    With an engine, the suspensions are those of all its tasks from `arm` on, and what is cancelled
    is the job whose task is made first after it.

    Attributes:
        count: suspensions since `arm`.
        sites: where in asyncckpt coroutines were suspended when they were cancelled.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = engine
        self._at: frozenset[int] = frozenset()
        self.count = 0
        self.task: asyncio.Task[Any] | None = None
        self.sites: Counter[str] = Counter()

    def arm(self, *at: int) -> None:
        """From now on suspensions count from 1; at these the cancellations happen."""
        self._at = frozenset(at)
        self.count = 0
        self.task = None

    @property
    def fired(self) -> bool:
        """Whether the first cancellation has happened."""
        return self.count >= min(self._at, default=sys.maxsize)

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        """A task factory."""
        task = asyncio.Task(Stepped(coro, self), loop=loop, **options)
        if self.task is None:
            self.task = task
        return task

    def suspended(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """One more suspension."""
        self.count += 1
        if self.count not in self._at or self.task is None:
            return
        self.sites[_site(coroutine)] += 1
        if self._engine is None:
            self.task.cancel()
            return
        for job in tuple(self._engine._jobs.values()):
            if job._task is self.task:
                job._cancel()


def _site(coroutine: Any) -> str:
    """The lines of asyncckpt that are awaiting, the two innermost ones, outside first."""
    lines = []
    while isinstance(coroutine, CoroutineType):
        frame = coroutine.cr_frame
        if frame is not None and f"{os.sep}asyncckpt{os.sep}" in frame.f_code.co_filename:
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return ">".join(lines[-2:]) or "?"


def small_slots(ckpt: asyncckpt.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> Session:
    """The checkpointer stages in slots of 64 KiB, of which it has eight."""
    monkeypatch.setattr(local, "SLOT_NBYTES", SLOT_NBYTES)
    core = ckpt._session
    runtime = core.runtime
    runtime.budget.capacity = 8 * SLOT_NBYTES
    runtime.pool = SlotPool(
        runtime.budget, runtime.engine.compute, AnonymousMemory(), slot_nbytes=SLOT_NBYTES
    )
    return core


def options(*, chunk_nbytes: int = 1 * MIB) -> SaveOptions:
    """Some leaves are compressed, and chunks are smaller than leaves."""

    def leaf(path: str, spec: ArraySpec) -> LeafOptions | None:
        if path.startswith("zipped"):
            return LeafOptions(compression="zstd", chunk_nbytes=96 * KIB)
        return None

    return SaveOptions(host_memory_nbytes=64 * MIB, chunk_nbytes=chunk_nbytes, leaf_options=leaf)


def state(seed: int = 0) -> dict[str, Any]:
    """A tree with every kind of place: many windows, small chunks, zstd, inline, texts, scalars."""
    rng = np.random.default_rng(seed)
    return {
        "large": rng.standard_normal(512 * KIB // 8 * 3),
        "turned": rng.standard_normal((300, 200)).T,
        "zipped": {
            "many": rng.integers(0, 9, 40_000),
            "few": np.full(3000, seed, np.int16),
            "dense": rng.standard_normal(20_000),
        },
        "small": {str(i): rng.standard_normal(400, np.float32) for i in range(12)},
        "inline": {str(i): np.arange(i + 5) for i in range(5)},
        "texts": {str(i): bytes(range(256)) * (8 << i) for i in range(6)},
        "step": seed,
        "name": "run",
        "empty": np.zeros((0, 3)),
    }


def assert_equal(found: Any, expected: Any) -> None:
    """Two trees of dicts are the same, bit by bit."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert type(found) is type(expected) and found == expected


class Quiet:
    """What an engine holds when it does nothing; compared again after each cancellation."""

    def __init__(self, core: Session, root: Path) -> None:
        self._session = core
        self._root = root
        self._before: tuple[object, ...] = ()

    async def note(self) -> None:
        """This is what it holds, with all its threads started."""
        self._before = await self._held()

    async def check(self) -> None:
        """Nothing more is held than then: task, thread, descriptor, slot, file."""
        held = await self._held()
        assert held == self._before, f"{held} instead of {self._before}"
        runtime = self._session.runtime
        assert runtime.budget.in_use == 0
        assert runtime.budget.waiting == 0
        assert not runtime.pool.kept
        assert len(runtime.pool._free) == runtime.pool._allocated

    async def _held(self) -> tuple[object, ...]:
        engine = self._session.runtime.engine

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        # Every worker thread is at this barrier: none is still busy with something else.
        for workers in (engine.io, engine.compute):
            barrier = threading.Barrier(workers.count)
            calls = [workers.submit(barrier.wait, 30) for _ in range(workers.count)]
            for call in calls:
                await asyncio.wrap_future(call)
        control = self._root / ".asyncckpt"
        return (
            await self._session.call(tasks).wait(),
            sorted(t.name for t in threading.enumerate() if t.name.startswith("asyncckpt")),
            len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")),
            [p for p in sorted(control.rglob("*")) if not p.is_dir()],
            sorted(p.name for p in self._root.iterdir()),
        )


def report(title: str, points: int, sites: Sequence[str]) -> None:
    """What a person sees of a run with -s, and what the test asserts on."""
    print(f"\n{title}: {points} points, {len(sites)} places: {', '.join(sorted(sites))}")


async def warm_up() -> None:
    """What the first event loop of a process opens for good (libuv's signal pipe) is open."""

    async def nothing() -> None:
        pass

    engine = Engine("asyncckpt-warm-up")
    await engine.submit(nothing).wait()
    await engine.aclose()


async def count_tasks_of(core: Session, points: Points) -> None:
    """All tasks that the engine makes from now on are counted by `points`."""

    async def count() -> None:
        asyncio.get_running_loop().set_task_factory(points.make_task)

    await core.call(count).wait()
