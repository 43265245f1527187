"""Chunk extents of foreign zarr arrays, found by the keys of their chunks."""

# Rule 1: only the keys of wanted arrays are looked up.
# Rule 2: extents are checked before they are read: uncompressed chunks have their exact size,
#   compressed ones a plausible ratio, and all together are not much larger than the files.

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from asyncckpt.checkpoint.foreign.listing import Listing, Range, concurrently, damaged, refuse_link
from asyncckpt.checkpoint.foreign.tables import KeyTable
from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, Storage
from asyncckpt.format.damage import path_fault
from asyncckpt.format.zarr import ZarrArray

MAX_RATIO = 1 << 16
"""Largest compression ratio: zstd reaches 2^15, others less."""

MAX_RATIO_SPARSE = 1 << 21
"""Largest ratio of bzip2, which stores 45 MB of zeros in about 40 bytes, and of shards, which store
only some of their chunks."""

PADDING_NBYTES = 64 << 20
"""Largest decoded size of a compressed chunk, beyond four times the bytes of its array."""

OVERLAP_NBYTES = 64 << 20
"""Largest size of all chunks beyond four times the files: copies in a database share bytes."""

ARRAYS_PER_TURN = 512
"""Arrays looked up before yielding to the event loop: about 20 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundArray:
    """zarr array found in a foreign checkpoint.

    Attributes:
        table: the keys of its chunks, which begin with `base`.
        zarr: its metadata, decoded from the file `document`.
        complete: whether every chunk is stored, so that a missing one means damage.
    """

    name: str
    table: KeyTable
    base: bytes
    zarr: ZarrArray
    document: str
    complete: bool


async def read_extents(
    arrays: Sequence[FoundArray], opened: OpenCheckpoint, wanted: Sequence[int] | None
) -> Extents:
    """Return the extents of the chunks of the wanted arrays (None: all); other rows are empty.

    `arrays` are all arrays of the checkpoint, in order.
    """
    listing = Listing(opened.files, "", {file.path: file.nbytes for file in opened.stored_files})
    number_of = {path: number for number, path in enumerate(listing.nbytes_of)}
    file = np.full(opened.row_count, -1, np.int64)
    offset, nbytes = np.zeros((2, opened.row_count), np.int64)
    values: dict[int, bytes] = {}
    for turn, array in enumerate(range(len(arrays)) if wanted is None else wanted, 1):
        places = await _find(arrays[array], listing)
        for row, place in enumerate(places, opened.first_rows[array]):
            if isinstance(place, bytes):
                nbytes[row], values[row] = len(place), place
            elif place is not None:
                path, offset[row], nbytes[row] = place
                file[row] = number_of[path]
        if turn % ARRAYS_PER_TURN == 0:
            await asyncio.sleep(0)
    extents = Extents(file, offset, nbytes, None, values)
    _check_sizes(extents, arrays, opened)
    claimed = int(nbytes[file >= 0].sum())
    listing.check_claimed("the chunks", claimed, beyond=OVERLAP_NBYTES)
    return extents


async def _find(found: FoundArray, listing: Listing) -> list[bytes | Range | None]:
    """Return the value or range of every chunk; None for chunks that are not stored."""
    table = found.table
    keys = found.zarr.keys.all(found.base, found.zarr.grid.counts)
    places = [table.places.get(key) for key in keys]
    lost = [key.decode() for key, place in zip(keys, places, strict=True) if place is None]
    if found.complete:
        del lost[1:]
    if table.is_directory:
        paths = [path for path in map(table.listing.path, lost) if path_fault(path) is None]
        await concurrently(listing.files, partial(refuse_link, listing.files), paths)
    if lost and found.complete:
        raise damaged(
            listing.files,
            found.document,
            f"chunk {lost[0]!r} of array {found.name!r} is missing, and this checkpoint says that "
            "all are stored; use another checkpoint, or leave this array out with include=",
            expected="a chunk",
            found="nothing",
        )
    for place in places:
        if isinstance(place, tuple):
            await listing.check(*place)
    return places


def _check_sizes(extents: Extents, arrays: Sequence[FoundArray], opened: OpenCheckpoint) -> None:
    """Check that every chunk has the size of its array's chunks, or can decode to it."""
    present = extents.file >= 0
    present[list(extents.values)] = True
    rows = np.flatnonzero(present)
    if not len(rows):
        return
    stored = extents.nbytes[rows]
    array = np.searchsorted(opened.stored.first_row, rows, "right") - 1
    limits = np.array([_stored_nbytes(storage) for storage in opened.storages])
    least, most = limits[opened.stored.kind[array]].T
    good = (least <= stored) & (stored <= most)
    if good.all():
        return
    bad = int(np.argmin(good))
    row, found = int(rows[bad]), arrays[int(array[bad])]
    payload = opened.storage(int(array[bad])).chunk_nbytes
    file, offset, where = None, None, "in the metadata"
    if extents.file[row] >= 0:
        file = opened.stored_files[int(extents.file[row])].path
        offset = int(extents.offset[row])
        where = f"at byte {offset} of {file}"
    raise damaged(
        opened.files,
        file,
        f"a chunk of array {found.name!r} {where} has {stored[bad]} bytes, which cannot hold its "
        f"{payload} bytes of elements (the array has {found.zarr.spec.nbytes}); the "
        "checkpoint is damaged or hostile: use another, or leave this array out with include=",
        offset=offset,
        expected=payload,
        found=int(stored[bad]),
    )


def _stored_nbytes(storage: Storage) -> tuple[float, float]:
    """Return the least and most bytes of a stored chunk."""
    payload, trailer = storage.chunk_nbytes, storage.codec.trailer_nbytes
    if storage.codec.decode is None:
        return payload + trailer, payload + trailer
    if payload > 4 * storage.spec.nbytes + PADDING_NBYTES:
        return math.inf, math.inf  # too large for its array: no stored size is valid
    sparse = re.search("bz2|sharding", storage.codec.name)
    return trailer + payload / (MAX_RATIO_SPARSE if sparse else MAX_RATIO), math.inf
