"""W7: a state sharded over eight devices, restored onto other shardings.

The devices are emulated on the CPU. How many there are is settled when a process first uses JAX, so
all of this runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncckpt import blocking
from benchmarks import files, measure, workloads
from benchmarks.local import shardings
from benchmarks.local.suite import Suite
from benchmarks.measure import Protocol, Run
from benchmarks.peers import ORBAX
from benchmarks.peers.orbax import Orbax
from benchmarks.peers.timing import quiet
from benchmarks.results import OURS, RESHARD, Measurement
from benchmarks.subject import Restored
from benchmarks.workers import apart
from benchmarks.workloads import Tree

DEVICES = 8

WIDTH_STEP = 32
"""Widths of W1 that are a multiple of it have heads and hidden sizes that are multiples of 8."""

PEER_SAMPLES = 3
"""Of the short form: Orbax takes seconds for each."""


@dataclass(frozen=True, slots=True)
class Onto:
    """One way to restore what was saved by rows over eight devices.

    Attributes:
        column: what it is called.
        layout: what it is restored onto.
        most_read: bytes read at most per byte wanted; None where the boundaries of the target
            do not fall on the chunk grid, so that there is no limit to set.
        only: the one subtree that is wanted, or None.
        peer: measured with Orbax too, also in the short form.
    """

    column: str
    layout: str
    most_read: float | None
    only: str | None = None
    peer: bool = False


WAYS = (
    Onto("same layout", shardings.ROWS_8, 1.01),
    Onto("8 → 2 devices", shardings.ROWS_2, 1.10, peer=True),
    Onto("rows → columns", shardings.COLUMNS_8, None, peer=True),
    Onto("sharded → replicated", shardings.REPLICATED, 1.10),
    Onto("parameters only", shardings.ROWS_8, 1.02, only="params"),
    # What one process of two reads. Half of the columns has a part in every chunk.
    Onto("one half, by rows", shardings.HALF_ROWS, 1.10),
    Onto("one half, by columns", shardings.HALF_COLUMNS, None),
)


def even_nbytes(nbytes: int) -> int:
    """Size of a state of about so many bytes that eight devices divide along every dimension."""
    width = max(WIDTH_STEP, int(512 * math.sqrt(nbytes / (1 << 30))) // WIDTH_STEP * WIDTH_STEP)
    return (width << 30) * width // (512 * 512)


def run(suite: Suite, nbytes: int, *, layers: int = workloads.LAYERS) -> None:
    """Measure everything in a child process; `layers` of the model, fewer make it smaller."""
    nbytes = even_nbytes(nbytes)
    suite.log(f"W7: {nbytes / 2**20:.0f} MiB over {DEVICES} devices, restored onto others")
    given = (nbytes, layers, suite.protocol.samples, suite.rng.randrange(1000), suite.full)

    def work() -> None:
        with suite.scratch("W7") as directory:
            found, errors = apart(measured, directory, *given)
            suite.found.measurements += found
            suite.found.errors += errors

    suite.attempt(f"W7 {RESHARD}", RESHARD, work)


# ----------------------------------------------------------------------------------- the child


class Held:
    """An object that is restored through its state dict, so that there is a report of it."""

    def __init__(self, state: Tree) -> None:
        self.state = state

    def state_dict(self) -> Tree:
        return self.state

    def load_state_dict(self, state: Tree) -> None:
        self.state = state


def restore(path: Path, only: str | None, target: Tree) -> Restored:
    """Restore with asyncckpt onto the target; `read_nbytes` is what its report says."""
    held = {key: Held(part) for key, part in target.items()}
    include = None if only is None else f"{only}/**"
    start = time.perf_counter()
    report = blocking.restore_into(path, held, include=include)
    made = {key: part.state for key, part in held.items()}
    _wait(made)
    wall_s = time.perf_counter() - start
    return Restored(made, {"wall_s": wall_s, "read_nbytes": report.read_nbytes})


def restore_with_orbax(orbax: Orbax, path: Path, only: str | None, target: Tree) -> Restored:
    """Restore with Orbax, onto the target, what Orbax saved."""
    import orbax.checkpoint as ocp

    restore_args = workloads.map_leaves(
        lambda leaf: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
        ),
        target,
    )
    part = only is not None
    args = ocp.args.PyTreeRestore(
        item=target if part else None, restore_args=restore_args, partial_restore=part
    )
    checkpointer = orbax.open()
    start = time.perf_counter()
    with quiet():
        made = checkpointer.restore(path, args=args)
        _wait(made)
    return Restored(made, {"wall_s": time.perf_counter() - start})


def _wait(tree: Tree) -> None:
    for _, leaf in workloads.leaves(tree):
        if hasattr(leaf, "block_until_ready"):
            leaf.block_until_ready()


@dataclass(slots=True)
class ReshardRun(Run):
    """Restores onto a target, and compares what came back.

    Attributes:
        restore: does it.
        path: the checkpoint.
        way: what it is restored onto.
        expected: what the wanted leaves hold.
    """

    restore: Callable[[Tree], Restored]
    path: Path
    way: Onto
    expected: Tree
    _target: Tree | None = None
    _restored: Restored | None = None

    def prepare(self) -> None:
        files.warm(self.path)
        self._target = shardings.target(self.way.layout, self.expected)

    def run(self) -> Mapping[str, float]:
        target, self._target = self._target, None
        assert target is not None
        wanted = shardings.wanted_nbytes(target)
        before = measure.call_read_nbytes()
        self._restored = self.restore(target)
        after = measure.call_read_nbytes()
        values = dict(self._restored.values)
        read = values.pop("read_nbytes", None)
        if read is not None:
            values["read_share"] = read / wanted
            if self.way.most_read is not None:
                values["most_read"] = self.way.most_read
        if before is not None and after is not None:
            values["calls_share"] = (after - before) / wanted
        return {**values, "wanted_nbytes": wanted}

    def finish(self) -> None:
        restored, self._restored = self._restored, None
        if restored is not None:
            shardings.check(self.expected, restored.tree)


def measured(
    directory: Path, nbytes: int, layers: int, samples: int, seed: int, every_peer: bool
) -> tuple[list[Measurement], list[str]]:
    """Return measurements and errors; checkpoints stay below the directory."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    workload = dataclasses.replace(workloads.llama(nbytes, layers=layers), id="W7")
    ours = directory / "ours"
    state = dataclasses.replace(workload, tree=shardings.shard(shardings.ROWS_8, workload.tree))
    blocking.save(ours, state.tree)
    runs = [
        (OURS, None, ReshardRun(functools.partial(restore, ours, way.only), ours, way, part))
        for way in WAYS
        for part in [_part(workload.tree, way.only)]
    ]
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("orbax"):
            orbax = Orbax(directory / "orbax")
            stack.callback(orbax.close)
            theirs = orbax.save(state).path
            fewer = None if every_peer else PEER_SAMPLES
            for way in WAYS:
                if way.peer or (every_peer and "half" not in way.layout):
                    work = functools.partial(restore_with_orbax, orbax, theirs, way.only)
                    part = _part(workload.tree, way.only)
                    runs.append((ORBAX, fewer, ReshardRun(work, theirs, way, part)))
        del state
        cases = {
            (subject, run.way.column): run.case(
                f"{subject}, {run.way.column}",
                fresh_nbytes=sum(array.nbytes for _, array in workloads.leaves(run.expected)),
                samples=number,
            )
            for subject, number, run in runs
        }
        errors: list[str] = []
        taken = measure.rounds(
            list(cases.values()),
            Protocol(samples=samples),
            random.Random(seed),
            lambda case, error: errors.append(
                f"{workload.id} {RESHARD}: {case.name}: {type(error).__name__}: {error}"
            ),
        )
    found = [
        Measurement.of(workload, RESHARD, subject, column, taken[case.name])
        for (subject, column), case in cases.items()
        if case.name in taken
    ]
    return found, errors


def _part(tree: Tree, only: str | None) -> Tree:
    return tree if only is None else {only: tree[only]}
