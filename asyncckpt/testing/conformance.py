"""Conformance suite for stores: the laws that every store obeys, as tests.

Make a subclass in a test module, with pytest and pytest-asyncio installed::

    class TestMyStore(StoreConformance):
        @asynccontextmanager
        async def opened(self, place):
            store = MyStore(place)
            yield store
            await store.close()

`place` is a new directory for each test; opened again with the same `place`, the store must find
what was published there before. Pass `save_id_of`, `outline_of` and `epoch_of` of
`asyncckpt.testing.checkpoints` to a store that parses commit records. For a store in which two
processes could make the same claim, subclass all bases of `StoreConformance` except `Claiming`. Set
`lists_attempts` for a store that lists a name as soon as an attempt has written something; a name
is a checkpoint only once its record can be read.
"""

from __future__ import annotations

from asyncckpt.testing.store_laws.complete_reads import Reading
from asyncckpt.testing.store_laws.naming import Naming
from asyncckpt.testing.store_laws.sharing import Sharing
from asyncckpt.testing.store_laws.taking_over import Claiming
from asyncckpt.testing.store_laws.writing import Writing


class StoreConformance(Naming, Writing, Reading, Sharing, Claiming):
    """All laws of stores. Subclass it as `Test…` and define `opened`; see `StoreLaws`."""
