"""`verify` of files with many damages: every leaf is named, and looked up once."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncckpt
from asyncckpt.errors import StoreError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.manifest import Manifest
from asyncckpt.format.record import decode_record, encode_record
from asyncckpt.options import SLOT_NBYTES
from asyncckpt.stores.local.failures import store_error
from asyncckpt.stores.local.files import LocalFiles
from asyncckpt.tree import Structure
from asyncckpt.verify import verify as verification
from tests.format.manifests import encode_manifest
from tests.script import Script

LEAVES = 60


def state() -> dict[str, Any]:
    shared = np.arange(3000.0)
    tree: dict[str, Any] = {f"k{i:02}": np.full(1000, i, np.float64) for i in range(LEAVES)}
    return tree | {
        "tied": {"a": shared, "b": shared},
        "pieces": np.ones(3000),
    }


OPTIONS = asyncckpt.SaveOptions(
    leaf_options=lambda path, _: (
        asyncckpt.LeafOptions(chunk_shape=(1000,)) if path == "pieces" else None
    )
)


PATHS = {*(f"k{i:02}" for i in range(LEAVES)), "tied/a", "tied/b", "pieces"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls that make the paths of all leaves, and that look up the leaves of chunks."""
    made: Counter[str] = Counter()
    for owner, name in ((Structure, "paths"), (verification._Verify, "_leaves_of")):
        function = getattr(owner, name)

        def counted(*args: Any, name: str = name, function: Any = function) -> Any:
            made[name] += 1
            return function(*args)

        monkeypatch.setattr(owner, name, counted)
    yield made


def data_file(root: Path) -> Path:
    files = [path for path in root.glob("1/default/d/*") if not path.name.endswith("-index")]
    assert len(files) == 1
    return files[0]


def damage(path: Path, every: int | None = None) -> None:
    """A byte of the file is changed, or one in so many bytes."""
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[100 :: every or data.size] ^= 255
    path.write_bytes(data.tobytes())


async def test_the_paths_of_all_leaves_are_made_once_for_many_damaged_chunks(
    tmp_path: Path, calls: Counter[str]
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, save_options=OPTIONS) as ckpt:
        await ckpt.save(1, state())
        calls.clear()
        assert (await ckpt.verify(1)).ok
        whole = calls["paths"]
        damage(data_file(tmp_path))
        calls.clear()
        report = await ckpt.verify(1)
        assert len(report.damages) == 1
        once = calls["paths"]
        damage(data_file(tmp_path), every=512)
        calls.clear()
        report = await ckpt.verify(1)
    assert {damage.leaf for damage in report.damages} == PATHS
    # Three chunks of one leaf, and one of two tied leaves, which is damage of both.
    assert len(report.damages) == len(PATHS) + 2
    assert calls["paths"] == once <= whole + 1


async def test_every_damage_names_its_leaf_and_place(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, save_options=OPTIONS) as ckpt:
        await ckpt.save(1, state())
        path = data_file(tmp_path)
        damage(path, every=512)
        report = await ckpt.verify(1)
    assert {damage.file for damage in report.damages} == {
        path.relative_to(tmp_path / "1").as_posix()
    }
    assert {damage.reason for damage in report.damages} == {"the chunk's CRC-32C differs"}
    places: dict[int, set[str]] = {}
    for found in report.damages:
        assert found.leaf is not None and found.offset is not None
        places.setdefault(found.offset, set()).add(found.leaf)
    assert {"tied/a", "tied/b"} in places.values()
    assert list(places.values()).count({"pieces"}) == 3
    assert len(places) == LEAVES + 4
    data = path.read_bytes()
    for offset, leaves in places.items():
        for leaf in leaves & {f"k{i:02}" for i in range(LEAVES)}:
            stored = np.frombuffer(data, np.float64, 1000, offset)
            assert (stored == float(leaf[1:])).sum() > 500


@pytest.mark.parametrize("change", ["truncated", "longer"])
async def test_damage_before_the_place_where_reading_ends_is_reported(
    tmp_path: Path, change: str
) -> None:
    names, size = ("a", "b", "c"), SLOT_NBYTES // 8
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {name: np.ones(size) for name in names})
        path = data_file(tmp_path)
        with path.open("r+b") as file:
            file.seek(SLOT_NBYTES // 2)
            file.write(b"damage")
            file.truncate(2 * SLOT_NBYTES if change == "truncated" else path.stat().st_size + 1)
        report = await ckpt.verify(1)
    reasons = {found.leaf: found.reason for found in report.damages}
    assert reasons.pop("a") == "the chunk's CRC-32C differs"
    assert set(reasons) == ({"b", "c"} if change == "truncated" else {None})


async def test_leaves_before_the_end_of_a_truncated_file_are_not_damaged(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {name: np.ones(SLOT_NBYTES // 32) for name in ("a", "b", "c")})
        os.truncate(data_file(tmp_path), SLOT_NBYTES // 2)
        report = await ckpt.verify(1)
        await ckpt.restore(1, include="a")
    assert [found.leaf for found in report.damages] == ["b", "c"]
    assert {found.offset for found in report.damages} == {SLOT_NBYTES // 2}


async def test_leaves_around_what_a_disk_has_lost_are_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, read_into = tuple("abcdefgh"), LocalFiles.read_into

    async def second_window_fails(
        files: LocalFiles, path: str, offset: int, *arguments: Any, **how: Any
    ) -> None:
        if offset == SLOT_NBYTES:
            raise failed(errno.EIO)
        await read_into(files, path, offset, *arguments, **how)

    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, {name: np.ones(SLOT_NBYTES // 16) for name in names})
        with monkeypatch.context() as patched:
            patched.setattr(LocalFiles, "read_into", second_window_fails)
            report = await ckpt.verify(1)
    lost = [found.leaf for found in report.damages]
    assert {"c", "d"} <= {*lost} <= {"b", "c", "d"} and len({*lost}) == len(lost)
    assert {found.offset for found in report.damages} == {SLOT_NBYTES}


async def test_leaves_behind_more_damages_than_are_told_are_not_looked_for(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "DAMAGES_MAX", 5)
    async with asyncckpt.Checkpointer(tmp_path, save_options=OPTIONS) as ckpt:
        await ckpt.save(1, state())
        damage(data_file(tmp_path), every=512)
        calls.clear()
        report = await ckpt.verify(1)
    assert len(report.damages) == 5 and not report.ok
    assert calls["_leaves_of"] <= 6


async def test_all_leaves_of_a_lost_file_are_named_once(tmp_path: Path) -> None:
    async with asyncckpt.Checkpointer(tmp_path, save_options=OPTIONS) as ckpt:
        await ckpt.save(1, state())
        data_file(tmp_path).unlink()
        report = await ckpt.verify(1)
    assert sorted(str(damage.leaf) for damage in report.damages) == sorted(PATHS)


@pytest.mark.parametrize("linked", ["default", "default/d"])
async def test_all_leaves_behind_a_link_are_named_once(tmp_path: Path, linked: str) -> None:
    async with asyncckpt.Checkpointer(tmp_path, save_options=OPTIONS) as ckpt:
        await ckpt.save(1, state())
        (tmp_path / "1" / linked).rename(tmp_path / "elsewhere")
        (tmp_path / "1" / linked).symlink_to(tmp_path / "elsewhere")
        report = await ckpt.verify(1)
    leaves = [damage.leaf for damage in report.damages if damage.leaf is not None]
    assert sorted(leaves) == sorted(PATHS)


async def test_chunks_of_a_tree_that_cannot_be_read_belong_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncckpt.Checkpointer(tmp_path, save_options=OPTIONS) as ckpt:
        await ckpt.save(1, state())
        damage(data_file(tmp_path), every=512)

        def malformed(tree: object) -> Structure:
            raise ValueError("no tree")

        monkeypatch.setattr(Structure, "from_json", malformed)
        report = await ckpt.verify(1)
    assert not report.ok
    assert {found.leaf for found in report.damages} == {None}


def failed(number: int) -> StoreError:
    return store_error("opening", "/run/1/file", OSError(number, os.strerror(number)))


@pytest.mark.parametrize("kind", ["own", "safetensors"])
async def test_what_keeps_the_reader_from_reading_is_no_damage(tmp_path: Path, kind: str) -> None:
    """Rights, limits and a busy store say nothing about the bytes; a failing disk does."""
    if kind == "own":
        await asyncckpt.save(tmp_path / "1", {"a": np.ones(1000)})
    else:
        await asyncckpt.save(tmp_path / "saved", {"a": np.ones(1000)})
        await asyncckpt.convert(tmp_path / "saved", tmp_path / "1" / "a.safetensors")
    async with asyncckpt.Checkpointer(tmp_path) as ckpt:
        script = Script(ckpt)
        assert (await ckpt.verify(1)).ok
        reads = script.count("read_into")

        def fail(number: int) -> None:
            """The last file cannot be read; before that, the header of a safetensors file can."""
            script.store.script.clear()
            for nth in (reads, reads + 1):
                script.fail("read_into", failed(number), nth)

        for number in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM, errno.ETIMEDOUT):
            fail(number)
            with pytest.raises(StoreError, match=r"/run/1/file: opening failed"):
                await ckpt.verify(1)
        fail(errno.EIO)
        (damage,) = (await ckpt.verify(1)).damages
        assert "EIO" in damage.reason


@pytest.mark.parametrize("numbered", [True, False])
async def test_a_manifest_without_versions_is_a_damage(tmp_path: Path, numbered: bool) -> None:
    await asyncckpt.save(tmp_path / "1", {"w": np.arange(3)})
    path = tmp_path / "1" / "checkpoint.json"
    record = decode_record(path.read_bytes(), location="")
    manifest = encode_manifest(Manifest(bytes(16), numbered=numbered))
    files = [
        dataclasses.replace(file, nbytes=len(manifest), crc32c=crc32c(manifest))
        if file.path == record.manifest_path
        else file
        for file in record.files
    ]
    (tmp_path / "1" / record.manifest_path).write_bytes(manifest)
    path.write_bytes(
        encode_record(dataclasses.replace(record, manifest=manifest, files=tuple(files)))
    )
    (found,) = (await asyncckpt.verify(tmp_path / "1")).damages
    assert found.reason == "manifest.ocdbt has no version of the database"
