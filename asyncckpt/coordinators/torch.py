"""The coordinator of a torch.distributed job: the store of its default process group.

Its exchange consists of broadcasts in separate gloo groups.
"""

# Rule 1: only a clone of the store is used, with a separate connection: a `get` that waited on the
#   trainer's connection held up the trainer's `set` for 5.5 s.
# Rule 2: never `get` or `wait` for a key that may be missing: it blocks for minutes, and prints to
#   stderr when it times out. `compare_set` looks at a key without waiting.
#   (test_values_deleted_while_they_are_read_delay_a_list_only_a_little)
# Rule 3: stores of older releases cannot list their keys, and listing all keys of a large job to
#   find our few is slow. So each directory is a key, too: `a/` holds the names of the keys `a/b`
#   and, with a slash, of the directories `a/c/`. A name is added before its key.
# Rule 4: groups use our own connection instead of `new_group`, which numbers the program's groups
#   and uses its connection: the trainer may use its own groups meanwhile.
# Rule 5: a group belongs to one restore. A broken or cancelled group is never reused.

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.distributed import distributed_c10d

from asyncckpt.coordinators.service import ServiceCoordinator
from asyncckpt.errors import StoreError, UsageError
from asyncckpt.ports import Bytes, CallIn

MULTI_GET_MIN = 16
"""Smallest number of values that are read with two calls instead of one call each."""

MULTI_GET_S = 1.0
"""How long a read of many values waits for those that were deleted meanwhile."""

UNSET = secrets.token_bytes(16)
"""Returned by `compare_set` for a key that is not set; no value equals it."""

EMPTY = b"\n"
"""A directory without names: `compare_set` takes an empty value for a missing one."""


def initialized_processes(
    group: torch.distributed.ProcessGroup | None = None,
) -> tuple[int, int] | None:
    """Return rank and size of a group (None: all), None if torch.distributed is not initialised."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


class TorchCoordinator(ServiceCoordinator["TorchService"]):
    """Coordinates the processes of a group, through the store of the default process group.

    Args:
        group: a group that this process belongs to; None for all processes.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        processes = initialized_processes(group)
        if processes is None:
            raise UsageError(
                "call torch.distributed.init_process_group() before the torch coordinator is used"
            )
        # This reference keeps the server alive after the process group is destroyed.
        store = distributed_c10d._get_default_store()
        if store is None:
            raise UsageError(
                "the default process group of torch.distributed has no store (MPI has none): "
                "initialise it with another backend, or coordinate through a shared directory with "
                "coordinator=DirectoryCoordinator(...)"
            )
        super().__init__("torch", *processes, lambda: TorchService(store))
        self.server = server_of(store)
        self._store = store

    def exchange(
        self, name: str, *, in_caller: CallIn, in_worker: CallIn, timeout_s: float
    ) -> TorchExchange:
        """Return gloo's collectives, in separate groups."""
        return TorchExchange(self._store, name, self.process_index, in_worker, timeout_s)


def bare(store: Any) -> Any:
    """Return the store below all prefixes."""
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return store


def server_of(store: Any) -> str:
    """Return the server of a store with host and port; empty for stores in files or memory."""
    store = bare(store)
    if not hasattr(store, "host"):
        return ""
    agent = torch.distributed.is_torchelastic_launched()
    return f"{'the agent of torchrun' if agent else 'process 0'} ({store.host}:{store.port})"


class TorchService:
    """A `Service` with its own connection to the store."""

    def __init__(self, store: Any) -> None:
        self._store = store.clone()
        # Only this store reads many values at once; its own timeout would be minutes.
        tcp = bare(self._store)
        self._batches = hasattr(tcp, "host")  # a TCPStore
        if self._batches:
            tcp.set_timeout(timedelta(seconds=MULTI_GET_S))

    def put(self, key: str, value: bytes) -> None:
        if self.look(key) is None:
            self._enter(key)
        self._store.set(key, value)

    def put_once(self, key: str, value: bytes) -> bytes:
        first = self.look(key)
        if first is not None:
            return first
        self._enter(key)
        stored: bytes = self._store.compare_set(key, b"", value)
        return stored

    def look(self, key: str) -> bytes | None:
        # Changes no key: returns its value, or UNSET for a missing key.
        value = self._store.compare_set(key, UNSET, UNSET)
        return None if value == UNSET else value

    def list(self, prefix: str) -> Mapping[str, bytes]:
        keys = [key for key in self._below(prefix) if not key.endswith("/")]
        start = len(prefix) + 1
        return {key[start:]: value for key, value in self._values(keys).items()}

    def delete(self, prefix: str) -> None:
        for key in [*self._below(prefix), prefix, f"{prefix}/"]:
            self._store.delete_key(key)
        self._leave(prefix)

    def _values(self, keys: Sequence[str]) -> dict[str, bytes]:
        if self._batches and len(keys) >= MULTI_GET_MIN and self._store.check(keys):
            # Another process may delete keys meanwhile.
            with contextlib.suppress(torch.distributed.DistStoreError):
                return dict(zip(keys, self._store.multi_get(keys), strict=True))
        found = ((key, self.look(key)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def _below(self, directory: str) -> Sequence[str]:
        """Return all keys below a directory, including directories, deepest first."""
        keys: list[str] = []
        names = (self.look(f"{directory}/") or b"").decode().split()
        for name in dict.fromkeys(names):
            key = f"{directory}/{name}"
            if name.endswith("/"):
                keys += self._below(key[:-1])
            keys.append(key)
        return keys

    def _enter(self, key: str) -> None:
        """Add the key, or the directory if it ends with a slash, to the directory above it."""
        directory, _, name = key.removesuffix("/").rpartition("/")
        if not directory:
            return
        index = f"{directory}/"
        # From the top, so that every existing directory can be found.
        if not self._store.check([index]):
            self._enter(index)
        self._store.append(index, f"{name}{'/' if key.endswith('/') else ''}\n")

    def _leave(self, key: str) -> None:
        """Remove the key and its directory from the parent, unless the parent changes meanwhile."""
        directory, _, name = key.rpartition("/")
        index = f"{directory}/"
        before = self.look(index) if directory else None
        if before is not None:
            names = [n for n in before.decode().split() if n.removesuffix("/") != name]
            after = "".join(f"{n}\n" for n in names).encode()
            self._store.compare_set(index, before, after or EMPTY)


class TorchExchange:
    """The collectives of one restore.

    Args:
        store: store of the default process group, which is cloned.
        name: prefix of the keys by which members find each other.
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
