"""Layouts of dense arrays that are not in C order, or are conjugated or negated views.

torch saves the strides of a tensor (transposed weights, `channels_last`), and two bits for the
conjugate and the negative of its storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncckpt.format.codecs import PLAIN, Bytes, Codec, check_nbytes
from asyncckpt.spec import DTYPES


@dataclass(frozen=True, slots=True)
class Layout:
    """Order of an array's elements in memory.

    Attributes:
        axes: its axes, slowest-varying first.
        conj: whether the values are the complex conjugates of the stored ones.
        neg: whether the values are the negatives of the stored ones.
    """

    axes: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def plain(self) -> bool:
        """Whether the stored bytes are the array in C order."""
        return self.axes == tuple(range(len(self.axes))) and not self.conj and not self.neg


def dense_axes(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes from slow to fast if the elements have no gaps, else None.

    Axes of length 1 may have any stride, and are placed to keep C order where possible.
    """
    rank = len(shape)
    long = sorted((a for a in range(rank) if shape[a] > 1), key=lambda axis: (-strides[axis], axis))
    due = 1
    for axis in reversed(long):
        if 0 not in shape and strides[axis] != due:
            return None
        due *= shape[axis]
    if long == sorted(long):
        return tuple(range(rank))
    return (*(a for a in range(rank) if shape[a] <= 1), *long)


def codec_of(layout: Layout, chunk_shape: tuple[int, ...], dtype: str) -> Codec:
    """Return the codec that turns a chunk with this layout into one in C order."""
    if layout.plain:
        return PLAIN
    stored_shape = tuple(chunk_shape[axis] for axis in layout.axes)
    back = tuple(np.argsort(layout.axes).tolist())

    def decode(parts: Sequence[Bytes], nbytes: int) -> Bytes:
        stored = parts[0] if len(parts) == 1 else np.concatenate(parts)
        check_nbytes(stored, nbytes)
        # Always a copy: the slot's memory is reused.
        values = stored.view(DTYPES[dtype]).reshape(stored_shape).transpose(back).copy()
        if layout.conj:
            np.conjugate(values, out=values)
        if layout.neg:
            np.negative(values, out=values)
        return values.reshape(-1).view(np.uint8)

    return Codec("strided", crc32c=False, decode=decode)
