"""Errors of system calls, with their meaning and the next step."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from asyncckpt.errors import StoreError

_NEXT_STEPS = {
    errno.ENOSPC: "free space or save elsewhere",
    errno.EDQUOT: "the quota is used up: remove files or raise it",
    errno.EFBIG: "the file is larger than this file system or the process's limit allows; "
    "lower target_data_file_nbytes or raise the limit (ulimit -f)",
    errno.EROFS: "the file system is mounted read-only: save elsewhere or remount it",
    errno.EACCES: "permission denied: check the owner and mode of the directory",
    errno.EPERM: "permission denied: check the owner and mode of the directory",
    errno.EIO: "the device reported an error: check the disk and the kernel log, "
    "and do not trust this attempt",
    errno.EMFILE: "too many open files in this process: raise its limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.ESTALE: "the network file system no longer has the file: check the mount",
    errno.ENOMEM: "the system is out of memory: lower host_memory_nbytes",
    errno.ENOTDIR: "a part of the path is a file and not a directory",
    errno.ENOENT: "the directory is gone: it was removed, or another process took over",
    errno.EXDEV: "the checkpoint's name is a mount point: use its parent as root of another store",
}

# Others need a change (space, rights, a new disk) before the same call can work.
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
    """Return the `StoreError` for a failed system call: where, what, the reason, what next."""
    number = error.errno or 0
    name = errno.errorcode.get(number, type(error).__name__)
    text = f"{path}: {action} failed: {error.strerror or error} ({name})"
    if number == errno.ENOSPC and (free := _free_nbytes(path)) is not None:
        text += f", {free} bytes are free"
    text += f"; {_NEXT_STEPS.get(number, 'check the file system and try again')}"
    return StoreError(text, retryable=number in _RETRYABLE, location=path, found=name)


@contextlib.contextmanager
def reported(action: str, path: str) -> Iterator[None]:
    """Turn an `OSError` inside into a `StoreError` that names the action and the path."""
    try:
        yield
    except OSError as error:
        raise store_error(action, path, error) from error


def _free_nbytes(path: str) -> int | None:
    while path:
        try:
            found = os.statvfs(path)
        except FileNotFoundError:
            if path == (path := os.path.dirname(path)):
                return None
        except OSError:
            return None
        else:
            return found.f_bavail * found.f_frsize
    return None
