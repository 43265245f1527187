"""The laws that every store keeps, as tests that run on any store.

Make a subclass in a test module, with pytest and pytest-asyncio installed::

    class TestMyStore(StoreConformance):
        @asynccontextmanager
        async def opened(self, place):
            store = MyStore(place)
            yield store
            await store.close()

`place` is a new directory for each test; opened again with the same `place`, the store must find
what was published there before.
"""

from __future__ import annotations

import asyncio
import mmap
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UsageError,
)
from asyncckpt.ports import RECORD_NAME, Attempt, Bytes, Store

RECORD = RECORD_NAME
PAGE = 4096
KIB = 1024
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 64 * KIB, 256 * KIB + 1, 1024 * KIB - 1)
"""File lengths around the boundaries of pages and of direct writes."""

PIECE_NBYTES = 128 * KIB


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Page-aligned bytes that differ at every place, the same for the same seed."""
    buffer = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]
    buffer[:] = np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, np.uint8)
    return buffer


async def write_file(attempt: Attempt, path: str, data: Bytes) -> None:
    """A data file with this content is sealed, written in pieces from its beginning."""
    file = await attempt.create(path, nbytes=data.size)
    for start in range(0, data.size, PIECE_NBYTES):
        await file.write(start, data[start : start + PIECE_NBYTES])
    await file.seal(data.size)


async def save(store: Store, name: str, save_id: str, seed: int = 0, **options: bool) -> None:
    """A checkpoint with one data file, one small file and a record is published."""
    attempt = await store.begin(name, save_id, **options)
    await write_file(attempt, "default/d/data", pattern(PAGE + 1, seed))
    await attempt.put("default/small", b"small %d" % seed)
    await attempt.publish(b"record %d" % seed)


async def expect(store: Store, name: str, seed: int = 0) -> None:
    """The checkpoint is what `save` has published with this seed."""
    files = store.files(name)
    try:
        assert await files.read(RECORD, max_nbytes=100) == b"record %d" % seed
        assert await files.read("default/small", max_nbytes=100) == b"small %d" % seed
        buffer = np.empty(PAGE + 1, np.uint8)
        await files.read_into("default/d/data", 0, [buffer])
        assert np.array_equal(buffer, pattern(PAGE + 1, seed))
    finally:
        await files.close()


async def expect_nothing(store: Store, name: str) -> None:
    """Nothing of this name is listed or can be read."""
    assert name not in await store.names()
    files = store.files(name)
    try:
        with pytest.raises(CheckpointNotFoundError):
            await files.read(RECORD, max_nbytes=100)
    finally:
        await files.close()


@pytest.mark.asyncio
class StoreConformance:
    """Subclass it, define `opened`, and name the subclass `Test…`."""

    def opened(self, place: Path) -> AbstractAsyncContextManager[Store]:
        """The store at this place; what was published there before is in it."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- visibility

    async def test_an_empty_store_has_no_names(self, tmp_path: Path) -> None:
        """Opening creates nothing that could be taken for a checkpoint."""
        async with self.opened(tmp_path) as store:
            assert await store.names() == []
            assert list(await store.sweep()) == []

    async def test_nothing_is_visible_before_publish(self, tmp_path: Path) -> None:
        """After every step but the last, the name is free."""
        async with self.opened(tmp_path) as store:
            await expect_nothing(store, "1")
            attempt = await store.begin("1", "a")
            await expect_nothing(store, "1")
            await write_file(attempt, "d/data", pattern(PAGE))
            await expect_nothing(store, "1")
            await attempt.put("small", b"x")
            await expect_nothing(store, "1")
            await attempt.publish(b"record")
            assert await store.names() == ["1"]

    async def test_publish_makes_everything_visible(self, tmp_path: Path) -> None:
        """Also to a store that is opened later."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a")
            await save(store, "final", "b", 1)
            await expect(store, "1")
        async with self.opened(tmp_path) as again:
            assert sorted(await again.names()) == ["1", "final"]
            await expect(again, "1")
            await expect(again, "final", 1)
            assert list(await again.sweep()) == []

    async def test_abort_leaves_nothing_after_any_prefix_of_a_save(self, tmp_path: Path) -> None:
        """However far the attempt had come; and the name can be saved afterwards."""
        async with self.opened(tmp_path) as store:
            for steps in range(7):
                attempt = await store.begin("1", f"a{steps}")
                file = None
                if steps > 0:
                    file = await attempt.create("default/d/data", nbytes=PAGE)
                if file and steps > 1:
                    await file.write(0, pattern(PAGE))
                if file and steps > 2:
                    await file.seal(PAGE)
                if steps > 3:
                    await attempt.put("default/small", b"x")
                if steps > 4:
                    await attempt.create("default/d/other", nbytes=PAGE)
                if steps > 5:
                    with pytest.raises(UsageError):
                        await attempt.put("../escape", b"x")
                await attempt.abort()
                await attempt.abort()
                await expect_nothing(store, "1")
                assert list(await store.sweep()) == []
            await save(store, "1", "b")
            await expect(store, "1")

    async def test_sweep_leaves_a_live_attempt_alone(self, tmp_path: Path) -> None:
        """Its files are still there when it publishes."""
        async with self.opened(tmp_path) as store, self.opened(tmp_path) as other:
            attempt = await store.begin("1", "a")
            await write_file(attempt, "default/d/data", pattern(PAGE + 1))
            assert list(await other.sweep()) == []
            await attempt.put("default/small", b"small 0")
            assert list(await store.sweep()) == []
            await attempt.publish(b"record 0")
            await expect(store, "1")

    # ----------------------------------------------------------------------------------- one name

    async def test_of_two_attempts_at_one_name_exactly_one_publishes(self, tmp_path: Path) -> None:
        """The other gets `CheckpointExistsError`, and nothing of the winner is touched."""
        async with self.opened(tmp_path) as store:
            if not store.capabilities.conditional_create:
                return
            seeds = range(4)
            errors: list[CheckpointExistsError] = []

            async def one(seed: int) -> None:
                try:
                    await save(store, "1", f"a{seed}", seed)
                except CheckpointExistsError as error:
                    errors.append(error)

            async with asyncio.TaskGroup() as group:
                for seed in seeds:
                    group.create_task(one(seed))
            assert len(errors) == len(seeds) - 1
            files = store.files("1")
            winner = int((await files.read(RECORD, max_nbytes=100)).split()[1])
            await files.close()
            await expect(store, "1", winner)
            assert list(await store.sweep()) == []

    async def test_a_taken_name_is_kept_as_it_was(self, tmp_path: Path) -> None:
        """A save without `overwrite` fails when it publishes, and leaves nothing."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            with pytest.raises(CheckpointExistsError):
                await save(store, "1", "b", 2)
            await expect(store, "1", 1)
            assert await store.names() == ["1"]
            assert list(await store.sweep()) == []

    async def test_overwrite_replaces(self, tmp_path: Path) -> None:
        """The new content is there, the old is gone, also from a reader that is opened later."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            await save(store, "1", "b", 2, overwrite=True)
            await expect(store, "1", 2)
            await save(store, "2", "c", 3, overwrite=True)  # nothing to replace
            await expect(store, "2", 3)
            assert sorted(await store.names()) == ["1", "2"]
            assert list(await store.sweep()) == []

    async def test_an_aborted_overwrite_keeps_the_old_one(self, tmp_path: Path) -> None:
        """Until `publish`, the old checkpoint is whole."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            attempt = await store.begin("1", "b", overwrite=True)
            await attempt.put("default/small", b"other")
            await expect(store, "1", 1)
            await attempt.abort()
            await expect(store, "1", 1)

    async def test_delete_removes_one_checkpoint(self, tmp_path: Path) -> None:
        """Its name is free again; others stay."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a", 1)
            await save(store, "2", "b", 2)
            await store.delete("1")
            await expect_nothing(store, "1")
            await expect(store, "2", 2)
            with pytest.raises(CheckpointNotFoundError):
                await store.delete("1")
            await save(store, "1", "c", 3)
            await expect(store, "1", 3)
            assert list(await store.sweep()) == []

    async def test_names_that_are_no_single_path_part_are_refused(self, tmp_path: Path) -> None:
        """Before anything is created."""
        async with self.opened(tmp_path) as store:
            for name in ("", ".", "..", "a/b", "/a", "a\0b"):
                with pytest.raises(UsageError):
                    await store.begin(name, "a")
            assert await store.names() == []

    # ------------------------------------------------------------------------------------ writing

    @pytest.mark.parametrize("nbytes", LENGTHS)
    async def test_a_file_of_any_length_comes_back(self, tmp_path: Path, nbytes: int) -> None:
        """Whatever the length, also when it was announced wrongly."""
        data = pattern(nbytes)
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", "a")
            for path, announced in (("exact", nbytes), ("less", 1), ("more", nbytes + 3 * PAGE)):
                file = await attempt.create(path, nbytes=announced)
                for start in range(0, nbytes, PIECE_NBYTES):
                    await file.write(start, data[start : start + PIECE_NBYTES])
                await file.seal(nbytes)
            await attempt.put("small", data.tobytes())
            await attempt.put("view", memoryview(data.tobytes()))
            await attempt.publish(b"record")
            files = store.files("1")
            for path in ("exact", "less", "more", "small", "view"):
                assert await files.read(path, max_nbytes=nbytes) == data.tobytes(), path
            await files.close()

    async def test_parts_are_written_in_any_order_and_at_once(self, tmp_path: Path) -> None:
        """Of any length and alignment, and each part once."""
        async with self.opened(tmp_path) as store:
            if not store.capabilities.positional_writes:
                return
            data = pattern(2 << 20)
            random = np.random.default_rng(0)
            cuts = np.unique(random.integers(1, data.size, 30))
            cuts = np.unique(np.concatenate([[0], cuts, cuts[:10] // PAGE * PAGE, [data.size]]))
            spans = list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))
            random.shuffle(spans)
            attempt = await store.begin("1", "a")
            file = await attempt.create("data", nbytes=data.size)
            async with asyncio.TaskGroup() as group:
                for start, stop in spans:
                    group.create_task(file.write(start, data[start:stop]))
            await file.seal(data.size)
            await attempt.publish(b"record")
            files = store.files("1")
            assert await files.read("data", max_nbytes=data.size) == data.tobytes()
            await files.close()

    async def test_seal_cuts_a_file_to_its_length(self, tmp_path: Path) -> None:
        """Padding behind the end, which keeps writes aligned, does not stay."""
        async with self.opened(tmp_path) as store:
            data = pattern(64 * PAGE)
            attempt = await store.begin("1", "a")
            file = await attempt.create("data", nbytes=63 * PAGE + 5)
            await file.write(0, data)
            await file.seal(63 * PAGE + 5)
            await attempt.publish(b"record")
            files = store.files("1")
            found = await files.read("data", max_nbytes=data.size)
            assert found == data[: 63 * PAGE + 5].tobytes()
            await files.close()

    async def test_a_read_only_buffer_can_be_written(self, tmp_path: Path) -> None:
        """Bytes that came from a codec are immutable."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", "a")
            file = await attempt.create("data", nbytes=PAGE)
            await file.write(0, np.frombuffer(bytes(range(256)) * 16, np.uint8))
            await file.seal(PAGE)
            await attempt.publish(b"record")
            files = store.files("1")
            assert await files.read("data", max_nbytes=PAGE) == bytes(range(256)) * 16
            await files.close()

    async def test_many_small_files_are_put_at_once(self, tmp_path: Path) -> None:
        """In directories that they make together."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", "a")
            async with asyncio.TaskGroup() as group:
                for i in range(20):
                    group.create_task(attempt.put(f"a/b{i % 3}/c/{i}", b"%d" % i))
            await attempt.publish(b"record")
            files = store.files("1")
            for i in range(20):
                assert await files.read(f"a/b{i % 3}/c/{i}", max_nbytes=10) == b"%d" % i
            await files.close()

    async def test_paths_stay_inside_the_checkpoint(self, tmp_path: Path) -> None:
        """And nobody but `publish` writes the record."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", "a")
            for path in ("", "/a", "../a", "a/../b", "a//b", ".", "a/", "a\0", RECORD):
                with pytest.raises(UsageError):
                    await attempt.put(path, b"x")
                with pytest.raises(UsageError):
                    await attempt.create(path, nbytes=1)
            await attempt.abort()

    async def test_a_cancelled_write_does_not_use_its_buffer_any_more(self, tmp_path: Path) -> None:
        """Once it has raised, the buffer can be given to the next user."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", "a")
            nbytes = 1 << 20
            file = await attempt.create("data", nbytes=nbytes)
            buffer, final = pattern(nbytes), pattern(nbytes, 1)
            for turns in range(20):
                buffer[:] = 1
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(file.write(0, buffer))
                    for _ in range(turns % 5):
                        await asyncio.sleep(0)
                    task.cancel()
                buffer[:] = 2
                if not store.capabilities.positional_writes:
                    break
                await file.write(0, final)
                await file.write(0, final)
            if store.capabilities.positional_writes:
                await file.seal(nbytes)
                await attempt.publish(b"record")
                files = store.files("1")
                assert await files.read("data", max_nbytes=nbytes) == final.tobytes()
                await files.close()
            else:
                await attempt.abort()

    async def test_a_cancelled_publish_is_all_or_nothing(self, tmp_path: Path) -> None:
        """It either raises and nothing is visible, or returns and everything is."""
        async with self.opened(tmp_path) as store:
            for turns in range(30):
                name = str(turns)
                attempt = await store.begin(name, f"a{turns}")
                await write_file(attempt, "default/d/data", pattern(PAGE + 1))
                await attempt.put("default/small", b"small 0")
                cancelled = False
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(attempt.publish(b"record 0"))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait((task,))
                    cancelled = task.cancelled()
                if cancelled:
                    await expect_nothing(store, name)
                else:
                    await expect(store, name)
                await attempt.abort()
            assert list(await store.sweep()) == []

    # ------------------------------------------------------------------------------------ reading

    async def test_reading_what_is_not_there_says_so(self, tmp_path: Path) -> None:
        """A missing checkpoint and a missing file, by both kinds of read."""
        async with self.opened(tmp_path) as store:
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

    async def test_a_file_larger_than_allowed_is_not_read(self, tmp_path: Path) -> None:
        """The bound holds exactly."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a")
            files = store.files("1")
            assert len(await files.read("default/d/data", max_nbytes=PAGE + 1)) == PAGE + 1
            with pytest.raises(CorruptCheckpointError):
                await files.read("default/d/data", max_nbytes=PAGE)
            await files.close()

    async def test_reading_past_the_end_is_corruption(self, tmp_path: Path) -> None:
        """Names the file; the last byte can be read, the next cannot."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a")
            files = store.files("1")
            buffer = np.empty(2, np.uint8)
            await files.read_into("default/d/data", PAGE, [buffer[:1]])
            assert buffer[0] == pattern(PAGE + 1)[PAGE]
            for offset in (PAGE, PAGE + 1, 10 * PAGE):
                with pytest.raises(CorruptCheckpointError) as caught:
                    await files.read_into("default/d/data", offset, [buffer])
                assert caught.value.file == "default/d/data"
            await files.close()

    async def test_entries_are_one_level_of_a_directory(self, tmp_path: Path) -> None:
        """Files with sizes and directories, by name; what is not there and too many say so."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a")
            files = store.files("1")
            top = {entry.name: entry for entry in await files.entries(max_entries=100)}
            assert top["default"].is_directory
            assert not top[RECORD].is_directory and top[RECORD].nbytes > 0
            (data,) = await files.entries("default/d", max_entries=1)
            assert data == ("data", PAGE + 1, False)
            assert await files.entries("default/d/data", max_entries=1) == [("", PAGE + 1, False)]
            with pytest.raises(CheckpointNotFoundError):
                await files.entries("none", max_entries=1)
            with pytest.raises(CorruptCheckpointError):
                await files.entries(max_entries=len(top) - 1)
            await files.close()

    async def test_one_run_fills_many_buffers(self, tmp_path: Path) -> None:
        """Of any lengths, in order, from any offset; more of them than one system call takes."""
        async with self.opened(tmp_path) as store:
            data = pattern(1 << 20)
            attempt = await store.begin("1", "a")
            await write_file(attempt, "data", data)
            await attempt.publish(b"record")
            files = store.files("1")
            lengths = np.random.default_rng(1).integers(0, 400, 2500).tolist()
            for offset in (0, 1, PAGE):
                buffers = [np.zeros(length, np.uint8) for length in lengths]
                await files.read_into("data", offset, buffers)
                expected = data[offset : offset + sum(lengths)]
                assert np.array_equal(np.concatenate(buffers), expected)
            await files.read_into("data", data.size, [])
            await files.close()

    async def test_reads_run_at_once(self, tmp_path: Path) -> None:
        """From one and from several files."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", "a")
            for i in range(4):
                await write_file(attempt, f"data{i}", pattern(300 * KIB, i))
            await attempt.publish(b"record")
            files = store.files("1")
            found = [np.zeros(300 * KIB, np.uint8) for _ in range(4)]
            async with asyncio.TaskGroup() as group:
                for i in range(4):
                    for start in range(0, 300 * KIB, 100 * KIB):
                        part = found[i][start : start + 100 * KIB]
                        group.create_task(files.read_into(f"data{i}", start, [part]))
            for i in range(4):
                assert np.array_equal(found[i], pattern(300 * KIB, i))
            await files.close()

    async def test_a_cancelled_read_does_not_use_its_buffer_any_more(self, tmp_path: Path) -> None:
        """Once it has raised, what stands in the buffer stays."""
        async with self.opened(tmp_path) as store:
            data = pattern(4 << 20)
            attempt = await store.begin("1", "a")
            await write_file(attempt, "data", data)
            await attempt.publish(b"record")
            files = store.files("1")
            buffer, other = np.empty_like(data), np.empty_like(data)
            for turns in range(10):
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(files.read_into("data", 0, [buffer]))
                    for _ in range(turns % 5):
                        await asyncio.sleep(0)
                    task.cancel()
                buffer[:] = 7
                await files.read_into("data", 0, [other])
                assert int(buffer.min()) == int(buffer.max()) == 7
            await files.close()
