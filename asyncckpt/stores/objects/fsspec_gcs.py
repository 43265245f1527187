"""A client of Google Cloud Storage through gcsfs: its session and credentials, and our requests.

gcsfs's own operations repeat a request up to six times with waits of their own, copy an upload
into a larger body, and keep neither the reason of a refusal nor which of bucket and object is
missing (gcsfs 2026.10). Here gcsfs finds and renews the credentials, and its session sends what
the JSON API asks for: https://cloud.google.com/storage/docs/json_api/v1.
"""

# Rule 1: the URL of an upload session is all that is needed to write to it: it is in no error.
# Rule 2: an object is finished only by `complete_parts`. The server takes bytes of an unfinished
#   object in multiples of 256 KiB, so what the last part has beyond them waits here.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from asyncckpt.options import GIB, KIB
from asyncckpt.stores.objects.answers import one_line, status_error
from asyncckpt.stores.objects.client import Body, ClientTraits, Listed, RequestError
from asyncckpt.stores.objects.fsspec_bodies import SentBody, received, viewed
from asyncckpt.stores.objects.fsspec_client import FsspecClient, Listing, each, seconds
from asyncckpt.stores.objects.fsspec_session import FilesystemSession, hidden_values

PART_UNIT_NBYTES = 256 * KIB
"""Unfinished uploads grow by multiples of this."""

GCS_TRAITS = ClientTraits(
    name="gcsfs",
    body="any",
    put_copies=0,
    get_copies=1,
    conditional_create=True,
    put_max_nbytes=64 * GIB,
    multipart=True,
    parallel_parts=False,
    part_min_nbytes=PART_UNIT_NBYTES,
    part_multiple_nbytes=PART_UNIT_NBYTES,
    part_max_nbytes=64 * GIB,
    part_max_count=1_000_000,
)

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""A connection on which nothing arrives; the deadline of a request is that of `Requests`."""

PAGE_ENTRIES = 1000
"""Entries of a listing that the server puts into one answer."""

_CANCELLED = 499
"""The status of an upload that was deleted, which is what was asked for."""


def gcs_filesystem(storage_options: Mapping[str, Any]) -> Any:
    """A filesystem of our own. Raises `ImportError` without gcsfs; may ask the metadata server."""
    # The class itself: that of the registry asks every bucket over gRPC what kind it is.
    from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import HTTPError

    arguments = {
        "consistency": "none",
        **storage_options,
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }
    failure: RequestError
    try:
        return GCSFileSystem(**arguments)
    except (ValueError, GoogleAuthError, HTTPError) as error:
        # A token that is none, expired, of another project, or that Google refuses.
        text = f"{type(error).__name__}: {error}"
        failure = RequestError("credentials", one_line(text, hidden_values(storage_options)))
    raise failure


async def connect(filesystem: Any) -> None:
    """The session exists, on this loop."""
    await filesystem._set_session()


async def disconnect(filesystem: Any) -> None:
    """The session is closed."""
    if filesystem._session is not None:
        await filesystem._session.close()


class GcsClient(FsspecClient):
    """Objects in a bucket of Google Cloud Storage."""

    def __init__(
        self, session: FilesystemSession, url: str, root: str, *, options: Mapping[str, Any]
    ) -> None:
        super().__init__(session, url, root, name="gcsfs", options=options)
        self.traits = GCS_TRAITS
        self._bucket, _, prefix = root.strip("/").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._tails: dict[str, tuple[int, bytes]] = {}

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`; one request for every size, `create` by `ifGenerationMatch`."""
        condition = {"ifGenerationMatch": "0"} if create else {}
        await self._answer(
            self._json(
                "POST",
                f"upload/storage/v1/b/{quote(self._bucket, safe='')}/o",
                {"uploadType": "media", "name": self._prefix + key, **condition},
                body=body,
            ),
            conditional=create,
        )

    async def begin_parts(self, key: str) -> str:
        """See `ObjectClient`; the id is the URL of the session."""
        return await self._answer(self._begin(self._prefix + key))

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """See `ObjectClient`; parts are sent in order, each after the one before it."""
        view = viewed(body)
        whole = len(view) // PART_UNIT_NBYTES * PART_UNIT_NBYTES
        if whole:
            await self._answer(self._append(upload, offset, view[:whole]))
        self._tails[upload] = (offset + whole, bytes(view[whole:]))
        return ""

    async def complete_parts(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """See `ObjectClient`."""
        offset, tail = self._tails.get(upload, (0, b""))
        await self._answer(self._finish(upload, offset, tail))
        self._tails.pop(upload, None)

    async def abort_parts(self, key: str, upload: str) -> None:
        """See `ObjectClient`."""
        self._tails.pop(upload, None)
        try:
            await self._answer(self._session.run(lambda fs: self._abort(fs, upload)))
        except RequestError as error:
            if error.kind != "missing":
                raise

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectClient`; one request each, because a batch hides which of them failed."""
        await each(self._delete, keys)

    # ------------------------------------------------------------------------------------ requests

    def _object(self, key: str) -> str:
        return f"b/{quote(self._bucket, safe='')}/o/{quote(self._prefix + key, safe='')}"

    async def _delete(self, key: str) -> None:
        try:
            await self._answer(self._json("DELETE", f"storage/v1/{self._object(key)}"))
        except RequestError as error:
            if error.kind != "missing":
                raise

    async def _size(self, key: str) -> int:
        path = f"storage/v1/{self._object(key)}"
        return int((await self._json("GET", path, {"fields": "size"}))["size"])

    async def _get(self, key: str, start: int, stop: int) -> Body:
        return await self._session.run(
            lambda filesystem: self._read(filesystem, self._object(key), start, stop)
        )

    async def _read(self, filesystem: Any, path: str, start: int, stop: int) -> Body:
        async with await self._send(
            filesystem,
            "GET",
            f"{filesystem._location}/download/storage/v1/{path}",
            {"alt": "media"},
            headers={"Range": f"bytes={start}-{stop - 1}"},
        ) as answer:
            if answer.status == 416:
                return b""
            await self._check(answer)
            nbytes = answer.content_length
            if nbytes is None or nbytes > stop - start or (start and answer.status != 206):
                answer.close()
                raise RequestError(
                    "invalid",
                    "the store does not tell the length of its answers"
                    if nbytes is None
                    else "the store answers ranged reads with whole objects",
                )
            try:
                return await received(answer.content.iter_any(), nbytes)
            except BaseException:
                answer.close()
                raise

    async def _list(self, prefix: str, recursive: bool, limit: int) -> Listing:
        skip = len(self._prefix)
        found: list[Listed] = []
        where = {
            "prefix": f"{self._prefix}{prefix}/" if prefix else self._prefix,
            "fields": "nextPageToken,prefixes,items(name,size,updated)",
        }
        if not recursive:
            where["delimiter"] = "/"
        path = f"storage/v1/b/{quote(self._bucket, safe='')}/o"
        while len(found) <= limit:
            # One more for the marker of the directory itself.
            where["maxResults"] = str(min(PAGE_ENTRIES, limit + 2 - len(found)))
            page = await self._json("GET", path, where)
            found += (
                Listed(
                    item["name"][skip:],
                    int(item.get("size", 0)),
                    modified_s=seconds(item.get("updated")),
                )
                for item in page.get("items", ())
                if not item["name"].endswith("/")
            )
            found += (
                Listed(below[skip:-1], 0, is_prefix=True) for below in page.get("prefixes", ())
            )
            if not page.get("nextPageToken"):
                break
            where["pageToken"] = page["nextPageToken"]
        return sorted(found)[: limit + 1]

    async def _begin(self, key: str) -> str:
        return await self._session.run(lambda filesystem: self._begin_there(filesystem, key))

    async def _begin_there(self, filesystem: Any, key: str) -> str:
        async with await self._send(
            filesystem,
            "POST",
            f"{filesystem._location}/upload/storage/v1/b/{quote(self._bucket, safe='')}/o",
            {"uploadType": "resumable", "name": key},
            headers={"X-Upload-Content-Type": "application/octet-stream"},
        ) as answer:
            await self._check(answer)
            return str(answer.headers["Location"])

    async def _append(self, upload: str, offset: int, view: memoryview) -> None:
        """All bytes of the view are stored, from `offset` on; the server may take them in turns."""
        end = offset + len(view)
        while offset < end:
            rest = view[len(view) - (end - offset) :]
            stored = await self._session.run(
                lambda fs, rest=rest, offset=offset: self._chunk(  # type: ignore[misc]
                    fs, upload, rest, f"bytes {offset}-{end - 1}/*"
                )
            )
            if stored is None or stored <= offset:
                raise RequestError("short", "the store has taken nothing of a part")
            offset = stored

    async def _finish(self, upload: str, offset: int, tail: bytes) -> None:
        end = offset + len(tail)
        span = f"{offset}-{end - 1}" if tail else "*"
        stored = await self._session.run(
            lambda fs: self._chunk(fs, upload, memoryview(tail), f"bytes {span}/{end}")
        )
        if stored is not None:
            raise RequestError("short", f"the store holds {stored} of {end} bytes")

    async def _chunk(self, filesystem: Any, upload: str, view: memoryview, span: str) -> int | None:
        """How many bytes of the object the server holds; None once the object is finished."""
        async with await self._send(
            filesystem, "PUT", upload, body=view, headers={"Content-Range": span}
        ) as answer:
            if answer.status == 308:
                await answer.read()
                return int(answer.headers.get("Range", "bytes=0--1").partition("-")[2]) + 1
            await self._check(answer)
            await answer.read()
            return None

    async def _abort(self, filesystem: Any, upload: str) -> None:
        async with await self._send(filesystem, "DELETE", upload) as answer:
            if answer.status != _CANCELLED:
                await self._check(answer)
            await answer.read()

    async def _json(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
    ) -> Any:
        return await self._session.run(
            lambda filesystem: self._json_there(filesystem, method, path, parameters or {}, body)
        )

    async def _json_there(
        self,
        filesystem: Any,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Body | None,
    ) -> Any:
        url = f"{filesystem._location}/{path}"
        async with await self._send(filesystem, method, url, parameters, body=body) as answer:
            await self._check(answer)
            content = await answer.read()
            return json.loads(content) if content else {}

    async def _send(
        self,
        filesystem: Any,
        method: str,
        url: str,
        parameters: Mapping[str, str] | None = None,
        *,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer of the server, whatever its status, as a context that ends it.

        Without `parameters`, those of the URL are all that is sent.
        """
        from aiohttp import ClientTimeout
        from yarl import URL

        credentials = filesystem.credentials
        if credentials.credentials is not None and not credentials.credentials.valid:
            # It blocks; and several may do it at once, which is harmless.
            await self._session.in_thread(credentials.maybe_refresh)
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        data: SentBody | None = None
        if body is not None:
            data = SentBody(body) if len(body) else None
            sent |= {"Content-Type": "application/octet-stream", "Content-Length": str(len(body))}
        session = await filesystem._set_session()
        return await session.request(
            method,
            # Quoted already, and an upload session brings its parameters, which stay as they are.
            URL(url, encoded=True),
            params=None if parameters is None else filesystem._get_params(dict(parameters)),
            headers=filesystem._get_headers(sent),
            data=data,
            allow_redirects=False,
            timeout=ClientTimeout(
                total=filesystem.requests_timeout,
                sock_connect=CONNECT_TIMEOUT_S,
                sock_read=READ_TIMEOUT_S,
            ),
        )

    async def _check(self, answer: Any) -> None:
        if answer.status < 300:
            return
        text = (await answer.content.read(64 * KIB)).decode("utf-8", "replace")
        code, message = None, text
        try:
            said = json.loads(text)["error"]
            code = (said.get("errors") or [{}])[0].get("reason")
            message = str(said.get("message", ""))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            pass
        raise status_error(
            answer.status,
            code,
            message,
            self._hidden,
            retry_after=answer.headers.get("Retry-After"),
        )
