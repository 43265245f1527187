"""What the headers, queries and bodies of requests of the JSON API of GCS mean."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from asyncckpt.testing.objectstore.digests import base64_of
from asyncckpt.testing.objectstore.requests import Kind, Request
from asyncckpt.testing.objectstore.state import Content, Precondition, Refused

PART_HEADS_NBYTES = 64 * 1024
"""The resource and the heads of both parts of a multipart/related body are within so many bytes."""

PART_TAIL_NBYTES = 1024
"""Its closing mark is within so many bytes of its end."""


class Sent(NamedTuple):
    """What a Content-Range says: first byte, number of bytes, bytes in all if that is known."""

    start: int
    nbytes: int
    total: int | None


def content_range(header: str | None, have: int, nbytes: int) -> Sent:
    """What the header says; without one, that these are all bytes that are missing."""
    if header is None:
        return Sent(have, nbytes, have + nbytes)
    found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", header.strip())
    if found is None:
        raise Refused("InvalidArgument", "no Content-Range")
    total = None if found.group(3) == "*" else int(found.group(3))
    if found.group(1) is None:
        return Sent(have, 0, total)
    start = int(found.group(1))
    return Sent(start, int(found.group(2)) + 1 - start, total)


def chunk_kind(headers: dict[str, str]) -> Kind:
    """What a request to an open upload does."""
    found = re.fullmatch(r"bytes (?:\d+-(\d+)|\*)/(\d+|\*)", headers.get("content-range", ""))
    if found is None:
        return "complete_upload"
    last, total = found.groups()
    if last is None:
        return "query_upload"
    return "complete_upload" if total != "*" and int(last) + 1 == int(total) else "put_part"


def condition(request: Request) -> Precondition:
    """What the query asks for."""
    match = request.query.get("ifGenerationMatch")
    unlike = request.query.get("ifGenerationNotMatch")
    return Precondition(
        generation=None if match is None else int(match),
        generation_not=None if unlike is None else int(unlike),
    )


def boundary(content_type: str) -> bytes:
    """Of a multipart body. Raises `Refused`: there is none."""
    found = re.search(r"boundary=(\"[^\"]*\"|'[^']*'|[^;]*)", content_type)
    if found is None:
        raise Refused("InvalidArgument", "no boundary")
    return found.group(1).strip().strip("\"'").encode()


def related(request: Request) -> tuple[dict[str, Any], str, Content]:
    """Resource, content type and contents of a multipart/related body, without a copy."""
    mark = b"--" + boundary(request.headers.get("content-type", ""))
    body = request.body
    head = bytes(body[:PART_HEADS_NBYTES])
    tail_at = max(0, len(body) - PART_TAIL_NBYTES)
    first = head.find(mark)
    second = head.find(b"\n" + mark, first + len(mark))
    end = bytes(body[tail_at:]).rfind(b"\n" + mark + b"--") + tail_at
    if first < 0 or second < 0 or end <= second:
        raise Refused("InvalidArgument", "a multipart body of two parts is needed")
    _, resource_at = _part_head(head, first + len(mark))
    text, content_at = _part_head(head, second + 1 + len(mark))
    if body[end - 1] == 0x0D and b"\r\n" in head[first:content_at]:
        end -= 1
    found = re.search(r"^content-type:\s*([^\r\n]*)", text, re.M | re.I)
    resource = json.loads(head[resource_at:second])
    content = Content(body[content_at : max(end, content_at)])
    return resource, found.group(1) if found else "application/octet-stream", content


def _part_head(body: bytes, at: int) -> tuple[str, int]:
    """The headers of the part that begins at `at`, and where its contents begin."""
    ends = [(body.find(mark, at), len(mark)) for mark in (b"\r\n\r\n", b"\n\n")]
    found = [(end, length) for end, length in ends if end >= 0]
    if not found:
        raise Refused("InvalidArgument", "a part without an empty line")
    end, length = min(found)
    return body[at:end].decode("latin-1"), end + length


def check_resource(resource: dict[str, Any], crc: int | None, md5: bytes | None) -> None:
    """Raise `Refused` if the content is not what its resource says."""
    wanted = resource.get("crc32c")
    if wanted is not None and crc is not None and wanted != base64_of(crc.to_bytes(4, "big")):
        raise Refused("BadDigest")
    wanted = resource.get("md5Hash")
    if wanted is not None and md5 is not None and wanted != base64_of(md5):
        raise Refused("BadDigest")
