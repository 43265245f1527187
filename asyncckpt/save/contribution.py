"""Contribution of one process to a save of several: its entries, in place of index and record."""

# Rule 1: entries count only once this process has posted that it is ready: by then all of its files
#   are durable.
# Rule 2: entries that are written again get another name, like an index (`save/commit.py`).

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.flow.threads import Workers
from asyncckpt.format.crc import crc32c
from asyncckpt.format.entries import Entries, Parts, encode_entries
from asyncckpt.ports import AttemptFiles
from asyncckpt.reports import ProcessPart, Timeline
from asyncckpt.save.commit import Committable
from asyncckpt.save.index import Payload
from asyncckpt.save.plan_cache import Layout
from asyncckpt.save.snapshot import Snapshot


@dataclass(eq=False, repr=False)
class Contribution:
    """Commit stage of every process but process 0: passes its entries on.

    Attributes:
        attempt: where the files go.
        layout: the plan.
        snapshot: the tree.
        save_id: identity of the save, 32 hex digits.
        process: number of this process.
        host: name of its host.
        compute: threads that encode.
        times: returns the seconds until all was staged, and until now.
        path: where the latest entries are.
        after_data: as in `Commit`; always, because entries say when the files were durable.
        parts: what this process did, for the report.
        timelines: as in `Commit`; none, because only process 0 knows those of others.
    """

    attempt: AttemptFiles
    layout: Layout
    snapshot: Snapshot
    _: KW_ONLY
    save_id: str
    process: int
    host: str
    compute: Workers
    times: Callable[[], tuple[float, float]]

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self.path = ""
        self.after_data = True
        self.parts: tuple[ProcessPart, ...] = ()
        self.timelines: Sequence[Timeline] = ()

    async def put_orbax(self) -> None:
        """Do nothing: process 0 writes Orbax's files."""

    async def put_index(self, payload: Payload) -> Committable:
        """Pass this process' entries on. May be called again; the last result counts."""
        self.path = f"{self.save_id}-entries-{self.process}-{next(self._numbers)}"
        entries = entries_of(
            payload, self.layout, self.snapshot, save_id=self.save_id, process=self.process
        )
        entries.facts["times"] = self.times()
        self.parts = (part_of(entries, self.host),)
        data = await self.compute.run(encode_entries, entries)
        await self.attempt.pass_on(self.path, data)
        return Committable(b"", sum(file.nbytes for file in entries.files), len(entries.files))


def entries_of(
    payload: Payload, layout: Layout, snapshot: Snapshot, *, save_id: str, process: int
) -> Entries:
    """Return the entries of a process."""
    plan, extents = layout.plan, payload.chunks
    written = np.flatnonzero((extents.file >= 0) & (plan.row_writer == process))
    chunks = plan.arrays.first_chunk[list(plan.inline)].tolist()
    values = dict(zip(chunks, map(bytes, payload.inline), strict=True))
    return Entries(
        save_id=save_id,
        process=process,
        digest=layout.schema_digest,
        files=payload.files,
        chunk=plan.row_chunk[written],
        file=extents.file[written],
        offset=extents.offset[written],
        nbytes=extents.nbytes[written],
        crc=extents.crc32c[written],
        values=values,
        parts=Parts.of(
            [
                (held.array, held.box, data if held.writer == process else b"", crc32c(data))
                for held, data in payload.parts
            ]
        ),
        checked=plan.row_chunk[payload.checked],
        checked_crc=payload.checked_crc,
        scalar=np.array(list(snapshot.scalars), np.int64),
        scalar_crc=scalar_checksums(snapshot),
        facts={"scalars": _only_here(snapshot, process), "spans": payload.timeline.rows(1)},
    )


def part_of(entries: Entries, host: str) -> ProcessPart:
    """Return a process' line of the report."""
    nbytes = sum(file.nbytes for file in entries.files)
    return ProcessPart(entries.process, host, nbytes, len(entries.files), *entries.facts["times"])


def _only_here(snapshot: Snapshot, process: int) -> list[tuple[int, Any]]:
    """Return the scalars that process 0 lacks, if this is the lowest process that has them."""
    lacking = snapshot.lacking
    return [
        (leaf, snapshot.values[leaf])
        for leaf in snapshot.scalars
        if min(lacking.get(leaf, (0,))) == process > 0
    ]


def scalar_checksums(snapshot: Snapshot) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of every scalar's type and value, in leaf order."""
    values = [[snapshot.kinds[leaf], snapshot.values[leaf]] for leaf in snapshot.scalars]
    return np.array([crc32c(json.dumps(value).encode()) for value in values], np.uint32)
