"""The JSON API of GCS, as gcsfs, TensorStore and Google's own clients use it."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote

from asyncckpt.testing.objectstore.gcs_answers import (
    ERRORS,
    REASONS,
    answer,
    bucket_resource,
    failed,
)
from asyncckpt.testing.objectstore.gcs_bodies import boundary, chunk_kind
from asyncckpt.testing.objectstore.gcs_objects import Objects
from asyncckpt.testing.objectstore.gcs_uploads import Uploads
from asyncckpt.testing.objectstore.requests import Handler, Kind, Request, Response
from asyncckpt.testing.objectstore.s3 import S3
from asyncckpt.testing.objectstore.service import Service
from asyncckpt.testing.objectstore.state import Refused

API = re.compile(r"^(?:/(upload|download|resumable/upload))?/(?:storage/)?v1/b(?:/|$|\?)")
BATCH = "/batch/storage/v1"
BATCH_MARK = "batch_simulated"


class GCS:
    """Answers the requests of one listening port: JSON, and XML for what is not JSON."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._state = service.state
        self._xml = S3(service, google=True)
        self._objects = Objects(service)
        self._handlers: dict[str, Handler] = {
            "create_bucket": self._create_bucket,
            "delete_bucket": self._delete_bucket,
            "delete_objects": self._batch,
            "get_bucket": self._get_bucket,
            "list_buckets": self._list_buckets,
            **self._objects.handlers(),
            **Uploads(service).handlers(),
        }

    def classify(self, request: Request) -> None:
        """Kind, bucket and key of the request are known."""
        raw = request.target.partition("?")[0]
        if raw.rstrip("/") == BATCH:
            request.kind = "delete_objects"
            return
        found = API.match(raw)
        if found is None:
            self._xml.classify(request)
            return
        uploading = (found.group(1) or "").endswith("upload")
        rest = raw[found.end() :].strip("/")
        if "/" in rest:
            bucket, _, tail = rest.partition("/")
            request.bucket = unquote(bucket)
            if tail == "o" or tail.startswith("o/"):
                self._classify_object(request, tail[2:], uploading)
            else:
                request.kind = "get_bucket" if request.method == "GET" else "unknown"
            return
        request.bucket = unquote(rest)
        kinds: dict[tuple[str, bool], Kind] = {
            ("GET", True): "get_bucket",
            ("GET", False): "list_buckets",
            ("POST", False): "create_bucket",
            ("DELETE", True): "delete_bucket",
        }
        request.kind = kinds.get((request.method, bool(rest)), "unknown")

    def _classify_object(self, request: Request, tail: str, uploading: bool) -> None:
        method, query = request.method, request.query
        if uploading:
            request.key = query.get("name", "")
            if "upload_id" in query:
                upload = self._state.uploads.get(query["upload_id"])
                request.key = upload.key if upload is not None else request.key
                request.kind = "abort_upload" if method == "DELETE" else chunk_kind(request.headers)
            elif query.get("uploadType") == "resumable":
                request.kind = "create_upload"
            else:
                request.kind = "put_object"
            return
        key, marker, _ = tail.partition("/rewriteTo/")
        if not marker:
            key, marker, _ = tail.partition("/copyTo/")
        if marker:
            request.key, request.kind = unquote(key), "copy_object"
        elif method == "POST" and tail.endswith("/compose"):
            request.key, request.kind = unquote(tail[: -len("/compose")]), "compose_object"
        elif not tail:
            request.kind = "list_objects" if method == "GET" else "unknown"
        else:
            request.key = unquote(tail)
            if method == "DELETE":
                request.kind = "delete_object"
            elif method == "GET":
                whole = query.get("alt") == "media"
                request.kind = "get_object" if whole else "head_object"

    def _is_xml(self, request: Request) -> bool:
        raw = request.target.partition("?")[0]
        return raw.rstrip("/") != BATCH and API.match(raw) is None

    async def handle(self, request: Request) -> Response:
        """The request has taken effect; its answer."""
        if self._is_xml(request):
            return await self._xml.handle(request)
        try:
            self._service.authorize_gcs(request)
            handler = self._handlers.get(request.kind)
            if handler is None:
                raise Refused("MethodNotAllowed")
            return await handler(request)
        except Refused as error:
            return self.error(request, error.code, error.detail)
        except (KeyError, TypeError, ValueError) as error:
            return self.error(request, "InvalidArgument", f"{type(error).__name__}: {error}")

    def error(
        self, request: Request, code: str, message: str = "", status: int | None = None
    ) -> Response:
        """The answer that names an error."""
        if self._is_xml(request):
            limited = 429 if code == "SlowDown" else None
            return self._xml.error(request, code, message, status=status or limited)
        usual_status, reason, usual_message = ERRORS.get(code, (status or 400, code, code))
        return failed(status or usual_status, reason, message or usual_message)

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """The answer of a fault."""
        if self._is_xml(request):
            return self._xml.failure(request, status, code, message)
        return failed(status, code or REASONS.get(status, "internalError"), message)

    # Buckets

    async def _create_bucket(self, request: Request) -> Response:
        bucket = self._state.create_bucket(json.loads(bytes(request.body))["name"])
        return answer(bucket_resource(bucket))

    async def _get_bucket(self, request: Request) -> Response:
        bucket = self._state.bucket(request.bucket)
        if request.path.rstrip("/").endswith("/storageLayout"):
            return answer(
                {"kind": "storage#storageLayout", "bucket": bucket.name, "location": "US"}
            )
        return answer(bucket_resource(bucket))

    async def _delete_bucket(self, request: Request) -> Response:
        self._state.delete_bucket(request.bucket)
        return Response(204)

    async def _list_buckets(self, request: Request) -> Response:
        items = [bucket_resource(b) for b in self._state.buckets.values()]
        return answer({"kind": "storage#buckets", "items": items})

    # Batches

    async def _batch(self, request: Request) -> Response:
        """Deletions, each answered on its own; other requests of a batch get 501."""
        mark = b"--" + boundary(request.headers.get("content-type", ""))
        answers = []
        for part in bytes(request.body).split(mark)[1:-1]:
            text = part.decode()
            asked = re.search(r"^([A-Z]+) (\S+) HTTP/1", text, re.M)
            label = re.search(r"^content-id:\s*<?([^>\r\n]*)>?", text, re.M | re.I)
            found = await self._batched(asked)
            body = b"".join(found.body).decode()
            reason = "No Content" if found.status == 204 else "Error"
            answers.append(
                f"--{BATCH_MARK}\r\nContent-Type: application/http\r\n"
                f"Content-ID: <response-{label.group(1) if label else ''}>\r\n\r\n"
                f"HTTP/1.1 {found.status} {reason}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}\r\n"
            )
        whole = f"{''.join(answers)}--{BATCH_MARK}--\r\n".encode()
        return Response(200, {"Content-Type": f"multipart/mixed; boundary={BATCH_MARK}"}, (whole,))

    async def _batched(self, asked: re.Match[str] | None) -> Response:
        if asked is None:
            return failed(400, "invalid", "no request line")
        inner = Request(asked.group(1), asked.group(2), {})
        self.classify(inner)
        if inner.kind != "delete_object":
            return failed(501, "notImplemented", "only deletions are batched here")
        try:
            return await self._objects.delete(inner)
        except Refused as error:
            return self.error(inner, error.code, error.detail)
