"""Removal of leftovers of saves and deletions that are proven dead.

A leftover is proven dead if its lock is free and its owner file names this host and this boot. On a
certainly local file system it is also dead if the lock is free and the owner file names this boot
and another host (a container on the same kernel), or if it names this host and another boot. A
shared attempt is dead once all its processes are. Leftovers that a takeover took from a writer are
dead unless locked. Everything else is kept for a person to remove, including claims and `aside-…`
directories, which were only moved.
"""

# Rule 1: a held lock keeps its directory, whatever the owner file says.
#   (test_a_held_lock_outweighs_an_owner_file_of_another_boot)
# Rule 2: a free lock proves death only among processes that share locks. Two machines with the same
#   host name (clones of an image) may share a network file system but not its locks (local_flock,
#   nolock): a live attempt of one then looks to the other as if from another boot, with a free
#   lock. (test_another_boot_proves_nothing_where_the_file_system_may_be_shared)
#   Nothing in a `fenced-…` directory can be published (stores/local/epochs.py, rule 2), so its
#   removal costs a fenced writer an error, never data.
#   (test_what_was_taken_from_a_writer_of_another_host_is_swept)
# Rule 3: a directory without a readable owner file may still be in the making: it is removed only
#   if it is empty, which its maker notices (stores/local/attempt.py, rule 4).
# Rule 4: nothing below a link is a leftover. In a run received from others, the control directory,
#   an epoch or a `fenced-…` may be a link to files that are not part of it. Links that another
#   process makes during a sweep are not handled. (test_files_behind_a_link_are_not_leftovers)
# Rule 5: renames in the root are flushed before bytes are removed, so power loss cannot bring back
#   a name whose files are gone. The flush comes after the lock of the leftover: until then, its
#   owner could exchange it with a checkpoint and die. (tests/crash/test_power.py;
#   test_others_delete_and_replace_while_leftovers_are_removed)

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from functools import partial

from asyncckpt.errors import StoreError, UsageError
from asyncckpt.log import logger
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.local.failures import reported
from asyncckpt.stores.local.locks import (
    LOCK_DEADLINE_S,
    Machine,
    leads_to,
    read_owner,
    remove_owner,
    root_lock,
    try_lock,
    unlock,
)
from asyncckpt.stores.local.notes import collect_notes
from asyncckpt.stores.local.owners import (
    is_abandoned,
    is_locked,
    owned_by_process,
    owner_files,
    remove_attempt,
    remove_dead_owner_files,
)
from asyncckpt.stores.local.posix import (
    UnsupportedCallError,
    flush_directory,
    landed,
    listing,
    names_in,
    opened,
    rename_noreplace,
)
from asyncckpt.stores.paths import FENCED, OWNER_SUFFIX, Layout, check_name

EPOCH = re.compile(r"epoch-[0-9]+")
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def sweep(layout: Layout, this_machine: Callable[[], Machine]) -> list[str]:
    """Remove leftovers that are proven dead and return their names. Blocking.

    Ends when another process replaces, deletes or sweeps; skips leftovers without permission.

    Raises:
        StoreError: a flush failed.
        OSError: removing one of them failed; all others were removed.
    """
    removed: list[str] = []
    is_dead = partial(_lock_dead, layout, this_machine())
    try:
        _clear(layout, _leftovers(layout), removed, is_dead, wait_s=0.0)
    except StoreError as error:
        if error.location != layout.lock:
            raise
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
    return removed


def _clear(
    layout: Layout,
    paths: Iterable[str],
    removed: list[str],
    is_dead: Callable[[str, contextlib.ExitStack, bool], bool],
    *,
    wait_s: float = LOCK_DEADLINE_S,
    dry_run: bool = False,
) -> None:
    """Remove dead leftovers, one by one, and add their names to `removed`.

    `is_dead` locks a leftover until the stack is closed and returns whether it is dead. It is
    called under the root's lock; its last argument is False without one.

    Raises:
        StoreError: another process holds the root's lock, or a flush failed.
        OSError: the first error of a leftover, once all others have been removed.
    """
    errors: list[OSError] = []
    for path in paths:
        with contextlib.ExitStack() as held:
            try:
                # The lock would make a file, and a dry run puts nothing back.
                lock = (
                    contextlib.nullcontext(False) if dry_run else root_lock(layout, wait_s=wait_s)
                )
                with lock as alone:
                    if not is_dead(path, held, alone):
                        continue
                    if not dry_run:
                        # Only now, see rule 5.
                        _flush(layout.root)
                        _flush(layout.control)
                # Without the root's lock, so that replacing and deleting need not wait.
                if not dry_run:
                    remove_attempt(path)
            except OSError as error:
                errors.append(error)
                continue
        removed.append(os.path.relpath(path, layout.control))
    if errors:
        raise min(errors, key=lambda error: error.errno in _READ_ONLY)


def _flush(directory: str) -> None:
    # A failure ends everything: a later flush would report success.
    with reported("flushing", directory):
        flush_directory(directory)


def _lock_dead(
    layout: Layout, machine: Machine, path: str, held: contextlib.ExitStack, alone: bool
) -> bool:
    """Lock a leftover until `held` is closed; return whether it is proven dead."""
    owner = read_owner(path)
    ours = owner is not None and (
        owner.machine.host == machine.host or owner.is_dead(machine, True, layout.root)
    )
    try:
        fd = held.enter_context(opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
    except FileNotFoundError:
        # A torn file is dead: owner files are written before their directories only under the lock.
        if ours or (owner is None and alone):
            remove_owner(path)
        remove_dead_owner_files(path, machine, layout.root)
        return False
    except OSError:
        return False  # not a directory, so not made by this library
    held.callback(unlock, fd)
    locked = try_lock(fd)
    if locked is False or not leads_to(path, fd):
        return False
    if owner is None:
        if locked:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(path)
                remove_owner(path)
                return True
        return False
    if os.path.basename(os.path.dirname(path)).startswith(FENCED):
        return not any(map(is_locked, owner_files(path))) and not put_back(layout, path)
    if not owner.is_dead(machine, locked, layout.root):
        return False
    return is_abandoned(path, fd, machine, layout.root) and not put_back(layout, path)


def collect(layout: Layout, older_than_s: float, *, dry_run: bool) -> list[str]:
    """Remove unlocked leftovers without writes for `older_than_s`; return their names. Blocking.

    The caller vouches that they are dead; a lock that is visible on this host keeps a leftover.

    Raises:
        StoreError: a flush failed, or another process replaces or deletes here.
        OSError: removing one of them failed; all others were removed.
    """

    def lock_old(path: str, held: contextlib.ExitStack, _: bool) -> bool:
        """Lock an old leftover until `held` is closed; return whether it may be removed.

        A replaced checkpoint whose successor never arrived is put back.
        """
        if time.time() - _written_s(path) < older_than_s:
            return False
        try:
            fd = held.enter_context(opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        except FileNotFoundError:
            # Owner files without a directory, unless another process has just removed them, too.
            owners = list(owner_files(path))
            left = any(map(os.path.lexists, (path + OWNER_SUFFIX, *owners)))
            return left and not any(map(is_locked, owners))
        except NotADirectoryError:  # not made by this library
            return False
        held.callback(unlock, fd)
        if try_lock(fd) is False or not leads_to(path, fd):
            return False
        if any(map(is_locked, owner_files(path))):
            return False
        return not put_back(layout, path, dry_run=dry_run)

    found = collect_notes(layout, older_than_s, dry_run=dry_run)
    _clear(layout, _leftovers(layout), found, lock_old, dry_run=dry_run)
    return found


def _written_s(path: str) -> float:
    """Return the time of the leftover's last write, in seconds since 1970; now if unknown."""
    newest = 0.0
    for top in (path, path + OWNER_SUFFIX, *owner_files(path)):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, os.lstat(top).st_mtime)
    for directory, _, names in os.walk(path):
        for name in (".", *names):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(directory, name)).st_mtime)
    return newest or time.time()


def tidy(layout: Layout) -> None:
    """Remove empty control directories, except those of claims. Blocking.

    See stores/local/epochs.py, rule 4.
    """
    unclaimed = os.path.basename(layout.epoch(0))
    with contextlib.suppress(OSError, StoreError):
        for name in names_in(layout.control):
            if name == unclaimed or name.startswith(FENCED):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(layout.control, name))
        left = os.listdir(layout.control)
        if left == [os.path.basename(layout.lock)]:
            with root_lock(layout, wait_s=0.0):
                if os.listdir(layout.control) == left:
                    os.unlink(layout.lock)
        if len(left) <= 1:
            os.rmdir(layout.control)


def _leftovers(layout: Layout) -> list[str]:
    """Return the paths of all attempts, trash and replaced checkpoints.

    Raises:
        OSError: the control directory cannot be listed, or is a link.
    """
    paths: list[str] = []
    try:
        names = names_in(layout.control)
    except FileNotFoundError:
        return []
    for name in names:
        path = os.path.join(layout.control, name)
        if EPOCH.fullmatch(name) or name.startswith(FENCED):
            paths += [os.path.join(path, attempt) for attempt in listing(path)]
        elif name.startswith(("trash-", "old-")):
            paths.append(path)
    # Of an owner file, the directory counts only if it is gone; otherwise it is listed itself.
    # (test_a_stray_owner_file_makes_no_leftover)
    owned = {path: owned_by_process(path) or path.removesuffix(OWNER_SUFFIX) for path in paths}
    return list(
        dict.fromkeys(
            directory
            for path, directory in owned.items()
            if directory == path or not os.path.lexists(directory)
        )
    )


def put_back(layout: Layout, old: str, *, dry_run: bool = False) -> bool:
    """Put a leftover back if it is a replaced checkpoint without a successor. Blocking.

    Returns whether it must not be removed: it was put back, or its name is unknown.

    Raises:
        OSError: it cannot be inspected or renamed.
    """
    directory, name = os.path.split(old)
    # In epoch 0, `old-…` is an attempt at a checkpoint of such a name.
    if not name.startswith("old-") or os.path.basename(directory) == "epoch-0":
        return False
    owner = read_owner(old)
    if owner is None:
        return True  # its name is unknown, and it may be the only copy
    try:
        target = layout.target(check_name(owner.name))
    except UsageError:
        return True  # not written by this library
    if os.path.lexists(target):
        return False
    try:
        os.lstat(os.path.join(old, RECORD_NAME))
    except FileNotFoundError:  # it had a successor: see `forget_replaced`
        return False
    if dry_run:
        return True
    try:
        landed(rename_noreplace, old, target)
    except FileExistsError:
        return False
    except UnsupportedCallError:
        landed(os.rename, old, target)
    _flush(layout.root)
    remove_owner(old)
    logger.warning("%s: replacing it was interrupted; the previous checkpoint was put back", target)
    return True


def forget_replaced(layout: Layout, name: str) -> None:
    """Remove the records of replaced checkpoints of this name, durably. Blocking.

    Without them `put_back` puts nothing back once their successor is deleted or replaced itself.
    The caller holds the root's lock, and the successor exists.

    Raises:
        OSError: a record cannot be removed.
    """
    parents = [
        os.path.join(layout.control, directory)
        for directory in ("", *listing(layout.control))
        if not directory or (directory.startswith(("epoch-", FENCED)) and directory != "epoch-0")
    ]
    prefix = os.path.basename(layout.leftover("old", name, ""))
    for parent in parents:
        for found in listing(parent):
            old = os.path.join(parent, found)
            if not found.startswith(prefix) or not os.path.isdir(old):
                continue
            owner = read_owner(old)
            if owner is not None and owner.name == name:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(old, RECORD_NAME))
                    flush_directory(old)
