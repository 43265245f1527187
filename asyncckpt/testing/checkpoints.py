"""Small checkpoints of opaque bytes for tests of stores."""

from __future__ import annotations

import asyncio
import json
import mmap
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.flow.shield import together
from asyncckpt.format.record_values import FixedName, Outline
from asyncckpt.ports import RECORD_NAME, Attempt, AttemptFiles, Bytes, CheckpointFiles, Store

RECORD = RECORD_NAME
PAGE = 4096
KIB = 1024
YEAR_S = 366 * 86400.0

PIECE_NBYTES = 128 * KIB


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Return page-aligned pseudo-random bytes, the same for the same seed."""
    buffer = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
    buffer[:] = np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, np.uint8)
    return buffer


def identity(text: str) -> str:
    """Return a save id, the same for the same text."""
    return uuid.uuid5(uuid.NAMESPACE_OID, text).hex


SAVE_ID = identity("a")
"""Save ID of a test's first attempt."""


def record_of(
    save_id: str, seed: int = 0, data: str = "", fixed: Sequence[FixedName] = (), epoch: int = 0
) -> bytes:
    """Return the bytes that tests publish as a commit record.

    Args:
        save_id: save id of the attempt.
        seed: seed of the contents.
        data: path of the data file, if any.
        fixed: files that the store names after the record; see `named`.
        epoch: claim under which it is written.
    """
    rows = [[name.path, name.nbytes, name.crc32c, name.md5, name.object] for name in fixed]
    table = json.dumps(rows, separators=(",", ":"))
    kind = f"record@{epoch}" if epoch else "record"
    return f"{kind} {seed} {save_id} {data} {table}".encode()


def named(attempt: Attempt, files: Mapping[str, bytes]) -> list[FixedName]:
    """Return the files that get their names after the record."""
    return [
        FixedName.of(path, data, source)
        for path, data in files.items()
        if (source := attempt.source(path)) is not None
    ]


def save_id_of(record: bytes) -> str | None:
    """Return the save id in a record of `record_of`; None for other bytes."""
    outline = outline_of(record)
    return None if outline is None else outline.save_id


def outline_of(record: bytes, *, head: bool = False) -> Outline | None:
    """Return the outline of a record of `record_of`; None for other bytes."""
    words = record.split(b" ", 4)
    if len(words) != 5 or words[0].partition(b"@")[0] != b"record" or len(words[2]) != 32:
        return None
    try:
        fixed = tuple(FixedName(*row) for row in json.loads(words[4]))
    except ValueError:  # cut off
        return None
    paths = {name.path for name in fixed} | {words[3].decode()} - {""}
    return Outline(words[2].decode(), frozenset(paths), fixed)


def epoch_of(record: bytes) -> int | None:
    """Return the epoch of a record of `record_of`; None for other bytes."""
    kind, _, epoch = record.split(b" ", 1)[0].partition(b"@")
    return int(epoch or 0) if kind == b"record" else None


def data_path(save_id: str, name: str = "data") -> str:
    """Return a path that only the attempt with this save id writes."""
    return f"default/d/{save_id}-{name}"


async def write_file(attempt: AttemptFiles, path: str, data: Bytes | bytearray) -> str:
    """Write and seal a data file of one window, and return its final path."""
    file = await attempt.create(path, nbytes=len(data), window_nbytes=len(data))
    if len(data):
        await file.write(0, data)
    await file.seal(len(data))
    return file.path


async def fill(attempt: Attempt, save_id: str, seed: int = 0, epoch: int = 0) -> bytes:
    """Write one data file and one small file; return the record to publish."""
    path = await write_file(attempt, data_path(save_id), pattern(PAGE + 1, seed))
    return await put(attempt, save_id, {"default/small": b"small %d" % seed}, seed, path, epoch)


async def put(
    attempt: Attempt,
    save_id: str,
    files: Mapping[str, bytes],
    seed: int = 0,
    data: str = "",
    epoch: int = 0,
) -> bytes:
    """Write small files concurrently; return the record to publish."""
    await together(attempt.put(path, content) for path, content in files.items())
    return record_of(save_id, seed, data, named(attempt, files), epoch)


async def save(
    store: Store, name: str, text: str, seed: int = 0, *, epoch: int = 0, **options: bool
) -> None:
    """Publish a checkpoint of one data file and one small file, and wait until it is complete."""
    save_id = identity(text)
    attempt = await store.begin(name, save_id, epoch=epoch, **options)
    await attempt.publish(await fill(attempt, save_id, seed, epoch))
    await store.settled()


async def delete(store: Store, name: str, *, epoch: int = 0) -> None:
    """Unlist a checkpoint and remove its bytes."""
    await (await store.unlist(name, epoch=epoch))()


@asynccontextmanager
async def reading(store: Store, name: str) -> AsyncIterator[CheckpointFiles]:
    """Open a checkpoint for reading during the block."""
    files = store.files(name)
    try:
        yield files
    finally:
        await files.close()


async def expect(store: Store, name: str, seed: int = 0) -> None:
    """Check that the checkpoint is the one that `save` published with this seed."""
    async with reading(store, name) as files:
        record = await files.read(RECORD, max_nbytes=1000)
        assert save_id_of(record) is not None and record.split()[1] == b"%d" % seed
        assert await files.read("default/small", max_nbytes=100) == b"small %d" % seed
        buffer = np.empty(PAGE + 1, np.uint8)
        await files.read_into(record.split()[3].decode(), 0, [buffer])
        assert np.array_equal(buffer, pattern(PAGE + 1, seed))


async def content(store: Store, name: str, path: str, nbytes: int) -> bytes:
    """Return the content of a file of at most `nbytes`."""
    async with reading(store, name) as files:
        return await files.read(path, max_nbytes=nbytes)


async def save_file(store: Store, data: Bytes | bytearray) -> str:
    """Publish step 1 with only this data file; return the file's path."""
    attempt = await store.begin("1", SAVE_ID)
    path = await write_file(attempt, data_path(SAVE_ID), data)
    await attempt.publish(record_of(SAVE_ID))
    await store.settled()
    return path


async def data_paths(files: CheckpointFiles) -> list[str]:
    """Return the paths of the data files of a checkpoint."""
    return [f"default/d/{entry.name}" for entry in await files.entries("default/d", max_entries=9)]


async def expect_no_record(store: Store, name: str) -> None:
    """Check that there is no checkpoint of this name."""
    async with reading(store, name) as files:
        with pytest.raises(CheckpointNotFoundError):
            await files.read(RECORD, max_nbytes=1000)


async def cancelled_after(turns: int, call: Coroutine[Any, Any, object]) -> bool:
    """Cancel a call after some turns of the loop; return whether it ended cancelled."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(call)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    return task.cancelled()
