"""Small checkpoints of opaque bytes in a local directory, always at the same paths."""

from __future__ import annotations

import numpy as np

from asyncckpt.ports import RECORD_NAME, AttemptFiles, Bytes, Store
from asyncckpt.testing.checkpoints import PAGE, PIECE_NBYTES, pattern

DATA = "default/d/data"


async def write_file(attempt: AttemptFiles, path: str, data: Bytes) -> None:
    """A data file with this content is sealed, after it was written piece by piece."""
    file = await attempt.create(path, nbytes=data.size, window_nbytes=PIECE_NBYTES)
    for start in range(0, data.size, PIECE_NBYTES):
        await file.write(start, data[start : start + PIECE_NBYTES])
    await file.seal(data.size)


async def save(store: Store, name: str, save_id: str, seed: int = 0, **options: bool) -> None:
    """A checkpoint with one data file, one small file and a record is published."""
    attempt = await store.begin(name, save_id, **options)
    await write_file(attempt, DATA, pattern(PAGE + 1, seed))
    await attempt.put("default/small", b"small %d" % seed)
    await attempt.publish(b"record %d" % seed)


async def expect(store: Store, name: str, seed: int = 0) -> None:
    """The checkpoint is what `save` has published with this seed."""
    files = store.files(name)
    try:
        assert await files.read(RECORD_NAME, max_nbytes=100) == b"record %d" % seed
        assert await files.read("default/small", max_nbytes=100) == b"small %d" % seed
        buffer = np.empty(PAGE + 1, np.uint8)
        await files.read_into(DATA, 0, [buffer])
        assert np.array_equal(buffer, pattern(PAGE + 1, seed))
    finally:
        await files.close()
