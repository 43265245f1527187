"""Manifests: the configuration of a database and the location of the root of its newest version.

Body: uuid (16 bytes), manifest kind varint (0 single, 1 numbered), max inline value bytes varint,
max decoded node bytes varint, version-tree arity log2 `uint8`, compression varint (1: followed by
the level as `int32`), data-file table, inline versions by column, older version-tree nodes by
column.

A manifest of kind 1 ends after the configuration. The versions of its database are in manifests of
kind 0 in the same directory, one per generation (`numbered_name`); the highest is the newest.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import numpy as np

from asyncckpt.format.damage import unsupported
from asyncckpt.format.ocdbt.datafiles import (
    MISSING,
    DataFile,
    Location,
    decode_data_files,
    encode_data_files,
    used_file,
)
from asyncckpt.format.ocdbt.wire import MANIFEST_MAGIC, Reader, encode_varint, frame, unframe
from asyncckpt.options import INLINE_NBYTES, NODE_NBYTES

MAX_MANIFEST_NBYTES = 1 << 26
"""Far more than 2^arity_log2 versions take."""

# A manifest may decompress to `_FREE_NBYTES` plus `_MAX_RATIO` times its size.
_FREE_NBYTES = 1 << 22
_MAX_RATIO = 64

_MAX_FILES = 1 << 17
"""Most data files of a manifest: those of 2^16 roots and of version nodes."""

VERSION_TREE_ARITY_LOG2 = 4
"""Default of TensorStore."""

MANIFEST_NAME = "manifest.ocdbt"
"""Name of the manifest in the directory of a database."""

NUMBERED = re.compile(r"manifest\.[0-9a-f]{16}")
"""File names of the manifests of one generation, which sort by generation."""


@dataclass(frozen=True, slots=True)
class Version:
    """Version of the database; `root` is None if it has no keys."""

    generation: int
    root: Location | None
    root_height: int
    num_keys: int
    tree_nbytes: int
    indirect_value_nbytes: int
    commit_time_ns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Decoded manifest, without the configuration; the last of `versions` is the newest.

    A `numbered` one has no versions: each generation has its own manifest.
    """

    uuid: bytes
    versions: tuple[Version, ...] = ()
    numbered: bool = False

    @property
    def latest(self) -> Version | None:
        """Newest version, or None if the database was never written to."""
        return self.versions[-1] if self.versions else None


def numbered_name(generation: int) -> str:
    """Return the file name of the manifest of one generation."""
    return f"manifest.{generation:016x}"


def encode_manifest(uuid: bytes, version: Version) -> bytes:
    """Encode the manifest of a database with only this version."""
    root = version.root or Location("", MISSING, MISSING)
    manifest = frame(
        MANIFEST_MAGIC,
        uuid,
        b"\0",  # kind: single
        encode_varint(INLINE_NBYTES),
        encode_varint(NODE_NBYTES),
        bytes((VERSION_TREE_ARITY_LOG2, 0)),  # not compressed
        encode_data_files([root.file]),
        b"\1",  # one version
        encode_varint(version.generation),
        bytes((version.root_height, 0)),  # in the first data file
        encode_varint(root.offset),
        encode_varint(root.nbytes),
        encode_varint(version.num_keys),
        encode_varint(version.tree_nbytes),
        encode_varint(version.indirect_value_nbytes),
        version.commit_time_ns.to_bytes(8, "little"),
        b"\0",  # no nodes of older versions
    )
    return bytes(manifest)


def decode_manifest(data: bytes, *, file: str) -> Manifest:
    """Decode a manifest; `file` is named in errors.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnsupportedFormatError: it is intact, but of an unsupported kind or version.
    """
    reader = unframe(
        data,
        MANIFEST_MAGIC,
        what="the OCDBT manifest",
        file=file,
        offset=0,
        max_nbytes=min(MAX_MANIFEST_NBYTES, _FREE_NBYTES + _MAX_RATIO * len(data)),
    )
    uuid = reader.take(16)
    kind = reader.varint()
    reader.varint(below=1 << 32)  # most bytes of an inline value
    reader.varint(below=1 << 63)  # most bytes of a decoded node
    arity = reader.uint8()
    if not 1 <= arity <= 16:
        raise reader.fault(f"the version tree's arity 2^{arity} is not between 2 and 2^16")
    method = reader.varint()
    if method > 1:
        raise reader.fault(f"compression method {method} is unknown")
    if method:
        reader.take(4)  # its level
    if kind == 1:
        reader.end()
        return Manifest(uuid, numbered=True)
    if kind:
        raise unsupported(
            f"the OCDBT database has manifests of kind {kind}, this release reads kinds 0 and 1; "
            "read it with a newer release",
            file=file,
            expected=(0, 1),
            found=kind,
        )
    files = decode_data_files(reader, max_files=_MAX_FILES)
    versions = _decode_versions(reader, files)
    _check_version_nodes(reader, files)
    reader.end()
    return Manifest(uuid, versions)


def _generations(reader: Reader, what: str, *, nbytes_each: int) -> list[int]:
    generations: list[int] = reader.varints(reader.count(what, nbytes_each=nbytes_each)).tolist()
    if generations and (
        generations[0] < 1 or any(b <= a for a, b in itertools.pairwise(generations))
    ):
        raise reader.fault(f"the generations {generations[:4]} … do not increase from 1")
    return generations


def _decode_versions(reader: Reader, files: tuple[DataFile, ...]) -> tuple[Version, ...]:
    generations = _generations(reader, "versions", nbytes_each=16)
    count = len(generations)
    heights = list(reader.take(count))
    file_indices = reader.varints(count).tolist()
    offsets = [reader.varint() for _ in range(count)]
    lengths = [reader.varint() for _ in range(count)]
    statistics = [reader.varints(count).tolist() for _ in range(3)]
    times = np.frombuffer(reader.take(8 * count), "<u8").tolist()
    places = zip(file_indices, offsets, lengths, strict=True)
    versions = []
    for generation, place, height, (keys, tree, indirect), time in zip(
        generations, places, heights, zip(*statistics, strict=True), times, strict=True
    ):
        root = None if place[1:] == (MISSING, MISSING) else _location(reader, files, *place)
        if root is None and (height or keys or tree or indirect):
            raise reader.fault(f"version {generation} has no root, but a height or keys")
        versions.append(Version(generation, root, height, keys, tree, indirect, time))
    return tuple(versions)


def _check_version_nodes(reader: Reader, files: tuple[DataFile, ...]) -> None:
    """Check the locations of older versions, which are not read."""
    count = len(_generations(reader, "version nodes", nbytes_each=14))
    *places, _ = (reader.varints(count).tolist() for _ in range(4))
    reader.take(9 * count)  # times and heights
    for place in zip(*places, strict=True):
        _location(reader, files, *place)


def _location(
    reader: Reader, files: tuple[DataFile, ...], index: int, offset: int, nbytes: int
) -> Location:
    row = used_file(reader, files, index)
    if offset + nbytes >= 1 << 63:
        raise reader.fault(f"the range {offset}+{nbytes} of {row.path} ends past 2^63")
    return Location(row.path, offset, nbytes, row.base_path)
