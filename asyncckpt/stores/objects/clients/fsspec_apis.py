"""Clients of s3fs and gcsfs, with conditional requests and uploads in parts.

fsspec has no methods for these. They use `_call_s3` and `_call`, which make one request to the S3
and JSON APIs.
"""

# Rule 1: anyone with the URL of an upload session can write to it: no error shows it.
# Rule 2: GCS accepts unfinished objects in multiples of 256 KiB, so the remainder of the last part
#   is kept here until `complete_parts`, which finishes the object.

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from asyncckpt.options import KIB, MIB
from asyncckpt.stores.objects.clients.classification import (
    NO_ANSWER,
    foreign_answer,
    request_error,
    status_error,
)
from asyncckpt.stores.objects.clients.client import (
    STEP_NBYTES,
    Body,
    ClientTraits,
    PendingParts,
    RequestError,
    Take,
    unless_missing,
)
from asyncckpt.stores.objects.clients.fsspec_client import FsspecClient
from asyncckpt.stores.objects.clients.fsspec_session import FilesystemSession
from asyncckpt.stores.objects.clients.urls import Url

PART_UNIT_NBYTES = 256 * KIB
"""Unfinished uploads to GCS grow by multiples of this."""

CONNECTIONS = 128
"""Maximum connections of a session; botocore's default of 10 is below the limit of `Requests`."""

SLICE_NBYTES = 256 * KIB
"""Bytes given to a connection at a time, which it may copy."""

RECEIVE_NBYTES = 2 * MIB
"""Memory of a response in transit: a step, and the data that its connection receives meanwhile."""

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""Maximum time without a byte on a connection; `Requests` sets the deadline of a whole request."""

REFRESH_AHEAD = timedelta(minutes=10)
"""Google tokens that expire sooner are renewed in a thread: gcsfs would renew them 5 minutes before
they expire, and block the event loop."""

_CANCELLED = 499
"""Status of a deleted upload: a success."""


class SlicedBody:
    """A body that aiohttp sends without a copy, only once, and that botocore treats as a file.

    botocore would copy `bytes` to a file, and keep both beyond the request. aiohttp repeats a PUT
    on a closed connection if it can read the body again: a record sent twice could replace the
    record that another writer put there in between.
    """

    def __init__(self, data: Body) -> None:
        self._view = memoryview(data)
        self._at = 0
        self._sent = False

    def __enter__(self) -> SlicedBody:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the memory: libraries keep this object beyond its request."""
        self._view = memoryview(b"")

    def __len__(self) -> int:
        return len(self._view)

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        if self._sent:
            raise ConnectionError(NO_ANSWER)
        self._sent = True
        for start in range(0, len(self._view), SLICE_NBYTES):
            yield self._view[start : start + SLICE_NBYTES]

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes, for a signature that covers the body."""
        start, self._at = self._at, self._at + nbytes
        return bytes(self._view[start : start + nbytes])

    def tell(self) -> int:
        """Return the position of `read`."""
        return self._at

    def seek(self, offset: int) -> None:
        """Set the position of `read`. botocore and gcsfs do so to send it again."""
        self._at = offset
        self._sent = False


# ---------------------------------------------------------------------------------------------- S3


def s3_options(storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `S3FileSystem`: the user's, with defaults for the rest.

    Turns off botocore's retries, and checksums that some stores do not support.
    """
    config: dict[str, Any] = {
        "max_pool_connections": CONNECTIONS,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    return {
        **storage_options,
        "config_kwargs": config | dict(storage_options.get("config_kwargs") or {}),
        "cache_regions": False,  # would make clients without the handlers of `connect`
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


async def connect(filesystem: Any) -> None:
    """Give a filesystem a session, which the first request binds to its event loop.

    Blocks; run it in a thread: botocore reads its data about S3, configuration and credentials.
    """
    filesystem.retries = 1  # attempts, including the first
    # botocore sends `Expect: 100-continue` with every body, and aiohttp waits for the response: a
    # round trip, and on some stores forever.
    client = await filesystem.set_session()
    client.meta.events.register("before-send.s3", _not_expecting)
    client.meta.events.register("response-received.s3", _check_answer)
    # Bodies that are protected by TLS, or stay on this machine, are not hashed for the signature:
    # that would take 0.7 CPU-seconds per GiB on the event loop.
    config = client.meta.config
    settings = config.s3 or {}
    if "payload_signing_enabled" not in settings and is_protected(client.meta.endpoint_url):
        config.s3 = {**settings, "payload_signing_enabled": False}


def _not_expecting(request: Any, **_: Any) -> None:
    request.headers.pop("Expect", None)


_DOCUMENT = re.compile(rb"<(?:\w+:)?(?:List\w*Result|Error)\b")
"""Root elements of the answers to listings. botocore handles errors that come with status 200."""


def _check_answer(response_dict: Mapping[str, Any] | None, event_name: str, **_: Any) -> None:
    """Raise for a web page instead of a listing or of a range of an object, and for status 300.

    botocore takes any document without entries for an empty listing, one that it cannot parse for a
    failure of S3, and status 300 for a success.
    """
    if response_dict is None:
        return
    operation = event_name.rpartition(".")[2]
    status, headers, body = (response_dict[name] for name in ("status_code", "headers", "body"))
    known = status != 300
    if status < 300 and operation == "GetObject":
        known = status == 206 or "Content-Range" in headers
        if not known:
            body.close()
    elif status < 300 and operation.startswith("List"):
        known = _DOCUMENT.search(body[:KIB]) is not None
    if not known:
        raise foreign_answer("endpoint", status, headers)


def is_protected(endpoint: str) -> bool:
    """Return whether TLS protects bodies in transit, or they stay on this machine."""
    url = urlsplit(endpoint)
    return url.scheme == "https" or url.hostname in ("127.0.0.1", "::1", "localhost")


async def passed_on(response: Any, take: Take) -> None:
    """Pass the response on in steps, as aiohttp receives it; on failure close its connection."""
    pieces: list[Body] = []
    nbytes = 0
    try:
        async for piece, _ in response.content.iter_chunks():
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes >= STEP_NBYTES:
                await take(pieces)
                pieces, nbytes = [], 0
        if pieces:
            await take(pieces)
    except BaseException:
        response.close()
        raise


class S3Client(FsspecClient):
    """Objects in a bucket of S3 or a compatible store."""

    def __init__(self, session: FilesystemSession, url: Url, **more: Any) -> None:
        traits = ClientTraits(
            name="s3fs",
            put_copies=0 if session.ours else 3,  # see `_send`
            get_copies=2,
            receive_nbytes=RECEIVE_NBYTES if session.ours else None,
            conditional_create=True,
            conditional_replace=True,
            conditional_delete=True,
            repeats=True,  # a filesystem of the user's may, once, on a connection kept open
            multipart=True,
            parallel_parts=True,
        )
        self._bucket, self._prefix = url.host, "".join(f"{part}/" for part in url.parts)
        root = f"{self._bucket}/{self._prefix}"
        super().__init__(session, str(url), root, traits=traits, **more)

    async def receive(self, key: str, start: int, stop: int, take: Take) -> None:
        """See `ObjectClient`; a filesystem on another loop passes everything on at once."""
        if not self._session.ours:
            return await super().receive(key, start, stop, take)
        try:
            found = await self._s3("get_object", key, Range=f"bytes={start}-{stop - 1}")
        except RequestError as error:
            if error.status != 416:
                raise
            return
        body = found["Body"]  # older releases of aiobotocore return a proxy of the response
        await self._request(passed_on(getattr(body, "raw_stream", body), take))

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        await self._send("put_object", key, body, **_s3_condition(create))
        (await self._request(self._session.filesystem())).invalidate_cache(self._path(key))

    async def replace(self, key: str, body: Body, *, version: str) -> None:
        """See `ObjectClient`; by `If-Match`."""
        await self._send("put_object", key, body, IfMatch=version)

    async def delete_version(self, key: str, *, version: str) -> None:
        """See `ObjectClient`; by `If-Match`."""
        with unless_missing():
            await self._s3("delete_object", key, IfMatch=version)

    async def _page(
        self, path: str, token: str, *, recursive: bool
    ) -> tuple[Iterable[Mapping[str, Any]], str | None]:
        """See `FsspecClient`; if there are none, `_ls` would list the parent, page by page."""
        below = f"{path}/"[len(self._bucket) + 1 :]
        where = {"Prefix": below, "Delimiter": "" if recursive else "/"}
        where |= {"ContinuationToken": token} if token else {}
        page = await self._call("_call_s3", "list_objects_v2", Bucket=self._bucket, **where)
        found = [{**one, "size": one["Size"], "type": "file"} for one in page.get("Contents", ())]
        found += (
            {"Key": one["Prefix"], "type": "directory"} for one in page.get("CommonPrefixes", ())
        )
        named = ({**one, "name": f"{self._bucket}/{one['Key']}"} for one in found)
        return named, page.get("NextContinuationToken")

    async def begin_parts(self, key: str, *, create: bool = False) -> str:
        return await self._confirmed("UploadId", "create_multipart_upload", key)

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """See `ObjectClient`; returns the part's ETag."""
        part = {"UploadId": upload, "PartNumber": number + 1}
        return await self._send("upload_part", key, body, **part)

    async def complete_parts(
        self, key: str, upload: str, tags: Sequence[str], *, create: bool = False
    ) -> None:
        """See `ObjectClient`.

        Raises:
            RequestError: `missing` if the upload is gone, perhaps because an earlier call whose
                response was lost completed it.
        """
        parts = [{"PartNumber": i, "ETag": tag} for i, tag in enumerate(tags, 1)]
        whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **_s3_condition(create)}
        await self._confirmed("ETag", "complete_multipart_upload", key, **whole)

    async def abort_parts(self, key: str, upload: str) -> None:
        with unless_missing():
            await self._s3("abort_multipart_upload", key, UploadId=upload)

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        found: list[PendingParts] = []
        where: dict[str, Any] = {"Prefix": f"{self._prefix}{prefix}/" if prefix else self._prefix}
        while True:
            page = await self._call(
                "_call_s3", "list_multipart_uploads", Bucket=self._bucket, **where
            )
            found += (
                PendingParts(upload["Key"][len(self._prefix) :], upload["UploadId"])
                for upload in page.get("Uploads", ())
            )
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            where["KeyMarker"] = page["NextKeyMarker"]
            if marker := page.get("NextUploadIdMarker"):
                where["UploadIdMarker"] = marker

    async def _send(self, method: str, key: str, body: Body, **arguments: Any) -> str:
        """Send a body; return its ETag."""
        if self._session.ours:
            with SlicedBody(body) as data:
                return await self._confirmed("ETag", method, key, Body=data, **arguments)
        # With files, botocore sends `Expect: 100-continue`; see `connect`.
        copied = await self._session.workers.run_or_abandon(bytearray, body)
        return await self._confirmed("ETag", method, key, Body=copied, **arguments)

    async def _confirmed(self, name: str, method: str, key: str, **arguments: Any) -> str:
        """Return a value that every S3 store includes in its answer to this write.

        Without it, the answer is not from a store.
        """
        found = await self._s3(method, key, **arguments)
        if value := found.get(name):
            return str(value)
        meta = found["ResponseMetadata"]
        raise foreign_answer("connection", meta["HTTPStatusCode"], meta["HTTPHeaders"])

    async def _s3(self, method: str, key: str, **arguments: Any) -> Any:
        path = self._prefix + key
        return await self._call("_call_s3", method, Bucket=self._bucket, Key=path, **arguments)


def _s3_condition(create: bool) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if create else {}


# --------------------------------------------------------------------------------------------- GCS


def gcs_options(storage_options: Mapping[str, Any], hidden: Collection[str]) -> dict[str, Any]:
    """Return arguments of `GCSFileSystem`: the user's, with defaults for the rest."""
    from aiohttp import ClientTimeout

    session = dict(storage_options.get("session_kwargs") or {})
    timeout = ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
    session["middlewares"] = (_Checked(hidden), *session.get("middlewares", ()))
    return {
        "consistency": "none",
        "requests_timeout": timeout,
        **storage_options,
        "session_kwargs": session,
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


_TAKE: ContextVar[Take | None] = ContextVar("_TAKE", default=None)
"""Consumer of the response to the current task's request."""


class _Checked:
    """A middleware of aiohttp that makes errors final and keeps the server's reasons.

    gcsfs (2026.10) retries up to six times, with pauses, and drops the reason of a refusal, but
    raises a `RequestError` at once. aiohttp follows some redirections of uploads with reads, which
    succeed although nothing is stored. gcsfs takes any JSON object without entries for an empty
    listing.
    """

    def __init__(self, hidden: Collection[str]) -> None:
        self._hidden = hidden

    async def __call__(self, request: Any, handler: Any) -> Any:
        from aiohttp import ClientError

        try:
            answer = await handler(request)
            take = _TAKE.get()
            ranged = answer.status == 206 or "Content-Range" in answer.headers
            if take is not None and ranged and answer.status < 300:
                await passed_on(answer, take)
            content = await answer.read()  # which the response keeps for gcsfs
        except ClientError as error:
            failure = request_error(error, self._hidden)
        else:
            if answer.status == 308 and "Location" not in answer.headers:
                answer.status = 200  # the upload continues; aiohttp would follow a redirection
            if answer.status < 300 or answer.status == _CANCELLED:
                known = ranged if "Range" in request.headers else b'"storage#' in content
                if request.method == "GET" and not known:
                    raise foreign_answer("endpoint", answer.status, answer.headers)
                return answer
            code, message = _reason(content)
            retry_after = answer.headers.get("Retry-After")
            failure = status_error(
                answer.status, code, message, self._hidden, retry_after=retry_after
            )
        raise failure


def _reason(content: bytes) -> tuple[str | None, str]:
    """Return the reason and message of an error of the JSON API."""
    text = content[: 64 * KIB].decode("utf-8", "replace")
    try:
        said = json.loads(text)["error"]
        return (said.get("errors") or [{}])[0].get("reason"), str(said.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return None, text


class GcsClient(FsspecClient):
    """Objects in a bucket of Google Cloud Storage."""

    def __init__(self, session: FilesystemSession, url: Url, **more: Any) -> None:
        traits = ClientTraits(
            name="gcsfs",
            put_copies=0 if session.ours else 1,  # see `_sendable`
            get_copies=2,
            receive_nbytes=RECEIVE_NBYTES if session.ours else None,
            conditional_create=True,
            conditional_replace=True,
            conditional_delete=True,
            multipart=True,
            part_max_count=1_000_000,
        )
        self._bucket, self._prefix = url.host, "".join(f"{part}/" for part in url.parts)
        root = f"{self._bucket}/{self._prefix}"
        super().__init__(session, str(url), root, traits=traits, **more)
        self._tails: dict[str, tuple[int, bytes]] = {}

    async def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._session.ours:
            await self._request(self._renew_token())
        return await super()._call(name, *args, **kwargs)

    async def _renew_token(self) -> None:
        """Renew a token that expires soon, in a worker thread: Google's library blocks."""
        renewable = (await self._session.filesystem()).credentials
        token = renewable.credentials
        expiry = getattr(token, "expiry", None)
        ends_soon = expiry and expiry.replace(tzinfo=UTC) - datetime.now(UTC) <= REFRESH_AHEAD
        if token is not None and (ends_soon or not token.valid):
            await self._session.workers.run_or_abandon(renewable.maybe_refresh)

    async def receive(self, key: str, start: int, stop: int, take: Take) -> None:
        """See `ObjectClient`; gcsfs reads whole responses, so `_Checked` passes them on before."""
        if not self._session.ours:
            return await super().receive(key, start, stop, take)
        before = _TAKE.set(take)
        try:
            await self.get(key, start, stop)
        finally:
            _TAKE.reset(before)

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`; `_pipe_file` would copy the body twice, on the event loop."""
        await self._put_media(key, body, **_gcs_condition(create))

    async def replace(self, key: str, body: Body, *, version: str) -> None:
        """See `ObjectClient`; by generation."""
        await self._put_media(key, body, ifGenerationMatch=version)

    async def delete_version(self, key: str, *, version: str) -> None:
        """See `ObjectClient`; by generation."""
        request = ("_call", "DELETE", "b/{}/o/{}", self._bucket, self._prefix + key)
        with unless_missing():
            try:
                await self._call(*request, ifGenerationMatch=version)
            except RequestError as error:
                if error.kind == "exists":
                    await self.size(key)  # GCS answers the same for a missing object
                raise

    async def _page(
        self, path: str, token: str, *, recursive: bool
    ) -> tuple[Iterable[Mapping[str, Any]], str | None]:
        """See `FsspecClient`."""
        below = f"{path}/"[len(self._bucket) + 1 :]
        where = {"prefix": below, "delimiter": "" if recursive else "/"}
        where |= {"pageToken": token} if token else {}
        page = await self._call("_call", "GET", "b/{}/o", self._bucket, json_out=True, **where)
        found = [{**one, "type": "file"} for one in page.get("items", ())]
        found += ({"name": one, "type": "directory"} for one in page.get("prefixes", ()))
        named = ({**one, "name": f"{self._bucket}/{one['name']}"} for one in found)
        return named, page.get("nextPageToken")

    async def begin_parts(self, key: str, *, create: bool = False) -> str:
        """See `ObjectClient`; the id is the URL of the session."""
        headers, _ = await self._upload(key, "resumable", **_gcs_condition(create))
        if "Location" not in headers:
            raise foreign_answer("connection", 200, headers)
        return str(headers["Location"])

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """See `ObjectClient`; parts are sent one after the other, in order."""
        data = memoryview(body)
        end = offset + len(data) // PART_UNIT_NBYTES * PART_UNIT_NBYTES
        self._tails[upload] = (end, bytes(data[end - offset :]))
        at = offset
        while at < end:  # the server may store less than was sent
            rest = data[at - offset : end - offset]
            stored = await self._chunk(upload, rest, f"bytes {at}-{end - 1}/*")
            if stored is None or stored <= at:
                raise RequestError("short", "the store has stored no bytes of a part")
            at = stored
        return ""

    async def complete_parts(
        self, key: str, upload: str, tags: Sequence[str], *, create: bool = False
    ) -> None:
        offset, tail = self._tails.get(upload, (0, b""))
        end = offset + len(tail)
        span = f"{offset}-{end - 1}" if tail else "*"
        stored = await self._chunk(upload, tail, f"bytes {span}/{end}")
        if stored is not None:
            raise RequestError("short", f"the store holds {stored} of {end} bytes")
        self._tails.pop(upload, None)

    async def abort_parts(self, key: str, upload: str) -> None:
        self._tails.pop(upload, None)
        with unless_missing():
            await self._call("_call", "DELETE", upload)

    def _sendable(self, body: Body) -> contextlib.AbstractContextManager[Any]:
        """Return the object for aiohttp to send, as a context manager."""
        # Without `_Checked`, aiohttp follows redirections and needs a body that it can send again;
        # before Python 3.12.9 it joins the body with the headers.
        return SlicedBody(body) if self._session.ours else contextlib.nullcontext(memoryview(body))

    async def _put_media(self, key: str, body: Body, **condition: str) -> None:
        with self._sendable(body) as data:
            headers, content = await self._upload(key, "media", data=data, **condition)
        _check_stored(headers, content, len(body))

    async def _upload(self, key: str, kind: str, **more: Any) -> Any:
        filesystem = await self._request(self._session.filesystem())
        url = urljoin(filesystem.base, f"/upload/storage/v1/b/{quote(self._bucket, safe='')}/o")
        headers = {"Content-Type": "application/octet-stream"}
        if "data" in more:
            headers["Content-Length"] = str(len(more["data"]))
        name = self._prefix + key
        return await self._call(
            "_call", "POST", url, uploadType=kind, name=name, headers=headers, **more
        )

    async def _chunk(self, upload: str, body: bytes | memoryview, span: str) -> int | None:
        """Send a chunk; return the number of bytes stored so far, or None if that completes it."""
        headers = {"Content-Range": span, "Content-Length": str(len(body))}
        with self._sendable(body) as data:
            found, content = await self._call("_call", "PUT", upload, headers=headers, data=data)
        total = span.rpartition("/")[2]
        if content and total != "*":
            _check_stored(found, content, int(total))
            return None
        return int(found.get("Range", "bytes=0--1").partition("-")[2]) + 1


def _gcs_condition(create: bool) -> dict[str, str]:
    return {"ifGenerationMatch": "0"} if create else {}


def _check_stored(headers: Mapping[str, str], content: bytes, nbytes: int) -> None:
    """Raise unless the answer to an upload describes an object of this length."""
    try:
        stored = json.loads(content)
        if stored["generation"] and int(stored["size"]) == nbytes:
            return
    except (ValueError, KeyError, TypeError):
        pass
    raise foreign_answer("connection", 200, headers)
