"""A store behind a `Checkpointer` that holds, fails and counts by script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import asyncckpt
from asyncckpt import blocking
from asyncckpt.session.session import Session
from asyncckpt.testing.faults import Fault, FaultStore, Gate


class Held:
    """One operation that waits until a test lets it go."""

    def __init__(self, core: Session, gate: Gate) -> None:
        self._session = core
        self._gate = gate

    async def reached(self) -> None:
        """The operation has been asked for."""
        await self._session.call(self._gate.reached.wait).wait()

    def reached_blocking(self) -> None:
        self._session.call(self._gate.reached.wait).result()

    def go(self) -> None:
        """The operation goes on. From any thread."""
        self._session.runtime.engine.post(self._gate.release.set)


class Script:
    """What happens at the operations of a checkpointer's store."""

    def __init__(self, ckpt: asyncckpt.Checkpointer | blocking.Checkpointer) -> None:
        self._session = ckpt._session
        self.store = FaultStore(self._session.root.store)
        self._session.root.store = self.store

    def hold(self, kind: str, nth: int = 1) -> Held:
        """The nth operation of this kind from now on waits."""
        gate = Gate()
        self.store.script.append(Fault(kind, self.store.counts[kind] + nth, gate=gate))
        return Held(self._session, gate)

    def fail(self, kind: str, error: BaseException, nth: int = 1) -> None:
        """The nth operation of this kind from now on raises."""
        self.store.script.append(Fault(kind, self.store.counts[kind] + nth, error=error))

    def count(self, kind: str) -> int:
        return self.store.counts[kind]

    @property
    def kinds(self) -> list[str]:
        """The kinds of all operations so far."""
        return [operation.kind for operation in self.store.log]


def in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """What the function returns, called in a thread of its own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            loop.call_soon_threadsafe(future.set_exception, error)
        else:
            loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return future
