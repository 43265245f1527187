"""Ranks that fail in a save or load through DCP, and the leftovers."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from asyncckpt import SaveOptions
from asyncckpt.torch import StorageReader, StorageWriter
from tests.processes.worker import Worker
from tests.torch.cases import State, differing, plain, read, state, write

QUICK = SaveOptions(arrival_s=4.0, silence_s=4.0)


class BrokenError(Exception):
    """Raised by a plug-in or planner of a test."""


def raising(kind: type, call: str, *, after: bool) -> Any:
    """The class, with a method that raises before or after its work."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if after:
            getattr(kind, call)(self, *args, **kwargs)
        raise BrokenError(f"{call} is broken")

    return type(kind.__name__, (kind,), {call: method})


def texts(call: Callable[[], Any]) -> dict[int, str]:
    """Class and text of the error of each rank in a call of DCP; empty on success."""
    try:
        call()
    except CheckpointException as error:
        return {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
    return {}


def left(path: Path) -> list[str]:
    """Files next to the checkpoint that are not part of it."""
    files = (file for file in path.parent.rglob("*") if file.is_file())
    return sorted(str(file.relative_to(path.parent)) for file in files if path not in file.parents)


def joined() -> list[str]:
    """Wait for the end of the library's threads, whose starters are no longer referenced."""
    gc.collect()
    end = time.monotonic() + 20
    threads = [t for t in threading.enumerate() if t.name.startswith("asyncckpt")]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread.name for thread in threads if thread.is_alive()]


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def fail_in(worker: Worker, path: str, call: str, after: bool, rank: int) -> dict[int, str]:
    """Replace a checkpoint with a writer that raises on one rank; return the errors."""
    write("save", state(1), StorageWriter(path), None)
    kind = raising(StorageWriter, call, after=after) if worker.index == rank else StorageWriter
    found = texts(lambda: write("save", state(2), kind(path, overwrite=True, options=QUICK), None))
    alive = joined()
    barrier()
    check_old(path, alive)
    write("save", state(3), StorageWriter(path, overwrite=True), None)
    return found


def check_old(path: str, alive: list[str]) -> None:
    """Check that the old checkpoint is whole, and that nothing else and no thread is left."""
    tree = state(9)
    read(tree, StorageReader(path))
    assert differing(plain(tree), plain(state(1))) == []
    assert left(Path(path)) == []
    assert alive == []
    barrier()


def fail_in_load(worker: Worker, path: str, call: str, rank: int) -> dict[int, str]:
    kind = raising(StorageReader, call, after=False) if worker.index == rank else StorageReader
    found = texts(lambda: read(state(2), kind(path)))
    assert joined() == []
    return found


def fill_the_disk_in_finish(worker: Worker | None, path: str) -> dict[int, str]:
    """Replace a checkpoint on a disk that is full when it is committed."""
    write("save", state(1), StorageWriter(path), None)

    class Full(StorageWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            def full(*_: Any) -> Any:
                raise OSError(errno.ENOSPC, "No space left on device")

            names = ("pwrite", "pwritev", "write")
            with mock.patch.multiple(os, **dict.fromkeys(names, full)):
                super().finish(*args, **kwargs)

    found = texts(lambda: write("save", state(2), Full(path, overwrite=True), None))
    alive = joined()
    barrier()
    check_old(path, alive)
    return found


def abandon(worker: Worker, path: str) -> dict[int, str]:
    """Save twice with one writer, first without finish(); return the error of the first save."""
    broken = [True]

    class Once(StorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            written = super().write_data(plan, planner)
            if worker.index == worker.count - 1 and broken.pop():
                broken.append(False)
                raise BrokenError("once")
            return written

    writers = [Once(path)]
    found = texts(lambda: write("save", state(1), writers[0], None))
    write("save", state(2), writers.pop(), None)
    assert joined() == []
    barrier()
    assert left(Path(path)) == []
    return found


# ----------------------------------------------------------------------------------- bad input


class Greedy(DefaultSavePlanner):
    """Gives replicated items to all ranks."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        _, metadata = super().create_global_plan(all_plans[:1])
        return all_plans, metadata


class BadResolver(DefaultSavePlanner):
    """Raises when rank 1 resolves an item."""

    def resolve_data(self, write_item: Any) -> Any:
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            raise BrokenError(f"cannot resolve {write_item.index.fqn}")
        return super().resolve_data(write_item)


class Asker(DefaultLoadPlanner):
    """Asks for a missing item."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        for item in plan.items:
            object.__setattr__(item.storage_index, "fqn", "nowhere")
        return plan


BAD_SAVES: dict[str, Callable[[str], Any]] = {
    "an object that cannot be stored": lambda path: write(
        "save", {"model": {"open": io.BytesIO(b"abc")}}, StorageWriter(path), None
    ),
    "two ranks with one item": lambda path: write(
        "save", {"w": torch.ones(3)}, StorageWriter(path), Greedy()
    ),
    "an item that cannot be resolved": lambda path: write(
        "save",
        {f"w{number}": torch.ones(3) for number in range(8)},
        StorageWriter(path),
        BadResolver(),
    ),
    "a quantized tensor": lambda path: write(
        "save",
        {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
        StorageWriter(path),
        None,
    ),
    "no collectives": lambda path: write(
        "save", {"w": torch.ones(3)}, StorageWriter(path), None, use_collectives=False
    ),
}


def save_badly(worker: Worker | None, path: str, case: str) -> dict[int, str]:
    try:
        found = texts(lambda: BAD_SAVES[case](path))
    except Exception as error:
        found = {0: f"{type(error).__name__}: {error}"}
    assert joined() == []
    barrier()
    assert not Path(path).exists()
    assert left(Path(path)) == []
    return found


def load_badly(worker: Worker | None, path: str, planner: bool, tree: State) -> dict[int, str]:
    found = texts(lambda: read(tree, StorageReader(path), Asker() if planner else None))
    assert joined() == []
    return found


def save_with_dcp(worker: Worker | None, path: str) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path)


def save_over(worker: Worker | None, path: str, overwrite: bool) -> dict[int, str]:
    writer = StorageWriter(path, overwrite=overwrite)
    found = texts(lambda: write("save", state(2), writer, None))
    assert joined() == []
    return found


def in_group(worker: Worker, path: str, members: list[int]) -> list[str]:
    """Save and load by a part of the ranks; the others do nothing."""
    group = dist.new_group(members)
    if worker.index not in members:
        return []
    tree = {"w": torch.arange(worker.count), "n": 7}
    write("save", tree, StorageWriter(path, process_group=group), None, process_group=group)
    target = {"w": torch.zeros(worker.count, dtype=torch.int64), "n": 0}
    dcp.load(target, storage_reader=StorageReader(path), process_group=group)
    return differing(plain(target), plain(tree))


def in_unknown_group(worker: Worker, path: str, members: list[int]) -> dict[int, str]:
    """Save by a part of the ranks that the writer does not know of."""
    group = dist.new_group(members)
    if worker.index not in members:
        return {}
    tree = {"w": torch.ones(3)}
    return texts(lambda: write("save", tree, StorageWriter(path), None, process_group=group))
