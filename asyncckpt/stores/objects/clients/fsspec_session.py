"""An fsspec filesystem and the loop or threads on which its methods run."""

# Rule 1: a filesystem of our own is async if possible, has its own session on the loop that uses
#   it, and is in no cache of instances or listings.
# Rule 2: a filesystem of the user runs on the loop of its sync methods, or in threads, and is not
#   closed. The loop of one made for coroutines (`asynchronous=True`) is unknown, so an equal one is
#   made for our loop.
# Rule 3: a cancelled call in a thread or on another loop ends at once for its caller; the thread
#   may continue to use its arguments.

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asyncckpt.flow.threads import Workers, seen
from asyncckpt.stores.objects.clients.client import RequestError


class FilesystemSession:
    """A filesystem, made at its first use.

    Args:
        make: called once, in a worker thread: it imports libraries, reads configuration and may
            look for credentials on the network.
        workers: threads for `make` and for filesystems that are not async.
        ours: the filesystem is not the user's; `close` closes its session.
    """

    def __init__(self, make: Callable[[], Any], workers: Workers, *, ours: bool = True) -> None:
        self._make = make
        self.workers = workers
        self.ours = ours
        self._made: Future[Any] | None = None
        self._closed = False

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a coroutine method, or of its sync twin without the underscore."""
        filesystem = await self.filesystem()
        if not is_async(filesystem):
            method = getattr(filesystem, name.removeprefix("_"))
            return await self.workers.run_or_abandon(method, *args, **kwargs)
        loop = filesystem.loop  # raises in a forked child
        if loop is None or loop is asyncio.get_running_loop():
            return await getattr(filesystem, name)(*args, **kwargs)
        if not loop.is_running():
            raise RequestError("invalid", "the event loop of the given file system does not run")
        coroutine = getattr(filesystem, name)(*args, **kwargs)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise RequestError(
                    "connection", "the event loop of the given file system has ended"
                ) from None
            raise

    async def filesystem(self) -> Any:
        """Return the filesystem, made if necessary."""
        if self._closed:
            raise RequestError("invalid", "the client is closed")
        made = self._made = self._made or self.workers.submit(self._make)
        if not made.done():
            # A cancelled wait does not cancel `make`: looking for credentials may take longer than
            # the first request's deadline.
            waiter = asyncio.wrap_future(made)
            # Without `seen`, asyncio would log an error that no caller awaits, with all its text.
            waiter.add_done_callback(seen)
            await asyncio.wait((waiter,))
        try:
            return made.result()
        except Exception:
            if made is self._made:
                self._made = None  # the next request tries again
            raise

    async def close(self) -> None:
        """Close the filesystem's session if it is ours. Idempotent."""
        self._closed = True
        made, self._made = self._made, None
        if made is None or made.cancel():
            return
        self.workers.abandon(made)  # it may look for credentials forever
        if not made.done() or made.exception() is not None or not self.ours:
            return
        filesystem = made.result()
        if not is_async(filesystem):
            return
        while (inner := getattr(filesystem, "fs", None)) is not None:  # in a wrapper
            filesystem = inner
        for name in ("set_session", "_set_session"):  # the second is of gcsfs
            if inspect.iscoroutinefunction(connect := getattr(filesystem, name, None)):
                await (await connect()).close()


def is_async(filesystem: Any) -> bool:
    """Return whether the filesystem has working async methods.

    A wrapper like `DirFileSystem` has an async class, but works like the filesystem it wraps.
    """
    inner = getattr(filesystem, "fs", None)
    return getattr(filesystem, "async_impl", False) and (inner is None or is_async(inner))
