"""Tensors stored in files as runs of bytes, cut into chunks, and the checkpoint that they form.

safetensors and torch files hold a tensor as one run. Chunks allow reading it in parallel, in parts
and within any budget. zarr grids pad the last chunk of an axis but files do not, so elements behind
the last full chunk are a separate array.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncckpt.checkpoint.foreign.listing import Listing
from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, Storage
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.format.codecs import PLAIN, Bytes, Codec
from asyncckpt.format.foreign.torch.strided import Layout, codec_of
from asyncckpt.format.record_values import ArrayTable, LeafTable, Piece
from asyncckpt.format.scalars import JsonValue, Scalar, encode_scalar
from asyncckpt.options import DEFAULT_CHUNK_NBYTES, INLINE_NBYTES
from asyncckpt.planning.chunk_shape import cut_axis
from asyncckpt.planning.table import Column
from asyncckpt.reports import FileInfo
from asyncckpt.spec import ITEMSIZES, ArraySpec, array_spec
from asyncckpt.tree import Structure, array_names

Facts = Mapping[str, JsonValue]
"""Additional facts about a leaf."""

MAX_SHOWN = 50
"""Most unreadable leaves that an error describes."""


class RawPiece(NamedTuple):
    """Part of an array on a grid of full chunks, each one run of bytes.

    Attributes:
        offset: its offset in the array.
        chunk_shape: shape of its chunks; divides `shape`.
        row_offset: first byte of every chunk, in C order, in the run of the whole array.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    row_offset: Column


def raw_pieces(shape: Sequence[int], itemsize: int, target_nbytes: int) -> list[RawPiece]:
    """Return pieces that tile the array, with chunks of at most `target_nbytes` or one element.

    An empty array is one piece without chunks.
    """
    shape = tuple(shape)
    size = math.prod(shape)
    if size * itemsize <= max(target_nbytes, itemsize):
        chunk = tuple(max(1, n) for n in shape)
        return [RawPiece((0,) * len(shape), shape, chunk, np.zeros(min(size, 1), np.int64))]
    axis, rows = cut_axis(shape, itemsize, target_nbytes)
    count = -(-shape[axis] // rows)
    length = -(-shape[axis] // count)
    full = shape[axis] // length * length
    # Chunks have length 1 along the axes before this one, and the array's along those after it.
    lead, tail = shape[:axis], shape[axis + 1 :]
    before = np.arange(math.prod(lead), dtype=np.int64)[:, None] * shape[axis]
    pieces = []
    for start, stop in ((0, full), (full, shape[axis])):
        if start < stop:
            offset = (*(0,) * axis, start, *(0,) * len(tail))
            step = min(length, stop - start)
            at = (before + np.arange(start, stop, step)) * (itemsize * math.prod(tail))
            part, cell = (*lead, stop - start, *tail), (*(1,) * axis, step, *tail)
            pieces.append(RawPiece(offset, part, cell, at.reshape(-1)))
    return pieces


@dataclass(frozen=True, slots=True)
class Run:
    """Part of a leaf that is stored in a file as one run of bytes.

    Attributes:
        offset: offset of the part in the leaf.
        file: number of the file.
        start: first byte in the file.
        layout: order of the elements; None for C order.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    start: int
    layout: Layout | None = None


class RunTables:
    """Leaves of one checkpoint, added in tree order, and their places in its files."""

    def __init__(self) -> None:
        self._kinds: list[str] = []
        self._values: list[JsonValue] = []
        self._extra: dict[int, Facts] = {}
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._tied: dict[int, int] = {}
        self._owners: list[int] = []
        self._specs: list[int] = []
        self._storages: list[Storage] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._cuts: dict[tuple[object, ...], list[RawPiece]] = {}
        self._rows: list[tuple[int, Column, int]] = []
        self._row_count = 0
        self._inline: dict[int, bytes] = {}
        self._refused: dict[int, AsyncCheckpointError] = {}

    def add_leaf(
        self,
        kind: str,
        value: JsonValue = None,
        extra: Facts | None = None,
        pieces: Sequence[Piece] = (),
    ) -> None:
        """Add the next leaf: a scalar, or one whose arrays have just been added."""
        if extra:
            self._extra[len(self._kinds)] = extra
        if len(pieces) > 1:
            self._pieces[len(self._kinds)] = tuple(pieces)
        self._kinds.append(kind)
        self._values.append(value)

    def add_scalar(self, value: Scalar) -> None:
        """Add a Python value as the next leaf."""
        if type(value) is not bytes or len(value) <= INLINE_NBYTES:
            self.add_leaf(*encode_scalar(value))
            return
        self.add_value(np.frombuffer(value, np.uint8), {"python": "bytes"})

    def add_value(self, array: np.ndarray[Any, Any], extra: Facts | None = None) -> None:
        """Add an array whose values the metadata contains, as the next leaf."""
        spec = array_spec(array.shape, array.dtype.name)
        chunk_shape = tuple(max(1, n) for n in array.shape)
        if array.size:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            self._inline[self._row_count] = little.tobytes()
        offsets = np.zeros(min(array.size, 1), np.int64)
        self._add_array(self._storage(spec, chunk_shape, PLAIN), -1, offsets, 0)
        self.add_leaf("numpy", extra=extra)

    def add_array(
        self, kind: str, dtype: str, runs: Sequence[Run], extra: Facts | None = None
    ) -> Sequence[Piece]:
        """Add an array that is tiled by the runs, as the next leaf; return its pieces."""
        pieces: list[Piece] = []
        for run in runs:
            for piece in self._cut(run, ITEMSIZES[dtype]):
                codec = PLAIN
                if run.layout is not None:
                    codec = codec_of(run.layout, piece.chunk_shape, dtype)
                storage = self._storage(array_spec(piece.shape, dtype), piece.chunk_shape, codec)
                offset = tuple(a + b for a, b in zip(run.offset, piece.offset, strict=True))
                pieces.append(Piece(offset, len(self._specs)))
                nbytes = self._storages[storage].chunk_nbytes
                self._add_array(storage, run.file, piece.row_offset + run.start, nbytes)
        self.add_leaf(kind, extra=extra, pieces=pieces)
        return pieces

    def add_tied(self, kind: str, pieces: Sequence[Piece], extra: Facts | None) -> None:
        """Add an array that shares the pieces of an earlier one, as the next leaf."""
        own = [Piece(piece.offset, len(self._specs) + n) for n, piece in enumerate(pieces)]
        for tied, piece in zip(own, pieces, strict=True):
            self._tied[tied.array] = piece.array
            self._owners.append(len(self._kinds))
            self._specs.append(self._specs[piece.array])
        self.add_leaf(kind, extra=extra, pieces=own)

    def add_refused(self, spec: ArraySpec, error: AsyncCheckpointError, nbytes: int) -> None:
        """Add an unreadable tensor, not empty, as the next leaf; restoring it raises `error`."""

        def refuse(_: Sequence[Bytes], __: int) -> Bytes:
            raise copy.copy(error)

        storage = self._storage(spec, spec.shape, Codec("unreadable", crc32c=False, decode=refuse))
        self._refused[len(self._specs)] = error
        self._inline[self._row_count] = b""  # nothing is read before `refuse` raises
        self._add_array(storage, -1, np.zeros(1, np.int64), nbytes)
        self.add_leaf("torch")

    def open(
        self,
        listing: Listing,
        form: str,
        tree: Structure,
        *,
        library: str,
        metadata: Mapping[str, JsonValue],
        metrics: Mapping[str, float] | None = None,
        notes: tuple[str, ...] = (),
    ) -> OpenCheckpoint:
        """Return the checkpoint of the added leaves in the containers of `tree`.

        `listing` has the files that hold them, in the order of their numbers.
        """
        extents, refused = self._extents(), self._refused

        async def read_extents(_: OpenCheckpoint, wanted: Sequence[int] | None) -> Extents:
            if refused and (faults := [refused[n] for n in wanted or () if n in refused]):
                raise _joined(faults, listing.files.location)
            return extents

        return OpenCheckpoint(
            files=listing.files,
            format=form,
            tree=tree,
            leaves=LeafTable(self._kinds, self._values, self._extra, self._pieces),
            arrays=ArrayTable(self._names(tree), self._specs, self._tied),
            storages=tuple(self._storages),
            stored_files=tuple(FileInfo(path, n, None) for path, n in listing.nbytes_of.items()),
            read_extents=read_extents,
            metadata=metadata,
            metrics=metrics or {},
            library=library,
            notes=notes,
        )

    def _add_array(self, storage: int, file: int, offsets: Column, nbytes: int) -> None:
        self._owners.append(len(self._kinds))
        self._specs.append(storage)
        self._rows.append((file, offsets, nbytes))
        self._row_count += len(offsets)

    def _storage(self, spec: ArraySpec, chunk_shape: tuple[int, ...], codec: Codec) -> int:
        key = (spec, chunk_shape, codec)
        number = self._known.setdefault(key, len(self._storages))
        if number == len(self._storages):
            self._storages.append(Storage(spec, chunk_shape, codec))
        return number

    def _cut(self, run: Run, itemsize: int) -> list[RawPiece]:
        axes = None if run.layout is None else run.layout.axes
        key = (run.shape, itemsize, axes)
        pieces = self._cuts.get(key)
        if pieces is None:
            shape = run.shape if axes is None else tuple(run.shape[axis] for axis in axes)
            pieces = raw_pieces(shape, itemsize, DEFAULT_CHUNK_NBYTES)
            if axes is not None:
                pieces = [_transposed_back(piece, axes) for piece in pieces]
            self._cuts[key] = pieces
        return pieces

    def _names(self, tree: Structure) -> list[str]:
        of_leaf = array_names(tree.parts())
        names: list[str] = []
        for number, leaf in enumerate(self._owners):
            pieces = self._pieces.get(leaf)
            # Names of leaves have no slash, so these names are unique.
            part = f"/{number - pieces[0].array}" if pieces else ""
            names.append(of_leaf[leaf] + part)
        return names

    def _extents(self) -> Extents:
        counts = [len(offsets) for _, offsets, _ in self._rows]
        none = np.zeros(0, np.int64)
        return Extents(
            np.repeat(np.array([file for file, _, _ in self._rows], np.int64), counts),
            np.concatenate([none, *(offsets for _, offsets, _ in self._rows)]),
            np.repeat(np.array([nbytes for _, _, nbytes in self._rows], np.int64), counts),
            values=self._inline,
        )


def _joined(faults: Sequence[AsyncCheckpointError], location: str) -> AsyncCheckpointError:
    """Return one error for all leaves that cannot be read."""
    error = copy.copy(faults[0])
    if len(faults) > 1:
        shown = [*map(str, faults[:MAX_SHOWN]), *(["…"] if len(faults) > MAX_SHOWN else [])]
        error.args = ("\n  ".join([f"{location}: {len(faults)} leaves cannot be read:", *shown]),)
    return error


def _transposed_back(piece: RawPiece, axes: Sequence[int]) -> RawPiece:
    """Return a piece of a transposed array as a piece of the array itself."""
    back = np.argsort(axes)
    counts = [n // c for n, c in zip(piece.shape, piece.chunk_shape, strict=True)]
    return RawPiece(
        tuple(piece.offset[axis] for axis in back),
        tuple(piece.shape[axis] for axis in back),
        tuple(piece.chunk_shape[axis] for axis in back),
        piece.row_offset.reshape(counts).transpose(back).reshape(-1),
    )
