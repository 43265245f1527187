"""Reads of a restore in two parts: by exchange, and by this process for itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.metadata import Extents, OpenCheckpoint, StoredFile
from asyncckpt.planning.restore import RestorePlan
from asyncckpt.planning.streams import Sharing, Stream, streams
from asyncckpt.planning.table import Column
from asyncckpt.restore.exchange.exchanger import Exchanger
from asyncckpt.restore.exchange.streams import Incoming, StreamFiles

Plan = Callable[[Extents, int, npt.NDArray[np.bool_]], RestorePlan]
"""Where chunks are, the longest gap that a read takes along, and the chunks to read -> the plan."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedReads:
    """The reads of a restore in two parts.

    Attributes:
        exchanger: that of this restore.
        own_plan: chunks that no other process wants.
        plan: chunks that come by exchange, read from streams.
        opened: the checkpoint with the streams among its files.
        extents: where chunks are, in the streams.
        files: the streams.
        streams: those of all processes.
        incoming: by number of the stream, for those that come to this process.
    """

    exchanger: Exchanger
    own_plan: RestorePlan
    plan: RestorePlan
    opened: OpenCheckpoint
    extents: Extents
    files: StreamFiles
    streams: Sequence[Stream]
    incoming: Mapping[int, Incoming]

    async def run(self) -> None:
        """Exchange the streams."""
        paths = [file.path for file in self.opened.stored_files]
        await self.exchanger.run(self.streams, paths, self.incoming)


async def share_reads(
    exchanger: Exchanger, opened: OpenCheckpoint, extents: Extents, rows: Column, plan: Plan
) -> SharedReads | None:
    """Agree with all processes on what is exchanged; return None if that is nothing.

    `rows` are the chunks that this process wants.
    """
    sharing = await exchanger.agreement.shared(
        rows,
        extents.nbytes,
        least_nbytes=exchanger.least_nbytes,
        compute=exchanger.compute,
    )
    if not sharing.members:
        return None
    return await exchanger.compute.run(_split, sharing, exchanger, opened, extents, plan)


def _split(
    sharing: Sharing,
    exchanger: Exchanger,
    opened: OpenCheckpoint,
    extents: Extents,
    plan: Plan,
) -> SharedReads:
    """Plan what comes in streams, and what does not."""
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
        stored_files.append(StoredFile(path, stream.nbytes))
    streamed = dataclasses.replace(extents, file=file, offset=offset, origin=extents)
    return SharedReads(
        exchanger=exchanger,
        own_plan=plan(extents, opened.files.capabilities.read_gap_nbytes, ~is_shared),
        plan=plan(streamed, 0, is_shared),
        opened=dataclasses.replace(opened, stored_files=stored_files),
        extents=streamed,
        files=StreamFiles(paths, exchanger.compute),
        streams=found,
        incoming=incoming,
    )
