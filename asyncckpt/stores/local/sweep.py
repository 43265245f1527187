"""Removing what dead saves and deletions have left, and only what can be proven dead.

Proven dead: the owner file names this host, and the lock is free. Where the file system has no
locks, the owner file must name an earlier boot of this host. Everything else is kept for a person
to remove; so are `aside-…` directories, which were never ours.
"""

# Rule 1: a lock that is held keeps its directory, whatever the owner file says.
# Rule 2: a directory without a readable owner file may be one that is just being made: it goes
#   only if it is empty, which its maker notices (see `LocalAttempt.open`).
# Rule 3: renames of the root are flushed before bytes are removed, so that power loss cannot
#   bring back a name whose files are gone.

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from asyncckpt.errors import StoreError, UsageError
from asyncckpt.stores.layout import OWNER_SUFFIX, RECORD_FILE, Layout, check_name
from asyncckpt.stores.locks import (
    Machine,
    leads_to,
    read_owner,
    remove_owner,
    root_lock,
    try_lock,
    unlock,
)
from asyncckpt.stores.posix import (
    UnsupportedCallError,
    flush_directory,
    landed,
    remove_tree,
    rename_noreplace,
)

log = logging.getLogger("asyncckpt.stores")

_EPOCH = re.compile(r"epoch-[0-9]+")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Claim:
    """A leftover whose lock this process holds by `fd`."""

    path: str
    fd: int


def sweep(layout: Layout, machine: Machine) -> list[str]:
    """What can be proven dead below this root is gone; returns its names. Blocking.

    Returns without doing anything while another process replaces, deletes or sweeps here, and
    where this process may not write.

    Raises:
        OSError: removing failed.
    """
    if not any(True for _ in _leftovers(layout)):
        return []
    removed: list[str] = []
    claims: list[Claim] = []
    try:
        with root_lock(layout, wait_s=0.0) as alone:
            for path in list(_leftovers(layout)):
                claim = _claim(layout, machine, path, removed, alone)
                if claim is not None:
                    claims.append(claim)
            if claims:
                flush_directory(layout.root)
                flush_directory(layout.control)
        for claim in claims:
            remove_tree(claim.path, first=RECORD_FILE)
            remove_owner(claim.path)
            removed.append(os.path.relpath(claim.path, layout.control))
    except StoreError:
        return []  # the lock is held
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
    finally:
        for claim in claims:
            unlock(claim.fd)
            os.close(claim.fd)
    return removed


def collect(layout: Layout, older_than_s: float, *, dry_run: bool) -> list[str]:
    """Leftovers in which nothing was written for so long are gone; returns their names. Blocking.

    It need not be proven that they are dead: whoever asks for this says so. What is locked on this
    host, or by whatever shares its locks, is alive and stays.

    Raises:
        OSError: removing failed.
        StoreError: another process replaces or deletes here.
    """
    if not any(True for _ in _leftovers(layout)):
        return []
    found: list[str] = []
    with root_lock(layout):
        for path in list(_leftovers(layout)):
            if time.time() - _written_s(path) < older_than_s:
                continue
            if _discard(layout, path, dry_run=dry_run):
                found.append(os.path.relpath(path, layout.control))
    return found


def _discard(layout: Layout, path: str, *, dry_run: bool) -> bool:
    """Whether the leftover is nobody's and (but for `dry_run`) gone.

    A checkpoint that was being replaced, and whose successor never arrived, is put back instead.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not dry_run:
            remove_owner(path)  # an owner file whose directory is gone
        return True
    except NotADirectoryError:
        return False  # nothing that we make
    try:
        if try_lock(fd) is False or not leads_to(path, fd):
            return False
        if os.path.basename(path).startswith("old-"):
            owner = read_owner(path)
            if owner is None:
                return False  # nobody knows whether it is the only one of its name
            if not _is_replaced(layout, owner.name):
                if not dry_run:
                    _put_back(layout, path, owner.name)
                return False
        if not dry_run:
            remove_tree(path, first=RECORD_FILE)
            remove_owner(path)
        return True
    finally:
        unlock(fd)
        os.close(fd)


def _is_replaced(layout: Layout, name: str) -> bool:
    with contextlib.suppress(UsageError):
        return os.path.lexists(layout.target(check_name(name)))
    return False


def _written_s(path: str) -> float:
    """When something in the leftover was last written, in seconds since 1970; now if unknown."""
    newest = 0.0
    for top in (path, path + OWNER_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, os.lstat(top).st_mtime)
    for directory, _, names in os.walk(path):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime)
    return newest or time.time()


def tidy(layout: Layout) -> None:
    """Directories of ours that hold nothing are gone, unless somebody uses them. Blocking."""
    with contextlib.suppress(OSError, StoreError):
        for name in os.listdir(layout.control):
            if _EPOCH.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(layout.control, name))
        left = os.listdir(layout.control)
        if left == [os.path.basename(layout.lock)]:
            with root_lock(layout, wait_s=0.0):
                if os.listdir(layout.control) == left:
                    os.unlink(layout.lock)
        if len(left) <= 1:
            os.rmdir(layout.control)


def _leftovers(layout: Layout) -> Iterator[str]:
    """Paths of attempts, of trash and of replaced checkpoints, alive or not."""
    for name in _listing(layout.control):
        path = os.path.join(layout.control, name)
        if _EPOCH.fullmatch(name):
            for attempt in _listing(path):
                yield from _subject(os.path.join(path, attempt))
        elif name.startswith(("trash-", "old-")):
            yield from _subject(path)


def _subject(path: str) -> Iterator[str]:
    if not path.endswith(OWNER_SUFFIX):
        yield path
    elif not os.path.lexists(path.removesuffix(OWNER_SUFFIX)):
        yield path.removesuffix(OWNER_SUFFIX)  # an owner file whose directory is gone


def _listing(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _claim(
    layout: Layout, machine: Machine, path: str, removed: list[str], alone: bool
) -> Claim | None:
    owner = read_owner(path)
    ours = owner is not None and owner.host == machine.host
    is_old = os.path.basename(path).startswith("old-")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        # A torn owner file: whoever writes one before its directory does so under the root's lock.
        if ours or (owner is None and alone):
            remove_owner(path)
        return None
    except OSError:
        return None  # not a directory: nothing that we make
    claimed = False
    try:
        locked = try_lock(fd)
        if locked is False or not leads_to(path, fd):
            return None
        if owner is None:
            if locked:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(path)
                    remove_owner(path)
                    removed.append(os.path.relpath(path, layout.control))
            return None
        rebooted = bool(machine.boot_id) and owner.boot_id not in ("", machine.boot_id)
        if not ours or not (locked or rebooted):
            return None
        if is_old and _put_back(layout, path, owner.name):
            return None
        claimed = True
        return Claim(path, fd)
    finally:
        if not claimed:
            unlock(fd)
            os.close(fd)


def _put_back(layout: Layout, old: str, name: str) -> bool:
    """Whether the replaced checkpoint is in place again, because its successor never arrived."""
    try:
        target = layout.target(check_name(name))
    except UsageError:
        return True  # not written by us: leave it alone
    if os.path.lexists(target):
        return False
    try:
        landed(rename_noreplace, old, target)
    except FileExistsError:
        return False
    except UnsupportedCallError:
        landed(os.rename, old, target)
    flush_directory(layout.root)
    remove_owner(old)
    log.warning(
        "%s: replacing it was interrupted; the checkpoint that stood here is in place again", target
    )
    return True
