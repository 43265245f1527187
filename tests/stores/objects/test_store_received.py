"""When a run has come from an object store, and is not in its buffers yet."""

from __future__ import annotations

import numpy as np
import pytest

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.options import MIB
from tests.simulator import Simulator
from tests.stores.objects.stores import ROOT, opened


@pytest.mark.parametrize("nbytes", [1, 3 * MIB, 40 * MIB], ids=["byte", "range", "ranges"])
async def test_it_is_told_once_that_all_ranges_have_come(sim: Simulator, nbytes: int) -> None:
    sim.put("bucket", f"{ROOT}/1/data", bytes(nbytes))
    told: list[int] = []
    async with opened("obstore", sim) as store:
        files = store.files("1")
        buffer = np.ones(nbytes, np.uint8)
        sim.reset()

        def received() -> None:
            told.append(sum(r.answered_nbytes for r in sim.requests))

        await files.read_into("data", 0, [buffer], received=received)
        assert told == [nbytes]
        assert not buffer.any()
        await files.close()


async def test_nothing_is_told_of_what_does_not_come(sim: Simulator) -> None:
    sim.put("bucket", f"{ROOT}/1/data", bytes(100))
    told: list[None] = []
    async with opened("obstore", sim) as store:
        files = store.files("1")
        with pytest.raises(CorruptCheckpointError):
            await files.read_into(
                "data", 0, [np.zeros(200, np.uint8)], received=lambda: told.append(None)
            )
        await files.close()
    assert not told
