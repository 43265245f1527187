"""Conformance suite for coordinators: the laws that every coordinator obeys, as tests.

Make a subclass in a test module, with pytest and pytest-asyncio installed::

    class TestMyCoordinator(CoordinatorConformance):
        @asynccontextmanager
        async def opened(self, place):
            coordinators = [MyCoordinator(place, index, 2) for index in range(2)]
            yield coordinators
            for coordinator in coordinators:
                await coordinator.close()

`place` is a new directory for each test. The coordinators are those of all processes, ordered by
index; if the service needs real processes, the others' may be proxies. Two processes are enough.
Keys of other tests may still exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.flow.shield import together
from asyncckpt.ports import MAX_MESSAGE_NBYTES, Coordinator

Coordinators = Sequence[Coordinator]
"""The coordinators of all processes, ordered by index."""

PROMPT_S = 5.0
"""Upper bound for immediate calls on a busy machine."""

LONG_S = 30.0
"""Time limit of waits that should end earlier."""


def prefix() -> str:
    """Return a prefix of keys that no other test uses."""
    return f"asyncckpt/{secrets.token_hex(16)}"


@contextlib.contextmanager
def prompt() -> Iterator[None]:
    """Check that the block takes less than `PROMPT_S`."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < PROMPT_S


@pytest.mark.asyncio(loop_scope="function")
class CoordinatorConformance:
    """All laws of coordinators. Subclass it as `Test…` and define `opened`."""

    def opened(self, place: Path) -> AbstractAsyncContextManager[Coordinators]:
        """Open the coordinators of all processes."""
        raise NotImplementedError

    @pytest_asyncio.fixture(loop_scope="function")
    async def coordinators(self, tmp_path: Path) -> AsyncIterator[Coordinators]:
        """Open the coordinators of a test."""
        async with self.opened(tmp_path) as coordinators:
            yield coordinators

    async def test_each_process_knows_its_place(self, coordinators: Coordinators) -> None:
        """Indices count from 0 to the number of processes minus 1."""
        assert [c.process_index for c in coordinators] == list(range(len(coordinators)))
        assert {c.process_count for c in coordinators} == {len(coordinators)}
        assert len({c.name for c in coordinators}) == 1

    async def test_what_one_puts_all_see(self, coordinators: Coordinators) -> None:
        """Values are bytes of any content, from one byte to the largest message."""
        values = (b"\0", b"\n", bytes(range(256)), b"\xff" * MAX_MESSAGE_NBYTES)
        for index, value in enumerate(values):
            key = f"{prefix()}/value"
            await coordinators[index % len(coordinators)].put(key, value)
            for coordinator in coordinators:
                assert await coordinator.look(key) == value
                assert await coordinator.wait(key, timeout_s=0) == value

    async def test_put_replaces_the_value(self, coordinators: Coordinators) -> None:
        """Whichever process set it before."""
        key = f"{prefix()}/value"
        for turn in range(4):
            writer = coordinators[turn % len(coordinators)]
            await writer.put(key, b"turn %d" % turn)
            for coordinator in coordinators:
                assert await coordinator.look(key) == b"turn %d" % turn

    async def test_a_missing_key_is_none_at_once(self, coordinators: Coordinators) -> None:
        """`look` does not wait."""
        for coordinator in coordinators:
            with prompt():
                assert await coordinator.look(f"{prefix()}/missing") is None

    async def test_a_key_is_set_once(self, coordinators: Coordinators) -> None:
        """Of concurrent calls one succeeds, and all return its value."""
        for _ in range(10):
            key = f"{prefix()}/once"
            own = [b"%d" % coordinator.process_index for coordinator in coordinators]
            pairs = zip(coordinators, own, strict=True)
            values = set(await together(c.put_once(key, value) for c, value in pairs))
            assert len(values) == 1 and values <= set(own)
            assert await coordinators[-1].put_once(key, b"late") == values.pop()

    async def test_a_key_that_was_put_is_not_set_once_more(
        self, coordinators: Coordinators
    ) -> None:
        """`put_once` returns the value of `put`; `put` replaces the value of `put_once`."""
        key = f"{prefix()}/both"
        await coordinators[0].put(key, b"first")
        assert await coordinators[-1].put_once(key, b"second") == b"first"
        await coordinators[-1].put(key, b"third")
        assert await coordinators[0].look(key) == b"third"

    async def test_a_wait_ends_when_the_key_is_set(self, coordinators: Coordinators) -> None:
        """By any process."""
        key = f"{prefix()}/awaited"
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(c.wait(key, timeout_s=LONG_S)) for c in coordinators]
            await asyncio.sleep(0.1)
            with prompt():
                await coordinators[-1].put(key, b"here")
                await asyncio.wait(waits)
        assert [wait.result() for wait in waits] == [b"here"] * len(waits)

    async def test_a_wait_ends_when_its_time_is_up(self, coordinators: Coordinators) -> None:
        """Without a value, and not earlier."""
        begun = time.monotonic()
        assert await coordinators[0].wait(f"{prefix()}/missing", timeout_s=0.2) is None
        assert 0.15 <= time.monotonic() - begun < 0.2 + PROMPT_S

    async def test_waits_do_not_hold_up_other_calls(self, coordinators: Coordinators) -> None:
        """A beat is posted while other calls wait."""
        coordinator, start = coordinators[-1], prefix()
        async with asyncio.TaskGroup() as group:
            waits = [
                group.create_task(coordinator.wait(f"{start}/{number}", timeout_s=LONG_S))
                for number in range(3)
            ]
            await asyncio.sleep(0.1)
            for _ in range(3):
                with prompt():
                    await coordinator.put(f"{start}/beat", b"beat")
            for wait in waits:
                wait.cancel()

    async def test_cancelling_a_wait_returns_at_once(self, coordinators: Coordinators) -> None:
        """The coordinator can be used afterwards."""
        coordinator, key = coordinators[0], f"{prefix()}/missing"
        async with asyncio.TaskGroup() as group:
            wait = group.create_task(coordinator.wait(key, timeout_s=LONG_S))
            await asyncio.sleep(0.1)
            with prompt():
                wait.cancel()
                await asyncio.wait((wait,))
        assert wait.cancelled()
        with prompt():
            await coordinator.put(key, b"later")
            assert await coordinator.look(key) == b"later"

    async def test_a_list_has_the_keys_below_a_prefix(self, coordinators: Coordinators) -> None:
        """At any depth, without the prefix itself and names that only start like it."""
        start, writer, reader = prefix(), coordinators[0], coordinators[-1]
        assert await reader.list(start) == {}
        for key in ("a", "a/b", "a/b/c", "a/b-c", "ab", "ab/c", "b/a"):
            await writer.put(f"{start}/{key}", key.encode())
        assert await reader.list(f"{start}/a") == {"b": b"a/b", "b/c": b"a/b/c", "b-c": b"a/b-c"}
        assert await reader.list(f"{start}/a/b") == {"c": b"a/b/c"}
        assert await reader.list(f"{start}/a/b/c") == {}
        assert len(await reader.list(start)) == 7

    async def test_a_list_has_the_keys_of_all_processes(self, coordinators: Coordinators) -> None:
        """However they were set, at the same time and more than once."""
        start, expected = prefix(), {}
        async with asyncio.TaskGroup() as group:
            for c in coordinators:
                for number in range(20):
                    name, value = f"{c.process_index}/{number}", b"%d" % number
                    expected[name] = value
                    put = c.put if number % 2 else c.put_once
                    for _ in range(2):
                        group.create_task(put(f"{start}/{name}", value))
        for coordinator in coordinators:
            assert await coordinator.list(start) == expected

    async def test_delete_takes_a_key_and_all_below_it(self, coordinators: Coordinators) -> None:
        """For all processes, and nothing else."""
        start = prefix()
        for number, key in enumerate(("a", "a/b", "a/b/c", "a/d", "ab", "b")):
            await coordinators[number % len(coordinators)].put(f"{start}/{key}", b"x")
        await coordinators[-1].delete(f"{start}/a")
        for coordinator in coordinators:
            assert set(await coordinator.list(start)) == {"ab", "b"}
            assert await coordinator.look(f"{start}/a") is None
            assert await coordinator.look(f"{start}/a/b/c") is None

    async def test_what_was_deleted_can_be_set_again(self, coordinators: Coordinators) -> None:
        """By the process that set it before and by any other; `put_once` finds nothing."""
        start = prefix()
        for coordinator in (*coordinators, *coordinators):
            assert await coordinator.put_once(f"{start}/a/once", b"new") == b"new"
            await coordinator.put(f"{start}/a/put", b"new")
            for reader in coordinators:
                assert set(await reader.list(start)) == {"a/once", "a/put"}
            await coordinators[0].delete(start)
            assert await coordinator.list(start) == {}

    async def test_deleting_nothing_is_no_error(self, coordinators: Coordinators) -> None:
        """Several may delete the same keys at the same time."""
        start = prefix()
        await coordinators[0].delete(start)
        for number in range(5):
            await coordinators[0].put(f"{start}/a/{number}", b"x")
        await together(coordinator.delete(start) for coordinator in coordinators)
        assert await coordinators[0].list(start) == {}

    async def test_odd_keys_and_values_are_refused(self, coordinators: Coordinators) -> None:
        """Before the service sees them."""
        coordinator, key = coordinators[0], f"{prefix()}/x"
        for odd in ("", "/a", "a/", "a//b", "a b", "a/../b", "../a", ".", "ä", "a=", "a\n"):
            with pytest.raises(UsageError, match="key"):
                await coordinator.look(odd)
            with pytest.raises(UsageError, match="key"):
                await coordinator.put(odd, b"x")
        for value in (b"", b"x" * (MAX_MESSAGE_NBYTES + 1)):
            with pytest.raises(UsageError, match="bytes"):
                await coordinator.put(key, value)
            with pytest.raises(UsageError, match="bytes"):
                await coordinator.put_once(key, value)
        assert await coordinator.look(key) is None

    async def test_close_ends_the_coordinator_not_the_service(
        self, coordinators: Coordinators
    ) -> None:
        """The others still see the keys; closing again does nothing."""
        key = f"{prefix()}/left"
        await coordinators[-1].put(key, b"left")
        await coordinators[-1].close()
        await coordinators[-1].close()
        if len(coordinators) > 1:
            assert await coordinators[0].look(key) == b"left"
            with pytest.raises(AsyncCheckpointError):
                await coordinators[-1].look(key)
