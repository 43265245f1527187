"""A client of S3 through s3fs: its sessions and credentials, and the requests themselves.

s3fs's file operations add requests of their own (a HEAD before a read, parts above 100 MiB) and
drop what the server says (s3fs 2026.9). `_call_s3` makes exactly one call of the S3 API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from asyncckpt.options import GIB, MIB
from asyncckpt.stores.objects.answers import status_error
from asyncckpt.stores.objects.client import (
    Body,
    ClientTraits,
    Listed,
    PendingParts,
    RequestError,
)
from asyncckpt.stores.objects.fsspec_bodies import SLICE_NBYTES, SentBody, received
from asyncckpt.stores.objects.fsspec_client import FsspecClient, Listing, each, seconds
from asyncckpt.stores.objects.fsspec_session import FilesystemSession
from asyncckpt.stores.objects.urls import split_bucket

S3_TRAITS = ClientTraits(
    name="s3fs",
    body="any",
    put_copies=0,
    get_copies=1,
    conditional_create=True,
    put_max_nbytes=5 * GIB,
    multipart=True,
    parallel_parts=True,
    part_min_nbytes=5 * MIB,
    part_max_nbytes=5 * GIB,
)

CONNECTIONS = 128
"""Connections of a session at most, which are opened as they are needed: botocore's 10 would be a
second limiter below that of `Requests`."""

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""A connection on which nothing arrives; the deadline of a request is that of `Requests`."""

PAGE_ENTRIES = 1000
"""Entries of a listing, and keys of a deletion, that S3 takes in one request."""


def s3_options(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `S3FileSystem`: the user's, with defaults where the user says nothing.

    One request is one request: neither botocore nor s3fs repeats it. Checksums that not every
    store understands are off.
    """
    options = dict(storage_options)
    config: dict[str, Any] = {
        "max_pool_connections": CONNECTIONS,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return {
        **options,
        "config_kwargs": config | (options.get("config_kwargs") or {}),
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


def s3_filesystem(storage_options: Mapping[str, Any]) -> Any:
    """A filesystem of our own, connected. Raises `ImportError` without s3fs. For a thread."""
    from s3fs import S3FileSystem  # type: ignore[import-untyped]

    filesystem = S3FileSystem(**s3_options(storage_options))
    filesystem.retries = 1  # attempts, of which the first counts
    return connected(filesystem)


def connected(filesystem: Any) -> Any:
    """The filesystem, with a session that the loop may use which makes the first request.

    For a thread: botocore reads its descriptions of S3, and configuration and credentials from
    wherever they are. What belongs to a loop, aiohttp's session, is made by the first request.
    """
    asyncio.run(_connect(filesystem))
    return filesystem


async def _connect(filesystem: Any) -> None:
    """The session exists.

    Where TLS protects bodies on their way, or they never leave the machine, they are not hashed
    for the signature: that is 0.7 CPU-seconds per GiB, on the event loop.
    """
    client = await filesystem.set_session()
    client.meta.events.register("before-send.s3", _expect_nothing)
    config = client.meta.config
    settings = config.s3 or {}
    if "payload_signing_enabled" not in settings and _is_protected(client.meta.endpoint_url):
        config.s3 = {**settings, "payload_signing_enabled": False}


async def disconnect(filesystem: Any) -> None:
    """The session is closed."""
    creator = getattr(filesystem, "_s3creator", None)
    if creator is not None:
        await creator.__aexit__(None, None, None)


def _expect_nothing(request: Any, **_: Any) -> None:
    # botocore asks before it sends a body that is no `bytes`, and aiohttp waits for the answer for
    # ever: a round trip, and with a store that does not know the question, the end.
    request.headers.pop("Expect", None)


def _is_protected(endpoint: str) -> bool:
    url = urlsplit(endpoint)
    return url.scheme == "https" or url.hostname in ("127.0.0.1", "::1", "localhost")


class S3Client(FsspecClient):
    """Objects in a bucket of S3, or of a store that speaks its protocol."""

    def __init__(
        self, session: FilesystemSession, url: str, root: str, *, options: Mapping[str, Any]
    ) -> None:
        super().__init__(session, url, root, name="s3fs", options=options)
        self.traits = S3_TRAITS
        self._bucket, prefix = split_bucket(root)
        self._prefix = f"{prefix}/" if prefix else ""

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`; one request for every size, `create` by `If-None-Match`."""
        condition = {"IfNoneMatch": "*"} if create else {}
        await self._answer(
            self._request("put_object", Key=self._prefix + key, Body=_sent(body), **condition),
            conditional=create,
        )

    async def begin_parts(self, key: str) -> str:
        """See `ObjectClient`."""
        answer = await self._call("create_multipart_upload", Key=self._prefix + key)
        return str(answer["UploadId"])

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """See `ObjectClient`; returns the part's ETag."""
        answer = await self._call(
            "upload_part",
            Key=self._prefix + key,
            UploadId=upload,
            PartNumber=number + 1,
            Body=_sent(body),
        )
        return str(answer["ETag"])

    async def complete_parts(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """See `ObjectClient`.

        Raises:
            RequestError: `missing` when the upload is gone, also because an earlier call whose
                answer was lost has completed it.
        """
        parts = [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(tags, 1)]
        await self._call(
            "complete_multipart_upload",
            Key=self._prefix + key,
            UploadId=upload,
            MultipartUpload={"Parts": parts},
        )

    async def abort_parts(self, key: str, upload: str) -> None:
        """See `ObjectClient`."""
        try:
            await self._call("abort_multipart_upload", Key=self._prefix + key, UploadId=upload)
        except RequestError as error:
            if error.kind != "missing":
                raise

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        """See `ObjectClient`."""
        found: list[PendingParts] = []
        where: dict[str, Any] = {"Prefix": self._below(prefix)}
        while True:
            page = await self._call("list_multipart_uploads", **where)
            found += (
                PendingParts(
                    upload["Key"][len(self._prefix) :],
                    upload["UploadId"],
                    seconds(upload.get("Initiated")),
                )
                for upload in page.get("Uploads", ())
            )
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            where["KeyMarker"] = page["NextKeyMarker"]
            if marker := page.get("NextUploadIdMarker"):
                where["UploadIdMarker"] = marker

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectClient`; a thousand by one request, one by one where the store has no such."""
        for start in range(0, len(keys), PAGE_ENTRIES):
            page = keys[start : start + PAGE_ENTRIES]
            try:
                await self._delete_page(page)
            except RequestError as error:
                error.left = (*(error.left or page), *keys[start + PAGE_ENTRIES :])
                raise

    # ------------------------------------------------------------------------------------ requests

    async def _delete_page(self, page: Sequence[str]) -> None:
        if len(page) == 1:
            return await self._delete(page[0])
        try:
            await self._delete_together(page)
        except RequestError as error:
            if error.kind != "invalid":
                raise
            await each(self._delete, page)

    async def _delete_together(self, keys: Sequence[str]) -> None:
        objects = [{"Key": self._prefix + key} for key in keys]
        answer = await self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
        for failed in answer.get("Errors", ()):
            if failed.get("Code") != "NoSuchKey":
                raise status_error(
                    200, failed.get("Code"), str(failed.get("Message") or ""), self._hidden
                )

    async def _delete(self, key: str) -> None:
        try:
            await self._call("delete_object", Key=self._prefix + key)
        except RequestError as error:
            if error.kind != "missing":
                raise

    async def _get(self, key: str, start: int, stop: int) -> Body:
        return await self._session.run(
            lambda filesystem: self._read(filesystem, self._prefix + key, start, stop)
        )

    async def _read(self, filesystem: Any, key: str, start: int, stop: int) -> Body:
        answer = await self._ranged(filesystem, key, start, stop)
        if answer is None:
            return b""
        nbytes = int(answer["ContentLength"])
        body = answer["Body"]
        try:
            if nbytes > stop - start or (start and "ContentRange" not in answer):
                raise RequestError("invalid", "the store answers ranged reads with whole objects")
            return await received(body.iter_chunks(SLICE_NBYTES), nbytes)
        finally:
            body.close()  # a connection with unread bytes is of no further use

    async def _ranged(self, filesystem: Any, key: str, start: int, stop: int) -> Any:
        """The answer whose body is the range; None when the object ends before it."""
        try:
            return await filesystem._call_s3(
                "get_object", Bucket=self._bucket, Key=key, Range=f"bytes={start}-{stop - 1}"
            )
        except OSError as error:
            answer = getattr(error.__cause__, "response", None) or {}
            if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") != 416:
                raise
            return None

    async def _size(self, key: str) -> int:
        # The answer to a HEAD has no body that tells a missing object from a missing bucket.
        return await self._session.run(
            lambda filesystem: self._read_size(filesystem, self._prefix + key)
        )

    async def _read_size(self, filesystem: Any, key: str) -> int:
        answer = await self._ranged(filesystem, key, 0, 1)
        if answer is None:
            return 0
        try:
            return int(str(answer.get("ContentRange", "/0")).rpartition("/")[2])
        finally:
            answer["Body"].close()

    async def _list(self, prefix: str, recursive: bool, limit: int) -> Listing:
        skip = len(self._prefix)
        found: list[Listed] = []
        where: dict[str, Any] = {"Prefix": self._below(prefix)}
        if not recursive:
            where["Delimiter"] = "/"
        while len(found) <= limit:
            # One more for the marker of the directory itself.
            where["MaxKeys"] = min(PAGE_ENTRIES, limit + 2 - len(found))
            page = await self._request("list_objects_v2", **where)
            found += (
                Listed(
                    entry["Key"][skip:],
                    int(entry["Size"]),
                    modified_s=seconds(entry.get("LastModified")),
                )
                for entry in page.get("Contents", ())
                if not entry["Key"].endswith("/")
            )
            found += (
                Listed(below["Prefix"][skip:-1], 0, is_prefix=True)
                for below in page.get("CommonPrefixes", ())
            )
            if not page.get("IsTruncated") or not page.get("NextContinuationToken"):
                break
            where["ContinuationToken"] = page["NextContinuationToken"]
        return sorted(found)[: limit + 1]

    def _below(self, prefix: str) -> str:
        return f"{self._prefix}{prefix}/" if prefix else self._prefix

    async def _call(self, method: str, **arguments: Any) -> Any:
        return await self._answer(self._request(method, **arguments))

    async def _request(self, method: str, **arguments: Any) -> Any:
        return await self._session.run(
            lambda filesystem: filesystem._call_s3(method, Bucket=self._bucket, **arguments)
        )


def _sent(body: Body) -> SentBody | bytes:
    return SentBody(body) if len(body) else b""
