"""Manifests of any configuration and number of versions, as other writers make them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.format.ocdbt.datafiles import MISSING, Location, encode_data_files
from asyncckpt.format.ocdbt.manifest import Manifest
from asyncckpt.format.ocdbt.wire import MANIFEST_MAGIC, encode_varint, frame


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of a database, by default that of Orbax; `zstd_level` None: not compressed."""

    max_inline_value_bytes: int = 1024
    max_decoded_node_bytes: int = 100_000_000
    version_tree_arity_log2: int = 4
    zstd_level: int | None = None


@dataclass(frozen=True, slots=True)
class VersionNode:
    """Location of a list of older versions."""

    generation: int
    location: Location
    num_generations: int
    commit_time_ns: int
    height: int


DEFAULT = Config()


def encode_manifest(
    manifest: Manifest, config: Config = DEFAULT, nodes: Sequence[VersionNode] = ()
) -> bytes:
    """The bytes of `manifest.ocdbt`, uncompressed and without base paths."""
    if len(manifest.uuid) != 16:
        raise ValueError("the uuid of a database has 16 bytes")
    head = [
        manifest.uuid,
        bytes([manifest.numbered]),
        encode_varint(config.max_inline_value_bytes),
        encode_varint(config.max_decoded_node_bytes),
        bytes([config.version_tree_arity_log2]),
        b"\0" if config.zstd_level is None else b"\1" + struct.pack("<i", config.zstd_level),
    ]
    if manifest.numbered:
        return bytes(frame(MANIFEST_MAGIC, b"".join(head)))
    paths: dict[str, int] = {}

    def place(location: Location | None) -> tuple[bytes, bytes, bytes]:
        path, offset, nbytes = (
            ("", MISSING, MISSING)
            if location is None
            else (location.file, location.offset, location.nbytes)
        )
        index = paths.setdefault(path, len(paths))
        return encode_varint(index), encode_varint(offset), encode_varint(nbytes)

    versions = manifest.versions
    roots = [place(version.root) for version in versions]
    places = [place(node.location) for node in nodes]
    out = [
        *head,
        encode_data_files(list(paths)),
        encode_varint(len(versions)),
        *(encode_varint(v.generation) for v in versions),
        bytes(v.root_height for v in versions),
        *(column[i] for i in range(3) for column in roots),
        *(encode_varint(v.num_keys) for v in versions),
        *(encode_varint(v.tree_nbytes) for v in versions),
        *(encode_varint(v.indirect_value_nbytes) for v in versions),
        *(v.commit_time_ns.to_bytes(8, "little") for v in versions),
        encode_varint(len(nodes)),
        *(encode_varint(n.generation) for n in nodes),
        *(column[i] for i in range(3) for column in places),
        *(encode_varint(n.num_generations) for n in nodes),
        *(n.commit_time_ns.to_bytes(8, "little") for n in nodes),
        bytes(n.height for n in nodes),
    ]
    return bytes(frame(MANIFEST_MAGIC, b"".join(out)))
