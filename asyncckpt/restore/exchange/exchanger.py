"""The exchange of a restore: chunks that several processes want are read once, in pieces."""

# Rule 1: no process enters the collective of a batch before all are ready for it: they have read
#   their pieces of it and finished the previous batch. If one fails first, the restore ends on all
#   of them without the collective.
# Rule 2: at most two batches are in memory: one that has been exchanged, and pieces read ahead.

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from asyncckpt.checkpoint.metadata import missing
from asyncckpt.errors import CheckpointNotFoundError, StoreError
from asyncckpt.flow.shield import together, uninterrupted
from asyncckpt.flow.threads import Workers
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.options import RestoreOptions
from asyncckpt.planning.streams import Sharing, Stream, piece_nbytes, streams
from asyncckpt.ports import Bytes, CheckpointFiles, Exchange
from asyncckpt.reports import FileInfo, ReadRange
from asyncckpt.restore.exchange.agreement import RestoreAgreement
from asyncckpt.restore.exchange.streams import Incoming, StreamFiles
from asyncckpt.restore.plan import PlannedReads, plan_reads

WORTH_NBYTES = 64 << 20
"""Least payload that ``broadcast="auto"`` exchanges: reading less costs less than the agreement."""

BATCH_NBYTES = 64 << 20
"""Approximate bytes that the members of a stream exchange at a time."""

READ_NBYTES = 8 << 20
"""Size of the concurrent requests that read a piece."""

PADDING_NBYTES = 4096
"""Largest padding read with the chunk behind it: chunks begin at pages."""

MARGIN_S = 5.0
"""Time beyond `silence_s` for which a failed collective waits for the reason to be found."""


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


@dataclass(eq=False, repr=False)
class Exchanger:
    """One process' side of the exchange in a restore.

    Attributes:
        exchange: their collectives.
        batch_nbytes: bytes of a batch, equal on all processes.
        next_batch: number of the next batch, equal on all processes.
        ranges: the ranges of data files that this process has read for all.
        received_nbytes: bytes of data files received by exchange, including this process' own.
    """

    batch_nbytes = BATCH_NBYTES

    agreement: RestoreAgreement
    exchange: Exchange
    files: CheckpointFiles
    compute: Workers
    options: RestoreOptions

    def __post_init__(self) -> None:
        concurrency = self.options.concurrency
        reads = self.files.reads(None if concurrency == "auto" else concurrency)
        self._limit = asyncio.Semaphore(reads)
        self.process = self.agreement.round.group.process_index
        self._idle: list[Bytes] = []  # buffers of exchanged pieces, for reuse
        self.next_batch = 0
        self.ranges: list[ReadRange] = []
        self.received_nbytes = 0

    async def share(self, reads: PlannedReads, slot_nbytes: int) -> SharedReads | None:
        """Split the reads of this process as agreed with all others; None if all are its own."""
        sharing = await self.agreement.shared(
            reads.plan.rows,
            reads.extents.nbytes,
            least_nbytes=WORTH_NBYTES if self.options.broadcast == "auto" else 0,
            compute=self.compute,
        )
        self.ranges, self.received_nbytes = [], 0  # reports do not count metadata
        if not sharing.members:
            return None
        return await self.compute.run(self._split, sharing, reads, slot_nbytes)

    def _split(self, sharing: Sharing, reads: PlannedReads, slot_nbytes: int) -> SharedReads:
        """Plan the reads from streams, and the others."""
        opened, extents, destinations = reads.opened, reads.extents, reads.destinations
        found = streams(
            sharing,
            file=extents.file,
            offset=extents.offset,
            nbytes=extents.nbytes,
            first_batch=self.next_batch,
            batch_nbytes=self.batch_nbytes,
        )
        mine = [n for n, stream in enumerate(found) if self.process in stream.members]
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
            own=plan_reads(opened, extents, destinations, slot_nbytes=slot_nbytes, only=~is_shared),
            streamed=plan_reads(
                dataclasses.replace(opened, stored_files=stored_files),
                streamed,
                destinations,
                slot_nbytes=slot_nbytes,
                files=StreamFiles(paths, self.compute),
                only=is_shared,
            ),
            exchange=partial(self.run, found, [file.path for file in stored_files], incoming),
        )

    async def run(
        self, streams: Sequence[Stream], paths: Sequence[str], incoming: Mapping[int, Incoming]
    ) -> None:
        """Exchange the streams; all processes call this with the same streams.

        `paths` are those of the data files, by their number in the streams; `incoming` receives the
        streams of which this process is a member, by number of the stream.

        Raises:
            …: the error of any process, with its name.
        """
        batches = sorted(
            (batch, number)
            for number, stream in enumerate(streams)
            if number in incoming
            for batch in stream.batches
        )
        end = max((stream.batches.stop for stream in streams), default=self.next_batch)
        ahead: deque[tuple[int, int, asyncio.Task[Bytes]]] = deque()
        ahead_nbytes = 0

        async def exchange_next() -> None:
            nonlocal ahead_nbytes
            batch, number, reading = ahead.popleft()
            await self._exchange(streams[number], batch, await reading, incoming[number])
            ahead_nbytes -= streams[number].piece_nbytes

        async with asyncio.TaskGroup() as tasks:
            for batch, number in batches:
                stream = streams[number]
                if ahead and ahead_nbytes + stream.piece_nbytes > self.batch_nbytes:
                    await exchange_next()
                reading = tasks.create_task(self._read_piece(stream, batch, paths))
                ahead.append((batch, number, reading))
                ahead_nbytes += stream.piece_nbytes
            while ahead:
                await exchange_next()
        await self.agreement.ready(end)
        self.next_batch = end

    async def _exchange(self, stream: Stream, batch: int, piece: Bytes, incoming: Incoming) -> None:
        """Exchange one batch; `piece` is the part that this process has read."""
        taking_part = self._gather(stream.members, piece, batch)
        # Others may wait without end for a process that is ready: it takes part even if cancelled.
        gathered = await (uninterrupted(taking_part) if self.exchange.binding else taking_part)
        if gathered is None:
            await self.agreement.round.outcome()  # raises the error of another process
            raise AssertionError("the restore has failed")
        if isinstance(gathered, StoreError):
            # A member that dies breaks the collective of all others. This wait ends when its
            # silence is detected, with an error that names it.
            await asyncio.sleep(self.agreement.round.silence_s + MARGIN_S)
            raise gathered
        self._idle.append(piece)
        for part in stream.parts(batch):
            self.received_nbytes += part.stop - part.start
            await incoming.deliver(gathered[part])

    async def _gather(
        self, members: tuple[int, ...], piece: Bytes, batch: int
    ) -> Bytes | StoreError | None:
        """Return the pieces of all members, once all processes are ready; None if one failed.

        Returns an error of the collective instead of raising it, so that the caller can wait for
        its reason, which is cancellable even if the collective is not.
        """
        if not await self.agreement.ready(batch):
            return None
        try:
            return await self.exchange.gather(members, piece)
        except StoreError as error:
            return error

    async def _read_piece(self, stream: Stream, batch: int, paths: Sequence[str]) -> Bytes:
        """Read the piece of a batch that this process contributes."""
        begin, end = stream.piece(self.process, batch)
        piece = self._idle.pop() if self._idle else np.empty(0, np.uint8)
        if piece.nbytes != stream.piece_nbytes:
            piece = np.empty(stream.piece_nbytes, np.uint8)
        async with asyncio.TaskGroup() as tasks:
            for start in range(begin, end, READ_NBYTES):
                stop = min(start + READ_NBYTES, end)
                for each in stream.ranges(start, stop, PADDING_NBYTES):
                    buffers: list[Bytes] = []
                    for run, gap in zip(each.runs, [*each.gaps, 0], strict=True):
                        buffers.append(piece[start - begin : start - begin + run])
                        if gap:
                            buffers.append(np.empty(gap, np.uint8))
                        start += run
                    tasks.create_task(self._read(paths[each.file], each.offset, buffers))
        return piece

    async def _read(self, path: str, offset: int, buffers: Sequence[Bytes]) -> None:
        try:
            async with self._limit:
                await self.files.read_into(path, offset, buffers)
        except CheckpointNotFoundError as error:
            if path == RECORD_NAME:
                raise  # without it, there is no checkpoint
            raise missing(self.files.location, path) from error
        self.ranges.append(ReadRange(path, offset, sum(map(len, buffers)), ()))

    async def read_into(self, path: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer from a file; all processes call this for the same range."""
        members = tuple(range(self.agreement.round.group.process_count))
        stream = Stream(
            members=members,
            rows=np.zeros(1, np.int64),
            file=np.zeros(1, np.int64),
            offset=np.array([offset], np.int64),
            begin=np.array([0, buffer.nbytes], np.int64),
            piece_nbytes=piece_nbytes(len(members), self.batch_nbytes),
            first_batch=self.next_batch,
        )
        incoming = Incoming()
        reading = incoming.read_into(0, [buffer], self.compute)
        await together((self.run([stream], [path], {0: incoming}), reading))
