"""OCDBT databases that TensorStore wrote, with zarr arrays of every kind in them."""

from __future__ import annotations

import math
import shutil
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import asyncckpt
from asyncckpt.checkpoint.foreign.ocdbt import open_ocdbt
from asyncckpt.checkpoint.metadata import OpenCheckpoint
from asyncckpt.flow.threads import Workers
from asyncckpt.ports import StoreCapabilities
from asyncckpt.spec import DTYPES
from asyncckpt.stores.local.files import LocalFiles
from tests.checkpoint.foreign.databases import (
    CRC,
    LITTLE,
    VALUES,
    ZSTD,
    grid,
    sharding,
    write,
    write_database,
    zarr2,
    zarr3,
)

BIG = {"name": "bytes", "configuration": {"endian": "big"}}
GZIP = {"name": "gzip", "configuration": {"level": 3}}
BLOSC = {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5}}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [2, 0, 1]}}
SHAPE, CHUNK = (9, 7, 10), (4, 6, 4)


@pytest.fixture(autouse=True)
def unverified() -> Iterator[None]:
    """That hardly anything in them has a checksum is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not be verified")
        yield


def kvstore(path: Path, name: str = "", **more: Any) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": f"file://{path}/", "path": name, **more}


def save(
    path: Path, name: str, value: np.ndarray[Any, Any], driver: str = "zarr3", **metadata: Any
) -> None:
    """The array stands in the database; `metadata` is what TensorStore is told of it."""
    chunks = metadata.pop("chunks", None)
    kvconfig = metadata.pop("kvstore", {})
    array = ts.open(
        {"driver": driver, "kvstore": kvstore(path, name, **kvconfig), "metadata": metadata},
        create=True,
        dtype=ts.dtype(value.dtype),
        shape=value.shape,
        chunk_layout=None if chunks is None else ts.ChunkLayout(write_chunk_shape=chunks),
    ).result()
    array.write(value).result()


def random(dtype: str, shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    kind = DTYPES[dtype]
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("int2", "int4", "float4_e2m1fn"):
        return rng.integers(-2, 2, shape).astype(kind)
    return np.frombuffer(rng.bytes(math.prod(shape) * kind.itemsize), kind).reshape(shape)


def assert_same(found: Any, saved: dict[str, np.ndarray[Any, Any]]) -> None:
    assert sorted(found) == sorted(saved)
    for name, value in saved.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


# ------------------------------------------------------------------------------------------ arrays


CODECS = {
    "plain": [LITTLE],
    "big-endian": [BIG],
    "zstd": [LITTLE, ZSTD],
    "crc32c": [LITTLE, CRC],
    "all": [TRANSPOSE, BIG, GZIP, CRC],
    "checksum-inside": [LITTLE, CRC, ZSTD],
    "blosc": [LITTLE, BLOSC],
    "blosc-crc32c": [TRANSPOSE, BIG, BLOSC, CRC],
    "twice": [LITTLE, GZIP, ZSTD],
    "shards": [sharding([2, 3, 4], [LITTLE])],
    "shards-packed": [sharding([4, 2, 1], [BIG, ZSTD, CRC], index_location="start")],
    "shards-blosc": [sharding([2, 3, 2], [TRANSPOSE, LITTLE, BLOSC])],
    "shards-big-index": [sharding([2, 3, 2], [LITTLE, GZIP], index_codecs=[BIG])],
    "shards-in-shards": [sharding([4, 3, 4], [sharding([2, 3, 1], [LITTLE, ZSTD])])],
    "transposed-shards": [TRANSPOSE, sharding([2, 2, 3], [LITTLE, CRC])],
}


VERIFIED = {
    "crc32c", "all", "checksum-inside", "blosc-crc32c", "shards-packed", "transposed-shards",
}  # fmt: skip
"""Chains with a checksum of every chunk, also where it is inside."""


@pytest.mark.parametrize("name", CODECS)
async def test_every_codec_is_decoded(name: str, tmp_path: Path) -> None:
    saved = {dtype: random(dtype) for dtype in ("float32", "complex64", "uint8", "bfloat16")}
    for dtype, value in saved.items():
        save(tmp_path / "c", f"{dtype}/", value, codecs=CODECS[name], chunks=CHUNK)
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)
    report = await asyncckpt.verify(tmp_path / "c")
    assert report.damages == ()
    assert sorted(report.unverified) == ([] if name in VERIFIED else sorted(saved))


COMPRESSORS = [
    None, {"id": "zstd", "level": 2}, {"id": "zlib", "level": 3}, {"id": "gzip", "level": 3},
    {"id": "bz2", "level": 3}, {"id": "blosc"},
]  # fmt: skip


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: c["id"] if c else "none")
async def test_every_compressor_of_version_2_is_decoded(
    compressor: dict[str, Any] | None, tmp_path: Path
) -> None:
    saved = {}
    for order in "CF":
        for separator in "./":
            name = f"{order}{separator.replace('/', '-')}"
            saved[name] = random("float32" if order == "C" else "complex128")
            save(
                tmp_path / "c", f"{name}/", saved[name], "zarr", chunks=CHUNK,
                compressor=compressor, order=order, dimension_separator=separator,
            )  # fmt: skip
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)


async def test_every_dtype_has_its_bits(tmp_path: Path) -> None:
    saved = {}
    for dtype in DTYPES:
        for driver in ("zarr", "zarr3"):
            saved[f"{dtype}-{driver}"] = random(dtype)
            save(tmp_path / "c", f"{dtype}-{driver}/", random(dtype), driver, chunks=CHUNK)
    for name in ("i2", "u4", "f8", "c16"):
        saved[f"big-{name}"] = random(np.dtype(name).name)
        save(tmp_path / "c", f"big-{name}/", saved[f"big-{name}"], "zarr", dtype=f">{name}")
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)


async def test_every_encoding_of_keys_is_found(tmp_path: Path) -> None:
    saved = {}
    for kind in ("default", "v2"):
        for separator in (".", "/"):
            for shape in ((), (5,), SHAPE, (0, 3)):
                name = f"{kind}{separator.replace('/', '-')}{len(shape)}"
                saved[name] = random("int16", shape)
                encoding = {"name": kind, "configuration": {"separator": separator}}
                save(
                    tmp_path / "c", f"{name}/", saved[name],
                    chunk_key_encoding=encoding, chunks=[max(1, n // 2) for n in shape],
                )  # fmt: skip
    saved["rank-0"] = random("int16", ())
    save(tmp_path / "c", "rank-0/", saved["rank-0"], "zarr")
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)


async def test_equal_arrays_of_both_versions_keep_their_drivers(tmp_path: Path) -> None:
    """Those with the keys of version 2 differ only in their metadata documents."""
    encoding = {"name": "v2", "configuration": {"separator": "."}}
    value = random("int16")
    plain = {"dtype": "<i2", "compressor": None, "fill_value": 0}
    save(tmp_path / "c", "a/", value, "zarr", chunks=CHUNK, **plain)
    save(tmp_path / "c", "b/", value, chunk_key_encoding=encoding, codecs=[LITTLE], chunks=CHUNK)
    info = await asyncckpt.inspect(tmp_path / "c")
    for name, driver in (("a", "zarr"), ("b", "zarr3")):
        spec = info[name].tensorstore_spec()
        assert spec["driver"] == driver
        assert np.array_equal(ts.open(spec).result().read().result(), value)


async def test_chunks_that_are_not_stored_are_the_fill_value(tmp_path: Path) -> None:
    saved = {
        "zero": np.zeros((9, 9), np.float32),
        "nan": np.full((9, 9), np.nan, np.float32),
        "seven": np.full(9, 7, np.int8),
        "shards": np.full((9, 9), -1, np.int32),
    }
    saved["nan"][0, 0] = 1
    saved["shards"][8, 8] = 5
    save(tmp_path / "c", "zero/", saved["zero"], "zarr", fill_value=0, dtype="<f4", chunks=[4, 4])
    save(tmp_path / "c", "nan/", saved["nan"], fill_value="NaN", data_type="float32", chunks=[4, 4])
    save(tmp_path / "c", "seven/", saved["seven"], "zarr", fill_value=7, dtype="|i1", chunks=[2])
    save(
        tmp_path / "c", "shards/", saved["shards"],
        fill_value=-1, data_type="int32", chunks=[8, 8], codecs=[sharding([2, 4])],
    )  # fmt: skip
    keys = ts.KvStore.open(kvstore(tmp_path / "c")).result().list().result()
    assert sorted(keys) == [
        b"nan/c/0/0", b"nan/zarr.json", b"seven/.zarray", b"shards/c/1/1", b"shards/zarr.json",
        b"zero/.zarray",
    ]  # fmt: skip
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)


async def test_a_shard_that_stores_few_of_its_chunks_is_read(tmp_path: Path) -> None:
    saved = {"w": np.zeros(1 << 26, np.uint8)}
    saved["w"][5] = 1
    save(
        tmp_path / "c", "w/", saved["w"],
        fill_value=0, data_type="uint8", chunks=[1 << 26], codecs=[sharding([1 << 24], [ZSTD])],
    )  # fmt: skip
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)


# ------------------------------------------------------------------------------------------- trees


async def test_names_are_nested_at_their_slashes(tmp_path: Path) -> None:
    value = np.arange(3)
    for name in ("a/b/c/", "a/b.d/", "a/0/", "e/"):
        save(tmp_path / "c", name, value)
    ts.KvStore.open(kvstore(tmp_path / "c")).result().write(
        "a/zarr.json", '{"zarr_format": 3, "node_type": "group"}'
    ).result()
    found = await asyncckpt.restore(tmp_path / "c")
    assert list(found) == ["a", "e"]
    assert sorted(found["a"]) == ["0", "b", "b.d"]
    np.testing.assert_array_equal(found["a"]["b"]["c"], value)


async def test_an_array_at_the_root_is_the_tree(tmp_path: Path) -> None:
    for driver in ("zarr", "zarr3"):
        save(tmp_path / driver, "", np.arange(9.0), driver)
        np.testing.assert_array_equal(await asyncckpt.restore(tmp_path / driver), np.arange(9.0))


async def test_an_array_whose_name_is_empty_has_no_name_beside_the_root(tmp_path: Path) -> None:
    arrays = {b"/zarr.json": zarr3(), b"/c/0": VALUES}
    write_database(tmp_path / "one", arrays)
    np.testing.assert_array_equal(await asyncckpt.restore(tmp_path / "one"), [1, 2, 3, 4])
    write_database(tmp_path / "two", {**arrays, b"zarr.json": zarr3(), b"c/0": VALUES})
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="an array has no place in a tree"):
        await asyncckpt.restore(tmp_path / "two")


# --------------------------------------------------------------------------------------- databases


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"config": {"compression": None}},
    "compressed": {"config": {"compression": {"id": "zstd", "level": 9}}},
    "numbered": {"config": {"manifest_kind": "numbered"}},
    "numbered-plain": {"config": {"manifest_kind": "numbered", "compression": None}},
    "nothing-inline": {"config": {"max_inline_value_bytes": 0}},
    "all-inline": {"config": {"max_inline_value_bytes": 1 << 20}},
    "small-nodes": {"config": {"max_decoded_node_bytes": 400}},
    "small-nodes-plain": {"config": {"max_decoded_node_bytes": 400, "compression": None}},
    "small-files": {"target_data_file_size": 2000},
    "versions": {"config": {"version_tree_arity_log2": 1}},
    "prefixes": {
        "value_data_prefix": "values/", "btree_node_data_prefix": "nodes/",
        "version_tree_node_data_prefix": "versions/",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
async def test_the_newest_version_of_a_database_is_read(name: str, tmp_path: Path) -> None:
    """Every array is a version of its own, and the first is then overwritten and resized."""
    options = {"kvstore": CONFIGS[name]}
    saved = {f"a{n}": random("float64", (n + 1, 30)) for n in range(12)}
    for key, value in saved.items():
        save(tmp_path / "c", f"{key}/", np.zeros_like(value), chunks=[3, 30], **options)
        array = ts.open(
            {"driver": "zarr3", "kvstore": kvstore(tmp_path / "c", f"{key}/", **CONFIGS[name])}
        ).result()
        array.write(value).result()
    store = ts.KvStore.open(kvstore(tmp_path / "c", **CONFIGS[name])).result()
    store.delete_range(ts.KvStore.KeyRange("a3/", "a30")).result()
    del saved["a3"]
    numbered = list((tmp_path / "c").glob("manifest.0*"))
    assert bool(numbered) == name.startswith("numbered")
    assert_same(await asyncckpt.restore(tmp_path / "c"), saved)
    assert (await asyncckpt.verify(tmp_path / "c")).damages == ()


# ------------------------------------------------------------------------------------------- parts


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(2, "test")
    try:
        yield pool
    finally:
        pool.shutdown()


async def opened(path: Path, workers: Workers) -> OpenCheckpoint:
    return await open_ocdbt(LocalFiles(str(path), workers, StoreCapabilities()))


async def test_only_the_shards_of_wanted_arrays_are_read(tmp_path: Path, workers: Workers) -> None:
    """A shard is read and decoded whole, and those of other arrays are not looked at."""
    value = random("float32", (16, 64))
    codecs = [sharding([2, 16], [LITTLE, ZSTD])]
    save(tmp_path / "c", "w/", value, codecs=codecs, chunks=[8, 32])
    save(tmp_path / "c", "v/", value, codecs=codecs, chunks=[8, 32])
    checkpoint = await opened(tmp_path / "c", workers)
    w = checkpoint.arrays.name.index("w")
    storage, first = checkpoint.storage(w), checkpoint.first_rows[w]
    assert storage.chunk_shape == (8, 32) and storage.grid.counts == (2, 2)
    extents = await checkpoint.read_extents(checkpoint, [w])
    others = np.delete(np.arange(len(extents)), np.arange(first, first + 4))
    assert (extents.file[others] == -1).all()
    target = {"w": np.zeros_like(value)}
    report = await asyncckpt.restore_into(tmp_path / "c", target, include="w")
    assert target["w"].tobytes() == value.tobytes()
    stored_nbytes = extents.nbytes[first : first + 4].sum()
    # TensorStore may write nodes between the shards, which are read along; those of `v` take more.
    assert stored_nbytes <= report.read_nbytes < 2 * stored_nbytes


async def test_only_the_chunks_of_wanted_arrays_are_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / "c", f"{name}/", random("float32", (100, 100)), codecs=[LITTLE, CRC])
    target = {"a": np.zeros((100, 100), np.float32)}
    report = await asyncckpt.restore_into(tmp_path / "c", target, include="a")
    assert report.read_nbytes == 100 * 100 * 4 + 4
    assert report.unverified == ()


# ----------------------------------------------------------------------------------- implied bytes


async def test_a_huge_array_without_chunks_is_shown_and_refused_without_a_target(
    tmp_path: Path,
) -> None:
    """What is not stored takes at most 64 MiB and four times the files, unless a target asks."""
    huge = zarr3(shape=[1 << 40], chunk_grid={"name": "regular", "configuration": {
        "chunk_shape": [1 << 36]}})  # fmt: skip
    write_database(
        tmp_path / "c", {b"w/zarr.json": huge, b"v/zarr.json": zarr3(), b"v/c/0": VALUES}
    )
    tracemalloc.start()
    try:
        info = await asyncckpt.inspect(tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert {leaf.path: leaf.shape for leaf in info.leaves} == {"v": (4,), "w": (1 << 40,)}
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="pass like= with arrays of these"):
        await asyncckpt.restore(tmp_path / "c")
    found = await asyncckpt.restore(tmp_path / "c", include="v")
    np.testing.assert_array_equal(found["v"], np.array([1, 2, 3, 4], np.float32))


async def test_an_array_of_zeros_that_a_target_asks_for_is_restored(tmp_path: Path) -> None:
    shape = [(80 << 20) // 4]
    document = zarr3(shape=shape, chunk_grid=grid(*shape))
    write_database(tmp_path / "c", {b"w/zarr.json": document})
    with pytest.raises(asyncckpt.UnsupportedFormatError, match="implied fill values"):
        await asyncckpt.restore(tmp_path / "c")
    target = {"w": np.ones(shape, np.float32)}
    await asyncckpt.restore_into(tmp_path / "c", target)
    assert not target["w"].any()


# ------------------------------------------------------------------------------------- ours, links


async def test_our_own_database_without_its_record_is_never_restored(tmp_path: Path) -> None:
    path = tmp_path / "c"
    await asyncckpt.save(path, {"w": np.arange(9)})
    with pytest.raises(asyncckpt.CheckpointNotFoundError, match="name that directory") as caught:
        await asyncckpt.restore(path / "default")
    assert f"where {path} has the record" in str(caught.value)
    (path / "checkpoint.json").unlink()
    for place in (path, path / "default"):
        with pytest.raises(asyncckpt.CheckpointNotFoundError, match="was never committed"):
            await asyncckpt.restore(place)


@pytest.mark.parametrize("name", ["d/data", "d/nodes", "d"])
async def test_files_that_are_links_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    entries = {b"w/zarr.json": zarr3(), b"w/c/0": VALUES}
    write_database(path, entries, max_inline=0)
    moved = (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(moved)
    with pytest.raises(asyncckpt.AsyncCheckpointError, match="symbolic link"):
        await asyncckpt.restore(path)


async def test_a_document_longer_than_a_megabyte_is_not_read(tmp_path: Path) -> None:
    document = zarr2(attributes="x" * (1 << 20))
    write_database(tmp_path / "c", {b"w/.zarray": document})
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="expected at most 1048576"):
        await asyncckpt.inspect(tmp_path / "c")


async def test_attributes_and_unknown_members_of_version_2_are_passed_over(tmp_path: Path) -> None:
    write_database(
        tmp_path / "c", {b"w/.zarray": zarr2(extra=1), b"w/0": VALUES, b"w/.zattrs": b"{}"}
    )
    found = await asyncckpt.restore(tmp_path / "c")
    np.testing.assert_array_equal(found["w"], np.array([1, 2, 3, 4], np.float32))


async def test_a_changed_byte_is_a_tree_or_an_error(tmp_path: Path) -> None:
    """Nodes and manifests have checksums; what they hold may say anything."""
    path = tmp_path / "c"
    entries = {
        b"w/zarr.json": zarr3(codecs=[sharding([2], [LITTLE, CRC])]),
        b"w/c/0": bytes(60),
        b"v/.zarray": zarr2(compressor={"id": "blosc"}),
        b"v/0": bytes(40),
    }
    rng = np.random.default_rng(1)
    for _ in range(80):
        key = list(entries)[int(rng.integers(4))]
        bad = bytearray(entries[key])
        bad[int(rng.integers(len(bad)))] = int(rng.integers(256))
        shutil.rmtree(path, ignore_errors=True)
        write_database(path, {**entries, key: bytes(bad)}, max_inline=int(rng.integers(2)) * 1024)
        try:
            await asyncckpt.restore(path)
        except asyncckpt.AsyncCheckpointError as error:
            assert str(path) in str(error)


async def test_a_file_that_is_cut_off_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_database(path, {b"w/zarr.json": zarr3(), b"w/c/0": VALUES}, max_inline=0)
    write(path / "d" / "data", b"")
    with pytest.raises(asyncckpt.CorruptCheckpointError, match="d/data ends at byte 0"):
        await asyncckpt.restore(path)
