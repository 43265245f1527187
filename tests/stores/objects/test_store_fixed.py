"""Fixed names: what says that they are the record's, and what an interrupted deletion leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from asyncckpt.arguments import COLLECT_MIN_S
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.format.record_values import FixedName, Outline
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.objects.clients.client import Listed, RequestError
from asyncckpt.stores.objects.context import HEAD_NBYTES
from asyncckpt.stores.objects.repair import _wrong
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import delete, expect, fill, identity, put, save
from tests.simulator import Fault, Simulator
from tests.stores.objects.stores import KINDS, ROOT, UNRACED, age, names, opened, whole, writes

# --------------------------------------------------------------------------------- comparison

RIGHT, OTHER, SOURCE = b"small 1", b"small 2", ".asyncckpt-x-fixed-0"
FIXED = FixedName.of("default/small", RIGHT, SOURCE)


def entry(data: bytes, modified_s: float, checksum: str | None = None) -> Listed:
    return Listed(
        "",
        len(data),
        False,
        modified_s,
        FixedName.of("", data).md5 if checksum is None else checksum,
    )


@pytest.mark.parametrize(
    ("found", "source", "right"),
    [
        (entry(RIGHT, 5.0), entry(RIGHT, 5.0), True),  # by checksum, whatever the clock says
        (entry(OTHER, 15.0), entry(RIGHT, 5.0), False),
        (entry(OTHER, 15.0), None, True),  # no checksum here is an MD5: by size and time
        (entry(RIGHT, 15.0, "random"), entry(RIGHT, 5.0, "another"), True),
        (entry(RIGHT, 5.0, "random"), entry(RIGHT, 5.0, "another"), False),
        (entry(RIGHT, 15.0, ""), entry(RIGHT, 5.0, ""), True),
        (entry(b"x", 15.0, ""), entry(RIGHT, 5.0, ""), False),
        (None, entry(RIGHT, 5.0), False),
    ],
)
def test_a_fixed_name_is_compared_by_its_checksum_else_by_size_and_time(
    found: Listed | None, source: Listed | None, right: bool
) -> None:
    listed = {FIXED.path: found, SOURCE: source, RECORD_NAME: entry(b"", 10.0)}
    here = {path: one for path, one in listed.items() if one is not None}
    outline = Outline("x", fixed=(FIXED,))
    assert list(_wrong(outline, here)) == ([] if right else [FIXED])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_overwrite_whose_fixed_names_failed_keeps_the_old_bytes_and_is_repaired(
    sim: Simulator, kind: str
) -> None:
    """Old and new content have one size. Until the repair, other programs read the old ones."""
    async with opened(kind, sim) as store:
        await save(store, "1", "old", 1)
        old = [key for key in names(sim) if identity("old") in key]
        sim.faults.append(Fault(kind="put_object", key="*/default/small", number=0, status=403))
        await save(store, "1", "new", 2, overwrite=True)
        sim.faults.clear()
        assert sim.get("bucket", f"{ROOT}/1/default/small") == b"small 1"
        assert set(old) <= set(names(sim))
        await store.sweep()
        await whole(sim, store, "1", 2)
        sim.reset()
        await store.sweep()
        assert not [r for r in writes(sim) if r.kind.startswith("put")]


async def test_looking_for_what_is_missing_downloads_no_contents(sim: Simulator) -> None:
    async with opened("obstore", sim, policy=UNRACED) as store:
        attempt = await store.begin("1", identity("a"))
        await fill(attempt, identity("a"), 1)
        large = {"default/small": b"small 1", "default/_METADATA": bytes(60_000)}
        await attempt.publish(await put(attempt, identity("a"), large, 1))
        await store.settled()
        sim.put("bucket", f"{ROOT}/1/default/_METADATA", b"x" * (60_000))
    async with opened("obstore", sim, policy=UNRACED) as later:
        sim.reset()
        await later.sweep()
        reads = [r for r in sim.requests if r.kind == "get_object" and "_METADATA" in r.key]
        assert reads == []
        assert sim.get("bucket", f"{ROOT}/1/default/_METADATA") == bytes(60_000)
        sim.reset()
        await later.sweep()
        moved = [r for r in sim.requests if r.kind != "list_objects"]
        assert [(r.kind, r.key) for r in moved] == [("get_object", f"{ROOT}/1/checkpoint.json")]
        assert moved[0].nbytes <= HEAD_NBYTES


async def test_a_record_with_a_long_list_is_read_whole(sim: Simulator) -> None:
    small = {f"default/{number:03}": b"%d" % number for number in range(60)}
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("a"))
        await attempt.publish(await put(attempt, identity("a"), small))
        await store.settled()
        sim.delete("bucket", f"{ROOT}/1/default/007")
        await store.sweep()
        assert sim.get("bucket", f"{ROOT}/1/default/007") == b"7"


# --------------------------------------------------------------------------- interrupted deletions


def refuse(
    monkeypatch: pytest.MonkeyPatch, store: ObjectStore, concerns: Callable[[str], bool]
) -> None:
    """Deletions of such keys are refused."""
    requests = store._requests
    delete, delete_version = requests.delete, requests.delete_version

    async def refusing(keys: Sequence[str]) -> None:
        if any(map(concerns, keys)):
            raise RequestError("forbidden", "by the test", status=403)
        await delete(keys)

    async def refusing_version(key: str, version: str) -> None:
        await refusing([key] if concerns(key) else [])
        await delete_version(key, version)

    monkeypatch.setattr(requests, "delete", refusing)
    monkeypatch.setattr(requests, "delete_version", refusing_version)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deletion_that_keeps_the_record_is_repaired_for_other_programs(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async with opened(kind, sim) as store:
        await save(store, "1", "a", 1)
        with monkeypatch.context() as patch:
            refuse(patch, store, lambda key: key.endswith("checkpoint.json"))
            with pytest.raises(AsyncCheckpointError, match="deleting failed"):
                await delete(store, "1")
        assert "1/default/small" not in names(sim)
        await expect(store, "1", 1)
        await store.sweep()
        await whole(sim, store, "1", 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_left_of_a_deletion_is_removed_by_gc(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After the record, everything that is left carries the save id."""
    async with opened(kind, sim) as store:
        await save(store, "1", "a", 1)
        sim.put("bucket", f"{ROOT}/1/notes.txt", b"a person's")
        with monkeypatch.context() as patch:
            refuse(patch, store, lambda key: identity("a") in key)
            with pytest.raises(AsyncCheckpointError, match="bytes of a deleted checkpoint"):
                await delete(store, "1")
        left = set(names(sim)) - {"1/notes.txt"}
        assert left and all(identity("a") in key for key in left)
        assert await store.collect(COLLECT_MIN_S) == []  # too young
        age(sim)
        assert await store.collect(COLLECT_MIN_S, dry_run=True) == sorted(left)
        assert await store.collect(COLLECT_MIN_S) == sorted(left)
        assert names(sim) == ["1/notes.txt"]


async def test_fixed_names_of_another_program_are_never_removed_by_gc(sim: Simulator) -> None:
    async with opened("obstore", sim) as store:
        attempt = await store.begin("1", identity("dead"))
        await fill(attempt, identity("dead"), 1)
        sim.put("bucket", f"{ROOT}/1/default/small", b"small 1")
        await store._context.probes.conditions(versions=False)  # no object of its probe is left
        age(sim)
        found = await store.collect(COLLECT_MIN_S)
        assert found and all(identity("dead") in key for key in found)
        assert names(sim) == ["1/default/small"]


async def test_the_second_name_of_a_raced_upload_is_removed_by_gc(sim: Simulator) -> None:
    """It carries the save id of a living checkpoint, whose record does not list it."""
    async with opened("obstore", sim) as store:
        await save(store, "1", "a", 1)
        orphan = f"1/default/d/{identity('a')}-data.r1"
        sim.put("bucket", f"{ROOT}/{orphan}", b"landed late")
        age(sim)
        assert await store.collect(COLLECT_MIN_S) == [orphan]
        await whole(sim, store, "1", 1)
