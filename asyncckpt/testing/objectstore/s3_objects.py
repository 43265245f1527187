"""S3: objects and their listings."""

from __future__ import annotations

import base64
from urllib.parse import quote, unquote

from asyncckpt.testing.objectstore.digests import base64_of
from asyncckpt.testing.objectstore.requests import Handler, Request, Response
from asyncckpt.testing.objectstore.s3_documents import (
    answer,
    children,
    document,
    element,
    iso,
    text,
)
from asyncckpt.testing.objectstore.s3_headers import (
    byte_range,
    checksum_headers,
    condition,
    described,
    metadata,
    written,
)
from asyncckpt.testing.objectstore.service import Service
from asyncckpt.testing.objectstore.state import Content, Precondition, Refused

LIST_MAX = 1000


class Objects:
    """Answers requests about objects, of S3 or of the XML API of GCS."""

    def __init__(self, service: Service, google: bool) -> None:
        self._service = service
        self._state = service.state
        self._google = google

    def handlers(self) -> dict[str, Handler]:
        """Who answers which kind of request."""
        return {
            "copy_object": self._copy_object,
            "delete_object": self._delete_object,
            "delete_objects": self._delete_objects,
            "get_object": self._get_object,
            "head_object": self._get_object,
            "list_objects": self._list_objects,
            "put_object": self._put_object,
        }

    async def _put_object(self, request: Request) -> Response:
        self._state.bucket(request.bucket)
        content = request.stored = Content(request.body)
        digests = await self._service.digests(request, content)
        item = self._state.put(
            request.bucket,
            request.key,
            content,
            digests,
            condition=condition(request),
            content_type=request.headers.get("content-type", "binary/octet-stream"),
            metadata=metadata(request),
        )
        return Response(200, written(item, self._google))

    async def _get_object(self, request: Request) -> Response:
        item = self._state.get(request.bucket, request.key)
        headers = described(item, self._google)
        sent = request.headers
        if (wanted := sent.get("if-match")) and wanted.strip('"') not in ("*", item.digests.etag):
            raise Refused("PreconditionFailed", Condition="If-Match")
        unwanted = sent.get("if-none-match")
        if unwanted and unwanted.strip('"') in ("*", item.digests.etag):
            return Response(304, headers, length=0)
        generation = sent.get("x-goog-if-generation-match")
        if generation is not None and int(generation) != item.generation:
            raise Refused("PreconditionFailed")
        part = byte_range(sent.get("range"), item.nbytes)
        start, stop = part or (0, item.nbytes)
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.nbytes}"
        elif sent.get("x-amz-checksum-mode", "").upper() == "ENABLED":
            headers |= checksum_headers(item.digests)
        status = 200 if part is None else 206
        if request.method == "HEAD":
            return Response(status, headers, length=stop - start)
        return Response(status, headers, tuple(item.content.slices(start, stop)))

    async def _delete_object(self, request: Request) -> Response:
        sent = request.headers
        etag, generation = sent.get("if-match"), sent.get("x-goog-if-generation-match")
        condition = Precondition(
            etag=etag, generation=None if generation is None else int(generation)
        )
        gone = self._state.delete(request.bucket, request.key, condition)
        if gone is None and self._google:
            raise Refused("NoSuchKey")
        return Response(204)

    async def _delete_objects(self, request: Request) -> Response:
        root = document(request)
        quiet = text(root, "Quiet") == "true"
        body = ""
        for entry in children(root, "Object"):
            key = text(entry, "Key")
            self._state.delete(request.bucket, key)
            body += "" if quiet else f"<Deleted>{element('Key', key)}</Deleted>"
        return answer("DeleteResult", body)

    async def _copy_object(self, request: Request) -> Response:
        source = request.headers.get("x-amz-copy-source") or request.headers["x-goog-copy-source"]
        bucket, _, key = unquote(source).lstrip("/").partition("/")
        found = self._state.get(bucket, key)
        replacing = request.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
        item = self._state.put(
            request.bucket,
            request.key,
            found.content,
            found.digests,
            condition=condition(request),
            content_type=found.content_type,
            metadata=metadata(request) if replacing else found.metadata,
        )
        body = element("LastModified", iso(item.modified_s))
        body += element("ETag", f'"{item.digests.etag}"')
        return answer("CopyObjectResult", body)

    async def _list_objects(self, request: Request) -> Response:
        query = request.query
        second = query.get("list-type") == "2"
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        try:
            wanted = int(query.get("max-keys", "") or LIST_MAX)
        except ValueError:
            raise Refused("InvalidArgument", "max-keys is not a number") from None
        limit = min(wanted, LIST_MAX)
        after = query.get("start-after", "") if second else query.get("marker", "")
        if second and "continuation-token" in query:
            after = _untoken(query["continuation-token"])
        page = self._state.list(
            request.bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit
        )
        encode = (lambda s: quote(s, safe="/")) if query.get("encoding-type") == "url" else str
        body = element("Name", request.bucket) + element("Prefix", encode(prefix))
        body += element("MaxKeys", wanted)
        body += element("IsTruncated", "true" if page.next is not None else "false")
        if delimiter:
            body += element("Delimiter", encode(delimiter))
        if query.get("encoding-type") == "url":
            body += element("EncodingType", "url")
        if second:
            body += element("KeyCount", len(page.objects) + len(page.prefixes))
            for name, tag in (
                ("continuation-token", "ContinuationToken"),
                ("start-after", "StartAfter"),
            ):
                if name in query:
                    body += element(tag, query[name])
            if page.next is not None:
                body += element("NextContinuationToken", _token(page.next))
        else:
            body += element("Marker", encode(after))
            if page.next is not None and delimiter:
                body += element("NextMarker", encode(page.next))
        for item in page.objects:
            body += (
                f"<Contents>{element('Key', encode(item.key))}"
                f"{element('LastModified', iso(item.modified_s))}"
                f"<ETag>&quot;{item.digests.etag}&quot;</ETag>{element('Size', item.nbytes)}"
                f"<StorageClass>STANDARD</StorageClass></Contents>"
            )
        for name in page.prefixes:
            body += f"<CommonPrefixes>{element('Prefix', encode(name))}</CommonPrefixes>"
        return answer("ListBucketResult", body)


def _token(key: str) -> str:
    return base64_of(key.encode())


def _untoken(token: str) -> str:
    try:
        return base64.b64decode(token, validate=True).decode()
    except ValueError:
        raise Refused("InvalidArgument", "The continuation token provided is incorrect") from None
