"""Explanation of a restore: the parts of leaves that each read was for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from asyncckpt.planning.restore import Part, intersection
from asyncckpt.reports import ReadItem, ReadRange
from asyncckpt.restore.fetch import Fetch
from asyncckpt.restore.matched import LeafRestore
from asyncckpt.restore.ranges import span
from asyncckpt.spec import Box


def explained(
    fetch: Fetch, leaves: Sequence[LeafRestore], owners: Sequence[int]
) -> list[ReadRange]:
    """Return the ranges read. Blocking: a few microseconds per item.

    `owners` has the number of the leaf for each destination.
    """
    opened, extents, wanted = fetch.reads.opened, fetch.reads.extents, fetch.reads.destinations

    def items(parts: Iterable[Part]) -> Iterator[ReadItem]:
        for part in parts:
            array = wanted.array[part.request]
            leaf, storage = leaves[owners[part.request]], opened.storage(array)
            box = wanted.box[part.request] or Box.whole(storage.spec.shape)
            cell = part.row - opened.first_rows[array]
            _, within = intersection(storage.grid, cell, box)
            pieces = opened.pieces(leaf.saved, leaf.array)
            origin = next(piece.offset for piece in pieces if piece.array == array)
            starts = zip(origin, box.offset, within, strict=True)
            shape = tuple([s.stop - s.start for s in within])
            yield ReadItem(
                path=leaf.path,
                offset=tuple([piece + start + s.start for piece, start, s in starts]),
                shape=shape,
                chunk_offset=int(extents.offset[part.row]),
                chunk_nbytes=int(extents.nbytes[part.row]),
                wanted_nbytes=math.prod(shape) * storage.spec.itemsize,
            )

    return [
        ReadRange(
            file=opened.stored_files[read.batches[0].file].path,
            offset=read.batches[0].offset,
            nbytes=span(read.batches),
            items=tuple(items(part for batch in read.batches for part in batch.parts)),
        )
        for read in fetch.calls
    ]
