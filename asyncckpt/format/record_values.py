"""Values of a commit record."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt
from asyncckpt.format.ocdbt.manifest import MANIFEST_NAME
from asyncckpt.format.scalars import JsonValue
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.reports import FileInfo
from asyncckpt.spec import ArraySpec, ChunkGrid

MAX_ZSTD_RATIO = 1 << 16
"""zstd expands 4 bytes to at most 128 KiB: a chunk with a larger ratio is hostile."""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """Storage of arrays of one kind; `zstd_level` None means uncompressed."""

    spec: ArraySpec
    chunk_shape: tuple[int, ...]
    zstd_level: int | None = None

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid."""
        return ChunkGrid(self.spec.shape, self.chunk_shape)

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk before compression and without its trailer."""
        return math.prod(self.chunk_shape) * self.spec.itemsize


class Piece(NamedTuple):
    """One of several arrays that store a leaf; `offset` is its place in the leaf."""

    offset: tuple[int, ...]
    array: int


@dataclass(frozen=True, slots=True)
class LeafTable:
    """The leaves in tree order.

    Attributes:
        kind: per leaf, a scalar kind (`SCALAR_KINDS`) or any other word for an array leaf, for
            example ``numpy``, ``jax``, ``torch``.
        value: per leaf, the JSON of `encode_scalar`; None for arrays.
        extra: additional facts, by leaf index.
        pieces: by leaf index, the arrays of leaves that are stored as several or in another order.
    """

    kind: list[str]
    value: list[JsonValue]
    extra: Mapping[int, Mapping[str, JsonValue]] = field(default_factory=dict)
    pieces: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrayTable:
    """The arrays in record order: those of leaves, then scalars that are stored as arrays too.

    Attributes:
        name: name in the OCDBT database, unique.
        spec: index into the specs of the record.
        tied: by index of a tied array, the earlier array whose chunks it shares.
    """

    name: list[str]
    spec: list[int]
    tied: Mapping[int, int] = field(default_factory=dict)

    def own(self) -> npt.NDArray[np.intp]:
        """Return the numbers of the arrays with chunks of their own."""
        own = np.ones(len(self.spec), bool)
        own[list(self.tied)] = False
        return np.flatnonzero(own)


@dataclass(frozen=True, slots=True)
class FixedName(FileInfo):
    """A file whose name all attempts share, and which is therefore written after the record.

    Attributes:
        md5: MD5 of its content in hex, as in an object store's listings.
        object: path of an object of the attempt with the same content; None for the manifest, whose
            content is in the record.
    """

    md5: str
    object: str | None = None

    @classmethod
    def of(cls, path: str, data: bytes, object: str | None = None) -> FixedName:
        """Return the fixed name of a file with this content."""
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return cls(path, len(data), crc32c(data), md5, object)

    def matches(self, data: bytes) -> bool:
        """Return whether `data` has the size and CRC-32C of the content."""
        return len(data) == self.nbytes and crc32c(data) == self.crc32c


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of a commit record that a store needs.

    Attributes:
        save_id: identity of the attempt.
        paths: every file of the checkpoint except the record.
        fixed: files that are written after the record; empty in version 1.
        contents: by path, contents of files that the record contains.
    """

    save_id: str
    paths: frozenset[str] = frozenset()
    fixed: tuple[FixedName, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexExtent:
    """The location of the chunk index.

    Attributes:
        file: index into the files of the record.
        crc32c: CRC-32C of the index without its last 4 bytes, its own CRC.
        data: the index itself if it is small, which saves readers a request; else None.
    """

    file: int
    offset: int
    nbytes: int
    crc32c: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The contents of `checkpoint.json`, which makes the checkpoint exist.

    Attributes:
        save_id: identity of the attempt, lower-case hex.
        step: the step, None for one-shot saves.
        epoch: number of the claim under which it was written.
        writer: index of the process that wrote the record.
        writers: number of processes that wrote data.
        plan_digest: digest of `specs` and `arrays`, lower-case hex.
        created_ns: wall-clock time in ns since the Unix epoch.
        library: name and version of the program.
        tree: JSON of the structure.
        specs: the distinct specs of stored arrays.
        files: every file of the checkpoint except the record; files that are written after the
            record come last.
        manifest: bytes of `manifest.ocdbt`.
        metadata: the user's JSON object.
        metrics: the user's numbers, for retention.
        database: directory of the OCDBT database, one path part.
    """

    save_id: str
    step: int | None
    epoch: int
    writer: int
    writers: int
    plan_digest: str
    created_ns: int
    library: str
    tree: JsonValue
    leaves: LeafTable
    specs: tuple[StoredSpec, ...]
    arrays: ArrayTable
    files: tuple[FileInfo, ...]
    chunk_index: IndexExtent
    manifest: bytes
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    database: str = "default"

    @property
    def fixed(self) -> tuple[FixedName, ...]:
        """The files that are written after the record."""
        return tuple([file for file in self.files if isinstance(file, FixedName)])

    @property
    def manifest_path(self) -> str:
        """Path of the file whose bytes are `manifest`."""
        return f"{self.database}/{MANIFEST_NAME}"

    def validate_index(self, index: ChunkIndex) -> None:
        """Check that the rows, extents and lengths of a chunk index match this record.

        Raises:
            CorruptCheckpointError: a row does not; names the first one.
        """
        file = self.files[self.chunk_index.file].path
        own = self.arrays.own()
        specs = np.array(self.arrays.spec, np.intp)[own]
        facts = [(s.chunk_nbytes, s.grid.chunk_count, s.zstd_level is None) for s in self.specs]
        raw, counts, plain = np.array(facts, np.int64).reshape(-1, 3)[specs].T
        rows = int(counts.sum())
        if len(index) != rows:
            raise corrupt(
                "the chunk index",
                f"it has {len(index)} rows, the record needs {rows}",
                file=file,
                expected=rows,
                found=len(index),
            )
        index.validate(list(map(attrgetter("nbytes"), self.files)), file=file)
        ends, raw, plain = np.cumsum(counts), np.repeat(raw, counts), np.repeat(plain, counts)
        payload = index.nbytes - CRC_NBYTES
        good = np.where(
            plain > 0, payload == raw, raw <= payload.astype(np.float64) * MAX_ZSTD_RATIO
        )
        if not good.all():
            row = int(np.argmin(good))
            array = int(own[np.searchsorted(ends, row, "right")])
            raise corrupt(
                "the chunk index",
                f"row {row}, a chunk of array {self.arrays.name[array]!r}, stores "
                f"{payload[row]} bytes for a chunk of {raw[row]}",
                file=file,
                expected=int(raw[row]),
                found=int(payload[row]),
            )
