"""What processes without a runtime do in tests: arrays held in boxes, trees of their own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from asyncckpt import Checkpointer, DirectoryCoordinator, SaveOptions, ShardedArray
from asyncckpt.stores.local.datafile import LocalDataFile
from asyncckpt.stores.local.tree import AttemptTree
from benchmarks import workloads
from tests.processes.values import array, differing, same, shuffled
from tests.processes.worker import Worker

Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of what a process holds; it may reach past the array, which is padding."""

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "eight and two": ((10, 300), "float32"),
    "one has all": ((5, 6), "float64"),
    "tiles by turns": ((40, 50), "int32"),
    "uneven rows": ((1000, 500), "float64"),
    "uneven and small": ((13, 3), "float32"),
    "columns": ((64, 1024), "int8"),
    "copies": ((256, 640), "bfloat16"),
    "padded": ((7, 5), "float32"),
    "padded and large": ((301, 503), "float32"),
}

PADDING = 77


def regions(name: str, count: int) -> list[list[Region]]:
    """What each process holds of an array."""
    shape = SHAPES[name][0]
    match name:
        case "eight and two":
            rows = [[(0, 8)], [(8, 2)]] + [[]] * (count - 2)
            return [[((at, 0), (n, 300)) for at, n in held] for held in rows]
        case "one has all":
            return [[((0, 0), shape)]] + [[((5, 0), (0, 6))]] * (count - 1)
        case "tiles by turns":
            tiles = [((8 * i, 10 * j), (8, 10)) for i in range(5) for j in range(5)]
            return [tiles[process::count] for process in range(count)]
        case "uneven rows" | "uneven and small":
            # Every process has half of the rows that are left and a few, if any are.
            cuts = [0]
            for _ in range(count - 1):
                cuts.append(min(cuts[-1] + (shape[0] - cuts[-1]) // 2 + 1, shape[0]))
            pairs = itertools.pairwise([*cuts, shape[0]])
            return [[((at, 0), (end - at, shape[1]))] if end > at else [] for at, end in pairs]
        case "columns":
            cuts = [1024 * p // count for p in range(count + 1)]
            return [[((0, at), (64, end - at))] for at, end in itertools.pairwise(cuts)]
        case "copies":
            return [[((128 * (p % 2), 0), (128, 640))] for p in range(count)]
    mesh = (2, count // 2)
    tile = tuple(-(-n // m) for n, m in zip(shape, mesh, strict=True))
    offsets = [tuple(i * n for i, n in zip(cell, tile, strict=True)) for cell in np.ndindex(*mesh)]
    held = [[(offset, tile)] if np.all(np.less(offset, shape)) else [] for offset in offsets]
    return held + [[]] * (count - len(held))


def held(worker: Worker, name: str, count: int, *, seed: int | None) -> ShardedArray:
    """What this process holds of an array; without a seed, with nothing in it."""
    shape, dtype = SHAPES[name]
    whole = array(name, shape, dtype, seed=seed or 0)
    shards = []
    for offset, tile in regions(name, count)[worker.index]:
        part = np.full(tile, PADDING, whole.dtype)
        if seed is not None:
            inside = tuple(slice(o, o + n) for o, n in zip(offset, tile, strict=True))
            values = whole[inside]
            part[tuple(map(slice, values.shape))] = values
        shards.append((offset, part))
    return ShardedArray(shape, whole.dtype, shards, padded=True)


def same_shards(one: ShardedArray, other: ShardedArray, *, padding: bool = False) -> bool:
    """Whether two arrays hold the same bits in the same places."""
    if (one.shape, one.dtype, len(one.shards)) != (other.shape, other.dtype, len(other.shards)):
        return False
    for (at, a), (place, b) in zip(one.shards, other.shards, strict=True):
        inside = tuple(slice(n - o) for n, o in zip(one.shape, at, strict=True))
        if at != place or not same(*(x if padding else x[inside] for x in (a, b))):
            return False
    return True


def whole_state(seed: int) -> dict[str, Any]:
    """The state as one process has it."""
    return {
        "arrays": {name: array(name, *SHAPES[name], seed=seed) for name in SHAPES},
        "table": array("table", (777, 1000), "float32", seed=seed),
        "small": array("small", (3,), "int64", seed=seed),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(seed / 7, np.float32),
        "step": seed,
        "rate": seed / 3,
        "name": "run",
        "bytes": b"\0\xff" * 3000,
        "nothing": None,
        "flag": True,
    }


def state(worker: Worker, count: int, *, seed: int) -> dict[str, Any]:
    """What one of `count` processes has of the state, in an order of its own."""
    tree = whole_state(seed)
    tree["arrays"] = {name: held(worker, name, count, seed=seed) for name in SHAPES}
    return shuffled(worker, tree)  # type: ignore[no-any-return]


def empty(worker: Worker, count: int) -> dict[str, Any]:
    """A target of the same shards and types with other values."""
    tree = state(worker, count, seed=99)
    tree["arrays"] = {name: held(worker, name, count, seed=None) for name in SHAPES}
    return tree


def wrong(
    tree: dict[str, Any], worker: Worker, count: int, *, seed: int, padding: bool = False
) -> list[str]:
    """Paths of leaves that have other values than `state`."""
    wanted = state(worker, count, seed=seed)
    pairs = {name: (tree["arrays"][name], wanted["arrays"][name]) for name in SHAPES}
    bad = [name for name, pair in pairs.items() if not same_shards(*pair, padding=padding)]
    return bad + differing({**tree, "arrays": {}}, {**wanted, "arrays": {}})


def coordinator(worker: Worker, count: int | None = None) -> Any:
    """All processes, or the first `count`, through a directory, or their runtime."""
    if worker.kind != "numpy":
        return "auto"
    count = count or worker.count
    return DirectoryCoordinator(
        worker.directory / f"keys-{count}", process_index=worker.index, process_count=count
    )


# --------------------------------------------------------------------------------------- calls


async def save(worker: Worker, root: str, count: int, seed: int) -> tuple[str, int]:
    """Save the state as step `seed`."""
    async with Checkpointer(root, coordinator=coordinator(worker, count)) as ckpt:
        report = await ckpt.save(seed, state(worker, count, seed=seed))
    return report.save_id, report.stored_nbytes


async def save_regular(worker: Worker, root: str) -> None:
    """Save every leaf as one array, which Orbax can read."""
    options = SaveOptions(layout="regular", chunk_nbytes=1 << 20)
    async with Checkpointer(root, coordinator=coordinator(worker), save_options=options) as ckpt:
        tree = state(worker, worker.count, seed=1)
        del tree["arrays"]["uneven rows"]
        report = await ckpt.save(1, tree)
    assert report.orbax or worker.index, report.notes


async def restore(worker: Worker, root: str, count: int, seed: int) -> list[str]:
    """Restore into arrays and as new ones; paths of wrong leaves."""
    # What is immutable is compared, not filled.
    into = empty(worker, count)
    for key in ("step", "rate", "name", "bytes", "flag"):
        into[key] = whole_state(seed)[key]
    async with Checkpointer(root, coordinator=coordinator(worker, count)) as ckpt:
        tree = await ckpt.restore(seed, like=empty(worker, count))
        await ckpt.restore_into(into, step=seed)
    bad = wrong(tree, worker, count, seed=seed)
    return bad + wrong(into, worker, count, seed=seed, padding=True)


async def save_stages(worker: Worker, root: str) -> None:
    """Save a tree of which each process has a part of its own, and all have another."""
    async with Checkpointer(root, coordinator=coordinator(worker)) as ckpt:
        await ckpt.save(1, stages(worker, 1))
        report = await ckpt.save(2, stages(worker, 2))
        assert report.plan_cached


def stages(worker: Worker, seed: int) -> dict[str, Any]:
    """What a stage of a pipeline has."""
    index = worker.index
    tree = {
        "step": seed,
        "shared": array("shared", (50, 40), seed=seed),
        "rows": held(worker, "eight and two", worker.count, seed=seed),
        "layers": {f"stage {index}": layers(index, seed)},
        f"only {index}": index + seed,
    }
    if index in (1, 2):
        tree["of two"] = array("of two", (300, 1000), seed=seed)
    return shuffled(worker, tree)  # type: ignore[no-any-return]


def layers(index: int, seed: int) -> dict[str, Any]:
    """Layers of one stage; the stages have different sizes."""
    names = [f"w{number}" for number in range(index + 1)]
    tree: dict[str, Any] = {
        name: array(f"{index}/{name}", (100 * (index + 1), 700), seed=seed) for name in names
    }
    return {**tree, "scale": index / 7, "name": f"stage {index}"}


async def restore_stages(worker: Worker, root: str, shift: int) -> list[str]:
    """Restore what a process, this one or one further on, has saved."""
    target = Worker(
        worker.kind, (worker.index + shift) % worker.count, worker.count, worker.directory
    )
    like, wanted = stages(target, 9), stages(target, 2)
    async with Checkpointer(root, coordinator=coordinator(worker)) as ckpt:
        tree = await ckpt.restore(2, like=like)
    rows = same_shards(tree.pop("rows"), wanted.pop("rows"))
    return differing(tree, wanted) + ([] if rows else ["rows"])


# --------------------------------------------------------------------------------------- bytes


def llama(count: int, seed: int, *, stacked: bool = False) -> dict[str, Any]:
    """The names and proportions of W1, 590 leaves; process 0 writes some 600 KiB about them.

    Stacked, they are as few and as large as those of a larger model: up to 64 KiB, sharded leaves
    are all written by process 0.
    """
    tree: dict[str, Any] = workloads.llama(count * count << 22, stacked=stacked, seed=seed).tree
    tree["step"], tree["rate"] = seed, 0.5
    return tree


def spread(worker: Worker, kind: str, seed: int) -> dict[str, Any]:
    """What this process has of that state: all, a shard of HSDP, or all with one leaf of 60 %."""
    tree = llama(worker.count, seed, stacked=kind == "hsdp")
    if kind == "one of 60 %":
        return {"large": np.full(worker.count**2 * 3 << 19, seed, np.float32), **tree}
    return divided(tree, worker) if kind == "hsdp" else tree


def divided(tree: Any, worker: Worker) -> Any:
    """The shards of two replicas, each on half of the processes."""
    if isinstance(tree, dict):
        return {key: divided(value, worker) for key, value in tree.items()}
    shards = worker.count // 2
    if not isinstance(tree, np.ndarray) or tree.shape[0] % shards:
        return tree
    rows = tree.shape[0] // shards
    start = worker.index % shards * rows
    held = tree[start : start + rows].copy()
    return ShardedArray(tree.shape, tree.dtype, [((start, *(0,) * (tree.ndim - 1)), held)])


async def save_counted(worker: Worker, root: str, kind: str) -> list[int]:
    """Save a state twice; the bytes that this process wrote each time."""
    written: list[int] = []

    def count(data: Any) -> None:
        written[-1] += memoryview(data).nbytes

    with counted(count):
        async with Checkpointer(root, coordinator=coordinator(worker)) as ckpt:
            for seed in (1, 2):
                written.append(0)
                report = await ckpt.save(seed, shuffled(worker, spread(worker, kind, seed)))
                assert report.plan_cached == (seed == 2)
    return written


@contextmanager
def counted(count: Callable[[Any], None]) -> Iterator[None]:
    """Call `count` with all bytes that this process gives its store."""

    def watched(function: Any) -> Any:
        @functools.wraps(function)
        async def call(self: Any, place: Any, data: Any, *args: Any, **keywords: Any) -> Any:
            for run in data if isinstance(data, list | tuple) else (data,):
                count(run)
            return await function(self, place, data, *args, **keywords)

        return call

    with ExitStack() as stack:
        for owner, names in (
            (LocalDataFile, ("write", "write_runs")),
            (AttemptTree, ("put", "pass_on")),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name))))
        yield
