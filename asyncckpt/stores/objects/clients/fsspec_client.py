"""Client of any fsspec filesystem, through the methods that all have in common."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from traceback import clear_frames
from typing import Any, TypeVar

from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.flow.shield import mapped
from asyncckpt.stores.objects.clients.classification import request_error
from asyncckpt.stores.objects.clients.client import (
    INLINE_NBYTES,
    Body,
    ClientTraits,
    Kind,
    Listed,
    ObjectClient,
    RequestError,
    unless_missing,
)
from asyncckpt.stores.objects.clients.fsspec_session import FilesystemSession

T = TypeVar("T")


DELETES = 32
"""Requests of one `delete` in flight, each for one object."""

LOCATED: frozenset[Kind] = frozenset(("connection", "timeout", "endpoint"))
"""Failures whose detail names the endpoint."""

_MEMORY_LOCK = threading.Lock()
"""Held by every write to a memory filesystem: all share one dictionary."""


class FsspecClient(ObjectClient):
    """Objects below a path of an fsspec filesystem.

    Methods of an async filesystem run on its loop, those of other filesystems in worker threads.
    Libraries send `bytes`; other bodies are copied in a worker thread.

    Args:
        url: the client's name; holds no credentials.
        root: the path as the filesystem's methods take it.
        hidden: texts that no error repeats.
        endpoint: host of the server, for errors.
    """

    def __init__(
        self,
        session: FilesystemSession,
        url: str,
        root: str,
        *,
        traits: ClientTraits,
        hidden: Collection[str] = (),
        endpoint: str = "",
    ) -> None:
        self.url = url
        self.traits = traits
        self._session = session
        self._root = root.rstrip("/")
        self._hidden = hidden
        self._endpoint = endpoint

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`; `create` is refused: most filesystems create unconditionally."""
        if create:
            raise RequestError("invalid", f"{self.traits.name} offers no conditional creation")
        await self._request(self._pipe(self._path(key), await self._as_bytes(body)))

    async def get(self, key: str, start: int, stop: int) -> Body:
        try:
            found: Body = await self._call("_cat_file", self._path(key), start=start, end=stop)
        except RequestError as error:
            # Past the end, a server answers 416; other filesystems are less specific.
            if error.status != 416 and (error.kind != "invalid" or await self.size(key) > start):
                raise
            return b""
        return found

    async def size(self, key: str) -> int:
        nbytes = (await self._described(key))["size"]
        if nbytes is None:
            raise RequestError("invalid", "the server does not say how long the object is")
        return int(nbytes)

    async def version(self, key: str) -> str:
        info = await self._described(key)
        return str(info.get("generation") or info.get("ETag") or "")

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> list[Listed]:
        path, root = self._path(prefix), self._root.strip("/")
        found: list[Listed] = []
        token: str | None = ""
        while token is not None and len(found) <= limit:
            entries, token = await self._page(path, token, recursive=recursive)
            found += _entries(entries, path, root, recursive=recursive)
        return sorted(found)[: limit + 1]

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectClient`; one request per object, several at once."""
        await each(self._delete, keys)

    async def close(self) -> None:
        await self._session.close()

    # ------------------------------------------------------------------------------- for subclasses

    async def _page(
        self, path: str, token: str, *, recursive: bool
    ) -> tuple[Iterable[Mapping[str, Any]], str | None]:
        """Return entries below the path, and the token of the next page; here, all of them."""
        with unless_missing():
            if recursive:
                found = await self._uncached("_find", path, detail=True)
                # By key, since `DirFileSystem` had absolute names in the details before 2026.9.
                return [{**entry, "name": name} for name, entry in found.items()], None
            return await self._uncached("_ls", path, detail=True), None
        return (), None

    async def _pipe(self, path: str, data: bytes | bytearray) -> None:
        try:
            await self._session.call("_pipe_file", path, data)
        except FileNotFoundError:  # the object's directory is missing
            await self._session.call("_makedirs", path.rpartition("/")[0], exist_ok=True)
            await self._session.call("_pipe_file", path, data)

    async def _as_bytes(self, body: Body) -> bytes | bytearray:
        if isinstance(body, bytes | bytearray):
            return body
        view = memoryview(body)
        if len(view) <= INLINE_NBYTES:
            return bytes(view)
        return await self._session.workers.run_or_abandon(bytes, view)

    async def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a filesystem method; convert its errors to `RequestError`."""
        return await self._request(self._session.call(name, *args, **kwargs))

    async def _request(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except AsyncCheckpointError:
            raise
        except Exception as error:
            failure = request_error(error, self._hidden)
            # Frames of the library hold the body; s3fs keeps its error in one.
            clear_frames(error.__traceback__)
        # Outside of `except`: the library's error must not be the context of ours.
        if failure.kind in LOCATED and self._endpoint:
            failure.detail += f" (endpoint {self._endpoint})"
        try:
            raise failure
        finally:
            del failure  # breaks the reference cycle of error and frame, which holds the body

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    async def _described(self, key: str) -> Mapping[str, Any]:
        try:
            info: Mapping[str, Any] = await self._uncached("_info", self._path(key))
        except RequestError as error:
            if error.kind in ("forbidden", "invalid") and error.status is not None:
                # S3 gives the reason in the response body, which a HEAD lacks.
                await self._call("_cat_file", self._path(key), start=0, end=1)
            raise
        if info["type"] == "directory":
            raise RequestError("missing", "no such object")
        return info

    async def _uncached(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # The user may have a listings cache, which misses other writers.
        (await self._request(self._session.filesystem())).invalidate_cache()
        return await self._call(name, *args, **kwargs)

    async def _delete(self, key: str) -> None:
        with unless_missing():
            await self._call("_rm_file", self._path(key))


class MemoryClient(FsspecClient):
    """Objects of this process's memory filesystem, which several clients may share."""

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        filesystem, path = await self._request(self._session.filesystem()), self._path(key)

        def store() -> None:
            with _MEMORY_LOCK:
                if create and filesystem.isfile(path):
                    raise FileExistsError(path)
                # The filesystem keeps the object that it is given, and a bytearray may change.
                filesystem.pipe_file(path, bytes(body))

        await self._request(self._session.workers.run_or_abandon(store))


async def each(delete: Callable[[str], Awaitable[None]], keys: Sequence[str]) -> None:
    """Call `delete` for each key, `DELETES` at a time, until an error.

    Raises the first error, with the remaining keys as `left`.
    """
    left = dict.fromkeys(keys)
    failed: list[RequestError] = []

    async def one(key: str) -> None:
        if not failed:
            try:
                await delete(key)
            except RequestError as error:
                failed.append(error)
            else:
                left.pop(key, None)

    try:
        await mapped(one, keys, DELETES)
        if failed:
            failed[0].left = tuple(left)
            raise failed[0]
    finally:
        failed.clear()  # breaks the reference cycle of error and frame


def _entries(
    found: Iterable[Mapping[str, Any]], path: str, root: str, *, recursive: bool
) -> Iterable[Listed]:
    below = path.strip("/") + "/" if path.strip("/") else ""
    for info in found:
        name, is_prefix = info["name"].lstrip("/"), info["type"] == "directory"
        # The listing of a file contains the file, and that of some directories the directory. A
        # file whose name ends with `/` is the marker of a directory.
        if (is_prefix and recursive) or (not is_prefix and name.endswith("/")):
            continue
        name = name.rstrip("/")
        if not name.startswith(below) or "" in (parts := name[len(below) :].split("/")):
            continue
        if {".", ".."}.isdisjoint(parts):
            yield Listed(
                name[len(root) + 1 :] if root else name,
                0 if is_prefix else int(info["size"] or 0),
                is_prefix,
                modified(info),
                "" if is_prefix else str(info.get("md5Hash") or info.get("ETag") or "").strip('"'),
            )


def modified(info: Mapping[str, Any]) -> float:
    """Return when an entry of a listing was written, in seconds since 1970; 0.0 if unknown."""
    names = ("LastModified", "mtime", "updated", "last_modified", "modified", "created")
    value = next((info[name] for name in names if info.get(name) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return 0.0
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) if isinstance(value, int | float) else 0.0
