"""The laws of coordinators fail for a coordinator that breaks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asyncckpt.ports import Coordinator
from asyncckpt.testing.coordinator_conformance import PROMPT_S, CoordinatorConformance
from tests.coordinators.memory import MemoryCoordinator

LAWS = [name for name in vars(CoordinatorConformance) if name.startswith("test_")]


class Overwriting(MemoryCoordinator):
    async def put_once(self, key: str, value: bytes) -> bytes:
        await self.put(key, value)
        return value


class Forgetful(MemoryCoordinator):
    async def put(self, key: str, value: bytes) -> None:
        if key not in self._values:
            await super().put(key, value)


class Greedy(MemoryCoordinator):
    async def delete(self, prefix: str) -> None:
        for key in list(self._values):
            if key.startswith(prefix):
                del self._values[key]


class Shallow(MemoryCoordinator):
    async def list(self, prefix: str) -> Mapping[str, bytes]:
        found = await super().list(prefix)
        return {key: value for key, value in found.items() if "/" not in key}


class Impatient(MemoryCoordinator):
    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        return await self.look(key)


class Stubborn(MemoryCoordinator):
    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        try:
            return await super().wait(key, timeout_s=timeout_s)
        except asyncio.CancelledError:
            await asyncio.sleep(PROMPT_S + 0.1)
            raise


class Careless(MemoryCoordinator):
    async def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    async def look(self, key: str) -> bytes | None:
        return self._values.get(key)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Overwriting, "test_a_key_that_was_put_is_not_set_once_more"),
        (Forgetful, "test_put_replaces_the_value"),
        (Greedy, "test_delete_takes_a_key_and_all_below_it"),
        (Shallow, "test_a_list_has_the_keys_below_a_prefix"),
        (Impatient, "test_a_wait_ends_when_the_key_is_set"),
        (Stubborn, "test_cancelling_a_wait_returns_at_once"),
        (Careless, "test_odd_keys_and_values_are_refused"),
    ],
)
async def test_a_broken_coordinator_fails(
    tmp_path: Path, broken: type[MemoryCoordinator], law: str
) -> None:
    class Suite(CoordinatorConformance):
        @asynccontextmanager
        async def opened(self, place: Path) -> AsyncIterator[Sequence[Coordinator]]:
            yield [broken()]

    assert law in LAWS
    suite = Suite()
    async with suite.opened(tmp_path) as coordinators:
        with pytest.raises((AssertionError, pytest.fail.Exception, ExceptionGroup)):
            await getattr(suite, law)(coordinators)
