"""Fixture for tests in several processes; import it in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes.pool import Pool


class Pools:
    """The pools of a test session: one launch for each kind, count and settings."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._pools: dict[tuple[Any, ...], Pool] = {}

    def __call__(self, kind: str, count: int, **settings: Any) -> Pool:
        """Return the running pool of this kind, for tests that leave all processes alive."""
        key = (kind, count, repr(sorted(settings.items())))
        pool = self._pools.get(key)
        if pool is None or len(pool.alive()) < count:
            if pool is not None:
                pool.close()
            pool = self._pools[key] = self.new(kind, count, **settings)
        return pool

    def new(self, kind: str, count: int, **settings: Any) -> Pool:
        """Return a new pool, for a test that kills processes; the test closes it."""
        return Pool(kind, count, self._factory.mktemp(f"{kind}-{count}-"), **settings)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """`pools("torch", 2)` is the pool of two torch processes, launched at its first use."""
    made = Pools(tmp_path_factory)
    yield made
    made.close()
