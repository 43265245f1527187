"""Contribution of one process to a save of several: its entries, in place of index and record."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from asyncckpt.format.crc import crc32c
from asyncckpt.format.entries import Entries, Parts
from asyncckpt.reports import ProcessPart
from asyncckpt.save.index import Payload
from asyncckpt.save.plan_cache import Layout
from asyncckpt.save.snapshot import Snapshot


def entries_of(
    payload: Payload,
    layout: Layout,
    snapshot: Snapshot,
    *,
    save_id: str,
    process: int,
    overwrite: bool,
    times: tuple[float, float],
) -> Entries:
    """Return the entries of a process.

    `overwrite` is the caller's; `times` are the seconds until all was staged, and in all.
    """
    plan, extents = layout.plan, payload.chunks
    written = np.flatnonzero((extents.file >= 0) & (plan.row_writer == process))
    chunks = plan.row_chunk[list(plan.inline)].tolist()
    data, nbytes = payload.inline
    ends = np.cumsum(nbytes)
    places = zip(chunks, (ends - nbytes).tolist(), ends.tolist(), strict=True)
    values = {chunk: bytes(data[start:end]) for chunk, start, end in places}
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
        facts={
            "scalars": [(leaf, snapshot.values[leaf]) for leaf in snapshot.only_here],
            "spans": payload.timeline.rows(1),
            "times": times,
            "overwrite": overwrite,
        },
    )


def part_of(entries: Entries, host: str) -> ProcessPart:
    """Return a process' line of the report."""
    nbytes = sum(file.nbytes for file in entries.files)
    return ProcessPart(entries.process, host, nbytes, len(entries.files), *entries.facts["times"])


def scalar_checksums(snapshot: Snapshot) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of every scalar's type and value, in leaf order."""
    values = [[snapshot.kinds[leaf], snapshot.values[leaf]] for leaf in snapshot.scalars]
    return np.array([crc32c(json.dumps(value).encode()) for value in values], np.uint32)
