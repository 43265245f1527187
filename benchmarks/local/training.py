"""Training with saves, ours and other libraries', beside the same training without.

A training step is a matrix product on one core and an update of a part of the state; it runs in a
thread, while a task on the caller's loop wakes every millisecond. Everyone saves before the same
steps, with the interface that is asynchronous: the rest of the save goes on during the next steps.
JAX and torch each run in a process of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncckpt import KeepLast
from benchmarks import files, measure
from benchmarks.local.ours import AsyncCkpt
from benchmarks.local.stall import heartbeat, percentile, updated, updated_paths
from benchmarks.local.suite import Suite
from benchmarks.measure import Sample, cpu_seconds, median
from benchmarks.peers import DCP, ORBAX
from benchmarks.peers.dcp import TorchDcp, tensors
from benchmarks.peers.orbax import Orbax
from benchmarks.peers.timing import quiet
from benchmarks.results import BACK_TO_BACK, NO_SAVES, OURS, TRAINING, Measurement
from benchmarks.workers import apart
from benchmarks.workloads import Tree, Workload, llama, map_leaves

FRAMEWORKS = ("JAX", "torch")

ORBAX_ASYNC, DCP_ASYNC = f"{ORBAX} async", f"{DCP} async"

WIDTH = 1024
"""Of the matrices of a step: tens of milliseconds on one core."""

LEAD_STEPS = 3
"""Steps before the first save."""

WARM_UP_STEPS = 3

TRAININGS = {TRAINING: (2, 0.5), BACK_TO_BACK: (10, 0.1)}
"""Saves in a training, and seconds of steps from one to the next."""


def run(suite: Suite, nbytes: int, scenario: str) -> None:
    """Measure a training with each framework on a state of about so many bytes."""
    suite.log(f"{scenario}: {nbytes / 2**20:.0f} MiB")
    for framework in FRAMEWORKS:

        def work(framework: str = framework) -> None:
            with suite.scratch("training") as directory:
                rounds, seed = suite.protocol.samples, suite.rng.randrange(1000)
                given = (directory, nbytes, scenario, rounds, seed)
                found, lines = apart(compared, framework, *given)
                suite.found.measurements += found
                suite.found.timelines += lines

        suite.attempt(f"{scenario}, {framework}", scenario, work)


# --------------------------------------------------------------------------------------- loops


class JaxTraining:
    """A jitted step that donates the whole state and updates a part of it."""

    def __init__(self, workload: Workload) -> None:
        import jax
        import jax.numpy as jnp

        paths = updated_paths(workload)
        self.state: Tree = map_leaves(lambda leaf: jnp.array(leaf, copy=True), workload.tree)
        self._product = jnp.full((WIDTH, WIDTH), 1 / WIDTH, jnp.float32)

        def step(state: Tree, product: Any) -> tuple[Tree, Any]:
            return updated(state, paths), product @ product

        self._step = jax.jit(step, donate_argnums=0)
        self._wait = jax.block_until_ready

    def step(self) -> None:
        """Do one step and wait for its results."""
        self.state, self._product = self._wait(self._step(self.state, self._product))


class TorchTraining:
    """A step that updates a part of the state in place."""

    def __init__(self, workload: Workload) -> None:
        import torch

        torch.set_num_threads(1)
        self.state = {path: value.clone() for path, value in tensors(workload.tree).items()}
        self._updated = [self.state[path] for path in updated_paths(workload)]
        self._product = torch.full((WIDTH, WIDTH), 1 / WIDTH)

    def step(self) -> None:
        """Do one step."""
        self._product = self._product @ self._product
        for value in self._updated:
            value.mul_(0.9995)


# -------------------------------------------------------------------------------------- savers


class Saver(ABC):
    """Saves the state of a training."""

    @abstractmethod
    async def begin(self, state: Any) -> Awaitable[object]:
        """Begin to save; on return the training may go on. What is returned ends with the save."""

    async def settle(self) -> None:
        """Remove what was saved."""
        return None

    async def close(self) -> None:
        """End threads."""
        return None


class Ours(Saver):
    """`start_save` of one `Checkpointer` that keeps the last step."""

    def __init__(self, directory: Path, workload: Workload) -> None:
        self._subject = AsyncCkpt(directory, retention=KeepLast(1))
        self._workload = workload
        self._checkpointer: Any = None

    async def begin(self, state: Any) -> Awaitable[object]:
        if self._checkpointer is None:
            self._checkpointer = self._subject.make(self._workload.nbytes)
            await self._checkpointer.prepare(state)
        pending: Awaitable[object] = await self._checkpointer.start_save(
            self._subject.next_step(), state
        )
        return pending

    async def settle(self) -> None:
        await self._checkpointer.wait()

    async def close(self) -> None:
        await self._checkpointer.close()
        self._subject.runner.close()


class Threaded(Saver):
    """A library without an interface for asyncio: called in a thread, one save at a time."""

    def __init__(self, peer: Orbax | TorchDcp) -> None:
        self._peer = peer
        self._before: asyncio.Future[None] | None = None

    async def begin(self, state: Any) -> Awaitable[object]:
        # Both would wait in the call for the save before, or fail.
        if self._before is not None:
            await asyncio.shield(self._before)
        _, _, answer = await asyncio.to_thread(self._peer.begin, state)
        wait = self._peer.wait if isinstance(self._peer, Orbax) else answer.result
        self._before = asyncio.ensure_future(asyncio.to_thread(wait))
        return self._before

    async def settle(self) -> None:
        shutil.rmtree(self._peer.directory, ignore_errors=True)
        files.settle(self._peer.directory)

    async def close(self) -> None:
        await asyncio.to_thread(self._peer.close)


def saver(name: str, directory: Path, workload: Workload) -> Saver | None:
    """Return the saver of this name; None for training without saves."""
    if name == ORBAX_ASYNC:
        return Threaded(Orbax(directory, compression=False))
    if name == DCP_ASYNC:
        return Threaded(TorchDcp(directory, asynchronous=True))
    return Ours(directory, workload) if name == OURS else None


# ----------------------------------------------------------------------------------- a training


@dataclass(slots=True)
class Trained:
    """What one training took: times in seconds from its start.

    Attributes:
        steps: begin and end of each step.
        calls: begin and end of each call that began a save.
        saves: begin of each save, and when it was durable.
        lags: of a task on the caller's loop.
        cpu_s: CPU seconds, until the last save was durable.
        calls_cpu_s: the part of them within the calls.
        total_s: until the last step and the last save had ended.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list)
    saves: list[tuple[float, float]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    calls_cpu_s: float = 0.0
    total_s: float = 0.0

    @property
    def steps_s(self) -> float:
        """Seconds of all steps."""
        return sum(end - begin for begin, end in self.steps)


async def train(loop: Any, saving: Saver | None, count: int, every: int) -> Trained:
    """Train, and save `count` times with `every` so many steps behind each call."""
    found = Trained()
    start, cpu_start_s = time.perf_counter(), cpu_seconds()

    def now() -> float:
        return time.perf_counter() - start

    async def saved(began: float, done: Awaitable[object]) -> None:
        await done
        found.saves.append((began, now()))

    async with asyncio.TaskGroup() as group:
        heart = group.create_task(heartbeat(found.lags))
        async with asyncio.TaskGroup() as saves:
            for number in range(-LEAD_STEPS, count * every):
                if saving is not None and number >= 0 and number % every == 0:
                    began, cpu_s = now(), cpu_seconds()
                    done = await saving.begin(loop.state)
                    found.calls.append((began, now()))
                    found.calls_cpu_s += cpu_seconds() - cpu_s
                    saves.create_task(saved(began, done))
                began = now()
                await asyncio.to_thread(loop.step)
                found.steps.append((began, now()))
        found.total_s = now()
        found.cpu_s = cpu_seconds() - cpu_start_s
        heart.cancel()
    return found


def compared(
    framework: str, directory: Path, nbytes: int, scenario: str, rounds: int, seed: int
) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Return measurements and timelines, in a process that has not used JAX."""
    # XLA reads this when it is first used; a step of either framework has one core.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    workload = llama(nbytes)
    return asyncio.run(compare(framework, directory, workload, scenario, rounds, seed))


async def compare(
    framework: str, directory: Path, workload: Workload, scenario: str, rounds: int, seed: int
) -> tuple[list[Measurement], list[dict[str, Any]]]:
    """Train in rounds, each saver and no saves once in each, in a shuffled order."""
    loop = JaxTraining(workload) if framework == "JAX" else TorchTraining(workload)
    peer = ORBAX_ASYNC if framework == "JAX" else DCP_ASYNC
    savers = {name: saver(name, directory / name, workload) for name in (NO_SAVES, OURS, peer)}
    count, every_s = TRAININGS[scenario]
    step_s = _step_s(loop)
    every = max(1, round(every_s / step_s))
    samples: dict[str, list[Sample]] = {name: [] for name in savers}
    trained: dict[str, list[Trained]] = {name: [] for name in savers}
    rng = random.Random(seed)
    for number in range(rounds + 1):
        # The first round warms up, for which one save is enough.
        saves, steps = (count, every) if number else (1, 1)
        for name in rng.sample(list(savers), len(savers)):
            gc.collect()
            before = measure.resident_nbytes()
            measure.reset_peak()
            with quiet():
                found = await train(loop, savers[name], saves, steps)
            extra_nbytes = max(0, measure.peak_nbytes() - before)
            if savers[name] is not None:
                await savers[name].settle()
            if number:
                trained[name].append(found)
                samples[name].append(_sample(found, extra_nbytes))
    for each in savers.values():
        if each is not None:
            await each.close()
    if scenario == BACK_TO_BACK:
        workload = dataclasses.replace(workload, id="W8")
    made = [
        Measurement.of(workload, scenario, name, f"{framework} loop", found)
        for name, found in samples.items()
    ]
    lines = [_timeline(framework, scenario, name, found) for name, found in trained.items()]
    return made, lines


def _step_s(loop: Any) -> float:
    times = []
    for _ in range(2 * WARM_UP_STEPS):
        start = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - start)
    return median(times[WARM_UP_STEPS:])


def _sample(found: Trained, extra_nbytes: int) -> Sample:
    return Sample(
        wall_s=max(end for _, end in found.steps),
        cpu_s=found.cpu_s,
        extra_nbytes=extra_nbytes,
        values={
            "steps_s": found.steps_s,
            "step_s": median([end - begin for begin, end in found.steps]),
            "blocked_s": sum(end - begin for begin, end in found.calls),
            "calls_cpu_s": found.calls_cpu_s,
            "committed_s": median([end - begin for begin, end in found.saves]),
            "total_s": found.total_s,
            "lag_p99_s": percentile(found.lags, 0.99),
            "lag_max_s": max(found.lags, default=0.0),
        },
    )


def _timeline(framework: str, scenario: str, name: str, found: list[Trained]) -> dict[str, Any]:
    """Return the times of the training that took the median time."""
    ordered = sorted(found, key=lambda each: each.steps[-1][1])
    middle = ordered[(len(ordered) - 1) // 2]

    def rounded(spans: list[tuple[float, float]]) -> list[list[float]]:
        return [[round(begin, 5), round(end, 5)] for begin, end in spans]

    return {
        "loop": framework,
        "scenario": scenario,
        "subject": name,
        "steps": rounded(middle.steps),
        "calls": rounded(middle.calls),
        "saves": rounded(middle.saves),
    }
