"""A request, its answer, and what the log keeps of both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote

from asyncckpt.testing.objectstore.state import Content

Kind = Literal[
    "abort_upload",
    "complete_upload",
    "compose_object",
    "control",
    "copy_object",
    "create_bucket",
    "create_upload",
    "delete_bucket",
    "delete_object",
    "delete_objects",
    "get_bucket",
    "get_object",
    "head_object",
    "list_buckets",
    "list_objects",
    "list_parts",
    "list_uploads",
    "put_object",
    "put_part",
    "query_upload",
    "unknown",
]
"""What a request does; the same word for the same thing in S3 and GCS."""

WRITES: frozenset[str] = frozenset(
    (
        "abort_upload",
        "complete_upload",
        "compose_object",
        "copy_object",
        "create_bucket",
        "create_upload",
        "delete_bucket",
        "delete_object",
        "delete_objects",
        "put_object",
        "put_part",
    )
)
"""Kinds that change something: they have the latency and the rate limit of writes."""

COMMITS: frozenset[str] = frozenset(
    ("put_object", "complete_upload", "compose_object", "copy_object", "delete_object")
)
"""Kinds that change one object."""


@dataclass(slots=True, eq=False)
class Request:
    """One request. `body` is complete when it is handled; `stored` is what was kept of it."""

    method: str
    target: str
    headers: dict[str, str]
    path: str = ""
    query: dict[str, str] = field(default_factory=dict)
    kind: Kind = "unknown"
    bucket: str = ""
    key: str = ""
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    trailers: dict[str, str] = field(default_factory=dict)
    stored: Content | None = None

    def __post_init__(self) -> None:
        if self.target.startswith(("http://", "https://")):  # of a proxy, or within a batch
            self.target = "/" + self.target.split("/", 3)[-1]
        raw, _, query = self.target.partition("?")
        self.path = unquote(raw)
        self.query = dict(parse_qsl(query, keep_blank_values=True)) if query else {}

    @property
    def is_write(self) -> bool:
        """Whether it changes something."""
        return self.kind in WRITES


@dataclass(slots=True, eq=False)
class Response:
    """One answer. `length` is announced when it is not that of the body (an answer to HEAD)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[bytes | bytearray | memoryview, ...] = ()
    length: int | None = None

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return sum(memoryview(piece).nbytes for piece in self.body)


@dataclass(slots=True, eq=False)
class Logged:
    """What is known about a request that came.

    Attributes:
        number: of the request, from 1.
        service: ``"s3"``, ``"gcs"`` or ``"control"``.
        method: of HTTP.
        kind: what it does; see `Kind`.
        bucket: that it is about, or ``""``.
        key: that it is about, or ``""``.
        query: its parameters.
        headers: lower-case names; without those that carry credentials.
        nbytes: length of its body as decoded.
        answered_nbytes: length of the body of the answer that was handed to the kernel.
        status: of the answer; 0 if there was none.
        began_s: time of its head, on the monotonic clock.
        received_s: time of the last byte of its body; 0.0 before.
        applied_s: time at which it took effect; 0.0 if it did not.
        ended_s: time at which the answer was sent or given up; 0.0 before.
        connection: number of the connection.
        faults: names of the faults that it met.
    """

    number: int
    service: str
    method: str
    kind: Kind
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    connection: int
    began_s: float
    nbytes: int = 0
    answered_nbytes: int = 0
    status: int = 0
    received_s: float = 0.0
    applied_s: float = 0.0
    ended_s: float = 0.0
    faults: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "query": dict(self.query),
            "headers": dict(self.headers),
        }


Handler = Callable[[Request], Awaitable[Response]]
"""Answers requests of one kind."""

SECRETS: frozenset[str] = frozenset(
    ("authorization", "cookie", "x-amz-security-token", "x-goog-iam-authorization-token")
)
"""Headers that are not logged."""


def without_secrets(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers that carry no credentials."""
    return {name: value for name, value in headers if name not in SECRETS}
