"""Uploads to the JSON API of GCS: resumable ones, bodies in two parts, and resources."""

from __future__ import annotations

import json
import re
import time
from typing import Any
from urllib.parse import quote

from tests.simulator.dialects.answers import answer, iso
from tests.simulator.dialects.service import Dialect, Service
from tests.simulator.requests import Kind, Request, Response
from tests.simulator.state import Content, Digests, Precondition, Refused, StoredObject, Upload

CHUNK_MULTIPLE = 256 * 1024
"""Chunks of a resumable upload but the last are multiples of this."""

FINISHED_UPLOADS = 1000
"""So many completed resumable uploads are remembered for those who ask about them."""

PART_HEADS_NBYTES = 64 * 1024
"""The resource and the heads of both parts of a multipart/related body are within so many bytes."""

PART_TAIL_NBYTES = 1024
"""Its closing mark is within so many bytes of its end."""

CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


class Uploads(Dialect):
    """Handlers of requests about uploads in chunks."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._finished: dict[str, dict[str, Any]] = {}

    async def create_upload(self, request: Request) -> Response:
        """Open an upload."""
        resource = json.loads(bytes(request.body)) if request.body else {}
        key = request.key = request.key or str(resource["name"])
        content_type = request.headers.get("x-upload-content-type", "application/octet-stream")
        wanted = condition(request)
        wanted.check(self._state.bucket(request.bucket).objects.get(key))
        upload = self._state.begin_upload(
            Upload(
                self._state.new_upload_id(),
                request.bucket,
                key,
                time.time(),
                str(resource.get("contentType", content_type)),
                dict(resource.get("metadata") or {}),
                condition=wanted,
            )
        )
        host = request.headers.get("host", "localhost")
        match = request.query.get("ifGenerationMatch")
        location = (
            f"http://{host}/upload/storage/v1/b/{quote(request.bucket, safe='')}/o"
            f"?uploadType=resumable&name={quote(key, safe='')}"
            + (f"&ifGenerationMatch={match}" if match is not None else "")
            + f"&upload_id={upload.id}"
        )
        return Response(200, {"Location": location, "X-GUploader-UploadID": upload.id})

    async def put_part(self, request: Request) -> Response:
        """Append a chunk, and complete the upload with the last one; repeated bytes are dropped."""
        upload_id = request.query["upload_id"]
        if upload_id in self._finished:
            return answer(self._finished[upload_id])
        upload = self._state.upload(request.bucket, None, upload_id)
        have = upload.nbytes
        content = Content(request.body)
        start, total = _content_range(request.headers.get("content-range"), have, content.nbytes)
        if content.nbytes:
            if start > have:
                raise Refused("InvalidArgument", f"the upload goes on at byte {have}")
            fresh = Content(*content.slices(have - start, content.nbytes))
            if have + fresh.nbytes != total:  # not the last chunk: only whole multiples are kept
                kept = fresh.nbytes - fresh.nbytes % CHUNK_MULTIPLE
                fresh = Content(*fresh.slices(0, kept))
            upload.chunks.append(fresh)
            request.stored = fresh
            have += fresh.nbytes
        if total is None or have < total:
            return Response(308, {"Range": f"bytes=0-{have - 1}"} if have else {})
        content = Content.joined(upload.chunks)
        digests = await self._service.digests(request, content, with_crc32c=True)
        item = StoredObject(upload.key, content, digests, upload.content_type, upload.metadata)
        self._state.put(upload.bucket, item, upload.condition, upload)
        resource = self._finished[upload_id] = resource_of(upload.bucket, item)
        if len(self._finished) > FINISHED_UPLOADS:
            del self._finished[next(iter(self._finished))]
        return answer(resource)

    complete_upload = query_upload = put_part

    async def abort_upload(self, request: Request) -> Response:
        """Drop an upload."""
        upload = self._state.upload(request.bucket, None, request.query["upload_id"])
        self._state.abort_upload(upload)
        return Response(499)


def _content_range(header: str | None, have: int, nbytes: int) -> tuple[int, int | None]:
    """Return the first byte and, if it is known, the total; without a header, all that is missing.

    Raises:
        Refused: the header makes no sense, or the body has another length.
    """
    if header is None:
        return have, have + nbytes
    found = CONTENT_RANGE.fullmatch(header.strip())
    if found is None:
        raise Refused("InvalidArgument", "no Content-Range")
    total = None if found.group(3) == "*" else int(found.group(3))
    start, stop = (have, have) if found.group(1) is None else map(int, found.group(1, 2))
    if nbytes != (0 if found.group(1) is None else stop + 1 - start):
        raise Refused("InvalidArgument", "Content-Range and body differ in length")
    return start, total


def chunk_kind(headers: dict[str, str]) -> Kind:
    """Return what a request to an open upload does."""
    found = CONTENT_RANGE.fullmatch(headers.get("content-range", "").strip())
    if found is None:
        return "complete_upload"
    _, last, total = found.groups()
    if last is None:
        return "query_upload"
    return "complete_upload" if total != "*" and int(last) + 1 == int(total) else "put_part"


def condition(request: Request) -> Precondition:
    """Return the condition that the query names. Raises `Refused` for one that is not simulated."""
    wanted = {
        name: int(value) if name.endswith("Match") else 0
        for name, value in request.query.items()
        if name.startswith("if") and name != "ifSourceGenerationMatch"
    }
    if unknown := wanted.keys() - {"ifGenerationMatch", "ifGenerationNotMatch"}:
        raise Refused("NotImplemented", f"The simulator does not know {min(unknown)}.")
    return Precondition(
        generation=wanted.get("ifGenerationMatch"),
        generation_not=wanted.get("ifGenerationNotMatch"),
    )


def boundary(content_type: str) -> bytes:
    """Return the boundary of a multipart body. Raises `Refused` if there is none."""
    found = re.search(r"boundary=(\"[^\"]*\"|'[^']*'|[^;]*)", content_type)
    if found is None:
        raise Refused("InvalidArgument", "no boundary")
    return found.group(1).strip().strip("\"'").encode()


def related(request: Request) -> tuple[dict[str, Any], str, Content]:
    """Return resource, content type and contents of a multipart/related body, without a copy."""
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
    """Return the headers of the part that begins at `at`, and where its contents begin."""
    found = re.compile(rb"\r?\n\r?\n").search(body, at)
    if found is None:
        raise Refused("InvalidArgument", "a part without an empty line")
    return body[at : found.start()].decode("latin-1"), found.end()


def check_resource(resource: dict[str, Any], digests: Digests) -> None:
    """Raise `Refused` if the content is not what its resource says."""
    for name, found in (("crc32c", digests.crc32c), ("md5Hash", digests.md5)):
        if found is not None and resource.get(name, found) != found:
            raise Refused("BadDigest")


def resource_of(bucket: str, item: StoredObject) -> dict[str, Any]:
    """Describe an object; its times are that of the write."""
    digests = item.digests
    when = iso(item.modified_s)
    found: dict[str, Any] = {
        "kind": "storage#object",
        "id": f"{bucket}/{item.key}/{item.generation}",
        "name": item.key,
        "bucket": bucket,
        "generation": str(item.generation),
        "metageneration": "1",
        "contentType": item.content_type,
        "storageClass": "STANDARD",
        "size": str(item.nbytes),
        "etag": digests.etag,
        "timeCreated": when,
        "updated": when,
        "crc32c": digests.crc32c,
        "md5Hash": digests.md5,
        "metadata": item.metadata,
    }
    return {name: value for name, value in found.items() if value}
