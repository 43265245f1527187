"""Columns of values for B+trees that tests encode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncckpt.format.ocdbt.btree import ValueColumns
from asyncckpt.format.ocdbt.wire import I64


def value_columns(
    inline: Sequence[bytes | None], file: I64, offset: I64, nbytes: I64
) -> ValueColumns:
    """Return the columns of values, each inline or in a data file.

    Where a value is inline, its file is -1, and its offset and length are ignored.
    """
    values = [value or b"" for value in inline]
    lengths = np.array(list(map(len, values)), np.int64)
    starts = np.cumsum(lengths) - lengths
    is_inline = np.asarray(file) < 0
    return ValueColumns(
        [b"".join(values)],
        file,
        np.where(is_inline, starts, offset),
        np.where(is_inline, lengths, nbytes),
    )
