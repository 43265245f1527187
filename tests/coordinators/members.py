"""Coordinators of many processes in one process, with a log of their calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from asyncckpt.coordinators.key_values import pauses
from tests.coordinators.memory import MemoryCoordinator


class Member(MemoryCoordinator):
    """Process `index` of `count`, whose keys are in a dict that all of them share."""

    name = "members"

    def __init__(self, values: dict[str, bytes], index: int, count: int) -> None:
        super().__init__()
        self._values = values
        self.process_index = index
        self.process_count = count
        self.calls: Counter[str] = Counter()

    async def put(self, key: str, value: bytes) -> None:
        self.calls["put"] += 1
        await super().put(key, value)

    async def look(self, key: str) -> bytes | None:
        self.calls["look"] += 1
        return await super().look(key)

    async def list(self, prefix: str) -> Mapping[str, bytes]:
        self.calls["list"] += 1
        return await super().list(prefix)

    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        self.calls["wait"] += 1
        try:
            async with asyncio.timeout(timeout_s):
                for pause in pauses(self.process_count):
                    if key in self._values:
                        break
                    await asyncio.sleep(pause)
        except TimeoutError:
            pass
        return self._values.get(key)


def members(count: int, values: dict[str, bytes] | None = None) -> list[Member]:
    """The members of a job of `count` processes."""
    shared: dict[str, bytes] = {} if values is None else values
    return [Member(shared, index, count) for index in range(count)]
