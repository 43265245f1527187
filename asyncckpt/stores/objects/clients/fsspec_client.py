"""A client of any fsspec filesystem, through the methods that all of them have."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from traceback import clear_frames
from typing import Any, TypeVar

from asyncckpt.options import GIB
from asyncckpt.stores.objects.answers import request_error
from asyncckpt.stores.objects.client import (
    Body,
    ClientTraits,
    Kind,
    Listed,
    PendingParts,
    RequestError,
)
from asyncckpt.stores.objects.fsspec_bodies import viewed
from asyncckpt.stores.objects.fsspec_session import FilesystemSession, hidden_values

T = TypeVar("T")
Listing = list[Listed]
Entry = dict[str, Any]

DELETES = 32
"""Deletions of one `delete` in flight where a request deletes one object."""

UNCONDITIONAL: dict[Kind, Kind] = {"conflict": "unavailable", "exists": "unavailable"}
"""What these mean where nothing was asked for: a server's other troubles."""

_MEMORY = threading.Lock()
"""Held by every write to a memory filesystem: all of a process share one dictionary."""


class FsspecClient:
    """Objects below a path of an fsspec filesystem.

    Calls of an async filesystem run on its loop, those of others in worker threads.
    """

    def __init__(
        self,
        session: FilesystemSession,
        url: str,
        root: str,
        *,
        name: str,
        options: Mapping[str, Any],
    ) -> None:
        """`root` is the path as the filesystem's methods take it; of `options` nothing is shown."""
        self.url = url
        # What holds for every filesystem.
        self.traits = ClientTraits(name=name, put_max_nbytes=64 * GIB, get_copies=2)
        self._session = session
        self._root = root.rstrip("/")
        self._hidden = hidden_values(options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.traits.name}, {self.url!r})"

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`; `create` is refused."""
        if create:
            raise self._without("conditional creation")
        await self._answer(self._put(key, body))

    async def get(self, key: str, start: int, stop: int) -> Body:
        """See `ObjectClient`."""
        return await self._answer(self._get(key, start, stop))

    async def size(self, key: str) -> int:
        """See `ObjectClient`."""
        return await self._answer(self._size(key))

    async def list(self, prefix: str, *, recursive: bool, limit: int) -> Listing:
        """See `ObjectClient`."""
        return await self._answer(self._list(prefix, recursive, limit))

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectClient`; the objects are deleted one by one, several at once."""
        await each(self._delete, keys)

    async def begin_parts(self, key: str) -> str:
        """Refused."""
        raise self._without("uploads in parts")

    async def put_part(self, key: str, upload: str, number: int, offset: int, body: Body) -> str:
        """Refused."""
        raise self._without("uploads in parts")

    async def complete_parts(self, key: str, upload: str, tags: Sequence[str]) -> None:
        """Refused."""
        raise self._without("uploads in parts")

    async def abort_parts(self, key: str, upload: str) -> None:
        """Refused."""
        raise self._without("uploads in parts")

    async def pending_parts(self, prefix: str) -> Sequence[PendingParts]:
        """Empty."""
        return []

    async def close(self) -> None:
        """See `ObjectClient`."""
        await self._session.close()

    # ----------------------------------------------------------------------- for the subclasses too

    async def _answer(self, call: Awaitable[T], *, conditional: bool = False) -> T:
        """The result of a call into the library; its errors become `RequestError`."""
        try:
            return await call
        except Exception as error:
            failure = request_error(error, self._hidden)
            if not conditional:
                failure.kind = UNCONDITIONAL.get(failure.kind, failure.kind)
            # Frames of the library hold the body, and s3fs keeps its error in one of them.
            clear_frames(error.__traceback__)
        # Not inside `except`: the error of the library is no context of ours.
        try:
            raise failure
        finally:
            del failure  # a cycle of error and frame would hold the body until it is collected

    def _without(self, ability: str) -> RequestError:
        return RequestError("invalid", f"{self.traits.name} offers no {ability}")

    # ------------------------------------------------------------------------------------ requests

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root or "/"

    async def _put(self, key: str, body: Body) -> None:
        path, data = self._path(key), as_bytes(body)
        try:
            await self._session.call("pipe_file", path, data)
        except FileNotFoundError:
            # A filesystem with real directories.
            await self._session.call("makedirs", path.rpartition("/")[0], exist_ok=True)
            await self._session.call("pipe_file", path, data)

    async def _get(self, key: str, start: int, stop: int) -> Body:
        try:
            found: Body = await self._session.call(
                "cat_file", self._path(key), start=start, end=stop
            )
        except Exception as error:
            # Beyond the end some raise what the server says, and some what Python does.
            failure = request_error(error, self._hidden)
            if failure.kind != "invalid" or await self._size(key) > start:
                raise
            return b""
        if len(found) > stop - start:
            raise RequestError(
                "invalid",
                f"{len(found)} bytes came where {stop - start} were asked for: ranges are ignored",
            )
        return found

    async def _size(self, key: str) -> int:
        info = await self._uncached("info", self._path(key))
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        return int(info["size"])

    async def _list(self, prefix: str, recursive: bool, limit: int) -> Listing:
        path = self._path(prefix)
        try:
            if recursive:
                entries: Iterable[Entry] = (
                    await self._uncached("find", path, detail=True)
                ).values()
            else:
                entries = await self._uncached("ls", path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(self._entries(entries, path, recursive))[: limit + 1]

    async def _uncached(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # A cache of listings that somebody has left on knows nothing of other writers.
        (await self._session.filesystem()).invalidate_cache()
        return await self._session.call(name, *args, **kwargs)

    def _entries(self, found: Iterable[Entry], path: str, recursive: bool) -> Iterable[Listed]:
        below = path.strip("/") + "/"
        skip = len(self._root.strip("/")) + 1 if self._root.strip("/") else 0
        for info in found:
            name = info["name"].strip("/")
            is_prefix = info["type"] == "directory"
            # Listing a file gives that file, and listing some directories gives them as well.
            if not name or (below != "/" and not name.startswith(below)):
                continue
            if is_prefix and recursive:
                continue
            yield Listed(
                name[skip:], 0 if is_prefix else int(info["size"] or 0), is_prefix, modified(info)
            )

    async def _delete(self, key: str) -> None:
        try:
            await self._answer(self._session.call("rm_file", self._path(key)))
        except RequestError as error:
            if error.kind != "missing":
                raise


class MemoryClient(FsspecClient):
    """Objects of the memory filesystem of this process, which several clients may share."""

    def __init__(
        self, session: FilesystemSession, url: str, root: str, *, options: Mapping[str, Any]
    ) -> None:
        super().__init__(session, url, root, name="memory", options=options)
        self.traits = ClientTraits(name="memory", conditional_create=True, put_max_nbytes=64 * GIB)

    async def put(self, key: str, body: Body, *, create: bool = False) -> None:
        """See `ObjectClient`; decided under a lock of this process."""
        filesystem = await self._session.filesystem()
        put = functools.partial(_put_in_memory, filesystem, self._path(key), as_bytes(body), create)
        await self._answer(self._session.in_thread(put), conditional=create)


def _put_in_memory(filesystem: Any, path: str, body: bytes | bytearray, create: bool) -> None:
    with _MEMORY:
        if create and filesystem.isfile(path):
            raise FileExistsError(path)
        # The filesystem keeps `bytes` as they are, and the buffer is the caller's.
        filesystem.pipe_file(path, bytes(body))


async def each(delete: Callable[[str], Awaitable[None]], keys: Sequence[str]) -> None:
    """The call has been made for each key, `DELETES` at a time.

    After an error no other begins; the first one is raised, with the keys that are `left`.
    """
    left = dict.fromkeys(keys)
    waiting = iter(keys)
    failed: list[RequestError] = []

    async def stream() -> None:
        for key in waiting:
            try:
                await delete(key)
            except RequestError as error:
                failed.append(error)
            else:
                del left[key]
            if failed:
                return

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(DELETES, len(left))):
                group.create_task(stream())
        if failed:
            failed[0].left = tuple(left)
            raise failed[0]
    finally:
        failed.clear()  # a cycle of error and frame would stay until it is collected


def as_bytes(body: Body) -> bytes | bytearray:
    """The body as most libraries want it; copied if it is something else."""
    return body if isinstance(body, bytes | bytearray) else bytes(viewed(body))


def modified(info: Mapping[str, Any]) -> float:
    """When an entry of a listing was written, under whichever name its filesystem tells it."""
    for name in ("LastModified", "mtime", "updated", "last_modified", "modified", "created"):
        if (value := info.get(name)) is not None:
            return seconds(value)
    return 0.0


def seconds(value: object) -> float:
    """Seconds since 1970 of a time as libraries tell it; 0.0 if it is none."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return seconds(datetime.fromisoformat(value))
        except ValueError:
            return 0.0
    return 0.0
