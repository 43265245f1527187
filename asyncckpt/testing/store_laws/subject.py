"""What the laws of every subject are stated with."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from asyncckpt.ports import Store
from asyncckpt.testing.checkpoints import expect_no_record


@pytest.mark.asyncio
class StoreLaws:
    """Laws about a store that is opened at a place.

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
