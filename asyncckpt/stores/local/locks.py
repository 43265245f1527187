"""Owners of directories below the root, and the locks that prove them alive."""

# Rule 1: a lock is `flock` on this process's own descriptor, so it ends with the process. It is
#   also released explicitly, because a forked child holds a copy of the descriptor.
# Rule 2: a lock counts only once the path is seen to lead to the locked file: the path may have
#   been renamed or made anew between open and lock.

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncckpt.errors import StoreError
from asyncckpt.stores.local.posix import make_directories, opened, remove_file, write_all
from asyncckpt.stores.paths import OWNER_SUFFIX, Layout

if sys.platform != "win32":
    import fcntl

LOCK_DEADLINE_S = 30.0
"""How long a replacement or deletion, which is a few renames and flushes, waits for another one."""

LOCK_POLL_S = 0.005

MAX_OWNER_NBYTES = 4096

LOCAL_FILE_SYSTEMS = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)
"""File systems that only one kernel can mount at a time. The upper layer of an overlay cannot be
NFS and must not be changed by others."""

_UNSUPPORTED = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and one of its boots.

    Attributes:
        host: host name, with the machine id if there is one.
        boot_id: new at every boot; empty if the system has none.
    """

    host: str
    boot_id: str


def this_machine() -> Machine:
    """Return the machine this process runs on."""
    host = socket.gethostname()
    if machine_id := _first_line("/etc/machine-id"):
        host = f"{host}/{machine_id}"
    return Machine(host, _first_line("/proc/sys/kernel/random/boot_id"))


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace").strip()[:200]
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Terms:
    """Arguments of `Store.begin` for an attempt."""

    name: str
    save_id: str
    epoch: int = 0
    overwrite: bool = False
    private: bool = False

    @property
    def file_mode(self) -> int:
        """Mode of created files, before the umask."""
        return 0o600 if self.private else 0o666

    @property
    def directory_mode(self) -> int:
        """Mode of created directories, before the umask."""
        return 0o700 if self.private else 0o777


@dataclass(frozen=True, slots=True)
class Owner:
    """The fields of an owner file that the library uses; the others are for people."""

    machine: Machine
    name: str

    def is_dead(self, machine: Machine, locked: bool | None, root: str) -> bool:
        """Return whether the owner is proven dead, as defined in stores/local/sweep.py. Blocking.

        Args:
            machine: where this process runs.
            locked: whether this process just took the owner's lock; None without locks.
            root: of the store.
        """
        if self.machine == machine:
            return locked is True  # one kernel, whose locks reach all its processes
        if "" in (self.machine.boot_id, machine.boot_id) or not is_certainly_local(root):
            return False
        if self.machine.boot_id == machine.boot_id:
            return locked is True  # two containers on one kernel, whose locks have no namespaces
        return locked is not False and self.machine.host == machine.host  # rebooted


def write_owner(path: str, machine: Machine, terms: Terms) -> None:
    """Write `<path>.owner`, which makes this process the owner of `path`, durably."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(path + OWNER_SUFFIX, flags, terms.file_mode) as fd:
        fill_owner(fd, machine, terms)


def fill_owner(fd: int, machine: Machine, terms: Terms) -> None:
    """Write the content of this process's owner file, durably."""
    text = json.dumps(
        {
            "host": machine.host,
            "boot_id": machine.boot_id,
            "pid": os.getpid(),
            "created_ns": time.time_ns(),
            "name": terms.name,
            "save_id": terms.save_id,
        }
    )
    write_all(fd, memoryview(text.encode()), 0)
    # After power loss, an empty file would prove nothing and the leftover would stay for ever.
    os.fsync(fd)


def read_owner(path: str) -> Owner | None:
    """Return the owner of the directory; None if the owner file is missing or invalid."""
    with contextlib.suppress(OSError):
        with opened(path + OWNER_SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            return parse_owner(fd)
    return None


def parse_owner(fd: int) -> Owner | None:
    """Return the owner named by an owner file; None if the file is invalid."""
    try:
        value = json.loads(os.pread(fd, MAX_OWNER_NBYTES, 0))
        host, boot_id, name = value["host"], value["boot_id"], value["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    are_texts = all(isinstance(text, str) for text in (host, boot_id, name))
    return Owner(Machine(host, boot_id), name) if are_texts else None


def remove_owner(path: str) -> None:
    """Remove the owner file of `path`, if there is one."""
    remove_file(path + OWNER_SUFFIX)


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Try to lock the file or directory; return whether that succeeded, None without locks.

    A `shared` lock tests for an owner without being mistaken for one.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def unlock(fd: int) -> None:
    """Release the lock, even if a forked child has a copy of the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def leads_to(path: str, fd: int) -> bool:
    """Return whether `path` is still the file or directory opened as `fd`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def is_certainly_local(path: str) -> bool:
    """Return whether only this machine can use the path's file system. Blocking."""
    try:
        mounts = Path("/proc/self/mounts").read_bytes()
    except OSError:
        return False
    path, best, kind = os.path.realpath(path), "", ""
    for line in mounts.split(b"\n")[:-1]:  # names may contain other line breaks
        _, point, found, *_ = os.fsdecode(line).split(" ")
        for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            point = point.replace(code, character)
        # Of several mounts on one directory, the last is visible.
        if len(point) >= len(best) and os.path.commonpath((point, path)) == point:
            best, kind = point, found
    return kind in LOCAL_FILE_SYSTEMS


@contextlib.contextmanager
def root_lock(layout: Layout, *, wait_s: float = LOCK_DEADLINE_S) -> Iterator[bool]:
    """Exclude replacing, deleting and sweeping by others below this root during the block.

    Yields False if the file system has no locks. Publishing onto a free name needs no lock.

    Raises:
        StoreError: another process held it for `wait_s`.
        OSError: the lock file cannot be made.
    """
    end = time.monotonic() + wait_s
    while True:
        make_directories(layout.control, 0o777)
        try:
            fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # another store has just removed the empty directory
        held: bool | None = False
        try:
            held = try_lock(fd)
            if held is None or (held and leads_to(layout.lock, fd)):
                yield held is not None
                return
        finally:
            if held:
                unlock(fd)
            os.close(fd)
        if not held and time.monotonic() >= end:
            raise StoreError(
                f"{layout.lock}: another process has been replacing or deleting a checkpoint "
                f"here for {wait_s:.0f} s; wait for it, or kill it if it is stopped",
                retryable=True,
                location=layout.lock,
            )
        if not held:
            time.sleep(LOCK_POLL_S)
