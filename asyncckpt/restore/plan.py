"""Planned reads: the ranges to read, and the memory that their chunks fill.

Restores, conversions, and verification of foreign checkpoints use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint
from asyncckpt.checkpoint.payload import flat_bytes
from asyncckpt.flow.arena import SMALL_NBYTES
from asyncckpt.planning.restore import Requests, RestorePlan, plan_restore
from asyncckpt.ports import Bytes, CheckpointFiles
from asyncckpt.restore.exchange.streams import StreamFiles
from asyncckpt.spec import Box


class Destinations:
    """Host memory for wanted boxes of arrays, by column: small leaves need no object each.

    Attributes:
        path: path of the leaf, for errors.
        array: index of the stored array.
        box: the wanted part of the array; None for all of it.
        values: memory of the box's shape, in the stored dtype; None to read and check only.
        flat: the same memory as one run of bytes; None if it is not one run, and for small arrays,
            whose bytes are viewed only when they arrive.
    """

    def __init__(self) -> None:
        self.path: list[str] = []
        self.array: list[int] = []
        self.box: list[Box | None] = []
        self.values: list[npt.NDArray[Any] | None] = []
        self.flat: list[Bytes | None] = []

    def __len__(self) -> int:
        return len(self.path)

    def add(
        self,
        path: str,
        array: int,
        box: Box | None,
        values: npt.NDArray[Any] | None,
        flat: Bytes | None,
    ) -> None:
        """Add a destination."""
        self.path.append(path)
        self.array.append(array)
        self.box.append(box)
        self.values.append(values)
        self.flat.append(flat)

    def requests(self) -> Requests:
        """Return the wanted boxes for the planner."""
        contiguous = np.array([flat is not None for flat in self.flat], np.bool_)
        return Requests(np.array(self.array, np.int64), self.box, contiguous)


def flat_target(array: npt.NDArray[Any]) -> Bytes | None:
    """Return the memory of a C-contiguous writable array as bytes, or None."""
    return flat_bytes(array) if array.flags.writeable else None


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


def plan_reads(
    opened: OpenCheckpoint,
    extents: Extents,
    destinations: Destinations,
    *,
    slot_nbytes: int,
    direct_nbytes: int = SMALL_NBYTES,
    files: StreamFiles | None = None,
    only: npt.NDArray[np.bool_] | None = None,
) -> PlannedReads:
    """Plan the reads that fill the destinations. Blocking.

    Chunks of `direct_nbytes` or more are read straight into their destinations where possible; all
    others are read together, up to `slot_nbytes`. `files` replaces the files of the checkpoint;
    `only` says of each chunk whether to read it (None: read all wanted chunks).
    """
    source = opened.files if files is None else files
    plan = plan_restore(
        opened.stored,
        destinations.requests(),
        row_file=extents.file,
        row_offset=extents.offset,
        row_nbytes=extents.nbytes,
        slot_nbytes=slot_nbytes,
        gap_nbytes=source.capabilities.read_gap_nbytes,
        direct_nbytes=direct_nbytes,
        only=only,
    )
    return PlannedReads(opened, source, extents, destinations, plan)
