"""Multipart uploads of S3 and of the XML API of GCS."""

from __future__ import annotations

import base64
import hashlib
import time
from xml.etree import ElementTree

from tests.simulator.dialects.answers import (
    checksum_headers,
    condition,
    document,
    iso,
    metadata,
    xml,
)
from tests.simulator.dialects.service import (
    ALGORITHMS,
    Dialect,
    Service,
    checksum_of,
    sent_checksums,
)
from tests.simulator.requests import Request, Response
from tests.simulator.state import LAST, Content, Digests, Part, Refused, StoredObject, Upload

LIST_MAX = 1000
PARTS_MAX = 10_000
COMPLETED_MAX = 1000
"""So many completed uploads are remembered for those who complete them again."""


class Uploads(Dialect):
    """Handlers of requests about uploads in parts."""

    def __init__(self, service: Service, *, google: bool = False) -> None:
        super().__init__(service)
        self._google = google
        self._completed: dict[tuple[str, str, str, bytes], Response] = {}

    async def create_upload(self, request: Request) -> Response:
        """Open an upload."""
        headers = request.headers
        algorithm = headers.get("x-amz-checksum-algorithm", "").lower() or None
        upload = self._state.begin_upload(
            Upload(
                self._state.new_upload_id(),
                request.bucket,
                request.key,
                time.time(),
                headers.get("content-type", "binary/octet-stream"),
                metadata(request),
                algorithm,
                headers.get("x-amz-checksum-type", "").upper() == "FULL_OBJECT",
            )
        )
        found = document(
            "InitiateMultipartUploadResult",
            xml("Bucket", request.bucket),
            xml("Key", request.key),
            xml("UploadId", upload.id),
        )
        if algorithm:
            found.headers["x-amz-checksum-algorithm"] = algorithm.upper()
        return found

    async def put_part(self, request: Request) -> Response:
        """Store a part in place of one with its number."""
        self._upload(request)
        if request.headers.keys() & {"x-amz-copy-source", "x-goog-copy-source"}:
            raise Refused("NotImplemented", "The simulator does not copy parts.")
        number = int(request.query.get("partNumber", ""))
        if not 1 <= number <= PARTS_MAX:
            raise Refused("InvalidArgument", f"Part numbers are from 1 to {PARTS_MAX}.")
        content = request.stored = Content(request.body)
        digests = await self._service.digests(request, content)
        part = self._upload(request).parts[number] = Part(content, digests)
        return Response(200, {"ETag": f'"{digests.etag}"'} | checksum_headers(part))

    async def complete_upload(self, request: Request) -> Response:
        """Store the object. The same request again gets the same response, as from S3."""
        asked = bytes(request.body)
        whole = (request.bucket, request.key, request.query["uploadId"], asked)
        if whole in self._completed and not self._google:
            return self._completed[whole]
        upload = self._upload(request)
        parts = self._chosen(upload, ElementTree.fromstring(asked).findall("{*}Part"))
        content = Content.joined([part.content for part in parts])
        if request.headers.get("x-amz-mp-object-size", str(content.nbytes)) != str(content.nbytes):
            raise Refused("InvalidRequest", f"The parts have {content.nbytes} bytes.")
        digests = await self._digests(upload, parts, content)
        for algorithm, value in sent_checksums(request).items():
            if algorithm in ALGORITHMS and digests.checksums.get(algorithm, value) != value:
                raise Refused("BadDigest", f"The {algorithm.upper()} of the object differs.")
        item = StoredObject(upload.key, content, digests, upload.content_type, upload.metadata)
        self._state.put(upload.bucket, item, condition(request), upload)
        found = document(
            "CompleteMultipartUploadResult",
            xml("Location", f"/{request.bucket}/{request.key}"),
            xml("Bucket", request.bucket),
            xml("Key", request.key),
            xml("ETag", f'"{item.digests.etag}"'),
            *(xml(f"Checksum{a.upper()}", value) for a, value in digests.checksums.items()),
        )
        if self._google:
            found.headers["x-goog-generation"] = str(item.generation)
        self._completed[whole] = found
        if len(self._completed) > COMPLETED_MAX:
            del self._completed[next(iter(self._completed))]
        return found

    def _chosen(self, upload: Upload, entries: list[ElementTree.Element]) -> list[Part]:
        """Return the parts that a list names, held against their ETags and checksums."""
        numbers = [int(entry.findtext("{*}PartNumber", "")) for entry in entries]
        if not numbers:
            raise Refused("MalformedXML")
        if numbers != sorted(set(numbers)):
            raise Refused("InvalidPartOrder")
        parts = []
        for number, entry in zip(numbers, entries, strict=True):
            etag = entry.findtext("{*}ETag", "").strip('"')
            part = upload.parts.get(number)
            if part is None or part.digests.etag != etag:
                raise Refused("InvalidPart", PartNumber=str(number), ETag=etag)
            for algorithm in ALGORITHMS:
                value = entry.findtext(f"{{*}}Checksum{algorithm.upper()}")
                if value not in (None, part.digests.checksums.get(algorithm)):
                    raise Refused("InvalidPart", PartNumber=str(number), ETag=etag)
            parts.append(part)
        if not self._google:
            for number, part in list(zip(numbers, parts, strict=True))[:-1]:
                if part.content.nbytes < self._service.part_min_nbytes:
                    raise Refused("EntityTooSmall", PartNumber=str(number))
        return parts

    async def _digests(self, upload: Upload, parts: list[Part], content: Content) -> Digests:
        """Compute ETag and checksum: digests of the parts' digests, and how many there are."""
        joined = b"".join(bytes.fromhex(part.digests.etag) for part in parts)
        etag = f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
        algorithm = upload.algorithm
        if algorithm is None or not all(algorithm in part.digests.checksums for part in parts):
            return Digests(etag)
        if upload.full_checksum:
            value = await self._service.in_thread(checksum_of, content, algorithm)
        else:
            sums = (base64.b64decode(part.digests.checksums[algorithm]) for part in parts)
            value = checksum_of(Content(b"".join(sums)), algorithm)
            value = value and f"{value}-{len(parts)}"
        return Digests(etag, checksums={} if value is None else {algorithm: value})

    async def abort_upload(self, request: Request) -> Response:
        """Drop an upload and its parts."""
        self._state.abort_upload(self._upload(request))
        return Response(204)

    async def list_uploads(self, request: Request) -> Response:
        """List a page of the open uploads of a bucket, by key and then by age."""
        self._state.bucket(request.bucket)
        query = request.query
        prefix, marker = query.get("prefix", ""), query.get("key-marker", "")
        limit = min(int(query.get("max-uploads") or LIST_MAX), LIST_MAX)
        after = (marker, query.get("upload-id-marker") or LAST)
        rest = [
            upload
            for upload in sorted(self._state.uploads.values(), key=lambda u: (u.key, u.id))
            if upload.bucket == request.bucket
            and upload.key.startswith(prefix)
            and not (marker and (upload.key, upload.id) <= after)
        ]
        listed, truncated = rest[:limit], len(rest) > limit
        return document(
            "ListMultipartUploadsResult",
            xml("Bucket", request.bucket),
            xml("Prefix", prefix),
            xml("KeyMarker", marker),
            xml("MaxUploads", limit),
            xml("IsTruncated", str(truncated).lower()),
            *(
                (xml("NextKeyMarker", listed[-1].key), xml("NextUploadIdMarker", listed[-1].id))
                if truncated and listed
                else ()
            ),
            *(
                xml(
                    "Upload",
                    xml("Key", upload.key),
                    xml("UploadId", upload.id),
                    xml("Initiated", iso(upload.begun_s)),
                )
                for upload in listed
            ),
        )

    def _upload(self, request: Request) -> Upload:
        return self._state.upload(request.bucket, request.key, request.query.get("uploadId", ""))
