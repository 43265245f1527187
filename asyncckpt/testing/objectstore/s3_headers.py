"""What the headers of S3 and of the XML API of GCS mean."""

from __future__ import annotations

from email.utils import formatdate

from asyncckpt.testing.objectstore.requests import Request
from asyncckpt.testing.objectstore.state import (
    Digests,
    Precondition,
    Refused,
    StoredObject,
)


def byte_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """The range of bytes that a header means, or None for all.

    Raises:
        Refused: it begins behind the end.
    """
    if header is None or not header.startswith("bytes=") or "," in header:
        return None
    first, dash, last = header[6:].strip().partition("-")
    if not dash or not (first or last) or not (first + last).isdecimal():
        return None
    if not first:
        start, stop = max(0, nbytes - int(last)), nbytes
        if not int(last):
            start = nbytes
    else:
        start, stop = int(first), min(int(last) + 1, nbytes) if last else nbytes
        if last and int(last) < start:
            return None
    if start >= nbytes:
        raise Refused("InvalidRange", ActualObjectSize=str(nbytes), RangeRequested=header)
    return start, stop


def condition(request: Request) -> Precondition:
    """What the headers ask for."""
    sent = request.headers
    unwanted = sent.get("if-none-match")
    if unwanted is not None and unwanted != "*":
        raise Refused("NotImplemented")
    generation = sent.get("x-goog-if-generation-match")
    return Precondition(
        absent=unwanted == "*",
        etag=sent.get("if-match"),
        generation=None if generation is None else int(generation),
    )


def written(item: StoredObject, google: bool) -> dict[str, str]:
    """Headers of the answer to a write."""
    headers = {"ETag": f'"{item.digests.etag}"'} | checksum_headers(item.digests)
    if google:
        headers["x-goog-generation"] = str(item.generation)
    return headers


def described(item: StoredObject, google: bool) -> dict[str, str]:
    """Headers of the answer to a read."""
    headers = {
        "ETag": f'"{item.digests.etag}"',
        "Last-Modified": formatdate(item.modified_s, usegmt=True),
        "Content-Type": item.content_type,
        "Accept-Ranges": "bytes",
    }
    meta = "x-goog-meta-" if google else "x-amz-meta-"
    headers |= {meta + name: value for name, value in item.metadata.items()}
    if google:
        headers["x-goog-generation"] = str(item.generation)
        headers["x-goog-metageneration"] = "1"
    return headers


def metadata(request: Request) -> dict[str, str]:
    """The user's own headers, without what they begin with."""
    found = {}
    for name, value in request.headers.items():
        if name.startswith(("x-amz-meta-", "x-goog-meta-")):
            found[name.split("-meta-", 1)[1]] = value
    return found


def checksum_headers(digests: Digests) -> dict[str, str]:
    """The checksums as headers."""
    return {f"x-amz-checksum-{name}": value for name, value in digests.checksums.items()}
