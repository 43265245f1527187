"""Shared attempts: owner files of the processes, the mark, and passed-on files.

Each process, including process 0, has `<attempt>.owner-<p>`. It keeps the file locked while it may
write and then removes it.
"""

# Rule 1: a process that joins reads the mark, makes its owner file and reads the mark again. A
#   process that removes the attempt removes the mark before it looks for owner files. In every
#   interleaving, one sees the other.
#   (test_a_process_that_joins_while_the_attempt_is_removed_notices_it)
# Rule 2: a process that aborts removes its own owner file before it looks for others, so the last
#   of several finds none and removes the rest. Looking takes shared locks, so two processes that
#   look at the same time do not take each other for an owner.
#   (test_a_process_that_looks_for_owners_is_not_taken_for_one)
# Rule 3: `<attempt>.owner` is removed last: until then, a sweep can prove the directory dead even
#   if its remover was killed. (tests/stores/local/test_shared_kills.py)
# Rule 4: only process 0 publishes. Once it is dead, nothing in the attempt can become visible, so
#   removing the attempt costs the others an error, never data.

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from asyncckpt.errors import UsageError
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.exchange import MARK, MARK_NBYTES, is_mark_of
from asyncckpt.stores.local.locks import (
    Machine,
    Owner,
    Terms,
    fill_owner,
    leads_to,
    parse_owner,
    remove_owner,
    try_lock,
    unlock,
)
from asyncckpt.stores.local.posix import (
    open_regular,
    opened,
    read_at_most,
    remove_file,
    remove_tree,
    write_all,
)
from asyncckpt.stores.paths import CONTROL, OWNER_SUFFIX

EXCHANGE = f"{CONTROL}-exchange"
"""Directory in an attempt for the mark and passed-on files."""

_PROCESS = re.compile(rf"(.+){re.escape(OWNER_SUFFIX)}-[0-9]{{1,9}}", re.DOTALL)


class OwnerFile:
    """The locked owner file of this process. Made by `make_owner_file`."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd

    def drop(self) -> None:
        """Remove the owner file unless another file has its name. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if leads_to(self._path, fd):
                remove_file(self._path)
        finally:
            unlock(fd)
            os.close(fd)


def make_owner_file(attempt: str, process: int, machine: Machine, terms: Terms) -> OwnerFile | None:
    """Make and lock the owner file of a process; return None if it was swept meanwhile.

    Raises:
        UsageError: this process already has one.
    """
    path = f"{attempt}{OWNER_SUFFIX}-{process}"
    try:
        # NFS locks only files that are open for writing.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, terms.file_mode)
    except FileExistsError:
        raise UsageError(
            f"{path}: process {process} has already joined this attempt; give every process its "
            "own number, and let each join once",
            location=path,
            found=process,
        ) from None
    owner_file = OwnerFile(path, fd)
    with contextlib.ExitStack() as undo:
        undo.callback(owner_file.drop)
        if try_lock(fd) is not False and leads_to(path, fd):
            fill_owner(fd, machine, terms)
            undo.pop_all()
            return owner_file
    return None


def owned_by_process(path: str) -> str | None:
    """Return the attempt that a per-process owner file belongs to; None for other paths."""
    match = _PROCESS.fullmatch(path)
    return match[1] if match else None


def owner_files(attempt: str) -> Iterator[str]:
    """Yield the paths of an attempt's per-process owner files."""
    epoch, name = os.path.split(attempt)
    try:
        found = os.listdir(epoch)
    except FileNotFoundError:
        return
    yield from (os.path.join(epoch, this) for this in found if owned_by_process(this) == name)


def is_abandoned(attempt: str, directory: int, machine: Machine, root: str) -> bool:
    """Return whether all processes with an owner file are proven dead; if so, prevent joining.

    `directory` is a descriptor of the attempt.
    """
    if any(not _is_dead(path, machine, root) for path in owner_files(attempt)):
        return False
    remove_file(f"{EXCHANGE}/{MARK}", dir_fd=directory)
    return all(_is_dead(path, machine, root) for path in owner_files(attempt))


def remove_attempt(attempt: str) -> None:
    """Remove an attempt and its owner files. Other processes may be removing it too."""
    remove_tree(attempt, first=RECORD_NAME)
    for path in owner_files(attempt):
        remove_file(path)
    remove_owner(attempt)


def remove_dead_owner_files(attempt: str, machine: Machine, root: str) -> None:
    """Remove the owner files of dead processes of an attempt without a directory."""
    for path in owner_files(attempt):
        if _is_dead(path, machine, root):
            remove_file(path)


def is_locked(path: str) -> bool:
    """Return whether a process holds the lock of an owner file; False without locks."""
    return _look(path)[0] is False


def _is_dead(path: str, machine: Machine, root: str) -> bool:
    free, owner = _look(path)
    # A torn file: its process was killed while writing it, or will read the mark again.
    return free is True if owner is None else owner.is_dead(machine, free, root)


def _look(path: str) -> tuple[bool | None, Owner | None]:
    """Return whether the lock of an owner file is free (None without locks), and its owner."""
    try:
        with opened(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            try:
                return try_lock(fd, shared=True), parse_owner(fd)
            finally:
                unlock(fd)
    except FileNotFoundError:  # its process has ended
        return True, None
    except OSError:  # another user's file: its process may be alive
        return False, None


# ------------------------------------------------------------------------------------- exchange


def write_exchange(directory: int, name: str, data: memoryview, mode: int) -> None:
    """Write a file for the other processes, atomically but not durably."""
    aside = f"{EXCHANGE}/.{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with opened(aside, flags, mode, dir_fd=directory) as fd:
        write_all(fd, data, 0)
    os.rename(aside, f"{EXCHANGE}/{name}", src_dir_fd=directory, dst_dir_fd=directory)


def read_exchange(directory: int, name: str, max_nbytes: int) -> bytes | int | None:
    """Return a passed-on file, its size if above `max_nbytes`, or None if it is absent."""
    try:
        return read_at_most(open_regular(f"{EXCHANGE}/{name}", dir_fd=directory), max_nbytes)
    except FileNotFoundError:
        return None


def has_mark(directory: int, save_id: str) -> bool:
    """Return whether the attempt in this directory can be joined."""
    found = read_exchange(directory, MARK, MARK_NBYTES)
    return isinstance(found, bytes) and is_mark_of(save_id, found)
