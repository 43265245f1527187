"""The REST API of S3, path style, and the XML API of GCS, which is the same but for its headers."""

from __future__ import annotations

from asyncckpt.testing.objectstore.requests import Handler, Kind, Request, Response
from asyncckpt.testing.objectstore.s3_documents import answer, element, iso, xml
from asyncckpt.testing.objectstore.s3_errors import ERRORS, USUAL
from asyncckpt.testing.objectstore.s3_objects import Objects
from asyncckpt.testing.objectstore.s3_uploads import Uploads
from asyncckpt.testing.objectstore.service import Service
from asyncckpt.testing.objectstore.state import Refused


class S3:
    """Answers the requests of one listening port."""

    def __init__(self, service: Service, *, google: bool = False) -> None:
        self._service = service
        self._state = service.state
        self._google = google
        self._handlers: dict[str, Handler] = {
            "create_bucket": self._create_bucket,
            "delete_bucket": self._delete_bucket,
            "get_bucket": self._get_bucket,
            "list_buckets": self._list_buckets,
            **Objects(service, self._google).handlers(),
            **Uploads(service, self._google).handlers(),
        }

    def classify(self, request: Request) -> None:
        """Kind, bucket and key of the request are known."""
        bucket, _, key = request.path.lstrip("/").partition("/")
        request.bucket, request.key = bucket, key
        request.kind = _kind(request)

    async def handle(self, request: Request) -> Response:
        """The request has taken effect; its answer."""
        try:
            if self._google:
                self._service.authorize_gcs(request)
            else:
                self._service.authorize_s3(request)
            handler = self._handlers.get(request.kind)
            if handler is None:
                raise Refused("MethodNotAllowed")
            self._check_region(request)
            return await handler(request)
        except Refused as error:
            return self.error(request, error.code, error.detail, error.fields)
        except ValueError as error:
            return self.error(request, "InvalidArgument", str(error))

    def error(
        self,
        request: Request,
        code: str,
        message: str = "",
        fields: dict[str, str] | None = None,
        status: int | None = None,
    ) -> Response:
        """The answer that names an error."""
        usual_status, usual_message = ERRORS.get(code, (400, code))
        status = status or usual_status
        fields = fields or {}
        headers = {"Content-Type": "application/xml"}
        if "Region" in fields:
            headers["x-amz-bucket-region"] = fields["Region"]
        if "ActualObjectSize" in fields:
            headers["Content-Range"] = f"bytes */{fields['ActualObjectSize']}"
        if request.method == "HEAD" or status == 304:
            return Response(status, headers)
        body = element("Code", code) + element("Message", message or usual_message)
        body += "".join(element(name, value) for name, value in fields.items())
        body += element("Resource", request.path) + element("RequestId", "SIMULATED")
        document = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{body}</Error>'
        return Response(status, headers, (document.encode(),))

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """The answer of a fault."""
        return self.error(
            request, code or USUAL.get(status, "InternalError"), message, None, status
        )

    # Buckets

    def _check_region(self, request: Request) -> None:
        bucket = self._state.buckets.get(request.bucket)
        if bucket is None or bucket.region is None or request.kind == "create_bucket":
            return
        used = self._service.region_of(request)
        if used is not None and used != bucket.region:
            raise Refused(
                "PermanentRedirect",
                Bucket=bucket.name,
                Endpoint=f"{bucket.name}.s3.{bucket.region}.amazonaws.com",
                Region=bucket.region,
            )

    async def _create_bucket(self, request: Request) -> Response:
        self._state.create_bucket(request.bucket)
        return Response(200, {"Location": f"/{request.bucket}"})

    async def _get_bucket(self, request: Request) -> Response:
        bucket = self._state.bucket(request.bucket)
        headers = {"x-amz-bucket-region": bucket.region or self._service.region or "us-east-1"}
        if "location" in request.query:
            return Response(200, headers, (xml("LocationConstraint", ""),))
        if "versioning" in request.query:
            return Response(200, headers, (xml("VersioningConfiguration", ""),))
        return Response(200, headers)

    async def _delete_bucket(self, request: Request) -> Response:
        self._state.delete_bucket(request.bucket)
        return Response(204)

    async def _list_buckets(self, request: Request) -> Response:
        buckets = "".join(
            f"<Bucket>{element('Name', b.name)}{element('CreationDate', iso(b.created_s))}</Bucket>"
            for b in self._state.buckets.values()
        )
        owner = "<Owner><ID>simulated</ID><DisplayName>simulated</DisplayName></Owner>"
        return answer("ListAllMyBucketsResult", f"{owner}<Buckets>{buckets}</Buckets>")


def _kind(request: Request) -> Kind:
    method, query = request.method, request.query
    if not request.bucket:
        return "list_buckets" if method == "GET" else "unknown"
    if not request.key:
        if method == "GET":
            if "uploads" in query:
                return "list_uploads"
            return "get_bucket" if query.keys() & {"location", "versioning"} else "list_objects"
        if method == "POST" and "delete" in query:
            return "delete_objects"
        kinds: dict[str, Kind] = {
            "PUT": "create_bucket",
            "HEAD": "get_bucket",
            "DELETE": "delete_bucket",
        }
        return kinds.get(method, "unknown")
    if "uploadId" in query:
        kinds = {
            "PUT": "put_part",
            "POST": "complete_upload",
            "DELETE": "abort_upload",
            "GET": "list_parts",
        }
        return kinds.get(method, "unknown")
    if method == "POST":
        return "create_upload" if "uploads" in query else "unknown"
    if method == "PUT" and request.headers.keys() & {"x-amz-copy-source", "x-goog-copy-source"}:
        return "copy_object"
    kinds = {
        "PUT": "put_object",
        "GET": "get_object",
        "HEAD": "head_object",
        "DELETE": "delete_object",
    }
    return kinds.get(method, "unknown")
