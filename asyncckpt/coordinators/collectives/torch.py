"""The exchange of a torch.distributed job: broadcasts in separate gloo groups."""

# Rule 1: groups use our own connection instead of `new_group`, which numbers the program's groups
#   and uses its connection: the trainer may use its own groups meanwhile.
# Rule 2: a group belongs to one restore. A broken or cancelled group is never reused.

from __future__ import annotations

import asyncio
import hashlib
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d

from asyncckpt.errors import StoreError
from asyncckpt.ports import Bytes, CallIn


class TorchExchange:
    """The collectives of one restore.

    Args:
        store: store of the default process group, which is cloned.
        name: prefix of the keys by which members find each other.
        process: number of this process.
        in_worker: runs blocking calls.
        timeout_s: time limit of a collective.
    """

    binding = False

    def __init__(
        self, store: Any, name: str, process: int, in_worker: CallIn, timeout_s: float
    ) -> None:
        self._store = store
        self._name = name
        self._process = process
        self._in_worker = in_worker
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._gathered: dict[tuple[int, ...], Bytes] = {}

    async def gather(self, members: tuple[int, ...], piece: Bytes) -> Bytes:
        """Return the pieces of all members, one after the other; as `Exchange.gather`."""
        try:
            if members not in self._groups:
                self._groups[members] = await self._in_worker(lambda: self._connect(members))
            return await self._gather(members, piece)
        except RuntimeError as error:  # torch raises nothing narrower
            raise StoreError(
                f"the exchange of a restore failed in gloo on process {self._process}: {error}",
                retryable=True,
            ) from error

    def _connect(self, members: tuple[int, ...]) -> Any:
        # Every key begins with the name of the group, which may have thousands of members.
        name = hashlib.sha256(repr(members).encode()).hexdigest()[:32]
        store = distributed_c10d.PrefixStore(f"{self._name}/{name}", self._store.clone())
        return distributed_c10d.ProcessGroupGloo(
            store, members.index(self._process), len(members), self._timeout
        )

    async def _gather(self, members: tuple[int, ...], piece: Bytes) -> Bytes:
        group, own = self._groups[members], members.index(self._process)
        nbytes = len(members) * piece.size
        gathered = self._gathered.get(members)
        if gathered is None or gathered.size != nbytes:
            self._gathered[members] = gathered = np.empty(nbytes, np.uint8)
        pieces = gathered.reshape(len(members), -1)

        def begin() -> list[Any]:
            pieces[own] = piece
            # Gloo's all-gather would copy everything once more.
            return [group.broadcast(torch.from_numpy(p), root) for root, p in enumerate(pieces)]

        for work in await self._in_worker(begin):
            await _finished(work.get_future())
        return gathered

    async def close(self) -> None:
        """End the connections."""
        groups, self._groups = self._groups, {}
        self._gathered.clear()
        for group in groups.values():
            group.shutdown()


async def _finished(future: Any) -> None:
    """Wait for a future of torch, and raise its error."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    await done.wait()
    future.value()
