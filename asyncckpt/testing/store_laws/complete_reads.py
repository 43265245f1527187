"""Laws of reads: complete data, or an error that names what is missing or damaged."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from asyncckpt.flow.shield import together
from asyncckpt.ports import Store
from asyncckpt.testing.checkpoints import (
    KIB,
    PAGE,
    RECORD,
    SAVE_ID,
    cancelled_after,
    data_path,
    data_paths,
    pattern,
    reading,
    record_of,
    save,
    save_file,
    write_file,
)
from asyncckpt.testing.store_laws import StoreLaws


class Reading(StoreLaws):
    """Reads are complete or fail."""

    async def test_reading_what_is_not_there_says_so(self, store: Store) -> None:
        """Both methods raise for a missing checkpoint and for a missing file."""
        await save(store, "1", "a")
        buffer = np.empty(1, np.uint8)
        for name, path in (("2", RECORD), ("1", "none"), ("1", "none/none")):
            files = store.files(name)
            with pytest.raises(CheckpointNotFoundError):
                await files.read(path, max_nbytes=10)
            with pytest.raises(CheckpointNotFoundError):
                await files.read_into(path, 0, [buffer])
            await files.close()
            await files.close()

    async def test_a_file_larger_than_allowed_is_not_read(self, store: Store) -> None:
        """The bound holds exactly."""
        await save(store, "1", "a")
        async with reading(store, "1") as files:
            (path,) = await data_paths(files)
            assert len(await files.read(path, max_nbytes=PAGE + 1)) == PAGE + 1
            with pytest.raises(CorruptCheckpointError):
                await files.read(path, max_nbytes=PAGE)

    async def test_reading_past_the_end_is_corruption(self, store: Store) -> None:
        """The error names the file; the last byte can be read, the next cannot."""
        await save(store, "1", "a")
        async with reading(store, "1") as files:
            (path,) = await data_paths(files)
            buffer = np.empty(2, np.uint8)
            await files.read_into(path, PAGE, [buffer[:1]])
            assert buffer[0] == pattern(PAGE + 1)[PAGE]
            for offset in (PAGE, PAGE + 1, 10 * PAGE):
                with pytest.raises(CorruptCheckpointError) as caught:
                    await files.read_into(path, offset, [buffer])
                assert caught.value.file == path

    async def test_entries_are_one_level_of_a_directory(self, store: Store) -> None:
        """Files have sizes; a missing directory and too many entries raise."""
        await save(store, "1", "a")
        async with reading(store, "1") as files:
            top = {entry.name: entry for entry in await files.entries(max_entries=100)}
            assert top["default"].is_directory
            assert not top[RECORD].is_directory and top[RECORD].nbytes > 0
            (data,) = await files.entries("default/d", max_entries=1)
            (path,) = await data_paths(files)
            assert data == (path.rpartition("/")[2], PAGE + 1, False)
            assert await files.entries(path, max_entries=1) == [("", PAGE + 1, False)]
            with pytest.raises(CheckpointNotFoundError):
                await files.entries("none", max_entries=1)
            with pytest.raises(CorruptCheckpointError):
                await files.entries(max_entries=len(top) - 1)

    async def test_one_run_fills_many_buffers(self, store: Store) -> None:
        """The buffers have any length and offset, and are too many for one system call."""
        data = pattern(1 << 20)
        path = await save_file(store, data)
        async with reading(store, "1") as files:
            lengths = np.random.default_rng(1).integers(0, 400, 2500).tolist()
            for offset in (0, 1, PAGE):
                buffers = [np.zeros(length, np.uint8) for length in lengths]
                await files.read_into(path, offset, buffers)
                expected = data[offset : offset + sum(lengths)]
                assert np.array_equal(np.concatenate(buffers), expected)
            await files.read_into(path, data.size, [])

    async def test_reads_run_at_once(self, store: Store) -> None:
        """Reads of one file and of several files run concurrently."""
        attempt = await store.begin("1", SAVE_ID)
        paths = [
            await write_file(attempt, data_path(SAVE_ID, f"data{i}"), pattern(300 * KIB, i))
            for i in range(4)
        ]
        await attempt.publish(record_of(SAVE_ID))
        async with reading(store, "1") as files:
            found = [np.zeros(300 * KIB, np.uint8) for _ in range(4)]
            await together(
                files.read_into(paths[i], start, [found[i][start : start + 100 * KIB]])
                for i in range(4)
                for start in range(0, 300 * KIB, 100 * KIB)
            )
            for i in range(4):
                assert np.array_equal(found[i], pattern(300 * KIB, i))

    async def test_a_cancelled_read_does_not_use_its_buffer_any_more(self, store: Store) -> None:
        """Once the call has raised, the buffer does not change."""
        data = pattern(4 << 20)
        path = await save_file(store, data)
        buffer, other = np.empty_like(data), np.empty_like(data)
        async with reading(store, "1") as files:
            for turns in range(10):
                await cancelled_after(turns % 5, files.read_into(path, 0, [buffer]))
                buffer[:] = 7
                await files.read_into(path, 0, [other])
                assert int(buffer.min()) == int(buffer.max()) == 7
