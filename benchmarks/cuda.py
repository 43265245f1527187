"""`python -m benchmarks.cuda`: saves from a CUDA device, and restores to it.

The floor of either direction is as many bytes copied between the device and page-locked memory that
is kept, in the way that the framework itself offers. A background save then runs while the device
computes: steps are timed with saves and without. Every restore is compared with the state.

Other libraries do the same in the way that is fastest for them: asynchronous saves of DCP, with a
stager that keeps page-locked memory, and of Orbax; restores of both and of safetensors to the
device. Their saves are finished, as ours are, before the next measurement.

`--device cpu` runs the same code without a GPU, as a trial: its figures say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import os
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import asyncckpt
from benchmarks import measure, tables
from benchmarks.local.ours import AsyncCkpt
from benchmarks.machine import facts
from benchmarks.peers.timing import quiet
from benchmarks.report import write_page
from benchmarks.subject import awaited
from benchmarks.workloads import Tree, Workload, difference, leaves, llama, map_leaves

MIB = 1 << 20
LEAF_S = 6e-6
"""What a leaf may cost a call of `start_save`, beside its bytes."""

OUT, BACK, STEPS = "start_save", "restore", "step"
TARGETS = {OUT: 1.15, BACK: 1.15, STEPS: 1.02}
"""Most that each may take, as a multiple of the floor, or of a step without saves."""

GROWTH_NBYTES = 4 * MIB
"""Memory of host or device that may be left after all saves, above that after the first."""

MATRIX = 4096
STEP_COUNT = 40
"""Steps that are timed without saves, and at least as many with them."""

Samples = dict[str, list[tuple[float, float]]]
"""By operation: its seconds, and those of the floor."""

Peers = dict[str, list[float]]
"""By library and operation: seconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library.

    Attributes:
        name: of the library.
        save: saves to a new directory, and returns the seconds until the state may change.
        restore: restores what was saved there to the device, and waits for it.
    """

    name: str
    save: Callable[[Path], float]
    restore: Callable[[Path], object]


class Framework(ABC):
    """A framework and the device on which it keeps a state.

    Args:
        tree: the state, in NumPy arrays.
        on_gpu: keep it on the first GPU, not on the CPU.
    """

    state: Tree

    def __init__(self, tree: Tree, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    @abstractmethod
    def copy_out(self) -> None:
        """Copy the state to host memory, page-locked on a GPU, and wait for it."""

    @abstractmethod
    def copy_back(self) -> None:
        """Copy it from there to new arrays of the device, and wait for it."""

    @abstractmethod
    def step(self) -> None:
        """Multiply two matrices on the device, and wait for the product."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for all work of the device."""

    @abstractmethod
    def device_nbytes(self) -> int:
        """Return the bytes of the device that are in use; 0 if unknown."""

    @abstractmethod
    def host(self, tree: Tree) -> Tree:
        """Return a tree of the device as NumPy arrays."""

    @abstractmethod
    def peers(self) -> list[Peer]:
        """Return the libraries to compare with."""


class Torch(Framework):
    """PyTorch: `Tensor.copy_` on a stream beside the current one."""

    def __init__(self, tree: Tree, *, on_gpu: bool) -> None:
        import torch

        from asyncckpt.adapters.torch import numpy_view, tensor_view

        super().__init__(tree, on_gpu=on_gpu)
        self._torch, self._numpy_view = torch, numpy_view
        self._device = torch.device("cuda" if on_gpu else "cpu")
        self.state = map_leaves(lambda leaf: tensor_view(leaf).to(self._device, copy=True), tree)
        self._tensors = [leaf for _, leaf in leaves(self.state)]
        self._pinned = [torch.empty_like(t, device="cpu", pin_memory=on_gpu) for t in self._tensors]
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._matrix = torch.rand(MATRIX if on_gpu else 64, device=self._device).diag()

    def copy_out(self) -> None:
        with self._torch.cuda.stream(self._stream):
            for pinned, tensor in zip(self._pinned, self._tensors, strict=True):
                pinned.copy_(tensor, non_blocking=True)
        self.wait()

    def copy_back(self) -> None:
        copies = [pinned.to(self._device, non_blocking=True, copy=True) for pinned in self._pinned]
        self.wait()
        del copies

    def step(self) -> None:
        self._matrix @ self._matrix
        self.wait()

    def wait(self) -> None:
        if self.on_gpu:
            self._torch.cuda.synchronize()

    def device_nbytes(self) -> int:
        return int(self._torch.cuda.memory_allocated()) if self.on_gpu else 0

    def host(self, tree: Tree) -> Tree:
        return map_leaves(lambda leaf: self._numpy_view(leaf.cpu()), tree)

    def peers(self) -> list[Peer]:
        import safetensors.torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        state = dict(leaves(self.state))
        stager = BlockingAsyncStager(cache_staged_state_dict=self.on_gpu)

        def save(path: Path) -> float:
            writer = dcp.FileSystemWriter(path, thread_count=8)
            start = time.perf_counter()
            saved: Any = dcp.async_save(
                state, storage_writer=writer, no_dist=True, async_stager=stager
            )
            stall_s = time.perf_counter() - start
            getattr(saved, "upload_completion", saved).result()
            return stall_s

        def load(path: Path) -> None:
            dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
            self.wait()

        def save_file(path: Path) -> float:
            path.mkdir()
            file = path / "state.safetensors"
            return timed(lambda: safetensors.torch.save_file(state, file))

        def load_file(path: Path) -> None:
            where = "cuda:0" if self.on_gpu else "cpu"
            loaded = safetensors.torch.load_file(path / "state.safetensors", device=where)
            self.wait()
            del loaded

        return [Peer("torch DCP", save, load), Peer("safetensors", save_file, load_file)]


class Jax(Framework):
    """JAX: `device_put` to the memory of kind ``pinned_host`` and back."""

    def __init__(self, tree: Tree, *, on_gpu: bool) -> None:
        import jax

        super().__init__(tree, on_gpu=on_gpu)
        self._jax: Any = jax
        self._device = jax.devices("gpu" if on_gpu else "cpu")[0]
        self.state = map_leaves(lambda leaf: jax.device_put(leaf, self._device), tree)
        sharding = jax.sharding.SingleDeviceSharding
        self._near = sharding(self._device)
        self._far = sharding(self._device, memory_kind="pinned_host" if on_gpu else None)
        self._pinned = jax.device_put(self.state, self._far)
        # An argument: the product of a constant would be computed once, when it is compiled.
        self._matrix = jax.numpy.eye(MATRIX if on_gpu else 64, device=self._device)
        self._product = jax.jit(functools.partial(jax.numpy.matmul, precision="highest"))

    def copy_out(self) -> None:
        self._pinned = self._jax.device_put(self.state, self._far)
        self._jax.block_until_ready(self._pinned)

    def copy_back(self) -> None:
        self._jax.block_until_ready(self._jax.device_put(self._pinned, self._near))

    def step(self) -> None:
        self._product(self._matrix, self._matrix).block_until_ready()

    def wait(self) -> None:
        self._jax.block_until_ready(self.state)

    def device_nbytes(self) -> int:
        return int((self._device.memory_stats() or {}).get("bytes_in_use", 0))

    def host(self, tree: Tree) -> Tree:
        return map_leaves(np.asarray, tree)

    def peers(self) -> list[Peer]:
        import orbax.checkpoint as ocp

        # Arrays of their own: Orbax leaves host copies on them.
        state = self._jax.device_put(self.host(self.state), self._near)
        checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        how = ocp.checkpoint_utils.construct_restore_args(state)

        def save(path: Path) -> float:
            stall_s = timed(lambda: checkpointer.save(path, args=ocp.args.PyTreeSave(state)))
            checkpointer.wait_until_finished()
            return stall_s

        def restore(path: Path) -> None:
            args = ocp.args.PyTreeRestore(item=state, restore_args=how)
            self._jax.block_until_ready(checkpointer.restore(path, args=args))

        return [Peer("Orbax", save, restore)]


FRAMEWORKS: dict[str, type[Framework]] = {"torch": Torch, "jax": Jax}


def timed(work: Any) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measured(
    directory: Path, workload: Workload, framework: Framework, rounds: int, saves: int
) -> tuple[Samples, dict[str, int]]:
    """Return the samples of all rounds but the first, and by how many bytes memory grew."""
    samples: Samples = {OUT: [], BACK: [], STEPS: []}
    subject = AsyncCkpt(directory, retention=asyncckpt.KeepLast(1))
    try:
        checkpointer = subject.open(Workload(workload.id, workload.title, framework.state))
        framework.step()
        for number in range(rounds + 1):
            floor_s = timed(framework.copy_out)
            out_s = subject.runner.run(_start_save(checkpointer, framework.state, number))
            back_floor_s = timed(framework.copy_back)
            back_s = subject.runner.run(_restore(checkpointer, workload, framework))
            if number:
                samples[OUT].append((out_s, floor_s))
                samples[BACK].append((back_s, back_floor_s))
        samples[STEPS] = subject.runner.run(_steps(checkpointer, framework, rounds + 1))
        growth = subject.runner.run(_growth(checkpointer, framework, saves))
    finally:
        subject.close()
    return samples, growth


def compared(directory: Path, framework: Framework, rounds: int) -> Peers:
    """Return the samples of all rounds but the first, of every other library."""
    found: Peers = {}
    directory.mkdir()
    with quiet():
        for peer in framework.peers():
            for number in range(rounds + 1):
                path = directory / f"{peer.name} {number}"
                save_s = peer.save(path)
                restore_s = timed(functools.partial(peer.restore, path))
                shutil.rmtree(path)
                if number:
                    found.setdefault(f"{peer.name}: save", []).append(save_s)
                    found.setdefault(f"{peer.name}: restore", []).append(restore_s)
    return found


async def _start_save(checkpointer: Any, state: Tree, step: int) -> float:
    """Return the seconds in `start_save`; the save is committed on return."""
    pending, seconds = await awaited(checkpointer.start_save(step, state))
    await pending
    return seconds


async def _restore(checkpointer: Any, workload: Workload, framework: Framework) -> float:
    """Return the seconds of a restore to the device; check what it returns."""
    start = time.perf_counter()
    tree = await checkpointer.restore(like=framework.state)
    framework.wait()
    seconds = time.perf_counter() - start
    wrong = difference(workload.tree, framework.host(tree))
    if wrong:
        raise AssertionError(f"something else was restored: {wrong}")
    return seconds


async def _steps(checkpointer: Any, framework: Framework, step: int) -> list[tuple[float, float]]:
    """Return the median seconds of a step while saves are in flight, and without them."""
    alone = [await asyncio.to_thread(timed, framework.step) for _ in range(STEP_COUNT)]
    beside: list[float] = []
    while len(beside) < STEP_COUNT:
        pending = await checkpointer.start_save(step, framework.state)
        beside.append(await asyncio.to_thread(timed, framework.step))
        while not pending.done():
            beside.append(await asyncio.to_thread(timed, framework.step))
        await pending
        step += 1
    return [(statistics.median(beside), statistics.median(alone))]


async def _growth(checkpointer: Any, framework: Framework, saves: int) -> dict[str, int]:
    """Return by how many bytes host and device memory grew from the first save to the last."""
    first = {"host": 0, "device": 0}
    for number in range(saves):
        await _start_save(checkpointer, framework.state, 1_000_000 + number)
        await checkpointer.wait()
        gc.collect()
        now = {"host": measure.resident_nbytes(), "device": framework.device_nbytes()}
        if number == 0:
            first = now
    return {place: now[place] - first[place] for place in first}


def report(
    found: dict[str, tuple[Samples, dict[str, int]]],
    peers: dict[str, Peers],
    workload: Workload,
    about: dict[str, Any],
) -> str:
    """Return the figures as Markdown."""
    rows = []
    for name, (samples, growth) in found.items():
        for operation, times in samples.items():
            seconds, floor_s = (statistics.median(column) for column in zip(*times, strict=True))
            allowed_s = TARGETS[operation] * floor_s
            allowed_s += LEAF_S * workload.leaf_count if operation != STEPS else 0.0
            rows.append(
                (
                    name,
                    operation,
                    tables.seconds(seconds),
                    tables.seconds(floor_s),
                    f"{seconds / floor_s:.2f}",
                    tables.verdict(f"≤ {tables.seconds(allowed_s)}", seconds <= allowed_s),
                )
            )
        for place, nbytes in growth.items():
            what, grown = f"{place} memory after all saves", f"{nbytes / MIB:+.1f} MiB"
            verdict = tables.verdict(f"≤ {GROWTH_NBYTES // MIB} MiB", nbytes <= GROWTH_NBYTES)
            rows.append((name, what, grown, "", "", verdict))
    columns = "framework|what|median|floor|of the floor|target"
    title = "# Saves from a CUDA device, and restores to it"
    other_rows = []
    for name, samples in peers.items():
        for what, seconds in samples.items():
            ours = [pair[0] for pair in found[name][0][BACK if "restore" in what else OUT]]
            times, own = statistics.median(seconds), statistics.median(ours)
            texts = (tables.seconds(times), tables.seconds(own), f"{times / own:.1f}")
            other_rows.append((name, what, *texts))
    return "\n".join(
        (
            f"{title}\n\n{tables.facts(about)}",
            tables.table(workload.title, columns, rows),
            tables.table(
                "Other libraries: until the state may change, and until it is restored",
                "framework|what|median|asyncckpt|times asyncckpt",
                other_rows,
            ),
        )
    )


def gpu_name() -> str | None:
    """Return the name of the first GPU that PyTorch can use, None without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results; return 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--framework", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=1024, help="MiB of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--saves", type=int, default=10, help="over which memory is to stay flat")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    on_gpu = given.device == "cuda"
    device = gpu_name() if on_gpu else "none: a trial on the CPU"
    if device is None:
        print("PyTorch finds no CUDA device; --device cpu is a trial without one")
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs room, too
    workload = llama(given.size * MIB)
    found: dict[str, tuple[Samples, dict[str, int]]] = {}
    peers: dict[str, Peers] = {}
    home = Path(tempfile.mkdtemp(dir=given.dir))
    try:
        for name in given.framework:
            framework = FRAMEWORKS[name](workload.tree, on_gpu=on_gpu)
            found[name] = measured(home / name, workload, framework, given.rounds, given.saves)
            peers[name] = compared(home / f"{name} peers", framework, given.rounds)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    about = {**facts(given.dir), "GPU": device, "rounds": given.rounds, "saves": given.saves}
    document = {
        "about": about,
        "samples": {name: samples for name, (samples, _) in found.items()},
        "growth_nbytes": {name: growth for name, (_, growth) in found.items()},
        "peers": peers,
    }
    write_page(given.out, "cuda", report(found, peers, workload, about), document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
