"""GCS: objects and their listings."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, unquote

from asyncckpt.testing.objectstore.digests import base64_of
from asyncckpt.testing.objectstore.gcs_answers import answer, resource_of
from asyncckpt.testing.objectstore.gcs_bodies import check_resource, condition, related
from asyncckpt.testing.objectstore.requests import Handler, Request, Response
from asyncckpt.testing.objectstore.s3_headers import byte_range
from asyncckpt.testing.objectstore.service import Service
from asyncckpt.testing.objectstore.state import Content, Precondition, Refused, StoredObject

LIST_MAX = 1000


class Objects:
    """Answers requests about objects."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._state = service.state

    def handlers(self) -> dict[str, Handler]:
        """Who answers which kind of request."""
        return {
            "compose_object": self._compose,
            "copy_object": self._copy,
            "delete_object": self.delete,
            "get_object": self._get_object,
            "head_object": self._head_object,
            "list_objects": self._list_objects,
            "put_object": self._put_object,
        }

    async def _put_object(self, request: Request) -> Response:
        self._state.bucket(request.bucket)
        if request.query.get("uploadType") == "multipart":
            resource, content_type, content = related(request)
        else:
            content_type = request.headers.get("content-type", "application/octet-stream")
            resource, content = {}, Content(request.body)
        key = request.key = request.key or str(resource["name"])
        digests = await self._service.digests(request, content, with_crc32c=True)
        request.stored = content
        check_resource(resource, digests.crc32c, digests.md5)
        item = self._state.put(
            request.bucket,
            key,
            content,
            digests,
            condition=condition(request),
            content_type=str(resource.get("contentType", content_type)),
            metadata=dict(resource.get("metadata") or {}),
        )
        return answer(resource_of(request.bucket, item))

    async def _get_object(self, request: Request) -> Response:
        item = self._found(request)
        part = byte_range(request.headers.get("range"), item.nbytes)
        start, stop = part or (0, item.nbytes)
        digests = item.digests
        hashes = []
        if digests.crc32c is not None:
            hashes.append(f"crc32c={base64_of(digests.crc32c.to_bytes(4, 'big'))}")
        if digests.md5 is not None:
            hashes.append(f"md5={base64_of(digests.md5)}")
        headers = {
            "Content-Type": item.content_type,
            "ETag": f'"{digests.etag}"',
            "X-Goog-Generation": str(item.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Hash": ",".join(hashes),
            "X-Goog-Stored-Content-Length": str(item.nbytes),
        }
        if part is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{item.nbytes}"
        status = 200 if part is None else 206
        return Response(status, headers, tuple(item.content.slices(start, stop)))

    async def _head_object(self, request: Request) -> Response:
        return answer(resource_of(request.bucket, self._found(request)))

    def _found(self, request: Request) -> StoredObject:
        item = self._state.get(request.bucket, request.key)
        query = request.query
        if "generation" in query and int(query["generation"]) != item.generation:
            raise Refused("NoSuchKey")
        if query.get("ifGenerationNotMatch") == str(item.generation):
            raise Refused("NotModified")
        condition(request).check(item)
        return item

    async def delete(self, request: Request) -> Response:
        """The object is gone. Raises `Refused`."""
        self._delete(request.bucket, request.key, condition(request))
        return Response(204)

    def _delete(self, bucket: str, key: str, condition: Precondition) -> None:
        if self._state.delete(bucket, key, condition) is None:
            raise Refused("NoSuchKey", f"No such object: {bucket}/{key}")

    async def _copy(self, request: Request) -> Response:
        raw = request.target.partition("?")[0]
        _, _, target = raw.partition("/rewriteTo/b/")
        if not target:
            _, _, target = raw.partition("/copyTo/b/")
        bucket, _, key = target.partition("/o/")
        source = self._state.get(request.bucket, request.key)
        item = self._state.put(
            unquote(bucket),
            unquote(key),
            source.content,
            source.digests,
            condition=condition(request),
            content_type=source.content_type,
            metadata=source.metadata,
        )
        resource = resource_of(unquote(bucket), item)
        if "/copyTo/" in raw:
            return answer(resource)
        return answer(
            {
                "kind": "storage#rewriteResponse",
                "done": True,
                "totalBytesRewritten": str(item.nbytes),
                "objectSize": str(item.nbytes),
                "resource": resource,
            }
        )

    async def _compose(self, request: Request) -> Response:
        asked = json.loads(bytes(request.body))
        names = [source["name"] for source in asked["sourceObjects"]]
        content = Content.joined([self._state.get(request.bucket, n).content for n in names])
        digests = await self._service.digests(request, content, with_crc32c=True, composed=True)
        resource = asked.get("destination") or {}
        item = self._state.put(
            request.bucket,
            request.key,
            content,
            digests,
            condition=condition(request),
            content_type=str(resource.get("contentType", "application/octet-stream")),
            metadata=dict(resource.get("metadata") or {}),
        )
        return answer(resource_of(request.bucket, item))

    async def _list_objects(self, request: Request) -> Response:
        query = request.query
        limit = min(int(query.get("maxResults", LIST_MAX)), LIST_MAX)
        after = query.get("pageToken") or ""
        prefix = query.get("prefix", "")
        page = self._state.list(
            request.bucket,
            prefix=prefix,
            delimiter=query.get("delimiter", ""),
            after=unquote(after),
            start=query.get("startOffset", ""),
            end=query.get("endOffset", ""),
            limit=limit,
        )
        found: dict[str, Any] = {"kind": "storage#objects"}
        if page.objects:
            found["items"] = [resource_of(request.bucket, item) for item in page.objects]
        if page.prefixes:
            found["prefixes"] = page.prefixes
        if page.next is not None:
            found["nextPageToken"] = quote(page.next, safe="")
        return answer(found)
