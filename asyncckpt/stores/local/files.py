"""Read access to one checkpoint in a local directory."""

# Rule 1: the checkpoint is opened once, so all data come from one checkpoint, even if another takes
#   its name. One that is a single file is opened anew for each kind of read and compared with that;
#   the open descriptor keeps its inode number from being used again.
#   (test_a_checkpoint_of_one_file_that_was_replaced_is_not_read_on)
# Rule 2: below it, no link is followed and only regular files are read.
# Rule 3: a direct read goes through a buffer that forked children do not share: the disk might
#   write into the child's copy of a shared page.

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
)
from asyncckpt.flow.buffers import AnonymousMemory, allocating
from asyncckpt.flow.threads import Workers
from asyncckpt.options import CACHED_NBYTES, GIL_NBYTES, MIB
from asyncckpt.ports import ORDINARY, Bytes, Entry, Reading, StoreCapabilities
from asyncckpt.stores.local.failures import reported, store_error
from asyncckpt.stores.local.posix import (
    NO_DIRECT_IO,
    PAGE_NBYTES,
    Descriptor,
    cached,
    checked_regular,
    open_below,
    read_at_most,
    use_small_pages,
)
from asyncckpt.stores.paths import read_parts

PAST_CACHE_MIN_NBYTES = 1 << 20
"""Smaller reads gain nothing from bypassing the page cache."""

BOUNCE_NBYTES = 2 << 20
"""A thread's buffer for direct reads: small enough to stay in the core's cache until it is copied,
and four such reads in flight keep a disk busy. A virtual disk, whose host copies too, fills it up
to 1.5 times as fast as uncached memory."""

SLOW_TOUCH_S = 1.2e-3
"""CPU time per MiB of reads of at least 1 MiB into new arrays above which later reads use small
pages. Some virtual machines return free huge pages to their host and need 3 ms per MiB to get them
back. Elsewhere huge pages take 0.15 ms, small pages 0.4 ms, and the copy less than 0.3 ms."""

BUFFERS_PER_CALL = 1024
"""Most buffers of one `preadv` on Linux and macOS (IOV_MAX)."""

_LINK_ERRORS = {errno.ELOOP, errno.ENOTDIR, errno.EINVAL, errno.ENXIO, errno.EMLINK}


class LocalFiles:
    """The files of one checkpoint. Made by `LocalStore.files`; opened at first use.

    Cancelling a call waits for its thread, then raises.
    """

    def __init__(self, location: str, workers: Workers, capabilities: StoreCapabilities) -> None:
        self.location = location
        self.capabilities = capabilities
        self._workers = workers
        self._lock = threading.Lock()
        self._anchor: Descriptor | None = None  # the opened checkpoint
        self._is_directory = False
        self._shared: dict[tuple[str, int], _Shared] = {}  # open files, by path and flags
        self._bounces: list[Bytes] = []  # unused buffers
        self._slow_to_touch = False
        self.closed = False

    def __repr__(self) -> str:
        return f"LocalFiles({self.location!r})"

    async def read(self, path: str, *, max_nbytes: int) -> bytes:
        """Return the whole content of a small file. As `CheckpointFiles.read`."""
        with reported("reading", self._full(path)):
            data = await self._workers.run(self._read, path, max_nbytes)
        if isinstance(data, int):
            text = (
                f"{data} bytes, expected at most {max_nbytes}; the file is damaged or of another "
                "kind: use another checkpoint"
            )
            raise self._corrupt(path, text, expected=max_nbytes, found=data)
        return data

    def _read(self, path: str, max_nbytes: int) -> bytes | int:
        return read_at_most(self._open_file(path), max_nbytes)

    async def read_into(
        self, path: str, offset: int, buffers: Sequence[Bytes], *, how: Reading = ORDINARY
    ) -> None:
        """Fill the buffers from a range of the file. As `CheckpointFiles.read_into`.

        Ranges of at least 1 MiB outside the page cache bypass it, unless `how.shared`: pages for it
        cost more than the copy from a buffer in the core's cache. If memory of `how.fresh` reads is
        slow to touch, later reads use small pages. `how.received` is never called, and
        `how.ahead_nbytes` has no effect. `how.check` is called about every `CACHED_NBYTES`.
        """
        with reported("reading", self._full(path)):
            await self._workers.run(self._read_into, path, offset, buffers, how)

    def _read_into(self, path: str, offset: int, buffers: Sequence[Bytes], how: Reading) -> None:
        nbytes = sum([buffer.size for buffer in buffers])
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(self._opened(path))
            past = None
            bypass = not how.shared and nbytes >= PAST_CACHE_MIN_NBYTES
            if bypass and not cached(fd, offset, nbytes):
                past = self._past_cache(path, stack)
            if how.fresh and self._slow_to_touch:
                for buffer in buffers:
                    if buffer.size >= PAST_CACHE_MIN_NBYTES:
                        use_small_pages(buffer)
            touch_s = 0.0  # CPU time, without `check`
            views = [buffer for buffer in buffers if buffer.size]
            first, at, end = 0, offset, offset + nbytes
            while first < len(views):
                step = views[first : first + BUFFERS_PER_CALL]
                if how.check is not None or past is not None:
                    step = list(_first(step, CACHED_NBYTES))
                since = time.thread_time()
                count = 0 if past is None else past.copy(step, at, end)
                count = count or os.preadv(fd, step, at)
                touch_s += time.thread_time() - since
                if count == 0:
                    size = os.fstat(fd).st_size
                    text = (
                        f"the file ends at byte {size}, expected bytes {offset} to {end}; it is "
                        "truncated: use another checkpoint"
                    )
                    raise self._corrupt(path, text, offset=at, expected=end, found=size)
                at += count
                while first < len(views) and count >= views[first].size:
                    count -= views[first].size
                    first += 1
                if count:
                    views[first] = views[first][count:]
                if how.check is not None:
                    how.check(at - offset)
        # A short read is mostly the system call.
        if how.fresh and nbytes >= PAST_CACHE_MIN_NBYTES and touch_s > SLOW_TOUCH_S * nbytes / MIB:
            self._slow_to_touch = True

    def _past_cache(self, path: str, stack: contextlib.ExitStack) -> _PastCache | None:
        """Return a direct reader of the file until `stack` is closed.

        None if the file system refuses direct reads.
        """
        flags = os.O_DIRECT if sys.platform != "darwin" else 0
        try:
            fd = stack.enter_context(self._opened(path, flags))
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            return None
        with allocating(BOUNCE_NBYTES):
            try:
                buffer = self._bounces.pop()
            except IndexError:
                buffer = AnonymousMemory().allocate(BOUNCE_NBYTES)
        stack.callback(self._bounces.append, buffer)
        return _PastCache(fd, buffer)

    async def entries(self, path: str = "", *, max_entries: int) -> list[Entry]:
        """List a directory, or the one file at `path`. As `CheckpointFiles.entries`."""
        with reported("listing", self._full(path)):
            return await self._workers.run(self._entries, path, max_entries)

    def _entries(self, path: str, max_entries: int) -> list[Entry]:
        try:
            fd = self._open_file(path, os.O_DIRECTORY)
        except NotADirectoryError:
            with self._opened(path) as fd:
                return [Entry("", os.fstat(fd).st_size, False)]
        except OSError as error:
            raise self._refused(path, error) from error
        found: list[Entry] = []
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if len(found) == max_entries:
                        text = (
                            f"more than {max_entries} entries; this is not a checkpoint, or a "
                            "hostile one"
                        )
                        raise self._corrupt(path, text, expected=max_entries)
                    is_file = entry.is_file(follow_symlinks=False)
                    nbytes = entry.stat(follow_symlinks=False).st_size if is_file else 0
                    if is_file or entry.is_dir(follow_symlinks=False):
                        found.append(Entry(entry.name, nbytes, not is_file))
        finally:
            os.close(fd)
        return sorted(found)

    def reads(self, wanted: int | None) -> int:
        """Return the reads to keep in flight. As `CheckpointFiles.reads`."""
        return self.capabilities.reads if wanted is None else wanted

    async def changed(self) -> Literal["deleted", "replaced"] | None:
        """Return what happened to the checkpoint's name. As `CheckpointFiles.changed`."""
        with reported("looking at", self.location):
            return await self._workers.run(self._changed)

    def _changed(self) -> Literal["deleted", "replaced"] | None:
        try:
            now = os.stat(self.location)
        except FileNotFoundError:
            return "deleted"
        with self._lock:
            anchor = self._anchor
        if anchor is None:
            return None
        with anchor.use() as fd:
            return None if os.path.samestat(os.fstat(fd), now) else "replaced"

    async def close(self) -> None:
        """Close the checkpoint after its last use. Idempotent."""
        if not self.closed:
            self.closed = True
            with reported("closing", self.location):
                await self._workers.clean_up(self._close)

    def _close(self) -> None:
        with self._lock:
            anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.close()

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int = 0) -> Iterator[int]:
        """Yield the descriptor of a regular file. Threads share it; the last one closes it.

        Errors: as `_open_file`.
        """
        with self._lock:
            shared = None if self.closed else self._shared.get((path, flags))
            if shared is not None:
                shared.users += 1
        if shared is None:
            # Two threads may open a file at once; later ones share the descriptor of the second.
            shared = self._shared[path, flags] = _Shared(self._open_file(path, flags))
        try:
            yield shared.fd
        finally:
            with self._lock:
                shared.users -= 1
                if last := not shared.users:
                    if self._shared.get((path, flags)) is shared:
                        del self._shared[path, flags]
            if last:
                os.close(shared.fd)

    def _open_file(self, path: str, flags: int = 0) -> int:
        """Open a regular file of the checkpoint, or with O_DIRECTORY a directory.

        Raises:
            OSError: with `flags`, the file is of another kind or refuses direct reads.
            AsyncCheckpointError: any other failure; names the file.
        """
        try:
            if path:
                parts = read_parts(path, self.location)
                with self._opened_anchor(is_directory=True).use() as directory:
                    return open_below(directory, parts, flags)
            with self._opened_anchor(is_directory=False).use() as anchor:
                # The user's own path: links are followed.
                fd = os.open(self.location, os.O_RDONLY | os.O_NONBLOCK | flags)
                if not os.path.samestat(os.fstat(fd), os.fstat(anchor)):
                    os.close(fd)
                    raise CheckpointNotFoundError(
                        f"{self.location}: the checkpoint was replaced while being read; "
                        "read it again",
                        location=self.location,
                        found="replaced",
                    )
                return fd if flags & os.O_DIRECTORY else checked_regular(fd)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{self._full(path)}: no such file; there is no checkpoint here, or it was "
                "deleted while it was being read",
                location=self.location,
                found=path,
            ) from error
        except OSError as error:
            if flags:
                raise
            raise self._refused(path, error) from error

    def _refused(self, path: str, error: OSError) -> AsyncCheckpointError:
        # Without a path, ENOTDIR is about a parent directory in the user's own path.
        if error.errno not in _LINK_ERRORS or (not path and error.errno == errno.ENOTDIR):
            return store_error("opening", self._full(path), error)
        text = (
            "expected a regular file that is not reached through a symbolic link, found something "
            f"else ({error.strerror}); links in a checkpoint are not followed"
        )
        return self._corrupt(path, text, expected="a regular file", found=error.strerror)

    def _corrupt(self, path: str, text: str, **facts: Any) -> CorruptCheckpointError:
        """Return the error for a damaged or hostile file; `text` follows its name."""
        text = f"{self._full(path)}: {text}"
        return CorruptCheckpointError(text, file=path, location=self.location, **facts)

    def _opened_anchor(self, *, is_directory: bool) -> Descriptor:
        with self._lock:
            if self.closed:
                raise ClosedError(
                    f"{self.location}: these files were closed; ask the store for them again",
                    location=self.location,
                )
            if self._anchor is None:
                try:
                    # O_NONBLOCK: opening a FIFO would wait for a writer.
                    fd = os.open(self.location, os.O_RDONLY | os.O_NONBLOCK)
                except OSError as error:
                    # What is above it is a file, or it is a socket.
                    if not is_directory or error.errno not in (errno.ENOTDIR, errno.ENXIO):
                        raise
                    raise self._no_directory() from error
                self._anchor = Descriptor(fd)
                self._is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
            if is_directory and not self._is_directory:
                raise self._no_directory()
            return self._anchor

    def _no_directory(self) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"{self.location}: expected a checkpoint directory, found a file",
            location=self.location,
        )

    def _full(self, path: str) -> str:
        return posixpath.join(self.location, path) if path else self.location


@dataclass
class _Shared:
    """A descriptor, and the number of threads that use it."""

    fd: int
    users: int = 1


class _PastCache:
    """Reader of one file past the page cache, for one thread.

    Args:
        fd: the file, opened for direct reads.
        buffer: aligned memory for the reads.
    """

    def __init__(self, fd: int, buffer: Bytes) -> None:
        self._fd = fd
        self._buffer = buffer
        self._begin = self._end = 0  # the range of the file that is in the buffer

    def copy(self, memory: Sequence[Bytes], at: int, end: int) -> int:
        """Fill memory from any offset, by reads up to the page that contains `end`.

        Returns the number of bytes copied: 0 at the end of the file, or if the file system refuses
        direct reads.
        """
        if not self._begin <= at < self._end:
            self._begin = at - at % PAGE_NBYTES
            wanted = -(-end // PAGE_NBYTES) * PAGE_NBYTES - self._begin
            self._end = self._begin + self._read(self._buffer[:wanted], self._begin)
        source = self._buffer[at - self._begin : self._end - self._begin]
        done = 0
        for part in memory:
            there = source[done : done + part.size]
            if there.size < GIL_NBYTES:
                memoryview(part)[: there.size] = there
            else:
                np.copyto(part[: there.size], there)
            done += there.size
        return done

    def _read(self, memory: Bytes, at: int) -> int:
        try:
            return os.preadv(self._fd, [memory], at)
        except OSError as error:
            if error.errno not in NO_DIRECT_IO:
                raise
            return 0


def _first(views: Iterable[Bytes], nbytes: int) -> Iterator[Bytes]:
    """Yield views of the first `nbytes` of the buffers; up to half more, if a buffer ends there."""
    most = nbytes + nbytes // 2
    for view in views:
        if view.size > most:
            if nbytes > 0:
                yield view[:nbytes]
            return
        yield view
        nbytes -= view.size
        most -= view.size
