"""Who owns a directory below the root, and whether the owner is still alive."""

# Rule 1: a lock is `flock` on a descriptor of our own, so that it ends with the process, and is
#   released explicitly, because a forked child holds a copy of the descriptor.
# Rule 2: holding a lock means nothing until the path is seen to lead to what was locked.

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncckpt.errors import StoreError
from asyncckpt.stores.layout import OWNER_SUFFIX, Layout
from asyncckpt.stores.posix import make_directories, write_all

if sys.platform != "win32":
    import fcntl

LOCK_DEADLINE_S = 30.0
"""How long a replacement or deletion waits for another one of the same root; each holds the lock
for a few renames and flushes."""

LOCK_POLL_S = 0.005

MAX_OWNER_NBYTES = 4096

_UNSUPPORTED = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine this process runs on, and which of its boots.

    Attributes:
        host: host name, with the machine id where there is one.
        boot_id: another one after every boot; empty when the system does not tell.
    """

    host: str
    boot_id: str


def this_machine() -> Machine:
    """The machine this process runs on."""
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
class Owner:
    """What the owner file beside a directory says."""

    host: str
    boot_id: str
    pid: int
    created_ns: int
    name: str
    save_id: str


def write_owner(path: str, machine: Machine, name: str, save_id: str, mode: int) -> None:
    """`<path>.owner` is new, durable and says that this process owns `path`."""
    owner = Owner(machine.host, machine.boot_id, os.getpid(), time.time_ns(), name, save_id)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    fd = os.open(path + OWNER_SUFFIX, flags, mode)
    try:
        write_all(fd, memoryview(json.dumps(asdict(owner)).encode()), 0)
        # After power loss an empty file would prove nothing, and the leftover would stay for good.
        os.fsync(fd)
    finally:
        os.close(fd)


def read_owner(path: str) -> Owner | None:
    """The owner of the directory, or None when the owner file is missing or not one."""
    try:
        fd = os.open(path + OWNER_SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        value = json.loads(os.read(fd, MAX_OWNER_NBYTES))
        owner = Owner(**{key: value[key] for key in Owner.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(fd)
    texts = (owner.host, owner.boot_id, owner.name, owner.save_id)
    return owner if all(isinstance(text, str) for text in texts) else None


def remove_owner(path: str) -> None:
    """There is no owner file beside `path`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + OWNER_SUFFIX)


def try_lock(fd: int) -> bool | None:
    """Whether this descriptor holds the lock now; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def unlock(fd: int) -> None:
    """The lock is free, also if a forked child has a copy of the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def leads_to(path: str, fd: int) -> bool:
    """Whether `path` still is what was opened as `fd`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def root_lock(layout: Layout, *, wait_s: float = LOCK_DEADLINE_S) -> Iterator[bool]:
    """Nobody else replaces, deletes or sweeps below this root while the block runs.

    Gives False where the file system has no locks. An ordinary publication, onto a free name, does
    not need it.

    Raises:
        StoreError: another process has held it for `wait_s`.
        OSError: the lock file cannot be made.
    """
    end = time.monotonic() + wait_s
    while True:
        make_directories(layout.control, 0o777)
        try:
            fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # another store has just tidied up
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
                f"here for {wait_s:.0f} s; wait for it, or end it if it is stopped",
                retryable=True,
                location=layout.lock,
            )
        if not held:
            time.sleep(LOCK_POLL_S)
