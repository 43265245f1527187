"""Store that fails or pauses at scripted operations.

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
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.ports import Removal, Store


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
        gate: where the operation waits first.
    """

    kind: str
    number: int = 1
    error: BaseException | None = None
    applied: bool = False
    gate: Gate | None = None


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
    async def operation(self, kind: str, subject: str) -> AsyncIterator[None]:
        """Raise or pause by script around the block, which is the operation."""
        self.counts[kind] += 1
        self.counts["any"] += 1
        self.log.append(Operation(kind, subject))
        numbers = {(k, n) for k in (kind, "any") for n in (0, self.counts[k])}
        faults = [fault for fault in self.script if (fault.kind, fault.number) in numbers]
        for fault in faults:
            if fault.gate is not None:
                await fault.gate.hold()
            if fault.error is not None and not fault.applied:
                raise fault.error
        yield
        for fault in faults:
            if fault.error is not None:
                raise fault.error

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


def _counted(store: FaultStore, inner: Any, name: str) -> Any:
    """Return an attribute of the inner object; coroutine functions become operations.

    Their subject is the first argument if it is a string, else the object's path or location. An
    attempt or share is aborted if the script fails the call that opened or publishes it.
    """
    found = getattr(inner, name)
    if name not in _PARTS and not inspect.iscoroutinefunction(found):
        return found

    async def call(*args: Any, **kwargs: Any) -> Any:
        subject = getattr(inner, "path", getattr(inner, "location", ""))
        if args and isinstance(args[0], str):
            subject = args[0]
        result = None
        try:
            async with store.operation(name, subject):
                result = await found(*args, **kwargs)
        except BaseException:
            if result is not None and name in ("begin", "join"):
                await result.abort()
            elif name == "publish":
                await inner.abort()
            raise
        return FaultPart(store, result) if name in _PARTS else result

    return call


class FaultPart:
    """An attempt, share or file of a `FaultStore`; attributes as there."""

    def __init__(self, store: FaultStore, inner: Any) -> None:
        self._store = store
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return _counted(self._store, self._inner, name)


class FaultFiles(FaultPart):
    """Read access of a `FaultStore`."""

    async def close(self) -> None:
        """Close the files; the operation is `close_files`."""
        async with self._store.operation("close_files", self.location):
            await self._inner.close()


_PARTS = frozenset(("begin", "join", "create"))
"""Calls whose result has operations, too."""
