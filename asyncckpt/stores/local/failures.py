"""Errors of system calls, with the next step, and the guard of the attempts that they end."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncckpt.errors import AsyncCheckpointError, StoreError, UsageError
from asyncckpt.flow.threads import ThreadAbandonedError, Workers

T = TypeVar("T")

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""The file system, or the quota of the user or project, has no space or inodes left."""

_NEXT_STEPS = {
    errno.ENOSPC: "free space or inodes, or save elsewhere",
    errno.EDQUOT: "the quota is used up: remove files or raise it",
    errno.EFBIG: "the file is larger than this file system or the process's limit allows; "
    "lower target_data_file_nbytes or raise the limit (ulimit -f)",
    errno.EROFS: "the file system is mounted read-only: save elsewhere or remount it",
    errno.EACCES: "permission denied: check the owner and mode of the directory",
    errno.EPERM: "permission denied: check the owner and mode of the directory",
    errno.EIO: "the device reported an error: check the disk and the kernel log, "
    "and do not trust this attempt",
    errno.EBUSY: "if a file system is mounted on it or below it, unmount that, then try again",
    errno.EMFILE: "too many open files in this process: raise its limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ESTALE: "the network file system no longer has the file: check the mount",
    errno.ENOMEM: "the system is out of memory: lower host_memory_nbytes",
    errno.ENOTDIR: "a part of the path is a file, or a symbolic link that is dangling or not "
    "followed, and not a directory",
    errno.ENOENT: "the directory is gone: it was removed, or another process took over",
    errno.EXDEV: "the system cannot move a checkpoint between these directories: one is a mount "
    "point, has another project quota, or is in a lower layer of an overlay; keep the whole root "
    "in one file system, or delete the step before you save it again",
}

# All other errors need a change (space, permissions, a new disk) before a retry can succeed.
_RETRYABLE = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


def store_error(action: str, path: str, error: OSError) -> StoreError:
    """Return the `StoreError` for a failed system call: place, action, reason, next step."""
    number = error.errno or 0
    name = errno.errorcode.get(number, type(error).__name__)
    text = f"{path}: {action} failed: {error.strerror or error} ({name})"
    at = error.filename
    if isinstance(at, str) and os.path.isabs(at) and at != path:
        text += f" at {at}"
    if number == errno.ENOSPC:
        text += _free(path)
    text += f"; {_NEXT_STEPS.get(number, 'check the file system and try again')}"
    return StoreError(text, retryable=number in _RETRYABLE, location=path, found=name)


@contextlib.contextmanager
def reported(action: str, path: str) -> Iterator[None]:
    """Turn an `OSError` into a `StoreError` that names action and path.

    Add the path to a `ThreadAbandonedError`.
    """
    try:
        yield
    except OSError as error:
        raise store_error(action, path, error) from error
    except ThreadAbandonedError as error:
        if error.location is None:
            error.location, error.args = path, (f"{path}: {error}",)
        raise


class Guard:
    """State that an attempt shares with its data files: threads, and the failure that ends all.

    Attributes:
        location: of the future checkpoint.
        workers: threads for every blocking call.
        error: the first failure; every later call raises it.
        stuck: calls of abandoned threads, which may still run.
        ended: whether the attempt was published or aborted.
    """

    def __init__(self, location: str, workers: Workers) -> None:
        self.location = location
        self.workers = workers
        self.error: AsyncCheckpointError | None = None
        self.stuck: list[Future[Any]] = []
        self.ended = False
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise the first failure, or `UsageError` if the attempt has ended."""
        if self.error is not None:
            raise self.error
        if self.ended:
            raise UsageError(f"{self.location}: this attempt has ended", location=self.location)

    @contextlib.contextmanager
    def step(self, action: str = "", path: str = "") -> Iterator[None]:
        """End the attempt if the block fails; otherwise as `reported`.

        Also used in the failing thread, because its caller may have been cancelled.
        """
        try:
            with reported(action, path or self.location):
                yield
        except AsyncCheckpointError as error:
            with self._lock:
                self.error = self.error or error
                if isinstance(error, ThreadAbandonedError) and error.future not in self.stuck:
                    self.stuck.append(error.future)
            raise

    async def run(self, call: Callable[..., T], *args: Any, path: str) -> T:
        """Make a call about `path` in a worker thread. As `Workers.run`."""
        with self.step(path=path):
            return await self.workers.run(call, *args)


def _free(path: str) -> str:
    while path != "/" and not os.path.lexists(path):
        path = os.path.dirname(path) or "/"
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    if found.f_files and not found.f_favail:  # without an inode limit, both are 0
        return ", no inodes are free: there are too many files"
    return f", {found.f_bavail * found.f_frsize} bytes are free"
