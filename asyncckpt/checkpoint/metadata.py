"""A checkpoint opened for reading: its metadata and the places of its chunks.

`open_checkpoint` opens asyncckpt's own. The modules of `checkpoint/foreign/` make the same
`OpenCheckpoint` from foreign checkpoints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ResourceError,
    UnsupportedFormatError,
)
from asyncckpt.flow.buffers import allocating
from asyncckpt.flow.threads import Workers
from asyncckpt.format.chunks import ChunkIndex, decode_chunk_index
from asyncckpt.format.codecs import RAW, ZSTD, Codec
from asyncckpt.format.crc import crc32c
from asyncckpt.format.damage import corrupt
from asyncckpt.format.record import RECORD_NAME, decode_record
from asyncckpt.format.record_values import ArrayTable, CommitRecord, IndexExtent, LeafTable, Piece
from asyncckpt.format.scalars import SCALAR_KINDS, JsonValue
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import MAX_RECORD_NBYTES, MIB
from asyncckpt.planning.overlap import BoxIndex
from asyncckpt.planning.restore import StoredArrays
from asyncckpt.planning.table import Column
from asyncckpt.ports import Bytes, CheckpointFiles
from asyncckpt.reports import FileInfo, nbytes_text
from asyncckpt.spec import ArraySpec, Box, ChunkGrid
from asyncckpt.tree import Structure

IMPLIED_NBYTES = 64 * MIB
"""Memory for fill values that a foreign checkpoint does not store, beyond four times the size of
its files. Memory of a target does not count."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How arrays of one kind are stored.

    Attributes:
        spec: shape and dtype.
        chunk_shape: elements per chunk and dimension; chunks that reach past the array are stored
            at full size.
        codec: decoder of stored chunks.
        fill: bytes of one element of a chunk that is not stored; empty for zeros.
        driver: TensorStore's driver for the array.
        chunk_nbytes: size of a decoded chunk.
    """

    spec: ArraySpec
    chunk_shape: tuple[int, ...]
    codec: Codec
    fill: bytes = b""
    driver: str = "zarr3"
    grid: ChunkGrid = field(init=False)
    chunk_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        # Computed once, because every chunk that is read needs them.
        object.__setattr__(self, "grid", ChunkGrid(self.spec.shape, self.chunk_shape))
        nbytes = math.prod(self.chunk_shape) * self.spec.itemsize
        object.__setattr__(self, "chunk_nbytes", nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Extent of every chunk, one row per chunk: arrays in order, the cells of each in C order.

    Attributes:
        file: index into `OpenCheckpoint.stored_files`; -1 for rows without an extent.
        offset: first byte in the file.
        nbytes: length of the stored chunk, trailer included.
        crc32c: CRC-32C of each chunk without its trailer, stored apart from the chunk; or None.
        values: stored bytes of rows without an extent, trailer included; a row with neither was
            never stored and consists of the fill value.
        origin: for extents in streams that processes exchange, those in the store, for errors.
    """

    file: Column
    offset: Column
    nbytes: Column
    crc32c: npt.NDArray[np.uint32] | None = None
    values: Mapping[int, bytes] = field(default_factory=dict)
    origin: Extents | None = None

    def __len__(self) -> int:
        return len(self.file)


ReadExtents = Callable[["OpenCheckpoint", Sequence[int] | None], Awaitable[Extents]]
"""Maps the checkpoint and the indices of wanted arrays (None for all) to the extents of all chunks,
each inside its file; rows of other arrays may be -1."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenCheckpoint:
    """One checkpoint's metadata, decoded and checked.

    Attributes:
        format: `asyncckpt`, `orbax`, `ocdbt`, `safetensors` or `dcp`.
        tree: its containers, as JSON of the record or decoded.
        leaves: its leaves in tree order.
        arrays: its arrays; `arrays.spec` indexes `storages`.
        storages: the distinct ways in which arrays are stored.
        stored_files: files that hold chunks or are listed by the record.
        metadata: the user's JSON.
        metrics: the user's numbers.
        save_id: identity of the save; empty for foreign checkpoints.
        created_ns: time of the commit, nanoseconds since 1970; 0 if unknown.
        library: name and version of the program that wrote it.
        database: directory of its OCDBT database.
        record: its commit record; None for foreign checkpoints.
        notes: remarks for the user on how it was read.
        first_rows: first chunk row of every array; tied arrays share their rows.
        stored: its arrays for the restore planner.
    """

    files: CheckpointFiles
    format: str
    tree: JsonValue | Structure
    leaves: LeafTable
    arrays: ArrayTable
    storages: tuple[Storage, ...]
    stored_files: Sequence[FileInfo]
    read_extents: ReadExtents
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    save_id: str = ""
    created_ns: int = 0
    library: str = ""
    database: str = ""
    record: CommitRecord | None = None
    notes: tuple[str, ...] = ()
    first_rows: tuple[int, ...] = field(init=False)
    row_count: int = field(init=False)
    stored: StoredArrays = field(init=False)

    def __post_init__(self) -> None:
        kind = np.array(self.arrays.spec, np.int64)
        counts = np.array([storage.grid.chunk_count for storage in self.storages], np.int64)[kind]
        tied = list(self.arrays.tied)
        counts[tied] = 0
        first_row = np.cumsum(counts) - counts
        first_row[tied] = first_row[list(self.arrays.tied.values())]
        kinds = [(s.grid, s.spec.itemsize, s.codec.decode is not None) for s in self.storages]
        object.__setattr__(self, "first_rows", tuple(first_row.tolist()))
        object.__setattr__(self, "row_count", int(counts.sum()))
        object.__setattr__(self, "stored", StoredArrays(kinds, kind, first_row))

    @property
    def location(self) -> str:
        """Path or URL of the checkpoint."""
        return self.files.location

    def storage(self, array: int) -> Storage:
        """Return how an array is stored."""
        return self.storages[self.arrays.spec[array]]

    def structure(self) -> Structure:
        """Return the containers of the checkpoint.

        Raises:
            CorruptCheckpointError: they are malformed.
        """
        if isinstance(self.tree, Structure):
            return self.tree
        try:
            structure = Structure.from_json(self.tree)
            if structure.leaf_count != len(self.leaves.kind):
                raise ValueError(
                    f"{structure.leaf_count} leaves in the tree, "
                    f"{len(self.leaves.kind)} in the table"
                )
        except ValueError as error:
            raise CorruptCheckpointError(
                f"{self.location}: the commit record's {error}; restore an older step",
                file=RECORD_NAME,
                location=self.location,
            ) from None
        return structure

    def leaf_arrays(self) -> list[int]:
        """Return the array of every leaf: -1 for scalars, the first piece of leaves in pieces.

        The k-th array leaf without pieces has the k-th array that is not a piece.
        """
        pieces = self.leaves.pieces
        taken = set(map(attrgetter("array"), itertools.chain.from_iterable(pieces.values())))
        free = itertools.filterfalse(taken.__contains__, itertools.count())
        arrays: list[int] = []
        for leaf, kind in enumerate(self.leaves.kind):
            if kind in SCALAR_KINDS:
                arrays.append(-1)
            else:
                arrays.append(pieces[leaf][0].array if leaf in pieces else next(free))
        return arrays

    def pieces(self, leaf: int, array: int) -> tuple[Piece, ...]:
        """Return the arrays of a leaf whose first, and nearly always only, array is `array`."""
        if array < 0:
            return ()
        return self.leaves.pieces.get(leaf) or (
            Piece((0,) * len(self.storage(array).spec.shape), array),
        )

    def leaf_pieces(self) -> list[tuple[Piece, ...]]:
        """Return the arrays of every leaf; scalars have none."""
        return [self.pieces(leaf, array) for leaf, array in enumerate(self.leaf_arrays())]

    def is_verified(self, arrays: Iterable[int]) -> bool:
        """Return whether checksums cover every byte of these arrays."""
        return all(self.storage(array).codec.verifies for array in arrays)

    def unverified_note(self, unverified: int, count: int) -> str:
        """Return the note of a report that `unverified` of `count` arrays have no checksum."""
        return (
            f"{unverified} of {count} arrays have no checksum in this {self.format} checkpoint and "
            "could not be verified"
        )

    def leaf_spec(self, pieces: Sequence[Piece]) -> ArraySpec:
        """Return shape and dtype of the leaf that these pieces tile."""
        first = self.storage(pieces[0].array).spec
        if len(pieces) == 1:
            return first
        corners = [
            [o + n for o, n in zip(p.offset, self.storage(p.array).spec.shape, strict=True)]
            for p in pieces
        ]
        return ArraySpec(tuple(map(max, zip(*corners, strict=True))), first.dtype)


class LeafIndex:
    """The arrays of one leaf, found by the box that each holds."""

    def __init__(self, opened: OpenCheckpoint, pieces: Sequence[Piece]) -> None:
        self._arrays = [piece.array for piece in pieces]
        boxes = [Box(p.offset, opened.storage(p.array).spec.shape) for p in pieces]
        self._index = BoxIndex(boxes)

    def overlaps(
        self, box: Box, memory: npt.NDArray[Any]
    ) -> Iterator[tuple[int, Box, npt.NDArray[Any]]]:
        """Yield each array with elements of `box`, their box in that array, and their memory.

        `memory` is the memory of the whole box.
        """
        for number, part, index in self._index.parts(box):
            yield self._arrays[number], part, memory[index]


def refuse_implied(opened: OpenCheckpoint, extents: Extents, arrays: Sequence[int]) -> None:
    """Check that the unstored chunks of these arrays do not take more memory than plausible.

    Raises:
        UnsupportedFormatError: they take more than `IMPLIED_NBYTES` plus four times the files.
    """
    if opened.record is not None:
        return  # asyncckpt stores every chunk
    is_unstored = extents.file < 0
    is_unstored[list(extents.values)] = False
    before = np.concatenate([[0], np.cumsum(is_unstored)])
    implied = 0
    for array in arrays:
        storage, start = opened.storage(array), opened.first_rows[array]
        rows = before[start + storage.grid.chunk_count] - before[start]
        implied += int(rows) * storage.chunk_nbytes
    limit = IMPLIED_NBYTES + 4 * sum(file.nbytes for file in opened.stored_files)
    if implied > limit:
        raise UnsupportedFormatError(
            f"{opened.location}: {nbytes_text(implied)} of the leaves are not stored: they are "
            "implied fill values; if that is right, pass like= with arrays of these shapes",
            location=opened.location,
            expected=limit,
            found=implied,
        )


async def open_checkpoint(files: CheckpointFiles, compute: Workers) -> OpenCheckpoint:
    """Read the checkpoint's record, and decode and check it in a thread of `compute`.

    Raises:
        CheckpointNotFoundError: there is no record.
        CorruptCheckpointError: the record is damaged.
        UnsupportedFormatError: the record is of a newer version.
    """
    data = await files.read(RECORD_NAME, max_nbytes=MAX_RECORD_NBYTES)
    return await compute.run(resolve, files, data, compute)


def resolve(files: CheckpointFiles, data: bytes, compute: Workers) -> OpenCheckpoint:
    """Decode a record; threads of `compute` will decode the index."""
    record = decode_record(data, location=files.location)

    async def read_extents(_: OpenCheckpoint, __: Sequence[int] | None) -> Extents:
        index = await read_index(files, record, compute)
        return Extents(index.file, index.offset, index.nbytes, index.crc32c)

    return OpenCheckpoint(
        files=files,
        format="asyncckpt",
        tree=record.tree,
        leaves=record.leaves,
        arrays=record.arrays,
        storages=tuple(
            Storage(s.spec, s.chunk_shape, RAW if s.zstd_level is None else ZSTD)
            for s in record.specs
        ),
        stored_files=record.files,
        read_extents=read_extents,
        metadata=record.metadata,
        metrics=record.metrics,
        save_id=record.save_id,
        created_ns=record.created_ns,
        library=record.library,
        database=record.database,
        record=record,
    )


async def read_index(files: CheckpointFiles, record: CommitRecord, compute: Workers) -> ChunkIndex:
    """Read the extent and checksum of every chunk.

    Raises:
        CorruptCheckpointError: the index is damaged or does not fit the record.
        ResourceError: there is too little memory for it.
    """
    place = record.chunk_index
    path = record.files[place.file].path
    if place.data is not None:
        data = np.frombuffer(place.data, np.uint8)  # the record's own checksum covers it
    else:
        try:
            data = await _index_buffer(files, path, place)
            await files.read_into(path, place.offset, [data])
        except CheckpointNotFoundError as error:
            raise missing(files.location, path) from error
    return await compute.run(_decode_index, files.location, record, data)


async def _index_buffer(files: CheckpointFiles, path: str, place: IndexExtent) -> Bytes:
    """Return memory for the chunk index."""
    try:
        with allocating(place.nbytes):
            return np.empty(place.nbytes, np.uint8)
    except ResourceError as error:
        # A record can claim any size: reading the last byte fails if the file is shorter.
        end = place.offset + place.nbytes
        await files.read_into(path, end - 1, [np.empty(1, np.uint8)])
        error.args = (f"{files.location}: the chunk index in {path}: {error}",)
        error.location = files.location
        raise


def _decode_index(location: str, record: CommitRecord, data: Bytes) -> ChunkIndex:
    place = record.chunk_index
    path = record.files[place.file].path
    try:
        # Without its trailing CRC, which would make the CRC of every index the same.
        found = crc32c(data[:-CRC_NBYTES])
        if found != place.crc32c:
            reason = f"its CRC-32C is {found:08x}, the record says {place.crc32c:08x}"
            raise corrupt("the chunk index", reason, file=path, expected=place.crc32c, found=found)
        index = decode_chunk_index(data.tobytes(), file=path)
        record.validate_index(index)
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        error.args = (f"{location}: {error}",)
        error.file, error.offset, error.location = path, place.offset, location
        raise
    return index


def missing(location: str, path: str) -> CorruptCheckpointError:
    """Return the error for a file that the checkpoint's metadata lists but the store lacks."""
    return CorruptCheckpointError(
        f"{location}: {path} is missing, the checkpoint's metadata lists it; restore an older step",
        file=path,
        location=location,
        expected="a file",
        found="nothing",
    )
