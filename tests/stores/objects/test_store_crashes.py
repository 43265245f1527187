"""What a save, an overwrite and a deletion leave that end at any request, and who mends it."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

import pytest

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import AsyncCheckpointError, CheckpointNotFoundError
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import delete, expect, expect_no_record, save
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import ROOT, UNRACED, names, opened, whole, writes

FOREVER = 1 << 30


@dataclass(frozen=True)
class Scenario:
    name: str

    async def run(self, store: ObjectStore) -> None:
        if self.name == "delete":
            await delete(store, "1")
        else:
            step = "1" if self.name == "overwrite" else "2"
            await save(store, step, "new", 2, overwrite=self.name == "overwrite")

    async def check(self, sim: Simulator, store: ObjectStore) -> str:
        """The old state or the new one, whole; which of them."""
        if self.name == "save":
            await whole(sim, store, "1", 1)
            return await self._either(sim, store, "2", 2)
        if self.name == "delete":
            return await self._either(sim, store, "1", 1)
        seed = await seed_of(store, "1")
        assert seed in (1, 2)
        await whole(sim, store, "1", seed)
        return str(seed)

    async def _either(self, sim: Simulator, store: ObjectStore, name: str, seed: int) -> str:
        if await seed_of(store, name) is None:
            await expect_no_record(store, name)
            return "nothing"
        await whole(sim, store, name, seed)
        return str(seed)


async def seed_of(store: ObjectStore, name: str) -> int | None:
    files = store.files(name)
    try:
        return int((await files.read("checkpoint.json", max_nbytes=1000)).split()[1])
    except CheckpointNotFoundError:
        return None
    finally:
        await files.close()


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [("obstore", "save"), ("obstore", "overwrite"), ("obstore", "delete"), ("gcsfs", "delete")],
)
async def test_a_crash_at_any_request_leaves_the_old_or_the_new(
    sim: Simulator, kind: str, scenario: str
) -> None:
    """From request N on nothing arrives any more, also nothing that would clean up."""
    this = Scenario(scenario)
    outcomes: set[str] = set()
    number, happened = 0, True
    while happened:
        sim.clear()
        async with opened(kind, sim) as store:
            await save(store, "1", "old", 1)
            async with opened(kind, sim) as dying:
                await save(dying, "0", "known", 5)
                applied, first = bool(number % 2), number // 2 + 1
                if applied:
                    sim.faults.append(Fault(number=first, status=403, applied=True))
                sim.faults.append(Fault(number=first + applied, times=FOREVER, status=403))
                with suppress(AsyncCheckpointError):
                    await this.run(dying)
            happened = bool(sim.faults[0].happened)
            sim.faults.clear()
            async with opened(kind, sim) as later:
                assert await later.sweep() == ()
                outcomes.add(await this.check(sim, later))
                await whole(sim, later, "0", 5)
                await save(later, "1", "again", 3, overwrite=True)
                await whole(sim, later, "1", 3)
        number += 1
    print(f"{kind}, {scenario}: {number} points, outcomes {sorted(outcomes)}")
    assert number >= 10 and len(outcomes) == 2


async def test_a_save_that_was_interrupted_before_its_fixed_names_is_read_and_mended(
    sim: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened("gcsfs", sim) as store:
        sim.faults.append(Fault(kind="put_object", key="*/default/small", number=0, status=403))
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            await save(store, "1", "a", 1)
            await save(store, "final", "b", 2)
        assert "committed, but files for other programs" in caplog.text
        assert not {"1/default/small", "1/commit_success.txt"} & set(names(sim))
        await expect(store, "1", 1)
        await expect(store, "final", 2)
        assert await store.sweep() == ()  # may not write: a warning at most
        sim.faults.clear()
    async with opened("gcsfs", sim) as reader:
        await reader.sweep()
        await whole(sim, reader, "1", 1)
        await expect(reader, "final", 2)
        await reader.collect(COLLECT_MIN_S)  # of all names, not only of steps
        await whole(sim, reader, "final", 2)
        assert {"1/commit_success.txt", "final/commit_success.txt"} <= set(names(sim))
        sim.reset()
        await reader.sweep()
        assert not [r for r in writes(sim) if r.kind.startswith("put")]


async def test_sweeping_looks_at_the_newest_steps_only(sim: Simulator) -> None:
    async with opened("obstore", sim, policy=UNRACED) as store:
        for step in (1, 2, 9, 10, 11):
            await save(store, str(step), f"a{step}", step)
            sim.delete("bucket", f"{ROOT}/{step}/default/small")
    async with opened("obstore", sim, policy=UNRACED) as later:
        sim.reset()
        await later.sweep()
        assert len(sim.requests) <= 1 + 3 * 8
        assert {f"{step}/default/small" for step in (9, 10, 11)} == {
            key for key in names(sim) if key.endswith("small")
        }
