"""Digests of contents, and whether a body is what its client says."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Mapping

from asyncckpt.format.crc import crc32c
from asyncckpt.testing.objectstore.state import Content, Digests, Refused

ALGORITHMS = ("crc32", "crc32c", "sha1", "sha256", "crc64nvme")
"""Checksums that S3 knows. CRC-64/NVME is kept as the client sent it, not verified."""


def base64_of(data: bytes) -> str:
    """As text."""
    return base64.b64encode(data).decode("ascii")


def crc32c_of(content: Content) -> int:
    """The CRC-32C of all bytes."""
    value = 0
    for segment in content.segments:
        value = crc32c(segment, value)
    return value


def md5_of(content: Content) -> bytes:
    """The MD5 digest of all bytes."""
    digest = hashlib.md5(usedforsecurity=False)
    for segment in content.segments:
        digest.update(segment)
    return digest.digest()


def checksum_of(content: Content, algorithm: str) -> str | None:
    """The checksum in base64, or None if it cannot be computed here."""
    if algorithm == "crc32":
        value = 0
        for segment in content.segments:
            value = zlib.crc32(segment, value)
        return base64_of(value.to_bytes(4, "big"))
    if algorithm == "crc32c":
        return base64_of(crc32c_of(content).to_bytes(4, "big"))
    if algorithm in ("sha1", "sha256"):
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for segment in content.segments:
            digest.update(segment)
        return base64_of(digest.digest())
    return None


def sent_checksums(headers: Mapping[str, str]) -> dict[str, str]:
    """The checksums among headers or trailers, by algorithm."""
    found = {}
    for algorithm in ALGORITHMS:
        value = headers.get(f"x-amz-checksum-{algorithm}")
        if value is not None:
            found[algorithm] = value
    return found


def verify(content: Content, checksums: Mapping[str, str], content_md5: str | None) -> None:
    """Raise `Refused` if the content is not what its client says it sent."""
    if content_md5 is not None:
        try:
            wanted = base64.b64decode(content_md5, validate=True)
        except binascii.Error:
            raise Refused("InvalidDigest") from None
        if len(wanted) != 16:
            raise Refused("InvalidDigest")
        if md5_of(content) != wanted:
            raise Refused("BadDigest", "The Content-MD5 you specified did not match.")
    for algorithm, value in checksums.items():
        computed = checksum_of(content, algorithm)
        if computed is not None and computed != value:
            raise Refused(
                "BadDigest",
                f"The {algorithm.upper()} you specified did not match the calculated checksum.",
            )


def digests_of(
    content: Content,
    *,
    md5_max_nbytes: int,
    generation: int,
    checksums: Mapping[str, str],
    with_crc32c: bool = False,
) -> Digests:
    """What the service knows about the content.

    The ETag is the MD5 up to `md5_max_nbytes`; above, it is made of size and `generation`, as a
    service's is that encrypts objects, because MD5 would cost more than all the rest.
    """
    crc = crc32c_of(content) if with_crc32c else None
    if content.nbytes <= md5_max_nbytes:
        md5 = md5_of(content)
        return Digests(md5.hex(), md5, crc, dict(checksums))
    return Digests(f"{content.nbytes:012x}{generation:020x}", None, crc, dict(checksums))
