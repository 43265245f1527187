"""Where the chunks of zarr arrays stand: under a key each, or inside of shards."""

# Rule 1: only the arrays that are asked for are looked at, and only the indices of their shards are
#   read.
# Rule 2: what is returned is plausible: chunks that are stored as they are have their size, others
#   cannot unpack to much more than they are, and all together are not much more than the files.

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.paths import path_fault
from asyncckpt.format.record import ArrayTable
from asyncckpt.ports import CheckpointFiles
from asyncckpt.stages.elsewhere.found import Columns, FoundArray
from asyncckpt.stages.elsewhere.listing import Listing, refuse_link
from asyncckpt.stages.elsewhere.shards import IndexReader, shards_of
from asyncckpt.stages.opened import Extents, Storage, StoredFile, number_rows

MAX_RATIO = 1 << 16
"""To how many times its stored size a chunk may unpack: zstd reaches 2^15, the others less."""

MAX_RATIO_BZ2 = 1 << 21
"""The same for bzip2, which stores 45 MB of zeros in about 40 bytes."""

PADDING_NBYTES = 64 << 20
"""What a packed chunk may have beyond four times the bytes of its array."""

OVERLAP_NBYTES = 64 << 20
"""What all chunks may take beyond four times the files: few bytes could stand for many chunks."""

ARRAYS_PER_TURN = 512
"""Arrays looked at before others get their turn on the event loop: some 20 ms."""


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
        self._number_of = {file.path: number for number, file in enumerate(stored_files)}
        listings = {id(a.table): a.table.listing for a in arrays}.values()
        nbytes_of = {path: n for listing in listings for path, n in listing.nbytes_of.items()}
        self._listing = Listing(files, "", nbytes_of)

    async def read(self, wanted: Sequence[int] | None) -> Extents:
        """The extents of the chunks of these arrays (None: of all); rows of others are empty.

        Raises:
            CorruptCheckpointError: a chunk or an index is damaged, outside its file, of a size
                that cannot be, or missing where all are stored.
        """
        columns = Columns(self._number_of)
        indices = IndexReader(self._listing, columns)
        arrays = range(len(self._arrays)) if wanted is None else wanted
        for turn, array in enumerate(arrays, 1):
            found, first_row = self._arrays[array], int(self._first_rows[array])
            keyed = await self._find(found)
            if found.shards is None:
                _place(columns, found, first_row, keyed)
            else:
                for shard in shards_of(found, found.shards, first_row, keyed):
                    await indices.add(shard)
            if turn % ARRAYS_PER_TURN == 0:
                await asyncio.sleep(0)
        await indices.flush()
        self._check_sizes(columns)
        self._check_overlap(columns)
        file = np.full(self._row_count, -1, np.int64)
        offset, nbytes = np.zeros((2, self._row_count), np.int64)
        file[columns.row] = columns.file
        offset[columns.row] = columns.offset
        nbytes[columns.row] = columns.nbytes
        nbytes[list(columns.values)] = [len(value) for value in columns.values.values()]
        return Extents(file, offset, nbytes, None, columns.values)

    async def _find(self, found: FoundArray) -> list[int]:
        """The row in the table for everything that has a key of its own; -1 where it is missing."""
        table = found.table
        keys = found.zarr.keys.all(found.base, found.zarr.grid.counts)
        rows = [table.find(key) for key in keys]
        for key, row in zip(keys, rows, strict=True):
            if row < 0:
                path = table.listing.path(key.decode())
                if table.is_directory and path_fault(path) is None:
                    await refuse_link(self._files, path)
                if found.complete:
                    raise found.missing(f"{key.decode()!r}")
            elif table.inline[row] is None:
                path = table.paths[table.file[row]]
                await self._listing.check(path, int(table.offset[row]), int(table.nbytes[row]))
        return rows

    def _check_sizes(self, columns: Columns) -> None:
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
        file, offset, where = None, None, "in the metadata"
        if bad < len(columns.row):
            offset = columns.offset[bad]
            file = next(p for p, n in self._number_of.items() if n == columns.file[bad])
            where = f"at byte {offset} of {file}"
        raise CorruptCheckpointError(
            f"{self._files.location}: a chunk of array {found.name!r} {where} is {stored[bad]} "
            f"bytes, which cannot hold {payload[bad]} of an array of {found.zarr.spec.nbytes}; the "
            "checkpoint is damaged or hostile: use another, or leave this array out with include=",
            file=file,
            offset=offset,
            location=self._files.location,
            expected=int(payload[bad]),
            found=int(stored[bad]),
        )

    def _check_overlap(self, columns: Columns) -> None:
        """Chunks may share bytes, as copies inside of a database do, but not without end."""
        claimed, stored = sum(columns.nbytes), self._listing.nbytes
        if claimed > 4 * stored + OVERLAP_NBYTES:
            raise CorruptCheckpointError(
                f"{self._files.location}: the metadata places {claimed} bytes of chunks in files "
                f"of {stored} bytes; it is damaged or hostile: use another checkpoint",
                location=self._files.location,
                expected=stored,
                found=claimed,
            )


def _place(columns: Columns, found: FoundArray, first_row: int, keyed: Sequence[int]) -> None:
    table = found.table
    for row, key in enumerate(keyed, first_row):
        if key < 0:
            continue
        value = table.inline[key]
        if value is None:
            path = table.paths[table.file[key]]
            columns.add(row, path, int(table.offset[key]), int(table.nbytes[key]))
        else:
            columns.values[row] = value


def _ratio(storage: Storage) -> int:
    return MAX_RATIO_BZ2 if "bz2" in storage.codec.name else MAX_RATIO
