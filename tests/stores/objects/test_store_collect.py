"""What is collected on an object store, and what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import UsageError
from asyncckpt.testing.checkpoints import data_path, expect, fill, identity, save
from tests.simulator import Simulator, simulator
from tests.stores.objects.stores import ROOT, opened

WEEK_S = COLLECT_MIN_S


@pytest.fixture
def sim() -> Iterator[Simulator]:
    with simulator(keep_log=False) as sim:
        yield sim


def age(sim: Simulator, seconds: float) -> None:
    """Everything that is there was written so much earlier."""
    objects = sim.buckets["bucket"].objects
    for key, item in list(objects.items()):
        objects[key] = dataclasses.replace(item, modified_s=item.modified_s - seconds)


def keys(sim: Simulator) -> set[str]:
    return {key.removeprefix(f"{ROOT}/") for key in sim.stored()}


FOREIGN = (
    "notes.txt",
    "1/notes.txt",
    "1/default/d/readme",
    "1/default/d/0123456789abcdef0123456789abcdef",  # TensorStore's own name
    "artifacts/3f2a0000000000000000000000000000-0",
    "3/default/manifest.ocdbt",
    "other/deeper/checkpoint.json",
    f"other/deeper/default/d/{identity('of another root')}-0",
    ".asyncckpt/probe-short",
)


@pytest.mark.parametrize("kind", ("s3fs", "gcsfs", "obstore"))
async def test_only_old_leftovers_of_dead_attempts_are_collected(sim: Simulator, kind: str) -> None:
    async with opened(kind, sim) as store:
        await save(store, "1", "committed", 1)
        dead = await store.begin("1", identity("dead"))
        await fill(dead, identity("dead"))
        lone = await store.begin("2", identity("lone"))
        await fill(lone, identity("lone"))
        for key in FOREIGN:
            sim.put("bucket", f"{ROOT}/{key}", b"foreign")
        sim.put("bucket", f"{ROOT}/.asyncckpt/probe-{identity('probe')}", b"1")
        before = keys(sim)
        age(sim, WEEK_S + 3600)
        living = await store.begin("2", identity("living"))
        record = await fill(living, identity("living"))
        young = keys(sim) - before
        expected = {
            f".asyncckpt/probe-{identity('probe')}",
            *(f"{step}/{data_path(identity(text))}" for step, text in ((1, "dead"), (2, "lone"))),
            *(
                f"{step}/.asyncckpt-{identity(text)}-fixed-0"
                for step, text in ((1, "dead"), (2, "lone"))
            ),
        }
        assert set(await store.collect(2 * WEEK_S)) == set()
        assert set(await store.collect(WEEK_S, dry_run=True)) == expected
        assert keys(sim) == before | young
        assert set(await store.collect(WEEK_S)) == expected
        assert keys(sim) == (before | young) - expected
        await living.publish(record)
        await expect(store, "1", 1)
        await expect(store, "2", 0)


async def test_what_a_record_refers_to_is_kept_however_old(sim: Simulator) -> None:
    """Also where the record is damaged, or of a release to come: then nobody knows what is its."""
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        await save(store, "2", "b", 2)
        sim.put("bucket", f"{ROOT}/2/checkpoint.json", b"of another kind")
        age(sim, 10 * WEEK_S)
        before = keys(sim)
        assert await store.collect(WEEK_S) == []
        assert keys(sim) == before
        await expect(store, "1", 1)


async def test_less_than_a_week_is_refused(sim: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("obstore", sim) as store:
        with pytest.raises(UsageError, match="at least a week"):
            await store.collect(WEEK_S - 1)
    monkeypatch.setattr("asyncckpt.arguments.COLLECT_MIN_S", 10.0)
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        await attempt.put("small", b"x")
        await store._context.probes.conditions(versions=False)  # no object of its probe is left
        age(sim, 20.0)
        assert await store.collect(10.0) == [f"1/.asyncckpt-{identity('a')}-fixed-0"]
