"""An fsspec filesystem with the loop or the threads on which its methods run."""

# Rule 1: a filesystem that we make is async where it can be, has a session of its own on the loop
#   that uses it, and is in no cache of instances or listings.
# Rule 2: a filesystem of the user is used where it lives: on the loop that its sync methods use,
#   or in threads. It is not closed. One made for use in coroutines (`asynchronous=True`) does not
#   say on which loop it lives: it is made again, with the same arguments, for the loop that asks.
# Rule 3: a call in a thread or on another loop that is cancelled ends at once for its caller; the
#   thread may go on with what it was given.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncckpt.flow.threads import Workers
from asyncckpt.stores.objects.client import RequestError

T = TypeVar("T")


class FilesystemSession:
    """A filesystem that exists from its first use to `close`."""

    def __init__(
        self,
        make: Callable[[], Any],
        workers: Workers,
        *,
        prepare: Callable[[Any], Awaitable[None]] | None = None,
        dispose: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        """`make` is called once, in a thread; `prepare`, and at the end `dispose`, on the loop.

        A filesystem that is not ours has neither `prepare` nor `dispose`.
        """
        self._make = make
        self._workers = workers
        self._prepare = prepare
        self._dispose = dispose
        self._made: Future[Any] | None = None
        self._filesystem: Any = None
        self._lock = asyncio.Lock()
        self._closed = False

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """The result of a method, known by its name without underscore."""
        filesystem = self._filesystem or await self._opened()
        if is_async(filesystem):
            return await self._there(filesystem, getattr(filesystem, "_" + name)(*args, **kwargs))
        return await self.in_thread(getattr(filesystem, name), *args, **kwargs)

    async def run(self, function: Callable[[Any], Awaitable[T]]) -> T:
        """The result of the coroutine that `function` makes for the filesystem, where that lives.

        For filesystems that are async.
        """
        filesystem = self._filesystem or await self._opened()
        result: T = await self._there(filesystem, function(filesystem))
        return result

    async def in_thread(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The result of the call, made in a worker thread."""
        future = self._workers.submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                self._workers.abandon(future)
            raise

    async def filesystem(self) -> Any:
        """The filesystem, made and prepared."""
        return self._filesystem or await self._opened()

    async def close(self) -> None:
        """`dispose` has been called, if there is anything to dispose of. Idempotent."""
        self._closed = True
        if self._made is not None and not self._made.cancel():
            self._workers.abandon(self._made)  # whatever it waits for, nobody waits for it
        filesystem, self._filesystem = self._filesystem, None
        if filesystem is not None and self._dispose is not None:
            await self._dispose(filesystem)

    async def _opened(self) -> Any:
        if self._closed:
            raise RequestError("invalid", "the client is closed")
        async with self._lock:
            if self._filesystem is None:
                # Kept through a cancelled wait: finding credentials may take longer than the
                # deadline of the first request.
                if self._made is None:
                    self._made = self._workers.submit(self._make)
                made = asyncio.wrap_future(self._made)
                # asyncio would log, unabridged, an error that nobody waits for any more; so does
                # its `shield` of later releases, whoever has seen it.
                made.add_done_callback(_seen)
                try:
                    await asyncio.wait((made,))
                    filesystem = made.result()
                except Exception:
                    self._made = None
                    raise
                if self._prepare is not None:
                    await self._prepare(filesystem)
                self._filesystem = filesystem
        return self._filesystem

    async def _there(self, filesystem: Any, coroutine: Any) -> Any:
        loop = filesystem.loop
        if loop is None or loop is asyncio.get_running_loop():
            return await coroutine
        if not loop.is_running():
            coroutine.close()
            raise RequestError("invalid", "the event loop of the given file system does not run")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise RequestError(
                    "connection", "the event loop of the given file system has ended"
                ) from None
            raise


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def made_again(filesystem: Any) -> Any:
    """A filesystem like this one, for the loop that uses it first."""
    options = {**filesystem.storage_options, "asynchronous": True, "skip_instance_cache": True}
    return type(filesystem)(*filesystem.storage_args, **options)


def is_async(filesystem: Any) -> bool:
    """Whether its methods have async twins that work.

    A wrapper like `DirFileSystem` is async by its class, and works as what it wraps.
    """
    inner = getattr(filesystem, "fs", None)
    return filesystem.async_impl and (inner is None or is_async(inner))


def hidden_values(options: Mapping[str, Any]) -> frozenset[str]:
    """Every text in the options, however deep: none of it may be shown."""
    found: set[str] = set()
    pending: list[Any] = list(options.values())
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, bytes):
            found.add(value.decode("utf-8", "replace"))
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list | tuple | set):
            pending += value
    return frozenset(found)
