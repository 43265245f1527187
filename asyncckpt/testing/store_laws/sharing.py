"""Laws of attempts that several processes share, each with its own store."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError
from asyncckpt.flow.shield import together
from asyncckpt.ports import AttemptFiles, JoinedAttempt, Store
from asyncckpt.testing.checkpoints import (
    PAGE,
    SAVE_ID,
    YEAR_S,
    cancelled_after,
    content,
    data_path,
    expect,
    identity,
    pattern,
    put,
    reading,
    record_of,
    save,
    write_file,
)
from asyncckpt.testing.store_laws import StoreLaws

JOIN_S = 20.0
"""Longest wait for an attempt that exists."""

GIVE_UP_S = 0.05


async def join(store: Store, process: int = 1, timeout_s: float = JOIN_S) -> JoinedAttempt:
    """Join the shared attempt at step 1."""
    return await store.join("1", SAVE_ID, process=process, timeout_s=timeout_s)


async def write_own(attempt: AttemptFiles, process: int) -> str:
    """Write the data file of a process; return its path."""
    path = data_path(SAVE_ID, f"p{process}-0")
    return await write_file(attempt, path, pattern(PAGE + 1, process))


async def names_in(store: Store, name: str, save_id: str) -> set[str]:
    """Return the top-level names of a checkpoint, without its save id."""
    async with reading(store, name) as files:
        entries = await files.entries(max_entries=99)
    return {entry.name.replace(save_id, "id") for entry in entries}


class Sharing(StoreLaws):
    """Attempts of several processes are published as a whole, or leave nothing."""

    async def test_files_of_all_processes_are_published(self, tmp_path: Path) -> None:
        """Each process can read what is passed on, which is not part of the checkpoint."""
        async with self.opened(tmp_path) as store, self.opened(tmp_path) as other:
            attempt = await store.begin("1", SAVE_ID, shared=True)
            share = await join(other)
            path = await write_own(share, 1)
            await share.put(data_path(SAVE_ID, "p1-small"), b"of 1")
            assert await attempt.taken("entries-1", max_nbytes=100) is None
            await share.pass_on("entries-1", memoryview(b"entries of 1"))
            await share.settle()
            assert await attempt.taken("entries-1", max_nbytes=100) == b"entries of 1"
            await attempt.pass_on("answer", b"of 0")
            assert await share.taken("answer", max_nbytes=4) == b"of 0"
            own = await write_file(attempt, data_path(SAVE_ID), pattern(PAGE + 1))
            record = await put(attempt, SAVE_ID, {"default/small": b"small 0"}, 0, own)
            await self.expect_nothing(store, "1")
            await attempt.publish(record)
            await share.leave()
            await expect(other, "1")
            found = await content(other, "1", path, 2 * PAGE)
            assert found == pattern(PAGE + 1, 1).tobytes()
            assert await content(store, "1", data_path(SAVE_ID, "p1-small"), 10) == b"of 1"
        async with self.opened(tmp_path) as again:
            await expect(again, "1")
            await save(again, "2", "single")
            shared = await names_in(again, "1", SAVE_ID)
            assert shared == await names_in(again, "2", identity("single"))
            assert list(await again.sweep()) == []

    async def test_a_process_waits_for_the_attempt_that_it_joins(
        self, store: Store, other: Store
    ) -> None:
        """It may start before the attempt does, and sees only attempts with its save id."""
        wrong = await store.begin("1", identity("another"), shared=True)
        single = await store.begin("2", SAVE_ID)
        async with asyncio.TaskGroup() as group:
            joining = group.create_task(join(other))
            with pytest.raises(CheckpointNotFoundError):
                await other.join("2", SAVE_ID, process=1, timeout_s=GIVE_UP_S)
            assert not joining.done()
            attempt = await store.begin("1", SAVE_ID, shared=True)
        share = joining.result()
        await write_own(share, 1)
        for end in (share, attempt, single, wrong):
            await end.abort()
        assert list(await store.sweep()) == []

    async def test_without_an_attempt_to_join_it_raises_in_time(self, store: Store) -> None:
        """Nothing is written; the error names the root and the save id."""
        begun = time.monotonic()
        with pytest.raises(CheckpointNotFoundError, match=SAVE_ID) as caught:
            await join(store, timeout_s=GIVE_UP_S)
        assert time.monotonic() - begun < JOIN_S
        assert "a root that all processes share" in str(caught.value)
        assert str(caught.value.location) in str(caught.value)
        assert await store.names() == []
        assert list(await store.sweep()) == []

    async def test_joining_can_be_cancelled(self, store: Store, other: Store) -> None:
        """The attempt continues without the process, which may join again."""
        for turns in range(8):
            assert await cancelled_after(turns, join(other))
        attempt = await store.begin("1", SAVE_ID, shared=True)
        share = await join(other)
        await share.leave()
        await attempt.abort()
        await self.expect_nothing(store, "1")

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), None])
    async def test_aborts_in_any_order_leave_nothing(
        self, store: Store, other: Store, order: tuple[int, ...] | None
    ) -> None:
        """Not even from processes that write after another has aborted. None: concurrently."""
        begun = await store.begin("1", SAVE_ID, shared=True)
        shares = [begun, await join(other, 1), await join(other, 2)]
        for process, share in enumerate(shares):
            await write_own(share, process)
            await share.pass_on(f"entries-{process}", b"x" * process or b"none")
        if order is None:
            await together(share.abort() for share in shares)
        for process in order or ():
            await shares[process].abort()
        for share in shares:
            await share.abort()
            with pytest.raises(UsageError, match="ended"):
                await share.put(data_path(SAVE_ID, "late"), b"x")
        await self.expect_nothing(store, "1")
        assert await store.names() == []
        assert list(await store.sweep()) == []
        await save(store, "1", "later", 2)
        await expect(other, "1", 2)

    async def test_a_process_leaves_what_was_not_published(
        self, store: Store, other: Store
    ) -> None:
        """Stores that can prove processes dead remove the files when the last one leaves."""
        attempt = await store.begin("1", SAVE_ID, shared=True)
        share = await join(other)
        await write_own(share, 1)
        await attempt.abort()
        await share.leave()
        await share.leave()
        await self.expect_nothing(store, "1")
        assert store.capabilities.proves_dead is (await store.names() == [])
        assert list(await store.sweep()) == []

    async def test_what_a_process_has_left_can_be_published(
        self, store: Store, other: Store
    ) -> None:
        """Process 0 may publish after another process has stopped waiting for it."""
        attempt = await store.begin("1", SAVE_ID, shared=True)
        share = await join(other)
        path = await write_own(share, 1)
        await share.settle()
        await share.leave()
        assert list(await other.sweep()) == []
        await attempt.publish(record_of(SAVE_ID, data=path))
        found = await content(other, "1", path, 2 * PAGE)
        assert found == pattern(PAGE + 1, 1).tobytes()

    async def test_sweep_leaves_a_shared_attempt_alone(self, store: Store, other: Store) -> None:
        """An attempt is alive while any of its processes is."""
        attempt = await store.begin("1", SAVE_ID, shared=True)
        share = await join(other)
        path = await write_own(share, 1)
        for sweeper in (store, other):
            assert list(await sweeper.sweep()) == []
            assert list(await sweeper.collect(YEAR_S)) == []
        await share.settle()
        await attempt.publish(record_of(SAVE_ID, data=path))
        assert list(await other.sweep()) == []
        await share.leave()
        assert len(await content(store, "1", path, 2 * PAGE)) == PAGE + 1

    async def test_what_is_passed_on_has_a_name_and_a_size(self, store: Store) -> None:
        """Names cannot lead out of the directory, and sizes are checked before reading."""
        attempt = await store.begin("1", SAVE_ID, shared=True)
        for path in ("", ".", "..", ".begun", "a/b", "/a", "a\0b", "a" * 65, "é"):
            with pytest.raises(UsageError, match="cannot be passed on"):
                await attempt.pass_on(path, b"x")
            with pytest.raises(UsageError, match="cannot be passed on"):
                await attempt.taken(path, max_nbytes=1)
        await attempt.pass_on("entries-1", b"abcd")
        assert await attempt.taken("entries-1", max_nbytes=4) == b"abcd"
        with pytest.raises(CorruptCheckpointError, match="expected at most 3"):
            await attempt.taken("entries-1", max_nbytes=3)
        await attempt.abort()
        with pytest.raises(UsageError, match="ended"):
            await attempt.pass_on("entries-1", b"x")

    async def test_an_attempt_of_one_process_passes_nothing_on(self, store: Store) -> None:
        """The caller forgot `shared`."""
        attempt = await store.begin("1", SAVE_ID)
        with pytest.raises(UsageError, match="shared=True"):
            await attempt.pass_on("entries-1", b"x")
        with pytest.raises(UsageError, match="shared=True"):
            await attempt.taken("entries-1", max_nbytes=1)
        await attempt.abort()

    async def test_joining_checks_its_arguments(self, store: Store) -> None:
        """Before looking for the attempt."""
        with pytest.raises(UsageError, match="process=0"):
            await join(store, 0)
        with pytest.raises(UsageError, match="one path part"):
            await store.join("a/b", SAVE_ID, process=1, timeout_s=JOIN_S)
        with pytest.raises(UsageError, match="save id"):
            await store.join("1", "../x", process=1, timeout_s=JOIN_S)

    async def test_a_share_is_settled_once_its_files_are_sealed(
        self, store: Store, other: Store
    ) -> None:
        """An open file would be published incomplete."""
        attempt = await store.begin("1", SAVE_ID, shared=True)
        share = await join(other)
        await share.create(data_path(SAVE_ID), nbytes=PAGE, window_nbytes=PAGE)
        with pytest.raises(UsageError, match="not sealed"):
            await share.settle()
        await share.abort()
        await attempt.abort()
        assert list(await store.sweep()) == []
