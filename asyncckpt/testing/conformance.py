"""The laws that every store keeps, as tests that run on any store.

Make a subclass in a test module, with pytest and pytest-asyncio installed::

    class TestMyStore(StoreConformance):
        @asynccontextmanager
        async def opened(self, place):
            store = MyStore(place)
            yield store
            await store.close()

`place` is a new directory for each test; opened again with the same `place`, the store must find
what was published there before. A store that has to know which save a commit record belongs to is
told by `save_id_of`. Where a name is listed as soon as an attempt has written something, set
`lists_attempts`; a name counts as a checkpoint only once its record can be read.
"""

from __future__ import annotations

import asyncio
import mmap
import uuid
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
from asyncckpt.ports import RECORD_NAME, Attempt, Bytes, CheckpointFiles, Store

RECORD = RECORD_NAME
PAGE = 4096
KIB = 1024
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 64 * KIB, 256 * KIB + 1, 1024 * KIB - 1)
"""File lengths around the boundaries of pages and of direct writes."""

PIECE_NBYTES = 128 * KIB

YEAR_S = 366 * 86400.0


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


@pytest.mark.asyncio
class StoreConformance:
    """Subclass it, define `opened`, and name the subclass `Test…`.

    Attributes:
        lists_attempts: `names` may list a name under which an attempt has written something.
        window_nbytes: a window that the store takes as part of a data file.
    """

    lists_attempts = False
    window_nbytes = 5 << 20

    def opened(self, place: Path) -> AbstractAsyncContextManager[Store]:
        """The store at this place; what was published there before is in it."""
        raise NotImplementedError

    async def expect_nothing(self, store: Store, name: str) -> None:
        """Nothing of this name is listed or can be read."""
        if not self.lists_attempts:
            assert name not in await store.names()
        await expect_no_record(store, name)

    # -------------------------------------------------------------------------------- visibility

    async def test_an_empty_store_has_no_names(self, tmp_path: Path) -> None:
        """Opening creates nothing that could be taken for a checkpoint."""
        async with self.opened(tmp_path) as store:
            assert await store.names() == []
            assert list(await store.sweep()) == []

    async def test_nothing_is_visible_before_publish(self, tmp_path: Path) -> None:
        """After every step but the last, the name is free."""
        async with self.opened(tmp_path) as store:
            await self.expect_nothing(store, "1")
            attempt = await store.begin("1", identity("a"))
            await self.expect_nothing(store, "1")
            await write_file(attempt, data_path(identity("a")), pattern(PAGE))
            await self.expect_nothing(store, "1")
            await attempt.put("small", b"x")
            await self.expect_nothing(store, "1")
            await attempt.publish(record_of(identity("a")))
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
                save_id = identity(f"a{steps}")
                attempt = await store.begin("1", save_id)
                file = None
                if steps > 0:
                    file = await attempt.create(data_path(save_id), nbytes=PAGE)
                if file and steps > 1:
                    await file.write(0, pattern(PAGE))
                if file and steps > 2:
                    await file.seal(PAGE)
                if steps > 3:
                    await attempt.put("default/small", b"x")
                if steps > 4:
                    await attempt.create(data_path(save_id, "other"), nbytes=PAGE)
                if steps > 5:
                    with pytest.raises(UsageError):
                        await attempt.put("../escape", b"x")
                await attempt.abort()
                await attempt.abort()
                await self.expect_nothing(store, "1")
                assert list(await store.sweep()) == []
            await save(store, "1", "b")
            await expect(store, "1")

    async def test_sweep_leaves_a_live_attempt_alone(self, tmp_path: Path) -> None:
        """Its files are still there when it publishes."""
        async with self.opened(tmp_path) as store, self.opened(tmp_path) as other:
            attempt = await store.begin("1", identity("a"))
            path = await write_file(attempt, data_path(identity("a")), pattern(PAGE + 1))
            assert list(await other.sweep()) == []
            await attempt.put("default/small", b"small 0")
            assert list(await store.sweep()) == []
            assert list(await other.collect(YEAR_S)) == []
            await attempt.publish(record_of(identity("a"), 0, path))
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
            winner = int((await files.read(RECORD, max_nbytes=200)).split()[1])
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
            attempt = await store.begin("1", identity("b"), overwrite=True)
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
            await self.expect_nothing(store, "1")
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
                    await store.begin(name, identity("a"))
            assert await store.names() == []

    # ------------------------------------------------------------------------------------ writing

    @pytest.mark.parametrize("nbytes", LENGTHS)
    async def test_a_file_of_any_length_comes_back(self, tmp_path: Path, nbytes: int) -> None:
        """Whatever the length, also when it was announced wrongly."""
        data = pattern(nbytes)
        async with self.opened(tmp_path) as store:
            save_id = identity("a")
            attempt = await store.begin("1", save_id)
            paths = ["small", "view"]
            for path, announced in (("exact", nbytes), ("less", 1), ("more", nbytes + 3 * PAGE)):
                file = await attempt.create(data_path(save_id, path), nbytes=announced)
                for start in range(0, nbytes, PIECE_NBYTES):
                    await file.write(start, data[start : start + PIECE_NBYTES])
                await file.seal(nbytes)
                paths.append(file.path)
            await attempt.put("small", data.tobytes())
            await attempt.put("view", memoryview(data.tobytes()))
            await attempt.publish(record_of(save_id))
            files = store.files("1")
            for path in paths:
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
            attempt = await store.begin("1", identity("a"))
            file = await attempt.create(data_path(identity("a")), nbytes=data.size)
            async with asyncio.TaskGroup() as group:
                for start, stop in spans:
                    group.create_task(file.write(start, data[start:stop]))
            await file.seal(data.size)
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            assert await files.read(file.path, max_nbytes=data.size) == data.tobytes()
            await files.close()

    async def test_windows_are_written_in_any_order_and_at_once(self, tmp_path: Path) -> None:
        """Each once; of files that are shorter and longer than one, and exactly as long."""
        async with self.opened(tmp_path) as store:
            save_id, window = identity("a"), self.window_nbytes
            attempt = await store.begin("1", save_id)
            contents: dict[str, Bytes] = {}
            for nbytes in (0, PAGE + 1, window, 2 * window + 5):
                data = pattern(nbytes)
                file = await attempt.create(
                    data_path(save_id, str(nbytes)), nbytes=nbytes, window_nbytes=window
                )
                starts = list(range(0, nbytes, window))[::-1]
                async with asyncio.TaskGroup() as group:
                    written = [
                        group.create_task(file.write(start, data[start : start + window]))
                        for start in starts
                    ]
                assert all(type(task.result()) is bool for task in written)
                await file.seal(nbytes)
                contents[file.path] = data
            await attempt.publish(record_of(save_id))
            files = store.files("1")
            for path, data in contents.items():
                assert await files.read(path, max_nbytes=data.size) == data.tobytes(), path
            await files.close()

    async def test_bytearrays_are_written_as_they_are(self, tmp_path: Path) -> None:
        """Clients that take no other buffer get the memory that was staged into."""
        async with self.opened(tmp_path) as store:
            save_id, data = identity("a"), bytearray(pattern(64 * KIB).tobytes())
            attempt = await store.begin("1", save_id)
            file = await attempt.create(
                data_path(save_id), nbytes=len(data), window_nbytes=self.window_nbytes
            )
            await file.write(0, data)
            await file.seal(len(data))
            await attempt.publish(record_of(save_id))
            files = store.files("1")
            assert await files.read(file.path, max_nbytes=len(data)) == data
            await files.close()

    async def test_seal_cuts_a_file_to_its_length(self, tmp_path: Path) -> None:
        """Padding behind the end, which keeps writes aligned, does not stay."""
        async with self.opened(tmp_path) as store:
            data = pattern(64 * PAGE)
            attempt = await store.begin("1", identity("a"))
            file = await attempt.create(data_path(identity("a")), nbytes=63 * PAGE + 5)
            await file.write(0, data)
            await file.seal(63 * PAGE + 5)
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            found = await files.read(file.path, max_nbytes=data.size)
            assert found == data[: 63 * PAGE + 5].tobytes()
            await files.close()

    async def test_a_read_only_buffer_can_be_written(self, tmp_path: Path) -> None:
        """Bytes that came from a codec are immutable."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", identity("a"))
            file = await attempt.create(data_path(identity("a")), nbytes=PAGE)
            await file.write(0, np.frombuffer(bytes(range(256)) * 16, np.uint8))
            await file.seal(PAGE)
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            assert await files.read(file.path, max_nbytes=PAGE) == bytes(range(256)) * 16
            await files.close()

    async def test_many_small_files_are_put_at_once(self, tmp_path: Path) -> None:
        """In directories that they make together."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", identity("a"))
            async with asyncio.TaskGroup() as group:
                for i in range(20):
                    group.create_task(attempt.put(f"a/b{i % 3}/c/{i}", b"%d" % i))
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            for i in range(20):
                assert await files.read(f"a/b{i % 3}/c/{i}", max_nbytes=10) == b"%d" % i
            await files.close()

    async def test_paths_stay_inside_the_checkpoint(self, tmp_path: Path) -> None:
        """And nobody but `publish` writes the record."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", identity("a"))
            for path in ("", "/a", "../a", "a/../b", "a//b", ".", "a/", "a\0", RECORD):
                with pytest.raises(UsageError):
                    await attempt.put(path, b"x")
                with pytest.raises(UsageError):
                    await attempt.create(path, nbytes=1)
            await attempt.abort()

    async def test_a_cancelled_write_does_not_use_its_buffer_any_more(self, tmp_path: Path) -> None:
        """Once it has raised, the buffer can be given to the next user."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", identity("a"))
            nbytes = 1 << 20
            file = await attempt.create(data_path(identity("a")), nbytes=nbytes)
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
                await attempt.publish(record_of(identity("a")))
                files = store.files("1")
                assert await files.read(file.path, max_nbytes=nbytes) == final.tobytes()
                await files.close()
            else:
                await attempt.abort()

    async def test_a_cancelled_publish_is_all_or_nothing(self, tmp_path: Path) -> None:
        """It either raises and nothing is visible, or returns and everything is."""
        async with self.opened(tmp_path) as store:
            for turns in range(30):
                name = str(turns)
                attempt = await store.begin(name, identity(f"a{turns}"))
                record = await fill(attempt, identity(f"a{turns}"))
                cancelled = False
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(attempt.publish(record))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait((task,))
                    cancelled = task.cancelled()
                if cancelled:
                    await self.expect_nothing(store, name)
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
            (path,) = await data_paths(files)
            assert len(await files.read(path, max_nbytes=PAGE + 1)) == PAGE + 1
            with pytest.raises(CorruptCheckpointError):
                await files.read(path, max_nbytes=PAGE)
            await files.close()

    async def test_reading_past_the_end_is_corruption(self, tmp_path: Path) -> None:
        """Names the file; the last byte can be read, the next cannot."""
        async with self.opened(tmp_path) as store:
            await save(store, "1", "a")
            files = store.files("1")
            (path,) = await data_paths(files)
            buffer = np.empty(2, np.uint8)
            await files.read_into(path, PAGE, [buffer[:1]])
            assert buffer[0] == pattern(PAGE + 1)[PAGE]
            for offset in (PAGE, PAGE + 1, 10 * PAGE):
                with pytest.raises(CorruptCheckpointError) as caught:
                    await files.read_into(path, offset, [buffer])
                assert caught.value.file == path
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
            (path,) = await data_paths(files)
            assert data == (path.rpartition("/")[2], PAGE + 1, False)
            assert await files.entries(path, max_entries=1) == [("", PAGE + 1, False)]
            with pytest.raises(CheckpointNotFoundError):
                await files.entries("none", max_entries=1)
            with pytest.raises(CorruptCheckpointError):
                await files.entries(max_entries=len(top) - 1)
            await files.close()

    async def test_one_run_fills_many_buffers(self, tmp_path: Path) -> None:
        """Of any lengths, in order, from any offset; more of them than one system call takes."""
        async with self.opened(tmp_path) as store:
            data = pattern(1 << 20)
            attempt = await store.begin("1", identity("a"))
            path = await write_file(attempt, data_path(identity("a")), data)
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            lengths = np.random.default_rng(1).integers(0, 400, 2500).tolist()
            for offset in (0, 1, PAGE):
                buffers = [np.zeros(length, np.uint8) for length in lengths]
                await files.read_into(path, offset, buffers)
                expected = data[offset : offset + sum(lengths)]
                assert np.array_equal(np.concatenate(buffers), expected)
            await files.read_into(path, data.size, [])
            await files.close()

    async def test_reads_run_at_once(self, tmp_path: Path) -> None:
        """From one and from several files."""
        async with self.opened(tmp_path) as store:
            attempt = await store.begin("1", identity("a"))
            paths = [
                await write_file(
                    attempt, data_path(identity("a"), f"data{i}"), pattern(300 * KIB, i)
                )
                for i in range(4)
            ]
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            found = [np.zeros(300 * KIB, np.uint8) for _ in range(4)]
            async with asyncio.TaskGroup() as group:
                for i in range(4):
                    for start in range(0, 300 * KIB, 100 * KIB):
                        part = found[i][start : start + 100 * KIB]
                        group.create_task(files.read_into(paths[i], start, [part]))
            for i in range(4):
                assert np.array_equal(found[i], pattern(300 * KIB, i))
            await files.close()

    async def test_a_cancelled_read_does_not_use_its_buffer_any_more(self, tmp_path: Path) -> None:
        """Once it has raised, what stands in the buffer stays."""
        async with self.opened(tmp_path) as store:
            data = pattern(4 << 20)
            attempt = await store.begin("1", identity("a"))
            path = await write_file(attempt, data_path(identity("a")), data)
            await attempt.publish(record_of(identity("a")))
            files = store.files("1")
            buffer, other = np.empty_like(data), np.empty_like(data)
            for turns in range(10):
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(files.read_into(path, 0, [buffer]))
                    for _ in range(turns % 5):
                        await asyncio.sleep(0)
                    task.cancel()
                buffer[:] = 7
                await files.read_into(path, 0, [other])
                assert int(buffer.min()) == int(buffer.max()) == 7
            await files.close()
