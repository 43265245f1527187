"""Read access to one checkpoint on an object store."""

# Rule 1: nothing is opened and nothing cached: every read is answered by the store. Data have names
#   that only one save writes, so that bytes of two saves are never mixed; whoever finds them gone
#   asks `ObjectFiles.changed` whether the checkpoint was deleted or replaced meanwhile.
# Rule 2: answers are copied into the caller's buffers by the task that asked, which the caller
#   awaits: nobody writes to a buffer after the read of it has returned or raised.
# Rule 3: a fixed name that is not there yet is read from where its contents are kept.

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from asyncckpt.errors import CheckpointNotFoundError, ClosedError, CorruptCheckpointError
from asyncckpt.flow.shield import leading_error
from asyncckpt.options import MIB, PAGE_NBYTES
from asyncckpt.ports import Bytes, Entry, StoreCapabilities
from asyncckpt.stores.layout import path_parts
from asyncckpt.stores.objects.client import Body, RequestError
from asyncckpt.stores.objects.context import (
    INLINE_NBYTES,
    Context,
    as_view,
    read_at_once,
    read_record,
)
from asyncckpt.stores.objects.failures import store_error
from asyncckpt.stores.objects.fixed import load_fixed
from asyncckpt.stores.objects.layout import RECORD, join
from asyncckpt.stores.objects.mend import HEAD_NBYTES

RANGE_NBYTES = 16 * MIB
"""Ranges that a long run is cut into, evenly, so that none is shorter than half of it."""

RANGE_MAX_NBYTES = RANGE_NBYTES + RANGE_NBYTES // 8
"""Runs up to this length are not cut: whoever ends them where a chunk ends leaves no crumbs."""

RANGES_AT_ONCE = 16
"""Ranged reads of one run in flight: 256 MiB, which no store answers to one reader in a second."""


class ObjectFiles:
    """The files of one checkpoint. Made by `ObjectStore.files`; nothing is read yet.

    Attributes:
        location: URL of the checkpoint.
        capabilities: those of the store.
        closed: whether `close` was called.
    """

    def __init__(self, context: Context, name: str, capabilities: StoreCapabilities) -> None:
        self.location = context.requests.location(name)
        self.capabilities = capabilities
        self.closed = False
        self._context = context
        self._requests = context.requests
        self._name = name
        self._head: bytes | None = None
        self._fixed: dict[str, bytes] | None = None

    def __repr__(self) -> str:
        return f"ObjectFiles({self.location!r})"

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """The whole content of a small file.

        Raises:
            CheckpointNotFoundError: the object does not exist.
            CorruptCheckpointError: it is larger than `max_nbytes`, or the path leads out of the
                checkpoint.
            StoreError: reading failed.
        """
        key = self._key(path)
        save_id: str | None = None
        data: bytes | None
        try:
            if path == RECORD:
                data, save_id = await read_at_once(self._context, self._name, max_nbytes=max_nbytes)
            else:
                data = await self._requests.read(key, max_nbytes=max_nbytes)
        except RequestError as error:
            kept = await self._kept(path, error)
            data = kept if len(kept) <= max_nbytes else None
        if data is None:
            raise CorruptCheckpointError(
                f"{self._full(path)}: more than {max_nbytes} bytes, expected at most that; "
                "the object is damaged or not what it is taken for: use another checkpoint",
                file=path,
                location=self.location,
                expected=max_nbytes,
            )
        # Of a damaged one nothing can be said later: it may have been damaged on its way only.
        if save_id is not None and self._head is None:
            self._head = data[:HEAD_NBYTES]
        return data

    async def read_into(
        self,
        path: str,
        offset: int,
        buffers: Sequence[Bytes],
        *,
        direct: bool = False,
        received: Callable[[], None] | None = None,
        ahead_nbytes: int | None = None,
    ) -> None:
        """The buffers are filled, one after the other, from a run of the object at `offset`.

        Runs longer than `RANGE_NBYTES` are read in ranges, several at the same time.

        Args:
            path: relative path; ``""`` is the checkpoint itself, where it is one object.
            offset: where the run begins, in bytes.
            buffers: what to fill.
            direct: of no meaning here.
            received: called when every range has come, before the last copies are made.
            ahead_nbytes: what may be in flight at one time; at least one range is.

        Cancellation: ends the requests, waits for copies, then raises.

        Raises:
            CheckpointNotFoundError: the object does not exist.
            CorruptCheckpointError: it ends before the last buffer is full.
            StoreError: reading failed.
        """
        key = self._key(path)
        nbytes = sum(buffer.size for buffer in buffers)
        if nbytes == 0:
            return
        spans = ranges(offset, offset + nbytes)
        filling = _Filling(buffers, offset, len(spans), received)
        if len(spans) == 1:
            await self._range(path, key, filling, *spans[0])
            return
        waiting = iter(spans)
        streams = min(RANGES_AT_ONCE, len(spans))
        if ahead_nbytes is not None:
            streams = max(1, min(streams, ahead_nbytes // RANGE_NBYTES))

        async def stream() -> None:
            for start, stop in waiting:
                await self._range(path, key, filling, start, stop)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(streams):
                    group.create_task(stream())
        except BaseExceptionGroup as errors:
            raise leading_error(errors) from None

    async def _range(self, path: str, key: str, filling: _Filling, start: int, stop: int) -> None:
        body: Body
        try:
            body = await self._requests.get(key, start, stop)
        except RequestError as error:
            body = (await self._kept(path, error))[start:stop]
        nbytes = len(as_view(body))
        if nbytes < stop - start:
            raise CorruptCheckpointError(
                f"{self._full(path)}: the object ends at or before byte {start + nbytes}, expected "
                f"bytes {filling.start} to {filling.stop}; it is truncated: use another checkpoint",
                file=path,
                offset=start + nbytes,
                location=self.location,
                expected=filling.stop,
                found=start + nbytes,
            )
        filling.came()
        if nbytes <= INLINE_NBYTES:
            filling.put(start, body)
        else:
            await self._context.workers.run(filling.put, start, body)

    async def _kept(self, path: str, error: RequestError) -> bytes:
        """The content of a fixed name that is not there yet.

        Raises:
            CheckpointNotFoundError: nothing keeps it either.
            StoreError: the error was another one.
        """
        if error.kind == "missing" and path not in ("", RECORD):
            if self._fixed is None:
                try:
                    record = await read_record(self._context, self._name)
                    if record is not None and record.save_id is not None:
                        self._fixed = await load_fixed(self._context, self._name, record.save_id)
                except RequestError as second:
                    raise store_error("reading", self._full(path), second) from second
            if self._fixed is not None and path in self._fixed:
                return self._fixed[path]
        if error.kind != "missing":
            raise store_error("reading", self._full(path), error) from error
        raise CheckpointNotFoundError(
            f"{self._full(path)}: no such object; there is no checkpoint here, or it was deleted "
            "while it was being read",
            location=self.location,
            found=path,
        ) from error

    async def entries(self, path: str = "", *, max_entries: int) -> list[Entry]:
        """What stands below a path of the checkpoint, one level, by name, never from a cache.

        Where `path` is an object, it is the one entry, with the name ``""``.

        Raises:
            CheckpointNotFoundError: there is nothing at `path`.
            CorruptCheckpointError: there are more than `max_entries`.
            StoreError: listing failed.
        """
        key = self._key(path)
        try:
            listed = await self._requests.list(key, recursive=False, limit=max_entries)
            if not listed:
                return [Entry("", await self._requests.size(key), False)]
        except RequestError as error:
            if error.kind != "missing":
                raise store_error("listing", self._full(path), error) from error
            raise CheckpointNotFoundError(
                f"{self._full(path)}: nothing is stored there; there is no checkpoint here, or it "
                "was deleted while it was being read",
                location=self.location,
                found=path,
            ) from error
        if len(listed) > max_entries:
            raise CorruptCheckpointError(
                f"{self._full(path)}: more than {max_entries} entries; this is no checkpoint, or "
                "a hostile one",
                file=path,
                location=self.location,
                expected=max_entries,
            )
        found = [
            Entry(entry.key[len(key) + 1 :], entry.nbytes, entry.is_prefix) for entry in listed
        ]
        # Keys may have empty parts, which no path of a checkpoint has.
        return sorted(entry for entry in found if path_parts(entry.name) == (entry.name,))

    def reads(self, wanted: int | None) -> int:
        """As many as somebody asks for, which hold for the store from now on, or as pay off.

        Those are one step more than are let through, so that the next step can be tried.
        """
        self._requests.fix_streams("get", wanted)
        return self._requests.climb("get").room if wanted is None else wanted

    async def changed(self) -> Literal["deleted", "replaced"] | None:
        """What has become of the record that was read here; None while it stands, or if none was.

        Raises:
            StoreError: it could not be read.
        """
        if self._head is None:
            return None
        try:
            head = await self._requests.get(join(self._name, RECORD), 0, HEAD_NBYTES)
        except RequestError as error:
            if error.kind == "missing":
                return "deleted"
            raise store_error("reading the record", self._full(RECORD), error) from error
        return None if bytes(head) == self._head else "replaced"

    async def close(self) -> None:
        """Nothing more is read. Idempotent."""
        self.closed = True
        self._fixed = None

    def _key(self, path: str) -> str:
        if self.closed:
            raise ClosedError(
                f"{self.location}: these files were closed; ask the store for them again",
                location=self.location,
            )
        if path and path_parts(path) is None:
            raise CorruptCheckpointError(
                f"{self.location}: {path!r} leads out of the checkpoint; "
                "it is damaged or hostile: use another checkpoint",
                file=path,
                location=self.location,
                found=path,
            )
        return join(self._name, path)

    def _full(self, path: str) -> str:
        return posixpath.join(self.location, path) if path else self.location


class _Filling:
    """Buffers that are filled from one run of an object."""

    def __init__(
        self,
        buffers: Sequence[Bytes],
        offset: int,
        count: int,
        received: Callable[[], None] | None,
    ) -> None:
        self._buffers = buffers
        self._coming = count
        self._received = received
        self._ends = np.cumsum([buffer.size for buffer in buffers]) + offset
        self.start = offset
        self.stop = int(self._ends[-1])

    def came(self) -> None:
        """One more range has come."""
        self._coming -= 1
        if not self._coming and self._received is not None:
            self._received()

    def put(self, start: int, body: Body) -> None:
        """The part of the run that begins at byte `start` of the object is in its buffers."""
        source = np.frombuffer(body, np.uint8)
        first = int(np.searchsorted(self._ends, start, side="right"))
        done = 0
        for buffer, end in zip(self._buffers[first:], self._ends[first:].tolist(), strict=True):
            if done == source.size:
                return
            at = start + done - (end - buffer.size)
            count = min(buffer.size - at, source.size - done)
            np.copyto(buffer[at : at + count], source[done : done + count])
            done += count


def ranges(start: int, stop: int) -> list[tuple[int, int]]:
    """A run, if it is too long for one request cut evenly at multiples of a page."""
    return list(_ranges(start, stop))


def _ranges(start: int, stop: int) -> Iterator[tuple[int, int]]:
    if stop - start <= RANGE_MAX_NBYTES:
        yield start, stop
        return
    count = -(-(stop - start) // RANGE_NBYTES)
    size = -(-(stop - start) // count)
    size = min(-(-size // PAGE_NBYTES) * PAGE_NBYTES, RANGE_NBYTES)
    while start < stop:
        yield start, min(start + size, stop)
        start += size
