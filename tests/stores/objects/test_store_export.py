"""Plain files on an object store: whole or not there, and nothing foreign is replaced."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import pytest

from asyncckpt.errors import AsyncCheckpointError, CheckpointExistsError, StoreError, UsageError
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import Bytes, ExportingStore
from asyncckpt.stores.objects import export as export_module
from asyncckpt.stores.objects.datafile import ABORT_S
from asyncckpt.stores.objects.export import ObjectExport
from asyncckpt.stores.objects.requests.policy import RequestPolicy
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.checkpoints import identity, pattern, save
from tests.objects import controls
from tests.simulator import Fault, Gate, Simulator
from tests.stores.objects.stores import ROOT, opened

KINDS = ("s3fs", "gcsfs", "obstore")
FILE = "model.safetensors"


def keys(sim: Simulator) -> set[str]:
    found = {key.removeprefix(f"{ROOT}/") for key in sim.stored()}
    return {key for key in found if not key.startswith(".asyncckpt/")}


async def write(export: ObjectExport, path: str, data: Bytes) -> None:
    """The file is sealed; its windows go side by side, as converting makes them."""
    file = await export.create(path, nbytes=data.size, window_nbytes=SLOT_NBYTES)
    async with asyncio.TaskGroup() as group:
        for start in range(0, data.size, SLOT_NBYTES):
            piece = bytearray(data[start : start + SLOT_NBYTES].tobytes())
            group.create_task(file.write(start, piece))
    await file.seal(data.size)


async def export_one(
    store: ObjectStore, data: Bytes, text: str, *, overwrite: bool = False
) -> None:
    export = await store.begin_export(FILE, identity(text), overwrite=overwrite)
    try:
        await write(export, FILE, data)
        await export.publish_files(FILE)
    finally:
        await export.abort()


@pytest.mark.parametrize("kind", KINDS)
async def test_one_file_appears_whole_under_its_own_name(sim: Simulator, kind: str) -> None:
    data, other = pattern(2 * SLOT_NBYTES + 5), pattern(100)
    async with opened(kind, sim) as store:
        assert isinstance(store, ExportingStore)
        export = await store.begin_export(FILE, identity("a"))
        await write(export, FILE, data)
        assert keys(sim) == set()
        await export.publish_files(FILE)
        await export.abort()
        assert sim.get("bucket", f"{ROOT}/{FILE}") == data.tobytes()
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            await export_one(store, other, "b")
        assert sim.get("bucket", f"{ROOT}/{FILE}") == data.tobytes()
        await export_one(store, other, "c", overwrite=True)
        assert sim.get("bucket", f"{ROOT}/{FILE}") == other.tobytes()
    assert keys(sim) == {FILE}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_set_replaces_a_set_and_nothing_else(sim: Simulator, kind: str) -> None:
    data = pattern(SLOT_NBYTES + 5)

    async def export_set(names: tuple[str, ...], *, overwrite: bool) -> None:
        export = await store.begin_export("set", identity(str(names)), overwrite=overwrite)
        try:
            for name in names:
                await write(export, name, data)
            await export.put("model.safetensors.index.json", b"{}")
            await export.publish_files()
        finally:
            await export.abort()

    async with opened(kind, sim) as store:
        sim.put("bucket", f"{ROOT}/set/README", b"a person's")
        with pytest.raises(CheckpointExistsError, match="other than a directory of safetensors"):
            await export_set(("1.safetensors",), overwrite=True)
        sim.put("bucket", f"{ROOT}/set/0.safetensors", b"old")
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            await export_set(("1.safetensors",), overwrite=False)
        await export_set(("1.safetensors", "2.safetensors"), overwrite=True)
        assert keys(sim) == {
            "set/README",
            "set/1.safetensors",
            "set/2.safetensors",
            "set/model.safetensors.index.json",
        }
        await save(store, "set2", "a")
        export = await store.begin_export("set2", identity("b"), overwrite=True)
        await write(export, "1.safetensors", pattern(5))
        with pytest.raises(CheckpointExistsError):
            await export.publish_files()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_long_name_of_a_file_counts_once(sim: Simulator, kind: str) -> None:
    """Its key has 850 bytes, of the 1,024 that the store allows."""
    root, name = "r" * 599, "n" * 238 + ".safetensors"
    data = pattern(100)
    async with opened(kind, sim, root=root) as store:
        export = await store.begin_export(name, identity("a"))
        await write(export, name, data)
        await export.publish_files(name)
    assert sim.get("bucket", f"{root}/{name}") == data.tobytes()


async def test_an_export_that_fails_or_is_aborted_leaves_nothing(sim: Simulator) -> None:
    data = pattern(2 * SLOT_NBYTES)
    async with opened("s3fs", sim) as store:
        sim.faults.append(Fault(kind="put_part", number=0, status=403))
        with pytest.raises((StoreError, ExceptionGroup)):
            await export_one(store, data, "a")
        sim.faults.clear()
        sim.faults.append(Fault(kind="complete_upload", number=0, status=403))
        with pytest.raises(StoreError, match=FILE):
            await export_one(store, data, "b")
        sim.faults.clear()
        assert keys(sim) == set() and not sim.uploads
        export = await store.begin_export(FILE, identity("c"))
        with pytest.raises(UsageError, match="cannot be a file"):
            await export.create("../x", nbytes=1, window_nbytes=SLOT_NBYTES)
        await export.abort()
        with pytest.raises(UsageError, match="has ended"):
            await export.create("x", nbytes=1, window_nbytes=SLOT_NBYTES)


@pytest.mark.parametrize("times", (1, 2))
@pytest.mark.parametrize("kind", ("s3fs", "gcsfs"))
async def test_an_abort_that_is_refused_leaves_no_other_upload_open(
    sim: Simulator, kind: str, times: int
) -> None:
    """It is tried once more after the others."""
    data = pattern(2 * SLOT_NBYTES)
    async with opened(kind, sim) as store:
        export = await store.begin_export("set", identity("a"))
        for name in ("1.safetensors", "2.safetensors", "3.safetensors"):
            await write(export, name, data)
        assert len(sim.uploads) == 3
        first = next(upload.key for upload in sim.uploads)
        fault = Fault(kind="abort_upload", key=first, times=times, status=403)
        sim.faults.append(fault)
        with suppress(StoreError) if times == 1 else pytest.raises(StoreError, match="aborting"):
            await export.abort()
        assert fault.happened == times
        assert [upload.key for upload in sim.uploads] == [first] * (times - 1)
        assert keys(sim) == set()
        sim.clear()


async def test_aborting_an_export_spares_the_upload_of_another_to_the_same_name(
    sim: Simulator,
) -> None:
    data = pattern(2 * SLOT_NBYTES)
    async with opened("s3fs", sim) as first, opened("s3fs", sim) as second:
        export = await first.begin_export(FILE, identity("a"))
        other = await second.begin_export(FILE, identity("b"))
        await write(export, FILE, data)
        await write(other, FILE, pattern(2 * SLOT_NBYTES, 1))
        await other.abort()
        await export.publish_files(FILE)
    assert sim.get("bucket", f"{ROOT}/{FILE}") == data.tobytes()
    assert not sim.uploads


async def test_aborting_an_export_does_not_wait_for_a_store_that_is_silent(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncckpt.stores.objects.requests.sending.SILENT_S", 0.1)
    async with opened("s3fs", sim, policy=RequestPolicy()) as store:
        export = await store.begin_export(FILE, identity("a"))
        await write(export, FILE, pattern(2 * SLOT_NBYTES))
        sim.faults.append(Fault(kind=("abort_upload", "list_uploads"), number=0, hang=True))
        async with asyncio.timeout(ABORT_S / 2):
            with pytest.raises(StoreError, match="the store stopped answering"):
                await export.abort()
        sim.clear()


# --------------------------------------------------------------------------------------- multipart

# Sessions of resumable uploads to Google cannot be listed: one whose id was lost expires there.
PARTS = ("s3fs", "gcsfs")
LOST = (
    ("s3fs", {"kind": "create_upload", "reset": True, "applied": True}),
    *((kind, {"kind": "put_part", "reset": True, "applied": True}) for kind in PARTS),
    *((kind, {"kind": "put_part", "number": 2, "status": 503}) for kind in PARTS),
    *((kind, {"kind": "complete_upload", "reset": True, "applied": True}) for kind in PARTS),
    *((kind, {"kind": "complete_upload", "status": 500}) for kind in PARTS),
)


@pytest.mark.parametrize(("kind", "what"), LOST, ids=str)
async def test_a_multipart_upload_survives_lost_answers_and_leaves_no_other(
    sim: Simulator, kind: str, what: dict[str, Any]
) -> None:
    data = pattern(2 * SLOT_NBYTES + 5)
    fault = Fault(**what)
    async with opened(kind, sim) as store:
        sim.faults.append(fault)
        await export_one(store, data, "a")
        assert sim.get("bucket", f"{ROOT}/{FILE}") == data.tobytes()
    assert fault.happened
    assert not sim.uploads


async def test_an_object_that_has_appeared_is_exported_though_a_lost_upload_stays(
    sim: Simulator, caplog: pytest.LogCaptureFixture
) -> None:
    """The credentials do not allow uploads to be listed."""
    data = pattern(2 * SLOT_NBYTES + 5)
    async with opened("s3fs", sim) as store:
        sim.faults += [
            Fault(kind="create_upload", reset=True, applied=True),
            Fault(kind="list_uploads", number=0, status=403),
        ]
        with caplog.at_level(logging.WARNING, "asyncckpt"):
            await export_one(store, data, "a")
    assert sim.get("bucket", f"{ROOT}/{FILE}") == data.tobytes()
    assert f"{FILE}: the object is complete, but another upload" in caplog.text
    assert len(sim.uploads) == 1
    sim.clear()


@pytest.mark.parametrize(
    ("kind", "at"),
    [("s3fs", "create_upload"), ("s3fs", "put_part"), ("gcsfs", "put_part")],
)
async def test_an_upload_that_was_cancelled_anywhere_is_aborted_for_good(
    sim: Simulator, kind: str, at: str
) -> None:
    """Twice, and also where the id of the upload was lost with the answer."""
    data = pattern(SLOT_NBYTES + 5)
    async with opened(kind, sim) as store:
        export = await store.begin_export(FILE, identity("a"))
        gate = Gate()
        sim.faults.append(Fault(kind=at, applied=True, hang=True, gate=gate))
        task = asyncio.ensure_future(write(export, FILE, data))
        await gate.reached.wait()
        gate.release()
        while not sim.uploads:  # until it took effect
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        aborting = asyncio.ensure_future(export.abort())
        for _ in range(2):
            await asyncio.sleep(0)
            aborting.cancel()
        with suppress(asyncio.CancelledError):
            await aborting
        assert not sim.uploads
        assert keys(sim) == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [100, 2 * SLOT_NBYTES + 5])
async def test_of_two_exports_to_one_name_exactly_one_succeeds(
    sim: Simulator, kind: str, nbytes: int
) -> None:
    """Also where both have looked, and found nothing, before either object appeared."""
    async with opened(kind, sim) as first, opened(kind, sim) as second:
        exports = [
            await first.begin_export(FILE, identity("a")),
            await second.begin_export(FILE, identity("b")),
        ]
        for seed, export in enumerate(exports):
            await write(export, FILE, pattern(nbytes, seed))
            export._replaced = nothing_there  # type: ignore[method-assign]
        results = await asyncio.gather(
            *(export.publish_files(FILE) for export in exports), return_exceptions=True
        )
        errors = [result for result in results if result is not None]
        assert len(errors) == 1 and isinstance(errors[0], CheckpointExistsError)
        winner = results.index(None)
        assert sim.get("bucket", f"{ROOT}/{FILE}") == pattern(nbytes, winner).tobytes()
        assert not sim.uploads


@pytest.mark.parametrize("kind", KINDS)
async def test_of_two_sets_of_different_files_only_one_gets_its_index(
    sim: Simulator, kind: str
) -> None:
    """Also where the first one did not get the answer that says so."""
    index = "model.safetensors.index.json"
    async with opened(kind, sim) as store:
        exports = []
        for number in range(2):
            export = await store.begin_export("set", identity(f"{number}"))
            await write(export, f"{number}.safetensors", pattern(100))
            await export.put(index, b"%d" % number)
            export._replaced = nothing_there  # type: ignore[method-assign]
            exports.append(export)
        lost = Fault(kind="put_object", key=f"*/{index}", reset=True, applied=True)
        sim.faults.append(lost)
        await exports[0].publish_files()
        assert lost.happened
        with pytest.raises(CheckpointExistsError, match="created here meanwhile") as caught:
            await exports[1].publish_files()
        assert caught.value.location == f"{exports[1].location}/{index}"
    assert sim.get("bucket", f"{ROOT}/set/{index}") == b"0"


async def nothing_there(single: bool) -> list[str]:
    return []


@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_completion_whose_answer_was_lost_is_no_defeat(
    sim: Simulator, overwrite: bool
) -> None:
    """The retry finds an object, which is ours: the upload has ended."""
    data = pattern(2 * SLOT_NBYTES)
    async with opened("s3fs", sim) as store:
        sim.faults.append(Fault(kind="complete_upload", reset=True, applied=True))
        await export_one(store, data, "a", overwrite=overwrite)
    assert sim.get("bucket", f"{ROOT}/{FILE}") == data.tobytes()


@pytest.mark.parametrize("kind", PARTS)
async def test_a_completion_that_failed_before_another_export_succeeded_is_a_defeat(
    sim: Simulator, kind: str
) -> None:
    """The retry finds an object, which is the other export's."""
    nbytes, gate = 2 * SLOT_NBYTES + 5, Gate()
    async with opened(kind, sim) as first, opened(kind, sim) as second:
        winner = await first.begin_export(FILE, identity("a"))
        loser = await second.begin_export(FILE, identity("b"))
        await write(winner, FILE, pattern(nbytes, 0))
        await write(loser, FILE, pattern(nbytes, 1))
        sim.faults.append(Fault(kind="complete_upload", status=503, gate=gate))
        losing = asyncio.ensure_future(loser.publish_files(FILE))
        await gate.reached.wait()
        await winner.publish_files(FILE)
        gate.release()
        with pytest.raises(CheckpointExistsError, match="created here meanwhile"):
            await losing
    assert sim.get("bucket", f"{ROOT}/{FILE}") == pattern(nbytes, 0).tobytes()
    assert not sim.uploads


async def test_a_collected_file_is_sent_from_where_it_is(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[object] = []
    async with opened("obstore", sim) as store:
        put = store._requests.create

        async def create(key: str, body: object) -> bool:
            bodies.append(body)
            return await put(key, body)  # type: ignore[arg-type]

        monkeypatch.setattr(store._requests, "create", create)
        export = await store.begin_export(FILE, identity("a"))
        file = await export.create(FILE, nbytes=100, window_nbytes=SLOT_NBYTES)
        await file.write(0, pattern(100))
        await file.seal(100)
        held = file._buffer  # type: ignore[attr-defined]
        await export.publish_files(FILE)
        assert bodies[-1] is held and file._buffer == b""  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_collected_files_of_an_export_are_limited_together(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A file for which no memory is left is sent in parts, by a client that can."""
    monkeypatch.setattr(export_module, "COLLECTED_MAX_NBYTES", 250)
    async with opened(kind, sim) as store:
        export = await store.begin_export("set", identity("a"))
        for name in ("1.safetensors", "2.safetensors"):
            await write(export, name, pattern(100))
        if kind in PARTS:
            await write(export, "3.safetensors", pattern(100, 3))
            assert len(sim.uploads) == 1
            await export.publish_files()
            assert sim.get("bucket", f"{ROOT}/set/3.safetensors") == pattern(100, 3).tobytes()
        else:
            with pytest.raises(UsageError, match="obstore cannot send files in parts") as caught:
                await write(export, "3.safetensors", pattern(100))
            assert (caught.value.expected, caught.value.found) == (250, 300)
            await export.abort()


@pytest.mark.parametrize("kind", PARTS)
async def test_a_file_of_more_parts_than_the_store_takes_is_refused_with_its_limit(
    sim: Simulator, kind: str
) -> None:
    async with opened(kind, sim) as store:
        export = await store.begin_export(FILE, identity("a"))
        limit = store._requests.traits.part_max_count * SLOT_NBYTES
        with pytest.raises(UsageError, match=r"\(max_file_nbytes\)") as caught:
            await export.create(FILE, nbytes=limit + 1, window_nbytes=SLOT_NBYTES)
        assert (caught.value.expected, caught.value.found) == (limit, limit + 1)
        await export.abort()


@pytest.mark.parametrize("forget", [False, True])
async def test_a_refusal_of_any_request_leaves_no_upload(
    sim: Simulator, monkeypatch: pytest.MonkeyPatch, forget: bool
) -> None:
    """Unless the export forgets to abort them, which is noticed."""
    if forget:
        controls.uploads_are_forgotten(monkeypatch)
    data, left, number = pattern(2 * SLOT_NBYTES), 0, 0
    async with opened("s3fs", sim) as store:
        await export_one(store, data, "known")
        happened = True
        while happened:
            number += 1
            sim.clear()
            fault = Fault(number=number, status=403)
            sim.faults.append(fault)
            with suppress(AsyncCheckpointError, ExceptionGroup):
                await export_one(store, data, f"{number}")
            happened = bool(fault.happened)
            sim.faults.clear()
            left += len(sim.uploads)
            assert forget or keys(sim) <= {FILE}
    assert number >= 6 and (left > 0) == forget
