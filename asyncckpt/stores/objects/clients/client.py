"""The protocol of an object-store client, and the failures that a client reports.

One call of an `ObjectClient` is one request, or as few as its library allows. A client neither
retries nor limits requests; `Requests` adds retries, deadlines and limits for all clients.
"""

# Rule 1: keys are relative to the client's prefix, with `/` between parts but not at either end; ""
#   in `list` is the prefix itself.
# Rule 2: a client raises `RequestError`, `asyncio.CancelledError`, and `UsageError` for options
#   that its library refuses; no other error of the library.
# Rule 3: a client's texts contain neither a credential nor an option value other than the host of
#   the endpoint.
# Rule 4: a cancelled call ends promptly. Its body must not be reused: the library may still be
#   sending it.

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from asyncckpt.options import GIB, KIB, MIB
from asyncckpt.ports import Bytes

Body = bytes | bytearray | memoryview | Bytes
"""A contiguous one-dimensional buffer of bytes."""

Take = Callable[[Sequence[Body]], Awaitable[None]]
"""Consumer of the next bytes of a response, which are in these buffers."""

STEP_NBYTES = 1 * MIB
"""Bytes of a response that are passed on at a time. Copying and checking them in a worker thread
takes twice as long as switching there and back, and the allocator reuses their memory: the first
touch of fresh memory would take longer than both."""

PUT_MAX_NBYTES = 4 * GIB
"""Largest body of one `put`; Azure takes 5,000 MiB, others more."""

INLINE_NBYTES = 64 * KIB
"""Data up to this size are copied and checked on the event loop (about 5 µs); a thread would cost
more."""

Kind = Literal[
    "missing",  # 404 of an object
    "exists",  # 412: the condition of a request does not hold
    "conflict",  # 409: another conditional write of the key is in progress; retry
    "throttled",  # 429, 503 SlowDown: too many requests
    "unavailable",  # 500, 502, 503, 504
    "timeout",  # no response in time
    "connection",  # refused, reset, closed, name not resolved
    "short",  # fewer bytes than the response announced
    "no_bucket",  # 404 of the bucket or container
    "credentials",  # none, unknown, expired; 401, and 403 with a signature or token code
    "forbidden",  # 403: authenticated, but not allowed
    "endpoint",  # wrong region or endpoint: 301, 307, 400 with a region code, TLS failures
    "quota",  # the account or bucket is full, or billing is off; waiting does not help
    "invalid",  # the store rejects the request itself: 400, 405, 416, 501, …
]

RETRYABLE: frozenset[Kind] = frozenset(
    ("conflict", "throttled", "unavailable", "timeout", "connection", "short")
)
"""Retryable without changes."""


class RequestError(Exception):
    """One request failed.

    Attributes:
        kind: category, which determines what a caller can do.
        detail: one line from the server or the library, without credentials.
        status: HTTP status, or None.
        retry_after_s: wait requested by the server in seconds, or None.
        left: after a deletion of several keys, those that may still exist; None for all.
        hint: what to do, if the kind does not imply it.
    """

    left: Sequence[str] | None = None
    hint: str | None = None

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(kind, detail)
        self.kind: Kind = kind
        self.detail = detail
        self.status = status
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.kind in RETRYABLE

    @property
    def concerns_one_object(self) -> bool:
        """Whether only one object was changed too often, so that other requests need not slow down.

        Google Cloud Storage allows one change per object and second, and rejects more with 429 and
        these words: https://cloud.google.com/storage/docs/gcs429.
        """
        return self.kind == "throttled" and "object mutation operations" in self.detail


@dataclass(frozen=True, slots=True)
class ClientTraits:
    """Capabilities and costs of a client.

    The client declares these; the store also probes the conditional requests.

    Attributes:
        name: the library, for errors and reports: ``"s3fs"``, ``"gcsfs"``, ``"obstore"``, …
        put_copies: additional copies of a body while it is being sent.
        get_copies: copies of a response in memory until `get` returns, including the returned one.
        receive_nbytes: memory that `receive` needs for a response of any length; None if it passes
            the response on all at once.
        conditional_create: exactly one of several `put(create=True)` of a key succeeds, decided by
            the server, or by a lock for a filesystem inside this process.
        conditional_replace: `replace` is available.
        conditional_delete: `delete_version` is available.
        repeats: the library may repeat a PUT whose response was lost, so that a refused
            conditional PUT may have been written.
        multipart: the client can send objects in parts.
        parallel_parts: parts may be sent in any order and concurrently.
        part_max_count: maximum number of parts of an object.
    """

    name: str
    put_copies: int = 1
    get_copies: int = 1
    receive_nbytes: int | None = None
    conditional_create: bool = False
    multipart: bool = False
    parallel_parts: bool = False
    part_max_count: int = 9_000
    conditional_replace: bool = False
    conditional_delete: bool = False
    repeats: bool = False


@contextlib.contextmanager
def unless_missing() -> Iterator[None]:
    """Suppress the error of a request that found no such object, which ends the block."""
    try:
        yield
    except RequestError as error:
        if error.kind != "missing":
            raise


class Listed(NamedTuple):
    """One entry of a listing.

    Attributes:
        key: relative to the client's prefix, without the `/` at the end of a common prefix.
        nbytes: size of the object; 0 for a common prefix.
        is_prefix: whether the entry is a common prefix.
        modified_s: when the object was written, in seconds since 1970 by the server's clock; 0.0
            if unknown.
        checksum: the server's tag of the contents (S3: ETag, GCS: MD5), equal for objects of one
            bucket with equal bytes that were sent by one PUT each; "" if unknown.
    """

    key: str
    nbytes: int
    is_prefix: bool = False
    modified_s: float = 0.0
    checksum: str = ""


class PendingParts(NamedTuple):
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload: str


class ObjectClient(Protocol):
    """A prefix of a bucket, through one client library. Bound to one event loop.

    The defaults refuse conditional changes and multipart uploads; clients override what their
    traits declare.
    """

    url: str
    traits: ClientTraits

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.traits.name}, {self.url!r})"

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """Store `body` as the object, durable and visible; with `create`, only if there is none.

        Raises:
            RequestError: with `create`, `exists` if there is one, `conflict` as in `replace`.
        """

    async def get(self, key: str, start: int, stop: int) -> Body:
        """Return bytes `start` to `stop` of the object; fewer, or none, if it ends earlier.

        One request with both bounds; `0 <= start < stop`.

        Raises:
            RequestError: `missing`; `short` if the connection ended before the response.
        """

    async def receive(self, key: str, start: int, stop: int, take: Take) -> None:
        """Pass on the bytes that `get` would return, in order, as they arrive.

        Calls `take` once at a time, and raises its errors.

        Raises:
            RequestError: as `get`, possibly after some bytes were passed on.
        """
        await take([await self.get(key, start, stop)])

    async def size(self, key: str) -> int:
        """Return the length of the object in bytes. Raises `RequestError`: `missing`."""

    async def version(self, key: str) -> str:
        """Return the version of the object's contents: an ETag (S3) or generation (GCS).

        To replace an object that you read, get the version before reading: a change in between
        then makes the replacement fail. Raises `RequestError`: `missing`.
        """

    async def replace(self, key: str, body: Body, *, version: str) -> None:
        """Replace the object with `body`, only if it still has this version.

        A retry after a lost response fails with `exists` if the first try succeeded: read the
        object back.

        Raises:
            RequestError: `exists` if it has another version, `missing` (S3) or `exists` (GCS) if
                it was deleted, `conflict` while another conditional write is in progress.
        """
        raise _lacking(self, "conditional replacement")

    async def delete_version(self, key: str, *, version: str) -> None:
        """Delete the object, only if it still has this version. A missing object is no error.

        Raises:
            RequestError: `exists` if it has another version, `conflict` as in `replace`.
        """
        raise _lacking(self, "conditional deletion")

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        """Return the entries below `prefix` (without a final `/`), by key, never from a cache.

        If not `recursive`, the objects and common prefixes of one level. Omits the marker objects
        of "directories". Returns at most `limit` + 1 entries.
        """

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete the objects. Missing ones are no error."""

    async def begin_parts(self, key: str, *, create: bool = False) -> str:
        """Open a multipart upload and return its id; `create` as in `complete_parts`."""
        raise _lacking(self, "multipart uploads")

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """Store part `number` (from 0), at `offset` of the object; return its tag."""
        raise _lacking(self, "multipart uploads")

    async def complete_parts(
        self, key: str, upload: str, tags: Sequence[str], *, create: bool = False
    ) -> None:
        """Create the object from the parts with these tags, in order; durable and visible.

        With `create`, given here and in `begin_parts`, only if there is none, for clients with
        `conditional_create`. Raises `RequestError`: `exists`.
        """
        raise _lacking(self, "multipart uploads")

    async def abort_parts(self, key: str, upload: str) -> None:
        """Delete the upload and its parts. A missing upload is no error."""
        raise _lacking(self, "multipart uploads")

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts] | None:
        """Return open uploads below `prefix`; None if the client cannot list them."""
        return None

    async def close(self) -> None:
        """Close sessions and connections. Idempotent."""


def _lacking(client: ObjectClient, ability: str) -> RequestError:
    return RequestError("invalid", f"{client.traits.name} offers no {ability}")
