"""The JSON API of GCS, as gcsfs, TensorStore and Google's own clients use it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from tests.simulator.dialects.answers import ERRORS, USUAL, answer, byte_range, failed, iso
from tests.simulator.dialects.gcs_uploads import (
    Uploads,
    boundary,
    check_resource,
    chunk_kind,
    condition,
    related,
    resource_of,
)
from tests.simulator.dialects.s3 import S3
from tests.simulator.dialects.service import NONE, Dialect, Service
from tests.simulator.requests import Kind, Request, Response
from tests.simulator.state import Content, Precondition, Refused, StoredObject

API = re.compile(r"^(?:/(upload|download|resumable/upload))?/(?:storage/)?v1/b(?:/|$)")
BATCH = "/batch/storage/v1"
BATCH_MARK = "batch_simulated"
BATCH_MAX = 100
LIST_MAX = 1000


class GCS(Uploads):
    """The API of one listening port: JSON, and XML for what is not JSON."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._xml = S3(service, google=True)

    def classify(self, request: Request) -> Dialect:
        """Set kind, bucket and key of the request; return the API that it belongs to."""
        raw = request.raw_path
        if raw.rstrip("/") == BATCH:
            request.kind = "delete_objects"
            return self
        found = API.match(raw)
        if found is None:
            return self._xml.classify(request)
        bucket, _, tail = raw[found.end() :].strip("/").partition("/")
        request.bucket = unquote(bucket)
        if not tail:
            request.kind = (
                "get_bucket" if (request.method, bool(bucket)) == ("GET", True) else "unknown"
            )
        elif (found.group(1) or "").endswith("upload"):
            self._classify_upload(request)
        elif tail == "o":
            request.kind = "list_objects" if request.method == "GET" else "unknown"
        elif tail.startswith("o/"):
            key, _, verb = tail[2:].partition("/")
            request.key = unquote(key)
            request.kind = _kind(request, verb)
        elif tail == "storageLayout" and request.method == "GET":
            request.kind = "get_bucket"
        return self

    def _classify_upload(self, request: Request) -> None:
        query = request.query
        request.key = query.get("name", "")
        if "upload_id" in query:
            upload = self._state.uploads.get(query["upload_id"])
            request.key = upload.key if upload is not None else request.key
            is_end = request.method == "DELETE"
            request.kind = "abort_upload" if is_end else chunk_kind(request.headers)
        else:
            resumable = query.get("uploadType") == "resumable"
            request.kind = "create_upload" if resumable else "put_object"

    def authorize(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made."""
        self._service.authorize_gcs(request)

    def error(
        self, request: Request, code: str, message: str = "", fields: Mapping[str, str] = NONE
    ) -> Response:
        """Return the response that names an error."""
        status, reason, usual_message = ERRORS.get(code, (400, code, code))
        return failed(429 if code == "SlowDown" else status, reason, message or usual_message)

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """Return the response of a fault."""
        return failed(status, code or USUAL.get(status, ("", "internalError"))[1], message)

    # Buckets

    async def get_bucket(self, request: Request) -> Response:
        """Describe a bucket, or its layout."""
        bucket = self._state.bucket(request.bucket)
        if request.path.rstrip("/").endswith("/storageLayout"):
            layout = {"kind": "storage#storageLayout", "bucket": bucket.name, "location": "US"}
            return answer(layout)
        resource = {"kind": "storage#bucket", "id": bucket.name, "name": bucket.name}
        times = {"timeCreated": iso(bucket.created_s), "updated": iso(bucket.created_s)}
        settings = {"location": "US", "storageClass": "STANDARD", "metageneration": "1"}
        return answer(resource | times | settings)

    # Objects

    async def put_object(self, request: Request) -> Response:
        """Store an object, whose body may hold its resource too."""
        self._state.bucket(request.bucket)
        if request.query.get("uploadType") == "multipart":
            resource, content_type, content = related(request)
        else:
            content_type = request.headers.get("content-type", "application/octet-stream")
            resource, content = {}, Content(request.body)
        request.key = request.key or str(resource["name"])
        digests = await self._service.digests(request, content, with_crc32c=True)
        request.stored = content
        check_resource(resource, digests)
        kind, described = str(resource.get("contentType", content_type)), resource.get("metadata")
        item = StoredObject(request.key, content, digests, kind, dict(described or {}))
        self._state.put(request.bucket, item, condition(request))
        return answer(resource_of(request.bucket, item))

    async def get_object(self, request: Request) -> Response:
        """Return the contents of an object, or a range of them."""
        item = self._found(request)
        part = byte_range(request.headers.get("range"), item.nbytes)
        start, stop = part or (0, item.nbytes)
        digests = item.digests
        hashes = {"crc32c": digests.crc32c, "md5": digests.md5}
        headers = {
            "Content-Type": item.content_type,
            "ETag": f'"{digests.etag}"',
            "X-Goog-Generation": str(item.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Hash": ",".join(f"{name}={h}" for name, h in hashes.items() if h),
            "X-Goog-Stored-Content-Length": str(item.nbytes),
        }
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.nbytes}"
        status = 200 if part is None else 206
        return Response(status, headers, tuple(item.content.slices(start, stop)))

    async def head_object(self, request: Request) -> Response:
        """Describe an object."""
        return answer(resource_of(request.bucket, self._found(request)))

    def _found(self, request: Request) -> StoredObject:
        item = self._state.get(request.bucket, request.key)
        if request.query.get("generation", str(item.generation)) != str(item.generation):
            raise Refused("NoSuchKey")
        if request.query.get("ifGenerationNotMatch") == str(item.generation):
            raise Refused("NotModified")
        condition(request).check(item)
        return item

    async def delete_object(self, request: Request) -> Response:
        """Delete an object, which must exist."""
        if self._state.delete(request.bucket, request.key, condition(request)) is None:
            raise Refused("NoSuchKey", f"No such object: {request.bucket}/{request.key}")
        return Response(204)

    async def copy_object(self, request: Request) -> Response:
        """Copy an object at once, under conditions on source and target."""
        verb, _, target = request.raw_path.partition("/o/")[2].split("/", 3)[1:]
        bucket, _, key = map(unquote, target.partition("/o/"))
        source = self._state.get(request.bucket, request.key)
        wanted = request.query.get("ifSourceGenerationMatch")
        Precondition(generation=None if wanted is None else int(wanted)).check(source)
        if request.query.get("sourceGeneration", str(source.generation)) != str(source.generation):
            raise Refused("NoSuchKey")
        item = StoredObject(
            key, source.content, source.digests, source.content_type, source.metadata
        )
        self._state.put(bucket, item, condition(request))
        resource = resource_of(bucket, item)
        if verb == "copyTo":
            return answer(resource)
        rewritten = {"totalBytesRewritten": str(item.nbytes), "objectSize": str(item.nbytes)}
        done = {"kind": "storage#rewriteResponse", "done": True, "resource": resource}
        return answer(done | rewritten)

    async def list_objects(self, request: Request) -> Response:
        """List a page of objects and common prefixes."""
        query = request.query
        page = self._state.list(
            request.bucket,
            prefix=query.get("prefix", ""),
            delimiter=query.get("delimiter", ""),
            after=unquote(query.get("pageToken") or ""),
            start=query.get("startOffset", ""),
            end=query.get("endOffset", ""),
            limit=min(int(query.get("maxResults", LIST_MAX)), LIST_MAX),
        )
        found: dict[str, Any] = {"kind": "storage#objects"}
        if page.objects:
            found["items"] = [resource_of(request.bucket, item) for item in page.objects]
        if page.prefixes:
            found["prefixes"] = page.prefixes
        if page.next is not None:
            found["nextPageToken"] = quote(page.next, safe="")
        return answer(found)

    async def delete_objects(self, request: Request) -> Response:
        """Answer a batch of deletions, each on its own; other requests in it get 501."""
        mark = b"--" + boundary(request.headers.get("content-type", ""))
        parts = bytes(request.body).split(mark)[1:-1]
        if len(parts) > BATCH_MAX:
            raise Refused("InvalidArgument", f"A batch has at most {BATCH_MAX} requests.")
        answers = []
        for part in parts:
            text = part.decode()
            asked = re.search(r"^([A-Z]+) (\S+) HTTP/1", text, re.M)
            label = re.search(r"^content-id:\s*<?([^>\r\n]*)>?", text, re.M | re.I)
            if asked is None:
                raise Refused("InvalidArgument", "A part of a batch without a request line.")
            inner = Request(asked.group(1), asked.group(2), {})
            if self.classify(inner) is self and inner.kind == "delete_object":
                inner.secrets = request.secrets
                found = await self.handle(inner)
            else:
                found = failed(501, "notImplemented", "The simulator batches only deletions.")
            body = b"".join(found.body).decode()
            answers.append(
                f"--{BATCH_MARK}\r\nContent-Type: application/http\r\n"
                f"Content-ID: <response-{label.group(1) if label else ''}>\r\n\r\n"
                f"HTTP/1.1 {found.status} {'No Content' if found.status == 204 else 'Error'}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}\r\n"
            )
        whole = f"{''.join(answers)}--{BATCH_MARK}--\r\n".encode()
        return Response(200, {"Content-Type": f"multipart/mixed; boundary={BATCH_MARK}"}, (whole,))


def _kind(request: Request, verb: str) -> Kind:
    """Return the kind of a request about an object, with what follows the object's name."""
    if verb.startswith(("rewriteTo/", "copyTo/")):
        return "copy_object"
    if not verb and request.method == "GET":
        return "get_object" if request.query.get("alt") == "media" else "head_object"
    return "delete_object" if not verb and request.method == "DELETE" else "unknown"
