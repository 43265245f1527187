"""The laws of stores, one file per subject, combined by `asyncckpt.testing.conformance`.

Only tests that run on any store belong here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from asyncckpt.ports import Store
from asyncckpt.testing.checkpoints import expect_no_record


@pytest.mark.asyncio(loop_scope="function")
class StoreLaws:
    """Laws of a store that is opened at a place.

    Attributes:
        conditional_create: whether exactly one of two attempts at one name publishes.
        lists_attempts: whether `names` may list an attempt that has written something.
        window_nbytes: a window size that the store accepts for a data file.
    """

    conditional_create = True
    lists_attempts = False
    window_nbytes = 5 << 20

    def opened(self, place: Path) -> AbstractAsyncContextManager[Store]:
        """Open the store at this place, with everything published there before."""
        raise NotImplementedError

    @pytest_asyncio.fixture(loop_scope="function")
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        """Open the store of a test."""
        async with self.opened(tmp_path) as store:
            yield store

    @pytest_asyncio.fixture(loop_scope="function")
    async def other(self, tmp_path: Path) -> AsyncIterator[Store]:
        """Open the same store as another process."""
        async with self.opened(tmp_path) as other:
            yield other

    async def expect_nothing(self, store: Store, name: str) -> None:
        """Check that this name is not listed and cannot be read."""
        if not self.lists_attempts:
            assert name not in await store.names()
        await expect_no_record(store, name)
