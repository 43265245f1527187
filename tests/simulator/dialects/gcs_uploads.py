"""GCS: resumable uploads."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote

from asyncckpt.testing.objectstore.gcs_answers import answer, resource_of
from asyncckpt.testing.objectstore.gcs_bodies import condition, content_range
from asyncckpt.testing.objectstore.requests import Handler, Request, Response
from asyncckpt.testing.objectstore.service import Service
from asyncckpt.testing.objectstore.state import Content, Refused, Upload

CHUNK_MULTIPLE = 256 * 1024
"""Chunks of a resumable upload but the last are multiples of this."""

FINISHED_UPLOADS = 1000
"""So many resumable uploads that are complete are still known to those who ask about them."""


class Uploads:
    """Answers requests about uploads in chunks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._state = service.state
        self._finished: dict[str, dict[str, Any]] = {}

    def handlers(self) -> dict[str, Handler]:
        """Who answers which kind of request."""
        return {
            "abort_upload": self._abort_upload,
            "complete_upload": self._put_chunk,
            "create_upload": self._create_upload,
            "put_part": self._put_chunk,
            "query_upload": self._put_chunk,
        }

    async def _create_upload(self, request: Request) -> Response:
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

    async def _put_chunk(self, request: Request) -> Response:
        upload_id = request.query["upload_id"]
        if upload_id in self._finished:
            return answer(self._finished[upload_id])
        upload = self._state.upload(request.bucket, None, upload_id)
        have = upload.nbytes
        content = Content(request.body)
        sent = content_range(request.headers.get("content-range"), have, content.nbytes)
        if sent.nbytes != content.nbytes:
            raise Refused("InvalidArgument", "Content-Range and body differ in length")
        if content.nbytes:
            if sent.start > have:
                raise Refused("InvalidArgument", f"the upload goes on at byte {have}")
            fresh = Content(*content.slices(have - sent.start, content.nbytes))
            last = sent.total is not None and have + fresh.nbytes == sent.total
            if not last:  # what is no multiple is not kept
                kept = fresh.nbytes - fresh.nbytes % CHUNK_MULTIPLE
                fresh = Content(*fresh.slices(0, kept))
            upload.chunks.append(fresh)
            request.stored = fresh
            have += fresh.nbytes
        if sent.total is None or have < sent.total:
            headers = {"Range": f"bytes=0-{have - 1}"} if have else {}
            return Response(308, headers)
        content = Content.joined(upload.chunks)
        digests = await self._service.digests(request, content, with_crc32c=True)
        item = self._state.end_upload(upload, content, digests, condition=upload.condition)
        resource = self._finished[upload_id] = resource_of(upload.bucket, item)
        if len(self._finished) > FINISHED_UPLOADS:
            del self._finished[next(iter(self._finished))]
        return answer(resource)

    async def _abort_upload(self, request: Request) -> Response:
        upload = self._state.upload(request.bucket, None, request.query["upload_id"])
        self._state.abort_upload(upload)
        return Response(499)
