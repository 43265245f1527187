"""What processes do in tests of restores that read once: restore, count what they read, fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import asyncckpt
from asyncckpt import Checkpointer, RestoreOptions, ShardedArray, blocking
from asyncckpt.errors import StoreError
from asyncckpt.restore.exchange.exchanger import Exchanger
from asyncckpt.spec import DTYPES
from asyncckpt.stores.local.files import LocalFiles
from tests.processes.values import array, same
from tests.processes.worker import Worker

ONCE = RestoreOptions(broadcast=True)

DATA = array("large", (640, 1001), "float64", seed=4)


@dataclass
class Read:
    """What a process has read at the store port, in bytes."""

    payload: int = 0
    metadata: int = 0


@contextmanager
def reading(batch_nbytes: int = 1 << 20) -> Iterator[Read]:
    """Count what is read, with batches of this size."""
    counts = Read()
    read, read_into, before = LocalFiles.read, LocalFiles.read_into, Exchanger.batch_nbytes

    async def counting_read(files: Any, path: str, **options: Any) -> bytes:
        data = await read(files, path, **options)
        counts.metadata += len(data)
        return data

    async def counting(files: Any, path: str, offset: int, buffers: Any, **options: Any) -> None:
        await read_into(files, path, offset, buffers, **options)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if path.endswith("-index") or path == "checkpoint.json":
            counts.metadata += nbytes
        else:
            counts.payload += nbytes

    LocalFiles.read, LocalFiles.read_into = counting_read, counting  # type: ignore[method-assign]
    Exchanger.batch_nbytes = batch_nbytes
    try:
        yield counts
    finally:
        LocalFiles.read, LocalFiles.read_into = read, read_into  # type: ignore[method-assign]
        Exchanger.batch_nbytes = before


def local() -> dict[str, Any]:
    """Leaves that all processes hold, one of each dtype."""
    random = np.random.default_rng(5)
    tree: dict[str, Any] = {
        name: np.frombuffer(random.bytes(2048), np.uint8).view(dtype)
        for name, dtype in DTYPES.items()
        if name != "bool"
    }
    return {**tree, "large": DATA, "flags": np.arange(9) % 2 == 0, "step": 7}


def target(worker: Worker, kind: str) -> dict[str, Any]:
    """What this process wants: all of it, or with the others of its group the rows of one shard."""
    tree = local()
    if kind == "groups":
        half = worker.index % 2
        rows = slice(320 * half, 320 * (half + 1))
        tree["large"] = ShardedArray(DATA.shape, DATA.dtype, [((rows.start, 0), DATA[rows].copy())])
    return tree


def differing(found: Any, wanted: Any) -> list[str]:
    """Paths of leaves that have other values."""
    wrong = []
    for path, value in wanted.items():
        one = found[path]
        if isinstance(value, ShardedArray):
            one, value = one.shards[0][1], value.shards[0][1]
        if not same(one, value):
            wrong.append(path)
    return wrong


def save(worker: Worker, root: str) -> None:
    """Save the local state as step 1."""
    with blocking.Checkpointer(root) as ckpt:
        ckpt.save(1, local(), options=asyncckpt.SaveOptions(chunk_nbytes=128 << 10))


def restore(worker: Worker, root: str, kind: str, broadcast: bool) -> tuple[list[str], Read]:
    """Restore what this process wants in an ordinary loop: wrong leaves, and what was read."""
    like = target(worker, kind)
    with reading() as counts, blocking.Checkpointer(root) as ckpt:
        found = ckpt.restore(1, like=like, options=RestoreOptions(broadcast=broadcast))
    return differing(found, like), counts


async def restore_async(worker: Worker, root: str) -> list[str]:
    """Restore twice on an event loop; wrong leaves."""
    like = target(worker, "all")
    wrong = []
    with reading():
        async with Checkpointer(root) as ckpt:
            for _ in range(2):
                wrong += differing(await ckpt.restore(1, like=like, options=ONCE), like)
    return wrong


def restore_and_fail(worker: Worker, root: str, process: int, how: str) -> None:
    """Restore while one process fails, dies or stops before it reads its fourth piece."""
    read_piece, pieces = Exchanger._read_piece, [0]

    async def failing(exchanger: Any, *args: Any) -> Any:
        pieces[0] += 1
        if pieces[0] == 4 and worker.index == process:
            if how == "fails":
                raise StoreError("this disk has failed")
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        return await read_piece(exchanger, *args)

    Exchanger._read_piece = failing  # type: ignore[method-assign]
    try:
        options = replace(ONCE, silence_s=3.0, arrival_s=20.0)
        with reading(256 << 10):
            blocking.restore(Path(root) / "1", like=local(), options=options)
    finally:
        Exchanger._read_piece = read_piece  # type: ignore[method-assign]
