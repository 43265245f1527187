"""Requests, which are the entries of the log, and responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote

from tests.simulator.state import Content

Kind = Literal[
    "abort_upload",
    "complete_upload",
    "copy_object",
    "create_upload",
    "delete_object",
    "delete_objects",
    "get_bucket",
    "get_object",
    "head_object",
    "list_objects",
    "list_uploads",
    "put_object",
    "put_part",
    "query_upload",
    "unknown",
]
"""What a request does; the same word for the same thing in S3 and GCS."""

READS: frozenset[str] = frozenset(
    "get_bucket get_object head_object list_objects list_uploads query_upload unknown".split()
)
"""Kinds that change nothing. All others have the latency and the rate limit of writes."""

COMMITS: frozenset[str] = frozenset(
    ("put_object", "complete_upload", "copy_object", "delete_object")
)
"""Kinds that change one object."""

SECRETS: frozenset[str] = frozenset(
    ("authorization", "cookie", "x-amz-security-token", "x-goog-iam-authorization-token")
)
"""Headers that are not logged."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, and its entry in the log.

    Attributes:
        method: of HTTP.
        target: path and query as sent.
        headers: by lower-case name, without those that carry credentials.
        secrets: the headers that carry credentials; dropped with the response.
        path: the decoded path.
        query: the decoded parameters.
        kind: what it does.
        bucket: that it is about, or ``""``.
        key: that it is about, or ``""``.
        body: decoded, and complete once the request is handled; dropped with the response.
        trailers: headers that followed a chunked body.
        stored: what was kept of the body; dropped with the response.
        number: of the request, from 1.
        service: ``"s3"`` or ``"gcs"``.
        connection: number of the connection.
        nbytes: length of its decoded body.
        answered_nbytes: bytes of the response's body that were handed to the kernel.
        status: of the response; 0 without one.
        began_s: time of its head, on the monotonic clock.
        received_s: time of the last byte of its body; 0.0 before.
        applied_s: time at which it took effect; 0.0 if it did not.
        ended_s: time at which the response was sent or given up; 0.0 before.
        faults: names of the faults that it met.
    """

    method: str
    target: str
    headers: dict[str, str]
    path: str = ""
    query: dict[str, str] = field(default_factory=dict)
    kind: Kind = "unknown"
    bucket: str = ""
    key: str = ""
    body: memoryview = field(default=memoryview(b""), repr=False)
    trailers: dict[str, str] = field(default_factory=dict)
    stored: Content | None = field(default=None, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    number: int = 0
    service: str = ""
    connection: int = 0
    nbytes: int = 0
    answered_nbytes: int = 0
    status: int = 0
    began_s: float = 0.0
    received_s: float = 0.0
    applied_s: float = 0.0
    ended_s: float = 0.0
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target.startswith(("http://", "https://")):  # sent to a proxy, or in a batch
            self.target = "/" + self.target.split("/", 3)[-1]
        self.path = unquote(self.raw_path)
        self.query = dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))
        self.secrets = {name: self.headers.pop(name) for name in SECRETS & self.headers.keys()}

    @property
    def raw_path(self) -> str:
        """The path as sent."""
        return self.target.partition("?")[0]

    @property
    def is_write(self) -> bool:
        """Whether it changes something."""
        return self.kind not in READS

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        left_out = ("body", "secrets", "stored")
        return {name: getattr(self, name) for name in self.__slots__ if name not in left_out}


@dataclass(slots=True, eq=False)
class Response:
    """One response. `length` is announced where it differs from the body's (HEAD)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: tuple[bytes | bytearray | memoryview, ...] = ()
    length: int | None = None

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return sum(memoryview(piece).nbytes for piece in self.body)
