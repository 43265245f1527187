"""The share of one process in an attempt on an object store: files that it writes and exchanges."""

# Rule 1: nothing is written under a name without the save id.
# Rule 2: each name only ever gets one content, so a request that lands late changes nothing.
# Rule 3: only process 0 writes fixed names and the record, and removes exchanged objects.
# Rule 4: nothing that a record may refer to is removed while the record may still arrive.

from __future__ import annotations

from asyncckpt.errors import UsageError
from asyncckpt.stores.exchange import MARK, MARK_NBYTES, check_passed, is_mark_of, too_large
from asyncckpt.stores.objects.clients.client import Body, unless_missing
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.datafile import ABORT_S, Sending, WindowFile
from asyncckpt.stores.objects.failures import reported
from asyncckpt.stores.objects.layout import exchange_path, join
from asyncckpt.stores.objects.publish import bounded
from asyncckpt.stores.paths import check_file


class ObjectShare:
    """The part of an attempt that all processes have in common. Subclasses end it."""

    def __init__(self, context: Context, name: str, save_id: str, *, shared: bool) -> None:
        self.location = context.requests.location(name)
        self._context = context
        self._name = name
        self._save_id = save_id
        self._shared = shared
        self._sending = Sending(context, name)
        self._files: list[WindowFile] = []
        self._exchanged: set[str] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r}, {self._save_id})"

    # ------------------------------------------------------------------------------------- files

    async def create(self, path: str, *, nbytes: int, window_nbytes: int) -> WindowFile:
        """Open a new data file of at most one window; makes no request. As `Attempt.create`.

        Raises:
            UsageError: the path lacks the save id, or the file is too long for one request.
        """
        self._check_own(path)
        file = WindowFile(self._sending, path, nbytes, window_nbytes)
        self._files.append(file)
        return file

    def _check_own(self, path: str) -> None:
        self._sending.check()
        check_file(path, self.location)
        if self._save_id not in path:
            raise UsageError(
                f"{path!r}: another attempt could write this name; put the save id "
                f"{self._save_id} into it",
                location=self.location,
                found=path,
            )

    # ---------------------------------------------------------------------------------- exchange

    async def pass_on(self, path: str, data: bytes | memoryview) -> None:
        """Store an object for the other processes. As `AttemptFiles.pass_on`."""
        self._check_exchange(path)
        await self._exchange(path, await self._context.owned(data))

    async def taken(self, path: str, *, max_nbytes: int) -> bytes | None:
        """Return what a process has passed on, or None. As `AttemptFiles.taken`."""
        self._check_exchange(path)
        key, requests = self._exchange_key(path), self._context.requests
        with reported("reading what was passed on", requests.location(key)), unless_missing():
            data = await requests.read(key, max_nbytes=max_nbytes)
            if data is None:
                raise too_large(path, self.location, await requests.size(key), max_nbytes)
            self._exchanged.add(key)
            return data
        return None

    async def _exchange(self, path: str, data: Body) -> None:
        key = self._exchange_key(path)
        self._exchanged.add(key)
        await self._sending.send_named(key, data)

    def _exchange_key(self, path: str) -> str:
        return join(self._name, exchange_path(self._save_id, path))

    def _check_exchange(self, path: str) -> None:
        self._sending.check()
        check_passed(path, self.location, shared=self._shared)

    # ------------------------------------------------------------------------------------- abort

    async def abort(self) -> None:
        """Remove everything that this process wrote, unless the attempt has ended.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: an object could not be removed; gc removes it later.
        """
        action, later = "removing the objects of an aborted save", "'asyncckpt gc' removes the rest"
        await self._sending.end(self._remove, action, later)

    async def _remove(self) -> None:
        async with self._context.requests.cleaning_up(ABORT_S):
            await self._context.requests.delete(sorted(await self._removable()))

    async def _removable(self) -> set[str]:
        """Return the keys that an abort removes."""
        return self._sending.keys

    def _remove_later(self, keys: set[str], what: str) -> None:
        """Remove objects in the background; log failures of the store."""

        async def remove() -> None:
            trouble = f"{what} could not be removed: %s; 'asyncckpt gc' does so later"
            async with bounded(self.location, trouble):
                await self._context.requests.delete(sorted(keys))

        if keys:
            self._context.background.begin(remove())


class ObjectJoinedAttempt(ObjectShare):
    """The share of a process other than process 0. Made by `ObjectStore.join`."""

    async def look(self) -> bool:
        """Return whether the attempt's mark exists. Raises `StoreError`."""
        key, requests = self._exchange_key(MARK), self._context.requests
        with reported("looking for the attempt to join", requests.location(key)), unless_missing():
            return is_mark_of(self._save_id, await requests.read(key, max_nbytes=MARK_NBYTES))
        return False

    async def put(self, path: str, *blocks: Body, in_record: bool = False) -> None:
        """Make a file durable. As `AttemptFiles.put`.

        Raises:
            UsageError: the path lacks the save id: only process 0 writes such files.
        """
        self._check_own(path)
        await self._sending.send_named(join(self._name, path), await self._context.owned(*blocks))

    async def settle(self) -> None:
        """Check that all own files are sealed, and so durable. As `JoinedAttempt.settle`."""
        self._sending.check_sealed(self._files)

    async def leave(self) -> None:
        """End the share without waiting for requests. As `JoinedAttempt.leave`."""
        if not self._sending.ended:
            self._sending.ended = True
            self._remove_later(self._sending.orphans, "orphaned data objects")

    async def _removable(self) -> set[str]:
        # Process 0 should not have published, but if it has, this would destroy the checkpoint.
        record = await self._context.read_record(self._name)
        committed = record is not None and record.save_id == self._save_id
        return set() if committed else self._sending.keys
