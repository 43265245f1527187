"""Values of a commit record, and what follows from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from asyncckpt.format.chunks import ChunkIndex
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt
from asyncckpt.format.ocdbt.manifest import MANIFEST_NAME
from asyncckpt.format.scalars import SCALAR_KINDS, JsonValue
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.spec import ArraySpec, ChunkGrid

RECORD_VERSION = 2

MAX_ZSTD_RATIO = 1 << 16
"""zstd expands 4 bytes to at most 128 KiB; a chunk that claims more is hostile."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """How arrays of one kind are stored; `zstd_level` None is uncompressed."""

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


@dataclass(frozen=True, slots=True)
class Piece:
    """One array of a leaf that is stored as several: it starts at `offset` of the leaf."""

    offset: tuple[int, ...]
    array: int


@dataclass(frozen=True, slots=True)
class LeafTable:
    """The leaves in tree order.

    Attributes:
        kind: per leaf a scalar kind (`SCALAR_KINDS`) or any other word for an array leaf, for
            example ``numpy``, ``jax``, ``torch``.
        value: per leaf the JSON of `encode_scalar`, None for arrays.
        extra: facts beside the value, by leaf index.
        pieces: by leaf index, the arrays of leaves that are stored as several or in another order.
    """

    kind: list[str]
    value: list[JsonValue]
    extra: Mapping[int, Mapping[str, JsonValue]] = field(default_factory=dict)
    pieces: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArrayTable:
    """The arrays in record order: first those of leaves, then scalars stored as arrays too.

    Attributes:
        name: name in the OCDBT database, unique.
        spec: index into the specs of the record.
        tied: arrays that share all chunks of an earlier array, by array index.
    """

    name: list[str]
    spec: list[int]
    tied: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint, by its path relative to the record."""

    path: str
    nbytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class FixedName:
    """A file whose name all attempts share, so that it is written after the record.

    Attributes:
        path: its name, relative to the record.
        nbytes: size of its content.
        crc32c: CRC-32C of its content.
        md5: MD5 of its content in hex, to compare with the checksums in an object store's listings.
        object: path of an object of the attempt with the same content; None where the record holds
            the content itself, as it does that of the manifest.
    """

    path: str
    nbytes: int
    crc32c: int
    md5: str
    object: str | None = None

    @classmethod
    def of(cls, path: str, data: bytes, object: str | None = None) -> FixedName:
        """Describe a content."""
        return cls(path, len(data), crc32c(data), md5_of(data), object)

    def matches(self, data: bytes) -> bool:
        """Return whether `data` is the content."""
        return len(data) == self.nbytes and crc32c(data) == self.crc32c


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of a commit record that a store needs.

    Attributes:
        save_id: identity of the attempt.
        paths: every file of the checkpoint except the record.
        fixed: names that were written after the record; empty in version 1.
        contents: by path, contents of files that the record holds itself.
    """

    save_id: str
    paths: frozenset[str] = frozenset()
    fixed: tuple[FixedName, ...] = ()
    contents: Mapping[str, bytes] = field(default_factory=dict)


def md5_of(data: bytes) -> str:
    """Return the MD5 of `data` in hex, which S3 and Google Cloud Storage list for an object."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class IndexExtent:
    """The place of the chunk index, and the CRC-32C of its bytes without the CRC that ends it.

    Attributes:
        file: index into the files of the record.
        offset: first byte in that file.
        nbytes: length.
        crc32c: CRC-32C of the index without its last 4 bytes.
        data: the index itself, where it is small, so that readers need not fetch it; else None.
    """

    file: int
    offset: int
    nbytes: int
    crc32c: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The contents of `checkpoint.json`: what makes the checkpoint exist.

    Attributes:
        save_id: identity of the attempt, lower-case hex.
        step: the step, None for one-shot saves.
        epoch: the claim under which it was written.
        writer: index of the process that wrote the record.
        writers: number of processes that wrote data.
        plan_digest: digest of the plan all writers agreed on, lower-case hex.
        created_ns: wall-clock time in ns since the Unix epoch.
        library: name and version of the program.
        tree: the structure, opaque here.
        leaves: the leaves in tree order.
        specs: the distinct ways in which arrays are stored.
        arrays: the arrays in record order.
        files: every file of the checkpoint except the record; those of `fixed` come last.
        chunk_index: where the chunk index is.
        manifest: bytes of `manifest.ocdbt`.
        metadata: the user's JSON object.
        metrics: the user's numbers, for retention.
        database: directory of the OCDBT database, one path part.
        fixed: files that were written after the record, where a store wants that.
        version: format version.
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
    files: tuple[FileEntry, ...]
    chunk_index: IndexExtent
    manifest: bytes
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    database: str = "default"
    fixed: tuple[FixedName, ...] = ()
    version: int = RECORD_VERSION

    @property
    def manifest_path(self) -> str:
        """Path of the file whose bytes are `manifest`."""
        return f"{self.database}/{MANIFEST_NAME}"

    def leaf_arrays(self) -> list[tuple[Piece, ...]]:
        """Return the arrays of every leaf, none for scalars.

        A leaf with `pieces` owns those arrays. Of the others, the k-th array leaf owns the k-th
        array that no piece names, as one piece at offset zero. Arrays behind all of these are
        scalars once more, for readers of the database that do not know the record.
        """
        pieces = self.leaves.pieces
        taken = {piece.array for owned in pieces.values() for piece in owned}
        free = iter([a for a in range(len(self.arrays.name)) if a not in taken])
        origins = [(0,) * len(stored.spec.shape) for stored in self.specs]
        spec = self.arrays.spec
        owners: list[tuple[Piece, ...]] = []
        for leaf, kind in enumerate(self.leaves.kind):
            if kind in SCALAR_KINDS:
                owners.append(())
            elif leaf in pieces:
                owners.append(pieces[leaf])
            else:
                array = next(free)
                owners.append((Piece(origins[spec[array]], array),))
        return owners

    def row_ranges(self) -> tuple[I64, I64]:
        """Return the first row in the chunk index and the chunk count of each array.

        Tied arrays have those of their source.
        """
        per_spec = np.array([stored.grid.chunk_count for stored in self.specs], np.int64)
        counts = per_spec[np.array(self.arrays.spec, np.intp)] if self.specs else per_spec
        tied = np.array(sorted(self.arrays.tied), np.intp)
        own = counts.copy()
        own[tied] = 0
        starts = np.cumsum(own) - own
        starts[tied] = starts[[self.arrays.tied[array] for array in tied.tolist()]]
        return starts, counts

    def validate_index(self, index: ChunkIndex) -> None:
        """Check that the rows, extents and lengths of a chunk index fit this record.

        Raises:
            CorruptCheckpointError: names the first row that does not.
        """
        file = self.files[self.chunk_index.file].path
        own = [a for a in range(len(self.arrays.name)) if a not in self.arrays.tied]
        _, counts = self.row_ranges()
        counts = counts[own]
        rows = int(counts.sum())
        if len(index) != rows:
            raise corrupt(
                "the chunk index",
                f"it has {len(index)} rows, the record needs {rows}",
                file=file,
                expected=rows,
                found=len(index),
            )
        index.validate([entry.nbytes for entry in self.files], file=file)
        if not rows:
            return
        specs = np.array(self.arrays.spec, np.intp)[own]
        raw = np.array([stored.chunk_nbytes for stored in self.specs], np.int64)[specs]
        plain = np.array([stored.zstd_level is None for stored in self.specs])[specs]
        raw, plain = np.repeat(raw, counts), np.repeat(plain, counts)
        payload = index.nbytes - CRC_NBYTES
        good = np.where(plain, payload == raw, raw <= payload.astype(np.float64) * MAX_ZSTD_RATIO)
        if not good.all():
            row = int(np.argmin(good))
            array = own[int(np.searchsorted(np.cumsum(counts), row, "right"))]
            raise corrupt(
                "the chunk index",
                f"row {row}, a chunk of array {self.arrays.name[array]!r}, stores "
                f"{payload[row]} bytes for a chunk of {raw[row]}",
                file=file,
                expected=int(raw[row]),
                found=int(payload[row]),
            )
