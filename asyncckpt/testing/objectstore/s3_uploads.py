"""S3: multipart uploads."""

from __future__ import annotations

import base64
import hashlib
import time

from asyncckpt.testing.objectstore.digests import ALGORITHMS, checksum_of
from asyncckpt.testing.objectstore.requests import Handler, Request, Response
from asyncckpt.testing.objectstore.s3_documents import (
    answer,
    children,
    document,
    element,
    iso,
    text,
)
from asyncckpt.testing.objectstore.s3_headers import checksum_headers, condition, metadata
from asyncckpt.testing.objectstore.service import Service
from asyncckpt.testing.objectstore.state import (
    Content,
    Digests,
    Part,
    Refused,
    Upload,
)

PARTS_MAX = 10_000


class Uploads:
    """Answers requests about uploads in parts, of S3 or of the XML API of GCS."""

    def __init__(self, service: Service, google: bool) -> None:
        self._service = service
        self._state = service.state
        self._google = google

    def handlers(self) -> dict[str, Handler]:
        """Who answers which kind of request."""
        return {
            "abort_upload": self._abort_upload,
            "complete_upload": self._complete_upload,
            "create_upload": self._create_upload,
            "list_parts": self._list_parts,
            "list_uploads": self._list_uploads,
            "put_part": self._put_part,
        }

    async def _create_upload(self, request: Request) -> Response:
        algorithm = request.headers.get("x-amz-checksum-algorithm", "").lower() or None
        upload = self._state.begin_upload(
            Upload(
                self._state.new_upload_id(),
                request.bucket,
                request.key,
                time.time(),
                request.headers.get("content-type", "binary/octet-stream"),
                metadata(request),
                algorithm,
            )
        )
        body = element("Bucket", request.bucket) + element("Key", request.key)
        body += element("UploadId", upload.id)
        found = answer("InitiateMultipartUploadResult", body)
        if algorithm:
            found.headers["x-amz-checksum-algorithm"] = algorithm.upper()
        return found

    async def _put_part(self, request: Request) -> Response:
        upload = self._upload(request)
        if request.headers.keys() & {"x-amz-copy-source", "x-goog-copy-source"}:
            raise Refused("NotImplemented", "UploadPartCopy is not simulated")
        try:
            number = int(request.query["partNumber"])
        except (KeyError, ValueError):
            raise Refused("InvalidArgument", "Part number must be an integer") from None
        if not 1 <= number <= 10_000:
            raise Refused(
                "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive"
            )
        content = request.stored = Content(request.body)
        digests = await self._service.digests(request, content)
        upload = self._upload(request)
        upload.parts[number] = Part(content, digests, time.time())
        return Response(200, {"ETag": f'"{digests.etag}"'} | checksum_headers(digests))

    async def _complete_upload(self, request: Request) -> Response:
        upload = self._upload(request)
        wanted = []
        for entry in children(document(request), "Part"):
            number, etag = int(text(entry, "PartNumber")), text(entry, "ETag").strip('"')
            wanted.append((number, etag))
        if not wanted:
            raise Refused("MalformedXML")
        numbers = [number for number, _ in wanted]
        if numbers != sorted(set(numbers)):
            raise Refused("InvalidPartOrder")
        parts = []
        for number, etag in wanted:
            part = upload.parts.get(number)
            if part is None or part.digests.etag != etag:
                raise Refused("InvalidPart", PartNumber=str(number), ETag=etag)
            parts.append(part)
        if self._service.part_min_nbytes and not self._google:
            for number, part in zip(numbers[:-1], parts[:-1], strict=True):
                if part.content.nbytes < self._service.part_min_nbytes:
                    raise Refused("EntityTooSmall", PartNumber=str(number))
        item = self._state.end_upload(
            upload,
            Content.joined([part.content for part in parts]),
            _of_parts(parts, upload.algorithm),
            condition=condition(request),
            parts=len(parts),
        )
        body = element("Location", f"/{request.bucket}/{request.key}")
        body += element("Bucket", request.bucket) + element("Key", request.key)
        body += element("ETag", f'"{item.digests.etag}"')
        for algorithm, value in item.digests.checksums.items():
            body += element(f"Checksum{algorithm.upper()}", value)
        found = answer("CompleteMultipartUploadResult", body)
        if self._google:
            found.headers["x-goog-generation"] = str(item.generation)
        return found

    async def _abort_upload(self, request: Request) -> Response:
        self._state.abort_upload(self._upload(request))
        return Response(204)

    async def _list_parts(self, request: Request) -> Response:
        upload = self._upload(request)
        body = element("Bucket", request.bucket) + element("Key", request.key)
        body += element("UploadId", upload.id) + element("IsTruncated", "false")
        for number, part in sorted(upload.parts.items()):
            body += (
                f"<Part>{element('PartNumber', number)}"
                f"{element('LastModified', iso(part.modified_s))}"
                f"<ETag>&quot;{part.digests.etag}&quot;</ETag>"
                f"{element('Size', part.content.nbytes)}</Part>"
            )
        return answer("ListPartsResult", body)

    async def _list_uploads(self, request: Request) -> Response:
        self._state.bucket(request.bucket)
        prefix = request.query.get("prefix", "")
        body = element("Bucket", request.bucket) + element("Prefix", prefix)
        body += element("IsTruncated", "false")
        uploads = [u for u in self._state.uploads.values() if u.bucket == request.bucket]
        for upload in sorted(uploads, key=lambda u: (u.key, u.begun_s)):
            if upload.key.startswith(prefix):
                body += (
                    f"<Upload>{element('Key', upload.key)}{element('UploadId', upload.id)}"
                    f"{element('Initiated', iso(upload.begun_s))}</Upload>"
                )
        return answer("ListMultipartUploadsResult", body)

    def _upload(self, request: Request) -> Upload:
        return self._state.upload(request.bucket, request.key, request.query.get("uploadId", ""))


def _of_parts(parts: list[Part], algorithm: str | None) -> Digests:
    """ETag and checksum of an upload: the digest of the digests, and how many there are."""
    joined = b"".join(_etag_bytes(part.digests.etag) for part in parts)
    etag = f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
    checksums = {}
    if algorithm in ALGORITHMS and all(algorithm in part.digests.checksums for part in parts):
        values = b"".join(base64.b64decode(part.digests.checksums[algorithm]) for part in parts)
        if (value := checksum_of(Content(values), algorithm)) is not None:
            checksums[algorithm] = f"{value}-{len(parts)}"
    return Digests(etag, checksums=checksums)


def _etag_bytes(etag: str) -> bytes:
    return bytes.fromhex(etag)
