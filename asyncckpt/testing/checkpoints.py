"""Small checkpoints of opaque bytes, for the tests of stores."""

from __future__ import annotations

import mmap
import uuid

import numpy as np
import pytest

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.ports import RECORD_NAME, Attempt, Bytes, CheckpointFiles, Store

RECORD = RECORD_NAME
PAGE = 4096
KIB = 1024

PIECE_NBYTES = 128 * KIB


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Page-aligned bytes that differ at every place, the same for the same seed."""
    buffer = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
    buffer[:] = np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, np.uint8)
    return buffer


def identity(text: str) -> str:
    """A save id, the same for the same text."""
    return uuid.uuid5(uuid.NAMESPACE_OID, text).hex


def record_of(save_id: str, seed: int = 0, data: str = "") -> bytes:
    """What the tests publish as a commit record; `data` is the path of the data file."""
    return b"record %d %s %s" % (seed, save_id.encode(), data.encode())


def save_id_of(record: bytes) -> str | None:
    """The save id in a record of `record_of`; None for anything else."""
    words = record.split(b" ")
    if len(words) != 4 or words[0] != b"record" or len(words[2]) != 32:
        return None
    return words[2].decode()


def data_path(save_id: str, name: str = "data") -> str:
    """A path that only the attempt with this save id writes."""
    return f"default/d/{save_id}-{name}"


async def write_file(attempt: Attempt, path: str, data: Bytes) -> str:
    """A data file with this content is sealed, written in pieces from its beginning.

    Returns its final path.
    """
    file = await attempt.create(path, nbytes=data.size)
    for start in range(0, data.size, PIECE_NBYTES):
        await file.write(start, data[start : start + PIECE_NBYTES])
    await file.seal(data.size)
    return file.path


async def fill(attempt: Attempt, save_id: str, seed: int = 0) -> bytes:
    """One data file and one small file are written; returns the record to publish."""
    path = await write_file(attempt, data_path(save_id), pattern(PAGE + 1, seed))
    await attempt.put("default/small", b"small %d" % seed)
    return record_of(save_id, seed, path)


async def save(store: Store, name: str, text: str, seed: int = 0, **options: bool) -> None:
    """A checkpoint with one data file, one small file and a record is published."""
    save_id = identity(text)
    attempt = await store.begin(name, save_id, **options)
    await attempt.publish(await fill(attempt, save_id, seed))


async def expect(store: Store, name: str, seed: int = 0) -> None:
    """The checkpoint is what `save` has published with this seed."""
    files = store.files(name)
    try:
        record = await files.read(RECORD, max_nbytes=200)
        assert record.startswith(b"record %d " % seed)
        assert await files.read("default/small", max_nbytes=100) == b"small %d" % seed
        buffer = np.empty(PAGE + 1, np.uint8)
        await files.read_into(record.split()[3].decode(), 0, [buffer])
        assert np.array_equal(buffer, pattern(PAGE + 1, seed))
    finally:
        await files.close()


async def data_paths(files: CheckpointFiles) -> list[str]:
    """Paths of the data files of a checkpoint."""
    return [f"default/d/{entry.name}" for entry in await files.entries("default/d", max_entries=9)]


async def expect_no_record(store: Store, name: str) -> None:
    """There is no checkpoint of this name."""
    files = store.files(name)
    try:
        with pytest.raises(CheckpointNotFoundError):
            await files.read(RECORD, max_nbytes=100)
    finally:
        await files.close()
