"""The REST API of S3, path style, and the XML API of GCS, which is the same but for its headers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from email.utils import formatdate
from urllib.parse import quote, unquote
from xml.etree import ElementTree

from tests.simulator.dialects.answers import (
    ERRORS,
    USUAL,
    byte_range,
    checksum_headers,
    condition,
    document,
    iso,
    metadata,
    xml,
)
from tests.simulator.dialects.credentials import scope_region
from tests.simulator.dialects.s3_uploads import Uploads
from tests.simulator.dialects.service import NONE, Dialect, base64_of, sent_checksums, verify
from tests.simulator.requests import Kind, Request, Response
from tests.simulator.state import Content, Precondition, Refused, StoredObject

LIST_MAX = 1000
DELETE_MAX = 1000

ON_BUCKETS: dict[str, Kind] = {"GET": "list_objects", "HEAD": "get_bucket"}
ON_OBJECTS: dict[str, Kind] = {
    "PUT": "put_object",
    "GET": "get_object",
    "HEAD": "head_object",
    "DELETE": "delete_object",
}
ON_UPLOADS: dict[str, Kind] = {
    "PUT": "put_part",
    "POST": "complete_upload",
    "DELETE": "abort_upload",
}

PARAMETERS: dict[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "abort_upload": "uploadId",
        "complete_upload": "uploadId",
        "create_upload": "uploads",
        "delete_objects": "delete",
        "get_bucket": "location versioning",
        "list_objects": "continuation-token delimiter encoding-type fetch-owner list-type marker "
        "max-keys prefix start-after",
        "list_uploads": "encoding-type key-marker max-uploads prefix upload-id-marker uploads",
        "put_part": "partNumber uploadId",
    }.items()
}
"""Parameters that each kind of request obeys. With any other, such as the subresource ``tagging``,
a request means something else, so that it gets 501 and must not run as the plain operation."""


class S3(Uploads):
    """The API of one listening port."""

    def classify(self, request: Request) -> Dialect:
        """Set kind, bucket and key of the request."""
        request.bucket, _, request.key = request.path.lstrip("/").partition("/")
        method, query = request.method, request.query
        kind: Kind = "unknown"
        if request.bucket and not request.key:
            kind = ON_BUCKETS.get(method, "unknown")
            if method == "GET" and "uploads" in query:
                kind = "list_uploads"
            elif method == "GET" and query.keys() & {"location", "versioning"}:
                kind = "get_bucket"
            elif method == "POST" and "delete" in query:
                kind = "delete_objects"
        elif not request.bucket:
            pass
        elif "uploadId" in query:
            kind = ON_UPLOADS.get(method, "unknown")
        elif method == "POST":
            kind = "create_upload" if "uploads" in query else "unknown"
        elif method == "PUT" and _copy_source(request) is not None:
            kind = "copy_object"
        else:
            kind = ON_OBJECTS.get(method, "unknown")
        request.kind = kind
        return self

    def authorize(self, request: Request) -> None:
        """Raise `Refused` unless the request may be made and means what its kind says."""
        if self._google:
            self._service.authorize_gcs(request)
        else:
            self._service.authorize_s3(request)
        if request.kind != "unknown":
            self._check_parameters(request)
            self._check_region(request)

    def error(
        self,
        request: Request,
        code: str,
        message: str = "",
        fields: Mapping[str, str] = NONE,
        status: int | None = None,
    ) -> Response:
        """Return the response that names an error."""
        usual_status, _, usual_message = ERRORS.get(code, (400, "", code))
        status = status or (429 if self._google and code == "SlowDown" else usual_status)
        headers = {"Content-Type": "application/xml"}
        if "Region" in fields:
            headers["x-amz-bucket-region"] = fields["Region"]
        if "ActualObjectSize" in fields:
            headers["Content-Range"] = f"bytes */{fields['ActualObjectSize']}"
        if request.method == "HEAD" or status == 304:
            return Response(status, headers)
        named = {"Code": code, "Message": message or usual_message, **fields}
        named |= {"Resource": request.path, "RequestId": "SIMULATED"}
        body = xml("Error", *(xml(name, value) for name, value in named.items()))
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'
        return Response(status, headers, (text.encode(),))

    def failure(self, request: Request, status: int, code: str | None, message: str) -> Response:
        """Return the response of a fault."""
        code = code or USUAL.get(status, ("InternalError", ""))[0]
        return self.error(request, code, message, status=status)

    def _check_parameters(self, request: Request) -> None:
        known = PARAMETERS.get(request.kind, frozenset())
        for name in request.query.keys() - known:
            if name != "x-id" and not name.lower().startswith("x-amz-"):
                raise Refused("NotImplemented", f"The simulator does not know ?{name} here.")
        # A copy has no body, and Amazon's own clients send no length with it.
        if request.method == "PUT" and request.key and _copy_source(request) is None:
            if "content-length" not in request.headers:
                raise Refused("MissingContentLength")

    # Buckets

    def _check_region(self, request: Request) -> None:
        bucket = self._state.buckets.get(request.bucket)
        if bucket is None or bucket.region is None:
            return
        used = scope_region(request)
        if used is not None and used != bucket.region:
            raise Refused(
                "PermanentRedirect",
                Bucket=bucket.name,
                Endpoint=f"{bucket.name}.s3.{bucket.region}.amazonaws.com",
                Region=bucket.region,
            )

    async def get_bucket(self, request: Request) -> Response:
        """Return the region of a bucket."""
        bucket = self._state.bucket(request.bucket)
        region = bucket.region or self._service.region or "us-east-1"
        found = Response(200)
        if "location" in request.query:
            found = document("LocationConstraint", "" if region == "us-east-1" else region)
        elif "versioning" in request.query:
            found = document("VersioningConfiguration")
        found.headers["x-amz-bucket-region"] = region
        return found

    # Objects

    async def put_object(self, request: Request) -> Response:
        """Store an object."""
        self._state.bucket(request.bucket)
        content = request.stored = Content(request.body)
        digests = await self._service.digests(
            request,
            content,
            with_crc32c=self._google and content.nbytes <= self._service.md5_max_nbytes,
        )
        kind = request.headers.get("content-type", "binary/octet-stream")
        item = StoredObject(request.key, content, digests, kind, metadata(request))
        self._state.put(request.bucket, item, condition(request))
        headers = {"ETag": f'"{item.digests.etag}"'} | checksum_headers(item)
        if self._google:
            headers["x-goog-generation"] = str(item.generation)
        return Response(200, headers)

    async def get_object(self, request: Request) -> Response:
        """Return an object or a range of it."""
        item = self._state.get(request.bucket, request.key)
        headers = self._described(item)
        sent = request.headers
        unwanted = sent.get("if-none-match")
        if unwanted and unwanted.strip('"') in ("*", item.digests.etag):
            return Response(304, headers, length=0)
        condition(request, absence=False).check(item)
        part = byte_range(sent.get("range"), item.nbytes)
        start, stop = part or (0, item.nbytes)
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.nbytes}"
        elif sent.get("x-amz-checksum-mode", "").upper() == "ENABLED":
            headers |= checksum_headers(item)
        status = 200 if part is None else 206
        if request.method == "HEAD":
            return Response(status, headers, length=stop - start)
        return Response(status, headers, tuple(item.content.slices(start, stop)))

    head_object = get_object

    def _described(self, item: StoredObject) -> dict[str, str]:
        prefix = "x-goog-meta-" if self._google else "x-amz-meta-"
        headers = {
            "ETag": f'"{item.digests.etag}"',
            "Last-Modified": formatdate(item.modified_s, usegmt=True),
            "Content-Type": item.content_type,
            "Accept-Ranges": "bytes",
        }
        if self._google:
            headers["x-goog-generation"] = str(item.generation)
            headers["x-goog-metageneration"] = "1"
        return headers | {prefix + name: value for name, value in item.metadata.items()}

    async def delete_object(self, request: Request) -> Response:
        """Delete an object; S3 does not mind if there is none."""
        gone = self._state.delete(request.bucket, request.key, condition(request))
        if gone is None and self._google:
            raise Refused("NoSuchKey")
        return Response(204)

    async def delete_objects(self, request: Request) -> Response:
        """Delete up to a thousand objects, each under the condition of its ETag if it has one."""
        verify(Content(request.body), sent_checksums(request))
        root = ElementTree.fromstring(bytes(request.body))
        entries = root.findall("{*}Object")
        if not 1 <= len(entries) <= DELETE_MAX:
            raise Refused("MalformedXML")
        results = []
        for entry in entries:
            key, etag = entry.findtext("{*}Key", ""), entry.findtext("{*}ETag")
            try:
                self._state.delete(request.bucket, key, Precondition(etag=etag or None))
            except Refused as error:
                code, message = error.code, ERRORS[error.code][2]
                results.append(
                    xml("Error", xml("Key", key), xml("Code", code), xml("Message", message))
                )
            else:
                if root.findtext("{*}Quiet") != "true":
                    results.append(xml("Deleted", xml("Key", key)))
        return document("DeleteResult", *results)

    async def copy_object(self, request: Request) -> Response:
        """Copy an object under conditions on source and target."""
        source, _, version = (_copy_source(request) or "").partition("?")
        if version:
            raise Refused("NotImplemented", "The simulator keeps no versions.")
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        found = self._state.get(bucket, key)
        condition(request, "copy-source-").check(found)
        replacing = request.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
        if (bucket, key) == (request.bucket, request.key) and not (replacing or self._google):
            raise Refused("InvalidRequest", "The object is copied to itself without a change.")
        kind, described = found.content_type, found.metadata
        if replacing:
            kind, described = request.headers.get("content-type", kind), metadata(request)
        item = StoredObject(request.key, found.content, found.digests, kind, described)
        self._state.put(request.bucket, item, condition(request))
        modified, etag = iso(item.modified_s), f'"{item.digests.etag}"'
        return document("CopyObjectResult", xml("LastModified", modified), xml("ETag", etag))

    async def list_objects(self, request: Request) -> Response:
        """List a page of objects and common prefixes, in the first or second version."""
        query = request.query
        second = query.get("list-type") == "2"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        wanted = int(query.get("max-keys") or LIST_MAX)
        if wanted < 0:
            raise Refused("InvalidArgument")
        after = query.get("start-after" if second else "marker", "")
        if second and "continuation-token" in query:
            after = base64.b64decode(query["continuation-token"], validate=True).decode()
        limit = min(wanted, LIST_MAX)
        page = self._state.list(
            request.bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit
        )
        encoded = query.get("encoding-type") == "url"

        def encode(text: str) -> str:
            return quote(text, safe="/") if encoded else text

        found = {"Name": request.bucket, "Prefix": encode(prefix), "MaxKeys": str(wanted)}
        found["IsTruncated"] = "true" if page.next is not None else "false"
        if delimiter:
            found["Delimiter"] = encode(delimiter)
        if encoded:
            found["EncodingType"] = "url"
        if second:
            found["KeyCount"] = str(len(page.objects) + len(page.prefixes))
            if "continuation-token" in query:
                found["ContinuationToken"] = query["continuation-token"]
            if "start-after" in query:
                found["StartAfter"] = encode(query["start-after"])
            if page.next is not None:
                found["NextContinuationToken"] = base64_of(page.next.encode())
        else:
            found["Marker"] = encode(after)
            if page.next is not None and delimiter:
                found["NextMarker"] = encode(page.next)
        contents = (
            xml(
                "Contents",
                xml("Key", encode(item.key)),
                xml("LastModified", iso(item.modified_s)),
                xml("ETag", f'"{item.digests.etag}"'),
                xml("Size", item.nbytes),
                xml("StorageClass", "STANDARD"),
            )
            for item in page.objects
        )
        prefixes = (xml("CommonPrefixes", xml("Prefix", encode(name))) for name in page.prefixes)
        heads = (xml(name, value) for name, value in found.items())
        return document("ListBucketResult", *heads, *contents, *prefixes)


def _copy_source(request: Request) -> str | None:
    found = request.headers.get("x-amz-copy-source")
    return found or request.headers.get("x-goog-copy-source")
