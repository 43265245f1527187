"""State, settings, digests, and the frame of handling that both dialects share."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import ParamSpec, TypeVar
from xml.etree.ElementTree import ParseError

from asyncckpt.format.crc import crc32c
from tests.simulator.dialects.credentials import Credentials, check_s3, check_token, scope_region
from tests.simulator.requests import Request, Response
from tests.simulator.state import Content, Digests, Refused, State

P = ParamSpec("P")
R = TypeVar("R")
NONE: Mapping[str, str] = MappingProxyType({})

INLINE_NBYTES = 64 * 1024
"""Digests of more than this are computed in a thread, while other requests go on."""

MD5_MAX_NBYTES = 1024 * 1024
PART_MIN_NBYTES = 5 * 1024 * 1024

ALGORITHMS = ("crc32", "crc32c", "sha1", "sha256", "crc64nvme")
"""Checksums that S3 knows. CRC-64/NVME is kept as the client sent it, not verified."""


def base64_of(data: bytes) -> str:
    """Encode as text."""
    return base64.b64encode(data).decode("ascii")


def checksum_of(content: Content, algorithm: str) -> str | None:
    """Compute the checksum in base64, or return None if it cannot be computed here."""
    if algorithm in ("md5", "sha1", "sha256"):
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for segment in content.segments:
            digest.update(segment)
        return base64_of(digest.digest())
    functions: dict[str, Callable[[memoryview, int], int]]
    functions = {"crc32": zlib.crc32, "crc32c": crc32c}
    if algorithm not in functions:
        return None
    value = 0
    for segment in content.segments:
        value = functions[algorithm](segment, value)
    return base64_of(value.to_bytes(4, "big"))


def sent_checksums(request: Request) -> dict[str, str]:
    """Return the checksums among headers and trailers, by algorithm; ``md5`` is one of them."""
    headers = request.headers | request.trailers
    found = {
        a: headers[f"x-amz-checksum-{a}"] for a in ALGORITHMS if f"x-amz-checksum-{a}" in headers
    }
    if "content-md5" in headers:
        found["md5"] = headers["content-md5"]
    for item in headers.get("x-goog-hash", "").split(","):
        name, equals, value = item.strip().partition("=")
        if equals:
            found[name] = value
    return found


def verify(content: Content, checksums: Mapping[str, str]) -> None:
    """Raise `Refused` if the content is not what its client says it sent."""
    for algorithm, value in checksums.items():
        if algorithm == "md5":
            try:
                well_formed = len(base64.b64decode(value, validate=True)) == 16
            except binascii.Error:
                well_formed = False
            if not well_formed:
                raise Refused("InvalidDigest")
        if checksum_of(content, algorithm) not in (None, value):
            raise Refused("BadDigest", f"The {algorithm.upper()} you specified did not match.")


def digests_of(
    content: Content,
    *,
    md5_max_nbytes: int,
    generation: int,
    checksums: Mapping[str, str] | None = None,
    with_crc32c: bool = False,
) -> Digests:
    """Compute what the service knows about the content.

    The ETag is the MD5 up to `md5_max_nbytes`; above, it is made of size and `generation`, as it is
    in a service that encrypts objects, because MD5 would cost more than all the rest.
    """
    crc = checksum_of(content, "crc32c") if with_crc32c else None
    kept = {name: value for name, value in (checksums or {}).items() if name != "md5"}
    if content.nbytes > md5_max_nbytes:
        return Digests(f"{content.nbytes:012x}{generation:020x}", None, crc, kept)
    md5 = checksum_of(content, "md5")
    assert md5 is not None
    return Digests(base64.b64decode(md5).hex(), md5, crc, kept)


@dataclass(slots=True, eq=False)
class Service:
    """State and settings of a simulated service.

    Attributes:
        state: buckets and uploads.
        threads: for digests.
        credentials: of the one user, or None to serve everybody.
        region: of the S3 endpoint; requests that are signed for another one are refused. None
            for any.
        part_min_nbytes: smallest part of an S3 upload but the last; 0 for no limit.
        md5_max_nbytes: contents above have no MD5, and an ETag of another kind.
        verify_checksums: whether bodies are compared with the checksums that came with them.
    """

    state: State
    threads: ThreadPoolExecutor
    credentials: Credentials | None = None
    region: str | None = None
    part_min_nbytes: int = PART_MIN_NBYTES
    md5_max_nbytes: int = MD5_MAX_NBYTES
    verify_checksums: bool = True

    def authorize_s3(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made, as S3 does."""
        if self.credentials is not None:
            check_s3(self.credentials, request)
        used = scope_region(request)
        if self.region is not None and used is not None and used != self.region:
            raise Refused(
                "AuthorizationHeaderMalformed",
                f"The authorization header is malformed; the region '{used}' is wrong; "
                f"expecting '{self.region}'",
                Region=self.region,
            )

    def authorize_gcs(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made, as GCS does."""
        if self.credentials is not None:
            check_token(self.credentials, request)

    async def digests(
        self, request: Request, content: Content, *, with_crc32c: bool = False
    ) -> Digests:
        """Compute the digests of contents that the request brought.

        Raises:
            Refused: they differ from those that the request names.
        """
        checksums = sent_checksums(request)
        generation = self.state.next_generation()

        def compute() -> Digests:
            if self.verify_checksums:
                verify(content, checksums)
            return digests_of(
                content,
                md5_max_nbytes=self.md5_max_nbytes,
                generation=generation,
                checksums=checksums,
                with_crc32c=with_crc32c,
            )

        hashes = with_crc32c or content.nbytes <= self.md5_max_nbytes
        if content.nbytes <= INLINE_NBYTES or not (hashes or (self.verify_checksums and checksums)):
            return compute()
        return await self.in_thread(compute)

    async def in_thread(self, function: Callable[P, R], /, *args: P.args, **more: P.kwargs) -> R:
        """Call the function while other requests go on."""
        call = functools.partial(function, *args, **more)
        return await asyncio.get_running_loop().run_in_executor(self.threads, call)


class Dialect:
    """An API. Each handler is a method that is named after the kind of its requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._state = service.state

    def classify(self, request: Request) -> Dialect:
        """Set kind, bucket and key of the request; return the API that it belongs to."""
        raise NotImplementedError

    def authorize(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made."""
        raise NotImplementedError

    def error(
        self, request: Request, code: str, message: str = "", fields: Mapping[str, str] = NONE
    ) -> Response:
        """Return the response that names an error."""
        raise NotImplementedError

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """Return the response of a fault."""
        raise NotImplementedError

    async def handle(self, request: Request) -> Response:
        """Apply the request and return its response."""
        try:
            self.authorize(request)
            handler = getattr(self, request.kind, None)
            if handler is None:
                raise Refused("MethodNotAllowed")
            response: Response = await handler(request)
            return response
        except Refused as error:
            return self.error(request, error.code, error.detail, error.fields)
        except ParseError as error:
            return self.error(request, "MalformedXML", str(error))
        except (KeyError, TypeError, ValueError) as error:
            return self.error(request, "InvalidArgument", f"{type(error).__name__}: {error}")
