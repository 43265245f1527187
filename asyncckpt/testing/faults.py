"""Store that fails, cancels, pauses or returns wrong data at scripted operations.

    store = FaultStore(inner, [Fault("write", 3, error=StoreError("disk on fire"))])

Operations are counted from 1 for each kind and, as `any`, over all kinds. The kinds are `begin`,
`join`, `create`, `write`, `seal`, `put`, `pass_on`, `taken`, `settle`, `publish`, `leave`, `abort`,
`claim`, `claims`, `check_claim`, `files`, `read`, `read_into`, `entries`, `changed`, `close_files`,
`names`, `unlist`, `remove`, `settled`, `sweep`, `collect`, `keep_note`, `take_notes` and `close`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.ports import ORDINARY, Bytes, CheckpointFiles, Reading, Removal, Store


@dataclass(slots=True, eq=False)
class Gate:
    """A gate that holds an operation: it sets `reached` and continues once `release` is set."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def hold(self) -> None:
        """Wait until the gate is released. Cancellation: raises at once."""
        self.reached.set()
        await self.release.wait()


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """A scripted fault of one operation.

    Attributes:
        kind: kind of the operation, or ``any``.
        number: number of the operation within its kind, from 1; 0 for all.
        error: raised instead of the operation, or after it with `applied`.
        applied: the operation takes effect before `error` is raised, like a lost response.
        cancel: cancel the calling task just before the operation.
        gate: where the operation waits first.
        data: damage to a read: ``short`` drops the second half (and raises, as a store does for a
            truncated file), ``flip`` changes one bit.
    """

    kind: str
    number: int = 1
    error: BaseException | None = None
    applied: bool = False
    cancel: bool = False
    gate: Gate | None = None
    data: Literal["short", "flip"] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: its kind, and its name or path."""

    kind: str
    subject: str


class FaultStore:
    """Wrapper of a store. Without a script it only counts operations.

    All other attributes are the inner store's; its coroutine functions are operations.

    Attributes:
        inner: the store.
        counts: operations so far by kind, and their total as `any`.
        log: all operations, in the order in which they began.
        script: the faults; may be extended at any time.
    """

    def __init__(self, inner: Store, script: Iterable[Fault] = ()) -> None:
        self.inner = inner
        self.counts: Counter[str] = Counter()
        self.log: list[Operation] = []
        self.script = list(script)

    def __repr__(self) -> str:
        return f"FaultStore({self.inner!r}, {len(self.script)} faults)"

    def __getattr__(self, name: str) -> Any:
        return _counted(self, self.inner, name)

    @asynccontextmanager
    async def operation(self, kind: str, subject: str) -> AsyncIterator[list[Fault]]:
        """Raise, pause or cancel by script around the block, which is the operation."""
        self.counts[kind] += 1
        self.counts["any"] += 1
        self.log.append(Operation(kind, subject))
        numbers = {(k, n) for k in (kind, "any") for n in (0, self.counts[k])}
        faults = [fault for fault in self.script if (fault.kind, fault.number) in numbers]
        for fault in faults:
            if fault.gate is not None:
                await fault.gate.hold()
            if fault.cancel and (task := asyncio.current_task()) is not None:
                task.cancel()
            if fault.error is not None and not fault.applied:
                raise fault.error
        yield faults
        for fault in faults:
            if fault.error is not None:
                raise fault.error

    async def begin(self, name: str, save_id: str, **options: Any) -> FaultAttempt:
        """Begin an attempt; abort it if the script fails the call after it took effect."""
        return FaultAttempt(self, await self._open("begin", name, save_id, options))

    async def join(self, name: str, save_id: str, **options: Any) -> FaultAttempt:
        """Join an attempt; abort the share if the script fails the call after it took effect."""
        return FaultAttempt(self, await self._open("join", name, save_id, options))

    async def _open(self, kind: str, name: str, save_id: str, options: Mapping[str, Any]) -> Any:
        attempt = None
        try:
            async with self.operation(kind, name):
                attempt = await getattr(self.inner, kind)(name, save_id, **options)
        except BaseException:
            if attempt is not None:
                await attempt.abort()
            raise
        return attempt

    def files(self, name: str) -> FaultFiles:
        """Return read access to a checkpoint; counted, but never faulty."""
        self.counts["files"] += 1
        self.log.append(Operation("files", name))
        return FaultFiles(self, self.inner.files(name))

    async def unlist(self, name: str, **options: Any) -> Removal:
        """Unlist a checkpoint; removing its bytes is the operation `remove`."""
        async with self.operation("unlist", name):
            removal = await self.inner.unlist(name, **options)

        async def remove() -> None:
            async with self.operation("remove", name):
                await removal()

        return remove


def _counted(store: FaultStore, inner: object, name: str) -> Any:
    """Return an attribute of the inner object; coroutine functions become operations.

    Their subject is the first argument if it is a string, else the object's path or location.
    """
    found = getattr(inner, name)
    if not inspect.iscoroutinefunction(found):
        return found

    async def call(*args: Any, **kwargs: Any) -> Any:
        subject = getattr(inner, "path", getattr(inner, "location", ""))
        if args and isinstance(args[0], str):
            subject = args[0]
        async with store.operation(name, subject):
            return await found(*args, **kwargs)

    return call


class FaultPart:
    """An attempt or file of a `FaultStore`; attributes as there."""

    def __init__(self, store: FaultStore, inner: Any) -> None:
        self._store = store
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return _counted(self._store, self._inner, name)


class FaultAttempt(FaultPart):
    """An attempt of a `FaultStore`, or a share in one."""

    async def create(self, path: str, **options: Any) -> FaultPart:
        """Create a data file, whose methods are operations too."""
        async with self._store.operation("create", path):
            inner = await self._inner.create(path, **options)
        return FaultPart(self._store, inner)

    async def publish(self, record: bytes) -> None:
        """Publish, and abort the inner attempt if the script fails the call."""
        try:
            async with self._store.operation("publish", self.location):
                await self._inner.publish(record)
        except BaseException:
            await self._inner.abort()
            raise


class FaultFiles(FaultPart):
    """Read access of a `FaultStore`."""

    _inner: CheckpointFiles

    async def close(self) -> None:
        """Close the files; the operation is `close_files`."""
        async with self._store.operation("close_files", self.location):
            await self._inner.close()

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Read a file and damage the data by script."""
        async with self._store.operation("read", path) as faults:
            data = await self._inner.read(path, max_nbytes=max_nbytes)
        for fault in faults:
            if fault.data == "short":
                data = data[: len(data) // 2]
            elif fault.data == "flip" and data:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill the buffers and damage the data by script.

        Raises:
            CorruptCheckpointError: a scripted short read.
        """
        how = how._replace(check=None)  # bytes are damaged before they are checked
        async with self._store.operation("read_into", path) as faults:
            total = sum(buffer.size for buffer in buffers)
            short = any(fault.data == "short" for fault in faults)
            wanted = _first(buffers, total // 2) if short else buffers
            await self._inner.read_into(path, offset, wanted, how=how)
        if short:
            raise CorruptCheckpointError(
                f"{self.location}/{path}: the file ends at byte {offset + total // 2}, expected "
                f"bytes {offset} to {offset + total}; it is truncated: use another checkpoint",
                file=path,
                offset=offset + total // 2,
                location=self.location,
                expected=offset + total,
                found=offset + total // 2,
            )
        for fault in faults:
            if fault.data == "flip" and total:
                buffer = next(b for b in buffers if b.size)
                buffer[buffer.size // 2] ^= np.uint8(1)


def _first(buffers: Sequence[Bytes], nbytes: int) -> list[Bytes]:
    """Return views of the first `nbytes` of a sequence of buffers."""
    views = []
    for buffer in buffers:
        views.append(buffer[: min(nbytes, buffer.size)])
        nbytes -= views[-1].size
    return views
