"""Reads of a checkpoint: nothing outside it, from one checkpoint only, and past the cache."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncckpt.errors import (
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    ResourceError,
    StoreError,
)
from asyncckpt.flow.buffers import map_pages
from asyncckpt.flow.threads import ThreadAbandonedError, Workers
from asyncckpt.ports import FRESH, Reading
from asyncckpt.stores.local import files as module
from asyncckpt.stores.local import posix
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.checkpoints import PAGE, delete, pattern
from tests.stores.checkpoints import save, write_file
from tests.watch import open_files

BIG = 4 << 20


@pytest.fixture
def workers() -> Iterator[Workers]:
    threads = Workers(4, "test-io")
    yield threads
    threads.shutdown()


@pytest.fixture
async def store(tmp_path: Path, workers: Workers) -> AsyncIterator[LocalStore]:
    opened = LocalStore(tmp_path, workers)
    yield opened
    await opened.close()


async def test_links_are_not_followed(store: LocalStore, tmp_path: Path) -> None:
    await save(store, "1", "a")
    (tmp_path / "secret").write_text("secret")
    directory = tmp_path / "1"
    (directory / "link").symlink_to(tmp_path / "secret")
    (directory / "inside").symlink_to("checkpoint.json")
    (directory / "up").symlink_to(tmp_path)
    (directory / "loop").symlink_to("loop")
    files = store.files("1")
    for path in ("link", "inside", "up/secret", "loop", "loop/x"):
        with pytest.raises(CorruptCheckpointError, match="links in a checkpoint are not"):
            await files.read(path, max_nbytes=100)
        with pytest.raises(CorruptCheckpointError) as caught:
            await files.read_into(path, 0, [np.empty(1, np.uint8)])
        assert caught.value.file == path


async def test_paths_out_of_the_checkpoint_are_refused(store: LocalStore) -> None:
    await save(store, "1", "a")
    files = store.files("1")
    for path in ("../1/checkpoint.json", "/etc/passwd", "default/../../x", ".", "a\0"):
        with pytest.raises(CorruptCheckpointError, match="leads out of the checkpoint"):
            await files.read(path, max_nbytes=100)


async def test_only_regular_files_are_read(store: LocalStore, tmp_path: Path) -> None:
    await save(store, "1", "a")
    os.mkfifo(tmp_path / "1" / "fifo")  # opening it would wait for a writer
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(tmp_path / "1", os.O_RDONLY)
        server.bind(f"/proc/self/fd/{directory}/socket")
        os.close(directory)
    files = store.files("1")
    for path in ("fifo", "socket", "default", "checkpoint.json/x"):
        with pytest.raises(CorruptCheckpointError, match="expected a regular file"):
            await files.read(path, max_nbytes=100)
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointNotFoundError, match="expected a checkpoint directory, found a file"
    ):
        await store.files("file").read("checkpoint.json", max_nbytes=100)


async def test_the_text_says_where_a_file_ends(store: LocalStore, tmp_path: Path) -> None:
    await save(store, "1", "a")
    files = store.files("1")
    with pytest.raises(CorruptCheckpointError) as caught:
        await files.read_into("default/d/data", 4000, [np.empty(200, np.uint8)])
    assert str(caught.value) == (
        f"{tmp_path}/1/default/d/data: the file ends at byte 4097, expected bytes 4000 to 4200; "
        "it is truncated: use another checkpoint"
    )
    assert (caught.value.offset, caught.value.expected, caught.value.found) == (4097, 4200, 4097)


async def test_everything_comes_from_the_checkpoint_that_was_opened(store: LocalStore) -> None:
    attempt = await store.begin("1", "a")
    await attempt.put("data", b"old")
    await attempt.publish(b"old record")
    files = store.files("1")
    assert await files.read("checkpoint.json", max_nbytes=100) == b"old record"
    buffer = np.empty(3, np.uint8)
    await files.read_into("data", 0, [buffer])
    attempt = await store.begin("1", "b", overwrite=True)
    await attempt.put("data", b"new")
    await attempt.publish(b"new record")
    for read in (
        files.read_into("data", 0, [buffer]),
        files.read("checkpoint.json", max_nbytes=100),
    ):
        with pytest.raises(CheckpointNotFoundError, match="deleted while it was being read"):
            await read
    assert buffer.tobytes() == b"old"
    assert await files.changed() == "replaced"
    files = store.files("1")
    assert await files.read("data", max_nbytes=3) == b"new"


async def test_a_checkpoint_of_one_file_that_was_replaced_is_not_read_on(
    store: LocalStore, tmp_path: Path
) -> None:
    place, other = tmp_path / "one", tmp_path / "other"
    place.write_bytes(b"a" * 9)
    other.write_bytes(b"b" * 9)
    files, buffer = store.files("one"), np.empty(9, np.uint8)
    await files.read_into("", 0, [buffer])
    assert await files.changed() is None
    other.rename(place)
    for read in (
        files.read_into("", 0, [buffer]),
        files.read("", max_nbytes=9),
        files.entries(max_entries=1),
    ):
        with pytest.raises(CheckpointNotFoundError, match="replaced while being read") as caught:
            await read
        assert caught.value.found == "replaced"
    assert buffer.tobytes() == b"a" * 9
    assert await files.changed() == "replaced"
    with pytest.raises(CheckpointNotFoundError, match="expected a checkpoint directory"):
        await files.read("checkpoint.json", max_nbytes=9)
    await files.close()
    with pytest.raises(ClosedError, match="these files were closed"):
        await files.read_into("", 0, [buffer])
    assert await store.files("one").read("", max_nbytes=9) == b"b" * 9


async def test_descriptors_are_bounded_and_closed(store: LocalStore) -> None:
    attempt = await store.begin("1", "a")
    count = 20
    for i in range(count):
        await attempt.put(f"f{i}", b"%3d" % i)
    await attempt.publish(b"record")
    before = sorted(os.listdir("/proc/self/fd"))
    files = store.files("1")
    buffer = np.empty(3, np.uint8)
    for i in range(count):
        await files.read_into(f"f{i}", 0, [buffer])
        assert buffer.tobytes() == b"%3d" % i
    open_now = len(os.listdir("/proc/self/fd")) - len(before)
    assert open_now == 1, "the checkpoint's directory, and no file of it"
    await store.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ClosedError, match="these files were closed"):
        await files.read("f0", max_nbytes=3)


async def test_many_small_files_are_read_by_four_threads_at_once(store: LocalStore) -> None:
    """No reader may lose its descriptor to another: 2,000 files, each read twice."""
    (path := Path(store.url) / "1").mkdir(parents=True)
    for i in range(2000):
        (path / f"f{i}").write_bytes(b"%4d" % i)
    files = store.files("1")
    buffers = np.empty((4000, 4), np.uint8)
    async with asyncio.TaskGroup() as group:
        for i in range(4000):
            group.create_task(files.read_into(f"f{i % 2000}", 0, [buffers[i]]))
    assert buffers.tobytes() == b"".join(b"%4d" % (i % 2000) for i in range(4000))


async def test_a_slow_open_that_was_cancelled_leaves_no_descriptor(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "a")
    files = store.files("1")
    await files.read("checkpoint.json", max_nbytes=1 << 20)
    before = sorted(os.listdir("/proc/self/fd"))
    own, reached, go_on = files._open_file, threading.Event(), threading.Event()

    def slow(path: str, flags: int = 0) -> int:
        reached.set()
        assert go_on.wait(30)
        return own(path, flags)

    monkeypatch.setattr(files, "_open_file", slow)
    task = asyncio.create_task(files.read("checkpoint.json", max_nbytes=1 << 20))
    await asyncio.to_thread(reached.wait, 30)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done(), "the thread has yet to open the file, and to close it"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["read", "put"])
async def test_what_an_abandoned_thread_opens_after_all_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    workers = Workers(2, "test-stuck", abandon_s=0.05)
    store = LocalStore(tmp_path, workers)
    await save(store, "1", "a")
    files, attempt = store.files("1"), await store.begin("2", "b")
    own, reached, go_on = os.open, threading.Event(), threading.Event()

    def slow(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("small"):
            reached.set()
            assert go_on.wait(30)
        return own(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", slow)
    reading, path = call == "read", "default/small"
    work: Any = files.read(path, max_nbytes=100) if reading else attempt.put(path, b"data")
    task = asyncio.create_task(work)
    await asyncio.to_thread(reached.wait, 30)
    task.cancel()
    with pytest.raises(ThreadAbandonedError, match=r"default/small: .*was stuck") as caught:
        await task
    assert str(caught.value.location).endswith(path)
    workers._abandon_s = 30  # slow calls are not stuck from here on
    go_on.set()
    await asyncio.wait([asyncio.wrap_future(caught.value.future)])
    assert not [name for name in open_files() if name.endswith("small")]
    await attempt.abort()
    await store.close()
    workers.shutdown()


async def test_closing_waits_for_nobody_and_pulls_no_descriptor_away(
    store: LocalStore, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "a")
    files = store.files("1")
    read = os.preadv
    reading, go_on = threading.Event(), threading.Event()

    def held(fd: int, buffers: Any, offset: int) -> int:
        reading.set()
        assert go_on.wait(30)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", held)
    buffer = np.empty(PAGE, np.uint8)
    async with asyncio.TaskGroup() as group:
        group.create_task(files.read_into("default/d/data", 0, [buffer]))
        await workers.run(reading.wait, 30)
        await files.close()
        with pytest.raises(ClosedError, match="these files were closed"):
            await files.read_into("default/d/data", 0, [np.empty(PAGE, np.uint8)])
        go_on.set()
    assert np.array_equal(buffer, pattern(PAGE + 1)[:PAGE])


async def test_threads_that_read_one_file_share_its_descriptor(
    store: LocalStore, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "a")
    files = store.files("1")
    read, own = os.preadv, os.open
    reading, all_reading = threading.Event(), threading.Barrier(3)
    opened: list[str] = []

    def held(fd: int, buffers: Any, offset: int) -> int:
        reading.set()
        all_reading.wait(30)
        return read(fd, buffers, offset)

    def noted(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(path))
        return own(path, *args, **kwargs)

    monkeypatch.setattr(os, "preadv", held)
    monkeypatch.setattr(os, "open", noted)
    buffers = np.empty((3, PAGE), np.uint8)
    async with asyncio.TaskGroup() as group:
        group.create_task(files.read_into("default/d/data", 0, [buffers[0]]))
        await workers.run(reading.wait, 30)
        for buffer in buffers[1:]:
            group.create_task(files.read_into("default/d/data", 0, [buffer]))
    assert opened.count("data") == 1
    assert not [name for name in open_files() if name.endswith("data")]
    monkeypatch.setattr(os, "preadv", read)
    await files.read_into("default/d/data", 0, [buffers[0]])
    assert opened.count("data") == 2, "nobody used it any more, so it was closed"
    assert all(np.array_equal(buffer, pattern(PAGE + 1)[:PAGE]) for buffer in buffers)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1000,), (100,)),
        ((150, 9), (150,)),
        ((151, 9), (100,)),
        ((40, 40, 40, 30, 1), (40, 40, 40, 30)),
        ((90, 61), (90, 10)),
        ((100, 4, 80), (100, 4)),
        ((100, 51), (100,)),
    ],
)
def test_a_step_ends_where_a_buffer_ends_if_one_is_near(
    sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """So that few arrays are checksummed in pieces."""
    found = module._first([np.empty(size, np.uint8) for size in sizes], 100)
    assert tuple(view.size for view in found) == expected


async def test_short_reads_are_continued(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "a")
    read = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        views = [memoryview(b) for b in buffers]
        return read(fd, [views[0][: max(1, len(views[0]) // 2)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    buffers = [np.empty(n, np.uint8) for n in (1000, 0, 3000, 97)]
    await store.files("1").read_into("default/d/data", 0, buffers)
    assert np.array_equal(np.concatenate(buffers), pattern(PAGE + 1))


async def test_a_device_error_names_file_and_reason(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(store, "1", "a")
    files = store.files("1")

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreError, match=r"default/d/data: reading failed: .* \(EIO\); the device"):
        await files.read_into("default/d/data", 0, [np.empty(1, np.uint8)])


class Reads:
    """Bytes that were read past the page cache, and how many reads went through it."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, page_cache: bool, refused: bool = False
    ) -> None:
        import fcntl

        self.direct_nbytes = 0
        self.buffered = 0
        read = os.preadv

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                self.buffered += 1
                return read(fd, buffers, offset)
            if refused:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            count = read(fd, buffers, offset)
            self.direct_nbytes += count
            return count

        patch.setattr(os, "preadv", preadv)
        patch.setattr(module, "cached", lambda fd, offset, nbytes: page_cache)
        patch.setattr(module, "SLOW_TOUCH_S", 10.0)  # however slow this machine is


async def saved_file(store: LocalStore, nbytes: int) -> Any:
    attempt = await store.begin("1", "a")
    data = pattern(nbytes)
    await write_file(attempt, "data", data)
    await attempt.publish(b"record")
    return data


async def test_no_byte_is_read_twice_past_the_page_cache_and_none_beyond_the_last_page(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = await saved_file(store, BIG + 100)
    reads = Reads(monkeypatch, page_cache=False)
    aligned, tail = pattern(BIG, 1), np.empty(100, np.uint8)
    files = store.files("1")
    await files.read_into("data", 0, [aligned, tail])
    assert np.array_equal(np.concatenate([aligned, tail]), data)
    assert (reads.direct_nbytes, reads.buffered) == (BIG + 100, 0)
    halves = [pattern(BIG // 2, 1), np.empty(10, np.uint8), pattern(BIG // 2, 2)]
    await files.read_into("data", 0, halves)
    assert np.array_equal(np.concatenate(halves), data[: BIG + 10])
    assert reads.direct_nbytes == 2 * (BIG + 100)


@pytest.mark.parametrize("reason", ["", "address", "offset", "length", "in memory", "shared"])
async def test_only_what_is_not_in_the_page_cache_is_read_past_it_into_any_memory(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    data = await saved_file(store, BIG + PAGE)
    reads = Reads(monkeypatch, page_cache=reason == "in memory")
    buffer = pattern(BIG + PAGE, 1)
    offset = 8 if reason == "offset" else 0
    start = 8 if reason == "address" else 0
    view = buffer[start : start + BIG - (8 if reason == "length" else 0)]
    how = Reading(shared=reason == "shared")
    await store.files("1").read_into("data", offset, [view], how=how)
    assert np.array_equal(view, data[offset : offset + view.size])
    pages = BIG + PAGE if reason == "offset" else BIG
    expected = (0, 1) if reason in ("in memory", "shared") else (pages, 0)
    assert (reads.direct_nbytes, reads.buffered) == expected


async def test_small_reads_use_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = await saved_file(store, BIG)
    reads = Reads(monkeypatch, page_cache=False)
    buffer = np.empty(module.PAST_CACHE_MIN_NBYTES - 1, np.uint8)
    await store.files("1").read_into("data", 3, [buffer])
    assert np.array_equal(buffer, data[3 : 3 + buffer.size])
    assert (reads.direct_nbytes, reads.buffered) == (0, 1)


@pytest.mark.parametrize("how", ["open", "read"])
async def test_a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    data = await saved_file(store, BIG + 100)
    reads = Reads(monkeypatch, page_cache=False, refused=how == "read")
    opening = os.open

    def refusing(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if how == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opening(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refusing)
    aligned, tail = pattern(BIG, 1), np.empty(100, np.uint8)
    await store.files("1").read_into("data", 0, [aligned, tail])
    assert np.array_equal(np.concatenate([aligned, tail]), data)
    assert reads.direct_nbytes == 0 and reads.buffered


async def test_a_file_is_closed_if_there_is_no_memory_to_read_it_past_the_page_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no memory")

    data = await saved_file(store, BIG)
    Reads(monkeypatch, page_cache=False)
    files, buffer = store.files("1"), np.empty(BIG - 8, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(module.AnonymousMemory, "allocate", refuse)
        with pytest.raises(ResourceError, match="no memory"):
            await files.read_into("data", 8, [buffer])
    own = [name for name in open_files() if store.url in name]
    assert not [name for name in own if name.endswith("data")]
    await files.read_into("data", 8, [buffer])
    assert np.array_equal(buffer, data[8:])


async def test_what_a_device_refuses_past_the_page_cache_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saved_file(store, BIG)
    Reads(monkeypatch, page_cache=False)

    def broken(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StoreError, match=r"1/data: reading failed: .* \(EIO\)"):
        await store.files("1").read_into("data", 8, [np.empty(BIG - 8, np.uint8)])


@given(st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_buffers_get_the_bytes_of_their_run(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Past the page cache as through it, in short reads too, with and without a check."""
    if not (Path(store.url) / "1").exists():
        await saved_file(store, BIG + 77)
    whole = pattern(BIG + 77)
    offset = data.draw(st.sampled_from([0, 1, PAGE - 1, PAGE, 2 * PAGE]))
    sizes = data.draw(
        st.lists(st.sampled_from([0, 1, 100, PAGE, 3 * PAGE, (1 << 20) + 5, 2 << 20]), max_size=9)
    )
    ends = np.minimum(np.cumsum([0, *sizes]), BIG + 77 - offset)
    memory = pattern(BIG + 3 * PAGE, 5)
    begin = -memory.ctypes.data % PAGE + data.draw(st.sampled_from([0, 1, 8]))
    target = memory[begin : begin + ends[-1]]
    buffers = [target[a:b] for a, b in itertools.pairwise(ends)]
    seen = [0]
    check = data.draw(st.sampled_from([None, seen.append]))
    limit = data.draw(st.sampled_from([None, PAGE, 5 * PAGE]))
    warm, fresh = data.draw(st.booleans()), data.draw(st.booleans())
    read = os.preadv

    def short(fd: int, views: Any, at: int) -> int:
        first = views[0] if limit is None else views[0][:limit]
        return read(fd, [first, *views[1:]] if limit is None else [first], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", short)
        patch.setattr(module, "cached", lambda *_: warm)
        how = Reading(check=check, fresh=fresh)
        await store.files("1").read_into("data", offset, buffers, how=how)
    assert np.array_equal(target, whole[offset : offset + target.size])
    assert seen == sorted(set(seen)) and seen[-1] == (target.size if check else 0)


def has_small_pages(address: int) -> bool:
    """Whether the mapping of an address was advised against huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
            inside = start <= address < stop
        elif inside and line.startswith("VmFlags:"):
            return "nh" in line.split()
    raise LookupError(f"no mapping of {address:#x}")


async def test_fresh_memory_gets_small_pages_once_it_was_slow_to_touch(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow pages of the first buffer are avoided for later ones."""
    data = await saved_file(store, BIG)
    Reads(monkeypatch, page_cache=False)
    mapping, start = map_pages(3 * BIG)
    whole = np.frombuffer(mapping, np.uint8)[start : start + 3 * BIG]
    first, second, callers = whole[:BIG], whole[BIG : 2 * BIG], whole[2 * BIG :]
    files = store.files("1")
    for seconds in (10.0, -1.0):
        monkeypatch.setattr(module, "SLOW_TOUCH_S", seconds)
        await files.read_into("data", 0, [first], how=FRESH)
        await files.read_into("data", 0, [callers])
    assert not has_small_pages(first.ctypes.data)
    await files.read_into("data", 0, [second], how=FRESH)
    assert has_small_pages(second.ctypes.data)
    assert not has_small_pages(first.ctypes.data) and not has_small_pages(callers.ctypes.data)
    for buffer in (first, second, callers):
        assert np.array_equal(buffer, data)


async def test_short_reads_and_checks_do_not_count_as_slow_to_touch(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = await saved_file(store, BIG)
    Reads(monkeypatch, page_cache=False)
    mapping, start = map_pages(2 * BIG)
    whole = np.frombuffer(mapping, np.uint8)[start : start + 2 * BIG]
    files = store.files("1")

    def check(there: int) -> None:
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(module, "SLOW_TOUCH_S", -1.0)
    small = np.empty(module.PAST_CACHE_MIN_NBYTES - 1, np.uint8)
    await files.read_into("data", 0, [small], how=FRESH)
    monkeypatch.setattr(module, "SLOW_TOUCH_S", 0.05)  # 0.2 s in all
    await files.read_into("data", 0, [whole[:BIG]], how=Reading(check=check, fresh=True))
    await files.read_into("data", 0, [whole[BIG:]], how=FRESH)
    assert not has_small_pages(whole.ctypes.data + BIG)
    assert np.array_equal(whole, np.concatenate([data, data]))


async def test_a_file_that_ends_early_is_found_by_direct_reads_too(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = await saved_file(store, BIG - 100)
    reads = Reads(monkeypatch, page_cache=False)
    buffer = pattern(BIG, 1)
    with pytest.raises(CorruptCheckpointError) as caught:
        await store.files("1").read_into("data", 0, [buffer])
    assert caught.value.offset == BIG - 100
    assert reads.direct_nbytes
    assert np.array_equal(buffer[: BIG - 100], data)


@pytest.mark.parametrize("own", [True, False])
async def test_what_the_page_cache_holds_is_known(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """For another user's file, a file server may be asked, which must not stop all threads."""
    await saved_file(store, BIG)
    asked: list[bool] = []
    function = posix._c_function

    def noted(name: str, *, keeps_gil: bool = False) -> Any:
        asked.append(keeps_gil)
        return function(name, keeps_gil=keeps_gil)

    monkeypatch.setattr(posix, "_c_function", noted)
    if not own:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    fd = os.open(tmp_path / "1" / "data", os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cold = module.cached(fd, 0, BIG)
        while os.read(fd, 1 << 20):
            pass
        assert module.cached(fd, 0, BIG)
        assert not cold
        assert asked == [own] * 2
    finally:
        os.close(fd)


@pytest.mark.parametrize("cold", [False, True])
async def test_what_is_read_is_checked_as_it_arrives(
    store: LocalStore, tmp_path: Path, cold: bool
) -> None:
    data = pattern(BIG + 5000)
    await save(store, "1", "a")
    (tmp_path / "1" / "x").write_bytes(data.tobytes())
    if cold:
        with (tmp_path / "1" / "x").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    memory, _ = map_pages(BIG)
    whole = np.frombuffer(memory, np.uint8)
    whole = whole[-whole.ctypes.data % PAGE :][:BIG]
    buffers = [whole, np.zeros(0, np.uint8), np.zeros(1000, np.uint8), np.zeros(3000, np.uint8)]
    seen: list[int] = []

    def check(there: int) -> None:
        found = np.concatenate(buffers)[:there]
        assert np.array_equal(found, data[:there])
        seen.append(there)

    files = store.files("1")
    await files.read_into("x", 0, buffers, how=Reading(check=check))
    assert seen == sorted(set(seen)) and seen[-1] == BIG + 4000
    assert seen[0] <= module.CACHED_NBYTES and len(seen) >= BIG // module.CACHED_NBYTES


async def test_what_a_check_raises_is_raised_and_ends_the_read(
    store: LocalStore, tmp_path: Path
) -> None:
    await save(store, "1", "a")
    (tmp_path / "1" / "x").write_bytes(bytes(BIG))
    buffer, calls = np.ones(BIG, np.uint8), 0

    def check(there: int) -> None:
        nonlocal calls
        calls += 1
        raise CorruptCheckpointError("damaged")

    files = store.files("1")
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        await files.read_into("x", 0, [buffer], how=Reading(check=check))
    assert calls == 1 and buffer[-1] == 1
    with pytest.raises(CorruptCheckpointError, match="the file ends at byte"):
        await files.read_into("x", BIG - 9, [buffer[:10]], how=Reading(check=lambda there: None))


async def test_a_cancelled_read_waits_for_its_check(store: LocalStore, tmp_path: Path) -> None:
    await save(store, "1", "a")
    (tmp_path / "1" / "x").write_bytes(bytes(100))
    begun, go = threading.Event(), threading.Event()

    def check(there: int) -> None:
        begun.set()
        assert go.wait(30)

    files = store.files("1")
    task = asyncio.create_task(
        files.read_into("x", 0, [np.zeros(9, np.uint8)], how=Reading(check=check))
    )
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_reading_creates_nothing(store: LocalStore, tmp_path: Path, workers: Workers) -> None:
    await save(store, "1", "a")
    await store.close()
    before = sorted(tmp_path.rglob("*"))
    reader = LocalStore(tmp_path, workers)
    assert await reader.names() == ["1"]
    assert await reader.files("1").read("checkpoint.json", max_nbytes=10) == b"record 0"
    assert await reader.sweep() == []
    await reader.close()
    nowhere = LocalStore(tmp_path / "none" / "here", workers)
    assert await nowhere.names() == []
    assert await nowhere.sweep() == []
    with pytest.raises(CheckpointNotFoundError):
        await delete(nowhere, "1")
    await nowhere.close()
    assert sorted(tmp_path.rglob("*")) == before
