"""Where chunks stand inside of shards: the indices of the shards are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.codecs import ChunkError
from asyncckpt.format.sharding import decode_index, index_range, places
from asyncckpt.format.zarr import Shards
from asyncckpt.planning.table import Column
from asyncckpt.stages.elsewhere.found import Columns, FoundArray
from asyncckpt.stages.elsewhere.listing import Listing, Range

INDICES_NBYTES = 16 << 20
"""Indices that are in memory at a time."""

SHARDS_AT_A_TIME = 4096
"""Shards whose indices are read together: those of small arrays stand side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A stored shard.

    Attributes:
        found: the array that it is of.
        kind: how chunks are stored in it.
        rows: its chunks that are inside the array.
        entries: the entries of these in its index.
        at: where it stands; None with its bytes in `value`.
        value: the shard, where it stands in the table.
    """

    found: FoundArray
    kind: Shards
    rows: Column
    entries: Column
    at: Range | None
    value: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.value) if self.at is None else self.at[2]


def shards_of(
    found: FoundArray, kind: Shards, first_row: int, keyed: Sequence[int]
) -> Iterator[Shard]:
    """The shards of an array that are stored.

    Args:
        found: the array.
        kind: how chunks are stored in its shards.
        first_row: row of its first chunk.
        keyed: for every shard its row in the table of keys, or -1.
    """
    zarr, table = found.zarr, found.table
    shard_of, entry_of = places(zarr.spec.shape, zarr.chunk_shape, kind.chunk_shape)
    order = np.argsort(shard_of, kind="stable")
    edges = np.searchsorted(shard_of[order], np.arange(len(keyed) + 1)).tolist()
    for number, row in enumerate(keyed):
        if row < 0:
            continue
        chunks = order[edges[number] : edges[number + 1]]
        value, at = table.inline[row], None
        if value is None:
            path = table.paths[table.file[row]]
            at = (path, int(table.offset[row]), int(table.nbytes[row]))
        yield Shard(found, kind, chunks + first_row, entry_of[chunks], at, value or b"")


class IndexReader:
    """Reads the indices of many shards together, and places their chunks in `columns`."""

    def __init__(self, listing: Listing, columns: Columns) -> None:
        self._listing = listing
        self._columns = columns
        self._waiting: list[tuple[Shard, int, int]] = []
        self._nbytes = 0

    async def add(self, shard: Shard) -> None:
        """The chunks of the shard will be placed by the next `flush`, or are already.

        Raises:
            CorruptCheckpointError: as `flush`.
        """
        with self._blaming(shard):
            start, nbytes = index_range(shard.kind, shard.found.zarr.chunk_shape, shard.nbytes)
        self._waiting.append((shard, start, nbytes))
        self._nbytes += nbytes
        if self._nbytes > INDICES_NBYTES or len(self._waiting) >= SHARDS_AT_A_TIME:
            await self.flush()

    async def flush(self) -> None:
        """The chunks of all shards are placed.

        Raises:
            CorruptCheckpointError: an index is damaged, or lacks a chunk where all are stored.
        """
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        ranges = [(s.at[0], s.at[1] + start, n) for s, start, n in waiting if s.at is not None]
        stored = iter(await self._listing.read(ranges))
        for shard, start, nbytes in waiting:
            index = shard.value[start : start + nbytes] if shard.at is None else next(stored)
            self._place(shard, index)

    def _place(self, shard: Shard, index: bytes) -> None:
        with self._blaming(shard):
            offsets, lengths = decode_index(index, shard.kind, shard.nbytes)
        columns = self._columns
        for row, entry in zip(shard.rows.tolist(), shard.entries.tolist(), strict=True):
            offset, nbytes = int(offsets[entry]), int(lengths[entry])
            if offset < 0:
                if shard.found.complete:
                    raise shard.found.missing(f"{entry} of a shard")
            elif shard.at is None:
                columns.values[row] = shard.value[offset : offset + nbytes]
            else:
                columns.add(row, shard.at[0], shard.at[1] + offset, nbytes)

    @contextmanager
    def _blaming(self, shard: Shard) -> Iterator[None]:
        try:
            yield
        except ChunkError as error:
            location = self._listing.files.location
            file, offset = shard.at[:2] if shard.at is not None else (None, None)
            where = "in the metadata" if shard.at is None else f"at byte {offset} of {file}"
            raise CorruptCheckpointError(
                f"{location}: a shard of array {shard.found.name!r} {where} is damaged: {error}; "
                "use another checkpoint, or leave this array out with include=",
                file=file,
                offset=offset,
                location=location,
                expected=error.expected,
                found=error.found,
            ) from None
