"""Data files of an attempt on an object store, each sent by one request.

A file is one window: `write` sends it without a copy, under a new name for every try, and returns
once it is stored.
"""

# Rule 1: an abandoned request may still be sending its body. `write` reports that, and nothing here
#   refills memory that it has sent.
# Rule 2: every key is noted before a request for it is made.

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from asyncckpt.errors import AsyncCheckpointError, StoreError, UsageError
from asyncckpt.flow.shield import uninterrupted
from asyncckpt.ports import Bytes
from asyncckpt.stores.objects.clients.client import Body, RequestError
from asyncckpt.stores.objects.context import Context
from asyncckpt.stores.objects.failures import reported, store_error
from asyncckpt.stores.objects.layout import retried
from asyncckpt.stores.objects.requests.sending import Landing

ABORT_S = 20.0
"""Time limit of an abort, which delays a save's error past its deadline; gc removes the rest."""


@dataclass(slots=True, eq=False)
class Sending:
    """The objects that an attempt has sent.

    Attributes:
        prefix: key of the checkpoint.
        keys: every object that may exist because of this attempt.
        orphans: objects of lost or abandoned tries, which no file of the attempt uses.
        stored: the object that was stored last, orphans excluded.
        error: the first failure, which ends the attempt.
        ended: nothing more is sent.
        landing: time that requests in flight get when the attempt is cancelled.
    """

    context: Context
    prefix: str
    keys: set[str] = field(default_factory=set)
    orphans: set[str] = field(default_factory=set)
    stored: str | None = None
    error: AsyncCheckpointError | None = None
    ended: bool = False
    landing: Landing = field(default_factory=Landing)

    @property
    def location(self) -> str:
        """URL of the checkpoint."""
        return self.context.requests.location(self.prefix)

    def check(self) -> None:
        """Raise the first failure, or `UsageError` if the attempt has ended."""
        if self.error is not None:
            raise self.error
        if self.ended:
            raise UsageError(f"{self.location}: this attempt has ended", location=self.location)

    def check_sealed(self, files: Iterable[ObjectDataFile]) -> None:
        """Check that the attempt can continue and its data files are sealed."""
        self.check()
        for file in files:
            if not file.sealed:
                raise UsageError(
                    f"{file.path}: the data file is not sealed", location=self.location
                )

    async def end(self, removal: Callable[[], Awaitable[None]], action: str, later: str) -> None:
        """Remove what the attempt has sent, unless it has ended.

        Cancellation: finishes, then raises.

        Raises:
            StoreError: `removal` failed; `later` says who removes the rest.
        """
        if self.ended:
            return
        self.ended = True

        async def remove() -> None:
            try:
                with reported(action, self.location):
                    await removal()
            except TimeoutError:
                raise StoreError(
                    f"{self.location}: {action} did not end within {ABORT_S:g} s, or the store "
                    f"stopped answering; {later}",
                    location=self.location,
                    retryable=True,
                ) from None

        await uninterrupted(remove())

    def failed(self, action: str, key: str, error: RequestError) -> AsyncCheckpointError:
        """Return the error to raise; later calls raise an equal one."""
        location = self.context.requests.location(key)
        # A separate object: the traceback of the first would keep the request's body alive.
        self.error = self.error or store_error(action, location, error, stage="upload")
        return store_error(action, location, error, stage="upload")

    async def send(self, key: str, body: Body) -> tuple[str, bool]:
        """Store an object; return its key, and whether the body's memory may be reused."""

        def name(attempt: int) -> str:
            this = retried(key, attempt)
            self.keys.add(this)
            return this

        try:
            sent = await self.context.requests.put(name, body, landing=self.landing)
        except RequestError as error:
            raise self.failed(f"writing {len(body)} bytes", key, error) from error
        self.orphans.update(sent.orphans)
        self.stored = sent.key
        return sent.key, sent.reusable

    async def send_named(self, key: str, body: Body) -> None:
        """Store an object under exactly this key.

        The body must never change again: if an earlier try lands late, it writes the same bytes.
        """
        self.keys.add(key)
        try:
            await self.context.requests.replace(key, body, landing=self.landing)
        except RequestError as error:
            raise self.failed(f"writing {len(body)} bytes", key, error) from error
        self.stored = key


class ObjectDataFile:
    """An open data file. Made by `ObjectAttempt.create`.

    Cancelling a call ends its request, then raises.

    Attributes:
        path: its path; final once it is sealed.
        sealed: whether it is complete and durable.
    """

    def __init__(self, sending: Sending, path: str) -> None:
        self.path = path
        self.sealed = False
        self._sending = sending
        self._context = sending.context
        self._key = f"{sending.prefix}/{path}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._context.requests.location(self._key)!r})"

    async def write(self, offset: int, data: Bytes | bytearray) -> bool:
        """Write all of `data` at `offset`. As `DataFile.write`."""
        self._check()
        return not len(data) or await self._write(offset, data)

    async def seal(self, nbytes: int) -> None:
        """Make the file durable under its final `path`. As `DataFile.seal`."""
        self._check()
        await self._seal(nbytes)
        self.sealed = True

    def _check(self) -> None:
        self._sending.check()
        if self.sealed:
            raise self._refused("the data file is sealed")

    def _refused(self, why: str) -> UsageError:
        location = self._context.requests.location(self._key)
        return UsageError(f"{location}: {why}", location=location)

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        raise NotImplementedError

    async def _seal(self, nbytes: int) -> None:
        raise NotImplementedError


class WindowFile(ObjectDataFile):
    """A file of one window.

    Raises:
        UsageError: the file is longer than one window.
    """

    def __init__(self, sending: Sending, path: str, nbytes: int, window_nbytes: int) -> None:
        super().__init__(sending, path)
        if nbytes > window_nbytes:
            location = f"{sending.location}/{path}"
            raise UsageError(
                f"{location}: a data file of {nbytes} bytes does not fit one request of "
                f"{window_nbytes}; lower target_data_file_nbytes",
                location=location,
                expected=window_nbytes,
                found=nbytes,
            )
        self._nbytes = nbytes
        self._written = False

    async def _write(self, offset: int, data: Bytes | bytearray) -> bool:
        if offset or self._written or len(data) < self._nbytes:
            raise self._refused(
                f"a file of one window of {self._nbytes} bytes is written once, found "
                f"{len(data)} bytes at offset {offset}"
            )
        self._written = True
        return await self._send(cut(data, self._nbytes))

    async def _send(self, body: Body) -> bool:
        key, reusable = await self._sending.send(self._key, body)
        self.path = key.removeprefix(f"{self._sending.prefix}/")
        return reusable

    async def _seal(self, nbytes: int) -> None:
        if nbytes == 0 and not self._written:
            await self._send(b"")
        elif nbytes != self._nbytes or not self._written:
            raise self._refused(f"{self._nbytes} bytes were announced, and {nbytes} are sealed")


def cut(data: Bytes | bytearray, nbytes: int) -> Bytes | bytearray:
    """Return the first `nbytes`, without padding; slicing a `bytearray` copies."""
    return data if len(data) == nbytes else data[:nbytes]
