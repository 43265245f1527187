"""Choice of the replicas to compare in a save, at a bounded cost."""

# Rule 1: all holders of a chunk make the same choice, although each knows only its own chunks: the
#   choice depends on the chunk's position among all chunks of the checkpoint.

from __future__ import annotations

import numpy as np

from asyncckpt.options import KIB, MIB
from asyncckpt.planning.save import SavePlan
from asyncckpt.planning.table import Column

ALWAYS_NBYTES = 64 * KIB
"""Leaves up to this size are compared in every save."""

SHARE_NBYTES = 64 * MIB
"""Bytes of larger leaves compared in each save: a window that advances with every save."""


def checked_rows(plan: SavePlan, number: int, *, whole: bool) -> Column:
    """Return the rows whose checksums all holders compare in save `number` of a run.

    With `whole`, as in the first save of a schema, return all shared rows.
    """
    arrays = plan.arrays
    if whole or not plan.row_shared.any():
        return np.flatnonzero(plan.row_shared)
    sizes = (arrays.part_payload * arrays.part_chunks)[arrays.part]
    sizes[list(arrays.tied)] = 0
    starts = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    cell = plan.row_chunk - arrays.first_chunk[plan.row_array]
    place = starts[plan.row_array] + cell * plan.row_payload
    turns = max(1, -(-total // SHARE_NBYTES))
    in_turn = place // SHARE_NBYTES == number % turns
    small = sizes[plan.row_array] <= ALWAYS_NBYTES
    return np.flatnonzero(plan.row_shared & (small | in_turn))
