"""OCDBT databases made byte by byte, right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from asyncckpt.format.crc import crc32c
from asyncckpt.format.ocdbt.btree import encode_tree
from asyncckpt.format.ocdbt.datafiles import Location, encode_data_files
from asyncckpt.format.ocdbt.keys import prepare_keys
from asyncckpt.format.ocdbt.manifest import Manifest, Version
from asyncckpt.format.ocdbt.wire import NODE_MAGIC, encode_varint, frame
from tests.format.manifests import encode_manifest
from tests.format.values import value_columns

UUID = bytes(range(16))
VALUES = np.arange(1, 5, dtype="<f4").tobytes()
DATA = "d/data"
NODES = "d/nodes"


def write_database(
    directory: Path,
    entries: Mapping[bytes, bytes],
    *,
    max_inline: int = 1024,
    max_node: int = 1 << 20,
    nodes: str = NODES,
) -> None:
    """A database of one version that holds these entries; long values stand in `d/data`."""
    keys = sorted(entries)
    inline: list[bytes | None] = []
    extents = []
    data = b""
    for key in keys:
        value = entries[key]
        inline.append(value if len(value) <= max_inline else None)
        extents.append((-1, 0, 0) if inline[-1] is not None else (0, len(data), len(value)))
        data += b"" if inline[-1] is not None else value
    file, offset, nbytes = np.array(extents, np.int64).reshape(-1, 3).T
    tree = encode_tree(
        prepare_keys(keys),
        value_columns(inline, file, offset, nbytes),
        data_files=[DATA],
        node_file=nodes,
        node_offset=0,
        max_decoded_node_nbytes=max_node,
        commit_time_ns=1,
    )
    write(directory / DATA, data)
    write(directory / nodes, b"".join(tree.blocks))
    write(directory / "manifest.ocdbt", encode_manifest(Manifest(UUID, versions=(tree.version,))))


def write(path: Path, data: bytes) -> None:
    """The file holds these bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_root(
    directory: Path, root: bytes, *, height: int = 0, num_keys: int = 1, file: str = NODES
) -> None:
    """A database whose root node is `root`, whatever that says."""
    version = Version(1, Location(file, 0, len(root)), height, num_keys, len(root), 0, 1)
    write(directory / NODES, root)
    write(directory / "manifest.ocdbt", encode_manifest(Manifest(UUID, versions=(version,))))


def column(values: Sequence[int]) -> bytes:
    """Varints."""
    return b"".join(map(encode_varint, values))


def leaf(
    keys: Sequence[bytes], places: Sequence[tuple[int, int, int]], files: Sequence[str] = (DATA,)
) -> bytes:
    """The body of a leaf whose values stand at (file, offset, length)."""
    return b"".join(
        (
            b"\0",
            encode_data_files(files),
            encode_varint(len(keys)),
            column([0] * (len(keys) - 1)),
            column([len(key) for key in keys]),
            *keys,
            column([nbytes for _, _, nbytes in places]),
            b"\1" * len(keys),
            column([file for file, _, _ in places]),
            column([offset for _, offset, _ in places]),
        )
    )


def interior(
    height: int,
    keys: Sequence[bytes],
    places: Sequence[tuple[int, int]],
    *,
    num_keys: int = 1,
    file: str = NODES,
) -> bytes:
    """The body of a node whose children stand at (offset, length) of one file."""
    count = len(keys)
    return b"".join(
        (
            bytes([height]),
            encode_data_files([file]),
            encode_varint(count),
            column([0] * (count - 1)),
            column([len(key) for key in keys]),
            column([0] * count),
            *keys,
            column([0] * count),
            column([offset for offset, _ in places]),
            column([nbytes for _, nbytes in places]),
            column([num_keys] * count),
            column([0] * count),
            column([0] * count),
        )
    )


def node(body: bytes) -> bytes:
    """The frame around a body."""
    return bytes(frame(NODE_MAGIC, body))


def packed(magic: int, stored: bytes, *, version: int = 0, method: int = 1) -> bytes:
    """A frame whose body is compressed, or claims to be."""
    size = 4 + 8 + 1 + 1 + len(stored) + 4
    data = magic.to_bytes(4, "big") + size.to_bytes(8, "little") + bytes([version, method]) + stored
    return data + crc32c(data).to_bytes(4, "little")


def zstd(data: bytes) -> bytes:
    """Compressed as far as it goes."""
    return zstandard.ZstdCompressor(level=19).compress(data)


# --------------------------------------------------------------------------------------- documents


LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}
ZSTD = {"name": "zstd", "configuration": {"level": 1}}

ZARR3: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0.0,
    "codecs": [LITTLE],
}
ZARR2: dict[str, Any] = {
    "zarr_format": 2,
    "shape": [4],
    "chunks": [4],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": None,
    "filters": None,
    "order": "C",
}


def grid(*chunk_shape: int) -> dict[str, Any]:
    """A chunk grid of version 3."""
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}


def zarr3(**changes: Any) -> bytes:
    """A document of version 3 for four float32 in one chunk, but for these members."""
    return json.dumps({k: v for k, v in (ZARR3 | changes).items() if v is not ...}).encode()


def zarr2(**changes: Any) -> bytes:
    """The same of version 2."""
    return json.dumps({k: v for k, v in (ZARR2 | changes).items() if v is not ...}).encode()


def sharding(chunk_shape: Sequence[int], codecs: Sequence[Any] = (LITTLE,), **more: Any) -> Any:
    """The codec of shards, with an index that has a checksum."""
    configuration = {
        "chunk_shape": list(chunk_shape),
        "codecs": list(codecs),
        "index_codecs": [LITTLE, CRC],
        **more,
    }
    return {"name": "sharding_indexed", "configuration": configuration}


def shard_index(*entries: tuple[int, int]) -> bytes:
    """The index of a shard, with its checksum."""
    data = b"".join(n.to_bytes(8, "little") for entry in entries for n in entry)
    return data + crc32c(data).to_bytes(4, "little")
