"""Coordinators keep the laws; those of JAX and torch do so in the two processes of a real job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asyncckpt.coordinators.directory import DirectoryCoordinator
from asyncckpt.ports import Coordinator
from asyncckpt.testing.coordinator_conformance import CoordinatorConformance
from tests.coordinators.memory import MemoryCoordinator


class TestMemory(CoordinatorConformance):
    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[Sequence[Coordinator]]:
        yield [MemoryCoordinator()]


class TestDirectory(CoordinatorConformance):
    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[Sequence[Coordinator]]:
        coordinators = [
            DirectoryCoordinator(place / "keys", process_index=index, process_count=2)
            for index in range(2)
        ]
        yield coordinators
        for coordinator in coordinators:
            await coordinator.close()
