"""System calls that Python's `os` lacks or does not offer in this form. All functions block."""

# Rule 1: a failed flush is reported and never repeated: the kernel may have dropped the pages, and
#   a second call would report success.
#   (test_a_failed_flush_of_a_data_file_is_not_repeated_and_ends_the_attempt)
# Rule 2: a descriptor is closed after its last use, never during one, when its number could be
#   reused for another file. (test_closing_waits_for_nobody_and_pulls_no_descriptor_away)

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

if sys.platform != "win32":
    import fcntl

PAGE_NBYTES = max(4096, mmap.PAGESIZE)
"""Unit of direct I/O: at least a page of the page cache, so that no page is written both directly
and through the cache."""

DIRECT_MIN_NBYTES = 64 << 10
"""Smaller direct writes cost more than the copy into the page cache that they save."""

NO_DIRECT_IO = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP))
"""Errors of file systems without direct I/O."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 4 if sys.platform == "darwin" else 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class UnsupportedCallError(Exception):
    """The system or file system does not offer this call; nothing was done."""


class Descriptor:
    """A file descriptor shared by threads and closed after its last use."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._users = 1
        self._open = True
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Yield the number, valid inside the block.

        Raises:
            OSError: EBADF, it was closed.
        """
        with self._lock:
            if not self._open:
                raise OSError(errno.EBADF, "the file was closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            self._release()

    def close(self) -> None:
        """Refuse new users and close the descriptor after the current ones. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._release()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            os.close(self._fd)


@contextlib.contextmanager
def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Iterator[int]:
    """Yield a descriptor from `os.open`; close it after the block."""
    fd = os.open(path, flags, mode, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------------- rename


def rename_noreplace(source: str, target: str) -> None:
    """Rename `source` to `target`, atomically.

    Raises:
        FileExistsError: `target` exists.
        UnsupportedCallError: the file system lacks this operation.
    """
    _rename(source, target, _RENAME_NOREPLACE)


def rename_exchange(source: str, target: str) -> None:
    """Exchange `source` and `target` atomically. Errors: as `rename_noreplace`."""
    _rename(source, target, _RENAME_EXCHANGE)


def landed(rename: Callable[[str, str], None], source: str, target: str) -> None:
    """Call `rename(source, target)`; ignore an error if the rename took effect.

    Network file systems may report an error for a call that they have carried out.

    Raises:
        FileExistsError, UnsupportedCallError, OSError: nothing was renamed.
    """
    before = os.lstat(source)
    try:
        rename(source, target)
    except OSError:
        with contextlib.suppress(OSError):
            if os.path.samestat(before, os.lstat(target)):
                return
        raise


def _rename(source: str, target: str, flags: int) -> None:
    name, at = ("renamex_np", ()) if sys.platform == "darwin" else ("renameat2", (_AT_FDCWD,))
    function = _c_function(name)
    if function is None:
        raise UnsupportedCallError(name)
    old, new = os.fsencode(source), os.fsencode(target)
    while function(*at, old, *at, new, ctypes.c_uint(flags)) != 0:
        number = ctypes.get_errno()
        if number in _UNSUPPORTED:
            raise UnsupportedCallError(name)
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), source, None, target)


@functools.cache
def _c_function(name: str, *, keeps_gil: bool = False) -> Any:
    library = ctypes.PyDLL(None) if keeps_gil else ctypes.CDLL(None, use_errno=True)
    return getattr(library, name, None)


# -------------------------------------------------------------------------------- flush and write


def flush_file(fd: int) -> None:
    """Make the data and length of the file survive power loss."""
    if sys.platform != "darwin":
        os.fdatasync(fd)
        return
    try:
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync stops at the drive's cache
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        os.fsync(fd)


def flush_directory(path: str, *, dir_fd: int | None = None) -> None:
    """Make the names in the directory survive power loss."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=dir_fd) as fd:
        if sys.platform == "darwin":
            flush_file(fd)
        else:
            os.fsync(fd)


def make_directories(path: str, mode: int) -> None:
    """Make the directory and its missing parents, durably."""
    missing = []
    at = path
    while not os.path.isdir(at):
        missing.append(at)
        if (parent := os.path.dirname(at)) == at:
            break
        at = parent
    for new in reversed(missing):
        try:
            os.mkdir(new, mode)
        except FileExistsError:
            if not os.path.isdir(new):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", new) from None
        # Also for another process's directory, which it may not have flushed yet.
        flush_directory(os.path.dirname(new))


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve blocks for `nbytes`, if the file system can.

    Parallel direct writes then neither allocate blocks nor extend the file, which ext4 and xfs
    serialise. Not libc's `posix_fallocate`, which writes every block where this is unsupported. The
    writes report a full disk, as `nbytes` is only an expectation.
    """
    function = None if sys.platform == "darwin" else _c_function("fallocate")
    if function is None or nbytes <= 0:
        return
    if function(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)  # frees blocks reserved before the failure


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in as many calls as the system needs."""
    while len(data):
        written = os.pwrite(fd, data, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        data = data[written:]
        offset += written


# -------------------------------------------------------------------------------- read and remove


def open_below(directory: int, parts: tuple[str, ...], flags: int = 0) -> int:
    """Open a regular file below `directory`, or with O_DIRECTORY a directory; follow no link.

    Raises:
        FileNotFoundError: a part does not exist.
        OSError: ELOOP or ENOTDIR, a part is a link or not a directory; EINVAL, not a regular file.
    """
    at = directory
    try:
        for part in parts[:-1]:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            if at != directory:
                os.close(at)
            at = child
        # O_NONBLOCK: opening a FIFO would wait for a writer.
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=at)
    finally:
        if at != directory:
            os.close(at)
    return fd if flags & os.O_DIRECTORY else checked_regular(fd)


def open_regular(path: str, *, dir_fd: int | None = None) -> int:
    """Open a regular file for reading, without following a link. Errors: as `checked_regular`."""
    # O_NONBLOCK: opening a FIFO would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    return checked_regular(os.open(path, flags, dir_fd=dir_fd))


def checked_regular(fd: int) -> int:
    """Return the descriptor of a regular file; close any other and raise EINVAL."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def read_at_most(fd: int, nbytes: int) -> bytes | int:
    """Return the content of an open file, or its size if that exceeds `nbytes`; close it."""
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        # Python allocates the requested size before it reads. One byte more, as the file may grow.
        data = file.read(size + 1) if size <= nbytes else b""
    size = max(size, len(data))
    return size if size > nbytes else data


def names_in(path: str) -> list[str]:
    """Return the names in a directory, sorted.

    Raises:
        NotADirectoryError: it is a file, or a link, which could lead to other people's files.
    """
    if os.path.islink(path):
        raise NotADirectoryError(errno.ENOTDIR, "a symbolic link is not followed here", path)
    return sorted(os.listdir(path))


def listing(path: str) -> list[str]:
    """Return the names in a directory, sorted; empty if it is a link or cannot be listed."""
    try:
        return names_in(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


CACHED_SAMPLES = 16
"""Pages of a range of which `cached` asks the kernel."""


def cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return whether at least half of a sample of the range's pages is in the page cache.

    True if the kernel does not tell (another user's file, another system).
    """
    nbytes += offset % mmap.PAGESIZE
    offset -= offset % mmap.PAGESIZE
    if sys.platform == "darwin":
        return True
    # `mincore` takes a microsecond; threads that copy and check would wait a hundred times as long
    # to get the GIL back. For another user's file, the kernel may ask a file server for permission.
    own = os.fstat(fd).st_uid == os.geteuid()
    mincore = _c_function("mincore", keeps_gil=own)
    if mincore is None:
        return True
    try:
        region = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
    except (OSError, ValueError):
        return True
    # Asking for every page would cost a third of the time of a read from the cache.
    step = max(nbytes // CACHED_SAMPLES // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    found: list[int] = []
    state = ctypes.c_ubyte()
    # The array must not outlive this line: a mapping with live views cannot be closed.
    address = int(np.frombuffer(region, dtype=np.uint8).ctypes.data)
    try:
        for at in range(0, nbytes, step):
            if mincore(ctypes.c_void_p(address + at), ctypes.c_size_t(1), ctypes.byref(state)) != 0:
                return True
            found.append(state.value & 1)
    finally:
        region.close()
    return sum(found) * 2 >= len(found)


def use_small_pages(memory: np.ndarray[Any, Any]) -> None:
    """Use small pages for the untouched pages of a buffer, if the system can.

    Also for the rest of its first and last page, so that neighbours stay one kernel mapping: their
    number is limited.
    """
    madvise = None if sys.platform == "darwin" else _c_function("madvise")
    first = int(memory.__array_interface__["data"][0])
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = -(-(first + memory.nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    if madvise is not None and hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Only advice: without it, touching is merely slow.
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_NOHUGEPAGE)


def remove_file(path: str, *, dir_fd: int | None = None) -> None:
    """Remove a file or link, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=dir_fd)


def remove_tree(path: str, *, first: str | None = None, dir_fd: int | None = None) -> None:
    """Remove everything at `path`, following no links. Other processes may be removing it too.

    Args:
        path: a file, link or directory.
        first: name of an entry of `path` to remove first.
        dir_fd: directory that `path` is relative to.

    Raises:
        OSError: something cannot be removed; EBUSY, a file system is mounted on a directory.
    """
    try:
        # First, because only `rmdir` detects every mount point, before anything on it is removed.
        os.rmdir(path, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        remove_file(path, dir_fd=dir_fd)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    with contextlib.suppress(FileNotFoundError):
        with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd) as fd:
            for name in sorted(os.listdir(fd), key=lambda name: name != first):
                remove_tree(name, dir_fd=fd)
        os.rmdir(path, dir_fd=dir_fd)
