"""What a client of an object store must do, and how its failures are told apart.

An `ObjectClient` translates: one call of it is one request (or as few as its library can make of
it), without retries, deadlines or limits of its own, which `Requests` adds for all clients alike.
"""

# Rule 1: keys are relative to the client's prefix, with `/` between parts, and never begin or end
#   with one; "" in `list` is the prefix itself.
# Rule 2: a client raises `RequestError` and `asyncio.CancelledError`, nothing else of its library.
# Rule 3: no credential and no option value is in any text that a client makes.
# Rule 4: a cancelled call ends promptly; whoever made it may not use its body again, because the
#   library below may still be sending it.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from asyncckpt.options import GIB, MIB
from asyncckpt.ports import Bytes

Body = bytes | bytearray | memoryview | Bytes
"""A contiguous one-dimensional buffer of bytes."""

Kind = Literal[
    "missing",  # 404 of an object
    "exists",  # 412: a conditional create found something
    "conflict",  # 409: another conditional write of the key is under way; try again
    "throttled",  # 429, 503 SlowDown: too many requests
    "unavailable",  # 500, 502, 503, 504
    "timeout",  # no answer in time
    "connection",  # refused, reset, closed, name not resolved
    "short",  # fewer bytes than the answer announced
    "no_bucket",  # 404 of the bucket or container
    "credentials",  # none, unknown, expired; 401, and 403 with a signature or token code
    "forbidden",  # 403: known, and not allowed
    "endpoint",  # wrong region or endpoint: 301, 307, 400 with a region code, TLS failures
    "quota",  # the account or bucket is full, or billing is off; waiting does not help
    "invalid",  # the request is refused for what it is: 400, 405, 416, 501, …
]

RETRYABLE: frozenset[Kind] = frozenset(
    ("conflict", "throttled", "unavailable", "timeout", "connection", "short")
)
"""After these the same request may succeed without anybody changing anything."""


class RequestError(Exception):
    """One request failed.

    Attributes:
        kind: what a caller can do about it.
        detail: what the server or the library said, without credentials; one line.
        status: HTTP status, or None.
        retry_after_s: seconds that the server asks to wait, or None.
        left: of a deletion of several, the keys that may still be there; None for all of them.
    """

    left: Sequence[str] | None = None

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: Kind = kind
        self.detail = detail
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later without a change."""
        return self.kind in RETRYABLE

    @property
    def concerns_one_object(self) -> bool:
        """Whether one object was changed too often, which says nothing about other requests.

        Google's store takes one change of an object per second, and answers 429 as it does to too
        many requests; the words are those of
        https://cloud.google.com/storage/docs/gcs429.
        """
        return self.kind == "throttled" and "object mutation operations" in self.detail


@dataclass(frozen=True, slots=True)
class ClientTraits:
    """What a client can do and what it costs; declared by it, `conditional_create` also probed.

    Attributes:
        name: the library, for errors and reports: ``"s3fs"``, ``"gcsfs"``, ``"obstore"``, …
        body: what `put` and `put_part` send without a copy of ours: only ``bytes`` and
            ``bytearray``, or ``"any"`` buffer.
        put_copies: copies of a body that the library holds while it sends it.
        get_copies: copies of an answer that the library holds until it hands it over, that
            included.
        conditional_create: `put(create=True)` is decided by the server (or, for a file system
            of this process, under a lock), so that of two exactly one succeeds.
        put_max_nbytes: largest body of one `put`.
        multipart: objects can be sent in parts.
        parallel_parts: parts may be sent in any order and at the same time.
        part_min_nbytes: least size of a part that is not the last; parts are multiples of
            `part_multiple_nbytes`.
        part_max_nbytes: largest part.
        part_max_count: most parts of an object.
        modified: `list` tells when objects were written.
    """

    name: str
    body: Literal["bytes", "any"] = "bytes"
    put_copies: int = 1
    get_copies: int = 1
    conditional_create: bool = False
    put_max_nbytes: int = 5 * GIB
    multipart: bool = False
    parallel_parts: bool = False
    part_min_nbytes: int = 5 * MIB
    part_multiple_nbytes: int = 1
    part_max_nbytes: int = 5 * GIB
    part_max_count: int = 9_000
    modified: bool = True


class Listed(NamedTuple):
    """One entry of a listing.

    Attributes:
        key: relative to the client's prefix; of a common prefix without the `/` at its end.
        nbytes: size of the object; 0 for a common prefix.
        is_prefix: whether it stands for all keys below it.
        modified_s: seconds since 1970 when the object was written, by the server's clock; 0.0
            where nothing tells.
    """

    key: str
    nbytes: int
    is_prefix: bool = False
    modified_s: float = 0.0


class PendingParts(NamedTuple):
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload: str
    begun_s: float


class ObjectClient(Protocol):
    """A bucket and a prefix in it, through one client library. Used on one event loop only."""

    url: str
    traits: ClientTraits

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """The object is exactly `body`, durable and visible; with `create` it is new.

        Raises:
            RequestError: `exists` and `conflict` only with `create`.
        """
        ...

    async def get(self, key: str, start: int, stop: int) -> Body:
        """Bytes `start` to `stop` of the object, fewer where it ends before; none past its end.

        One ranged request, with both bounds. `0 <= start < stop`.

        Raises:
            RequestError: `missing`; `short` when the connection ended before the answer did.
        """
        ...

    async def size(self, key: str) -> int:
        """Length of the object in bytes. Raises `RequestError`: `missing`."""
        ...

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        """What stands below `prefix` (without `/` at its end), by key, never from a cache.

        Not recursive: one level, objects and common prefixes. An empty list where there is
        nothing. The marker of a "directory" itself is left out. Ends after `limit` + 1 entries.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """None of the objects is there. One that is missing is no error."""
        ...

    async def begin_parts(self, key: str) -> str:
        """A multipart upload is open; returns its id."""
        ...

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """Part `number` (from 0), which begins at `offset` of the object, is stored.

        Returns what `complete_parts` wants to know about it.
        """
        ...

    async def complete_parts(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """The object consists of the parts with these tags, in order; durable and visible."""
        ...

    async def abort_parts(self, key: str, upload: str) -> None:
        """The upload and its parts are gone; it is no error if they are already."""
        ...

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        """Uploads below `prefix` that nobody ended; empty where the client cannot tell."""
        ...

    async def close(self) -> None:
        """Sessions and connections are closed. Idempotent."""
        ...
