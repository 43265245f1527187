"""A coordinator whose keys live in memory, for the processes of a test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from asyncckpt.coordinators.key_values import check_key, check_message


class MemoryCoordinator:
    """A `ports.Coordinator` of one process; its keys live in memory."""

    name = "memory"
    process_index = 0
    process_count = 1

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return "MemoryCoordinator()"

    async def put(self, key: str, value: bytes) -> None:
        """Set `key`, replacing any value."""
        check_message(key, value)
        self._values[key] = bytes(value)
        # Wakes current waiters; later ones wait for the next event.
        self._changed.set()
        self._changed = asyncio.Event()

    async def put_once(self, key: str, value: bytes) -> bytes:
        """Set `key` if it is not set; return the value that was set first."""
        check_message(key, value)
        if key not in self._values:
            await self.put(key, value)
        return self._values[key]

    async def look(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it is not set."""
        check_key(key)
        return self._values.get(key)

    async def wait(self, key: str, *, timeout_s: float) -> bytes | None:
        """Return the value of `key` once it is set, None if it is still unset after `timeout_s`."""
        check_key(key)
        try:
            async with asyncio.timeout(timeout_s):
                while key not in self._values:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._values.get(key)

    async def list(self, prefix: str) -> Mapping[str, bytes]:
        """Return all values whose keys begin with ``prefix/``, by the rest of their keys."""
        check_key(prefix)
        start = f"{prefix}/"
        return {
            key.removeprefix(start): value
            for key, value in self._values.items()
            if key.startswith(start)
        }

    async def delete(self, prefix: str) -> None:
        """Delete the key `prefix` and all that begin with ``prefix/``."""
        check_key(prefix)
        for key in list(self._values):
            if key == prefix or key.startswith(f"{prefix}/"):
                del self._values[key]

    async def close(self) -> None:
        """Do nothing: there is no connection or thread."""
