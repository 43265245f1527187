"""A store that dies like a process: from one operation on nothing reaches the disk any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from asyncckpt.errors import StoreError
from asyncckpt.ports import Removal
from asyncckpt.stores.local.store import LocalStore
from asyncckpt.testing.faults import Fault, FaultPart, FaultStore, Operation


class CrashStore(FaultStore):
    """A `FaultStore` whose process can be killed before or after any of its operations.

    A dead store cleans nothing up: attempts keep their files.

    Attributes:
        down: it has died.
        applied: operations that took effect, in their order.
    """

    def __init__(self, inner: LocalStore) -> None:
        super().__init__(inner)
        self.down = False
        self.applied: list[Operation] = []
        self._attempts: list[FaultPart] = []
        self._removals: list[Any] = []
        self._dies_at = 0
        self._after = False

    def die(self, *, at: int, after: bool) -> None:
        """The `at`-th operation from now on does not happen, or with `after` is the last one."""
        self._dies_at, self._after = self.counts["any"] + at, after

    def live(self) -> None:
        """Nothing is scripted any more."""
        self._dies_at = 0
        self.script.clear()

    def fail(self, *, at: int, error: StoreError) -> None:
        """The `at`-th operation from now on raises, and does not happen."""
        self.script.append(Fault("any", self.counts["any"] + at, error=error))

    def did(self, kind: str) -> list[str]:
        """Subjects of the operations of one kind that took effect."""
        return [operation.subject for operation in self.applied if operation.kind == kind]

    @asynccontextmanager
    async def operation(self, kind: str, subject: str) -> AsyncIterator[None]:
        """As `FaultStore`, unless the store is dead or dies here."""
        if not self.down and self.counts["any"] + 1 == self._dies_at and not self._after:
            self.down = True
        if self.down:
            raise _dead(self.url)
        number = self.counts["any"] + 1
        async with super().operation(kind, subject):
            if self.down:  # it died while this operation was held
                raise _dead(self.url)
            yield
            self.applied.append(Operation(kind, subject))
        if number == self._dies_at:
            self.down = True
        if self.down:  # nobody is left to hear of the success
            raise _dead(self.url)

    async def begin(self, name: str, save_id: str, **options: Any) -> FaultPart:
        """As the inner store; what a dead process has begun stays."""
        async with self.operation("begin", name):
            inner = await self.inner.begin(name, save_id, **options)
            self._attempts.append(attempt := CrashAttempt(self, inner))
        return attempt

    async def unlist(self, name: str, *, epoch: int = 0, seal: bytes = b"") -> Removal:
        """As the inner store; a dead process removes no bytes."""
        async with self.operation("unlist", name):
            removal = await self.inner.unlist(name, epoch=epoch, seal=seal)
            self._removals.append(removal)

        async def remove() -> None:
            async with self.operation("remove", name):
                self._removals.remove(removal)
                await removal()

        return remove

    def bury(self) -> None:
        """What the kernel does for a dead process: descriptors are closed, so that locks are free.

        To be called when the `Checkpointer` is closed.
        """
        for attempt in self._attempts:
            for file in attempt._inner._files:  # type: ignore[attr-defined]
                file.close()
            attempt._inner._release()  # type: ignore[attr-defined]
        for removal in self._removals:
            removal.args[0].held.close()


class CrashAttempt(FaultPart):
    """An attempt of a `CrashStore`."""

    async def publish(self, record: bytes) -> None:
        """As `FaultPart`; a dead process aborts nothing."""
        try:
            async with self._store.operation("publish", self.location):
                await self._inner.publish(record)
        except BaseException:
            if isinstance(self._store, CrashStore) and not self._store.down:
                await self._inner.abort()
            raise


def _dead(url: str) -> StoreError:
    return StoreError(f"{url}: the process is dead", location=url)
