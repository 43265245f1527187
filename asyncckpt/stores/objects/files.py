"""Read access to one checkpoint on an object store."""

# Rule 1: nothing is opened or cached: the store answers every read. Only one save writes the names
#   of its data, so bytes of two saves never mix; a reader that finds data missing asks
#   `ObjectFiles.changed` whether the checkpoint was deleted or replaced.
# Rule 2: the task that made a request, which the caller awaits, copies the response into the
#   caller's buffers: nothing writes to a buffer after the read has returned or raised.
#   (test_nothing_is_written_after_a_cancelled_read)
# Rule 3: every byte of a buffer is written once, in order within its range, and then checked,
#   however many requests deliver it: the loser of a race cannot overwrite checked bytes.
#   (test_requests_that_race_write_every_byte_once)
# Rule 4: a fixed name that does not exist yet is read from the object or record with its content.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError, ClosedError, CorruptCheckpointError
from asyncckpt.flow.shield import mapped
from asyncckpt.flow.threads import Workers
from asyncckpt.options import CACHED_NBYTES, MIB, PAGE_NBYTES
from asyncckpt.ports import ORDINARY, RECORD_NAME, Bytes, Entry, Reading, StoreCapabilities
from asyncckpt.stores.objects.clients.client import (
    INLINE_NBYTES,
    Body,
    Listed,
    RequestError,
    unless_missing,
)
from asyncckpt.stores.objects.context import HEAD_NBYTES, Context
from asyncckpt.stores.objects.failures import reported, store_error
from asyncckpt.stores.objects.layout import join
from asyncckpt.stores.paths import path_parts, read_parts

RANGE_NBYTES = 16 * MIB
"""Maximum size of the equal ranges into which a long run is cut; the minimum is half of it."""

RANGE_MAX_NBYTES = RANGE_NBYTES + RANGE_NBYTES // 8
"""Runs up to this length are not cut, so that a run of whole chunks leaves no short range."""

RANGES_AT_ONCE = 16
"""Ranged reads of one run in flight: 256 MiB, more than a store sends one reader in a second."""


class ObjectFiles:
    """Files of one checkpoint. Made by `ObjectStore.files`."""

    def __init__(self, context: Context, name: str, capabilities: StoreCapabilities) -> None:
        self.location = context.requests.location(name)
        self.capabilities = capabilities
        self.closed = False
        self._context = context
        self._requests = context.requests
        self._name = name
        self._head: bytes | None = None
        self._contents: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"ObjectFiles({self.location!r})"

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Return the whole content of a small file. As `CheckpointFiles.read`."""
        key = self._key(path)
        if path == RECORD_NAME:
            data = await self._read_record(max_nbytes)
        else:
            try:
                data = await self._requests.read(key, max_nbytes=max_nbytes)
            except RequestError as error:
                content = await self._content(path, error)
                data = content if len(content) <= max_nbytes else None
        if data is None:
            text = (
                f"more than {max_nbytes} bytes, the limit for this file; it is damaged or not part "
                "of a checkpoint: use another checkpoint"
            )
            raise self._corrupt(path, text, expected=max_nbytes)
        return data

    async def _read_record(self, max_nbytes: int) -> bytes | None:
        """Return the record, or None if it is longer than `max_nbytes`.

        Raises:
            CheckpointNotFoundError: there is no record, or it does not count.
            StoreError: the read failed for another reason.
        """
        with reported("reading", self._full(RECORD_NAME)):
            record = await self._context.read_record(self._name, max_nbytes=max_nbytes)
        if record is None:
            raise self._missing(RECORD_NAME)
        if not await self._context.counts(record):
            raise CheckpointNotFoundError(
                f"{self.location}: the record here does not count: its writer (epoch "
                f"{record.epoch}) had already been fenced. The next save of this step replaces it",
                location=self.location,
                found=record.save_id,
            )
        # A damaged record may only have been damaged in transit: `changed` ignores it.
        if self._head is None and record.save_id is not None and record.data is not None:
            self._head = record.data[:HEAD_NBYTES]
        return record.data

    def _missing(self, path: str, what: str = "no such object") -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"{self._full(path)}: {what}; there is no checkpoint here, or it was deleted while it "
            "was being read",
            location=self.location,
            found=path,
        )

    def _corrupt(self, path: str, text: str, **facts: Any) -> CorruptCheckpointError:
        """Return the error for a damaged or hostile object; `text` follows its URL."""
        text = f"{self._full(path)}: {text}"
        return CorruptCheckpointError(text, file=path, location=self.location, **facts)

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill the buffers from a run of the object. As `CheckpointFiles.read_into`.

        Runs longer than `RANGE_MAX_NBYTES` are read in concurrent ranges, which arrive in any
        order: `how.check` is not called for these.
        """
        key = self._key(path)
        nbytes = sum(buffer.size for buffer in buffers)
        if nbytes == 0:
            return
        spans = ranges(offset, offset + nbytes)
        destination = _Destination(buffers, offset, len(spans), how.received)
        check = how.check if len(spans) == 1 else None
        parts = [_Part(destination, *span, self._context.workers, check) for span in spans]
        streams = RANGES_AT_ONCE
        if how.ahead_nbytes is not None:
            streams = max(1, min(streams, how.ahead_nbytes // RANGE_NBYTES))
        await mapped(lambda part: self._range(path, key, destination, part), parts, streams)

    async def _range(self, path: str, key: str, run: _Destination, part: _Part) -> None:
        try:
            await self._requests.fill(key, part)
        except RequestError as error:
            content = await self._content(path, error)
            await part.put(part.at, [content[part.at : part.stop]])
        if part.at < part.stop:
            text = (
                f"the object ends at or before byte {part.at}, expected bytes {run.start} to "
                f"{run.stop}; it is truncated: use another checkpoint"
            )
            raise self._corrupt(path, text, offset=part.at, expected=run.stop, found=part.at)

    async def _content(self, path: str, error: RequestError) -> bytes:
        """Return the content of a fixed name that does not exist yet.

        Raises:
            CheckpointNotFoundError: the record does not list this name.
            CorruptCheckpointError: the copy of its content is damaged.
            StoreError: the read failed for another reason.
        """
        if error.kind != "missing":
            raise store_error("reading", self._full(path), error) from error
        context = self._context
        if path not in ("", RECORD_NAME) and path not in self._contents:
            with reported("reading", self._full(path)):
                outline = await context.outline(await context.read_record(self._name))
                fixed = [one for one in outline.fixed if one.path == path]
                self._contents |= outline.contents
                self._contents |= await context.load_fixed(self._name, outline, fixed)
        if path in self._contents:
            return self._contents[path]
        raise self._missing(path) from error

    async def entries(self, path: str = "", *, max_entries: int) -> list[Entry]:
        """List one level of the checkpoint, never from a cache. As `CheckpointFiles.entries`."""
        key = self._key(path)
        listed: list[Listed] = []
        with reported("listing", self._full(path)), unless_missing():
            listed = await self._requests.list(key, recursive=False, limit=max_entries)
            if not listed:
                return [Entry("", await self._requests.size(key), False)]
        if not listed:
            raise self._missing(path, "nothing is stored there")
        if len(listed) > max_entries:
            text = f"more than {max_entries} entries; this is not a checkpoint, or it is hostile"
            raise self._corrupt(path, text, expected=max_entries)
        found = [
            Entry(entry.key[len(key) + 1 :], entry.nbytes, entry.is_prefix) for entry in listed
        ]
        # Keys may have empty parts, which no path of a checkpoint has.
        return sorted(entry for entry in found if path_parts(entry.name) == (entry.name,))

    def reads(self, wanted: int | None) -> int:
        """Return how many reads to keep in flight: `wanted`, or the tuner's current number.

        Applies to the whole store from now on.
        """
        self._requests.fix_streams("get", wanted)
        return self._requests.controllers["get"].gate.ceiling

    async def changed(self) -> Literal["deleted", "replaced"] | None:
        """Return how the record has changed since it was read here; None if it has not."""
        if self._head is None:
            return None
        with reported("reading the record", self._full(RECORD_NAME)):
            head = await self._context.read_head(self._name)
        if head is None:
            return "deleted"
        return None if head == self._head else "replaced"

    async def close(self) -> None:
        """Read nothing more. Idempotent."""
        self.closed = True

    def _key(self, path: str) -> str:
        if self.closed:
            raise ClosedError(
                f"{self.location}: these files are closed; get them from the store again",
                location=self.location,
            )
        if path:
            read_parts(path, self.location)
        return join(self._name, path)

    def _full(self, path: str) -> str:
        return self._requests.location(join(self._name, path))


class _Destination:
    """Destination buffers of one run of an object, which arrives in `count` ranges."""

    def __init__(
        self, buffers: Sequence[Bytes], offset: int, count: int, received: Callable[[], None] | None
    ) -> None:
        self._buffers = buffers
        self._coming = count
        self._received = received
        *_, self.stop = self._begins = list(accumulate(map(len, buffers), initial=offset))
        self.start = offset

    def arrived(self) -> None:
        """Note that one more range has arrived."""
        self._coming -= 1
        if not self._coming and self._received is not None:
            self._received()

    def copy(self, start: int, source: Bytes) -> None:
        """Copy bytes of the object, beginning at `start`, to their buffers."""
        number = bisect_right(self._begins, start) - 1
        done = 0
        while done < source.size:
            buffer, at = self._buffers[number], start + done - self._begins[number]
            count = min(buffer.size - at, source.size - done)
            np.copyto(buffer[at : at + count], source[done : done + count])
            done += count
            number += 1


class _Part:
    """A range of a run, as a `Sink`.

    Bytes are copied in steps that stay in the cache; after each, `check` is called with the number
    of bytes of the run so far. A short range is copied on the event loop, without `check`.
    """

    def __init__(
        self,
        run: _Destination,
        start: int,
        stop: int,
        workers: Workers,
        check: Callable[[int], None] | None,
    ) -> None:
        self.at, self.stop = start, stop
        self._run = run
        self._start = start
        self._coming = True
        self._workers = None if stop - start <= INLINE_NBYTES else workers
        self._check = check if self._workers else None

    async def put(self, start: int, pieces: Sequence[Body]) -> None:
        """As `Sink.put`."""
        end = start + sum(map(len, pieces))
        if end <= self.at:
            return
        if end == self.stop and self._coming:
            self._coming = False
            self._run.arrived()
        if self._workers is None:
            self._put(start, pieces)
        else:
            await self._workers.run(self._put, start, pieces)

    def _put(self, start: int, pieces: Sequence[Body]) -> None:
        for piece in pieces:
            source = np.frombuffer(piece, np.uint8)
            end = start + source.size
            while self.at < end:
                left = CACHED_NBYTES - (self.at - self._start) % CACHED_NBYTES
                count = min(left, end - self.at)
                done = self.at - start
                self._run.copy(self.at, source[done : done + count])
                self.at += count
                if self._check is not None and (count == left or self.at == self.stop):
                    self._check(self.at - self._run.start)
            start = end


def ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a run that is too long for one request into equal ranges of whole pages."""
    if stop - start <= RANGE_MAX_NBYTES:
        return [(start, stop)]
    count = -(-(stop - start) // RANGE_NBYTES)
    size = -(-(stop - start) // count)
    size = min(-(-size // PAGE_NBYTES) * PAGE_NBYTES, RANGE_NBYTES)
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
