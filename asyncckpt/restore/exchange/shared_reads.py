"""Reads of a restore in two parts: exchanged, and by this process for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncckpt.planning.streams import Sharing, streams
from asyncckpt.reports import FileInfo
from asyncckpt.restore.exchange.exchanger import Exchanger
from asyncckpt.restore.exchange.streams import Incoming, StreamFiles
from asyncckpt.restore.plan import PlannedReads

Plan = partial[PlannedReads]
"""`plan_reads` with the sizes of the restore."""


class SharedReads(NamedTuple):
    """The reads of a restore in two parts.

    Attributes:
        own: reads of the chunks that no other process wants.
        streamed: reads of the exchanged chunks from streams.
        exchange: fills the streams.
    """

    own: PlannedReads
    streamed: PlannedReads
    exchange: Callable[[], Coroutine[Any, Any, None]]


async def share_reads(exchanger: Exchanger, reads: PlannedReads, plan: Plan) -> SharedReads | None:
    """Split the reads of this process as agreed with all others; None if nothing is exchanged."""
    sharing = await exchanger.agreement.shared(
        reads.plan.rows,
        reads.extents.nbytes,
        least_nbytes=exchanger.least_nbytes,
        compute=exchanger.compute,
    )
    if not sharing.members:
        return None
    return await exchanger.compute.run(_split, sharing, exchanger, reads, plan)


def _split(sharing: Sharing, exchanger: Exchanger, reads: PlannedReads, plan: Plan) -> SharedReads:
    """Plan the reads from streams, and the others."""
    opened, extents, destinations = reads.opened, reads.extents, reads.destinations
    found = streams(
        sharing,
        file=extents.file,
        offset=extents.offset,
        nbytes=extents.nbytes,
        first_batch=exchanger.next_batch,
        batch_nbytes=exchanger.batch_nbytes,
    )
    mine = [n for n, stream in enumerate(found) if exchanger.process in stream.members]
    mine.sort(key=lambda number: found[number].first_batch)
    file, offset = extents.file.copy(), extents.offset.copy()
    is_shared = np.zeros(len(extents), bool)
    stored_files = list(opened.stored_files)
    incoming: dict[int, Incoming] = {}
    paths: dict[str, Incoming] = {}
    for number in mine:
        stream, path = found[number], f"stream-{number}"
        incoming[number] = paths[path] = Incoming()
        file[stream.rows], offset[stream.rows] = len(stored_files), stream.begin[:-1]
        is_shared[stream.rows] = True
        stored_files.append(FileInfo(path, stream.nbytes, None))
    streamed = dataclasses.replace(extents, file=file, offset=offset, origin=extents)
    return SharedReads(
        own=plan(opened, extents, destinations, only=~is_shared),
        streamed=plan(
            dataclasses.replace(opened, stored_files=stored_files),
            streamed,
            destinations,
            files=StreamFiles(paths, exchanger.compute),
            only=is_shared,
        ),
        exchange=partial(exchanger.run, found, [file.path for file in stored_files], incoming),
    )
