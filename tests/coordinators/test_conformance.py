"""The four coordinators keep the laws: two of them in the two processes of a real job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from asyncckpt.coordinators.directory import DirectoryCoordinator
from asyncckpt.coordinators.single import SingleCoordinator
from asyncckpt.ports import Coordinator
from asyncckpt.testing.coordinator_conformance import CoordinatorConformance
from tests.coordinators.remote import opened
from tests.processes.fixtures import Pools


class TestSingle(CoordinatorConformance):
    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncIterator[Sequence[Coordinator]]:
        yield [SingleCoordinator()]


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


class InProcesses(CoordinatorConformance):
    kind: str

    @pytest.fixture(autouse=True)
    def launched(self, pools: Pools) -> None:
        self.pool = pools(self.kind, 2)

    def opened(self, place: Path) -> AbstractAsyncContextManager[Sequence[Coordinator]]:
        return opened(self.pool)


class TestJax(InProcesses):
    kind = "jax"


class TestTorch(InProcesses):
    kind = "torch"
