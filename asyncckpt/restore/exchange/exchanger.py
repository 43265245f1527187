"""The exchange of a restore: chunks that several processes want are read once, in pieces."""

# Rule 1: no process enters a collective before all have said that they are ready for that batch:
#   that they have read their piece of it and finished the batch before. A failure of one of them
#   ends the restore of all instead.
# Rule 2: two batches are held at most: one that has been exchanged, and pieces read ahead.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from asyncckpt.errors import StoreError
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.flow.threads import Workers
from asyncckpt.planning.streams import Stream, piece_nbytes
from asyncckpt.ports import Bytes, CheckpointFiles, Exchange
from asyncckpt.restore.agreement import RestoreAgreement
from asyncckpt.restore.exchange.streams import Incoming

WORTH_NBYTES = 64 << 20
"""``broadcast="auto"`` exchanges from this size on: reading less costs less than the agreement."""

BATCH_NBYTES = 64 << 20
"""Bytes that the members of a stream exchange at a time, about."""

READ_NBYTES = 8 << 20
"""Pieces are read by requests of this size, several at a time."""

PADDING_NBYTES = 4096
"""Chunks begin at pages: the padding before them is read with them."""

MARGIN_S = 5.0
"""How much longer than `silence_s` a failed collective waits for the reason to be found."""


@dataclass(eq=False, repr=False)
class Exchanger:
    """The part of one process in the exchange of a restore.

    Attributes:
        agreement: with the other processes on this restore.
        exchange: their collectives.
        files: the checkpoint.
        compute: worker threads.
        reads: reads in flight.
        least_nbytes: if several processes want less of the payload, each reads it for itself.
        process: number of this process.
        batch_nbytes: bytes of a batch, the same on all processes.
        next_batch: number of the next batch, the same on all processes.
        read_nbytes: bytes that this process has read for all.
        received_nbytes: bytes that it has received by exchange, including its own.
    """

    batch_nbytes = BATCH_NBYTES

    agreement: RestoreAgreement
    exchange: Exchange
    files: CheckpointFiles
    compute: Workers
    _: KW_ONLY
    reads: int
    least_nbytes: int

    def __post_init__(self) -> None:
        self._limit = asyncio.Semaphore(self.reads)
        self.process = self.agreement.round.group.process_index
        self._idle: list[Bytes] = []  # memory of pieces that have been exchanged
        self.next_batch = 0
        self.read_nbytes = 0
        self.received_nbytes = 0

    async def run(
        self, streams: Sequence[Stream], paths: Sequence[str], incoming: Mapping[int, Incoming]
    ) -> None:
        """Exchange the streams; all processes call this with the same ones.

        Args:
            streams: what is exchanged.
            paths: paths of the data files, by their number in the streams.
            incoming: by number of the stream, for those that this process is a member of.

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
        """Exchange one batch, of which this process has read a piece."""
        taking_part = self._gather(stream.members, piece, batch)
        # If others would wait for ever, a process that has said that it is ready takes part.
        gathered = await (uninterrupted(taking_part) if self.exchange.binding else taking_part)
        if gathered is None:
            await self.agreement.round.outcome()  # which is the error of another process
            raise AssertionError("the restore has failed")
        if isinstance(gathered, StoreError):
            # A member that dies breaks the collective of all others. Its silence is soon detected,
            # which names it and ends this wait.
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

        An error of the collective is returned, not raised: taking part may not be cancellable, and
        waiting for the reason is.
        """
        if not await self.agreement.ready(batch):
            return None
        try:
            return await self.exchange.gather(members, piece)
        except StoreError as error:
            return error

    async def _read_piece(self, stream: Stream, batch: int, paths: Sequence[str]) -> Bytes:
        """Read this process' piece of a batch."""
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
        self.read_nbytes += end - begin
        return piece

    async def _read(self, path: str, offset: int, buffers: Sequence[Bytes]) -> None:
        async with self._limit:
            await self.files.read_into(path, offset, buffers)

    async def read(self, path: str, offset: int, nbytes: int) -> Bytes:
        """Return one range of a file, which all processes want and ask for at the same time."""
        members = tuple(range(self.agreement.round.group.process_count))
        stream = Stream(
            members=members,
            rows=np.zeros(1, np.int64),
            file=np.zeros(1, np.int64),
            offset=np.array([offset], np.int64),
            begin=np.array([0, nbytes], np.int64),
            piece_nbytes=piece_nbytes(len(members), self.batch_nbytes),
            first_batch=self.next_batch,
        )
        incoming = Incoming()
        data = np.empty(nbytes, np.uint8)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run([stream], [path], {0: incoming}))
            tasks.create_task(incoming.read_into(0, [data], self.compute))
        return data
