"""Planned reads: the ranges to read, and the memory that their chunks fill.

Restores, conversions, and verification of foreign checkpoints use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, Storage
from asyncckpt.planning.restore import Requests, RestorePlan, StoredArrays, plan_restore
from asyncckpt.ports import CheckpointFiles
from asyncckpt.restore.exchange.streams import StreamFiles
from asyncckpt.spec import Box

DIRECT_NBYTES = 64 << 10
"""Shortest chunk that is read straight into its destination."""

SHORT_NBYTES = 16 << 10
"""The same in runs of such chunks of local files: one more buffer in a call costs as much as
copying this many bytes. Responses of object stores are taken apart in Python, which costs more."""


class Destinations:
    """Host memory for wanted boxes of arrays, by column: small leaves need no object each.

    Attributes:
        path: path of the leaf, for errors.
        array: index of the stored array.
        box: the wanted part of the array; None for all of it.
        values: memory of the box's shape, in the stored dtype; None to read and check only.
    """

    def __init__(self) -> None:
        self.path: list[str] = []
        self.array: list[int] = []
        self.box: list[Box | None] = []
        self.values: list[npt.NDArray[Any] | None] = []

    def __len__(self) -> int:
        return len(self.path)

    def add(self, path: str, array: int, box: Box | None, values: npt.NDArray[Any] | None) -> None:
        """Add a destination."""
        self.path.append(path)
        self.array.append(array)
        self.box.append(box)
        self.values.append(values)

    def requests(self, stored: StoredArrays, direct_nbytes: int) -> Requests:
        """Return the wanted boxes for the planner.

        Those of uncompressed arrays of `direct_nbytes` or more are examined; the memory of others
        counts as not contiguous.
        """
        array = np.array(self.array, np.int64)
        contiguous = np.zeros(len(array), np.bool_)
        large = [
            not compressed and math.prod(grid.shape) * itemsize >= direct_nbytes
            for grid, itemsize, compressed in stored.kinds
        ]
        for number in np.flatnonzero(np.array(large, np.bool_)[stored.kind[array]]).tolist():
            values = self.values[number]
            contiguous[number] = values is not None and values.flags.carray
        return Requests(array, self.box, contiguous)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedReads:
    """The reads that fill some destinations.

    Attributes:
        files: the files of the checkpoint, or streams that processes exchange.
        extents: extents of the chunks in `files`.
        destinations: by number of the request in the plan.
        plan: the ranges to read.
    """

    opened: OpenCheckpoint
    files: CheckpointFiles | StreamFiles
    extents: Extents
    destinations: Destinations
    plan: RestorePlan

    def chunk(self, row: int, request: int) -> tuple[Storage, int, Box]:
        """Return how a chunk is stored, its number in its array, and the array's wanted box."""
        array = self.destinations.array[request]
        storage = self.opened.storage(array)
        box = self.destinations.box[request] or Box.whole(storage.spec.shape)
        return storage, row - self.opened.first_rows[array], box


def plan_reads(
    opened: OpenCheckpoint,
    extents: Extents,
    destinations: Destinations,
    *,
    slot_nbytes: int,
    direct_nbytes: int = DIRECT_NBYTES,
    files: StreamFiles | None = None,
    only: npt.NDArray[np.bool_] | None = None,
) -> PlannedReads:
    """Plan the reads that fill the destinations. Blocking.

    Chunks of `direct_nbytes` or more, and runs of chunks of `SHORT_NBYTES` or more in local files,
    are read straight into their destinations where possible; all others are read together, up to
    `slot_nbytes`. `files` replaces the files of the checkpoint; `only` says of each chunk whether
    to read it (None: read all wanted chunks).
    """
    source = opened.files if files is None else files
    is_far = source.capabilities.read_copies > 0
    short_nbytes = direct_nbytes if is_far else min(SHORT_NBYTES, direct_nbytes)
    plan = plan_restore(
        opened.stored,
        destinations.requests(opened.stored, short_nbytes),
        row_file=extents.file,
        row_offset=extents.offset,
        row_nbytes=extents.nbytes,
        slot_nbytes=slot_nbytes,
        gap_nbytes=source.capabilities.read_gap_nbytes,
        direct_nbytes=direct_nbytes,
        short_nbytes=short_nbytes,
        only=only,
    )
    return PlannedReads(opened, source, extents, destinations, plan)
