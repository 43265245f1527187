"""Plain files on an object store: whole or not there, and nothing foreign is replaced."""

from __future__ import annotations

import asyncio

import pytest

from asyncckpt.errors import CheckpointExistsError, StoreError, UsageError
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.ports import Bytes, ExportingStore
from asyncckpt.stores.objects.export import ObjectExport
from asyncckpt.stores.objects.store import ObjectStore
from asyncckpt.testing.conformance import identity, pattern, save
from asyncckpt.testing.objectstore import Fault, Simulator
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
        with pytest.raises(CheckpointExistsError, match="no directory of tensors"):
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
            await export.create("../x", nbytes=1)
        await export.abort()
        with pytest.raises(UsageError, match="has ended"):
            await export.create("x", nbytes=1)


@pytest.mark.parametrize("kind", ("s3fs", "gcsfs"))
async def test_an_abort_that_is_refused_leaves_no_other_upload_open(
    sim: Simulator, kind: str
) -> None:
    """Where uploads cannot be listed, that one stays; where they can, it is tried once more."""
    data = pattern(2 * SLOT_NBYTES)
    async with opened(kind, sim) as store:
        export = await store.begin_export("set", identity("a"))
        for name in ("1.safetensors", "2.safetensors", "3.safetensors"):
            await write(export, name, data)
        assert len(sim.uploads) == 3
        first = next(upload.key for upload in sim.uploads)
        sim.faults.append(Fault(kind="abort_upload", number=1, status=403))
        with pytest.raises(StoreError, match="aborting uploads"):
            await export.abort()
        assert sim.faults[0].happened
        left = [upload.key for upload in sim.uploads]
        assert left == ([] if kind == "s3fs" else [first])
        assert keys(sim) == set()
        sim.clear()
