"""A job of several `Checkpointer`s that coordinate, in threads of one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from asyncckpt import Checkpointer, DirectoryCoordinator

Part = Callable[[Checkpointer, int], Coroutine[Any, Any, Any]]


class Job:
    """Processes that share a root, each played by a thread with an event loop."""

    def __init__(self, path: Path, count: int) -> None:
        self.root = path / "root"
        self.keys = path / "keys"
        self.count = count
        self._made: list[DirectoryCoordinator] = []

    def coordinator(self, process: int) -> DirectoryCoordinator:
        made = DirectoryCoordinator(self.keys, process_index=process, process_count=self.count)
        self._made.append(made)
        return made

    def play(self, part: Part, *, only: set[int] | None = None, **options: Any) -> list[Any]:
        """Let every process play its part with a `Checkpointer`; return results and errors."""

        async def main(process: int) -> Any:
            coordinator = self.coordinator(process)
            async with Checkpointer(self.root, coordinator=coordinator, **options) as ckpt:
                return await part(ckpt, process)

        return self.run(main, only)

    def run(
        self, main: Callable[[int], Coroutine[Any, Any, Any]], only: set[int] | None = None
    ) -> list[Any]:
        results: list[Any] = [None] * self.count

        def one(process: int) -> None:
            try:
                results[process] = asyncio.run(main(process))
            except BaseException as error:  # also what pytest raises
                results[process] = error

        threads = [
            threading.Thread(target=one, args=(process,), daemon=True)
            for process in range(self.count)
            if only is None or process in only
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a process hangs"
        asyncio.run(self._close())
        return results

    async def _close(self) -> None:
        while self._made:
            await self._made.pop().close()

    def left(self) -> list[Path]:
        """Return all files of unfinished attempts."""
        control = self.root / ".asyncckpt"
        kept = ("lock", "claim-", "error-")
        paths = (path for path in control.rglob("*") if path.is_file())
        return [path for path in paths if not path.name.startswith(kept)]


def state(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "params": {"w": random.random((300, 501)), "b": random.random(7).astype(np.float32)},
        "step": 12,
        "name": "run",
        "empty": np.zeros((0, 3)),
        "bytes": b"x" * 5000,
        "scalar": np.array(2.5),
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(np.array_equal(one, other))
