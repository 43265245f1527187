"""Arrays that stand in a file as one run of C-order bytes, cut into chunks.

safetensors and torch files hold a tensor as one run. Cut into chunks it can be read in parallel,
within any budget, and in parts; since zarr grids pad the last chunk and files do not, what remains
behind the last full chunk of an axis is an array of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncckpt.planning.table import Column


class RawPiece(NamedTuple):
    """A part of an array, on a grid whose chunks are all full and each one run of bytes.

    Attributes:
        offset: where it starts in the array.
        shape: its shape.
        chunk_shape: divides `shape`.
        row_offset: per chunk, in C order, its first byte in the run of the whole array.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    row_offset: Column


def raw_pieces(shape: Sequence[int], itemsize: int, target_nbytes: int) -> list[RawPiece]:
    """Pieces that tile the array, with chunks of at most `target_nbytes` where an element fits.

    An empty array is one piece without chunks.
    """
    shape = tuple(shape)
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if math.prod(shape) * itemsize <= max(target_nbytes, itemsize):
        chunk = tuple(max(1, n) for n in shape)
        return [_piece((0,) * len(shape), shape, chunk, strides)]
    # The first axis of which the target holds a row; a single element always is one.
    axis = next((i for i, stride in enumerate(strides) if stride <= target_nbytes), len(shape) - 1)
    count = -(-shape[axis] // max(1, target_nbytes // strides[axis]))
    length = -(-shape[axis] // count)
    chunk = (*(1,) * axis, length, *shape[axis + 1 :])
    full = shape[axis] // length * length
    pieces = []
    for start, stop in ((0, full), (full, shape[axis])):
        if start < stop:
            part = (*shape[:axis], stop - start, *shape[axis + 1 :])
            offset = (*(0,) * axis, start, *(0,) * (len(shape) - axis - 1))
            cell = (*chunk[:axis], min(length, stop - start), *chunk[axis + 1 :])
            pieces.append(_piece(offset, part, cell, strides))
    return pieces


def _piece(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    strides: Sequence[int],
) -> RawPiece:
    rows = np.full((), sum(o * s for o, s in zip(offset, strides, strict=True)), np.int64)
    for n, c, stride in zip(shape, chunk_shape, strides, strict=True):
        rows = rows[..., None] + np.arange(n // c, dtype=np.int64) * c * stride
    return RawPiece(offset, shape, chunk_shape, rows.reshape(-1))
