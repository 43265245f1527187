"""Where the chunks of zarr arrays stand: under a key each, or inside of shards."""

# Rule 1: only the arrays that are asked for are looked at, and only the indices of their shards are
#   read.
# Rule 2: what is returned is plausible: chunks that are stored as they are have their size, and
#   others cannot unpack to much more than they are.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.codecs import ChunkError
from asyncckpt.format.paths import path_fault
from asyncckpt.format.record import ArrayTable
from asyncckpt.format.sharding import decode_index, index_range, places
from asyncckpt.format.zarr import Shards, ZarrArray
from asyncckpt.planning.table import Column
from asyncckpt.ports import CheckpointFiles
from asyncckpt.stages.elsewhere.listing import Listing, Range, refuse_link
from asyncckpt.stages.elsewhere.tables import KeyTable
from asyncckpt.stages.opened import Extents, Storage, StoredFile, number_rows

MAX_RATIO = 1 << 16
"""To how many times its stored size a chunk may unpack: zstd reaches 2^15, the others less."""

MAX_RATIO_BZ2 = 1 << 21
"""The same for bzip2, which stores 45 MB of zeros in about 40 bytes."""

PADDING_NBYTES = 64 << 20
"""What a packed chunk may have beyond four times the bytes of its array."""

INDICES_NBYTES = 16 << 20
"""Indices of shards that are in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundArray:
    """One array of a checkpoint.

    Attributes:
        name: its name in the checkpoint.
        table: where its chunks are.
        base: what their keys begin with.
        zarr: what its metadata document says.
        document: where that stands, for errors.
        complete: every chunk is stored; one that is not is damage.
    """

    name: str
    table: KeyTable
    base: bytes
    zarr: ZarrArray
    document: str
    complete: bool

    @property
    def shards(self) -> Shards | None:
        """How chunks stand in shards where they are read one by one.

        Where elements are transposed before they are put into shards, shards are read as a whole.
        """
        return None if self.zarr.chain.order else self.zarr.chain.shards


@dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """A stored shard that is wanted.

    Attributes:
        array: which array it is of.
        rows: its chunks that are inside the array.
        entries: the entries of these in its index.
        at: where it stands, or None with its bytes in `value`.
        value: the shard, where it stands in the table.
    """

    array: int
    rows: Column
    entries: Column
    at: Range | None
    value: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.value) if self.at is None else self.at[2]


@dataclass(slots=True, eq=False)
class _Columns:
    """Extents being collected, by row."""

    row: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    values: dict[int, bytes] = field(default_factory=dict)

    def add(self, row: int, file: int, offset: int, nbytes: int) -> None:
        """The chunk stands there."""
        self.row.append(row)
        self.file.append(file)
        self.offset.append(offset)
        self.nbytes.append(nbytes)


class ExtentReader:
    """Makes `Extents` of keys and of the indices of shards."""

    def __init__(
        self,
        files: CheckpointFiles,
        arrays: Sequence[FoundArray],
        storages: Sequence[Storage],
        table: ArrayTable,
        stored_files: Sequence[StoredFile],
    ) -> None:
        self._files = files
        self._arrays = arrays
        self._storages = storages
        self._spec = table.spec
        first_rows, self._row_count = number_rows(storages, table)
        self._first_rows = np.array(first_rows, np.int64)
        self._number = {file.path: number for number, file in enumerate(stored_files)}
        listings = {id(a.table): a.table.listing for a in arrays}.values()
        nbytes_of = {path: n for listing in listings for path, n in listing.nbytes_of.items()}
        self._listing = Listing(files, "", nbytes_of)

    async def read(self, wanted: Sequence[int] | None) -> Extents:
        """The extents of the chunks of these arrays (None: of all); rows of others are empty.

        Raises:
            CorruptCheckpointError: a chunk or an index is damaged, outside its file, of a size
                that cannot be, or missing where all are stored.
        """
        columns = _Columns()
        sharded: list[int] = []
        for array in range(len(self._arrays)) if wanted is None else wanted:
            if self._arrays[array].shards is None:
                await self._place_keys(columns, array)
            else:
                sharded.append(array)
        if sharded:
            await self._place_shards(columns, sharded)
        self._check_sizes(columns)
        file = np.full(self._row_count, -1, np.int64)
        offset, nbytes = np.zeros((2, self._row_count), np.int64)
        file[columns.row] = columns.file
        offset[columns.row] = columns.offset
        nbytes[columns.row] = columns.nbytes
        nbytes[list(columns.values)] = [len(value) for value in columns.values.values()]
        return Extents(file, offset, nbytes, None, columns.values)

    async def _rows_of(self, array: int) -> list[int]:
        """The row in the table for everything that has a key of its own; -1 where it is missing."""
        found = self._arrays[array]
        table = found.table
        keys = found.zarr.keys.all(found.base, found.zarr.grid.counts)
        rows = [table.find(key) for key in keys]
        for key, row in zip(keys, rows, strict=True):
            if row < 0:
                path = table.listing.path(key.decode())
                if table.is_directory and path_fault(path) is None:
                    await refuse_link(self._files, path)
                if found.complete:
                    raise self._missing(found, f"{key.decode()!r}")
            elif (number := int(table.file[row])) >= 0:
                path = table.paths[number]
                await self._listing.check(path, int(table.offset[row]), int(table.nbytes[row]))
        return rows

    async def _place_keys(self, columns: _Columns, array: int) -> None:
        table = self._arrays[array].table
        for row, found in enumerate(await self._rows_of(array), int(self._first_rows[array])):
            if found < 0:
                continue
            value = table.inline[found]
            if value is not None:
                columns.values[row] = value
                continue
            number = self._number[table.paths[table.file[found]]]
            columns.add(row, number, int(table.offset[found]), int(table.nbytes[found]))

    async def _place_shards(self, columns: _Columns, arrays: Sequence[int]) -> None:
        batch: list[tuple[_Shard, int, int]] = []
        waiting = 0
        for array in arrays:
            for shard in await self._shards_of(array):
                with self._blaming(shard):
                    start, length = self._index_of(shard)
                batch.append((shard, start, length))
                waiting += length
                if waiting > INDICES_NBYTES:
                    await self._place_batch(columns, batch)
                    batch, waiting = [], 0
        await self._place_batch(columns, batch)

    async def _shards_of(self, array: int) -> list[_Shard]:
        found = self._arrays[array]
        table, zarr, shards = found.table, found.zarr, found.shards
        assert shards is not None
        shard_of, entry_of = places(zarr.spec.shape, zarr.chunk_shape, shards.chunk_shape)
        order = np.argsort(shard_of, kind="stable")
        keyed = await self._rows_of(array)
        edges = np.searchsorted(shard_of[order], np.arange(len(keyed) + 1)).tolist()
        result = []
        for number, row in enumerate(keyed):
            if row < 0:
                continue
            chunks = order[edges[number] : edges[number + 1]]
            value = table.inline[row]
            at = None
            if value is None:
                path = table.paths[table.file[row]]
                at = (path, int(table.offset[row]), int(table.nbytes[row]))
            rows = chunks + self._first_rows[array]
            result.append(_Shard(array, rows, entry_of[chunks], at, value or b""))
        return result

    def _index_of(self, shard: _Shard) -> tuple[int, int]:
        found = self._arrays[shard.array]
        assert found.shards is not None
        return index_range(found.shards, found.zarr.chunk_shape, shard.nbytes)

    async def _place_batch(
        self, columns: _Columns, batch: Sequence[tuple[_Shard, int, int]]
    ) -> None:
        ranges = [(s.at[0], s.at[1] + start, n) for s, start, n in batch if s.at is not None]
        stored = iter(await self._listing.read(ranges))
        for shard, start, length in batch:
            index = shard.value[start : start + length] if shard.at is None else next(stored)
            found = self._arrays[shard.array]
            assert found.shards is not None
            with self._blaming(shard):
                offsets, lengths = decode_index(index, found.shards, shard.nbytes)
            for row, entry in zip(shard.rows.tolist(), shard.entries.tolist(), strict=True):
                at, nbytes = int(offsets[entry]), int(lengths[entry])
                if at < 0:
                    if found.complete:
                        raise self._missing(found, f"{entry} of a shard")
                elif shard.at is None:
                    columns.values[row] = shard.value[at : at + nbytes]
                else:
                    path, base, _ = shard.at
                    columns.add(row, self._number[path], base + at, nbytes)

    @contextmanager
    def _blaming(self, shard: _Shard) -> Iterator[None]:
        try:
            yield
        except ChunkError as error:
            file, offset = shard.at[:2] if shard.at is not None else (None, None)
            where = "in the metadata" if shard.at is None else f"at byte {offset} of {file}"
            raise CorruptCheckpointError(
                f"{self._files.location}: a shard of array {self._arrays[shard.array].name!r} "
                f"{where} is damaged: {error}; use another checkpoint, or leave this array out "
                "with include=",
                file=file,
                offset=offset,
                location=self._files.location,
                expected=error.expected,
                found=error.found,
            ) from None

    def _missing(self, found: FoundArray, chunk: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._files.location}: chunk {chunk} of array {found.name!r} is missing, and this "
            "checkpoint says that all are stored; use another checkpoint, or leave this array out "
            "with include=",
            file=found.document,
            location=self._files.location,
            expected="a chunk",
            found="nothing",
        )

    def _check_sizes(self, columns: _Columns) -> None:
        """Chunks that are stored as they are have their size; others cannot unpack to much more."""
        rows = np.array([*columns.row, *columns.values], np.int64)
        if not len(rows):
            return
        stored = np.array([*columns.nbytes, *map(len, columns.values.values())], np.int64)
        array = np.searchsorted(self._first_rows, rows, "right") - 1
        spec = np.array(self._spec, np.int64)[array]
        kinds = self._storages
        packed = np.array([s.codec.decode is not None for s in kinds])[spec]
        payload = np.array([s.chunk_nbytes for s in kinds], np.int64)[spec]
        ratio = np.array([_ratio(s) for s in kinds], np.float64)[spec]
        most = np.array([4 * s.spec.nbytes + PADDING_NBYTES for s in kinds], np.float64)[spec]
        trailer = np.array([s.codec.trailer_nbytes for s in kinds], np.int64)[spec]
        good = np.where(
            packed,
            (payload <= np.maximum(stored - trailer, 0) * ratio) & (payload <= most),
            stored == payload + trailer,
        )
        if good.all():
            return
        bad = int(np.argmin(good))
        found = self._arrays[int(array[bad])]
        path = None
        if bad < len(columns.row):
            path = next(p for p, number in self._number.items() if number == columns.file[bad])
        where = "in the metadata" if path is None else f"at byte {columns.offset[bad]} of {path}"
        raise CorruptCheckpointError(
            f"{self._files.location}: a chunk of array {found.name!r} {where} is {stored[bad]} "
            f"bytes, which cannot hold {payload[bad]} of an array of {found.zarr.spec.nbytes}; the "
            "checkpoint is damaged or hostile: use another, or leave this array out with include=",
            file=path,
            offset=None if path is None else columns.offset[bad],
            location=self._files.location,
            expected=int(payload[bad]),
            found=int(stored[bad]),
        )


def _ratio(storage: Storage) -> int:
    return MAX_RATIO_BZ2 if "bz2" in storage.codec.name else MAX_RATIO
