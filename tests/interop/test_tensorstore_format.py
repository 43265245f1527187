"""TensorStore reads the databases that `asyncckpt.format` makes, and the other way round."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import zstandard

from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.btree import encode_tree
from asyncckpt.format.ocdbt.datafiles import Location
from asyncckpt.format.ocdbt.keys import prepare_keys
from asyncckpt.format.ocdbt.manifest import (
    Manifest,
    Version,
    decode_manifest,
    numbered_name,
)
from asyncckpt.format.ocdbt.nodes import decode_node
from asyncckpt.format.ocdbt.walk import decode_tree
from asyncckpt.format.zarr import Chain
from asyncckpt.format.zarr3 import chunk_keys, decode_metadata, encode_metadata, metadata_key
from asyncckpt.spec import DTYPES, ArraySpec, ChunkGrid
from tests.format.manifests import Config, encode_manifest
from tests.format.values import value_columns

DATA = "d/data"
NODES = "d/nodes"


def write_database(
    directory: Path,
    entries: dict[bytes, bytes],
    *,
    max_inline: int = 1024,
    max_node: int = 1 << 20,
    node_offset: int = 0,
) -> Version:
    """A database of one generation that holds these entries, written with `open().write` alone."""
    keys = sorted(entries)
    inline: list[bytes | None] = []
    extents: list[tuple[int, int, int]] = []
    data = b""
    for key in keys:
        value = entries[key]
        if len(value) <= max_inline:
            inline.append(value)
            extents.append((-1, 0, 0))
        else:
            inline.append(None)
            extents.append((0, len(data), len(value)))
            data += value
    file, offset, nbytes = np.array(extents, np.int64).reshape(-1, 3).T
    tree = encode_tree(
        prepare_keys(keys),
        value_columns(inline, file, offset, nbytes),
        data_files=[DATA],
        node_file=NODES,
        node_offset=node_offset,
        max_decoded_node_nbytes=max_node,
        commit_time_ns=1_700_000_000_000_000_000,
    )
    (directory / "d").mkdir(parents=True)
    (directory / DATA).write_bytes(data)
    (directory / NODES).write_bytes(bytes(node_offset) + b"".join(tree.blocks))
    manifest = Manifest(bytes(range(16)), (tree.version,))
    (directory / "manifest.ocdbt").write_bytes(encode_manifest(manifest))
    return tree.version


def open_database(directory: Path, **more: Any) -> ts.KvStore:
    spec = {"driver": "ocdbt", "base": f"file://{directory}/", **more}
    return ts.KvStore.open(spec).result()


def open_array(directory: Path, name: str, context: ts.Context) -> Any:
    kvstore = {"driver": "ocdbt", "base": f"file://{directory}/", "path": f"{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True, context=context)


def read_database(directory: Path) -> dict[bytes, bytes]:
    """What our decoder finds in a database on disk."""
    manifest = decode_manifest((directory / "manifest.ocdbt").read_bytes(), file="manifest.ocdbt")
    version = manifest.latest
    assert version is not None

    def fetch(location: Location) -> bytes:
        with (directory / location.file).open("rb") as file:
            file.seek(location.offset)
            return file.read(location.nbytes)

    return {
        key: value if isinstance(value, bytes) else fetch(Location(*value))
        for key, value in decode_tree(version, fetch).items()
    }


def values_of(spec: ArraySpec, seed: int = 0) -> np.ndarray[Any, Any]:
    """Every bit pattern that fits, so that negative numbers, NaNs and infinities are among them."""
    rng = np.random.default_rng(seed)
    if spec.dtype == "bool":
        return rng.integers(0, 2, spec.shape).astype(np.bool_)
    if spec.dtype in ("int2", "int4"):
        most = 2 ** (int(spec.dtype[3:]) - 1)
        return rng.integers(-most, most, spec.shape).astype(DTYPES[spec.dtype])
    if spec.dtype == "float4_e2m1fn":
        return rng.integers(0, 16, spec.shape, np.uint8).view(DTYPES[spec.dtype])
    raw = rng.integers(0, 256, (*spec.shape, spec.itemsize), dtype=np.uint8)
    return np.ascontiguousarray(raw).reshape(-1).view(DTYPES[spec.dtype]).reshape(spec.shape)


def encode_array(
    name: str, values: np.ndarray[Any, Any], spec: ArraySpec, grid: ChunkGrid, level: int | None
) -> dict[bytes, bytes]:
    """Metadata and chunks of one array; cells past the edge are filled with zeros."""
    entries = {metadata_key(name): encode_metadata(spec, grid.chunk_shape, level)}
    for key, cell in zip(chunk_keys(name, grid.counts), grid.cells(), strict=True):
        box = grid.box(cell)
        chunk = np.zeros(grid.chunk_shape, DTYPES[spec.dtype])
        chunk[tuple(slice(n) for n in box.shape)] = values[box.slices()]
        payload = chunk.tobytes()
        if level is not None:
            payload = zstandard.ZstdCompressor(level=level).compress(payload)
        entries[key] = payload + crc32c(payload).to_bytes(4, "little")
    return entries


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((7,), (3,)),
    ((0,), (1,)),
    ((4, 6), (4, 6)),
    ((5, 0), (2, 3)),
    ((3, 4, 5), (2, 4, 3)),
    ((2, 0, 3, 1), (1, 1, 1, 1)),
    ((2, 3, 2, 3), (1, 2, 2, 3)),
    ((2, 1, 3, 2, 2), (2, 1, 2, 1, 2)),
]


@pytest.mark.parametrize("max_inline", [0, 1 << 30], ids=["indirect", "inline"])
def test_tensorstore_reads_every_dtype_rank_and_codec(tmp_path: Path, max_inline: int) -> None:
    entries: dict[bytes, bytes] = {}
    wanted: dict[str, np.ndarray[Any, Any]] = {}
    for dtype, (shape, chunk_shape), level in itertools.product(DTYPES, SHAPES, (None, 1)):
        name = f"{dtype}.{'x'.join(map(str, shape))}.{level}"
        spec = ArraySpec(shape, dtype)
        wanted[name] = values_of(spec, len(wanted))
        grid = ChunkGrid(shape, chunk_shape)
        entries |= encode_array(name, wanted[name], spec, grid, level)
    write_database(tmp_path, entries, max_inline=max_inline, max_node=4000)
    context = ts.Context()
    opened = {name: open_array(tmp_path, name, context) for name in wanted}
    reads = {name: future.result().read() for name, future in opened.items()}
    for name, values in wanted.items():
        found = reads[name].result()
        assert found.shape == values.shape and found.dtype == values.dtype, name
        assert found.tobytes() == values.tobytes(), name
        metadata = decode_metadata(entries[metadata_key(name)], file=name)
        layout = opened[name].result().chunk_layout
        assert (layout.read_chunk.shape or ()) == metadata.chunk_shape
    assert len(wanted) == len(DTYPES) * len(SHAPES) * 2


@pytest.mark.parametrize("level", [None, 3])
def test_tensorstore_finds_one_flipped_bit_in_a_chunk(tmp_path: Path, level: int | None) -> None:
    spec = ArraySpec((4,), "float32")
    entries = encode_array("w", values_of(spec), spec, ChunkGrid((4,), (4,)), level)
    stored = bytearray(entries[b"w/c/0"])
    for row in range(len(stored)):
        bad = bytes(byte ^ (row == i) for i, byte in enumerate(stored))
        directory = tmp_path / str(row)
        write_database(directory, entries | {b"w/c/0": bad})
        array = open_array(directory, "w", ts.Context()).result()
        # With zstd, TensorStore decompresses first and may fail there.
        reason = "Digest mismatch" if level is None else 'Error reading "w/c/0"'
        with pytest.raises(ValueError, match=reason):
            array.read().result()


@pytest.mark.parametrize(
    ("max_node", "height"), [(40, 3), (120, 3), (1000, 1), (1 << 20, 0)], ids=str
)
@pytest.mark.parametrize("node_offset", [0, 8192])
def test_tensorstore_reads_trees_of_any_height(
    tmp_path: Path, max_node: int, height: int, node_offset: int
) -> None:
    rng = np.random.default_rng(1)
    entries = {b"": b"the empty key", b"\xff": b"", b"\0": b"0"}
    for row in range(300):
        key = b"params.layer_%d" % (row % 7) + rng.bytes(int(rng.integers(0, 5))) + b"/c/%d" % row
        entries[key] = rng.bytes(int(rng.integers(0, 80)))
    version = write_database(
        tmp_path, entries, max_inline=40, max_node=max_node, node_offset=node_offset
    )
    assert version.root_height >= height
    store = open_database(tmp_path)
    assert sorted(store.list().result()) == sorted(entries)
    reads = {key: store.read(key) for key in entries}
    assert {key: read.result().value for key, read in reads.items()} == entries
    for prefix in (b"params.layer_3", b"p", b"zzz"):
        found = store.list(ts.KvStore.KeyRange(prefix, prefix + b"\xff")).result()
        assert sorted(found) == sorted(k for k in entries if k.startswith(prefix))
    assert read_database(tmp_path) == entries


def test_tensorstore_agrees_with_the_statistics_we_write(tmp_path: Path) -> None:
    entries = {b"k%04d" % i: bytes(i) for i in range(400)}
    version = write_database(tmp_path, entries, max_inline=100, max_node=500)
    store = open_database(tmp_path)
    top = ts.ocdbt.dump(store.base).result()["versions"][0]
    assert top["root"]["statistics"] == {
        "num_keys": 400,
        "num_tree_bytes": version.tree_nbytes,
        "num_indirect_value_bytes": sum(range(101, 400)),
    }
    assert version.tree_nbytes == (tmp_path / NODES).stat().st_size
    assert top["root_height"] == version.root_height >= 1


def test_tensorstore_adds_to_a_database_of_ours(tmp_path: Path) -> None:
    """Its reader of interior nodes merges statistics and prefixes of ours into new nodes."""
    entries = {b"key/%04d" % i: b"v%d" % i for i in range(300)}
    write_database(tmp_path, entries, max_node=300)
    store = open_database(tmp_path)
    store.write(b"key/0150/more", b"new").result()
    store.write(b"key/0007", None).result()
    del entries[b"key/0007"]
    entries[b"key/0150/more"] = b"new"
    assert read_database(tmp_path) == entries
    manifest = decode_manifest((tmp_path / "manifest.ocdbt").read_bytes(), file="m")
    assert [version.generation for version in manifest.versions] == [1, 2, 3]
    assert manifest.latest is not None and manifest.latest.num_keys == 300


def test_tensorstore_opens_a_database_of_ours_without_keys(tmp_path: Path) -> None:
    write_database(tmp_path, {})
    assert open_database(tmp_path).list().result() == []
    assert read_database(tmp_path) == {}


# ------------------------------------------------------------------------- what TensorStore writes


@pytest.mark.parametrize("compression", [None, {"id": "zstd", "level": 3}], ids=["plain", "zstd"])
@pytest.mark.parametrize("max_node", [200, 8 << 20])
def test_databases_written_by_tensorstore_are_read(
    tmp_path: Path, compression: object, max_node: int
) -> None:
    config = {
        "compression": compression,
        "max_decoded_node_bytes": max_node,
        "max_inline_value_bytes": 20,
    }
    store = open_database(tmp_path, config=config)
    rng = np.random.default_rng(2)
    entries: dict[bytes, bytes] = {}
    for generation in range(4):
        transaction = ts.Transaction()
        for row in range(generation, 200, 3):
            key = b"params.layer_%d/c/%d" % (row // 10, row)
            entries[key] = rng.bytes(int(rng.integers(0, 60)))
            store.with_transaction(transaction)[key] = entries[key]
        transaction.commit_sync()
    store.delete_range(ts.KvStore.KeyRange(b"params.layer_4", b"params.layer_5")).result()
    entries = {k: v for k, v in entries.items() if not k.startswith(b"params.layer_4/")}
    assert read_database(tmp_path) == entries
    manifest = decode_manifest((tmp_path / "manifest.ocdbt").read_bytes(), file="m")
    assert len(manifest.versions) >= 5
    assert manifest.latest is not None and (manifest.latest.root_height > 0) == (max_node == 200)


def test_many_generations_leave_version_nodes_behind(tmp_path: Path) -> None:
    store = open_database(tmp_path, config={"version_tree_arity_log2": 1})
    for row in range(12):
        store.write(b"k%d" % row, b"v").result()
    manifest = decode_manifest((tmp_path / "manifest.ocdbt").read_bytes(), file="m")
    assert manifest.versions[0].generation > 1  # older ones are in version nodes
    assert decode_manifest(encode_manifest(manifest), file="m") == manifest
    assert len(read_database(tmp_path)) == 12


def test_a_database_emptied_by_tensorstore_has_no_root(tmp_path: Path) -> None:
    store = open_database(tmp_path)
    store.write(b"k", b"v").result()
    store.delete_range(ts.KvStore.KeyRange()).result()
    manifest = decode_manifest((tmp_path / "manifest.ocdbt").read_bytes(), file="m")
    assert manifest.latest is not None and manifest.latest.root is None
    assert read_database(tmp_path) == {}
    assert decode_manifest(encode_manifest(manifest), file="m") == manifest


def test_numbered_manifests_of_tensorstore_are_read_newest_last(tmp_path: Path) -> None:
    store = open_database(tmp_path, config={"manifest_kind": "numbered"})
    for value in (b"old", b"new"):
        store.write(b"k", value).result()
    head = decode_manifest((tmp_path / "manifest.ocdbt").read_bytes(), file="manifest.ocdbt")
    assert head.numbered and not head.versions
    newest = max(path.name for path in tmp_path.glob("manifest.0*"))
    manifest = decode_manifest((tmp_path / newest).read_bytes(), file=newest)
    assert manifest.latest is not None
    assert newest == numbered_name(manifest.latest.generation)


def test_manifests_of_tensorstore_are_encoded_to_the_same_bytes(tmp_path: Path) -> None:
    store = open_database(tmp_path, config={"compression": None})
    store.write(b"k", b"v").result()
    data = (tmp_path / "manifest.ocdbt").read_bytes()
    assert encode_manifest(decode_manifest(data, file="m"), Config(100, 8 << 20)) == data


def test_leaves_of_tensorstore_are_encoded_to_the_same_bytes(tmp_path: Path) -> None:
    store = open_database(tmp_path, config={"compression": None, "max_inline_value_bytes": 5})
    transaction = ts.Transaction()
    for row in range(30):
        store.with_transaction(transaction)[b"a/%d" % row] = b"x" * (row % 9)
    transaction.commit_sync()
    manifest = decode_manifest((tmp_path / "manifest.ocdbt").read_bytes(), file="m")
    assert manifest.latest is not None and manifest.latest.root is not None
    root = manifest.latest.root
    data = (tmp_path / root.file).read_bytes()[root.offset : root.offset + root.nbytes]
    node = decode_node(data, file=root.file, offset=root.offset)
    assert isinstance(node, dict)
    inline = [value if isinstance(value, bytes) else None for value in node.values()]
    places = [("", 0, 0) if isinstance(value, bytes) else value for value in node.values()]
    names = list(dict.fromkeys(place[0] for place in places if place[0]))
    file = np.array([names.index(name) if name else -1 for name, _, _ in places], np.int64)
    offset, nbytes = np.array([place[1:] for place in places], np.int64).T
    tree = encode_tree(
        prepare_keys(list(node)),
        value_columns(inline, file, offset, nbytes),
        data_files=names,
        node_file=root.file,
        node_offset=root.offset,
        max_decoded_node_nbytes=1 << 20,
    )
    assert tree.blocks == [data]


def test_databases_merged_by_orbax_are_read_through_base_paths(tmp_path: Path) -> None:
    tree = {"w": np.arange(3000.0), "b": {"x": np.arange(6, dtype=np.int32).reshape(2, 3)}}
    ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True).save(tmp_path / "item", tree)
    found = read_database(tmp_path / "item")
    store = open_database(tmp_path / "item")
    assert found == {key: bytes(store[key]) for key in store.list().result()}
    assert json.loads(found[b"w/zarr.json"])["shape"] == [3000]
    manifest = decode_manifest((tmp_path / "item" / "manifest.ocdbt").read_bytes(), file="m")
    assert manifest.latest is not None and manifest.latest.root is not None
    root = manifest.latest.root
    data = (tmp_path / "item" / root.file).read_bytes()[root.offset : root.offset + root.nbytes]
    node = decode_node(data, file=root.file, offset=root.offset, base_path=root.base_path)
    values = list(node.values()) if isinstance(node, dict) else []
    assert any(isinstance(v, tuple) and v[0].startswith("ocdbt.process_0/") for v in values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_metadata_written_by_tensorstore_is_read(dtype: str) -> None:
    zstd = {"name": "zstd", "configuration": {"level": 5}}
    endian = {"name": "bytes", "configuration": {"endian": "little"}}
    for codecs, packing in (
        ([endian], ()),
        ([endian, zstd], ("zstd",)),
        ([endian, zstd, {"name": "crc32c"}], ("zstd", "crc32c")),
    ):
        array = ts.open(
            {"driver": "zarr3", "kvstore": "memory://", "metadata": {"codecs": codecs}},
            create=True,
            dtype=dtype,
            shape=[5, 0, 3],
            chunk_layout=ts.ChunkLayout(chunk_shape=[2, 1, 3]),
        ).result()
        decoded = decode_metadata(array.kvstore["zarr.json"], file="zarr.json")
        assert decoded.spec == ArraySpec((5, 0, 3), dtype)
        assert decoded.chunk_shape == (2, 1, 3)
        assert decoded.chain == Chain(packing=packing)
        assert decoded.fill_value == bytes(math.prod((1, decoded.spec.itemsize)))
