"""The decode stage: check stored chunks, and copy their elements to destination buffers.

Everything that touches the bytes of chunks runs in worker threads.
"""

# Rule 1: a checksum that fails ends the restore; values are handed over only after all have passed.
# Rule 2: no allocation depends on a size that a chunk claims; sizes come from the record's shapes.
#
# `Fetch` chooses one of four ways for each chunk:
#   direct   it is read straight into the destination and checked there;
#   small    it shares a slot with others: all are checked and copied to their destinations;
#   piece    larger than a slot: it passes through one slot piece by piece, and its checksum is
#            known only after the last piece;
#   encoded  larger than a slot and compressed: it is read into several slots and decoded whole.
# Compressed chunks of `INTO_NBYTES` or more are decoded straight into destinations that are one
# run of bytes.

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncckpt.checkpoint.metadata import Storage
from asyncckpt.checkpoint.payload import scatter
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.codecs import INTO_NBYTES, PLAIN, ChunkError
from asyncckpt.format.crc import crc32c
from asyncckpt.format.zarr3 import CRC_NBYTES
from asyncckpt.options import GIL_NBYTES
from asyncckpt.planning.restore import Part, ReadBatch, intersection
from asyncckpt.ports import Bytes
from asyncckpt.restore.plan import PlannedReads
from asyncckpt.spec import DTYPES

SHORT_NBYTES = 8 << 10
"""Compressed chunks below this mean size are decoded by one thread at a time: every chunk releases
the GIL, and handing it over between two threads would take longer than zstd does."""


def trailer_matches(trailer: Bytes | memoryview, crc: int) -> bool:
    """Return whether the four bytes after a payload are its checksum."""
    return trailer.tobytes() == crc.to_bytes(CRC_NBYTES, "little")


def _copied(values: npt.NDArray[Any] | None, payload: memoryview) -> bool:
    """Copy a whole destination if it is one run of bytes of this length; return whether it is."""
    if values is None or values.nbytes != len(payload):
        return False
    if len(payload) >= GIL_NBYTES:
        if values.flags.carray:
            np.copyto(np.frombuffer(values, np.uint8), np.frombuffer(payload, np.uint8))
        return values.flags.carray
    # Between memoryviews, which lack extension dtypes: NumPy would release the GIL, and wait to get
    # it back.
    try:
        bits = values if values.dtype.kind != "V" else np.frombuffer(values, np.uint8)
        memoryview(bits).cast("B")[:] = payload
    except (TypeError, ValueError):  # not contiguous, or read-only
        return False
    return True


class Check:
    """Check of a read in progress, called with the number of bytes that have arrived so far.

    Attributes:
        complete: all bytes have arrived and passed.
    """

    def __init__(self, steps: Generator[None, int, None]) -> None:
        self._steps = steps
        self.complete = False
        next(steps)

    def __call__(self, arrived: int) -> None:
        """Check the bytes that have arrived since the last call; not thread-safe."""
        try:
            self._steps.send(arrived)
        except StopIteration:
            self.complete = True


class Decode:
    """The decode stage of planned reads.

    Methods raise `CorruptCheckpointError`, which names leaf, file and offset.
    """

    def __init__(self, reads: PlannedReads) -> None:
        self._opened = reads.opened
        self._extents = reads.extents
        self._has_crcs = reads.extents.crc32c is not None
        self._plan = reads.plan
        self._destinations = reads.destinations
        self._chunk = reads.chunk
        self._short_lock = threading.Lock()  # held while decoding short chunks (`SHORT_NBYTES`)
        codecs = [storage.codec for storage in reads.opened.storages]
        self._any_encoded = any(codec.decode for codec in codecs)
        self._any_crcs = self._has_crcs or any(codec.trailer_nbytes for codec in codecs)

    def storage(self, part: Part) -> Storage:
        """Return how the chunk of a part is stored."""
        return self._opened.storage(self._destinations.array[part.request])

    def encoded_parts(self, batch: ReadBatch) -> list[Part]:
        """Return the parts of a batch whose chunks must be decoded."""
        if not self._any_encoded:
            return []
        return [part for part in batch.parts if self.storage(part).codec.decode is not None]

    # -- the ways of a chunk

    def without_extent(self) -> None:
        """Fill destinations from chunks that are in the metadata or were never stored."""
        values, inline = self._extents.values, self._plan.inline
        for part in inline:
            data = values.get(part.row)
            if data is None:
                self._fill(part)
                continue
            batch = ReadBatch(-1, 0, len(data), inline, False)
            stored = [np.frombuffer(data, np.uint8)]
            self._scatter(part, self._payload(batch, part.row, self.storage(part), stored), 0)

    def checks(
        self, batches: Sequence[ReadBatch], buffers: Sequence[Bytes]
    ) -> Generator[None, int, None]:
        """Check the batches that one call reads, step by step (`Check`).

        `buffers` has two per batch: its bytes, and the bytes up to the next one; for direct batches
        two per part: its payload, which is in its destination then, and the bytes up to the next.
        """
        arrived, begin = (yield), 0
        pairs = zip(buffers[::2], buffers[1::2], strict=True)
        for batch in batches:
            if not batch.direct:
                data, rest = next(pairs)
                begin += data.size
                while arrived < begin:
                    arrived = yield
                self.small(batch, data)
                begin += rest.size
                continue
            crcs: list[int] = []
            rests: list[Bytes] = []
            for data, rest in itertools.islice(pairs, len(batch.parts)):
                crc = start = 0
                while self._any_crcs and start < data.size:
                    while arrived <= begin + start:
                        arrived = yield
                    stop = min(arrived - begin, data.size)
                    crc = crc32c(data[start:stop], crc)
                    start = stop
                begin += data.size + rest.size
                crcs.append(crc)
                rests.append(rest)
            while arrived < begin:
                arrived = yield
            self._expect_direct(batch, crcs, rests)

    def _expect_direct(self, batch: ReadBatch, crcs: list[int], rests: list[Bytes]) -> None:
        """Compare the checksums of payloads with the index and the trailers.

        `rests` are the bytes behind the payloads: padding, trailer, and the gap to the next chunk.
        """
        rows, extents = batch.parts.column(0), self._extents
        known = crcs if extents.crc32c is None else extents.crc32c[rows].tolist()
        tails = (extents.nbytes[rows] - batch.parts.column(3)).tolist()
        for number, (crc, indexed, tail, rest) in enumerate(
            zip(crcs, known, tails, rests, strict=True)
        ):
            if tail == CRC_NBYTES and crc == indexed and trailer_matches(rest[:CRC_NBYTES], crc):
                continue  # nearly all
            part = batch.parts[number]
            end = tail - self.storage(part).codec.trailer_nbytes
            if self._has_crcs or end < tail:  # unlike some foreign chunks
                self.expect(batch, part.row, crc32c(rest[:end], crc), rest[end:tail])

    def piece(self, batch: ReadBatch, data: Bytes, start: int, crc: int) -> int:
        """Copy the piece of a large chunk that begins at `start`, not yet checked.

        `crc` is the checksum of the chunk up to `start`; returns the one up to the end of the
        piece.
        """
        for part in batch.parts:
            self._scatter(part, data, start)
        if not self._has_crcs and not self.storage(batch.parts[0]).codec.crc32c:
            return 0
        return crc32c(data, crc)

    def encoded(self, batch: ReadBatch, stored: list[Bytes]) -> None:
        """Check, decode and copy a chunk that was read into several buffers."""
        first, *others = batch.parts
        storage = self.storage(first)
        target = self._target(storage, first.row, first.request)
        payload = self._payload(batch, first.row, storage, stored, target)
        for part in others if payload is target else batch.parts:
            self._scatter(part, payload, 0)

    def small(self, batch: ReadBatch, data: Bytes) -> None:
        """Check and copy the chunks of a batch, all of which `data` holds."""
        # This loop determines the cost of a small leaf: no object per part, few lookups. A row that
        # several destinations want has several parts; it is checked and decoded once.
        values, counts = self._destinations.values, self._plan.counts
        has_crcs, any_encoded = self._has_crcs, self._any_encoded
        decodes = any_encoded or not has_crcs
        rows, requests = batch.parts.column(0), batch.parts.column(1)
        starts, stops, crcs = self._bounds(batch, data, rows)
        view = memoryview(data)
        payload = view[:0]
        last = -1
        short = has_crcs and any_encoded and batch.nbytes < SHORT_NBYTES * len(rows)
        with self._short_lock if short else nullcontext():
            for number, (row, request) in enumerate(zip(rows, requests, strict=True)):
                if row != last:
                    last, start, stop = row, starts[number], stops[number]
                    payload = view[start:stop]
                    if has_crcs:
                        crc = crc32c(payload)
                        if crc != crcs[number]:
                            self.expect(batch, row, crc, data[stop : stop + CRC_NBYTES])
                    if decodes:
                        storage = self._opened.storage(self._destinations.array[request])
                        if storage.codec is PLAIN:
                            self.check_length(batch, row, storage, stop - start)
                        else:
                            elements = None  # one decoded chunk at a time is in the budget
                            target, stored = self._target(storage, row, request), [data[start:stop]]
                            elements = self._payload(
                                batch, row, storage, stored, target, checked=has_crcs
                            )
                            payload = memoryview(elements)
                            if elements is target:
                                continue
                # Only if the destination wants one chunk: part of another may be as long.
                if counts[request] != 1 or not _copied(values[request], payload):
                    self._scatter(batch.parts[number], np.frombuffer(payload, np.uint8), 0)

    def _bounds(
        self, batch: ReadBatch, data: Bytes, rows: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return starts, stops and CRCs of the chunks, after comparing trailers with the index.

        Without checksums in the index, return no CRCs, and stops that include any trailer.
        """
        extents, numbers = self._extents, np.array(rows, np.int64)
        starts = extents.offset[numbers] - batch.offset
        stops = starts + extents.nbytes[numbers]
        if extents.crc32c is None:
            return starts.tolist(), stops.tolist(), []
        stops -= CRC_NBYTES
        crcs = extents.crc32c[numbers]
        trailers = data[stops[:, None] + np.arange(CRC_NBYTES)].view("<u4").reshape(-1)
        bad = np.flatnonzero(trailers != crcs)
        if len(bad):
            row, start, stop = rows[bad[0]], int(starts[bad[0]]), int(stops[bad[0]])
            crc = crc32c(data[start:stop])
            self.expect(batch, row, crc, data[stop : stop + CRC_NBYTES])
        return starts.tolist(), stops.tolist(), crcs.tolist()

    # -- steps of these

    def _fill(self, part: Part) -> None:
        values = self._destinations.values[part.request]
        if values is None:
            return
        storage, number, box = self._chunk(part.row, part.request)
        element = np.frombuffer(storage.fill or bytes(storage.spec.itemsize), np.uint8)
        _, within = intersection(storage.grid, number, box)
        values[within] = element.view(DTYPES[storage.spec.dtype])[0]

    def _target(self, storage: Storage, row: int, request: int) -> Bytes | None:
        """Return the memory for all elements of a chunk, if they are decoded straight into it.

        None if it is not one run of bytes, or if the chunk is so short that copying costs less.
        """
        values = self._destinations.values[request]
        if values is None or not storage.codec.decode_into or storage.chunk_nbytes < INTO_NBYTES:
            return None
        _, number, box = self._chunk(row, request)
        _, within = intersection(storage.grid, number, box)
        index: Any = (*within, ...)
        target = values[index]
        if not target.flags.carray or target.nbytes != storage.chunk_nbytes:
            return None
        return np.frombuffer(target, np.uint8)

    def _payload(
        self,
        batch: ReadBatch,
        row: int,
        storage: Storage,
        stored: list[Bytes],
        target: Bytes | None = None,
        *,
        checked: bool = False,
    ) -> Bytes:
        """Check a chunk in these buffers and return its elements, in `target` if possible.

        With `checked`, its checksum has been compared, and the buffers end before its trailer.
        """
        codec = storage.codec
        if not checked and (self._has_crcs or codec.crc32c):
            if stored[-1].nbytes < CRC_NBYTES:
                stored = [np.concatenate(stored)]
            *others, last = stored
            if last.nbytes < CRC_NBYTES:
                raise self._damaged(batch, row, f"{last.nbytes} bytes hold no checksum")
            stored = [*others, last[:-CRC_NBYTES]]
            crc = 0
            for buffer in stored:
                crc = crc32c(buffer, crc)
            self.expect(batch, row, crc, last[-CRC_NBYTES:])
        if codec.decode is None:
            (data,) = stored
            self.check_length(batch, row, storage, data.nbytes)
            return data
        try:
            if codec.decode_into is None or target is None:
                return codec.decode(stored, storage.chunk_nbytes)
            codec.decode_into(stored, target)
            return target
        except ChunkError as error:
            raise self._damaged(batch, row, str(error)) from None

    def check_length(self, batch: ReadBatch, row: int, storage: Storage, nbytes: int) -> None:
        """Check that an uncompressed chunk has the length of its elements."""
        if nbytes != storage.chunk_nbytes:
            reason = f"it has {nbytes} bytes, the array needs {storage.chunk_nbytes}"
            raise self._damaged(batch, row, reason)

    def _scatter(self, part: Part, payload: Bytes, start: int) -> None:
        values = self._destinations.values[part.request]
        if values is None:
            return
        storage, number, box = self._chunk(part.row, part.request)
        grid = storage.grid
        if payload.nbytes == storage.chunk_nbytes:
            # Nearly all chunks. The arithmetic for pieces takes several times as long as the copy
            # of a small chunk.
            dtype = DTYPES[storage.spec.dtype]
            elements = payload.view(dtype)
            if not elements.flags.aligned:
                elements = payload.copy().view(dtype)
            within, where = intersection(grid, number, box)
            source: Any = (*within, ...)
            target: Any = (*where, ...)
            np.copyto(values[target], elements.reshape(grid.chunk_shape)[source], casting="no")
            return
        cell = tuple(map(int, np.unravel_index(number, grid.counts)))
        scatter(payload, storage.spec, grid, cell, start, values, box)

    def expect(self, batch: ReadBatch, row: int, crc: int, trailer: Bytes) -> None:
        """Compare the checksum of a chunk's bytes with the index and the trailer."""
        known = self._extents.crc32c
        if known is not None and crc != known.item(row):
            reason = f"CRC-32C is {crc:08x}, the chunk index says {int(known[row]):08x}"
            raise self._damaged(batch, row, reason)
        if trailer.nbytes and not trailer_matches(trailer, crc):
            raise self._damaged(batch, row, "the checksum behind the chunk differs from its bytes")

    def _damaged(self, batch: ReadBatch, row: int, reason: str) -> CorruptCheckpointError:
        opened = self._opened
        path = next(self._destinations.path[p.request] for p in batch.parts if p.row == row)
        file, offset = None, None
        place, advice = "a chunk in the metadata", "use another checkpoint"
        if batch.file >= 0:
            stored = self._extents.origin or self._extents
            file = opened.stored_files[int(stored.file[row])].path
            offset = int(stored.offset[row])
            place, advice = f"the chunk at byte {offset} of {file}", "restore an older step"
        return CorruptCheckpointError(
            f"{path}: {opened.location}: {place} is damaged: {reason}; {advice}, or leave this "
            "path out with include=",
            path=path,
            stage="decode",
            location=opened.location,
            file=file,
            offset=offset,
        )
