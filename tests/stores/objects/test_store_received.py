"""When a run has come from an object store, and is not in its buffers yet."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.options import CACHED_NBYTES, MIB
from asyncckpt.ports import Reading
from tests.simulator import Simulator
from tests.stores.objects.stores import ROOT, UNRACED, opened


@pytest.mark.parametrize("nbytes", [1, 3 * MIB, 40 * MIB], ids=["byte", "range", "ranges"])
async def test_it_is_told_once_that_all_ranges_have_come(sim: Simulator, nbytes: int) -> None:
    sim.put("bucket", f"{ROOT}/1/data", bytes(nbytes))
    told: list[int] = []
    async with opened("obstore", sim, policy=UNRACED) as store:
        files = store.files("1")
        buffer = np.ones(nbytes, np.uint8)
        sim.reset()

        def received() -> None:
            told.append(sum(r.answered_nbytes for r in sim.requests))

        await files.read_into("data", 0, [buffer], how=Reading(received=received))
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
                "data",
                0,
                [np.zeros(200, np.uint8)],
                how=Reading(received=lambda: told.append(None)),
            )
        await files.close()
    assert not told


@pytest.mark.parametrize(
    ("nbytes", "steps"),
    [(1000, 0), (6 * CACHED_NBYTES + 5, 7), (40 * MIB, 0)],
    ids=["few", "one", "many"],
)
async def test_a_run_of_one_range_is_checked_where_it_is_copied_step_by_step(
    sim: Simulator, nbytes: int, steps: int
) -> None:
    """Few bytes are copied on the loop, and ranges come in any order: both are left unchecked."""
    content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    sim.put("bucket", f"{ROOT}/1/data", b"before" + content.tobytes())
    loop_thread = threading.current_thread()
    seen: list[int] = []
    async with opened("obstore", sim) as store:
        files = store.files("1")
        buffers = [np.zeros(nbytes // 3, np.uint8), np.zeros(nbytes - nbytes // 3, np.uint8)]

        def check(there: int) -> None:
            assert threading.current_thread() is not loop_thread
            assert np.array_equal(np.concatenate(buffers)[:there], content[:there])
            seen.append(there)

        await files.read_into("data", 6, buffers, how=Reading(check=check))
        assert np.array_equal(np.concatenate(buffers), content)
        assert len(seen) == steps and seen == sorted(seen)
        assert seen[-1:] == ([nbytes] if steps else [])

        def refuse(there: int) -> None:
            raise CorruptCheckpointError("wrong", file="data")

        if steps:
            with pytest.raises(CorruptCheckpointError, match="wrong"):
                await files.read_into("data", 6, buffers, how=Reading(check=refuse))
        await files.close()
